// Python face of the suffix index: drafters/suffix_native.py wraps it. A mutex guards each index, so a call that
// has released the interpreter lock for a long build cannot meet another one.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>
#include <string>
#include <tuple>

#include "suffix_index.hpp"

namespace nb = nanobind;

namespace draftsmith {
namespace {

using Tokens = std::vector<std::int32_t>;
constexpr std::size_t kLong = 4096;  // tokens from which a build releases the interpreter lock

template <typename T>
nb::tuple to_tuple(const std::vector<T>& values) {
    PyObject* tuple = PyTuple_New(static_cast<Py_ssize_t>(values.size()));
    for (std::size_t i = 0; i < values.size(); ++i) {
        PyObject* item;
        if constexpr (std::is_floating_point_v<T>) item = PyFloat_FromDouble(values[i]);
        else item = PyLong_FromLong(values[i]);
        PyTuple_SET_ITEM(tuple, static_cast<Py_ssize_t>(i), item);
    }
    return nb::steal<nb::tuple>(tuple);
}

void check_tokens(const Tokens& tokens) {
    for (const std::int32_t token : tokens) {
        if (token < 0) throw nb::value_error(("token ids must not be negative: " + std::to_string(token)).c_str());
    }
}

[[noreturn]] void not_active(std::int64_t request) {
    throw nb::key_error(("request " + std::to_string(request) + " is not active").c_str());
}

class Bound {
    template <typename F>
    auto locked(F&& call) {
        std::lock_guard<std::mutex> guard(mutex_);
        return call();
    }
    template <typename F>
    auto unlocked(F&& call) {
        nb::gil_scoped_release release;
        return locked(std::forward<F>(call));
    }

public:
    Bound(std::uint32_t max_depth, std::int64_t max_cached) : index_(max_depth, max_cached), max_cached_(max_cached) {}

    void start_request(std::int64_t request, const Tokens& prompt) {
        check_tokens(prompt);
        const auto start = [&] { return index_.start_request(request, prompt.data(), prompt.size()); };
        const bool done = prompt.size() >= kLong ? unlocked(start) : locked(start);
        if (!done) throw nb::key_error(("request " + std::to_string(request) + " is active already").c_str());
    }

    void extend_request(std::int64_t request, const Tokens& tokens) {
        check_tokens(tokens);
        if (!locked([&] { return index_.extend_request(request, tokens.data(), tokens.size()); })) not_active(request);
    }

    nb::tuple speculate(std::int64_t request, std::int64_t max_tokens, double factor, double offset, double min_prob,
                        bool tree) {
        if (!(factor >= 0) || std::isnan(offset) || std::isnan(min_prob)) {
            throw nb::value_error("factor must be at least 0; offset and min_prob numbers");
        }
        const auto most = static_cast<std::uint32_t>(std::clamp<std::int64_t>(max_tokens, 0, 1 << 20));
        const DraftOptions options{most, factor, offset, min_prob, tree};
        bool from_global = false;
        draft_.tokens.clear();
        draft_.clear();
        draft_.score = 0.0;
        draft_.match_len = 0;
        if (!locked([&] { return index_.speculate(request, options, draft_, from_global); })) not_active(request);
        return nb::make_tuple(to_tuple(draft_.tokens), to_tuple(draft_.parents), to_tuple(draft_.probs), draft_.score,
                              draft_.match_len, from_global);
    }

    std::int64_t request_len(std::int64_t request) {
        return locked([&] { return index_.request_len(request); });
    }
    void stop_request(std::int64_t request) {
        locked([&] { return index_.stop_request(request); });
    }
    void evict_request(std::int64_t request) {
        unlocked([&] { return index_.evict_request(request); });
    }

    nb::tuple cached_sequences() {
        std::vector<std::uint32_t> lengths;
        Tokens tokens;
        unlocked([&] { index_.cached_sequences(lengths, tokens); });
        const auto* bytes = reinterpret_cast<const char*>(tokens.data());
        return nb::make_tuple(lengths, nb::bytes(bytes, tokens.size() * sizeof(std::int32_t)));
    }

    void add_sequences(const std::vector<std::uint32_t>& lengths, nb::bytes data) {
        std::size_t total = 0;
        for (const std::uint32_t length : lengths) total += length;
        if (total * sizeof(std::int32_t) != data.size()) throw nb::value_error("lengths and tokens do not fit");
        Tokens tokens(total);
        if (total != 0) std::memcpy(tokens.data(), data.c_str(), data.size());
        check_tokens(tokens);
        unlocked([&] {
            std::size_t kept = lengths.size(), at = 0;
            if (max_cached_ >= 0) kept = std::min(kept, static_cast<std::size_t>(max_cached_));
            for (std::size_t i = 0; i < lengths.size(); at += lengths[i++]) {
                if (i + kept >= lengths.size()) index_.add_sequence(tokens.data() + at, lengths[i]);
            }
        });
    }

    std::uint64_t num_tokens() {
        return locked([&] { return index_.num_tokens(); });
    }
    std::uint64_t num_nodes() {
        return locked([&] { return index_.num_nodes(); });
    }
    std::size_t num_cached() {
        return locked([&] { return index_.num_cached(); });
    }
    std::size_t memory_bytes() {
        return locked([&] { return index_.bytes(); });
    }
    void check() {
        locked([&] { index_.check(); });
    }

private:
    SuffixIndex index_;
    std::int64_t max_cached_;
    Draft draft_;
    std::mutex mutex_;
};

}  // namespace

void bind_suffix_index(nb::module_& module) {
    nb::class_<Bound>(module, "SuffixIndex")
        .def(nb::init<std::uint32_t, std::int64_t>(), nb::arg("max_depth"), nb::arg("max_cached"))
        .def("start_request", &Bound::start_request, nb::arg("request_id"), nb::arg("prompt"))
        .def("extend_request", &Bound::extend_request, nb::arg("request_id"), nb::arg("tokens"))
        .def("speculate", &Bound::speculate, nb::arg("request_id"), nb::arg("max_tokens"), nb::arg("factor"),
             nb::arg("offset"), nb::arg("min_prob"), nb::arg("tree"))
        .def("request_len", &Bound::request_len, nb::arg("request_id"))
        .def("stop_request", &Bound::stop_request, nb::arg("request_id"))
        .def("evict_request", &Bound::evict_request, nb::arg("request_id"))
        .def("cached_sequences", &Bound::cached_sequences)
        .def("add_sequences", &Bound::add_sequences, nb::arg("lengths"), nb::arg("tokens"))
        .def("check", &Bound::check)
        .def_prop_ro("num_tokens", &Bound::num_tokens)
        .def_prop_ro("num_nodes", &Bound::num_nodes)
        .def_prop_ro("num_cached", &Bound::num_cached)
        .def_prop_ro("memory_bytes", &Bound::memory_bytes);
}

}  // namespace draftsmith
