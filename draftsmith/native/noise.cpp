// Philox as published, with the two rounds that barely vary between blocks shortened.
#include "noise.hpp"

#include <algorithm>

#include "elementary.hpp"

namespace draftsmith {
namespace {

constexpr std::uint64_t kFirst = 0xD2E7470EE14C6C93ull, kSecond = 0xCA5A826395121157ull;
constexpr std::size_t kChunk = 256;  // words made at a time

struct Product {
    std::uint64_t high, low;
};
__extension__ typedef unsigned __int128 Wide;

DRAFTSMITH_INLINE Product times(std::uint64_t a, std::uint64_t b) {
    const Wide product = static_cast<Wide>(a) * b;
    return {static_cast<std::uint64_t>(product >> 64), static_cast<std::uint64_t>(product)};
}

template <int bytes> DRAFTSMITH_INLINE void gumbel_chunk_body(const std::uint64_t* words, double* out) {
    for (std::size_t i = 0; i < kChunk; i += kWide) {
        store(out + i, gumbel_of<WideDoubles, WideWords>(load<WideWords>(words + i)));
    }
}
DRAFTSMITH_VERSIONS(void, gumbel_chunk, (const std::uint64_t* words, double* out), (words, out))

template <int bytes>
DRAFTSMITH_INLINE void philox_body(const Rounds& rounds, std::uint64_t begin, std::size_t num_blocks,
                                   std::uint64_t* out) {
    for (std::size_t i = 0; i < num_blocks; ++i) {
        // Of the first two rounds' products only these two vary with the block.
        const Product block = times(begin + i + 1, kFirst);
        const Product mixed = times(block.high ^ rounds.high[0], kSecond);
        std::uint64_t w0 = mixed.high ^ rounds.mix_0, w1 = mixed.low, w2 = block.low ^ rounds.mix_2, w3 = rounds.word_3;
#pragma GCC unroll 8
        for (int round = 2; round < 10; ++round) {
            const Product first = times(w0, kFirst), second = times(w2, kSecond);
            w0 = second.high ^ w1 ^ rounds.low[round];
            w1 = second.low;
            w2 = first.high ^ w3 ^ rounds.high[round];
            w3 = first.low;
        }
        out[4 * i] = w0;
        out[4 * i + 1] = w1;
        out[4 * i + 2] = w2;
        out[4 * i + 3] = w3;
    }
}
DRAFTSMITH_VERSIONS(void, philox,
                    (const Rounds& rounds, std::uint64_t begin, std::size_t num_blocks, std::uint64_t* out),
                    (rounds, begin, num_blocks, out))

}  // namespace

Noise::Noise(std::uint64_t seed, std::uint64_t stream, std::uint64_t position, std::uint64_t node) {
    for (int round = 0; round < 10; ++round) {
        rounds_.low[round] = seed + static_cast<std::uint64_t>(round) * 0x9E3779B97F4A7C15ull;
        rounds_.high[round] = stream + static_cast<std::uint64_t>(round) * 0xBB67AE8584CAA73Bull;
    }
    const Product second = times(node, kSecond);
    const Product first = times(second.high ^ position ^ rounds_.low[0], kFirst);
    rounds_.mix_0 = second.low ^ rounds_.low[1];
    rounds_.mix_2 = first.high ^ rounds_.high[1];
    rounds_.word_3 = first.low;
}

void Noise::words(std::uint64_t first, std::size_t num_blocks, std::uint64_t* out) const {
    philox(rounds_, first, num_blocks, out);
}

void Noise::gumbel(double* out, std::size_t count) const {
    std::uint64_t words[kChunk];
    double rest[kChunk];
    for (std::size_t begin = 0; begin < count; begin += kChunk) {
        const std::size_t size = std::min(kChunk, count - begin);
        philox(rounds_, begin / 4, (size + 3) / 4, words);
        if (size == kChunk) {
            gumbel_chunk(words, out + begin);
        } else {
            std::fill(words + (size + 3) / 4 * 4, words + kChunk, 0);
            gumbel_chunk(words, rest);
            std::copy(rest, rest + size, out + begin);
        }
    }
}

}  // namespace draftsmith
