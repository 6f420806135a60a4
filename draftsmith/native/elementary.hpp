// Logarithm and exponential as in draftsmith/core/elementary.py, step for step: the same bits, whatever the processor.
// Used by noise.cpp and sampling.cpp. One template serves numbers and packs.
#pragma once

#include <algorithm>
#include <bit>

#include "simd.hpp"

namespace draftsmith {

constexpr double kLn2High = 0x1.62e42fefa0000p-1, kLn2Low = 0x1.cf79abc9e3b3ap-40, kLog2E = 0x1.71547652b82fep+0;

// log(1 + f) = f - s * (f - z * P(z)) with s = f / (2 + f), z = s * s. For normal positive numbers.
template <class D, class W> DRAFTSMITH_INLINE D natural_log(const D& x) {
    // The exponent is biased by 1024, so that the shift needs no sign; numbers near one have exponent 0.
    const W bits = bits_of<W>(x);
    const W biased = (bits - 0x3FE6A09E667F3BCDull + (1024ull << 52)) >> 52;
    const D powers = bits_of<D>(W(biased | 0x4330000000000000ull)) - 0x1.00000000004p52;
    const D fraction = bits_of<D>(W(bits - ((biased - 1024ull) << 52))) - 1.0;
    const D ratio = fraction / (fraction + 2.0);
    const D square = ratio * ratio;
    D series = square * 0x1.2b5900de53b32p-3 + 0x1.39fe51a7c18f9p-3;
    series = series * square + 0x1.7462b51cb66b1p-3;
    series = series * square + 0x1.c71c62e3f11e6p-3;
    series = series * square + 0x1.2492492df281ap-2;
    series = series * square + 0x1.99999999952d7p-2;
    series = series * square + 0x1.5555555555558p-1;
    series = series * square;
    const D correction = ratio * (fraction - series) - powers * kLn2Low;
    return powers * kLn2High + (fraction - correction);
}

// ((word >> 12) + 0.5) / 2**52, and standard Gumbel noise of it.
template <class D, class W> DRAFTSMITH_INLINE D uniform_of(const W& word) {
    const D whole = bits_of<D>(W((word >> 12) | 0x4330000000000000ull)) - 0x1p52;
    return (whole + 0.5) * 0x1p-52;
}
template <class D, class W> DRAFTSMITH_INLINE D gumbel_of(const W& word) {
    const D exponential = -natural_log<D, W>(uniform_of<D, W>(word));
    return -natural_log<D, W>(exponential);
}

// Steps and coefficients of the exponential: exp(r) = 1 + (r + r * r * Q(r)) for |r| up to half of log 2.
template <class T> struct ExpTable;
template <> struct ExpTable<float> {
    static constexpr float rounder = 12582912.0f, ln2_high = 0x1.62e4p-1f, ln2_low = 0x1.7f7d1cp-20f;
    static constexpr float series[] = {0x1.6d117cp-10f, 0x1.120be2p-7f, 0x1.555518p-5f, 0x1.5554dcp-3f, 0x1.0p-1f};
    static constexpr int mantissa_bits = 23;
};
template <> struct ExpTable<double> {
    static constexpr double rounder = 6755399441055744.0, ln2_high = kLn2High, ln2_low = kLn2Low;
    static constexpr double series[] = {
        0x1.af390ba7e6f47p-26, 0x1.2891d4ffbb0f9p-22, 0x1.71de0d85293b8p-19, 0x1.a019b8ca26fcfp-16,
        0x1.a01a01a7cebcdp-13, 0x1.6c16c1789d1d7p-10, 0x1.11111111109a6p-7,  0x1.5555555553d37p-5,
        0x1.5555555555556p-3,  0x1.0000000000001p-1,
    };
    static constexpr int mantissa_bits = 52;
};

// exp((value - largest) * inverse_temperature) of each pack, in the row's own precision. Packs advance side by side.
template <class T, class V, int count>
DRAFTSMITH_INLINE void exponential(V (&packs)[count], T largest, T inverse_temperature) {
    using Table = ExpTable<T>;
    typedef Pack<Whole<T>, sizeof(V)> Bits;
    const V lowest = V{} - T(80);
    V rounded[count], series[count];
    for (int i = 0; i < count; ++i) packs[i] = (packs[i] - largest) * inverse_temperature;
    for (int i = 0; i < count; ++i) packs[i] = packs[i] > lowest ? packs[i] : lowest;
    for (int i = 0; i < count; ++i) rounded[i] = packs[i] * T(kLog2E) + Table::rounder;
    for (int i = 0; i < count; ++i) packs[i] = packs[i] - (rounded[i] - Table::rounder) * Table::ln2_high;
    for (int i = 0; i < count; ++i) packs[i] = packs[i] - (rounded[i] - Table::rounder) * Table::ln2_low;
    for (int i = 0; i < count; ++i) series[i] = V{} + Table::series[0];
#pragma GCC unroll 16
    for (std::size_t j = 1; j < sizeof(Table::series) / sizeof(T); ++j) {
        for (int i = 0; i < count; ++i) series[i] = series[i] * packs[i] + Table::series[j];
    }
    for (int i = 0; i < count; ++i) series[i] = (series[i] * (packs[i] * packs[i]) + packs[i]) + T(1);
    // Powers of two are put in through the exponent's bits: the rounder leaves the whole number in the low ones.
    for (int i = 0; i < count; ++i) {
        packs[i] = bits_of<V>(Bits(bits_of<Bits>(series[i]) + (bits_of<Bits>(rounded[i]) << Table::mantissa_bits)));
    }
}

// As core/elementary.py's weight_bits.
template <class T> inline int weight_bits(std::size_t count) {
    return std::min(sizeof(T) == sizeof(float) ? 37 : 48, 53 - static_cast<int>(std::bit_width(count - 1)));
}

// Weights are exponentials in fixed point, so that sums are exact in any order: single precision is cut off after
// `bits` binary places, double precision rounded to them.
template <class T> DRAFTSMITH_INLINE double weight_of(T power, int bits);
template <> DRAFTSMITH_INLINE double weight_of<float>(float power, int bits) {
    const auto units = static_cast<std::int64_t>(static_cast<double>(power) * static_cast<double>(1ll << bits));
    return static_cast<double>(units) / static_cast<double>(1ll << bits);
}
template <> DRAFTSMITH_INLINE double weight_of<double>(double power, int bits) {
    const double step = 1.5 * static_cast<double>(1ll << (52 - bits));
    return (power + step) - step;
}

// Sums weights of packs of powers. Single precision in whole numbers, 15 places and the rest (22 at most) apart.
template <class T, int bytes> class WeightSum;
template <int bytes> class WeightSum<float, bytes> {
    using Ints = Pack<std::int32_t, bytes>;
    using Floats = Pack<float, bytes>;
    Ints high_{}, low_{};
    std::int64_t highs_ = 0, lows_ = 0;
    int bits_, room_ = kRoom;
    float low_scale_;
    static constexpr int kRoom = 256;  // packs until a lane might overflow

    DRAFTSMITH_INLINE void settle() {
        for (std::size_t lane = 0; lane < bytes / sizeof(float); ++lane) {
            highs_ += high_[lane];
            lows_ += low_[lane];
        }
        high_ = low_ = Ints{};
        room_ = kRoom;
    }

public:
    DRAFTSMITH_INLINE explicit WeightSum(int bits) : bits_(bits), low_scale_(static_cast<float>(1 << (bits - 15))) {}
    DRAFTSMITH_INLINE void add(const Floats& powers) {
        const Floats scaled = powers * 32768.0f;
        const Ints whole = __builtin_convertvector(scaled, Ints);
        high_ += whole;
        low_ += __builtin_convertvector((scaled - __builtin_convertvector(whole, Floats)) * low_scale_, Ints);
        if (--room_ == 0) settle();
    }
    DRAFTSMITH_INLINE double total() {
        settle();
        return static_cast<double>((highs_ << (bits_ - 15)) + lows_) / static_cast<double>(1ll << bits_);
    }
};
template <int bytes> class WeightSum<double, bytes> {
    Pack<double, bytes> sum_{};
    double step_;

public:
    DRAFTSMITH_INLINE explicit WeightSum(int bits) : step_(1.5 * static_cast<double>(1ll << (52 - bits))) {}
    DRAFTSMITH_INLINE void add(const Pack<double, bytes>& powers) { sum_ += (powers + step_) - step_; }
    DRAFTSMITH_INLINE double total() {
        double total = 0;
        for (std::size_t lane = 0; lane < bytes / sizeof(double); ++lane) total += sum_[lane];
        return total;
    }
};

}  // namespace draftsmith
