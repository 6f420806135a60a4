// Linear layers: activations quantised row by row, integer products with packed weights, scaled sums over groups;
// included by kernels_impl.hpp alone, after the vectors and their `dot_quads`. Invariant: integer sums are exact, and a
// row's float sums run over its groups in order, so nothing depends on the rows beside it.
#pragma once

namespace draftsmith {
namespace {

void quantise(const float* x, int first_group, int end_group, int row, Activations& activations) {
    const auto rows = static_cast<std::size_t>(activations.rows);
    x += first_group * GROUP;
    for (int group = first_group; group < end_group; ++group, x += GROUP) {
        const F16 a = f_load(x), b = f_load(x + 16);
        // A row that is not finite must not look sound once it is quantised: its scale is not finite either.
        const float largest = f_largest_magnitude(a, b);
        const float scale = largest / 127.0f;
        const F16 inverse = f_set(largest > 0.0f ? 127.0f / largest : 0.0f);
        const I16 low = i_from_float(f_mul(a, inverse)), high = i_from_float(f_mul(b, inverse));
        alignas(32) std::int8_t codes[GROUP];
        i_store_i8(codes, low);
        i_store_i8(codes + 16, high);
        const std::size_t at = static_cast<std::size_t>(group) * rows + static_cast<std::size_t>(row);
        for (std::size_t quad = 0; quad < 8; ++quad) {
            const std::size_t place = (static_cast<std::size_t>(group) * 8 + quad) * rows + static_cast<std::size_t>(row);
            __builtin_memcpy(activations.codes + place * 4, codes + quad * 4, 4);
        }
        const int low_sum = sum_bytes(codes), high_sum = sum_bytes(codes + 16), sum = low_sum + high_sum;
        activations.scales[at] = scale;
        activations.sums[at] = scale * static_cast<float>(sum);
        activations.starts4[at] = INTEGER_ZERO - zero_of(4) * sum;
        activations.starts8[at] = INTEGER_ZERO - zero_of(8) * sum;
        const std::size_t half = at + static_cast<std::size_t>(group) * rows;
        activations.half_starts[half] = INTEGER_ZERO - zero_of(8) * low_sum;
        activations.half_starts[half + rows] = INTEGER_ZERO - zero_of(8) * high_sum;
    }
}

// What rounds is the product with a weight's scale, that with the row's, and the sum over groups in order. Integer
// sums begin with the zero point's share taken off, at the integer whose bits are those of a float (see
// `f_scale_integer`): to convert, to subtract and to scale is then one instruction.
template <int BITS, Scaling SCALING, bool MIN, int R>
void multiply_rows(const Packed& weights, int tile, const Activations& activations, float* out, std::size_t stride) {
    const std::uint8_t* chunk = weights.tile(tile);
    const std::size_t mins_at = weights.mins_at(), sub_scales_at = weights.sub_scales_at();
    const std::size_t sub_mins_at = weights.sub_mins_at(), codes_at = weights.codes_at();
    const std::int8_t* quantised = activations.codes;
    const float* row_scales = activations.scales;
    const float* row_sums = activations.sums;
    const std::int32_t* starts = BITS == 4 ? activations.starts4 : activations.starts8;
    const std::int32_t* half_starts = activations.half_starts;
    constexpr int CHUNK_GROUPS = SCALING == Scaling::PLAIN ? PLAIN_GROUPS : SUPER_GROUPS;
    const int groups = weights.groups();
    F16 sums[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sums[r] = f_zero();
    F16 super_scale = f_zero(), super_min = f_zero();
    const std::uint8_t* codes = chunk + codes_at;
    for (int group = 0; group < groups; ++group) {
        const int in_chunk = group % CHUNK_GROUPS;
        if (in_chunk == 0 && group > 0) {
            chunk = codes;
            codes += codes_at;
        }
        if (SCALING == Scaling::PLAIN || in_chunk == 0) {
            const auto* scales = reinterpret_cast<const std::uint16_t*>(chunk) + in_chunk * TILE;
            super_scale = f_load_half(scales);
            if constexpr (MIN) super_min = f_load_half(scales + mins_at / 2);
        }
        const std::uint8_t* sub_scales = chunk + sub_scales_at + (SCALING == Scaling::FINE ? 2 : 1) * in_chunk * TILE;
        const std::uint8_t* sub_mins = chunk + sub_mins_at + in_chunk * TILE;
        if constexpr (SCALING == Scaling::FINE) {
            I16 first[R], second[R];
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) first[r] = i_set(half_starts[r]);
            dot_quads<BITS, R>(codes, quantised, 4, first);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) second[r] = i_set(half_starts[R + r]);
            dot_quads<BITS, R>(codes, quantised, 4, second);
            const F16 first_scale = f_load_i8(sub_scales), second_scale = f_load_i8(sub_scales + TILE);
            const F16 first_offset = f_integer_offset(first_scale), second_offset = f_integer_offset(second_scale);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const F16 both = f_add(f_scale_integer(first[r], first_scale, first_offset),
                                       f_scale_integer(second[r], second_scale, second_offset));
                sums[r] = f_fma(both, f_mul(super_scale, f_set(row_scales[r])), sums[r]);
            }
        } else {
            F16 scale = super_scale, min = super_min;
            if constexpr (SCALING == Scaling::SUPER) {
                scale = f_mul(scale, MIN ? f_load_u8(sub_scales) : f_load_i8(sub_scales));
                if constexpr (MIN) min = f_mul(min, f_load_u8(sub_mins));
            }
            I16 dots[R];
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) dots[r] = i_set(MIN ? INTEGER_ZERO : starts[r]);
            dot_quads<BITS, R>(codes, quantised, 8, dots);
            const F16 offset = f_integer_offset(scale);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                sums[r] = f_fma(f_scale_integer(dots[r], scale, offset), f_set(row_scales[r]), sums[r]);
                if constexpr (MIN) sums[r] = f_fma(min, f_set(row_sums[r]), sums[r]);
            }
        }
        row_scales += R;
        row_sums += R;
        starts += R;
        half_starts += 2 * R;
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) f_store(out + static_cast<std::size_t>(r) * stride, sums[r]);
}

using Multiply = void (*)(const Packed&, int, const Activations&, float*, std::size_t);

template <int BITS, Scaling SCALING, bool MIN>
Multiply for_rows(int rows) {
    static_assert(MAX_BLOCK_ROWS <= 8);
    static constexpr Multiply with_rows[8] = {
        multiply_rows<BITS, SCALING, MIN, 1>,
        multiply_rows<BITS, SCALING, MIN, 2>,
        multiply_rows<BITS, SCALING, MIN, 3>,
        multiply_rows<BITS, SCALING, MIN, 4>,
        multiply_rows<BITS, SCALING, MIN, MAX_BLOCK_ROWS < 5 ? 1 : 5>,
        multiply_rows<BITS, SCALING, MIN, MAX_BLOCK_ROWS < 6 ? 1 : 6>,
        multiply_rows<BITS, SCALING, MIN, MAX_BLOCK_ROWS < 7 ? 1 : 7>,
        multiply_rows<BITS, SCALING, MIN, MAX_BLOCK_ROWS < 8 ? 1 : 8>,
    };
    return with_rows[rows - 1];
}

Multiply choose(const Format& format, int rows) {
    if (format.scaling == Scaling::FINE) return for_rows<8, Scaling::FINE, false>(rows);
    if (format.scaling == Scaling::SUPER) {
        if (format.bits == 4) return for_rows<4, Scaling::SUPER, true>(rows);
        return format.has_min ? for_rows<8, Scaling::SUPER, true>(rows) : for_rows<8, Scaling::SUPER, false>(rows);
    }
    if (format.bits == 4) {
        return format.has_min ? for_rows<4, Scaling::PLAIN, true>(rows) : for_rows<4, Scaling::PLAIN, false>(rows);
    }
    return format.has_min ? for_rows<8, Scaling::PLAIN, true>(rows) : for_rows<8, Scaling::PLAIN, false>(rows);
}

void multiply(const Packed& weights, int first_tile, int num_tiles, const Activations& activations, float* out,
              std::size_t stride) {
    const Multiply chosen = choose(weights.format(), activations.rows);
    for (int i = 0; i < num_tiles; ++i) chosen(weights, first_tile + i, activations, out + i * TILE, stride);
}

}  // namespace
}  // namespace draftsmith
