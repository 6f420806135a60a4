// The loops over a whole row that sampling.cpp is made of, for float and double rows, each in one version per
// instruction set. Rows need no alignment; a row's last few values are read through a padded copy.
#pragma once

#include <cstddef>
#include <cstdint>

#include "noise.hpp"

namespace draftsmith {

constexpr std::size_t kChunk = 256;  // tokens whose noise words are looked at together

// What a value weighs: its power exp((value - largest) * inverse_temperature), rounded to add up exactly.
template <class T> struct Weighing {
    T largest, inverse_temperature;
    int bits;  // binary places of the weights
};

// Which tokens may beat the best so far: log2 of the noise at most (value - largest) * slope + offset, in units of a
// float's last exponent bit.
template <class T> struct Hurdle {
    T largest, slope;
    float offset;
};

// Index of the first largest value, or of the first NaN.
std::size_t argmax(const float* values, std::size_t size);
std::size_t argmax(const double* values, std::size_t size);

// Writes the powers, with room for 64 more, and returns the sum of their weights.
double weigh(const float* values, std::size_t size, const Weighing<float>& by, float* powers);
double weigh(const double* values, std::size_t size, const Weighing<double>& by, double* powers);

// Sum of the weights of values at or above `bound`; how many these are.
double mass_from(const float* values, const float* powers, std::size_t size, float bound, int bits);
double mass_from(const double* values, const double* powers, std::size_t size, double bound, int bits);
std::size_t count_from(const float* values, std::size_t size, float bound);
std::size_t count_from(const double* values, std::size_t size, double bound);

// Writes the indices of values at or above `bound`, ascending, and returns how many; stops beyond `limit`, for which
// and 64 more there is room.
std::size_t select(const float* values, std::size_t size, float bound, std::size_t limit, std::int32_t* indices);
std::size_t select(const double* values, std::size_t size, double bound, std::size_t limit, std::int32_t* indices);

// For `size` values and noise words, a multiple of 16: which may pass the hurdle (none that does is missed); any?
bool pass(const float* values, const std::uint64_t* words, std::size_t size, const Hurdle<float>& hurdle,
          std::int32_t* hits);
bool pass(const double* values, const std::uint64_t* words, std::size_t size, const Hurdle<double>& hurdle,
          std::int32_t* hits);

}  // namespace draftsmith
