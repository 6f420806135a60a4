#include "simd_portable.hpp"
#include "dot_quads.hpp"
#include "kernels_impl.hpp"

namespace draftsmith {
const Kernels* portable_kernels() { return table("portable"); }
}  // namespace draftsmith
