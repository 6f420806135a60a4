// What each thread does in a call of a row drafter: pass by pass, phase by phase, meeting the others at barriers.
// Called by RowDrafter::run. Invariant: see row_drafter.hpp; every phase but a chain's pick ends at a barrier.
#include <cstring>

#include "row_drafter.hpp"

namespace draftsmith {
namespace {

constexpr std::size_t TILE_BYTES = TILE * sizeof(float);

}  // namespace

void RowDrafter::work(int thread) {
    Worker& worker = workers_[static_cast<std::size_t>(thread)];
    int step = 0;
    for (const Pass& pass : passes_) {
        if (!pass.raw.empty()) weights_.reduce.parts.empty() ? take_features(pass, worker) : reduce(pass, worker);
        heads(pass, worker);
        const int outputs = pass.num_outputs();
        if (outputs == 0) continue;
        project(weights_.output, attend(pass, worker), outputs, worker);
        feed_forward(outputs, worker);
        head(pass, worker);
        if (!pass.is_chain) continue;
        if (!draws_.empty()) draw(pass, step, worker);
        if (!pick(pass, step++, worker)) return;
    }
}

// ---- a row's input ------------------------------------------------------------------------------

// The target's features are h.
void RowDrafter::take_features(const Pass& pass, Worker& worker) {
    pool_->each(worker.thread, static_cast<int>(pass.raw.size()), 1, [&](int place) {
        const Row& row = pass.rows[static_cast<std::size_t>(pass.raw[static_cast<std::size_t>(place)])];
        std::memcpy(row.feature, row.raw, at(shape_.width, sizeof(float)));
        std::fill(row.feature + shape_.width, row.feature + padded_width_, 0.0f);
    });
    pool_->barrier();
}

// h of new true rows from the target's features.
void RowDrafter::reduce(const Pass& pass, Worker& worker) {
    const int num_rows = static_cast<int>(pass.raw.size()), groups = padded_features_ / GROUP;
    const Packed& weights = *weights_.reduce.parts.front();
    Quantised& input = num_rows <= FEW_ROWS ? worker.all : shared_;
    const Floats& norms = weights_.tap_norms;
    visit(num_rows, worker, [&](int place, bool) {
        float* wide = worker.wide.data();
        std::memcpy(wide, pass.rows[static_cast<std::size_t>(pass.raw[static_cast<std::size_t>(place)])].raw,
                    at(shape_.feature_width, sizeof(float)));
        std::fill(wide + shape_.feature_width, wide + padded_features_, 0.0f);
        for (int start = 0; !norms.empty() && start < shape_.feature_width; start += shape_.embedding_width) {
            const int size = shape_.embedding_width;
            float* tap = worker.embedded.data();
            std::memcpy(tap, wide + start, at(size, sizeof(float)));
            std::fill(tap + size, tap + round_up(size, TILE), 0.0f);
            kernels_->norm(tap, &norms[at(start / size, round_up(size, TILE))], size, round_up(size, TILE),
                           shape_.norm_eps, tap);
            std::memcpy(wide + start, tap, at(size, sizeof(float)));
        }
        quantise(wide, 0, padded_features_, place, num_rows, input, groups);
    });
    pool_->each(worker.thread, weights.tiles(), share_of(weights.tiles()), [&](int tile) {
        multiply(weights, tile, 1, input, num_rows, worker.part.data(), TILE);
        for (int place = 0; place < num_rows; ++place) {
            float* products = &worker.part[at(place, TILE)];
            if (!weights_.reduce.bias.empty()) add_tile(products, &weights_.reduce.bias[at(tile, TILE)]);
            const Row& row = pass.rows[static_cast<std::size_t>(pass.raw[static_cast<std::size_t>(place)])];
            std::memcpy(row.feature + tile * TILE, products, TILE_BYTES);
        }
    });
    pool_->barrier();
}

// worker.wide [padded pair]: e and h, normed, side by side. `residual` [padded width] may be null.
void RowDrafter::pair(const Row& row, Worker& worker, float* residual) {
    const int embedding_width = shape_.embedding_width, padded = round_up(embedding_width, TILE);
    const std::int32_t token = row.token >= 0 ? row.token : worker.picked[static_cast<std::size_t>(row.group)];
    float* embedded = worker.embedded.data();
    weights_.embedding->dequantise(token, embedded);
    for (int i = 0; i < embedding_width; ++i) embedded[i] *= shape_.embedding_scale;
    std::fill(embedded + embedding_width, embedded + padded, 0.0f);
    if (!weights_.embedding_norm.empty()) {
        kernels_->norm(embedded, weights_.embedding_norm.data(), embedding_width, padded, shape_.norm_eps, embedded);
    }
    const float* feature = row.feature;
    if (!weights_.feature_norm.empty()) {
        kernels_->norm(feature, weights_.feature_norm.data(), shape_.width, padded_width_, shape_.norm_eps,
                       worker.normed.data());
        feature = worker.normed.data();
    }
    float* wide = worker.wide.data();
    const int feature_at = shape_.is_feature_first ? 0 : embedding_width;
    std::memcpy(wide + feature_at, feature, at(shape_.width, sizeof(float)));
    std::memcpy(wide + (shape_.is_feature_first ? shape_.width : 0), embedded, at(embedding_width, sizeof(float)));
    std::fill(wide + embedding_width + shape_.width, wide + padded_pair_, 0.0f);
    if (residual != nullptr) {
        std::memcpy(residual, shape_.norms_residual ? feature : row.feature, at(padded_width_, sizeof(float)));
    }
}

// x of every row into fused_.
void RowDrafter::fuse(const Pass& pass, Worker& worker) {
    const int num_rows = static_cast<int>(pass.rows.size());
    const Packed& weights = *weights_.fuse.parts.front();
    Quantised& input = num_rows <= FEW_ROWS ? worker.all : shared_;
    visit(num_rows, worker, [&](int row, bool) {
        pair(pass.rows[static_cast<std::size_t>(row)], worker, nullptr);
        quantise(worker.wide.data(), 0, padded_pair_, row, num_rows, input, padded_pair_ / GROUP);
    });
    pool_->each(worker.thread, weights.tiles(), share_of(weights.tiles()), [&](int tile) {
        multiply(weights, tile, 1, input, num_rows, worker.part.data(), TILE);
        for (int row = 0; row < num_rows; ++row) {
            float* products = &worker.part[at(row, TILE)];
            if (!weights_.fuse.bias.empty()) add_tile(products, &weights_.fuse.bias[at(tile, TILE)]);
            std::memcpy(&fused_[at(row, padded_width_) + at(tile, TILE)], products, TILE_BYTES);
        }
    });
    pool_->barrier();
}

// What attention reads of a row [padded input]; with `keeps` the row's residual goes to hidden_.
const float* RowDrafter::input_of(const Pass& pass, int row, bool keeps, Worker& worker) {
    float* residual = keeps ? &hidden_[at(row - pass.num_filling, padded_width_)] : nullptr;
    if (weights_.fuse.parts.empty()) {
        pair(pass.rows[static_cast<std::size_t>(row)], worker, residual);
        return worker.wide.data();
    }
    const float* x = &fused_[at(row, padded_width_)];
    if (residual != nullptr) std::memcpy(residual, x, at(padded_width_, sizeof(float)));
    if (weights_.attention_norm.empty()) return x;
    kernels_->norm(x, weights_.attention_norm.data(), shape_.width, padded_width_, shape_.norm_eps, worker.normed.data());
    return worker.normed.data();
}

// ---- attention ----------------------------------------------------------------------------------

// Keys and values of all rows; queries of those with an output.
void RowDrafter::heads(const Pass& pass, Worker& worker) {
    if (!weights_.fuse.parts.empty()) fuse(pass, worker);
    const int num_rows = static_cast<int>(pass.rows.size()), outputs = pass.num_outputs(), groups = padded_input_ / GROUP;
    const bool is_split = pass.num_filling > 0 && outputs > 0;
    Quantised& all = num_rows <= FEW_ROWS ? worker.all : shared_;
    Quantised& asking = !is_split ? all : num_rows <= FEW_ROWS ? worker.outputs : shared_outputs_;
    visit(num_rows, worker, [&](int row, bool is_mine) {
        const bool has_output = row >= pass.num_filling;
        const float* values = input_of(pass, row, has_output && is_mine, worker);
        quantise(values, 0, padded_input_, row, num_rows, all, groups);
        if (is_split && has_output) quantise(values, 0, padded_input_, row - pass.num_filling, outputs, asking, groups);
    });
    const int tiles = shape_.head_dim / TILE, num_kv = shape_.num_kv_heads, skipped = outputs > 0 ? 0 : shape_.num_heads;
    pool_->each(worker.thread, shape_.num_heads + 2 * num_kv - skipped, 1, [&](int share) {
        const int head = share + skipped, behind = head - shape_.num_heads;
        const std::size_t part = behind < 0 ? 0 : behind < num_kv ? 1 : 2;
        const int place = behind < 0 ? head : behind % num_kv;
        float* values = worker.scratch.data();
        multiply(*weights_.qkv.parts[part], place * tiles, tiles, behind < 0 ? asking : all,
                 behind < 0 ? outputs : num_rows, values, shape_.head_dim);
        finish_head(pass, head, values);
    });
    pool_->barrier();
}

// Bias, norm and rotation of one head's rows; queries are kept, keys and values go to their sequences.
void RowDrafter::finish_head(const Pass& pass, int head, float* values) {
    const int dim = shape_.head_dim, num_heads = shape_.num_heads, num_kv = shape_.num_kv_heads;
    const bool is_query = head < num_heads, is_value = head >= num_heads + num_kv;
    const float* bias = weights_.qkv.bias.empty() ? nullptr : &weights_.qkv.bias[at(head, dim)];
    const Floats& norm = is_query ? weights_.query_norm : weights_.key_norm;
    for (int row = is_query ? pass.num_filling : 0; row < static_cast<int>(pass.rows.size()); ++row, values += dim) {
        const Row& info = pass.rows[static_cast<std::size_t>(row)];
        for (int i = 0; bias != nullptr && i < dim; ++i) values[i] += bias[i];
        if (!is_value) {
            if (!norm.empty()) kernels_->norm(values, norm.data(), dim, dim, shape_.norm_eps, values);
            const std::size_t turn = at(info.position, dim / 2);
            kernels_->rotate(values, &cosines_[turn], &sines_[turn], dim, is_query ? shape_.attention_scale : 1.0f);
        }
        if (is_query) {
            std::memcpy(&queries_[at(row - pass.num_filling, padded_heads_) + at(head, dim)], values,
                        at(dim, sizeof(float)));
            continue;
        }
        const auto plane = static_cast<std::size_t>((head - num_heads) % num_kv + (is_value ? num_kv : 0));
        kernels_->store(cache_type_, !is_value, &info.sequence->rows[plane_bytes(info.sequence->capacity) * plane],
                        info.slot, values, dim);
    }
}

// The quantised outputs of all heads, for rows with an output.
Quantised& RowDrafter::attend(const Pass& pass, Worker& worker) {
    const int group_size = shape_.num_heads / shape_.num_kv_heads, num_kv = shape_.num_kv_heads;
    const int outputs = pass.num_outputs(), pairs = outputs * shape_.num_heads;
    // The heads of a group share keys and values: to take them apart costs more than uneven shares.
    int most = std::clamp(pairs / (4 * pool_->threads()), std::min(group_size, MOST_QUERIES), MOST_QUERIES);
    if (most > group_size) most = std::min(round_up(most, 6), MOST_QUERIES);  // the kernels take six at a time
    const auto cuts_of = [&](const Group& group) { return (group.num_rows * group_size + most - 1) / most; };
    int total = 0;
    for (const Group& group : pass.groups) total += cuts_of(group) * num_kv;
    pool_->each(worker.thread, total, 1, [&](int share) {
        std::size_t index = 0;
        while (share >= cuts_of(pass.groups[index]) * num_kv) share -= cuts_of(pass.groups[index++]) * num_kv;
        const Group& group = pass.groups[index];
        const int start = share / num_kv * most;
        attend_part(pass, group, share % num_kv, start, std::min(start + most, group.num_rows * group_size), worker);
    });
    pool_->barrier();
    if (shape_.head_dim % GROUP == 0) return mixed_codes_;
    Quantised& target = outputs <= FEW_ROWS ? worker.all : shared_;
    visit(outputs, worker, [&](int row, bool) {
        quantise(&mixed_[at(row, padded_heads_)], 0, padded_heads_, row, outputs, target, padded_heads_ / GROUP);
    });
    return target;
}

// Queries start..end-1 of a sequence's (head, row) pairs in one kv head.
void RowDrafter::attend_part(const Pass& pass, const Group& group, int kv_head, int start, int end, Worker& worker) {
    const int dim = shape_.head_dim, group_size = shape_.num_heads / shape_.num_kv_heads;
    const bool is_whole = dim % GROUP == 0;  // a head's outputs are quantised where they were made
    const Sequence& sequence = *group.sequence;
    const std::uint8_t* keys = &sequence.rows[plane_bytes(sequence.capacity) * static_cast<std::size_t>(kv_head)];
    const Attention shared{keys, keys + plane_bytes(sequence.capacity) * static_cast<std::size_t>(shape_.num_kv_heads), 0,
                           dim, shape_.attention_cap, worker.scratch.data()};
    const auto row_of = [&](int pair) { return group.first + pair % group.num_rows; };
    const auto head_of = [&](int pair) { return kv_head * group_size + pair / group.num_rows; };
    Query queries[MOST_QUERIES];
    for (int pair = start; pair < end; ++pair) {
        const int row = row_of(pair);
        const Row& info = pass.rows[static_cast<std::size_t>(row + pass.num_filling)];
        const std::size_t place = at(row, padded_heads_) + at(head_of(pair), dim);
        float* output = is_whole ? &worker.part[at(pair - start, dim)] : &mixed_[place];
        queries[pair - start] = {&queries_[place], output, 0, info.contiguous, info.position + 1,
                                 pass.paths.data() + info.path_start};
    }
    kernels_->attend(cache_type_, shared, queries, end - start);
    for (int pair = start; is_whole && pair < end; ++pair) {
        quantise(&worker.part[at(pair - start, dim)], head_of(pair) * dim, dim, row_of(pair), pass.num_outputs(),
                 mixed_codes_, padded_heads_ / GROUP);
    }
}

// Adds a linear layer's output to the hidden rows.
void RowDrafter::project(const Linear& linear, Quantised& input, int num_rows, Worker& worker) {
    const Packed& weights = *linear.parts.front();
    pool_->each(worker.thread, weights.tiles(), share_of(weights.tiles()), [&](int tile) {
        multiply(weights, tile, 1, input, num_rows, worker.part.data(), TILE);
        for (int row = 0; row < num_rows; ++row) {
            float* products = &worker.part[at(row, TILE)];
            if (!linear.bias.empty()) add_tile(products, &linear.bias[at(tile, TILE)]);
            add_tile(&hidden_[at(row, padded_width_) + at(tile, TILE)], products);
        }
    });
    pool_->barrier();
}

void RowDrafter::feed_forward(int num_rows, Worker& worker) {
    Quantised& input = num_rows <= FEW_ROWS ? worker.all : shared_;
    visit(num_rows, worker, [&](int row, bool) {
        kernels_->norm(&hidden_[at(row, padded_width_)], weights_.mlp_norm.data(), shape_.width, padded_width_,
                       shape_.norm_eps, worker.normed.data());
        quantise(worker.normed.data(), 0, padded_width_, row, num_rows, input, padded_width_ / GROUP);
    });
    const Packed &gate = *weights_.gate_up.parts[0], &up = *weights_.gate_up.parts[1];
    const Floats& bias = weights_.gate_up.bias;
    const int groups = padded_mlp_ / GROUP;
    pool_->each(worker.thread, groups, share_of(groups), [&](int group) {
        const int first = group * 2, tiles = std::min(2, gate.tiles() - first);  // an odd number: the rest is padding
        float* gates = worker.part.data();
        float* ups = gates + at(num_rows, GROUP);
        multiply(gate, first, tiles, input, num_rows, gates, GROUP);
        multiply(up, first, tiles, input, num_rows, ups, GROUP);
        for (int row = 0; row < num_rows; ++row) {
            float* values = gates + at(row, GROUP);
            for (int i = 0; i < tiles; ++i) {
                float *left = values + i * TILE, *right = ups + at(row, GROUP) + i * TILE;
                if (!bias.empty()) {
                    add_tile(left, &bias[at(first + i, TILE)]);
                    add_tile(right, &bias[at(gate.tiles() + first + i, TILE)]);
                }
                kernels_->gate_silu(left, right, left);
            }
            if (tiles == 1) std::fill_n(values + TILE, TILE, 0.0f);
            quantise(values, group * GROUP, GROUP, row, num_rows, mlp_codes_, groups);
        }
    });
    pool_->barrier();
    project(weights_.down, mlp_codes_, num_rows, worker);
}

}  // namespace draftsmith
