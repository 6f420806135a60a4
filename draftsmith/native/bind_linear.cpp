// Binds the packed linear layer; checks what Python hands over, computes nothing.
#include "bind_arguments.hpp"
#include "packed_linear.hpp"

namespace draftsmith {
namespace {

constexpr std::size_t MOST_ROWS = std::size_t{1} << 20;

void build(PackedLinear* self, std::shared_ptr<Packed> weights, int threads, bool pin, std::string_view kernels) {
    if (threads < 1) throw std::invalid_argument("at least one thread is needed");
    if (weights == nullptr) throw std::invalid_argument("a linear layer lacks its weights");
    new (self) PackedLinear(std::move(weights), shared_pool(threads, pin), kernels_named(kernels));
}

// Holds the interpreter: the layer's buffers serve one call at a time, and a call is short.
void multiply(PackedLinear& self, const Matrix<float>& x, const FloatsOut& out) {
    if (x.shape(1) != static_cast<std::size_t>(self.weights().inputs()) ||
        out.shape(1) != static_cast<std::size_t>(self.weights().outputs()) || x.shape(0) != out.shape(0)) {
        throw std::invalid_argument("rows have the wrong shape");
    }
    if (x.shape(0) > MOST_ROWS) throw std::invalid_argument("too many rows for one call");
    self.multiply(x.data(), static_cast<int>(x.shape(0)), out.data());
}

}  // namespace

void bind_linear(nb::module_& module) {
    nb::class_<PackedLinear>(module, "PackedLinear", "A packed matrix that multiplies rows of floats.")
        .def("__init__", build, nb::arg("weights"), nb::arg("threads"), nb::arg("pin"), nb::arg("kernels"))
        .def("multiply", multiply, nb::arg("x"), nb::arg("out").noconvert());
}

}  // namespace draftsmith
