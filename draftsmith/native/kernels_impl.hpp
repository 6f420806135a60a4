// Elementwise kernels and the table of all, over vectors of 16 lanes; each instruction set includes this after its
// vectors, and gets linear layers and attention with it. Invariant: see kernels.hpp; every loop over inputs, positions
// or lanes runs in an order fixed by the row alone, whatever the number of rows or threads.
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

inline void store_elements(float* p, F16 x) { f_store(p, x); }
inline void store_elements(Half* p, F16 x) { f_store_half(&p->bits, x); }
inline void store_elements(Bfloat* p, F16 x) { f_store_bf16(&p->bits, x); }

template <class T>
void store_as(bool is_key, T* to, std::int64_t slot, const float* x, int head_dim) {
    T* row = to + slot * head_dim;
    T* lane = to + slot / KEY_BLOCK * KEY_BLOCK * head_dim + slot % KEY_BLOCK;
    for (int i = 0; i < head_dim; i += 16) {
        if (!is_key) {
            store_elements(row + i, f_load(x + i));
            continue;
        }
        T part[16];
        store_elements(part, f_load(x + i));
        for (int j = 0; j < 16; ++j) lane[(i + j) * KEY_BLOCK] = part[j];
    }
}

void store(CacheType type, bool is_key, void* to, std::int64_t slot, const float* x, int head_dim) {
    if (type == CacheType::FLOAT) store_as(is_key, static_cast<float*>(to), slot, x, head_dim);
    else if (type == CacheType::HALF) store_as(is_key, static_cast<Half*>(to), slot, x, head_dim);
    else store_as(is_key, static_cast<Bfloat*>(to), slot, x, head_dim);
}

}  // namespace
}  // namespace draftsmith

#include "kernels_attention.hpp"
#include "kernels_linear.hpp"

namespace draftsmith {
namespace {

const Kernels* table(const char* name) {
    static const Kernels kernels{name, MAX_BLOCK_ROWS, multiply, quantise, norm, add, gate_silu,
                                 gate_gelu, rotate, soft_cap, store, attend};
    return &kernels;
}

}  // namespace
}  // namespace draftsmith
