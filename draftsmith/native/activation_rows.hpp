// Rows of activations that are multiplied with packed weights: buffers that begin at a cache line, and rows quantised
// block by block.
// Used by the decoder and the row drafter. Invariant: which rows share a block never changes what a row's products are.
#pragma once

#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "kernels.hpp"
#include "packed.hpp"

namespace draftsmith {

// Begins at a cache line, as the rows that kernels read and write do.
template <class T>
struct LineAllocator {
    using value_type = T;
    static constexpr std::align_val_t LINE{64};
    LineAllocator() = default;
    template <class Other>
    explicit LineAllocator(const LineAllocator<Other>&) {}
    T* allocate(std::size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), LINE)); }
    void deallocate(T* items, std::size_t) { ::operator delete(items, LINE); }
    bool operator==(const LineAllocator&) const = default;
};

template <class T>
using Lines = std::vector<T, LineAllocator<T>>;
using Floats = Lines<float>;

inline std::size_t at(int row, int stride) { return static_cast<std::size_t>(row) * static_cast<std::size_t>(stride); }
inline int round_up(int value, int unit) { return (value + unit - 1) / unit * unit; }

constexpr int FEW_ROWS = 3;  // that every thread prepares for itself, which is cheaper than to meet at a barrier

// A block of rows is multiplied at once.
inline int num_blocks(int rows, int most) { return (rows + most - 1) / most; }
// Blocks of nearly equal size.
inline int block_start(int block, int blocks, int rows) {
    return static_cast<int>(static_cast<std::int64_t>(block) * rows / blocks);
}
inline int block_of(int row, int blocks, int rows) {
    return static_cast<int>((static_cast<std::int64_t>(row + 1) * blocks - 1) / rows);
}

inline void add_tile(float* x, const float* y) {
    for (int i = 0; i < TILE; ++i) x[i] += y[i];
}

// Packed weights that share an input, their outputs side by side; the bias is empty or as long as all outputs.
struct Linear {
    std::vector<std::shared_ptr<Packed>> parts;
    Floats bias;
};

inline void pad(Floats& values, int size) {
    if (!values.empty()) values.resize(static_cast<std::size_t>(size), 0.0f);
}

// Gate and up biases side by side, each from a tile's start on.
inline void pad_halves(Floats& values, int half, int padded) {
    if (values.empty()) return;
    values.insert(values.begin() + half, static_cast<std::size_t>(padded - half), 0.0f);
    values.resize(2 * static_cast<std::size_t>(padded), 0.0f);
}

template <class Vector>
void grow(Vector& values, std::size_t size) {
    if (values.size() < size) values.resize(size);
}

// Quantised rows of one input, block by block.
struct Quantised {
    Lines<std::int8_t> codes;
    Floats scales, sums;
    Lines<std::int32_t> starts4, starts8, half_starts;

    void resize(int rows, int groups) {
        const std::size_t cells = at(rows, groups);
        grow(codes, cells * GROUP);
        grow(scales, cells);
        grow(sums, cells);
        grow(starts4, cells);
        grow(starts8, cells);
        grow(half_starts, 2 * cells);
    }

    Activations block(int start, int rows, int groups) {
        const std::size_t cell = at(start, groups);
        return {rows,           &codes[cell * GROUP], &scales[cell], &sums[cell], &starts4[cell], &starts8[cell],
                &half_starts[2 * cell]};
    }
};

// Whole groups of a row's inputs, `values` from input `first` on, to where its block has them.
inline void quantise_inputs(const Kernels& kernels, const float* values, int first, int size, int row, int num_rows,
                            Quantised& target, int groups) {
    const int blocks = num_blocks(num_rows, kernels.max_block_rows), block = block_of(row, blocks, num_rows);
    const int start = block_start(block, blocks, num_rows), end = block_start(block + 1, blocks, num_rows);
    Activations activations = target.block(start, end - start, groups);
    kernels.quantise(values - first, first / GROUP, (first + size) / GROUP, row - start, activations);
}

// out [rows][16 * num_tiles], `stride` from row to row: the products of an input's rows with neighbouring tiles.
inline void multiply_blocks(const Kernels& kernels, const Packed& weights, int first_tile, int num_tiles,
                            Quantised& input, int num_rows, float* out, int stride) {
    const int blocks = num_blocks(num_rows, kernels.max_block_rows);
    for (int block = 0; block < blocks; ++block) {
        const int start = block_start(block, blocks, num_rows), end = block_start(block + 1, blocks, num_rows);
        kernels.multiply(weights, first_tile, num_tiles, input.block(start, end - start, weights.groups()),
                         out + at(start, stride), static_cast<std::size_t>(stride));
    }
}

}  // namespace draftsmith
