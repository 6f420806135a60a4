#include "sampling.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "elementary.hpp"
#include "kernels.hpp"

namespace draftsmith {
namespace {

constexpr std::size_t kGroup = 64;       // values in a group whose maximum stands for it
constexpr double kNear = 3, kFar = 7;    // first guesses of how far down a nucleus reaches, in temperatures
constexpr double kLargestScore = 1e9;    // beyond it scores are too coarse for bounds on noise

// Rooms that are used again by every call of a thread: a fresh one of this size would be mapped page by page.
template <class T> struct Rooms {
    std::vector<std::int32_t> indices, ids[2];
    std::vector<T> values[2], sorted;
    std::vector<double> weights[2];
};
template <class T> Rooms<T>& rooms() {
    static thread_local Rooms<T> found;
    return found;
}
template <class X> X* room(std::vector<X>& where, std::size_t size) {
    if (where.size() < size) where.resize(size);
    return where.data();
}

// As core/elementary.py's rounding_step.
double rounding_step(std::size_t count) {
    const int bits = std::min(48, 53 - static_cast<int>(std::bit_width(count - 1)));
    return 1.5 * std::ldexp(1.0, 52 - bits);
}

// One candidate of the nucleus.
template <class T> struct Entry {
    T value;
    std::int32_t index;
    double weight;
};

}  // namespace

template <class T>
Row<T>::Row(const T* values, std::size_t size, std::size_t best, const Rules& rules)
    : values_(values), size_(size), best_(best), largest_(values[best]),
      // Tokens at minus infinity are impossible under every rule.
      floor_(std::max(static_cast<T>(rules.floor), std::numeric_limits<T>::lowest())), rules_(rules) {}

// From here on the row is what the cut keeps, unless that is more than `limit`.
template <class T> void Row<T>::narrow(const Cut& cut, std::size_t limit) {
    Rooms<T>& own = rooms<T>();
    std::int32_t* indices = room(own.indices, limit + 2 * kGroup);
    const std::size_t found = select(values_, size_, cut.value, limit, indices);
    if (found > limit) return;
    // A row is narrowed twice at most: what is read now may lie in the room of the first time.
    const bool again = ids_ != nullptr;
    std::int32_t* ids = room(own.ids[again], found);
    T* values = room(own.values[again], found);
    double* weights = weights_ ? room(own.weights[1], found) : nullptr;
    std::size_t count = 0, best = 0;
    for (std::size_t i = 0; i < found; ++i) {
        const auto from = static_cast<std::size_t>(indices[i]);
        if (!cut.keeps(values_[from], indices[i])) continue;
        if (from == best_) best = count;
        ids[count] = static_cast<std::int32_t>(id_of(from));
        values[count] = values_[from];
        if (weights) weights[count] = weights_[from];
        ++count;
    }
    values_ = values;
    ids_ = ids;
    weights_ = weights;
    size_ = count;
    best_ = best;
}

template <class T> void Row<T>::keep_top_k() {
    if (rules_.top_k <= 0 || static_cast<std::uint64_t>(rules_.top_k) >= size_) return;
    const auto count = static_cast<std::size_t>(rules_.top_k);
    Rooms<T>& own = rooms<T>();
    T bound = -std::numeric_limits<T>::infinity();
    const std::size_t num_groups = size_ / kGroup;
    if (count * 4 <= num_groups) {
        // As many group maxima reach the bound, so the wanted tokens are among those that do. A group is a column.
        T* maxima = room(own.sorted, num_groups);
        std::copy(values_, values_ + num_groups, maxima);
        for (std::size_t row = 1; row < kGroup; ++row) {
            const T* values = values_ + row * num_groups;
            for (std::size_t i = 0; i < num_groups; ++i) maxima[i] = values[i] > maxima[i] ? values[i] : maxima[i];
        }
        std::nth_element(maxima, maxima + (count - 1), maxima + num_groups, std::greater<T>());
        bound = maxima[count - 1];
    }
    std::int32_t* near = room(own.indices, size_ + 2 * kGroup);
    const std::size_t num_near = select(values_, size_, bound, size_, near);
    T* sorted = room(own.sorted, num_near);
    for (std::size_t i = 0; i < num_near; ++i) sorted[i] = values_[near[i]];
    std::nth_element(sorted, sorted + (count - 1), sorted + num_near, std::greater<T>());
    Cut cut{sorted[count - 1], 0};
    auto surplus = static_cast<std::int64_t>(count);
    for (std::size_t i = 0; i < num_near; ++i) surplus -= values_[near[i]] > cut.value;
    for (std::size_t i = 0; surplus > 0; ++i) {
        if (values_[near[i]] != cut.value) continue;
        cut.index = near[i];
        --surplus;
    }
    narrow(cut, size_);
}

// Weights of all values, and a floor that the nucleus does not reach below.
template <class T> void Row<T>::weigh_all() {
    if (rules_.top_p >= 1) return;
    double* weights = room(rooms<T>().weights[0], size_ + kLanes);
    const Weighing<T> by{largest_, static_cast<T>(rules_.inverse_temperature), rounding_step(size_)};
    const auto near = static_cast<T>(largest_ - kNear / rules_.inverse_temperature);
    const auto far = static_cast<T>(largest_ - kFar / rules_.inverse_temperature);
    const Masses masses = weigh(values_, size_, by, near, far, weights);
    weights_ = weights;
    wanted_ = rules_.top_p * masses.total;
    if (masses.near >= wanted_) floor_ = std::max(floor_, near);
    else if (masses.far >= wanted_) floor_ = std::max(floor_, far);
}

template <class T> std::size_t Row<T>::support(std::int64_t* ids) {
    keep_top_k();
    weigh_all();
    const Cut cut = rules_.top_p < 1 ? top_p_cut() : floor_cut();
    std::size_t count = 0;
    for (std::size_t i = 0; i < size_; ++i) {
        ids[count] = id_of(i);
        count += cut.keeps(values_[i], static_cast<std::int64_t>(i)) && values_[i] >= floor_;
    }
    return count;
}

// Selection by weight: the side of a pivot that the nucleus ends in is looked at further, the other is settled.
template <class T> typename Row<T>::Cut Row<T>::top_p_cut() const {
    static thread_local std::vector<Entry<T>> entries;
    entries.clear();
    for (std::size_t i = 0; i < size_; ++i) {
        if (values_[i] >= floor_) entries.push_back({values_[i], static_cast<std::int32_t>(i), weights_[i]});
    }
    auto begin = entries.begin(), end = entries.end();
    double mass = 0;
    while (begin != end) {
        const T low = std::min(begin->value, (end - 1)->value), high = std::max(begin->value, (end - 1)->value);
        const T pivot = std::clamp(begin[(end - begin) / 2].value, low, high);
        const auto equal = std::partition(begin, end, [&](const Entry<T>& entry) { return entry.value > pivot; });
        const auto less = std::partition(equal, end, [&](const Entry<T>& entry) { return entry.value == pivot; });
        double above = mass;
        for (auto entry = begin; entry != equal; ++entry) above += entry->weight;
        if (above >= wanted_) {
            end = equal;
            continue;
        }
        std::sort(equal, less, [](const Entry<T>& a, const Entry<T>& b) { return a.index < b.index; });
        mass = above;
        for (auto entry = equal; entry != less; ++entry) {
            mass += entry->weight;
            if (mass >= wanted_) return {entry->value, entry->index};
        }
        begin = less;
    }
    return floor_cut();
}

template <class T> double Row<T>::mass_before(std::size_t index) const {
    const T value = values_[index];
    const std::size_t next = index + 1;
    return mass_above(values_, weights_, index, value, true) +
           mass_above(values_ + next, weights_ + next, size_ - next, value, false);
}

template <class T> std::int64_t Row<T>::sample(const Noise& noise) {
    keep_top_k();
    weigh_all();
    if (floor_ > std::numeric_limits<T>::lowest()) narrow(floor_cut(), size_ / 4);
    Cut cut = floor_cut();
    for (;;) {
        const std::size_t winner = race(noise, cut);
        if (rules_.top_p >= 1 || mass_before(winner) < wanted_) return id_of(winner);
        // Not in the nucleus, and nothing after it is: once more among those before it.
        cut = {values_[winner], static_cast<std::int64_t>(winner) - 1};
    }
}

template <class T>
void Row<T>::words(const Noise& noise, std::size_t begin, std::size_t size, std::uint64_t* out) const {
    if (!ids_) return noise.words(begin / 4, (size + 3) / 4, out);
    std::uint64_t block[4];
    std::int32_t last = -1;
    for (std::size_t i = 0; i < size; ++i) {
        const std::int32_t id = ids_[begin + i];
        if (id / 4 != last) noise.words(static_cast<std::uint64_t>(last = id / 4), 1, block);
        out[i] = block[id % 4];
    }
}

// The index whose score plus noise is largest among those that `cut` keeps. Logarithms are taken for those tokens alone
// whose word passes the hurdle set by the best so far; a margin of one in a thousand covers every rounding.
template <class T> std::size_t Row<T>::race(const Noise& noise, const Cut& cut) const {
    const double slope = rules_.inverse_temperature, most = static_cast<double>(largest_) * slope;
    const bool is_fine = std::abs(most) < kLargestScore;
    const auto noise_of = [](std::uint64_t word) { return gumbel_of<double, std::uint64_t>(word); };
    std::size_t best = best_;
    double reached = most + noise_of(noise.word(static_cast<std::uint64_t>(id_of(best))));
    Hurdle<T> hurdle{largest_, static_cast<T>(slope * kLog2E), std::max(cut.value, floor_), 0};
    const auto raise = [&] {
        hurdle.scale = is_fine ? static_cast<float>(std::exp(most - reached) * (1.001 * 0x1p31)) : 1e38f;
        if (!is_fine) hurdle.slope = 0;
    };
    raise();
    std::uint64_t words_of[kChunk + 3];
    T padded[kChunk];
    std::int32_t hits[kChunk];
    // Short chunks first: the hurdle is low until a few tokens have been seen.
    for (std::size_t begin = 0, chunk = kLanes; begin < size_; begin += chunk, chunk = std::min(2 * chunk, kChunk)) {
        const std::size_t size = std::min(chunk, size_ - begin);
        words(noise, begin, size, words_of);
        const T* values = values_ + begin;
        if (size < chunk) {
            std::fill(std::copy(values, values + size, padded), padded + kChunk, -std::numeric_limits<T>::infinity());
            std::fill(words_of + size, words_of + kChunk, 0);
            values = padded;
        }
        if (!pass(values, words_of, chunk, hurdle, hits)) continue;
        for (std::size_t i = 0; i < size; ++i) {
            const std::size_t at = begin + i;
            if (!hits[i] || !cut.keeps(values[i], static_cast<std::int64_t>(at))) continue;
            const double score = static_cast<double>(values[i]) * slope + noise_of(words_of[i]);
            if (score > reached || (score == reached && at < best)) {
                best = at;
                reached = score;
                raise();
            }
        }
    }
    return best;
}

template class Row<float>;
template class Row<double>;

}  // namespace draftsmith
