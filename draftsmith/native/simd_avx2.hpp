// Vectors of 16 lanes on AVX2 with FMA and F16C, as two halves; included by kernels_avx2.cpp, which has products of its
// own, and, with __AVXVNNI__, by kernels_avxvnni.cpp.
// Invariant: every reduction over lanes has one fixed tree, so a sum depends on its terms alone.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace draftsmith {
namespace {

constexpr int MAX_BLOCK_ROWS = 4;
constexpr int ATTENTION_QUERIES = 3;
constexpr int ATTENTION_PARTS = 2;

struct F16 {
    __m256 a, b;
};
struct I16 {
    __m256i a, b;
};
using Codes = I16;

inline F16 f_zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F16 f_set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F16 f_load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void f_store(float* p, F16 x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
inline F16 f_add(F16 x, F16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F16 f_sub(F16 x, F16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F16 f_mul(F16 x, F16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F16 f_div(F16 x, F16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F16 f_max(F16 x, F16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F16 f_min(F16 x, F16 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline F16 f_fma(F16 x, F16 y, F16 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F16 f_from_int(I16 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline I16 i_from_float(F16 x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline __m128i load_128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline F16 f_load_half(const std::uint16_t* p) {
    return {_mm256_cvtph_ps(load_128(p)), _mm256_cvtph_ps(load_128(p + 8))};
}
inline void f_store_half(std::uint16_t* p, F16 x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}
inline __m256 widen_bf16(const std::uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_128(p)), 16));
}
inline F16 f_load_bf16(const std::uint16_t* p) { return {widen_bf16(p), widen_bf16(p + 8)}; }
inline __m256i round_bf16(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
}
inline void f_store_bf16(std::uint16_t* p, F16 x) {
    const __m256i packed = _mm256_packus_epi32(round_bf16(x.a), round_bf16(x.b));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
inline F16 f_load_u8(const std::uint8_t* p) {
    const __m128i bytes = load_128(p);
    return f_from_int({_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))});
}
inline F16 f_load_i8(const std::uint8_t* p) {
    const __m128i bytes = load_128(p);
    return f_from_int({_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))});
}
inline __m256 pow2_half(__m256i n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
// 2 to the power n, for n in -126..127.
inline F16 f_pow2(I16 n) { return {pow2_half(n.a), pow2_half(n.b)}; }
inline void i_store_i8(std::int8_t* p, I16 x) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
inline I16 i_set(std::int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
// A small integer added to this one has, read as a float, the value 1.5 * 2^23 plus that integer.
constexpr std::int32_t INTEGER_ZERO = 0x4b400000;
inline F16 f_integer_offset(F16 scale) { return f_mul(scale, f_set(-12582912.0f)); }
// (x - INTEGER_ZERO) * scale, rounded once; x within 2^22 of INTEGER_ZERO. The offset is exact for a scale of up to 22
// bits, so that the sum of both products is the product.
inline F16 f_scale_integer(I16 x, F16 scale, F16 offset) {
    return f_fma({_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}, scale, offset);
}
// The sum of 16 bytes.
inline int sum_bytes(const std::int8_t* p) {
    const __m256i words = _mm256_cvtepi8_epi16(load_128(p));
    const __m256i pairs = _mm256_madd_epi16(words, _mm256_set1_epi16(1));
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}
inline __m256i larger_magnitude(F16 x) {
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    const __m256i a = _mm256_and_si256(_mm256_castps_si256(x.a), magnitude);
    return _mm256_max_epi32(a, _mm256_and_si256(_mm256_castps_si256(x.b), magnitude));
}
// The largest magnitude, or NaN or infinity if there is one: magnitudes order like their bits.
inline float f_largest_magnitude(F16 x, F16 y) {
    const __m256i both = _mm256_max_epi32(larger_magnitude(x), larger_magnitude(y));
    const __m128i four = _mm_max_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
    const __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    const int bits = _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
}
inline float f_sum(F16 x) {
    const __m256 half = _mm256_add_ps(x.a, x.b);
    const __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    const __m128 pair = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
    return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
}
inline float f_largest(F16 x) {
    const __m256 half = _mm256_max_ps(x.a, x.b);
    const __m128 quarter = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    const __m128 pair = _mm_max_ps(quarter, _mm_movehl_ps(quarter, quarter));
    return _mm_cvtss_f32(_mm_max_ss(pair, _mm_movehdup_ps(pair)));
}
inline __m256i load_256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
// 64 codes: of 16 outputs, 4 neighbouring inputs each.
inline Codes c_load(const std::uint8_t* p) { return {load_256(p), load_256(p + 32)}; }
inline __m256i low_nibbles(__m256i x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
inline Codes c_low(Codes x) { return {low_nibbles(x.a), low_nibbles(x.b)}; }
inline Codes c_high(Codes x) {
    return {low_nibbles(_mm256_srli_epi16(x.a, 4)), low_nibbles(_mm256_srli_epi16(x.b, 4))};
}

#ifdef __AVXVNNI__
// Adds to each output the products of its 4 codes with 4 activations.
template <int BITS>
inline I16 dot4(I16 sum, Codes codes, const std::int8_t* activations) {
    std::int32_t four;
    __builtin_memcpy(&four, activations, 4);
    const __m256i spread = _mm256_set1_epi32(four);
    return {_mm256_dpbusd_avx_epi32(sum.a, codes.a, spread), _mm256_dpbusd_avx_epi32(sum.b, codes.b, spread)};
}
#endif

}  // namespace
}  // namespace draftsmith
