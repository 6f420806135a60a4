// The loops over a whole row that sampling.cpp is made of, for float and double rows, each in one version per
// instruction set. Rows need no alignment; a row's last few values are read through a padded copy.
#pragma once

#include <cstddef>
#include <cstdint>

#include "noise.hpp"

namespace draftsmith {

constexpr std::size_t kChunk = 256;  // tokens whose noise words are looked at together

// What a value weighs: exp((value - largest) * inverse_temperature), in steps that add up exactly.
template <class T> struct Weighing {
    T largest, inverse_temperature;
    double step;
};

// Total weight of a row, and of its values at or above two bounds.
struct Masses {
    double total, near, far;
};

// Which tokens can still win: those with a noise below scale * exp((value - largest) * slope), value >= floor.
template <class T> struct Hurdle {
    T largest, slope, floor;
    float scale;
};

// Index of the first largest value, or of the first NaN.
std::size_t argmax(const float* values, std::size_t size);
std::size_t argmax(const double* values, std::size_t size);

// Writes the weights; `weights` has room for 8 more.
Masses weigh(const float* values, std::size_t size, const Weighing<float>& by, float near, float far, double* weights);
Masses weigh(const double* values, std::size_t size, const Weighing<double>& by, double near, double far,
             double* weights);

// Sum of the weights of values above `bound`, or at it when `or_equal`.
double mass_above(const float* values, const double* weights, std::size_t size, float bound, bool or_equal);
double mass_above(const double* values, const double* weights, std::size_t size, double bound, bool or_equal);

// Writes the indices of values at or above `floor`, ascending, and returns how many; stops beyond `limit`, for which
// and 64 more there is room.
std::size_t select(const float* values, std::size_t size, float floor, std::size_t limit, std::int32_t* indices);
std::size_t select(const double* values, std::size_t size, double floor, std::size_t limit, std::int32_t* indices);

// For `size` values and noise words, a multiple of 8: which pass the hurdle (others may do so too, none is missed); any at all?
bool pass(const float* values, const std::uint64_t* words, std::size_t size, const Hurdle<float>& hurdle, std::int32_t* hits);
bool pass(const double* values, const std::uint64_t* words, std::size_t size, const Hurdle<double>& hurdle, std::int32_t* hits);

}  // namespace draftsmith
