// Vectors of 16 lanes in plain C++ (GCC and Clang vectorise the loops); included by kernels_portable.cpp.
// Invariant: every reduction over lanes has one fixed tree, so a sum depends on its terms alone.
#pragma once

#include <cmath>
#include <cstdint>

#include "half.hpp"

namespace draftsmith {
namespace {

constexpr int MAX_BLOCK_ROWS = 4;
constexpr int ATTENTION_QUERIES = 2;
constexpr int ATTENTION_PARTS = 2;

struct F16 {
    float v[16];
};
struct I16 {
    std::int32_t v[16];
};
struct Codes {
    std::uint8_t v[64];
};

template <class Result, class Make>
inline Result lanes(Make make) {
    Result result;
    for (int i = 0; i < 16; ++i) result.v[i] = make(i);
    return result;
}

inline F16 f_set(float x) { return lanes<F16>([&](int) { return x; }); }
inline F16 f_zero() { return f_set(0.0f); }
inline F16 f_load(const float* p) { return lanes<F16>([&](int i) { return p[i]; }); }
inline void f_store(float* p, F16 x) {
    for (int i = 0; i < 16; ++i) p[i] = x.v[i];
}
inline F16 f_add(F16 a, F16 b) { return lanes<F16>([&](int i) { return a.v[i] + b.v[i]; }); }
inline F16 f_sub(F16 a, F16 b) { return lanes<F16>([&](int i) { return a.v[i] - b.v[i]; }); }
inline F16 f_mul(F16 a, F16 b) { return lanes<F16>([&](int i) { return a.v[i] * b.v[i]; }); }
inline F16 f_div(F16 a, F16 b) { return lanes<F16>([&](int i) { return a.v[i] / b.v[i]; }); }
inline F16 f_max(F16 a, F16 b) { return lanes<F16>([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
inline F16 f_min(F16 a, F16 b) { return lanes<F16>([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
// Rounded twice: not every processor has a fused multiply-add, and in software it is slow.
inline F16 f_fma(F16 a, F16 b, F16 c) { return lanes<F16>([&](int i) { return a.v[i] * b.v[i] + c.v[i]; }); }
inline F16 f_from_int(I16 a) { return lanes<F16>([&](int i) { return static_cast<float>(a.v[i]); }); }
// What no integer holds becomes 0: the conversion itself would be undefined.
inline I16 i_from_float(F16 a) {
    return lanes<I16>([&](int i) {
        return std::fabs(a.v[i]) < 2147483648.0f ? static_cast<std::int32_t>(std::nearbyintf(a.v[i])) : 0;
    });
}
inline F16 f_load_half(const std::uint16_t* p) { return lanes<F16>([&](int i) { return half_to_float(p[i]); }); }
inline void f_store_half(std::uint16_t* p, F16 x) {
    for (int i = 0; i < 16; ++i) p[i] = float_to_half(x.v[i]);
}
inline F16 f_load_bf16(const std::uint16_t* p) { return lanes<F16>([&](int i) { return bf16_to_float(p[i]); }); }
inline void f_store_bf16(std::uint16_t* p, F16 x) {
    for (int i = 0; i < 16; ++i) p[i] = float_to_bf16(x.v[i]);
}
inline F16 f_load_u8(const std::uint8_t* p) { return lanes<F16>([&](int i) { return static_cast<float>(p[i]); }); }
inline F16 f_load_i8(const std::uint8_t* p) {
    return lanes<F16>([&](int i) { return static_cast<float>(static_cast<std::int8_t>(p[i])); });
}
// 2 to the power n, for n in -126..127.
inline F16 f_pow2(I16 n) {
    return lanes<F16>([&](int i) { return float_from_bits(static_cast<std::uint32_t>(n.v[i] + 127) << 23); });
}
inline void i_store_i8(std::int8_t* p, I16 x) {
    for (int i = 0; i < 16; ++i) p[i] = static_cast<std::int8_t>(x.v[i]);
}
inline I16 i_set(std::int32_t x) { return lanes<I16>([&](int) { return x; }); }
// Where a fused multiply-add is one instruction, integers are scaled with it (see the other vectors); here not.
constexpr std::int32_t INTEGER_ZERO = 0;
inline F16 f_integer_offset(F16 scale) { return scale; }
inline F16 f_scale_integer(I16 x, F16 scale, F16 /*offset*/) {
    return lanes<F16>([&](int i) { return static_cast<float>(x.v[i]) * scale.v[i]; });
}
// The sum of 16 bytes.
inline int sum_bytes(const std::int8_t* p) {
    int sum = 0;
    for (int i = 0; i < 16; ++i) sum += p[i];
    return sum;
}
// The largest magnitude, or NaN or infinity if there is one: magnitudes order like their bits.
inline float f_largest_magnitude(const F16& a, const F16& b) {
    std::uint32_t largest = 0;
    for (int i = 0; i < 16; ++i) {
        const std::uint32_t x = bits_of_float(a.v[i]) & 0x7fffffffu, y = bits_of_float(b.v[i]) & 0x7fffffffu;
        largest = largest > x ? largest : x;
        largest = largest > y ? largest : y;
    }
    return float_from_bits(largest);
}
inline float f_sum(F16 x) {
    for (int width = 8; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) x.v[i] = x.v[i] + x.v[i + width];
    }
    return x.v[0];
}
inline float f_largest(F16 x) {
    float largest = x.v[0];
    for (int i = 1; i < 16; ++i) largest = largest > x.v[i] ? largest : x.v[i];
    return largest;
}
// 64 codes: of 16 outputs, 4 neighbouring inputs each.
inline Codes c_load(const std::uint8_t* p) {
    Codes codes;
    for (int i = 0; i < 64; ++i) codes.v[i] = p[i];
    return codes;
}
inline Codes c_low(Codes x) {
    for (int i = 0; i < 64; ++i) x.v[i] = x.v[i] & 15;
    return x;
}
inline Codes c_high(Codes x) {
    for (int i = 0; i < 64; ++i) x.v[i] = static_cast<std::uint8_t>(x.v[i] >> 4);
    return x;
}

// Adds to each output the products of its 4 codes with 4 activations.
template <int BITS>
inline I16 dot4(I16 sum, const Codes& codes, const std::int8_t* activations) {
    for (int i = 0; i < 16; ++i) {
        for (int k = 0; k < 4; ++k) sum.v[i] += codes.v[4 * i + k] * activations[k];
    }
    return sum;
}

}  // namespace
}  // namespace draftsmith
