#include "kernels.hpp"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && \
    defined(__AVX512VNNI__)
#include "simd_avx512.hpp"
#include "dot_quads.hpp"
#include "kernels_impl.hpp"

namespace draftsmith {
const Kernels* avx512_kernels() {
    const bool is_there = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                          __builtin_cpu_supports("avx512vnni");
    return is_there ? table("avx512") : nullptr;
}
}  // namespace draftsmith
#else
namespace draftsmith {
const Kernels* avx512_kernels() { return nullptr; }
}  // namespace draftsmith
#endif
