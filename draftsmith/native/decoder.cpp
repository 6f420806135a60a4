#include "decoder.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

namespace draftsmith {
namespace {

int round_up(int value, int unit) { return (value + unit - 1) / unit * unit; }

inline void add_tile(float* x, const float* y) {
    for (int i = 0; i < TILE; ++i) x[i] += y[i];
}

void pad(Floats& values, int size) {
    if (!values.empty()) values.resize(static_cast<std::size_t>(size), 0.0f);
}

// Gate and up biases side by side, each from a tile's start on.
void pad_halves(Floats& values, int half, int padded) {
    if (values.empty()) return;
    values.insert(values.begin() + half, static_cast<std::size_t>(padded - half), 0.0f);
    values.resize(2 * static_cast<std::size_t>(padded), 0.0f);
}

template <class Vector>
void grow(Vector& values, std::size_t size) {
    if (values.size() < size) values.resize(size);
}

std::size_t at(int row, int stride) { return static_cast<std::size_t>(row) * static_cast<std::size_t>(stride); }

constexpr int FEW_ROWS = 3;

int num_blocks(int rows, int most) { return (rows + most - 1) / most; }
// Blocks of nearly equal size.
int block_start(int block, int blocks, int rows) {
    return static_cast<int>(static_cast<std::int64_t>(block) * rows / blocks);
}

std::size_t element_bytes(CacheType type) { return type == CacheType::FLOAT ? 4 : 2; }

}  // namespace

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

void Decoder::Quantised::resize(int rows, int groups) {
    const std::size_t cells = at(rows, groups);
    grow(codes, cells * GROUP);
    grow(scales, cells);
    grow(sums, cells);
    grow(code_sums, cells);
    grow(half_sums, 2 * cells);
}

Activations Decoder::Quantised::block(int start, int rows, int groups) {
    const std::size_t cell = at(start, groups);
    return {rows, &codes[cell * GROUP], &scales[cell], &sums[cell], &code_sums[cell], &half_sums[2 * cell]};
}

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
        grow(worker.part, std::max(at(num_rows_, GROUP), at(MOST_QUERIES, shape_.head_dim)));
        grow(worker.scratch, std::max(attention_scratch(MOST_QUERIES, longest, shape_.head_dim),
                                      at(num_rows_, shape_.head_dim)));
    }
}

void Decoder::score(const Step& step) {
    if (step.groups.empty()) return;
    plan(step);
    pool_->run([&](int thread) { work(step, thread); });
}

// ---- on every thread ----------------------------------------------------------------------------

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
Decoder::Quantised& Decoder::prepare(const float* x, const std::int32_t* index, int padded, int num_rows,
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

// Calls take(row, products [16]) for every row of an input with a tile of weights.
template <class Take>
void Decoder::multiply(const Packed& weights, int tile, Quantised& input, int num_rows, Take take) {
    alignas(64) float products[8 * TILE];
    const int blocks = num_blocks(num_rows, kernels_->max_block_rows);
    for (int block = 0; block < blocks; ++block) {
        const int start = block_start(block, blocks, num_rows), end = block_start(block + 1, blocks, num_rows);
        kernels_->multiply(weights, tile, input.block(start, end - start, weights.groups()), products);
        for (int row = start; row < end; ++row) take(row, products + (row - start) * TILE);
    }
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
        for (int tile = 0; tile < head_tiles; ++tile) {
            multiply(weights, place * head_tiles + tile, input, num_rows_, [&](int row, const float* products) {
                std::memcpy(rows + at(row, shape_.head_dim) + tile * TILE, products, TILE * sizeof(float));
            });
        }
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
        kernels_->store(cache_type_, slots.data, (plane * slots.capacity + slot) * dim, values, dim);
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
Decoder::Quantised& Decoder::attend(const Layer& layer, const Step& step, Worker& worker) {
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
        multiply(weights, tile, input, num_rows_, [&](int row, float* products) {
            if (bias != nullptr) add_tile(products, bias);
            float* values = target + at(row, padded_width_) + tile * TILE;
            if (out_norm.empty()) add_tile(values, products);
            else std::memcpy(values, products, TILE * sizeof(float));
        });
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
        float* part = worker.part.data();
        for (int tile = group * 2; tile < group * 2 + 2; ++tile) {
            const auto place = [&](int row) { return part + row * GROUP + tile % 2 * TILE; };
            if (tile == gate.tiles()) {  // an odd number of tiles: half of the last group is padding
                for (int row = 0; row < num_rows_; ++row) std::fill_n(place(row), TILE, 0.0f);
                break;
            }
            multiply(gate, tile, input, num_rows_, [&](int row, float* products) {
                if (!bias.empty()) add_tile(products, &bias[at(tile, TILE)]);
                std::memcpy(place(row), products, TILE * sizeof(float));
            });
            multiply(up, tile, input, num_rows_, [&](int row, float* products) {
                if (!bias.empty()) add_tile(products, &bias[at(gate.tiles() + tile, TILE)]);
                activate(place(row), products, place(row));
            });
        }
        for (int row = 0; row < num_rows_; ++row) {
            quantise_part(part + row * GROUP, group * GROUP, GROUP, row, mlp_codes_, groups);
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
        multiply(weights, tile, input, num_logits, [&](int row, float* products) {
            if (shape_.logit_cap != 0.0f) kernels_->soft_cap(products, shape_.logit_cap);
            std::memcpy(step.logits + at(row, shape_.vocab_size) + tile * TILE, products,
                        static_cast<std::size_t>(count) * sizeof(float));
        });
    });
}

}  // namespace draftsmith
