// What the bindings of packed models take from Python, checked: arrays, linear layers, norms, names.
// Used by bind_decoder.cpp, bind_linear.cpp and bind_row_drafter.cpp. Invariant: what is returned has the shape that was asked for.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "activation_rows.hpp"

namespace nb = nanobind;

namespace draftsmith {

template <class T>
using Array = nb::ndarray<const T, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Matrix = nb::ndarray<const T, nb::numpy, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using FloatsIn = Array<float>;
using FloatsOut = nb::ndarray<float, nb::numpy, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

template <class T>
std::span<const T> span_of(const Array<T>& array) {
    return {array.data(), array.size()};
}

inline Floats copy_of(nb::handle array) {
    if (array.is_none()) return {};
    const auto values = nb::cast<FloatsIn>(array);
    return {values.data(), values.data() + values.size()};
}

inline const Kernels* kernels_named(std::string_view name) {
    for (const Kernels* kernels : {avx512_kernels(), avxvnni_kernels(), avx2_kernels(), portable_kernels()}) {
        if (kernels != nullptr && (name == "auto" || name == kernels->name)) return kernels;
    }
    throw std::invalid_argument("no such instruction set here: " + std::string(name));
}

inline Linear linear_of(nb::handle pair, std::size_t num_parts, const std::vector<int>& outputs, int inputs) {
    const nb::tuple both = nb::cast<nb::tuple>(pair);
    Linear linear{nb::cast<std::vector<std::shared_ptr<Packed>>>(both[0]), copy_of(both[1])};
    if (linear.parts.size() != num_parts) throw std::invalid_argument("a linear layer has the wrong number of parts");
    std::size_t total = 0;
    for (std::size_t i = 0; i < num_parts; ++i) {
        if (linear.parts[i] == nullptr) throw std::invalid_argument("a linear layer lacks a part");
        const Packed& part = *linear.parts[i];
        if (part.outputs() != outputs[i] || part.inputs() != inputs) {
            throw std::invalid_argument("a linear layer has the wrong shape");
        }
        total += static_cast<std::size_t>(part.outputs());
    }
    if (!linear.bias.empty() && linear.bias.size() != total) throw std::invalid_argument("a bias has the wrong size");
    return linear;
}

inline Floats norm_of(const nb::dict& values, const char* name, int size, bool is_optional) {
    Floats norm = copy_of(values[name]);
    if (norm.empty() && is_optional) return norm;
    if (norm.size() != static_cast<std::size_t>(size)) throw std::invalid_argument("a norm has the wrong size");
    return norm;
}

inline CacheType cache_type_named(std::string_view name) {
    if (name == "float16") return CacheType::HALF;
    if (name == "bfloat16") return CacheType::BFLOAT;
    if (name == "float32") return CacheType::FLOAT;
    throw std::invalid_argument("an unknown cache type");
}

}  // namespace draftsmith
