// Integer products of a group where an instruction adds four products in 32 bits (`dot4`); included after the vectors by
// the instruction sets that have one. Invariant: sums are exact, so the order within a group is free.
#pragma once

namespace draftsmith {
namespace {

// Weights come from memory once, in order; asked for so far ahead they are there in time. (The hardware notices the
// order too, but stops at every page.)
constexpr int PREFETCH_BYTES = 4096;

// Adds the products of `quads` * 4 neighbouring inputs to the integer sums of each row.
template <int BITS, int R>
inline void dot_quads(const std::uint8_t*& codes, const std::int8_t*& activations, int quads, I16* sums) {
    if constexpr (BITS == 4) {
#pragma GCC unroll 4
        for (int pair = 0; pair < quads / 2; ++pair) {
            const Codes both = c_load(codes);
            __builtin_prefetch(codes + PREFETCH_BYTES);
            const Codes low = c_low(both), high = c_high(both);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) sums[r] = dot4<4>(sums[r], low, activations + 4 * r);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) sums[r] = dot4<4>(sums[r], high, activations + 4 * (R + r));
            codes += 64;
            activations += 8 * R;
        }
    } else {
#pragma GCC unroll 8
        for (int quad = 0; quad < quads; ++quad) {
            const Codes all = c_load(codes);
            __builtin_prefetch(codes + PREFETCH_BYTES);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) sums[r] = dot4<8>(sums[r], all, activations + 4 * r);
            codes += 64;
            activations += 4 * R;
        }
    }
}

}  // namespace
}  // namespace draftsmith
