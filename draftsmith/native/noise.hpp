// Counter-based noise as in draftsmith/core/random.py: Philox4x64-10 and standard Gumbel values of any token.
// Used by sampling.cpp, row_drafter_head.cpp and bind_sampling.cpp. Invariant: the same bits as the Python side.
#pragma once

#include <cstddef>
#include <cstdint>

#include "simd.hpp"

namespace draftsmith {

// Round keys, and what the constant words of the counter contribute to the first two rounds.
struct Rounds {
    std::uint64_t low[10], high[10], mix_0, mix_2, word_3;
};

// The words of one key; word i of the stream belongs to token i.
class Noise {
public:
    Noise(std::uint64_t seed, std::uint64_t stream, std::uint64_t position, std::uint64_t node);

    // Words of `num_blocks` blocks of four tokens, beginning with block `first`.
    void words(std::uint64_t first, std::size_t num_blocks, std::uint64_t* out) const;

    std::uint64_t word(std::uint64_t token) const {
        std::uint64_t block[4];
        words(token / 4, 1, block);
        return block[token % 4];
    }

    // The noise of tokens 0 to count - 1.
    void gumbel(double* out, std::size_t count) const;

private:
    Rounds rounds_;
};

}  // namespace draftsmith
