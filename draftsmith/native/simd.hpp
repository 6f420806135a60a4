// Packs of eight numbers in the compiler's own vector types, and one version of a kernel per instruction set.
//
// Kernels are written once as always inlined templates; DRAFTSMITH_VERSIONS instantiates them for AVX-512, AVX2 and the
// compiler's baseline and picks one at run time. No version may use fused multiply-adds (CMake says
// -ffp-contract=off): bits are the same in all of them. Kernels call only what is always inlined, so that no
// function of a wider instruction set is shared with the rest of the program.
#pragma once

#include <cstddef>
#include <cstdint>

#define DRAFTSMITH_INLINE __attribute__((always_inline)) inline

namespace draftsmith {

constexpr std::size_t kLanes = 8;
typedef float Floats __attribute__((vector_size(32)));
typedef double Doubles __attribute__((vector_size(64)));
typedef std::int32_t Ints __attribute__((vector_size(32)));
typedef std::int64_t Longs __attribute__((vector_size(64)));
typedef std::uint64_t Words __attribute__((vector_size(64)));

template <class T> struct Pack;
template <> struct Pack<float> {
    using Values = Floats;
    using Mask = Ints;
};
template <> struct Pack<double> {
    using Values = Doubles;
    using Mask = Longs;
};

// The same bytes as another type; also how packs are read from memory of any alignment.
template <class To, class From> DRAFTSMITH_INLINE To bits_of(const From& from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    __builtin_memcpy(&to, &from, sizeof to);
    return to;
}
template <class V> DRAFTSMITH_INLINE V load(const void* from) {
    V pack;
    __builtin_memcpy(&pack, from, sizeof pack);
    return pack;
}
template <class V> DRAFTSMITH_INLINE void store(void* to, const V& pack) { __builtin_memcpy(to, &pack, sizeof pack); }

DRAFTSMITH_INLINE bool any(const Longs& mask) {
    return (mask[0] | mask[1] | mask[2] | mask[3] | mask[4] | mask[5] | mask[6] | mask[7]) != 0;
}
DRAFTSMITH_INLINE bool any(const Ints& mask) {
    typedef std::int64_t Quarter __attribute__((vector_size(32)));
    const auto halves = bits_of<Quarter>(mask);
    return (halves[0] | halves[1] | halves[2] | halves[3]) != 0;
}
DRAFTSMITH_INLINE double sum(const Doubles& pack) {
    double total = 0;
    for (std::size_t lane = 0; lane < kLanes; ++lane) total += pack[lane];
    return total;
}

}  // namespace draftsmith

#if defined(__x86_64__)
namespace draftsmith {
// 2: AVX-512, 1: AVX2, 0: neither.
inline int instruction_set() {
    static const int found = [] {
        __builtin_cpu_init();
        if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("bmi2")) return 0;
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                       __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")
                   ? 2
                   : 1;
    }();
    return found;
}
}  // namespace draftsmith
// Defines `name parameters` from the always inlined `name_body parameters`. A comma inside a type needs an alias.
#define DRAFTSMITH_VERSIONS(result, name, parameters, arguments)                                              \
    __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,bmi2"))) result name##_avx512 parameters {      \
        return name##_body arguments;                                                                         \
    }                                                                                                         \
    __attribute__((target("avx2,bmi2"))) result name##_avx2 parameters { return name##_body arguments; }      \
    result name##_plain parameters { return name##_body arguments; }                                          \
    result name parameters {                                                                                  \
        const int set = instruction_set();                                                                    \
        return set == 2 ? name##_avx512 arguments : set == 1 ? name##_avx2 arguments : name##_plain arguments; \
    }
#else
#define DRAFTSMITH_VERSIONS(result, name, parameters, arguments) \
    result name parameters { return name##_body arguments; }
#endif
