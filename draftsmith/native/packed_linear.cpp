#include "packed_linear.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace draftsmith {
namespace {

constexpr std::int64_t FEW_PRODUCTS = std::int64_t{1} << 20;  // done sooner than other threads are woken
constexpr int MOST_TILES = 16;                                // of a share

}  // namespace

PackedLinear::PackedLinear(std::shared_ptr<Packed> weights, std::shared_ptr<Pool> pool, const Kernels* kernels)
    : weights_(std::move(weights)), pool_(std::move(pool)), kernels_(kernels),
      padded_(static_cast<std::size_t>(pool_->threads())), parts_(static_cast<std::size_t>(pool_->threads())) {
    for (Floats& row : padded_) row.assign(static_cast<std::size_t>(weights_->groups() * GROUP), 0.0f);
}

void PackedLinear::multiply(const float* x, int rows, float* out) {
    if (rows == 0) return;
    codes_.resize(rows, weights_->groups());
    for (Floats& part : parts_) grow(part, at(rows, TILE));
    const int tiles_of_all = weights_->tiles();
    const auto products = std::int64_t{rows} * weights_->outputs() * weights_->inputs();
    if (products < FEW_PRODUCTS || pool_->threads() == 1) {
        for (int row = 0; row < rows; ++row) quantise(x, row, rows, padded_[0]);
        tiles(0, tiles_of_all, rows, out, parts_[0]);
        return;
    }
    const int share = std::clamp(tiles_of_all / (pool_->threads() * 8), 1, MOST_TILES);
    pool_->run([&](int thread) {
        const auto own = static_cast<std::size_t>(thread);
        pool_->each(thread, rows, 1, [&](int row) { quantise(x, row, rows, padded_[own]); });
        pool_->barrier();
        pool_->each(thread, (tiles_of_all + share - 1) / share, 1, [&](int i) {
            tiles(i * share, std::min((i + 1) * share, tiles_of_all), rows, out, parts_[own]);
        });
    });
}

// A row's inputs end where they may; its last group ends with zeros.
void PackedLinear::quantise(const float* x, int row, int rows, Floats& padded) {
    std::memcpy(padded.data(), x + at(row, weights_->inputs()), at(weights_->inputs(), sizeof(float)));
    quantise_inputs(*kernels_, padded.data(), 0, weights_->groups() * GROUP, row, rows, codes_, weights_->groups());
}

void PackedLinear::tiles(int first, int end, int rows, float* out, Floats& part) {
    const int outputs = weights_->outputs(), whole = std::min(end, outputs / TILE);
    if (whole > first) {
        multiply_blocks(*kernels_, *weights_, first, whole - first, codes_, rows, out + first * TILE, outputs);
    }
    if (end <= whole) return;  // else the last tile is not whole
    multiply_blocks(*kernels_, *weights_, end - 1, 1, codes_, rows, part.data(), TILE);
    const int from = (end - 1) * TILE;
    for (int row = 0; row < rows; ++row) {
        std::memcpy(out + at(row, outputs) + from, &part[at(row, TILE)], at(outputs - from, sizeof(float)));
    }
}

}  // namespace draftsmith
