// A row drafter's weights, its sequences, and how a call runs and ends; row_drafter_plan.cpp says what it works out.
// Invariant: a sequence's counts change in `finish`, which cannot fail, and by what the caller asks of it alone.
#include "row_drafter.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

namespace draftsmith {
namespace {

constexpr int FIRST_CAPACITY = 64;

// Each part of `size` from a multiple of `padded` on.
void pad_parts(Floats& values, int size, int padded) {
    Floats parts(values.size() / static_cast<std::size_t>(size) * static_cast<std::size_t>(padded), 0.0f);
    for (std::size_t i = 0; i < values.size(); ++i) {
        parts[i / static_cast<std::size_t>(size) * static_cast<std::size_t>(padded) + i % static_cast<std::size_t>(size)] = values[i];
    }
    values = std::move(parts);
}

}  // namespace

RowDrafter::RowDrafter(RowShape shape, RowWeights weights, bool owns_head, CacheType cache_type,
                       std::shared_ptr<Pool> pool, const Kernels* kernels)
    : shape_(shape),
      weights_(std::move(weights)),
      cache_type_(cache_type),
      pool_(std::move(pool)),
      kernels_(kernels),
      padded_width_(round_up(shape.width, GROUP)),
      padded_pair_(round_up(shape.embedding_width + shape.width, GROUP)),
      padded_input_(weights_.fuse.parts.empty() ? padded_pair_ : padded_width_),
      padded_heads_(round_up(shape.num_heads * shape.head_dim, GROUP)),
      padded_mlp_(round_up(shape.mlp_width, GROUP)),
      padded_features_(round_up(shape.feature_width, GROUP)),
      padded_ids_(round_up(shape.num_ids, TILE)),
      has_ascending_ids_(std::is_sorted(weights_.ids.begin(), weights_.ids.end())),
      workers_(static_cast<std::size_t>(pool_->threads())) {
    for (Floats* norm : {&weights_.feature_norm, &weights_.attention_norm, &weights_.mlp_norm, &weights_.final_norm}) {
        pad(*norm, padded_width_);
    }
    for (Linear* linear : {&weights_.reduce, &weights_.fuse, &weights_.output, &weights_.down}) {
        pad(linear->bias, padded_width_);
    }
    pad_parts(weights_.tap_norms, shape.embedding_width, round_up(shape.embedding_width, TILE));
    pad(weights_.embedding_norm, round_up(shape.embedding_width, TILE));
    pad(weights_.head.bias, padded_ids_);
    pad_halves(weights_.gate_up.bias, shape.mlp_width, round_up(shape.mlp_width, TILE));
    settle(owns_head);
}

// Puts the weights, the target's apart, into one piece of memory in the order in which a step reads them.
void RowDrafter::settle(bool owns_head) {
    std::vector<std::shared_ptr<Packed>*> order;
    for (Linear* linear : {&weights_.reduce, &weights_.fuse, &weights_.qkv, &weights_.output, &weights_.gate_up,
                           &weights_.down, &weights_.head}) {
        if (linear == &weights_.head && !owns_head) continue;
        for (auto& part : linear->parts) order.push_back(&part);
    }
    std::size_t total = 0;
    for (const auto* packed : order) total += (*packed)->bytes();
    const auto pages = std::make_shared<Pages>(total);
    std::size_t offset = 0;
    for (auto* packed : order) {
        // The caller's object may serve others, so what moves is a copy.
        *packed = std::make_shared<Packed>(**packed);
        (*packed)->move_into(pages, offset);
        offset += (*packed)->bytes();
    }
    weight_bytes_ = total;
}

void RowDrafter::set_rotation(const float* cosines, const float* sines, int positions) {
    check_idle();
    const std::size_t size = at(positions, shape_.head_dim / 2);
    Floats new_cosines(cosines, cosines + size), new_sines(sines, sines + size);
    cosines_ = std::move(new_cosines);
    sines_ = std::move(new_sines);
    num_positions_ = positions;
}

std::size_t RowDrafter::bytes_per_row() const {
    return 2 * at(shape_.num_kv_heads, shape_.head_dim) * element_bytes();
}

// ---- sequences ----------------------------------------------------------------------------------

int RowDrafter::num_rows(std::int64_t sequence) const {
    const auto found = sequences_.find(sequence);
    return found == sequences_.end() ? 0 : found->second.num_true;
}

bool RowDrafter::knows_last(std::int64_t sequence) const {
    const auto found = sequences_.find(sequence);
    return found != sequences_.end() && found->second.knows_last;
}

int RowDrafter::num_drafted(std::int64_t sequence) const {
    const auto found = sequences_.find(sequence);
    return found == sequences_.end() ? 0 : static_cast<int>(found->second.drafted.size());
}

void RowDrafter::truncate(std::int64_t sequence, int num_rows) {
    check_idle();
    if (num_rows < 0) throw std::invalid_argument("a sequence cannot be cut to fewer than 0 rows");
    const auto found = sequences_.find(sequence);
    if (found == sequences_.end() || found->second.num_true <= num_rows) return;
    found->second.num_true = num_rows;
    found->second.drafted.clear();
    found->second.knows_last = found->second.is_begun = false;
}

void RowDrafter::fork(std::int64_t source, std::int64_t copy, int num_rows) {
    check_idle();
    if (source == copy) throw std::invalid_argument("a sequence cannot be forked onto itself");
    if (num_rows >= 0 && this->num_rows(source) == 0) {  // nothing known, nothing copied
        sequences_.erase(copy);
        return;
    }
    if (num_rows < 0 || num_rows > this->num_rows(source)) {
        throw std::invalid_argument("cannot fork " + std::to_string(num_rows) + " rows of " +
                                    std::to_string(this->num_rows(source)));
    }
    Sequence made;
    if (num_rows > 0) {
        const Sequence& from = sequences_.at(source);
        reserve(made, num_rows);
        for (int plane = 0; plane < 2 * shape_.num_kv_heads; ++plane) {
            std::memcpy(&made.rows[plane_bytes(made.capacity) * static_cast<std::size_t>(plane)],
                        &from.rows[plane_bytes(from.capacity) * static_cast<std::size_t>(plane)],
                        plane_bytes(round_up(num_rows, KEY_BLOCK)));
        }
        made.num_true = num_rows;
        made.knows_last = from.knows_last && num_rows == from.num_true;
        made.feature = from.feature;
        made.token = from.token;
    }
    sequences_[copy] = std::move(made);
}

void RowDrafter::forget(std::int64_t sequence) {
    check_idle();
    sequences_.erase(sequence);
}

void RowDrafter::reserve(Sequence& sequence, int num_rows) {
    if (num_rows <= sequence.capacity) return;
    const int capacity = round_up(std::max({num_rows, 2 * sequence.capacity, FIRST_CAPACITY}), KEY_BLOCK);
    const auto planes = static_cast<std::size_t>(2 * shape_.num_kv_heads);
    Lines<std::uint8_t> rows(plane_bytes(capacity) * planes);
    const int used = round_up(sequence.num_true + static_cast<int>(sequence.drafted.size()), KEY_BLOCK);
    for (std::size_t plane = 0; used > 0 && plane < planes; ++plane) {
        std::memcpy(&rows[plane_bytes(capacity) * plane], &sequence.rows[plane_bytes(sequence.capacity) * plane],
                    plane_bytes(used));
    }
    sequence.rows = std::move(rows);
    sequence.capacity = capacity;
}

// ---- a call -------------------------------------------------------------------------------------

void RowDrafter::run() {
    try {
        if (!passes_.empty()) pool_->run([&](int thread) { work(thread); });
    } catch (...) {
        running_in_ = 0;
        throw;
    }
}

// Needs no memory: `drafted` has been given room.
void RowDrafter::finish() {
    for (std::size_t i = 0; i < changes_.size(); ++i) {
        Change& change = changes_[i];
        change.sequence->num_true = change.num_true;
        change.sequence->knows_last = change.knows_last;
        change.sequence->is_begun = change.is_begun;
        auto& drafted = change.sequence->drafted;
        // Of a chain that ended early only the rows that were worked out are there.
        const auto num_new = chain_lengths_.empty() ? change.drafted.size()
                                                    : static_cast<std::size_t>(std::max(chain_lengths_[i] - 1, 0));
        drafted.insert(drafted.end(), change.drafted.begin(), change.drafted.begin() + static_cast<std::ptrdiff_t>(num_new));
    }
    running_in_ = 0;
}

}  // namespace draftsmith
