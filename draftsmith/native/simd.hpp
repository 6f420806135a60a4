// Packs of numbers in the compiler's own vector types, and one version of a kernel per instruction set.
//
// Kernels are written once, as always inlined templates over the bytes of a register; DRAFTSMITH_VERSIONS instantiates
// them for AVX-512, AVX2 and the compiler's baseline and picks one at run time. No version may use fused multiply-adds
// (CMake says -ffp-contract=off): bits are the same in all of them. Kernels call only what is always inlined, so that
// no function of a wider instruction set is shared with the rest of the program.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

#define DRAFTSMITH_INLINE __attribute__((always_inline)) inline

namespace draftsmith {

// A register of numbers. (Written out, as not every compiler takes sizes that depend on a template's.)
template <class T, int bytes> struct PackOf;
#define DRAFTSMITH_PACK(type, bytes)                              \
    template <> struct PackOf<type, bytes> {                      \
        typedef type Pack __attribute__((vector_size(bytes)));    \
    };
#define DRAFTSMITH_PACKS(type) DRAFTSMITH_PACK(type, 16) DRAFTSMITH_PACK(type, 32) DRAFTSMITH_PACK(type, 64)
DRAFTSMITH_PACKS(float)
DRAFTSMITH_PACKS(double)
DRAFTSMITH_PACKS(std::int32_t)
DRAFTSMITH_PACKS(std::int64_t)
template <class T, int bytes> using Pack = typename PackOf<T, bytes>::Pack;

// The whole numbers of a type's size.
template <class T> struct WholeOf;
template <> struct WholeOf<float> {
    using Type = std::int32_t;
};
template <> struct WholeOf<double> {
    using Type = std::int64_t;
};
template <class T> using Whole = typename WholeOf<T>::Type;

// Wide enough to keep several long chains of operations under way at a time.
constexpr std::size_t kWide = 32;
typedef double WideDoubles __attribute__((vector_size(256)));
typedef std::uint64_t WideWords __attribute__((vector_size(256)));

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

template <class M> DRAFTSMITH_INLINE bool any(const M& mask) {
    const auto words = bits_of<Pack<std::int64_t, sizeof(M)>>(mask);
    std::int64_t all = 0;
    for (std::size_t i = 0; i < sizeof(M) / 8; ++i) all |= words[i];
    return all != 0;
}

}  // namespace draftsmith

namespace draftsmith {

// Tests compare the versions with each other: nothing above this set is used.
inline std::atomic<int> instruction_limit{2};

// 2: AVX-512, 1: AVX2, 0: the compiler's baseline.
inline int instruction_set() {
#if defined(__x86_64__)
    static const int found = [] {
        __builtin_cpu_init();
        if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("bmi2")) return 0;
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                       __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")
                   ? 2
                   : 1;
    }();
    return std::min(found, instruction_limit.load(std::memory_order_relaxed));
#else
    return 0;
#endif
}

}  // namespace draftsmith

// Defines `name parameters` from the always inlined template `name_body<bytes> parameters`.
#if defined(__x86_64__)
#define DRAFTSMITH_VERSIONS(result, name, parameters, arguments)                                              \
    __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,bmi2"))) result name##_avx512 parameters {      \
        return name##_body<64> arguments;                                                                     \
    }                                                                                                         \
    __attribute__((target("avx2,bmi2"))) result name##_avx2 parameters { return name##_body<32> arguments; }  \
    result name##_plain parameters { return name##_body<16> arguments; }                                          \
    result name parameters {                                                                                  \
        const int set = instruction_set();                                                                    \
        return set == 2 ? name##_avx512 arguments : set == 1 ? name##_avx2 arguments : name##_plain arguments; \
    }
#else
#define DRAFTSMITH_VERSIONS(result, name, parameters, arguments) \
    result name parameters { return name##_body<16> arguments; }
#endif
