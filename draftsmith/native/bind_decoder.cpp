// Binds packed weights and the decoder; checks what Python hands over, computes nothing.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <climits>
#include <stdexcept>

#include "bind_arguments.hpp"
#include "decoder.hpp"

namespace draftsmith {
namespace {

nb::list instruction_sets() {
    nb::list names;
    for (const Kernels* kernels : {avx512_kernels(), avxvnni_kernels(), avx2_kernels(), portable_kernels()}) {
        if (kernels != nullptr) names.append(kernels->name);
    }
    return names;
}

Shape shape_of(const nb::dict& values) {
    const auto whole = [&](const char* name) { return nb::cast<int>(values[name]); };
    const auto real = [&](const char* name) { return nb::cast<float>(values[name]); };
    const Shape shape{whole("width"),        whole("num_heads"),     whole("num_kv_heads"),  whole("head_dim"),
                      whole("mlp_width"),    whole("vocab_size"),    real("norm_eps"),       real("attention_scale"),
                      real("attention_cap"), real("logit_cap"),      real("embedding_scale"),
                      nb::cast<bool>(values["is_gelu"])};
    if (shape.width < 1 || shape.num_kv_heads < 1 || shape.num_heads % shape.num_kv_heads != 0 || shape.head_dim < 16 ||
        shape.head_dim % TILE != 0 || shape.mlp_width < 1 || shape.vocab_size < 1) {
        throw std::invalid_argument("a shape the kernels cannot serve");
    }
    return shape;
}

Layer layer_of(const nb::dict& values, const Shape& shape) {
    const int heads = shape.num_heads * shape.head_dim, kv = shape.num_kv_heads * shape.head_dim;
    Layer layer;
    layer.qkv = linear_of(values["qkv"], 3, {heads, kv, kv}, shape.width);
    layer.output = linear_of(values["output"], 1, {shape.width}, heads);
    layer.gate_up = linear_of(values["gate_up"], 2, {shape.mlp_width, shape.mlp_width}, shape.width);
    layer.down = linear_of(values["down"], 1, {shape.width}, shape.mlp_width);
    layer.attention_norm = norm_of(values, "attention_norm", shape.width, false);
    layer.mlp_norm = norm_of(values, "mlp_norm", shape.width, false);
    layer.attention_out_norm = norm_of(values, "attention_out_norm", shape.width, true);
    layer.mlp_out_norm = norm_of(values, "mlp_out_norm", shape.width, true);
    layer.query_norm = norm_of(values, "query_norm", shape.head_dim, true);
    layer.key_norm = norm_of(values, "key_norm", shape.head_dim, true);
    layer.kind = nb::cast<int>(values["kind"]);
    layer.place = nb::cast<int>(values["place"]);
    layer.window = nb::cast<int>(values["window"]);
    if (layer.kind < 0 || layer.place < 0 || layer.window < 0) throw std::invalid_argument("a layer out of place");
    return layer;
}

void build(Decoder* self, const nb::dict& shape_values, const nb::list& layer_values, std::shared_ptr<Packed> embedding,
           std::shared_ptr<Packed> head, const FloatsIn& final_norm, std::string_view cache_type, int threads, bool pin,
           std::string_view kernels) {
    const Shape shape = shape_of(shape_values);
    for (const Packed* packed : {embedding.get(), head.get()}) {
        if (packed->outputs() != shape.vocab_size || packed->inputs() != shape.width) {
            throw std::invalid_argument("embedding or head has the wrong shape");
        }
    }
    if (final_norm.size() != static_cast<std::size_t>(shape.width)) throw std::invalid_argument("a norm has the wrong size");
    std::vector<Layer> layers;
    for (const nb::handle values : layer_values) layers.push_back(layer_of(nb::cast<nb::dict>(values), shape));
    const CacheType type = cache_type_named(cache_type);
    if (threads < 1) throw std::invalid_argument("at least one thread is needed");
    new (self) Decoder(shape, std::move(layers), std::move(embedding), Linear{{std::move(head)}, {}},
                       Floats(final_norm.data(), final_norm.data() + final_norm.size()), type,
                       shared_pool(threads, pin), kernels_named(kernels));
}

// Slots come as arrays [groups * kinds]: address of the rows, storage position of slot 0, capacity.
void score(Decoder& self, const Array<std::int32_t>& tokens, const Array<std::int32_t>& parents,
           const Array<std::int32_t>& group_rows, const Array<std::int32_t>& committed,
           const Array<std::uint64_t>& slot_data, const Array<std::int32_t>& slot_first,
           const Array<std::int32_t>& slot_capacity, const Array<std::int32_t>& logit_rows, FloatsOut logits,
           const Array<std::int32_t>& tap_layers, const std::vector<FloatsOut>& taps,
           std::optional<FloatsOut> last_hidden) {
    const std::size_t num_groups = group_rows.size(), num_kinds = static_cast<std::size_t>(self.num_kinds());
    const auto check = [](bool is_right, const char* what) {
        if (!is_right) throw std::invalid_argument(what);
    };
    check(parents.size() == tokens.size() && committed.size() == num_groups, "rows or groups differ in number");
    check(slot_data.size() == num_groups * num_kinds && slot_first.size() == slot_data.size() &&
              slot_capacity.size() == slot_data.size(), "slots are missing");
    check(logits.shape(0) == logit_rows.size() && logits.shape(1) == static_cast<std::size_t>(self.shape().vocab_size),
          "logits have the wrong shape");
    check(taps.size() == tap_layers.size(), "taps differ in number");
    for (const FloatsOut& tap : taps) {
        check(tap.shape(0) == tokens.size() && tap.shape(1) == static_cast<std::size_t>(self.shape().width),
              "a tap has the wrong shape");
    }
    if (last_hidden) {
        check(last_hidden->shape(0) == tokens.size() &&
                  last_hidden->shape(1) == static_cast<std::size_t>(self.shape().width), "a tap has the wrong shape");
    }
    for (const std::int32_t row : span_of(logit_rows)) {
        check(row >= 0 && static_cast<std::size_t>(row) < tokens.size(), "no such row");
    }
    std::vector<Slots> slots;
    for (std::size_t i = 0; i < slot_data.size(); ++i) {
        slots.push_back({reinterpret_cast<std::uint8_t*>(slot_data.data()[i]), slot_first.data()[i],
                         slot_capacity.data()[i]});
    }
    std::vector<Group> groups;
    std::size_t first_row = 0;
    for (std::size_t i = 0; i < num_groups; ++i) {
        const std::int64_t rows = group_rows.data()[i], behind = committed.data()[i];
        check(rows >= 1 && behind + rows <= INT_MAX && first_row + static_cast<std::size_t>(rows) <= tokens.size() && behind >= 0, "a group without rows");
        for (std::size_t kind = 0; kind < num_kinds; ++kind) {
            const Slots& place = slots[i * num_kinds + kind];
            check(place.data != nullptr && behind - place.first >= 0 &&
                      behind - place.first + rows <= place.capacity, "rows beyond what was reserved");
            check(place.first % KEY_BLOCK == 0 && place.capacity % KEY_BLOCK == 0, "slots without whole blocks of keys");
        }
        groups.push_back({static_cast<int>(rows), static_cast<int>(behind), parents.data() + first_row, &slots[i * num_kinds]});
        first_row += static_cast<std::size_t>(rows);
    }
    check(first_row == tokens.size(), "rows or groups differ in number");
    std::vector<Tap> wanted;
    for (std::size_t i = 0; i < taps.size(); ++i) wanted.push_back({tap_layers.data()[i], taps[i].data()});
    const Step step{span_of(tokens), groups, span_of(logit_rows), logits.data(), wanted,
                    last_hidden ? last_hidden->data() : nullptr};
    const nb::gil_scoped_release released;
    self.score(step);
}

std::shared_ptr<Packed> pack_bytes(std::string_view type, const Matrix<std::uint8_t>& rows, int inputs) {
    const nb::gil_scoped_release released;
    return pack_ggml(type, rows.data(), rows.shape(1), static_cast<int>(rows.shape(0)), inputs);
}

std::shared_ptr<Packed> pack_values(const Matrix<float>& rows, int bits) {
    const nb::gil_scoped_release released;
    return pack_floats(rows.data(), static_cast<int>(rows.shape(0)), static_cast<int>(rows.shape(1)), bits);
}

nb::ndarray<nb::numpy, float> dequantise_all(const Packed& packed) {
    const auto rows = static_cast<std::size_t>(packed.outputs()), width = static_cast<std::size_t>(packed.inputs());
    auto* values = new float[rows * width];
    nb::capsule owner(values, [](void* p) noexcept { delete[] static_cast<float*>(p); });
    for (std::size_t row = 0; row < rows; ++row) packed.dequantise(static_cast<int>(row), values + row * width);
    return nb::ndarray<nb::numpy, float>(values, {rows, width}, owner);
}

}  // namespace

void bind_decoder(nb::module_& module) {
    nb::class_<Packed>(module, "Packed", "Integer weights of a linear layer, packed for the kernels.")
        .def_prop_ro("outputs", &Packed::outputs)
        .def_prop_ro("inputs", &Packed::inputs)
        .def_prop_ro("bits", [](const Packed& self) { return self.format().bits; })
        .def_prop_ro("num_bytes", &Packed::bytes)
        .def("dequantise", dequantise_all, "The weights as float32 [outputs, inputs].")
        .def("select", [](const Packed& self, const Array<std::int32_t>& outputs) {
            return select_outputs(self, span_of(outputs));
        }, nb::arg("outputs"), "The outputs named, in that order.");
    module.def("pack_ggml", pack_bytes, nb::arg("type_name"), nb::arg("rows"), nb::arg("inputs"),
               "Pack rows of ggml blocks; None for a type without an exact place.");
    module.def("pack_floats", pack_values, nb::arg("rows"), nb::arg("bits"), "Quantise float rows to 8 or 4 bits.");
    module.attr("KEY_BLOCK") = KEY_BLOCK;
    module.def("instruction_sets", instruction_sets, "Names of the kernels that run here, best first.");
    nb::class_<Decoder>(module, "Decoder", "A decoder over packed weights.")
        .def("__init__", build, nb::arg("shape"), nb::arg("layers"), nb::arg("embedding"), nb::arg("head"),
             nb::arg("final_norm"), nb::arg("cache_type"), nb::arg("threads"), nb::arg("pin"), nb::arg("kernels"))
        .def("set_rotation", [](Decoder& self, int kind, const Matrix<float>& cosines, const Matrix<float>& sines) {
            const auto half = static_cast<std::size_t>(self.shape().head_dim / 2);
            if (cosines.shape(1) != half || sines.shape(1) != half || cosines.shape(0) != sines.shape(0) || kind < 0 ||
                kind >= self.num_kinds()) {
                throw std::invalid_argument("a rotation has the wrong shape");
            }
            self.set_rotation(kind, cosines.data(), sines.data(), static_cast<int>(cosines.shape(0)));
        }, nb::arg("kind"), nb::arg("cosines"), nb::arg("sines"))
        .def("score", score, nb::arg("tokens"), nb::arg("parents"), nb::arg("group_rows"), nb::arg("committed"),
             nb::arg("slot_data"), nb::arg("slot_first"), nb::arg("slot_capacity"), nb::arg("logit_rows"),
             nb::arg("logits"), nb::arg("tap_layers"), nb::arg("taps"), nb::arg("last_hidden").none())
        .def_prop_ro("kernels", &Decoder::kernels_name)
        .def_prop_ro("weight_bytes", &Decoder::weight_bytes);
}

}  // namespace draftsmith
