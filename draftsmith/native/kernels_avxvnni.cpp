#include "kernels.hpp"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && defined(__AVXVNNI__)
#include <cpuid.h>

#include "simd_avx2.hpp"
#include "dot_quads.hpp"
#include "kernels_impl.hpp"

namespace draftsmith {
const Kernels* avxvnni_kernels() {
    // Leaf 7, subleaf 1, EAX bit 4: VNNI in its VEX encoding. Not every compiler knows it by name.
    unsigned a = 0, b = 0, c = 0, d = 0;
    const bool is_listed = __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a & (1u << 4)) != 0;
    const bool is_there = is_listed && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    return is_there ? table("avxvnni") : nullptr;
}
}  // namespace draftsmith
#else
namespace draftsmith {
const Kernels* avxvnni_kernels() { return nullptr; }
}  // namespace draftsmith
#endif
