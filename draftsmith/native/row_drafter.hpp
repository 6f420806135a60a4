// A drafter of one decoder layer that reads the target's features and, further on, its own outputs (EAGLE, multi-token
// prediction): rows of several sequences over packed weights, keys and values its own.
// Called from Python through bind_row_drafter.cpp: `plan_*` with the interpreter held, `run` without it, `finish`.
// Invariants: what a row gives depends on itself and the rows it sees alone, bit for bit; a call that fails leaves the
// rows that were there; threads share out whole outputs, never a sum.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "activation_rows.hpp"
#include "kernels.hpp"
#include "packed.hpp"
#include "pool.hpp"

namespace draftsmith {

constexpr int STRETCH = 256;   // outputs of the head whose likeliest is looked for by one thread

// A row has an embedding e of its token and a feature h: the target's, of a true row, or its parent's output.
struct RowShape {
    int feature_width;    // of a true row, as the target gives it
    int embedding_width;  // of e
    int width, num_heads, num_kv_heads, head_dim, mlp_width;
    int num_ids;          // tokens that can be drafted
    float norm_eps, attention_scale, attention_cap, logit_cap, embedding_scale;
    bool is_feature_first;  // [h; e] instead of [e; h]
    bool norms_residual;    // attention's output is added to the normed h instead of h itself
    bool feeds_normed;      // the next row's h is the output after the final norm
};

// What is empty is left out.
struct RowWeights {
    Linear reduce;           // h of a true row from the target's features; else they are h
    Linear fuse;             // x of [e; h], which attention reads and is added to; else attention reads [e; h]
    Linear qkv, output, gate_up, down, head;
    Floats tap_norms;        // of each embedding_width of the target's features
    Floats embedding_norm, feature_norm;  // of e and h
    Floats attention_norm;   // of x
    Floats mlp_norm;
    Floats query_norm, key_norm;
    Floats final_norm;
    std::shared_ptr<Packed> embedding;    // the target's
    std::vector<std::int32_t> ids;        // target token of each output of the head
};

// New true rows of one sequence: the token behind each and the target's features of it [tokens, feature_width].
struct TrueRows {
    std::int64_t sequence;
    std::vector<std::int32_t> tokens;
    const float* features;
};

// New speculative rows of one sequence; a parent is an earlier speculative row, or -1 for the last true row.
struct SpeculativeRows {
    std::int64_t sequence;
    std::vector<std::int32_t> tokens, parents;
};

// How a chain's tokens are drawn where they are not the likeliest: the best of logit * inverse_temperature + noise among
// what top-k, top-p and min-p leave. The noise is that of the target's own draw at the position (seeded coupling).
struct Draw {
    std::uint64_t seed, stream, position;  // of the first token's noise; each further token is one position on
    double inverse_temperature;
    std::int64_t top_k;  // 0 is off
    double top_p;        // 1 is off
    double reach;        // how far below the largest logit min-p goes, at most 0; minus infinity is off
    bool is_truncated() const {
        return top_k > 0 || top_p < 1.0 || reach > -std::numeric_limits<double>::infinity();
    }
};

class RowDrafter {
  public:
    // `owns_head`: the head's weights are not the target's as well.
    RowDrafter(RowShape shape, RowWeights weights, bool owns_head, CacheType cache_type, std::shared_ptr<Pool> pool,
               const Kernels* kernels);

    // Cosines and sines [positions, head_dim / 2].
    void set_rotation(const float* cosines, const float* sines, int positions);

    // Each throws std::invalid_argument for what cannot be, and std::logic_error while another thread runs.
    void plan_append(const std::vector<TrueRows>& groups);
    // logits [groups, num_ids] after each sequence's last true row.
    void plan_begin(const std::vector<TrueRows>& groups, float* logits);
    // logits [rows, num_ids].
    void plan_extend(const std::vector<SpeculativeRows>& groups, float* logits);
    // tokens, probs: `depths[i]` of group i, one group after the other. The likeliest tokens, or those that `draws` says,
    // which has one for each group or none at all; probabilities are those of the likeliest in any case. A chain ends
    // with the token at which their product falls below `least`.
    void plan_chain(const std::vector<TrueRows>& groups, const std::vector<int>& depths, float least,
                    const std::vector<std::optional<Draw>>& draws, std::int32_t* tokens, float* probs);
    void run();
    void finish();

    // Tokens of each chain of the last call.
    const std::vector<int>& chain_lengths() const { return chain_lengths_; }
    int num_rows(std::int64_t sequence) const;
    int num_drafted(std::int64_t sequence) const;
    void truncate(std::int64_t sequence, int num_rows);
    void fork(std::int64_t source, std::int64_t copy, int num_rows);
    void forget(std::int64_t sequence);

    const RowShape& shape() const { return shape_; }
    const char* kernels_name() const { return kernels_->name; }
    int num_positions() const { return num_positions_; }
    int num_tokens() const { return weights_.embedding->outputs(); }
    std::size_t weight_bytes() const { return weight_bytes_; }
    std::size_t bytes_per_row() const;

  private:
    struct Drafted {
        int parent, position;
        int contiguous;  // positions below lie where they belong
    };
    // Rows in the order in which they came, speculative ones behind the true ones.
    struct Sequence {
        int num_true = 0, capacity = 0;
        Lines<std::uint8_t> rows;           // [2, kv heads, capacity, head_dim], keys in blocks as the decoder's
        Floats feature;                     // h of the last true row
        std::int32_t token = 0;             // of the last true row
        bool knows_last = false;            // both are there: it was not cut since
        std::vector<Drafted> drafted;
        Floats states;                      // what the next row gets from the last true row and each speculative row
        bool is_begun = false;              // the first of these is there
    };
    struct Row {
        Sequence* sequence;
        int group;
        std::int32_t token;               // -1: the last one of its group's chain
        int position, slot, contiguous;
        int path_start;                   // in the pass's paths: slots of contiguous..position
        const float* raw;                 // the target's features, or null where h is there
        float* feature;                   // h
        float* state;                     // where its output goes, or null: nobody asks what follows it
    };
    struct Group {
        Sequence* sequence;
        int first, num_rows;              // among the rows with an output
    };
    // Rows worked out side by side, those with an output last.
    struct Pass {
        std::vector<Row> rows;
        std::vector<int> raw;             // rows with the target's features
        std::vector<Group> groups;
        std::vector<std::int32_t> paths;
        int num_filling = 0, longest = 0;
        bool is_chain = false;            // picks a token for each row with an output
        int num_outputs() const { return static_cast<int>(rows.size()) - num_filling; }
    };
    // The likeliest of a stretch of the head's outputs.
    struct Best {
        float most;
        std::int32_t index;
        double sum;  // of exponentials, relative to it
    };
    // The winner of a draw among a stretch of the head's outputs, or all of them.
    struct Drawn {
        double score = -std::numeric_limits<double>::infinity();  // there is none
        std::int32_t index = 0;
    };
    struct Worker {
        int thread = 0;
        Quantised all, outputs;
        Floats wide, embedded, normed, scratch, part, powers;
        std::vector<std::int32_t> picked;  // per group
        std::vector<float> reach;          // per group: probability of all picks so far
    };
    // What becomes true of a sequence when the work is done.
    struct Change {
        Sequence* sequence;
        int num_true;
        bool knows_last, is_begun;
        std::vector<Drafted> drafted;  // behind those that are there
    };

    void settle(bool owns_head);
    // Planning, row_drafter_plan.cpp.
    void check_idle() const;
    bool knows_last(std::int64_t sequence) const;
    void check_token(std::int32_t token) const;
    void check_groups(const std::vector<TrueRows>& groups, const std::vector<int>& depths, bool has_outputs) const;
    void check_draws(const std::vector<TrueRows>& groups, const std::vector<std::optional<Draw>>& draws) const;
    void check_positions(std::int64_t positions) const;
    void check_levels(const std::vector<SpeculativeRows>& groups) const;
    void plan_true(const std::vector<TrueRows>& groups, const std::vector<int>& depths, bool has_outputs);
    void plan_steps(const std::vector<int>& depths);
    void admit(Sequence& sequence, const TrueRows& rows, int depth);
    void reserve(Sequence& sequence, int num_rows);
    Row true_row(Sequence& sequence, int group, const TrueRows& rows, int index, int place_in_pass);
    void add_row(Pass& pass, const Row& row) const;
    void add_output(Pass& pass, const Row& row) const;
    void prepare_to_run();
    std::size_t element_bytes() const { return cache_type_ == CacheType::FLOAT ? 4 : 2; }
    std::size_t plane_bytes(int rows) const {
        return at(rows, shape_.head_dim) * element_bytes();
    }
    // Working, row_drafter_step.cpp.
    void work(int thread);
    void take_features(const Pass& pass, Worker& worker);
    void reduce(const Pass& pass, Worker& worker);
    void fuse(const Pass& pass, Worker& worker);
    void pair(const Row& row, Worker& worker, float* residual);
    const float* input_of(const Pass& pass, int row, bool keeps, Worker& worker);
    void heads(const Pass& pass, Worker& worker);
    void finish_head(const Pass& pass, int head, float* values);
    Quantised& attend(const Pass& pass, Worker& worker);
    void attend_part(const Pass& pass, const Group& group, int kv_head, int start, int end, Worker& worker);
    void project(const Linear& linear, Quantised& input, int num_rows, Worker& worker);
    void feed_forward(int num_rows, Worker& worker);
    // The head, row_drafter_head.cpp.
    void head(const Pass& pass, Worker& worker);
    void head_stretch(const Pass& pass, int stretch, Quantised& input, Worker& worker);
    Best look_at(const float* logits, int first, int count, Worker& worker) const;
    void draw(const Pass& pass, int step, Worker& worker);
    Drawn draw_in(const Pass& pass, int row, int stretch, int step) const;
    Best likeliest(int row) const;
    std::size_t group_of(const Pass& pass, int row) const {
        return static_cast<std::size_t>(pass.rows[static_cast<std::size_t>(row + pass.num_filling)].group);
    }
    bool pick(const Pass& pass, int step, Worker& worker);
    void quantise(const float* values, int first_input, int size, int row, int num_rows, Quantised& target,
                  int groups) const {
        quantise_inputs(*kernels_, values, first_input, size, row, num_rows, target, groups);
    }
    void multiply(const Packed& weights, int first_tile, int num_tiles, Quantised& input, int num_rows, float* out,
                  int stride) const {
        multiply_blocks(*kernels_, weights, first_tile, num_tiles, input, num_rows, out, stride);
    }
    template <class Visit>
    void visit(int num_rows, Worker& worker, Visit visit);
    int share_of(int total) const { return std::max(1, total / (pool_->threads() * 16)); }
    int num_stretches() const { return (shape_.num_ids + STRETCH - 1) / STRETCH; }

    RowShape shape_;
    RowWeights weights_;
    CacheType cache_type_;
    std::shared_ptr<Pool> pool_;
    const Kernels* kernels_;
    int padded_width_, padded_pair_, padded_input_, padded_heads_, padded_mlp_, padded_features_, padded_ids_;
    Floats cosines_, sines_;
    int num_positions_ = 0;
    std::size_t weight_bytes_ = 0;
    bool has_ascending_ids_;
    std::map<std::int64_t, Sequence> sequences_;

    // Of the call that runs.
    int running_in_ = 0;  // process, or 0
    std::vector<Pass> passes_;
    std::vector<Change> changes_;
    float* logits_ = nullptr;           // the caller's [outputs, num_ids], or own_logits_ in chains
    int logit_stride_ = 0;
    std::vector<int> first_picks_;      // per group of a chain: place of its first token in the caller's arrays
    std::vector<int> chain_lengths_;    // per group of a chain, else empty
    float least_ = 0.0f;
    std::int32_t* picks_ = nullptr;
    float* probs_ = nullptr;
    Floats own_logits_, features_, hidden_, fused_, queries_, mixed_;
    std::vector<Best> best_;            // of a chain's rows, stretch by stretch
    std::vector<std::optional<Draw>> draws_;  // per group of a chain, or empty
    std::vector<Drawn> drawn_;
    Quantised shared_, shared_outputs_, mixed_codes_, mlp_codes_;
    std::vector<Worker> workers_;
};

// Calls visit(row, is_mine) for all rows on every thread where they are few, else for each row on one of them and then
// meets the others. `is_mine`: of all that visit a row this one writes what others will read.
template <class Visit>
void RowDrafter::visit(int num_rows, Worker& worker, Visit visit) {
    if (num_rows <= FEW_ROWS) {
        for (int row = 0; row < num_rows; ++row) visit(row, worker.thread == 0);
        return;
    }
    pool_->each(worker.thread, num_rows, 1, [&](int row) { visit(row, true); });
    pool_->barrier();
}

}  // namespace draftsmith
