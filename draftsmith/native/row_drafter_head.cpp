// The last phase of a row drafter's pass: logits, and what of them is drafted.
// Called by row_drafter_step.cpp on every thread. Invariant: see row_drafter.hpp; a draw is the one that core/draw.py
// makes of the same logits.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>

#include "elementary.hpp"
#include "noise.hpp"
#include "row_drafter.hpp"
#include "row_kernels.hpp"
#include "sampling.hpp"

namespace draftsmith {

// Logits of all rows with an output, and what the rows below them get.
void RowDrafter::head(const Pass& pass, Worker& worker) {
    const int num_rows = pass.num_outputs();
    Quantised& input = num_rows <= FEW_ROWS ? worker.all : shared_;
    visit(num_rows, worker, [&](int row, bool is_mine) {
        const float* output = &hidden_[at(row, padded_width_)];
        const float* normed = output;
        if (!weights_.final_norm.empty()) {
            kernels_->norm(output, weights_.final_norm.data(), shape_.width, padded_width_, shape_.norm_eps,
                           worker.normed.data());
            normed = worker.normed.data();
        }
        quantise(normed, 0, padded_width_, row, num_rows, input, padded_width_ / GROUP);
        if (!is_mine) return;
        std::memcpy(pass.rows[static_cast<std::size_t>(row + pass.num_filling)].state,
                    shape_.feeds_normed ? normed : output, at(padded_width_, sizeof(float)));
    });
    pool_->each(worker.thread, num_stretches(), 1, [&](int stretch) { head_stretch(pass, stretch, input, worker); });
    pool_->barrier();
}

void RowDrafter::head_stretch(const Pass& pass, int stretch, Quantised& input, Worker& worker) {
    const Packed& weights = *weights_.head.parts.front();
    const int num_rows = pass.num_outputs(), first = stretch * STRETCH, end = std::min(first + STRETCH, shape_.num_ids);
    const bool is_plain = shape_.logit_cap == 0.0f && weights_.head.bias.empty();
    const int whole = is_plain ? (end - first) / TILE : 0;
    multiply(weights, first / TILE, whole, input, num_rows, logits_ + first, logit_stride_);
    for (int start = first + whole * TILE; start < end; start += TILE) {
        multiply(weights, start / TILE, 1, input, num_rows, worker.part.data(), TILE);
        for (int row = 0; row < num_rows; ++row) {
            float* products = &worker.part[at(row, TILE)];
            if (!weights_.head.bias.empty()) add_tile(products, &weights_.head.bias[static_cast<std::size_t>(start)]);
            if (shape_.logit_cap != 0.0f) kernels_->soft_cap(products, shape_.logit_cap);
            std::memcpy(logits_ + at(row, logit_stride_) + start, products,
                        at(std::min(TILE, end - start), sizeof(float)));
        }
    }
    for (int row = 0; pass.is_chain && row < num_rows; ++row) {
        best_[at(row, num_stretches()) + static_cast<std::size_t>(stretch)] =
            look_at(logits_ + at(row, logit_stride_), first, end - first, worker);
    }
}

RowDrafter::Best RowDrafter::look_at(const float* logits, int first, int count, Worker& worker) const {
    const auto size = static_cast<std::size_t>(count);
    const std::size_t index = argmax(logits + first, size);
    const float most = logits[at(first, 1) + index];
    if (most == -std::numeric_limits<float>::infinity()) return {most, first, 0.0};  // nothing here is possible
    // Outputs that are no numbers draft something all the same; with probability 0.
    if (!std::isfinite(most)) return {-std::numeric_limits<float>::infinity(), first, std::nan("")};
    const double sum = weigh(logits + first, size, Weighing<float>{most, 1.0f, 37}, worker.powers.data());
    return {most, first + static_cast<std::int32_t>(index), sum};
}

// Of all a row's outputs, with the sum over them.
RowDrafter::Best RowDrafter::likeliest(int row) const {
    const Best* stretches = &best_[at(row, num_stretches())];
    Best best = stretches[0];
    for (int i = 1; i < num_stretches(); ++i) {
        if (stretches[i].most > best.most) best = stretches[i];
    }
    double total = 0.0;
    for (int i = 0; i < num_stretches(); ++i) {
        total += stretches[i].sum * static_cast<double>(std::exp(stretches[i].most - best.most));
    }
    return {best.most, best.index, total};
}

// The winners of all rows that are drawn: of each stretch where nothing is truncated, so that threads share the noise,
// which is what takes the time; else of the whole row, which truncation makes short.
void RowDrafter::draw(const Pass& pass, int step, Worker& worker) {
    pool_->each(worker.thread, pass.num_outputs() * num_stretches(), 1, [&](int share) {
        drawn_[static_cast<std::size_t>(share)] = draw_in(pass, share / num_stretches(), share % num_stretches(), step);
    });
    pool_->barrier();
}

RowDrafter::Drawn RowDrafter::draw_in(const Pass& pass, int row, int stretch, int step) const {
    const std::optional<Draw>& draw = draws_[group_of(pass, row)];
    if (!draw || (draw->is_truncated() && stretch > 0)) return {};
    const bool is_whole = draw->is_truncated();
    const int first = stretch * STRETCH, end = is_whole ? shape_.num_ids : std::min(first + STRETCH, shape_.num_ids);
    const Best best = is_whole ? likeliest(row) : best_[at(row, num_stretches()) + static_cast<std::size_t>(stretch)];
    if (!std::isfinite(best.most) || !std::isfinite(best.sum)) return {};  // outputs that are no numbers
    const float* logits = logits_ + at(row, logit_stride_);
    const std::int32_t* ids = weights_.ids.data();
    const double floor = static_cast<double>(best.most) + draw->reach;
    const Noise noise(draw->seed, draw->stream, draw->position + static_cast<std::uint64_t>(step), 0);
    try {
        ::draftsmith::Row<float> kept(logits + first, static_cast<std::size_t>(end - first),
                                      static_cast<std::size_t>(best.index - first),
                                      {draw->inverse_temperature, draw->top_k, draw->top_p, floor}, ids + first);
        const auto token = static_cast<std::int32_t>(kept.sample(noise));
        const auto index = static_cast<std::int32_t>(std::lower_bound(ids + first, ids + end, token) - ids);
        const double gumbel = gumbel_of<double, std::uint64_t>(noise.word(static_cast<std::uint64_t>(token)));
        return {static_cast<double>(logits[index]) * draw->inverse_temperature + gumbel, index};
    } catch (const std::bad_alloc&) {
        return {};  // no room to truncate in: the likeliest is drafted, and other threads are not left waiting
    }
}

// Whether any chain goes on. Every thread for itself, in one order, so that all come to the same.
bool RowDrafter::pick(const Pass& pass, int step, Worker& worker) {
    bool goes_on = false;
    for (int row = 0; row < pass.num_outputs(); ++row) {
        const Best best = likeliest(row);
        std::int32_t index = best.index;
        double score = -std::numeric_limits<double>::infinity();
        for (std::size_t i = at(row, num_stretches()); !draws_.empty() && i < at(row + 1, num_stretches()); ++i) {
            if (drawn_[i].score > score) {
                score = drawn_[i].score;
                index = drawn_[i].index;
            }
        }
        const std::size_t group = group_of(pass, row);
        const std::int32_t token = weights_.ids[static_cast<std::size_t>(index)];
        const float prob = best.sum > 0.0 ? static_cast<float>(1.0 / best.sum) : 0.0f;  // NaN is not above 0
        const bool is_on = worker.reach[group] >= least_;
        worker.picked[group] = token;
        worker.reach[group] *= prob;
        goes_on |= worker.reach[group] >= least_;
        if (worker.thread != 0) continue;
        const auto place = static_cast<std::size_t>(first_picks_[group] + step);
        picks_[place] = token;
        probs_[place] = prob;
        if (is_on) chain_lengths_[group] = step + 1;
    }
    return goes_on;
}

}  // namespace draftsmith
