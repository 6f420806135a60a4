// The kernels behind one table, one table for each instruction set; the decoder calls through it.
// Invariant of every kernel: what is computed for a row depends on that row's inputs alone, bit for bit.
#pragma once

#include <cstdint>

#include "packed.hpp"

namespace draftsmith {

constexpr int MOST_QUERIES = 24;  // of one call of attend
constexpr int KEY_BLOCK = 16;     // neighbouring slots whose keys are stored together, [head_dim, 16]

enum class CacheType : std::uint8_t { FLOAT, HALF, BFLOAT };

// Activations of a block of `rows` rows, quantised to 8 bits with a scale per group of 32 inputs of a row.
// Rows are interleaved: codes [groups * 8][rows][4], all else [groups (of 32 or 16)][rows].
struct Activations {
    int rows;
    std::int8_t* codes;
    float* scales;     // per group
    float* sums;       // scale times the sum of the codes, per group
    // What an integer sum with codes of 4 or 8 bits begins with: less their zero point times the sum of the row's codes.
    std::int32_t *starts4, *starts8;  // per group
    std::int32_t* half_starts;        // the latter per 16 inputs
};

// One query: head `head` of row `row`, against the keys and values of its sequence in one kv head.
struct Query {
    const float* query;              // [head_dim], scaled
    float* output;                   // [head_dim]
    int first;                       // first position seen
    int contiguous;                  // positions below lie at storage position = position
    int end;                         // one past the row's own position
    const std::int32_t* path;        // storage positions of contiguous..end-1
};

struct Attention {
    const void* keys;      // block by block
    const void* values;    // storage position p at values + (p - storage_first) * head_dim elements
    int storage_first;     // a multiple of KEY_BLOCK
    int head_dim;
    float cap;             // 0: none
    float* scratch;        // see attention_scratch
};

struct Kernels {
    const char* name;
    int max_block_rows;
    // Multiplies neighbouring tiles: out [rows][16 * num_tiles], `stride` from row to row.
    void (*multiply)(const Packed& weights, int first_tile, int num_tiles, const Activations& activations, float* out,
                     std::size_t stride);
    // Quantises groups first..end-1 of row `row` of a block from x [width].
    void (*quantise)(const float* x, int first_group, int end_group, int row, Activations& activations);
    // out = x / sqrt(mean(x^2) + eps) * weight, over `width` values; `padded` (a multiple of 16) are written.
    void (*norm)(const float* x, const float* weight, int width, int padded, float eps, float* out);
    void (*add)(float* x, const float* y, int padded);
    // out = activation(gate) * up over 16 values.
    void (*gate_silu)(const float* gate, const float* up, float* out);
    void (*gate_gelu)(const float* gate, const float* up, float* out);
    // Rotates the halves of x [head_dim] by the angles whose cosines and sines are given [head_dim / 2].
    void (*rotate)(float* x, const float* cosines, const float* sines, int head_dim, float scale);
    void (*soft_cap)(float* x, float cap);  // 16 values
    // Puts x [head_dim] into slot `slot` of keys or values.
    void (*store)(CacheType type, bool is_key, void* to, std::int64_t slot, const float* x, int head_dim);
    void (*attend)(CacheType type, const Attention& shared, const Query* queries, int num_queries);
};

// Floats of scratch that `attend` needs for contexts of `positions`.
inline std::size_t attention_scratch(int num_queries, int positions, int head_dim) {
    return static_cast<std::size_t>(num_queries) * (static_cast<std::size_t>(positions) + 64) +
           static_cast<std::size_t>(16 * head_dim);
}

const Kernels* portable_kernels();
const Kernels* avx2_kernels();     // null where the compiler or the processor has none
const Kernels* avxvnni_kernels();
const Kernels* avx512_kernels();

}  // namespace draftsmith
