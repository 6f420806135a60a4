// Integer products of a group with AVX2 alone, whose multiplication adds two products in 16 bits; included by
// kernels_avx2.cpp after the vectors. Invariant: sums are exact: a code below 16 times an activation of at most 127 is
// at most 1905, and the 16 of them that meet in one lane over a group are 30,480.
#pragma once

namespace draftsmith {
namespace {

constexpr int PREFETCH_BYTES = 4096;  // see dot_quads.hpp

// These two are written out, and volatile so that they stay in this order: left alone, the compiler sums as a tree and
// spreads everything first, and then has a hundred values for sixteen registers.
inline __m256i spread_quad(const std::int8_t* activations) {
    __m256i spread;
    asm volatile("vpbroadcastd %1, %0" : "=x"(spread) : "m"(*reinterpret_cast<const std::int32_t*>(activations)));
    return spread;
}
inline void add_words(__m256i& words, __m256i codes, __m256i activations) {
    __m256i products;
    asm volatile("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0"
                 : "+x"(words), "=&x"(products) : "x"(codes), "x"(activations));
}
// Adds the pairs of 16-bit sums, `times` each.
inline __m256i widen_words(__m256i sum, __m256i words, short times) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(words, _mm256_set1_epi16(times)));
}

// 8-bit codes are two nibbles with a sum each, too many to have both halves of a tile under way at once.
template <int R>
inline void dot_bytes(const std::uint8_t* codes, const std::int8_t* activations, int quads, int half, I16* sums) {
    __m256i low_words[R], high_words[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) low_words[r] = high_words[r] = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int quad = 0; quad < quads; ++quad) {
        const __m256i both = load_256(codes + 64 * quad + 32 * half);
        if (half == 0) __builtin_prefetch(codes + 64 * quad + PREFETCH_BYTES);
        const __m256i low = low_nibbles(both), high = low_nibbles(_mm256_srli_epi16(both, 4));
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const __m256i spread = spread_quad(activations + 4 * (quad * R + r));
            add_words(low_words[r], low, spread);
            add_words(high_words[r], high, spread);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        __m256i& sum = half == 0 ? sums[r].a : sums[r].b;
        sum = widen_words(widen_words(sum, low_words[r], 1), high_words[r], 16);
    }
}

// Adds the products of `quads` * 4 neighbouring inputs to the integer sums of each row.
template <int BITS, int R>
inline void dot_quads(const std::uint8_t*& codes, const std::int8_t*& activations, int quads, I16* sums) {
    if constexpr (BITS == 4) {
        I16 words[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) words[r] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
#pragma GCC unroll 4
        for (int pair = 0; pair < quads / 2; ++pair) {
            const Codes both = c_load(codes + 64 * pair);
            __builtin_prefetch(codes + 64 * pair + PREFETCH_BYTES);
            const Codes low = c_low(both), high = c_high(both);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const __m256i spread = spread_quad(activations + 4 * (2 * pair * R + r));
                add_words(words[r].a, low.a, spread);
                add_words(words[r].b, low.b, spread);
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const __m256i spread = spread_quad(activations + 4 * ((2 * pair + 1) * R + r));
                add_words(words[r].a, high.a, spread);
                add_words(words[r].b, high.b, spread);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            sums[r] = {widen_words(sums[r].a, words[r].a, 1), widen_words(sums[r].b, words[r].b, 1)};
        }
    } else {
        dot_bytes<R>(codes, activations, quads, 0, sums);
        dot_bytes<R>(codes, activations, quads, 1, sums);
    }
    codes += BITS * quads * 8;
    activations += 4 * R * quads;
}

}  // namespace
}  // namespace draftsmith
