// One template per kernel, over the bytes of a register; the versions are at the end.
#include "row_kernels.hpp"

#include <limits>

#include "elementary.hpp"

namespace draftsmith {
namespace {

// Masks that are looked at right away are quicker in registers of this size, and memory sets the pace anyway.
constexpr int kMaskBytes = 32;
constexpr std::size_t kBlock = 64;  // values between two looks at whether there was any hit

// One pass: each block's maximum is compared with the best so far, and only the winner's block is looked at again.
template <int most, class T> DRAFTSMITH_INLINE std::size_t argmax_body(const T* values, std::size_t size) {
    constexpr int bytes = most < kMaskBytes ? most : kMaskBytes;
    using V = Pack<T, bytes>;
    constexpr std::size_t lanes = bytes / sizeof(T), stride = 4 * lanes, block = 32 * stride;
    Pack<Whole<T>, bytes> broken{};
    bool is_broken = false;
    T largest = -std::numeric_limits<T>::infinity();
    std::size_t start = 0, i = 0;
    for (; i + block <= size; i += block) {
        V best[4];
        for (V& pack : best) pack = V{} - std::numeric_limits<T>::infinity();
        for (std::size_t j = i; j < i + block; j += stride) {
            for (std::size_t part = 0; part < 4; ++part) {
                const V pack = load<V>(values + j + part * lanes);
                best[part] = pack > best[part] ? pack : best[part];
                broken |= pack != pack;
            }
        }
        for (std::size_t part = 1; part < 4; ++part) best[0] = best[part] > best[0] ? best[part] : best[0];
        if (!any(best[0] > largest)) continue;
        for (std::size_t lane = 0; lane < lanes; ++lane) largest = best[0][lane] > largest ? best[0][lane] : largest;
        start = i;
    }
    for (; i < size; ++i) {
        is_broken |= values[i] != values[i];
        if (!(values[i] > largest)) continue;
        largest = values[i];
        start = i;
    }
    if (is_broken || any(broken)) {
        for (i = 0; values[i] == values[i];) ++i;
        return i;
    }
    for (i = start; values[i] != largest;) ++i;
    return i;
}

template <int bytes, class T>
DRAFTSMITH_INLINE double weigh_body(const T* values, std::size_t size, const Weighing<T>& by, T* powers) {
    using V = Pack<T, bytes>;
    constexpr std::size_t lanes = bytes / sizeof(T), stride = 4 * lanes;
    WeightSum<T, bytes> sum(by.bits);
    T rest[stride];
    for (std::size_t i = 0; i < size; i += stride) {
        const T* from = values + i;
        if (i + stride > size) {
            for (std::size_t lane = 0; lane < stride; ++lane) {
                rest[lane] = i + lane < size ? from[lane] : -std::numeric_limits<T>::infinity();
            }
            from = rest;
        }
        V packs[4];
        for (std::size_t part = 0; part < 4; ++part) packs[part] = load<V>(from + part * lanes);
        exponential<T, V, 4>(packs, by.largest, by.inverse_temperature);
        for (std::size_t part = 0; part < 4; ++part) {
            store(powers + i + part * lanes, packs[part]);
            sum.add(packs[part]);
        }
    }
    return sum.total();
}

template <int bytes, class T>
DRAFTSMITH_INLINE double mass_from_body(const T* values, const T* powers, std::size_t size, T bound, int bits) {
    using V = Pack<T, bytes>;
    constexpr std::size_t lanes = bytes / sizeof(T);
    WeightSum<T, bytes> sum(bits);
    std::size_t i = 0;
    for (; i + lanes <= size; i += lanes) sum.add(load<V>(values + i) >= bound ? load<V>(powers + i) : V{});
    double mass = sum.total();
    for (; i < size; ++i) mass += values[i] >= bound ? weight_of<T>(powers[i], bits) : 0.0;
    return mass;
}

template <int bytes, class T>
DRAFTSMITH_INLINE std::size_t count_from_body(const T* values, std::size_t size, T bound) {
    using V = Pack<T, bytes>;
    constexpr std::size_t lanes = bytes / sizeof(T), stride = 4 * lanes;
    Pack<Whole<T>, bytes> found[4] = {};
    std::size_t i = 0, count = 0;
    for (; i + stride <= size; i += stride) {
        for (std::size_t part = 0; part < 4; ++part) found[part] -= load<V>(values + i + part * lanes) >= bound;
    }
    for (; i < size; ++i) count += values[i] >= bound;
    for (const auto& pack : found) {
        for (std::size_t lane = 0; lane < lanes; ++lane) count += static_cast<std::size_t>(pack[lane]);
    }
    return count;
}

template <int most, class T>
DRAFTSMITH_INLINE std::size_t select_body(const T* values, std::size_t size, T bound, std::size_t limit,
                                          std::int32_t* indices) {
    constexpr int bytes = most < kMaskBytes ? most : kMaskBytes;
    using V = Pack<T, bytes>;
    std::size_t count = 0, i = 0;
    for (; i + kBlock <= size; i += kBlock) {
        Pack<Whole<T>, bytes> found{};
        for (std::size_t part = 0; part < kBlock; part += bytes / sizeof(T)) {
            found |= load<V>(values + i + part) >= bound;
        }
        if (!any(found)) continue;
        for (std::size_t j = i; j < i + kBlock; ++j) {
            indices[count] = static_cast<std::int32_t>(j);
            count += values[j] >= bound;
        }
        if (count > limit) return count;
    }
    for (; i < size; ++i) {
        indices[count] = static_cast<std::int32_t>(i);
        count += values[i] >= bound;
    }
    return count;
}

// How far a register of values lies below the largest, as the hurdle measures it.
template <int bytes> DRAFTSMITH_INLINE Pack<float, bytes> heights(const float* values, const Hurdle<float>& hurdle) {
    return (load<Pack<float, bytes>>(values) - hurdle.largest) * hurdle.slope;
}
template <int bytes> DRAFTSMITH_INLINE Pack<float, bytes> heights(const double* values, const Hurdle<double>& hurdle) {
    float narrow[bytes / sizeof(float)];
    for (std::size_t i = 0; i < bytes / sizeof(float); ++i) {
        narrow[i] = static_cast<float>((values[i] - hurdle.largest) * hurdle.slope);
    }
    return load<Pack<float, bytes>>(narrow);
}

// The upper halves of a register of words and the next.
template <int bytes> DRAFTSMITH_INLINE Pack<std::int32_t, bytes> upper_halves(const std::uint64_t* words) {
    using Ints = Pack<std::int32_t, bytes>;
    const Ints low = load<Ints>(words), high = load<Ints>(words + bytes / sizeof *words);
    constexpr int upper = __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__;
    if constexpr (bytes == 64) {
        return __builtin_shufflevector(low, high, upper, 2 + upper, 4 + upper, 6 + upper, 8 + upper, 10 + upper,
                                       12 + upper, 14 + upper, 16 + upper, 18 + upper, 20 + upper, 22 + upper,
                                       24 + upper, 26 + upper, 28 + upper, 30 + upper);
    } else if constexpr (bytes == 32) {
        return __builtin_shufflevector(low, high, upper, 2 + upper, 4 + upper, 6 + upper, 8 + upper, 10 + upper,
                                       12 + upper, 14 + upper);
    } else {
        return __builtin_shufflevector(low, high, upper, 2 + upper, 4 + upper, 6 + upper);
    }
}

// A token beats a score reached only if 1 - u <= -log u < exp(its score - that score). 1 - u is the complement of the
// noise word, of which 31 bits are looked at; read as a whole number, the bits of a float are its logarithm or a little
// less, as the straight line between two powers of two lies below the logarithm.
template <int bytes, class T>
DRAFTSMITH_INLINE bool pass_body(const T* values, const std::uint64_t* words, std::size_t size, const Hurdle<T>& hurdle,
                                 std::int32_t* hits) {
    using Floats = Pack<float, bytes>;
    using Ints = Pack<std::int32_t, bytes>;
    Ints found{};
    const Floats lowest = Floats{} - 0x1p30f;
    for (std::size_t i = 0; i < size; i += bytes / sizeof(float)) {
        Floats height = heights<bytes>(values + i, hurdle) + hurdle.offset;
        height = height > lowest ? height : lowest;
        const Ints noise = (~upper_halves<bytes>(words + i) >> 1) & 0x7FFFFFFF;
        const Floats level = __builtin_convertvector(noise, Floats);
        const Ints hit = bits_of<Ints>(level) <= __builtin_convertvector(height, Ints);
        store(hits + i, hit);
        found |= hit;
    }
    return any(found);
}

}  // namespace

DRAFTSMITH_VERSIONS(std::size_t, argmax, (const float* values, std::size_t size), (values, size))
DRAFTSMITH_VERSIONS(std::size_t, argmax, (const double* values, std::size_t size), (values, size))
DRAFTSMITH_VERSIONS(double, weigh,
                    (const float* values, std::size_t size, const Weighing<float>& by, float* powers),
                    (values, size, by, powers))
DRAFTSMITH_VERSIONS(double, weigh,
                    (const double* values, std::size_t size, const Weighing<double>& by, double* powers),
                    (values, size, by, powers))
DRAFTSMITH_VERSIONS(double, mass_from,
                    (const float* values, const float* powers, std::size_t size, float bound, int bits),
                    (values, powers, size, bound, bits))
DRAFTSMITH_VERSIONS(double, mass_from,
                    (const double* values, const double* powers, std::size_t size, double bound, int bits),
                    (values, powers, size, bound, bits))
DRAFTSMITH_VERSIONS(std::size_t, count_from, (const float* values, std::size_t size, float bound),
                    (values, size, bound))
DRAFTSMITH_VERSIONS(std::size_t, count_from, (const double* values, std::size_t size, double bound),
                    (values, size, bound))
DRAFTSMITH_VERSIONS(std::size_t, select,
                    (const float* values, std::size_t size, float bound, std::size_t limit, std::int32_t* indices),
                    (values, size, bound, limit, indices))
DRAFTSMITH_VERSIONS(std::size_t, select,
                    (const double* values, std::size_t size, double bound, std::size_t limit, std::int32_t* indices),
                    (values, size, bound, limit, indices))
DRAFTSMITH_VERSIONS(bool, pass,
                    (const float* values, const std::uint64_t* words, std::size_t size,
                     const Hurdle<float>& hurdle, std::int32_t* hits),
                    (values, words, size, hurdle, hits))
DRAFTSMITH_VERSIONS(bool, pass,
                    (const double* values, const std::uint64_t* words, std::size_t size, const Hurdle<double>& hurdle,
                     std::int32_t* hits),
                    (values, words, size, hurdle, hits))

}  // namespace draftsmith
