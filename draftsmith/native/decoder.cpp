#include "decoder.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace draftsmith {

Decoder::Decoder(Shape shape, std::vector<Layer> layers, std::shared_ptr<Packed> embedding, Linear head,
                 Floats final_norm, CacheType cache_type, std::shared_ptr<Pool> pool, const Kernels* kernels)
    : shape_(shape),
      layers_(std::move(layers)),
      embedding_(std::move(embedding)),
      head_(std::move(head)),
      final_norm_(std::move(final_norm)),
      cache_type_(cache_type),
      pool_(std::move(pool)),
      kernels_(kernels),
      padded_width_(round_up(shape.width, GROUP)),
      padded_heads_(round_up(shape.num_heads * shape.head_dim, GROUP)),
      padded_mlp_(round_up(shape.mlp_width, GROUP)),
      workers_(static_cast<std::size_t>(pool_->threads())) {
    int num_kinds = 1;
    for (Layer& layer : layers_) {
        for (Floats* norm : {&layer.attention_norm, &layer.mlp_norm, &layer.attention_out_norm, &layer.mlp_out_norm}) {
            pad(*norm, padded_width_);
        }
        pad(layer.output.bias, padded_width_);
        pad(layer.down.bias, padded_width_);
        pad_halves(layer.gate_up.bias, shape.mlp_width, round_up(shape.mlp_width, TILE));
        num_kinds = std::max(num_kinds, layer.kind + 1);
    }
    pad(final_norm_, padded_width_);
    settle();
    rotations_.resize(static_cast<std::size_t>(num_kinds));
}

// Puts all weights into one piece of memory, in the order in which a step reads them.
void Decoder::settle() {
    std::vector<Packed*> order;
    for (Layer& layer : layers_) {
        for (Linear* linear : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down}) {
            for (auto& part : linear->parts) order.push_back(part.get());
        }
    }
    order.push_back(head_.parts.front().get());
    if (head_.parts.front() != embedding_) order.push_back(embedding_.get());
    std::size_t total = 0;
    for (const Packed* packed : order) total += packed->bytes();
    const auto pages = std::make_shared<Pages>(total);
    std::size_t offset = 0;
    for (Packed* packed : order) {
        const std::size_t size = packed->bytes();
        packed->move_into(pages, offset);
        offset += size;
    }
}

void Decoder::set_rotation(int kind, const float* cosines, const float* sines, int positions) {
    rotations_.at(static_cast<std::size_t>(kind)) = {cosines, sines, positions};
}

std::size_t Decoder::weight_bytes() const {
    std::size_t total = final_norm_.size() * sizeof(float);
    const auto add_linear = [&](const Linear& linear) {
        for (const auto& part : linear.parts) total += part->bytes();
        total += linear.bias.size() * sizeof(float);
    };
    for (const Layer& layer : layers_) {
        for (const Linear* linear : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down}) add_linear(*linear);
        for (const Floats* norm : {&layer.attention_norm, &layer.mlp_norm, &layer.attention_out_norm,
                                   &layer.mlp_out_norm, &layer.query_norm, &layer.key_norm}) {
            total += norm->size() * sizeof(float);
        }
    }
    add_linear(head_);
    if (head_.parts.front() != embedding_) total += embedding_->bytes();
    return total;
}

// ---- before the threads start -------------------------------------------------------------------

void Decoder::plan_group(const Group& group, int group_index, int first_row) {
    for (int i = 0; i < group.num_rows; ++i) {
        const int parent = group.parents[i];
        if (parent < -1 || parent >= i) throw std::invalid_argument("a row's parent must stand before it");
        const Row* above = parent < 0 ? nullptr : &rows_[static_cast<std::size_t>(first_row + parent)];
        const int position = above == nullptr ? group.committed : above->position + 1;
        const int before = above == nullptr ? group.committed : above->contiguous;
        const bool is_in_place = before == position && group.committed + i == position;
        const int contiguous = is_in_place ? position + 1 : before;
        const int path_start = static_cast<int>(paths_.size());
        paths_.resize(paths_.size() + static_cast<std::size_t>(position + 1 - contiguous));
        int row = i;
        for (int p = position; p >= contiguous; --p) {
            paths_[static_cast<std::size_t>(path_start + p - contiguous)] = group.committed + row;
            row = group.parents[row];
        }
        rows_.push_back({group_index, position, first_row, contiguous, path_start, 0, 0});
    }
}

void Decoder::plan(const Step& step) {
    rows_.clear();
    paths_.clear();
    for (std::size_t i = 0; i < step.groups.size(); ++i) {
        plan_group(step.groups[i], static_cast<int>(i), static_cast<int>(rows_.size()));
    }
    num_rows_ = static_cast<int>(rows_.size());
    if (rows_.size() != step.tokens.size()) throw std::invalid_argument("groups and tokens differ in rows");
    int longest = 0;
    for (const Row& row : rows_) longest = std::max(longest, row.position + 1);
    for (const std::int32_t token : step.tokens) {
        if (token < 0 || token >= embedding_->outputs()) {
            throw std::invalid_argument("token " + std::to_string(token) + " is outside the vocabulary of " +
                                        std::to_string(embedding_->outputs()));
        }
    }
    for (const Rotation& rotation : rotations_) {
        if (rotation.positions < longest) throw std::invalid_argument("a position has no rotation");
    }
    const int blocks = num_blocks(num_rows_, kernels_->max_block_rows);
    for (int block = 0; block < blocks; ++block) {
        const int start = block_start(block, blocks, num_rows_), end = block_start(block + 1, blocks, num_rows_);
        for (int row = start; row < end; ++row) {
            rows_[static_cast<std::size_t>(row)].block_start = start;
            rows_[static_cast<std::size_t>(row)].block_rows = end - start;
        }
    }
    grow(hidden_, at(num_rows_, padded_width_));
    grow(queries_, at(num_rows_, padded_heads_));
    grow(mixed_, at(num_rows_, padded_heads_));
    grow(projected_, at(num_rows_, padded_width_));
    const int groups = std::max({padded_width_, padded_heads_, padded_mlp_}) / GROUP;
    const int most = std::max(num_rows_, static_cast<int>(step.logit_rows.size()));
    shared_.resize(most, groups);
    mixed_codes_.resize(num_rows_, padded_heads_ / GROUP);
    mlp_codes_.resize(num_rows_, padded_mlp_ / GROUP);
    for (Worker& worker : workers_) {
        worker.quantised.resize(std::min(most, kernels_->max_block_rows), groups);
        worker.thread = static_cast<int>(&worker - workers_.data());
        grow(worker.normed, static_cast<std::size_t>(padded_width_));
        grow(worker.part, std::max(at(most, 2 * GROUP), at(MOST_QUERIES, shape_.head_dim)));
        grow(worker.scratch, std::max(attention_scratch(MOST_QUERIES, longest, shape_.head_dim),
                                      at(num_rows_, shape_.head_dim)));
    }
}

void Decoder::score(const Step& step) {
    if (step.groups.empty()) return;
    plan(step);
    pool_->run([&](int thread) { work(step, thread); });
}

}  // namespace draftsmith
