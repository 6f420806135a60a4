// Truncation and keyed draws over one row of logits, without sorting it: what core/truncation.py and core/sampling.py
// do in Python, with the same results. Bound in bind_sampling.cpp, used by row_drafter_head.cpp; the loops are in row_kernels.cpp.
//
// A support is a prefix of the row in descending order, ties by index. So each rule is a cut (the last value kept, and
// the last index among equals), rules together are the smallest prefix, and whether a token belongs to it can be
// asked for that token alone.
#pragma once

#include <cstddef>
#include <cstdint>

#include "noise.hpp"

namespace draftsmith {

struct Rules {
    double inverse_temperature;
    std::int64_t top_k;  // 0 is off
    double top_p;        // 1 is off
    double floor;        // what min-p leaves; minus infinity is off
};

template <class T> class Row {
public:
    // The row must hold no NaN; `best` is its argmax, and finite. `ids`: tokens of the values, ascending, or null where
    // they are the whole vocabulary; noise is looked up by them, and they are what is found.
    Row(const T* values, std::size_t size, std::size_t best, const Rules& rules, const std::int32_t* ids = nullptr);

    // Ids that survive truncation, ascending; returns how many. `ids` has room for the whole row.
    std::size_t support(std::int64_t* ids);

    // argmax of value * inverse_temperature + noise over the support, the lowest id among equals.
    std::int64_t sample(const Noise& noise);

private:
    struct Cut {
        T value;
        std::int64_t index;  // the last one kept among equals
        bool keeps(T other, std::int64_t at) const { return other > value || (other == value && at <= index); }
    };

    struct Range {
        T low, high;   // the cut's value is at least `low` and below `high`
        double above;  // measure of the values at or above `high`
    };

    void narrow(const Cut& cut, std::size_t limit);
    void keep_top_k();
    void weigh_all();
    void settle_near();
    template <class Measure> Range bracket(T low, double wanted, int num_steps, const Measure& measure) const;
    template <class Weight> Cut cut_in(const Range& range, double wanted, const Weight& weight) const;
    Cut top_p_cut() const;
    Cut floor_cut() const { return {floor_, static_cast<std::int64_t>(size_)}; }
    double mass_before(std::size_t index) const;
    std::size_t race(const Noise& noise, const Cut& cut) const;
    void words(const Noise& noise, std::size_t begin, std::size_t size, std::uint64_t* out) const;
    std::int64_t id_of(std::size_t index) const { return ids_ ? ids_[index] : static_cast<std::int64_t>(index); }

    const T* values_;
    const std::int32_t* ids_;            // of the values, where they are not the whole row
    bool is_narrowed_ = false;
    const T* powers_ = nullptr;          // what the values weigh before rounding
    std::size_t size_, best_;
    T largest_, floor_;  // nothing below the floor is in the support
    double wanted_ = 0;  // mass that the nucleus reaches
    int bits_ = 0;       // binary places of a weight
    Rules rules_;
};

extern template class Row<float>;
extern template class Row<double>;

}  // namespace draftsmith
