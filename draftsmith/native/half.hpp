// 16-bit floats by bits, for packing and for processors without instructions for them.
#pragma once

#include <cstdint>
#include <cstring>

namespace draftsmith {

inline float float_from_bits(std::uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline std::uint32_t bits_of_float(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

// IEEE binary16 to binary32, exact. Subnormals come out of a subtraction of two normal numbers.
inline float half_to_float(std::uint16_t half) {
    const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000u) << 16;
    const std::uint32_t magnitude = half & 0x7fffu;
    if (magnitude >= 0x7c00u) return float_from_bits(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
    if (magnitude < 0x400u) {
        const float value = float_from_bits(0x38800000u + (magnitude << 13)) - float_from_bits(0x38800000u);
        return float_from_bits(sign | bits_of_float(value));
    }
    return float_from_bits(sign | ((magnitude << 13) + 0x38000000u));
}

// Nearest, ties to even; overflow gives infinity.
inline std::uint16_t float_to_half(float value) {
    const std::uint32_t bits = bits_of_float(value);
    const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u);
    if (magnitude >= 0x47800000u) return static_cast<std::uint16_t>(sign | 0x7c00u);
    if (magnitude < 0x38800000u) {
        // Adding 0.5 lets the addition round at the 24th binary place, where the last place of a subnormal is.
        const float shifted = float_from_bits(magnitude) + 0.5f;
        return static_cast<std::uint16_t>(sign | (bits_of_float(shifted) - 0x3f000000u));
    }
    const std::uint32_t odd = (magnitude >> 13) & 1u;
    return static_cast<std::uint16_t>(sign | ((magnitude - 0x38000000u + 0xfffu + odd) >> 13));
}

inline float bf16_to_float(std::uint16_t bits) { return float_from_bits(static_cast<std::uint32_t>(bits) << 16); }

inline std::uint16_t float_to_bf16(float value) {
    const std::uint32_t bits = bits_of_float(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
    return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace draftsmith
