// Binds the row drafter; checks what Python hands over, computes nothing.
// A call plans and counts while it holds the interpreter, so that no fork finds a sequence half changed, and works
// without it.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include <optional>
#include <tuple>

#include "bind_arguments.hpp"
#include "row_drafter.hpp"

namespace draftsmith {
namespace {

constexpr std::int64_t MOST_WIDTH = std::int64_t{1} << 24;

using Ids = std::vector<std::int64_t>;
using Tokens = std::vector<std::vector<std::int32_t>>;
using Features = std::vector<Matrix<float>>;
// Seed, stream and position of the noise, inverse temperature, top-k, top-p, and how far below the largest min-p goes.
using DrawValues = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t, double, std::int64_t, double, double>;
using Draws = std::vector<std::optional<DrawValues>>;

void check(bool is_right, const char* what) {
    if (!is_right) throw std::invalid_argument(what);
}

RowShape row_shape_of(const nb::dict& values) {
    const auto whole = [&](const char* name) { return nb::cast<int>(values[name]); };
    const auto real = [&](const char* name) { return nb::cast<float>(values[name]); };
    const auto flag = [&](const char* name) { return nb::cast<bool>(values[name]); };
    const RowShape shape{whole("feature_width"), whole("embedding_width"), whole("width"),
                         whole("num_heads"),     whole("num_kv_heads"),    whole("head_dim"),
                         whole("mlp_width"),     whole("num_ids"),         real("norm_eps"),
                         real("attention_scale"), real("attention_cap"),   real("logit_cap"),
                         real("embedding_scale"), flag("is_feature_first"), flag("norms_residual"),
                         flag("feeds_normed")};
    for (const int size : {shape.feature_width, shape.embedding_width, shape.width, shape.num_heads, shape.num_kv_heads,
                           shape.head_dim, shape.mlp_width, shape.num_ids}) {
        check(size >= 1 && size <= MOST_WIDTH, "a shape the kernels cannot serve");
    }
    check(shape.num_heads % shape.num_kv_heads == 0 && shape.head_dim % TILE == 0 &&
              std::int64_t{3} * shape.num_heads * shape.head_dim <= MOST_WIDTH, "a shape the kernels cannot serve");
    return shape;
}

Linear optional_linear_of(const nb::dict& values, const char* name, int outputs, int inputs) {
    return values[name].is_none() ? Linear{} : linear_of(values[name], 1, {outputs}, inputs);
}

RowWeights row_weights_of(const nb::dict& values, const RowShape& shape) {
    const int heads = shape.num_heads * shape.head_dim, kv = shape.num_kv_heads * shape.head_dim;
    const int pair = shape.embedding_width + shape.width;
    RowWeights weights;
    weights.reduce = optional_linear_of(values, "reduce", shape.width, shape.feature_width);
    weights.fuse = optional_linear_of(values, "fuse", shape.width, pair);
    const bool has_reduce = !weights.reduce.parts.empty(), has_fuse = !weights.fuse.parts.empty();
    weights.qkv = linear_of(values["qkv"], 3, {heads, kv, kv}, has_fuse ? shape.width : pair);
    weights.output = linear_of(values["output"], 1, {shape.width}, heads);
    weights.gate_up = linear_of(values["gate_up"], 2, {shape.mlp_width, shape.mlp_width}, shape.width);
    weights.down = linear_of(values["down"], 1, {shape.width}, shape.mlp_width);
    weights.head = linear_of(values["head"], 1, {shape.num_ids}, shape.width);
    weights.tap_norms = norm_of(values, "tap_norms", shape.feature_width, true);
    weights.embedding_norm = norm_of(values, "embedding_norm", shape.embedding_width, true);
    weights.feature_norm = norm_of(values, "feature_norm", shape.width, true);
    weights.attention_norm = norm_of(values, "attention_norm", shape.width, true);
    weights.mlp_norm = norm_of(values, "mlp_norm", shape.width, false);
    weights.query_norm = norm_of(values, "query_norm", shape.head_dim, true);
    weights.key_norm = norm_of(values, "key_norm", shape.head_dim, true);
    weights.final_norm = norm_of(values, "final_norm", shape.width, true);
    weights.embedding = nb::cast<std::shared_ptr<Packed>>(values["embedding"]);
    check(has_reduce || shape.feature_width == shape.width, "features of another width need a layer that reduces them");
    check(weights.tap_norms.empty() || (has_reduce && shape.feature_width % shape.embedding_width == 0),
          "norms of features that are no taps side by side");
    check(weights.attention_norm.empty() || has_fuse, "a norm of what is not there");
    check(!shape.norms_residual || (!has_fuse && !weights.feature_norm.empty()), "a residual that is not there");
    check(!shape.feeds_normed || !weights.final_norm.empty(), "a final norm that is not there");
    check(weights.embedding != nullptr && weights.embedding->inputs() == shape.embedding_width,
          "the embedding has the wrong shape");
    const auto ids = nb::cast<Array<std::int32_t>>(values["ids"]);
    weights.ids.assign(ids.data(), ids.data() + ids.size());
    check(weights.ids.size() == static_cast<std::size_t>(shape.num_ids), "ids and outputs differ in number");
    for (const std::int32_t id : weights.ids) {
        check(id >= 0 && id < weights.embedding->outputs(), "an id is outside the vocabulary");
    }
    return weights;
}

void build(RowDrafter* self, const nb::dict& shape_values, const nb::dict& weights, bool owns_head,
           std::string_view cache_type, int threads, bool pin, std::string_view kernels) {
    const RowShape shape = row_shape_of(shape_values);
    check(threads >= 1, "at least one thread is needed");
    new (self) RowDrafter(shape, row_weights_of(weights, shape), owns_head, cache_type_named(cache_type),
                          shared_pool(threads, pin), kernels_named(kernels));
}

// `plan` with the interpreter, the work without, the counts with it.
template <class Plan>
void step(RowDrafter& self, Plan plan) {
    plan();
    {
        const nb::gil_scoped_release released;
        self.run();
    }
    self.finish();
}

std::vector<TrueRows> true_rows(const RowDrafter& self, const Ids& ids, Tokens& tokens, const Features& features) {
    check(tokens.size() == ids.size() && features.size() == ids.size(), "sequences, tokens and features differ in number");
    std::vector<TrueRows> groups;
    for (std::size_t i = 0; i < ids.size(); ++i) {
        check(features[i].shape(0) == tokens[i].size(), "tokens and features differ in number");
        check(tokens[i].empty() || features[i].shape(1) == static_cast<std::size_t>(self.shape().feature_width),
              "features have the wrong width");
        groups.push_back({ids[i], std::move(tokens[i]), features[i].data()});
    }
    return groups;
}

void check_logits(const RowDrafter& self, const FloatsOut& logits, std::size_t rows) {
    check(logits.shape(0) == rows && logits.shape(1) == static_cast<std::size_t>(self.shape().num_ids),
          "logits have the wrong shape");
}

void append(RowDrafter& self, const Ids& ids, Tokens tokens, const Features& features) {
    const std::vector<TrueRows> groups = true_rows(self, ids, tokens, features);
    step(self, [&] { self.plan_append(groups); });
}

void begin(RowDrafter& self, const Ids& ids, Tokens tokens, const Features& features, FloatsOut logits) {
    const std::vector<TrueRows> groups = true_rows(self, ids, tokens, features);
    check_logits(self, logits, groups.size());
    step(self, [&] { self.plan_begin(groups, logits.data()); });
}

void extend(RowDrafter& self, const Ids& ids, Tokens tokens, Tokens parents, FloatsOut logits) {
    check(tokens.size() == ids.size() && parents.size() == ids.size(), "sequences, tokens and parents differ in number");
    std::vector<SpeculativeRows> groups;
    std::size_t rows = 0;
    for (std::size_t i = 0; i < ids.size(); ++i) {
        rows += tokens[i].size();
        groups.push_back({ids[i], std::move(tokens[i]), std::move(parents[i])});
    }
    check_logits(self, logits, rows);
    step(self, [&] { self.plan_extend(groups, logits.data()); });
}

nb::list chain(RowDrafter& self, const Ids& ids, Tokens tokens, const Features& features, const std::vector<int>& depths,
               float least, const Draws& draw_values) {
    const std::vector<TrueRows> groups = true_rows(self, ids, tokens, features);
    std::size_t total = 0;
    for (const int depth : depths) {
        check(depth >= 1 && depth <= MOST_WIDTH, "a chain of fewer than 1 token");
        total += static_cast<std::size_t>(depth);
    }
    check(total <= static_cast<std::size_t>(MOST_WIDTH), "chains of too many tokens");
    std::vector<std::optional<Draw>> draws;
    for (const std::optional<DrawValues>& values : draw_values) {
        draws.push_back(values ? std::optional(std::make_from_tuple<Draw>(*values)) : std::nullopt);
    }
    std::vector<std::int32_t> picks(total);
    std::vector<float> probs(total);
    step(self, [&] { self.plan_chain(groups, depths, least, draws, picks.data(), probs.data()); });
    nb::list chains;
    std::size_t first = 0;
    for (std::size_t group = 0; group < depths.size(); ++group) {
        nb::list of_picks, of_probs;
        for (int i = 0; i < self.chain_lengths()[group]; ++i) {
            of_picks.append(picks[first + static_cast<std::size_t>(i)]);
            of_probs.append(probs[first + static_cast<std::size_t>(i)]);
        }
        first += static_cast<std::size_t>(depths[group]);
        chains.append(nb::make_tuple(of_picks, of_probs));
    }
    return chains;
}

}  // namespace

void bind_row_drafter(nb::module_& module) {
    nb::class_<RowDrafter>(module, "RowDrafter", "A one-layer drafter over features, with packed weights.")
        .def("__init__", build, nb::arg("shape"), nb::arg("weights"), nb::arg("owns_head"), nb::arg("cache_type"),
             nb::arg("threads"), nb::arg("pin"), nb::arg("kernels"))
        .def("set_rotation", [](RowDrafter& self, const Matrix<float>& cosines, const Matrix<float>& sines) {
            const auto half = static_cast<std::size_t>(self.shape().head_dim / 2);
            check(cosines.shape(1) == half && sines.shape(1) == half && cosines.shape(0) == sines.shape(0) &&
                      cosines.shape(0) <= static_cast<std::size_t>(std::int64_t{1} << 30), "a rotation has the wrong shape");
            self.set_rotation(cosines.data(), sines.data(), static_cast<int>(cosines.shape(0)));
        }, nb::arg("cosines"), nb::arg("sines"))
        .def("append", append, nb::arg("ids"), nb::arg("tokens"), nb::arg("features"))
        .def("begin", begin, nb::arg("ids"), nb::arg("tokens"), nb::arg("features"), nb::arg("logits").noconvert())
        .def("extend", extend, nb::arg("ids"), nb::arg("tokens"), nb::arg("parents"), nb::arg("logits").noconvert())
        .def("chain", chain, nb::arg("ids"), nb::arg("tokens"), nb::arg("features"), nb::arg("depths"),
             nb::arg("least") = 0.0f, nb::arg("draws") = Draws())
        .def("num_rows", &RowDrafter::num_rows, nb::arg("id"))
        .def("num_drafted", &RowDrafter::num_drafted, nb::arg("id"))
        .def("truncate", &RowDrafter::truncate, nb::arg("id"), nb::arg("num_rows"))
        .def("fork", &RowDrafter::fork, nb::arg("source"), nb::arg("copy"), nb::arg("num_rows"))
        .def("forget", &RowDrafter::forget, nb::arg("id"))
        .def_prop_ro("kernels", &RowDrafter::kernels_name)
        .def_prop_ro("num_positions", &RowDrafter::num_positions)
        .def_prop_ro("weight_bytes", &RowDrafter::weight_bytes)
        .def_prop_ro("bytes_per_row", &RowDrafter::bytes_per_row);
}

}  // namespace draftsmith
