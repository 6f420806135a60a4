#include "kernels.hpp"

#include <limits>

#include "elementary.hpp"

namespace draftsmith {
namespace {

constexpr std::size_t kBlock = 64;  // values between two looks at whether there was any hit

// The pack at `i`; what lies beyond the row reads as minus infinity.
template <class T> DRAFTSMITH_INLINE typename Pack<T>::Values pack_at(const T* values, std::size_t size, std::size_t i) {
    using V = typename Pack<T>::Values;
    if (i + kLanes <= size) return load<V>(values + i);
    V pack = V{} - std::numeric_limits<T>::infinity();
    for (std::size_t lane = 0; i + lane < size; ++lane) pack[lane] = values[i + lane];
    return pack;
}

template <class T> DRAFTSMITH_INLINE std::size_t argmax_body(const T* values, std::size_t size) {
    using V = typename Pack<T>::Values;
    using M = typename Pack<T>::Mask;
    constexpr std::size_t stride = 4 * kLanes;
    V best[4];
    M broken{};
    for (V& pack : best) pack = V{} - std::numeric_limits<T>::infinity();
    std::size_t i = 0;
    for (; i + stride <= size; i += stride) {
        for (std::size_t part = 0; part < 4; ++part) {
            const V pack = load<V>(values + i + part * kLanes);
            best[part] = pack > best[part] ? pack : best[part];
            broken |= pack != pack;
        }
    }
    for (; i < size; i += kLanes) {
        const V pack = pack_at(values, size, i);
        best[0] = pack > best[0] ? pack : best[0];
        broken |= pack != pack;
    }
    if (any(broken)) {
        for (i = 0; values[i] == values[i];) ++i;
        return i;
    }
    T largest = best[0][0];
    for (const V& pack : best) {
        for (std::size_t lane = 0; lane < kLanes; ++lane) largest = pack[lane] > largest ? pack[lane] : largest;
    }
    for (i = 0; i + stride <= size; i += stride) {
        M found{};
        for (std::size_t part = 0; part < 4; ++part) found |= load<V>(values + i + part * kLanes) == largest;
        if (any(found)) break;
    }
    while (i + 1 < size && values[i] != largest) ++i;
    return i;
}

template <class T>
DRAFTSMITH_INLINE Masses weigh_body(const T* values, std::size_t size, const Weighing<T>& by, T near, T far,
                                    double* weights) {
    using V = typename Pack<T>::Values;
    Doubles total{}, near_total{}, far_total{};
    for (std::size_t i = 0; i < size; i += kLanes) {
        const V pack = pack_at(values, size, i);
        const Doubles weight = exp_weight<T>(pack, by.largest, by.inverse_temperature, by.step);
        store(weights + i, weight);
        total += weight;
        const auto is_near = __builtin_convertvector(pack >= near, Longs);
        const auto is_far = __builtin_convertvector(pack >= far, Longs);
        near_total += bits_of<Doubles>(Longs(bits_of<Longs>(weight) & is_near));
        far_total += bits_of<Doubles>(Longs(bits_of<Longs>(weight) & is_far));
    }
    return {sum(total), sum(near_total), sum(far_total)};
}

template <class T>
DRAFTSMITH_INLINE double mass_above_body(const T* values, const double* weights, std::size_t size, T bound,
                                         bool or_equal) {
    using V = typename Pack<T>::Values;
    using M = typename Pack<T>::Mask;
    Doubles total{};
    const M equal_too = M{} - (or_equal ? 1 : 0);
    std::size_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
        const V pack = load<V>(values + i);
        const M above = (pack > bound) | ((pack == bound) & equal_too);
        const auto mask = __builtin_convertvector(above, Longs);
        total += bits_of<Doubles>(Longs(load<Longs>(weights + i) & mask));
    }
    double mass = sum(total);
    for (; i < size; ++i) mass += values[i] > bound || (or_equal && values[i] == bound) ? weights[i] : 0.0;
    return mass;
}

template <class T>
DRAFTSMITH_INLINE std::size_t select_body(const T* values, std::size_t size, T floor, std::size_t limit,
                                          std::int32_t* indices) {
    using V = typename Pack<T>::Values;
    using M = typename Pack<T>::Mask;
    std::size_t count = 0, i = 0;
    for (; i + kBlock <= size; i += kBlock) {
        M found{};
        for (std::size_t part = 0; part < kBlock; part += kLanes) found |= load<V>(values + i + part) >= floor;
        if (!any(found)) continue;
        for (std::size_t j = i; j < i + kBlock; ++j) {
            indices[count] = static_cast<std::int32_t>(j);
            count += values[j] >= floor;
        }
        if (count > limit) return count;
    }
    for (; i < size; ++i) {
        indices[count] = static_cast<std::int32_t>(i);
        count += values[i] >= floor;
    }
    return count;
}

DRAFTSMITH_INLINE Floats narrowed(const Floats& x) { return x; }
DRAFTSMITH_INLINE Floats narrowed(const Doubles& x) { return __builtin_convertvector(x, Floats); }
DRAFTSMITH_INLINE Ints narrowed_mask(const Ints& mask) { return mask; }
DRAFTSMITH_INLINE Ints narrowed_mask(const Longs& mask) { return __builtin_convertvector(mask, Ints); }

// A token beats a score already reached only if 1 - u <= -log u < exp(its score - that score). Powers of two between
// whole exponents are bounded from above by the straight line, which the bits of a float are by nature; 1 - u is the
// complement of the noise word, of which 31 bits are compared.
template <class T>
DRAFTSMITH_INLINE bool pass_body(const T* values, const std::uint64_t* words, std::size_t size, const Hurdle<T>& hurdle,
                                 std::int32_t* hits) {
    using V = typename Pack<T>::Values;
    Ints found{};
    const Floats lowest = Floats{} - 120.0f, most = Floats{} + 2147483520.0f;
    for (std::size_t i = 0; i < size; i += kLanes) {
        const V pack = load<V>(values + i);
        Floats x = narrowed(V((pack - hurdle.largest) * hurdle.slope));
        x = x > lowest ? x : lowest;
        const Ints power = __builtin_convertvector(x * 8388608.0f, Ints) + (127 << 23);
        Floats bound = bits_of<Floats>(power) * hurdle.scale;
        bound = bound < most ? bound : most;
        const Ints limit = __builtin_convertvector(bound, Ints) + 127;
        const Ints noise = __builtin_convertvector(~load<Words>(words + i) >> 33, Ints);
        const Ints hit = (noise <= limit) & narrowed_mask(pack >= hurdle.floor);
        store(hits + i, hit);
        found |= hit;
    }
    return any(found);
}

}  // namespace

DRAFTSMITH_VERSIONS(std::size_t, argmax, (const float* values, std::size_t size), (values, size))
DRAFTSMITH_VERSIONS(std::size_t, argmax, (const double* values, std::size_t size), (values, size))
DRAFTSMITH_VERSIONS(Masses, weigh,
                    (const float* values, std::size_t size, const Weighing<float>& by, float near, float far,
                     double* weights),
                    (values, size, by, near, far, weights))
DRAFTSMITH_VERSIONS(Masses, weigh,
                    (const double* values, std::size_t size, const Weighing<double>& by, double near, double far,
                     double* weights),
                    (values, size, by, near, far, weights))
DRAFTSMITH_VERSIONS(double, mass_above,
                    (const float* values, const double* weights, std::size_t size, float bound, bool or_equal),
                    (values, weights, size, bound, or_equal))
DRAFTSMITH_VERSIONS(double, mass_above,
                    (const double* values, const double* weights, std::size_t size, double bound, bool or_equal),
                    (values, weights, size, bound, or_equal))
DRAFTSMITH_VERSIONS(std::size_t, select,
                    (const float* values, std::size_t size, float floor, std::size_t limit, std::int32_t* indices),
                    (values, size, floor, limit, indices))
DRAFTSMITH_VERSIONS(std::size_t, select,
                    (const double* values, std::size_t size, double floor, std::size_t limit, std::int32_t* indices),
                    (values, size, floor, limit, indices))
DRAFTSMITH_VERSIONS(bool, pass,
                    (const float* values, const std::uint64_t* words, std::size_t size,
                     const Hurdle<float>& hurdle, std::int32_t* hits),
                    (values, words, size, hurdle, hits))
DRAFTSMITH_VERSIONS(bool, pass,
                    (const double* values, const std::uint64_t* words, std::size_t size, const Hurdle<double>& hurdle,
                     std::int32_t* hits),
                    (values, words, size, hurdle, hits))

}  // namespace draftsmith
