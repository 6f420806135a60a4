#include "kernels.hpp"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "simd_avx2.hpp"
#include "dot_quads_avx2.hpp"
#include "kernels_impl.hpp"

namespace draftsmith {
const Kernels* avx2_kernels() {
    const bool is_there = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    return is_there ? table("avx2") : nullptr;
}
}  // namespace draftsmith
#else
namespace draftsmith {
const Kernels* avx2_kernels() { return nullptr; }
}  // namespace draftsmith
#endif
