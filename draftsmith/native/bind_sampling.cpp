// Python face of noise and sampling: core/random.py, core/sampling.py and core/verify.py call these with arrays that
// have passed their checks. All of it is short, so the interpreter lock is kept.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <cmath>
#include <limits>
#include <optional>
#include <vector>

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
using Tokens = std::optional<nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>>;
template <class T> using Rows = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

double uniform(Word seed, Word stream, Word position, Word node) {
    return uniform_of<double, Word>(Noise(seed, stream, position, node).word(0));
}

void gumbel(Word seed, Word stream, Word position, Word node, Numbers out) {
    Noise(seed, stream, position, node).gumbel(out.data(), out.shape(0));
}

// The noise of some tokens.
void gumbel_at(Word seed, Word stream, Word position, Word node, const Values<std::int64_t>& ids, Numbers out) {
    const Noise noise(seed, stream, position, node);
    for (std::size_t i = 0; i < out.shape(0); ++i) {
        out.data()[i] = gumbel_of<double, Word>(noise.word(static_cast<Word>(ids.data()[i])));
    }
}

template <class T> std::size_t row_argmax(const Values<T>& row) { return argmax(row.data(), row.shape(0)); }

// Argmax of each row; None when a row's largest value is not finite.
template <class T> nb::object rows_argmax(const Rows<T>& rows) {
    nb::list found;
    for (std::size_t i = 0; i < rows.shape(0); ++i) {
        const T* row = rows.data() + i * rows.shape(1);
        const std::size_t best = argmax(row, rows.shape(1));
        if (!std::isfinite(row[best])) return nb::none();
        found.append(best);
    }
    return found;
}

// Of each row its argmax, and what all values weigh against it: NaN when the largest is not finite.
template <class T> nb::list rows_weight(const Rows<T>& rows) {
    static thread_local std::vector<T> powers;
    const std::size_t size = rows.shape(1);
    if (powers.size() < size + 64) powers.resize(size + 64);
    nb::list found;
    for (std::size_t i = 0; i < rows.shape(0); ++i) {
        const T* row = rows.data() + i * size;
        const std::size_t best = argmax(row, size);
        const Weighing<T> by{row[best], 1, weight_bits<T>(size)};
        const double weight = std::isfinite(row[best]) ? weigh(row, size, by, powers.data())
                                                       : std::numeric_limits<double>::quiet_NaN();
        found.append(nb::make_tuple(best, weight));
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

// The token found, -1 when the largest score is not finite. `ids`: of the scores, ascending, where they are not all.
std::int64_t noisy_argmax(const Values<double>& scores, Word seed, Word stream, Word position, Word node,
                          const Tokens& ids) {
    const std::size_t best = argmax(scores.data(), scores.shape(0));
    if (!std::isfinite(scores.data()[best])) return -1;
    static thread_local std::vector<std::int32_t> tokens;
    if (ids) tokens.assign(ids->data(), ids->data() + scores.shape(0));
    constexpr Rules none{1, 0, 1, -std::numeric_limits<double>::infinity()};
    Row<double> bound(scores.data(), scores.shape(0), best, none, ids ? tokens.data() : nullptr);
    return bound.sample(Noise(seed, stream, position, node));
}

template <class T> void bind_rows(nb::module_& module) {
    module.def("argmax", &row_argmax<T>, nb::arg("row").noconvert());
    module.def("rows_argmax", &rows_argmax<T>, nb::arg("rows").noconvert());
    module.def("rows_weight", &rows_weight<T>, nb::arg("rows").noconvert());
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
    module.def("gumbel_at", &gumbel_at, nb::arg("seed"), nb::arg("stream"), nb::arg("position"), nb::arg("node"),
               nb::arg("ids").noconvert(), nb::arg("out").noconvert());
    module.def("noisy_argmax", &noisy_argmax, nb::arg("scores").noconvert(), nb::arg("seed"), nb::arg("stream"),
               nb::arg("position"), nb::arg("node"), nb::arg("ids") = nb::none());
    bind_rows<float>(module);
    bind_rows<double>(module);
}

}  // namespace draftsmith
