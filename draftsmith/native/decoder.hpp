// A decoder over packed weights: scores new rows of several sequences in one call.
// Called from Python through bind_decoder.cpp; keys and values live in memory that the caller owns.
// Invariant: logits and taps of a row depend on the row, its ancestors and its sequence's context alone, bit for
// bit: not on other rows, their order, the number of threads or where a key is stored.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "activation_rows.hpp"
#include "kernels.hpp"
#include "packed.hpp"
#include "pool.hpp"

namespace draftsmith {

struct Layer {
    Linear qkv, output, gate_up, down;          // qkv: query, key, value; gate_up: gate, up
    Floats attention_norm, mlp_norm;            // [width], the factors really multiplied by
    Floats attention_out_norm, mlp_out_norm;    // [width] or empty
    Floats query_norm, key_norm;                // [head_dim] or empty
    int kind = 0;                               // of cache and rope
    int place = 0;                              // among the layers of its kind
    int window = 0;                             // positions seen, itself included; 0: all
};

struct Shape {
    int width, num_heads, num_kv_heads, head_dim, mlp_width, vocab_size;
    float norm_eps, attention_scale, attention_cap, logit_cap, embedding_scale;
    bool is_gelu;
};

// The rows of one kind of layer of one sequence: [layers, 2, kv heads, capacity, head_dim] of the cache's type, where
// the keys of 16 neighbouring slots are stored as [head_dim, 16].
struct Slots {
    std::uint8_t* data;
    int first;     // storage position of slot 0, a multiple of 16
    int capacity;  // a multiple of 16
};

// New rows of one sequence. `parents[i] < i`, -1 for its last committed row.
struct Group {
    int num_rows, committed;
    const std::int32_t* parents;
    const Slots* slots;  // per kind
};

struct Tap {
    int layer;    // so many layers applied
    float* rows;  // [rows, width]
};

struct Step {
    std::span<const std::int32_t> tokens;
    std::span<const Group> groups;
    std::span<const std::int32_t> logit_rows;
    float* logits;               // [logit rows, vocabulary]
    std::span<const Tap> taps;
    float* last_hidden;          // [rows, width] or null
};

class Decoder {
  public:
    Decoder(Shape shape, std::vector<Layer> layers, std::shared_ptr<Packed> embedding, Linear head, Floats final_norm,
            CacheType cache_type, std::shared_ptr<Pool> pool, const Kernels* kernels);

    // Cosines and sines [positions, head_dim / 2] of a kind of layer. The memory stays the caller's.
    void set_rotation(int kind, const float* cosines, const float* sines, int positions);

    // Throws std::invalid_argument for a token outside the vocabulary or a position without a rotation.
    void score(const Step& step);

    const Shape& shape() const { return shape_; }
    const char* kernels_name() const { return kernels_->name; }
    int num_kinds() const { return static_cast<int>(rotations_.size()); }
    std::size_t weight_bytes() const;

  private:
    struct Rotation {
        const float* cosines = nullptr;
        const float* sines = nullptr;
        int positions = 0;
    };
    struct Row {
        int group, position, first_row;  // first_row: of its group
        int contiguous;                  // positions below lie where they belong
        int path_start;                  // in paths_: storage positions of contiguous..position
        int block_start, block_rows;     // of the block its activations are in
    };
    struct Worker {
        int thread = 0;
        Quantised quantised;
        Floats normed, scratch, part;  // part: twice [rows, GROUP], or [queries, head_dim]
    };

    void settle();
    void plan(const Step& step);
    void plan_group(const Group& group, int group_index, int first_row);
    void work(const Step& step, int thread);
    void embed(const Step& step, int thread);
    void take_tap(const Step& step, int layer);
    void attention(const Layer& layer, const Step& step, Worker& worker);
    void feed_forward(const Layer& layer, Worker& worker);
    void head(const Step& step, Worker& worker);
    Quantised& prepare(const float* x, const std::int32_t* index, int padded, int num_rows, const Floats* norm_weight,
                       Worker& worker);
    void multiply(const Packed& weights, int first_tile, int num_tiles, Quantised& input, int num_rows, float* out,
                  int stride);
    void project(const Linear& linear, const Floats& out_norm, Quantised& input, Worker& worker);
    void finish_head(const Layer& layer, const Step& step, int head, float* rows);
    Quantised& attend(const Layer& layer, const Step& step, Worker& worker);
    int share_of(int total) const;
    void quantise_part(const float* values, int first_input, int size, int row, Quantised& target, int groups);

    Shape shape_;
    std::vector<Layer> layers_;
    std::shared_ptr<Packed> embedding_;
    Linear head_;
    Floats final_norm_;
    CacheType cache_type_;
    std::shared_ptr<Pool> pool_;
    const Kernels* kernels_;
    std::vector<Rotation> rotations_;
    int padded_width_, padded_heads_, padded_mlp_;

    // Of the step that runs.
    int num_rows_ = 0;
    std::vector<Row> rows_;
    std::vector<std::int32_t> paths_;
    Floats hidden_, queries_, mixed_, projected_;
    Quantised shared_, mixed_codes_, mlp_codes_;
    std::vector<Worker> workers_;
};

}  // namespace draftsmith
