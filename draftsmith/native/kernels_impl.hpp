// The kernels, written once over vectors of 16 lanes; each instruction set includes this after its vectors.
// Called through the table at the end. Invariant: see kernels.hpp; every loop over inputs, positions or lanes
// runs in an order fixed by the row alone, whatever the number of rows or threads.
#pragma once

#include "kernels.hpp"

namespace draftsmith {
namespace {

// ---- elementwise ------------------------------------------------------------------------------

// Clamps keep a NaN: the second operand of f_max and f_min is the one returned when the two do not compare.
inline F16 f_exp(F16 x) {
    x = f_min(f_set(88.0f), f_max(f_set(-87.0f), x));
    const I16 n = i_from_float(f_mul(x, f_set(1.44269504f)));
    const F16 whole = f_from_int(n);
    F16 r = f_fma(whole, f_set(-0.693359375f), x);
    r = f_fma(whole, f_set(2.12194440e-4f), r);
    F16 p = f_set(1.9875691500e-4f);
    p = f_fma(p, r, f_set(1.3981999507e-3f));
    p = f_fma(p, r, f_set(8.3334519073e-3f));
    p = f_fma(p, r, f_set(4.1665795894e-2f));
    p = f_fma(p, r, f_set(1.6666665459e-1f));
    p = f_fma(p, r, f_set(5.0000001201e-1f));
    p = f_fma(f_mul(r, r), p, f_add(r, f_set(1.0f)));
    return f_mul(p, f_pow2(n));
}

inline F16 f_tanh(F16 x) {
    const F16 one = f_set(1.0f);
    const F16 e = f_exp(f_add(x, x));
    return f_sub(one, f_div(f_set(2.0f), f_add(e, one)));
}

void gate_silu(const float* gate, const float* up, float* out) {
    const F16 g = f_load(gate), one = f_set(1.0f);
    const F16 active = f_div(g, f_add(one, f_exp(f_sub(f_zero(), g))));
    f_store(out, f_mul(active, f_load(up)));
}

void gate_gelu(const float* gate, const float* up, float* out) {
    const F16 g = f_load(gate);
    const F16 cubic = f_fma(f_mul(f_mul(g, g), f_set(0.044715f)), g, g);
    const F16 t = f_tanh(f_mul(cubic, f_set(0.7978845608f)));
    const F16 active = f_mul(f_mul(g, f_set(0.5f)), f_add(f_set(1.0f), t));
    f_store(out, f_mul(active, f_load(up)));
}

void soft_cap(float* x, float cap) {
    f_store(x, f_mul(f_set(cap), f_tanh(f_div(f_load(x), f_set(cap)))));
}

void add(float* x, const float* y, int padded) {
    for (int i = 0; i < padded; i += 16) f_store(x + i, f_add(f_load(x + i), f_load(y + i)));
}

void norm(const float* x, const float* weight, int width, int padded, float eps, float* out) {
    F16 even = f_zero(), odd = f_zero();
    for (int i = 0; i < padded; i += 32) {
        const F16 a = f_load(x + i);
        even = f_fma(a, a, even);
        if (i + 16 == padded) break;  // a head of an odd number of vectors
        const F16 b = f_load(x + i + 16);
        odd = f_fma(b, b, odd);
    }
    const float mean = f_sum(f_add(even, odd)) / static_cast<float>(width);
    const F16 inverse = f_set(1.0f / __builtin_sqrtf(mean + eps));
    for (int i = 0; i < padded; i += 16) f_store(out + i, f_mul(f_mul(f_load(x + i), inverse), f_load(weight + i)));
}

void rotate(float* x, const float* cosines, const float* sines, int head_dim, float scale) {
    const int half = head_dim / 2;
    for (int i = 0; i < half; ++i) {
        const float a = x[i], b = x[half + i];
        x[i] = (a * cosines[i] - b * sines[i]) * scale;
        x[half + i] = (b * cosines[i] + a * sines[i]) * scale;
    }
}

// ---- cache elements ---------------------------------------------------------------------------

inline F16 load_elements(const float* p) { return f_load(p); }
struct Half {
    std::uint16_t bits;
};
struct Bfloat {
    std::uint16_t bits;
};
inline F16 load_elements(const Half* p) { return f_load_half(&p->bits); }
inline F16 load_elements(const Bfloat* p) { return f_load_bf16(&p->bits); }

void store(CacheType type, void* to, std::int64_t index, const float* x, int head_dim) {
    for (int i = 0; i < head_dim; i += 16) {
        const F16 part = f_load(x + i);
        if (type == CacheType::FLOAT) f_store(static_cast<float*>(to) + index + i, part);
        else if (type == CacheType::HALF) f_store_half(static_cast<std::uint16_t*>(to) + index + i, part);
        else f_store_bf16(static_cast<std::uint16_t*>(to) + index + i, part);
    }
}

// ---- linear layers ----------------------------------------------------------------------------

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
        const int low_sum = sum_bytes(codes), high_sum = sum_bytes(codes + 16);
        activations.scales[at] = scale;
        activations.sums[at] = scale * static_cast<float>(low_sum + high_sum);
        activations.code_sums[at] = static_cast<float>(low_sum + high_sum);
        activations.half_sums[at + static_cast<std::size_t>(group) * rows] = static_cast<float>(low_sum);
        activations.half_sums[at + static_cast<std::size_t>(group + 1) * rows] = static_cast<float>(high_sum);
    }
}

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

// Integer sums are exact, and below 2^24 so are they as floats, with the zero point taken off and, for FINE, with
// the integer scales multiplied in; what rounds is the product with the scales and the sum over groups in order.
template <int BITS, Scaling SCALING, bool MIN, int R>
void multiply_rows(const Packed& weights, int tile, const Activations& activations, float* out) {
    const std::uint8_t* chunk = weights.tile(tile);
    const std::size_t mins_at = weights.mins_at(), sub_scales_at = weights.sub_scales_at();
    const std::size_t sub_mins_at = weights.sub_mins_at(), codes_at = weights.codes_at();
    const std::int8_t* quantised = activations.codes;
    const float* row_scales = activations.scales;
    const float* row_sums = activations.sums;
    const float* code_sums = activations.code_sums;
    const float* half_sums = activations.half_sums;
    const F16 minus_zero = f_set(static_cast<float>(-weights.format().zero));
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
            for (int r = 0; r < R; ++r) first[r] = second[r] = i_zero();
            dot_quads<BITS, R>(codes, quantised, 4, first);
            dot_quads<BITS, R>(codes, quantised, 4, second);
            const F16 first_scale = f_load_i8(sub_scales), second_scale = f_load_i8(sub_scales + TILE);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const F16 a = f_fma(minus_zero, f_set(half_sums[r]), f_from_int(first[r]));
                const F16 b = f_fma(minus_zero, f_set(half_sums[R + r]), f_from_int(second[r]));
                const F16 both = f_fma(b, second_scale, f_mul(a, first_scale));
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
            for (int r = 0; r < R; ++r) dots[r] = i_zero();
            dot_quads<BITS, R>(codes, quantised, 8, dots);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                F16 whole = f_from_int(dots[r]);
                if constexpr (!MIN) {
                    whole = f_fma(minus_zero, f_set(code_sums[r]), whole);
                }
                sums[r] = f_fma(whole, f_mul(scale, f_set(row_scales[r])), sums[r]);
                if constexpr (MIN) sums[r] = f_fma(min, f_set(row_sums[r]), sums[r]);
            }
        }
        row_scales += R;
        row_sums += R;
        code_sums += R;
        half_sums += 2 * R;
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) f_store(out + r * TILE, sums[r]);
}

using Multiply = void (*)(const Packed&, int, const Activations&, float*);

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

void multiply(const Packed& weights, int tile, const Activations& activations, float* out) {
    const Format& format = weights.format();
    Multiply chosen;
    if (format.scaling == Scaling::FINE) {
        chosen = for_rows<8, Scaling::FINE, false>(activations.rows);
    } else if (format.scaling == Scaling::SUPER) {
        if (format.bits == 4) chosen = for_rows<4, Scaling::SUPER, true>(activations.rows);
        else if (format.has_min) chosen = for_rows<8, Scaling::SUPER, true>(activations.rows);
        else chosen = for_rows<8, Scaling::SUPER, false>(activations.rows);
    } else if (format.bits == 4) {
        chosen = format.has_min ? for_rows<4, Scaling::PLAIN, true>(activations.rows)
                                : for_rows<4, Scaling::PLAIN, false>(activations.rows);
    } else {
        chosen = format.has_min ? for_rows<8, Scaling::PLAIN, true>(activations.rows)
                                : for_rows<8, Scaling::PLAIN, false>(activations.rows);
    }
    chosen(weights, tile, activations, out);
}

// ---- attention --------------------------------------------------------------------------------

// A query against 16 keys. DIM is the heads' size where it is known at compile time, else 0.
template <int DIM, class T>
inline F16 score_keys(const float* query, const T* const* keys, int head_dim) {
    const int dim = DIM == 0 ? head_dim : DIM;
    return f_sum_each([&](int j) {
        const T* key = keys[j];
        F16 sum = f_mul(f_load(query), load_elements(key));
#pragma GCC unroll 8
        for (int i = 16; i < dim; i += 16) sum = f_fma(f_load(query + i), load_elements(key + i), sum);
        return sum;
    });
}

template <class T>
inline F16 score_keys_of(const float* query, const T* const* keys, int head_dim) {
    if (head_dim == 64) return score_keys<64>(query, keys, 64);
    if (head_dim == 128) return score_keys<128>(query, keys, 128);
    return score_keys<0>(query, keys, head_dim);
}

// Asks for the bytes some rows further on, which will be next.
constexpr int PREFETCH_ROWS = 32;

template <class T>
inline void prefetch_ahead(const T* row, int head_dim, int num_elements) {
    const auto* ahead = reinterpret_cast<const char*>(row + PREFETCH_ROWS * head_dim);
    const int bytes = num_elements * static_cast<int>(sizeof(T));
    for (int at = 0; at < bytes; at += 64) __builtin_prefetch(ahead + at);
}

template <class T>
struct Attend {
    const Attention& shared;
    const Query* queries;
    int num_queries;
    int base, stride;           // the first position of the score buffers (a multiple of 16) and their length
    int lowest;                 // the first position seen by any query
    int common, reach;          // positions below are stored in place for every query, for some query

    float* scores(int query) const { return shared.scratch + query * stride; }
    const T* row(const void* rows, int storage) const {
        return static_cast<const T*>(rows) + static_cast<std::int64_t>(storage - shared.storage_first) * shared.head_dim;
    }
    int storage_of(const Query& query, int position) const {
        return position < query.contiguous ? position : query.path[position - query.contiguous];
    }

    F16 capped(F16 scores) const {
        if (shared.cap == 0.0f) return scores;
        return f_mul(f_set(shared.cap), f_tanh(f_div(scores, f_set(shared.cap))));
    }

    // Scores of all positions a query sees, 16 at a time from multiples of 16 on, so that a position's lane does
    // not depend on anything but the position. Where a query's path leaves the order of storage it is on its own.
    void score() const {
        for (int start = base; start < reach; start += 16) score_common(start);
        for (int q = 0; q < num_queries; ++q) {
            if (queries[q].contiguous == queries[q].end) continue;
            // A window narrower than the tree is deep begins behind the rows in place.
            const int own = queries[q].contiguous > base ? queries[q].contiguous / 16 * 16 : base;
            for (int start = own; start < queries[q].end; start += 16) {
                f_store(scores(q) + start - base, capped(score_stored(queries[q], start)));
            }
        }
    }

    // All queries against 16 positions of which those seen are stored in place. What lies beyond a query's end, or
    // beyond what is stored, is scored and then not used.
    void score_common(int start) const {
        const T* stored[16];
        for (int j = 0; j < 16; ++j) {
            const int position = start + j < lowest ? lowest : start + j < reach ? start + j : reach - 1;
            stored[j] = row(shared.keys, position);
            prefetch_ahead(stored[j], shared.head_dim, shared.head_dim);
        }
        if (num_queries == 1 || sizeof(T) == sizeof(float)) {
            for (int q = 0; q < num_queries; ++q) {
                f_store(scores(q) + start - base, capped(score_keys_of(queries[q].query, stored, shared.head_dim)));
            }
            return;
        }
        const float* keys[16];
        for (int j = 0; j < 16; ++j) {
            float* copy = shared.scratch + num_queries * stride + j * shared.head_dim;
            for (int i = 0; i < shared.head_dim; i += 16) f_store(copy + i, load_elements(stored[j] + i));
            keys[j] = copy;
        }
        for (int q = 0; q < num_queries; ++q) {
            f_store(scores(q) + start - base, capped(score_keys_of(queries[q].query, keys, shared.head_dim)));
        }
    }

    F16 score_stored(const Query& query, int start) const {
        const T* keys[16];
        for (int j = 0; j < 16; ++j) {
            int position = start + j < query.first ? query.first : start + j;
            position = position < query.end ? position : query.end - 1;
            keys[j] = row(shared.keys, storage_of(query, position));
        }
        return score_keys_of(query.query, keys, shared.head_dim);
    }

    // Turns scores into weights that are 0 outside first..end; returns the inverse of their sum.
    float weigh(int index) const {
        const Query& query = queries[index];
        float* weights = scores(index) - base;
        const int start = query.first / 16 * 16, stop = (query.end + 15) / 16 * 16;
        constexpr float NOTHING = -__builtin_huge_valf();
        for (int p = start; p < query.first; ++p) weights[p] = NOTHING;
        for (int p = query.end; p < stop; ++p) weights[p] = NOTHING;
        F16 largest = f_load(weights + start);
        for (int p = start + 16; p < stop; p += 16) largest = f_max(largest, f_load(weights + p));
        const F16 most = f_set(f_largest(largest));
        F16 sum = f_zero();
        for (int p = start; p < stop; p += 16) {
            f_store(weights + p, f_exp(f_sub(f_load(weights + p), most)));
            if (p == start) {
                for (int j = p; j < query.first; ++j) weights[j] = 0.0f;
            }
            if (p + 16 == stop) {
                for (int j = query.end; j < stop; ++j) weights[j] = 0.0f;
            }
            sum = f_add(sum, f_load(weights + p));
        }
        for (int p = base; p < start; ++p) weights[p] = 0.0f;
        return 1.0f / f_sum(sum);
    }

    // Sums the values of the common positions for NQ queries, then each query's own, dimensions part by part.
    template <int NQ, int NP>
    void mix(int first_query, int dim, const float* inverses) const {
        F16 sums[NQ][NP];
        for (int q = 0; q < NQ; ++q) {
            for (int i = 0; i < NP; ++i) sums[q][i] = f_zero();
        }
        const float* weights[NQ];
        for (int q = 0; q < NQ; ++q) weights[q] = scores(first_query + q) - base;
        const T* value = row(shared.values, lowest) + dim;
        for (int p = lowest; p < common; ++p, value += shared.head_dim) {
            F16 parts[NP];
            prefetch_ahead(value, shared.head_dim, 16 * NP);
#pragma GCC unroll 4
            for (int i = 0; i < NP; ++i) parts[i] = load_elements(value + 16 * i);
#pragma GCC unroll 6
            for (int q = 0; q < NQ; ++q) {
                const F16 weight = f_set(weights[q][p]);
#pragma GCC unroll 4
                for (int i = 0; i < NP; ++i) sums[q][i] = f_fma(weight, parts[i], sums[q][i]);
            }
        }
#pragma GCC unroll 6
        for (int q = 0; q < NQ; ++q) {
            const Query& query = queries[first_query + q];
            F16 own[NP];
            for (int i = 0; i < NP; ++i) own[i] = sums[q][i];
            for (int p = common < query.first ? query.first : common; p < query.end; ++p) {
                const T* at = row(shared.values, storage_of(query, p)) + dim;
                const F16 weight = f_set(weights[q][p]);
                for (int i = 0; i < NP; ++i) own[i] = f_fma(weight, load_elements(at + 16 * i), own[i]);
            }
            const F16 inverse = f_set(inverses[first_query + q]);
            for (int i = 0; i < NP; ++i) f_store(query.output + dim + 16 * i, f_mul(own[i], inverse));
        }
    }

    template <int NP>
    void mix_set(int first_query, int count, int dim, const float* inverses) const {
        switch (count) {
            case 1: return mix<1, NP>(first_query, dim, inverses);
            case 2: return mix<2, NP>(first_query, dim, inverses);
            case 3: return mix<ATTENTION_QUERIES < 3 ? 1 : 3, NP>(first_query, dim, inverses);
            case 4: return mix<ATTENTION_QUERIES < 4 ? 1 : 4, NP>(first_query, dim, inverses);
            case 5: return mix<ATTENTION_QUERIES < 5 ? 1 : 5, NP>(first_query, dim, inverses);
            default: return mix<ATTENTION_QUERIES < 6 ? 1 : 6, NP>(first_query, dim, inverses);
        }
    }

    void run(float* inverses) const {
        score();
        for (int q = 0; q < num_queries; ++q) inverses[q] = weigh(q);
        for (int q = 0; q < num_queries; q += ATTENTION_QUERIES) {
            const int count = num_queries - q < ATTENTION_QUERIES ? num_queries - q : ATTENTION_QUERIES;
            int dim = 0;
            for (; dim + 16 * ATTENTION_PARTS <= shared.head_dim; dim += 16 * ATTENTION_PARTS) {
                mix_set<ATTENTION_PARTS>(q, count, dim, inverses);
            }
            for (; dim < shared.head_dim; dim += 16) mix_set<1>(q, count, dim, inverses);
        }
    }
};

template <class T>
void attend_as(const Attention& shared, const Query* queries, int num_queries) {
    int lowest = queries[0].first, common = queries[0].contiguous, reach = common, longest = queries[0].end;
    for (int q = 1; q < num_queries; ++q) {
        const Query& query = queries[q];
        lowest = query.first < lowest ? query.first : lowest;
        common = query.contiguous < common ? query.contiguous : common;
        reach = query.contiguous > reach ? query.contiguous : reach;
        longest = query.end > longest ? query.end : longest;
    }
    const int base = lowest / 16 * 16;
    const int stride = (longest + 15) / 16 * 16 - base + 16;
    float inverses[MOST_QUERIES];
    Attend<T>{shared, queries, num_queries, base, stride, lowest, common, reach}.run(inverses);
}

void attend(CacheType type, const Attention& shared, const Query* queries, int num_queries) {
    if (type == CacheType::FLOAT) attend_as<float>(shared, queries, num_queries);
    else if (type == CacheType::HALF) attend_as<Half>(shared, queries, num_queries);
    else attend_as<Bfloat>(shared, queries, num_queries);
}

const Kernels* table(const char* name) {
    static const Kernels kernels{name, MAX_BLOCK_ROWS, multiply, quantise, norm, add, gate_silu,
                                 gate_gelu, rotate, soft_cap, store, attend};
    return &kernels;
}

}  // namespace
}  // namespace draftsmith
