// Python face of noise and sampling: core/random.py, core/sampling.py and core/verify.py call these with arrays that
// have passed their checks. All of it is short, so the interpreter lock is kept.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cmath>
#include <limits>

#include "elementary.hpp"
#include "row_kernels.hpp"
#include "noise.hpp"
#include "sampling.hpp"

namespace nb = nanobind;

namespace draftsmith {
namespace {

using Word = std::uint64_t;
template <class T> using Values = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Numbers = nb::ndarray<double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ids = nb::ndarray<std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

double uniform(Word seed, Word stream, Word position, Word node) {
    return uniform_of<double, Word>(Noise(seed, stream, position, node).word(0));
}

void gumbel(Word seed, Word stream, Word position, Word node, Numbers out) {
    Noise(seed, stream, position, node).gumbel(out.data(), out.shape(0));
}

template <class T> std::size_t row_argmax(const Values<T>& row) { return argmax(row.data(), row.shape(0)); }

// Argmax of each row; None when a row's largest value is not finite.
template <class T>
nb::object rows_argmax(const nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>& rows) {
    nb::list found;
    for (std::size_t i = 0; i < rows.shape(0); ++i) {
        const T* row = rows.data() + i * rows.shape(1);
        const std::size_t best = argmax(row, rows.shape(1));
        if (!std::isfinite(row[best])) return nb::none();
        found.append(best);
    }
    return found;
}

template <class T>
std::size_t support(const Values<T>& row, std::size_t best, double inverse_temperature, std::int64_t top_k,
                    double top_p, double floor, Ids ids) {
    return Row<T>(row.data(), row.shape(0), best, {inverse_temperature, top_k, top_p, floor}).support(ids.data());
}

template <class T>
std::int64_t sample(const Values<T>& row, std::size_t best, double inverse_temperature, std::int64_t top_k,
                    double top_p, double floor, Word seed, Word stream, Word position, Word node) {
    Row<T> bound(row.data(), row.shape(0), best, {inverse_temperature, top_k, top_p, floor});
    return bound.sample(Noise(seed, stream, position, node));
}

// -1 when the largest score is not finite.
std::int64_t noisy_argmax(const Values<double>& scores, Word seed, Word stream, Word position, Word node) {
    const std::size_t best = argmax(scores.data(), scores.shape(0));
    if (!std::isfinite(scores.data()[best])) return -1;
    constexpr double no_floor = -std::numeric_limits<double>::infinity();
    return sample<double>(scores, best, 1, 0, 1, no_floor, seed, stream, position, node);
}

template <class T> void bind_rows(nb::module_& module) {
    module.def("argmax", &row_argmax<T>, nb::arg("row").noconvert());
    module.def("rows_argmax", &rows_argmax<T>, nb::arg("rows").noconvert());
    module.def("support", &support<T>, nb::arg("row").noconvert(), nb::arg("best"), nb::arg("inverse_temperature"),
               nb::arg("top_k"), nb::arg("top_p"), nb::arg("floor"), nb::arg("ids").noconvert());
    module.def("sample", &sample<T>, nb::arg("row").noconvert(), nb::arg("best"), nb::arg("inverse_temperature"),
               nb::arg("top_k"), nb::arg("top_p"), nb::arg("floor"), nb::arg("seed"), nb::arg("stream"),
               nb::arg("position"), nb::arg("node"));
}

// Sets the widest instruction set to use, and returns the one in use from now on.
int limit_instructions(int limit) {
    instruction_limit.store(limit);
    return instruction_set();
}

}  // namespace

void bind_sampling(nb::module_& module) {
    module.def("limit_instructions", &limit_instructions);
    module.def("uniform", &uniform);
    module.def("gumbel", &gumbel, nb::arg("seed"), nb::arg("stream"), nb::arg("position"), nb::arg("node"),
               nb::arg("out").noconvert());
    module.def("noisy_argmax", &noisy_argmax, nb::arg("scores").noconvert(), nb::arg("seed"), nb::arg("stream"),
               nb::arg("position"), nb::arg("node"));
    bind_rows<float>(module);
    bind_rows<double>(module);
}

}  // namespace draftsmith
