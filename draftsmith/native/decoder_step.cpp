// What each thread does in a step: layer by layer, phase by phase, meeting the others at barriers.
// Called by Decoder::score. Invariant: see decoder.hpp; threads share out whole outputs, never a sum.
#include <algorithm>
#include <cstring>

#include "decoder.hpp"

namespace draftsmith {
namespace {

std::size_t element_bytes(CacheType type) { return type == CacheType::FLOAT ? 4 : 2; }

}  // namespace

void Decoder::work(const Step& step, int thread) {
    Worker& worker = workers_[static_cast<std::size_t>(thread)];
    embed(step, thread);
    pool_->barrier();
    for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
        if (thread == 0) take_tap(step, static_cast<int>(layer));
        attention(layers_[layer], step, worker);
        feed_forward(layers_[layer], worker);
    }
    if (thread == 0) take_tap(step, static_cast<int>(layers_.size()));
    head(step, worker);
}

void Decoder::embed(const Step& step, int thread) {
    pool_->each(thread, num_rows_, 1, [&](int row) {
        float* hidden = &hidden_[at(row, padded_width_)];
        embedding_->dequantise(step.tokens[static_cast<std::size_t>(row)], hidden);
        for (int i = 0; i < shape_.width; ++i) hidden[i] *= shape_.embedding_scale;
        for (int i = shape_.width; i < padded_width_; ++i) hidden[i] = 0.0f;
    });
}

void Decoder::take_tap(const Step& step, int layer) {
    for (const Tap& tap : step.taps) {
        if (tap.layer != layer) continue;
        for (int row = 0; row < num_rows_; ++row) {
            std::memcpy(tap.rows + at(row, shape_.width), &hidden_[at(row, padded_width_)],
                        static_cast<std::size_t>(shape_.width) * sizeof(float));
        }
    }
}

// Rows x[index(i)] [padded], normed if there is a weight, quantised block by block. Few rows are prepared by every
// thread for itself, which is cheaper than to meet at a barrier; more rows of one block are cut by groups of inputs.
Quantised& Decoder::prepare(const float* x, const std::int32_t* index, int padded, int num_rows,
                            const Floats* norm_weight, Worker& worker) {
    const int blocks = num_blocks(num_rows, kernels_->max_block_rows), threads = pool_->threads();
    const bool is_alone = num_rows <= FEW_ROWS || threads == 1;
    Quantised& target = is_alone && blocks == 1 ? worker.quantised : shared_;
    const auto prepare_block = [&](int block, int cut, int cuts) {
        const int start = block_start(block, blocks, num_rows), end = block_start(block + 1, blocks, num_rows);
        const int groups = padded / GROUP;
        Activations activations = target.block(start, end - start, groups);
        for (int row = start; row < end; ++row) {
            const float* values = x + at(index == nullptr ? row : index[row], padded);
            if (norm_weight != nullptr) {
                kernels_->norm(values, norm_weight->data(), shape_.width, padded, shape_.norm_eps, worker.normed.data());
                values = worker.normed.data();
            }
            kernels_->quantise(values, groups * cut / cuts, groups * (cut + 1) / cuts, row - start, activations);
        }
    };
    if (blocks > 1) {
        pool_->each(worker.thread, blocks, 1, [&](int block) { prepare_block(block, 0, 1); });
    } else if (is_alone) {
        prepare_block(0, 0, 1);
        return target;
    } else {
        prepare_block(0, worker.thread, threads);
    }
    pool_->barrier();
    return target;
}

void Decoder::multiply(const Packed& weights, int first_tile, int num_tiles, Quantised& input, int num_rows, float* out,
                       int stride) {
    multiply_blocks(*kernels_, weights, first_tile, num_tiles, input, num_rows, out, stride);
}

int Decoder::share_of(int total) const { return std::max(1, total / (pool_->threads() * 16)); }

void Decoder::attention(const Layer& layer, const Step& step, Worker& worker) {
    const int head_tiles = shape_.head_dim / TILE;
    Quantised& input = prepare(hidden_.data(), nullptr, padded_width_, num_rows_, &layer.attention_norm, worker);
    pool_->each(worker.thread, shape_.num_heads + 2 * shape_.num_kv_heads, 1, [&](int head) {
        const int part = head < shape_.num_heads ? 0 : head < shape_.num_heads + shape_.num_kv_heads ? 1 : 2;
        const int place = part == 0 ? head : (head - shape_.num_heads) % shape_.num_kv_heads;
        const Packed& weights = *layer.qkv.parts[static_cast<std::size_t>(part)];
        float* rows = worker.scratch.data();
        multiply(weights, place * head_tiles, head_tiles, input, num_rows_, rows, shape_.head_dim);
        finish_head(layer, step, head, rows);
    });
    pool_->barrier();
    project(layer.output, layer.attention_out_norm, attend(layer, step, worker), worker);
}

// Bias, norm and rotation of one head's rows; queries are kept, keys and values go to the cache.
void Decoder::finish_head(const Layer& layer, const Step& step, int head, float* rows) {
    const int dim = shape_.head_dim, num_heads = shape_.num_heads, num_kv = shape_.num_kv_heads;
    const bool is_query = head < num_heads, is_value = head >= num_heads + num_kv;
    const float* bias = layer.qkv.bias.empty() ? nullptr : &layer.qkv.bias[at(head, dim)];
    const Floats& norm = is_query ? layer.query_norm : layer.key_norm;
    const Rotation& rotation = rotations_[static_cast<std::size_t>(layer.kind)];
    for (int row = 0; row < num_rows_; ++row) {
        float* values = rows + at(row, dim);
        const Row& info = rows_[static_cast<std::size_t>(row)];
        if (bias != nullptr) {
            for (int i = 0; i < dim; ++i) values[i] += bias[i];
        }
        if (!is_value) {
            if (!norm.empty()) kernels_->norm(values, norm.data(), dim, dim, shape_.norm_eps, values);
            const std::size_t turn = at(info.position, dim / 2);
            kernels_->rotate(values, rotation.cosines + turn, rotation.sines + turn, dim,
                             is_query ? shape_.attention_scale : 1.0f);
        }
        if (is_query) {
            std::memcpy(&queries_[at(row, padded_heads_) + at(head, dim)], values,
                        static_cast<std::size_t>(dim) * sizeof(float));
            continue;
        }
        const Group& group = step.groups[static_cast<std::size_t>(info.group)];
        const Slots& slots = group.slots[layer.kind];
        const int kv_head = (head - num_heads) % num_kv;
        const std::int64_t plane = (static_cast<std::int64_t>(layer.place) * 2 + (is_value ? 1 : 0)) * num_kv + kv_head;
        const std::int64_t slot = group.committed + (row - info.first_row) - slots.first;
        std::uint8_t* place = slots.data + element_bytes(cache_type_) * static_cast<std::size_t>(plane * slots.capacity * dim);
        kernels_->store(cache_type_, !is_value, place, slot, values, dim);
    }
}

// Quantises `size` inputs of a row, whole groups, where they were made: codes are a quarter of the bytes that other
// threads would have to fetch.
void Decoder::quantise_part(const float* values, int first_input, int size, int row, Quantised& target, int groups) {
    const Row& info = rows_[static_cast<std::size_t>(row)];
    Activations activations = target.block(info.block_start, info.block_rows, groups);
    const int first = first_input / GROUP;
    kernels_->quantise(values - first * GROUP, first, first + size / GROUP, row - info.block_start, activations);
}

// Returns the quantised outputs of all heads; ends at a barrier.
Quantised& Decoder::attend(const Layer& layer, const Step& step, Worker& worker) {
    const int dim = shape_.head_dim, num_kv = shape_.num_kv_heads, group_size = shape_.num_heads / num_kv;
    const int pairs = num_rows_ * shape_.num_heads;
    const bool is_whole = dim % GROUP == 0;
    // The heads of a group share keys and values: to take them apart costs more than uneven shares.
    int most = std::clamp(pairs / (4 * pool_->threads()), std::min(group_size, MOST_QUERIES), MOST_QUERIES);
    if (most > group_size) most = std::min(round_up(most, 6), MOST_QUERIES);  // the kernels take six at a time
    // Shares: for each sequence and kv head, its (row, head) pairs in cuts of `most`.
    const auto cuts_of = [&](const Group& group) { return (group.num_rows * group_size + most - 1) / most; };
    int total = 0;
    for (const Group& group : step.groups) total += cuts_of(group) * num_kv;
    pool_->each(worker.thread, total, 1, [&](int share) {
        std::size_t index = 0;
        int first_row = 0;
        while (share >= cuts_of(step.groups[index]) * num_kv) {
            share -= cuts_of(step.groups[index]) * num_kv;
            first_row += step.groups[index++].num_rows;
        }
        const Group& group = step.groups[index];
        const Slots& slots = group.slots[layer.kind];
        const int kv_head = share % num_kv, start = share / num_kv * most;
        const int end = std::min(start + most, group.num_rows * group_size);
        const std::size_t bytes = element_bytes(cache_type_) * at(slots.capacity, dim);
        const std::uint8_t* planes = slots.data + bytes * at(layer.place * 2 * num_kv + kv_head, 1);
        const Attention shared{planes, planes + bytes * static_cast<std::size_t>(num_kv), slots.first, dim,
                               shape_.attention_cap, worker.scratch.data()};
        Query queries[MOST_QUERIES];
        const auto row_of = [&](int pair) { return first_row + pair % group.num_rows; };
        const auto head_of = [&](int pair) { return kv_head * group_size + pair / group.num_rows; };
        for (int pair = start; pair < end; ++pair) {
            const int row = row_of(pair);
            const Row& info = rows_[static_cast<std::size_t>(row)];
            const int first = layer.window == 0 ? 0 : std::max(0, info.position - layer.window + 1);
            const std::size_t place = at(row, padded_heads_) + at(head_of(pair), dim);
            float* output = is_whole ? &worker.part[at(pair - start, dim)] : &mixed_[place];
            queries[pair - start] = {&queries_[place], output, first, info.contiguous, info.position + 1,
                                     paths_.data() + info.path_start};
        }
        kernels_->attend(cache_type_, shared, queries, end - start);
        for (int pair = start; is_whole && pair < end; ++pair) {
            quantise_part(&worker.part[at(pair - start, dim)], head_of(pair) * dim, dim, row_of(pair), mixed_codes_,
                          padded_heads_ / GROUP);
        }
    });
    pool_->barrier();
    if (is_whole) return mixed_codes_;
    return prepare(mixed_.data(), nullptr, padded_heads_, num_rows_, nullptr, worker);
}

// Adds a linear layer's output to the hidden rows, normed before that where there is a norm for it.
void Decoder::project(const Linear& linear, const Floats& out_norm, Quantised& input, Worker& worker) {
    const Packed& weights = *linear.parts.front();
    float* target = out_norm.empty() ? hidden_.data() : projected_.data();
    pool_->each(worker.thread, weights.tiles(), share_of(weights.tiles()), [&](int tile) {
        const float* bias = linear.bias.empty() ? nullptr : &linear.bias[at(tile, TILE)];
        multiply(weights, tile, 1, input, num_rows_, worker.part.data(), TILE);
        for (int row = 0; row < num_rows_; ++row) {
            float* products = &worker.part[at(row, TILE)];
            if (bias != nullptr) add_tile(products, bias);
            float* values = target + at(row, padded_width_) + tile * TILE;
            if (out_norm.empty()) add_tile(values, products);
            else std::memcpy(values, products, TILE * sizeof(float));
        }
    });
    pool_->barrier();
    if (out_norm.empty()) return;
    pool_->each(worker.thread, num_rows_, 1, [&](int row) {
        kernels_->norm(&projected_[at(row, padded_width_)], out_norm.data(), shape_.width, padded_width_,
                       shape_.norm_eps, worker.normed.data());
        kernels_->add(&hidden_[at(row, padded_width_)], worker.normed.data(), padded_width_);
    });
    pool_->barrier();
}

void Decoder::feed_forward(const Layer& layer, Worker& worker) {
    Quantised& input = prepare(hidden_.data(), nullptr, padded_width_, num_rows_, &layer.mlp_norm, worker);
    const Packed &gate = *layer.gate_up.parts[0], &up = *layer.gate_up.parts[1];
    const auto activate = shape_.is_gelu ? kernels_->gate_gelu : kernels_->gate_silu;
    const Floats& bias = layer.gate_up.bias;
    const int groups = padded_mlp_ / GROUP;
    pool_->each(worker.thread, groups, share_of(groups), [&](int group) {
        const int first = group * 2, tiles = std::min(2, gate.tiles() - first);  // an odd number: the rest is padding
        float* gates = worker.part.data();
        float* ups = gates + at(num_rows_, GROUP);
        multiply(gate, first, tiles, input, num_rows_, gates, GROUP);
        multiply(up, first, tiles, input, num_rows_, ups, GROUP);
        for (int row = 0; row < num_rows_; ++row) {
            float* values = gates + at(row, GROUP);
            for (int i = 0; i < tiles; ++i) {
                float *left = values + i * TILE, *right = ups + at(row, GROUP) + i * TILE;
                if (!bias.empty()) {
                    add_tile(left, &bias[at(first + i, TILE)]);
                    add_tile(right, &bias[at(gate.tiles() + first + i, TILE)]);
                }
                activate(left, right, left);
            }
            if (tiles == 1) std::fill_n(values + TILE, TILE, 0.0f);
            quantise_part(values, group * GROUP, GROUP, row, mlp_codes_, groups);
        }
    });
    pool_->barrier();
    project(layer.down, layer.mlp_out_norm, mlp_codes_, worker);
}

void Decoder::head(const Step& step, Worker& worker) {
    if (step.last_hidden != nullptr) {
        pool_->each(worker.thread, num_rows_, 1, [&](int row) {
            kernels_->norm(&hidden_[at(row, padded_width_)], final_norm_.data(), shape_.width, padded_width_,
                           shape_.norm_eps, worker.normed.data());
            std::memcpy(step.last_hidden + at(row, shape_.width), worker.normed.data(),
                        static_cast<std::size_t>(shape_.width) * sizeof(float));
        });
        pool_->barrier();
    }
    const int num_logits = static_cast<int>(step.logit_rows.size());
    if (num_logits == 0) return;
    const Packed& weights = *head_.parts.front();
    Quantised& input =
        prepare(hidden_.data(), step.logit_rows.data(), padded_width_, num_logits, &final_norm_, worker);
    pool_->each(worker.thread, weights.tiles(), share_of(weights.tiles()), [&](int tile) {
        const int count = std::min(TILE, shape_.vocab_size - tile * TILE);
        float* logits = step.logits + tile * TILE;
        if (count == TILE && shape_.logit_cap == 0.0f) {
            multiply(weights, tile, 1, input, num_logits, logits, shape_.vocab_size);
            return;
        }
        multiply(weights, tile, 1, input, num_logits, worker.part.data(), TILE);
        for (int row = 0; row < num_logits; ++row) {
            float* products = &worker.part[at(row, TILE)];
            if (shape_.logit_cap != 0.0f) kernels_->soft_cap(products, shape_.logit_cap);
            std::memcpy(logits + at(row, shape_.vocab_size), products, static_cast<std::size_t>(count) * sizeof(float));
        }
    });
}

}  // namespace draftsmith
