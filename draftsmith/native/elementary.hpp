// Logarithm and exponential as in draftsmith/core/elementary.py, step for step: the same bits, whatever the processor.
// Used by noise.cpp and sampling.cpp. One template serves numbers and packs.
#pragma once

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

// Powers of two are put in through the exponent's bits: the rounder leaves the whole number in the low ones.
DRAFTSMITH_INLINE Floats scaled(const Floats& x, const Floats& rounded) {
    return bits_of<Floats>(Ints(bits_of<Ints>(x) + (bits_of<Ints>(rounded) << 23)));
}
DRAFTSMITH_INLINE Doubles scaled(const Doubles& x, const Doubles& rounded) {
    return bits_of<Doubles>(Longs(bits_of<Longs>(x) + (bits_of<Longs>(rounded) << 52)));
}
DRAFTSMITH_INLINE Doubles widened(const Floats& x) { return __builtin_convertvector(x, Doubles); }
DRAFTSMITH_INLINE Doubles widened(const Doubles& x) { return x; }

DRAFTSMITH_INLINE Floats exp_series(const Floats& x) {
    Floats series = x * 0x1.6d117cp-10f + 0x1.120be2p-7f;
    series = series * x + 0x1.555518p-5f;
    series = series * x + 0x1.5554dcp-3f;
    return series * x + 0x1.0p-1f;
}
DRAFTSMITH_INLINE Doubles exp_series(const Doubles& x) {
    Doubles series = x * 0x1.af390ba7e6f47p-26 + 0x1.2891d4ffbb0f9p-22;
    series = series * x + 0x1.71de0d85293b8p-19;
    series = series * x + 0x1.a019b8ca26fcfp-16;
    series = series * x + 0x1.a01a01a7cebcdp-13;
    series = series * x + 0x1.6c16c1789d1d7p-10;
    series = series * x + 0x1.11111111109a6p-7;
    series = series * x + 0x1.5555555553d37p-5;
    series = series * x + 0x1.5555555555556p-3;
    return series * x + 0x1.0000000000001p-1;
}
template <class T> struct ExpTable;
template <> struct ExpTable<float> {
    static constexpr float rounder = 12582912.0f, ln2_high = 0x1.62e4p-1f, ln2_low = 0x1.7f7d1cp-20f;
};
template <> struct ExpTable<double> {
    static constexpr double rounder = 6755399441055744.0, ln2_high = kLn2High, ln2_low = kLn2Low;
};

// exp((value - largest) * inverse_temperature) in fixed point: `step` rounds it so that sums of weights are exact.
template <class T>
DRAFTSMITH_INLINE Doubles exp_weight(const typename Pack<T>::Values& values, T largest, T inverse_temperature,
                                     double step) {
    using V = typename Pack<T>::Values;
    using Table = ExpTable<T>;
    V x = (values - largest) * inverse_temperature;
    const V lowest = V{} - T(80);
    x = x > lowest ? x : lowest;
    const V rounded = x * T(kLog2E) + Table::rounder;
    const V exponents = rounded - Table::rounder;
    x = x - exponents * Table::ln2_high;
    x = x - exponents * Table::ln2_low;
    const V powers = (exp_series(x) * (x * x) + x) + T(1);
    return (widened(scaled(powers, rounded)) + step) - step;
}

}  // namespace draftsmith
