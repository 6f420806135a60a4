// Vectors of 16 lanes on AVX-512 with VNNI; included by kernels_avx512.cpp alone.
// Invariant: every reduction over lanes has one fixed tree, so a sum depends on its terms alone.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace draftsmith {
namespace {

constexpr int MAX_BLOCK_ROWS = 8;
constexpr int ATTENTION_QUERIES = 6;
constexpr int ATTENTION_PARTS = 4;

using F16 = __m512;
using I16 = __m512i;
using Codes = __m512i;

inline F16 f_zero() { return _mm512_setzero_ps(); }
inline F16 f_set(float x) { return _mm512_set1_ps(x); }
inline F16 f_load(const float* p) { return _mm512_loadu_ps(p); }
inline void f_store(float* p, F16 x) { _mm512_storeu_ps(p, x); }
inline F16 f_add(F16 a, F16 b) { return _mm512_add_ps(a, b); }
inline F16 f_sub(F16 a, F16 b) { return _mm512_sub_ps(a, b); }
inline F16 f_mul(F16 a, F16 b) { return _mm512_mul_ps(a, b); }
inline F16 f_div(F16 a, F16 b) { return _mm512_div_ps(a, b); }
inline F16 f_max(F16 a, F16 b) { return _mm512_max_ps(a, b); }
inline F16 f_min(F16 a, F16 b) { return _mm512_min_ps(a, b); }
inline F16 f_fma(F16 a, F16 b, F16 c) { return _mm512_fmadd_ps(a, b, c); }
inline F16 f_from_int(I16 a) { return _mm512_cvtepi32_ps(a); }
inline I16 i_from_float(F16 a) { return _mm512_cvtps_epi32(a); }
inline F16 f_load_half(const std::uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline void f_store_half(std::uint16_t* p, F16 x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
inline F16 f_load_bf16(const std::uint16_t* p) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
inline void f_store_bf16(std::uint16_t* p, F16 x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}
inline F16 f_load_u8(const std::uint8_t* p) {
    return f_from_int(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline F16 f_load_i8(const std::uint8_t* p) {
    return f_from_int(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
// 2 to the power n, for n in -126..127.
inline F16 f_pow2(I16 n) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23));
}
inline void i_store_i8(std::int8_t* p, I16 x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(x));
}
inline I16 i_set(std::int32_t x) { return _mm512_set1_epi32(x); }
// A small integer added to this one has, read as a float, the value 1.5 * 2^23 plus that integer.
constexpr std::int32_t INTEGER_ZERO = 0x4b400000;
inline F16 f_integer_offset(F16 scale) { return f_mul(scale, f_set(-12582912.0f)); }
// (x - INTEGER_ZERO) * scale, rounded once; x within 2^22 of INTEGER_ZERO. The offset is exact for a scale of up to 22
// bits, so that the sum of both products is the product.
inline F16 f_scale_integer(I16 x, F16 scale, F16 offset) { return f_fma(_mm512_castsi512_ps(x), scale, offset); }
// The sum of 16 bytes.
inline int sum_bytes(const std::int8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m128i four = _mm_dpbusd_epi32(_mm_setzero_si128(), _mm_set1_epi8(1), bytes);
    const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}
// The largest magnitude, or NaN or infinity if there is one: magnitudes order like their bits.
inline float f_largest_magnitude(F16 a, F16 b) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    const __m512i x = _mm512_and_si512(_mm512_castps_si512(a), magnitude);
    const __m512i y = _mm512_and_si512(_mm512_castps_si512(b), magnitude);
    const int bits = _mm512_reduce_max_epi32(_mm512_max_epi32(x, y));
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
}

inline float f_sum(F16 x) {
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    const __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    const __m128 pair = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
    return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
}
inline float f_largest(F16 x) { return _mm512_reduce_max_ps(x); }

// 64 codes: of 16 outputs, 4 neighbouring inputs each.
inline Codes c_load(const std::uint8_t* p) { return _mm512_loadu_si512(p); }
inline Codes c_low(Codes x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
inline Codes c_high(Codes x) { return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15)); }

// Adds to each output the products of its 4 codes with 4 activations.
template <int BITS>
inline I16 dot4(I16 sum, Codes codes, const std::int8_t* activations) {
    // Written out, because the compiler would spend an instruction of its own on the broadcast.
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes), "m"(*reinterpret_cast<const std::int32_t*>(activations)));
    return sum;
}

}  // namespace
}  // namespace draftsmith
