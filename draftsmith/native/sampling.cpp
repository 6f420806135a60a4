#include "sampling.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "elementary.hpp"
#include "row_kernels.hpp"

namespace draftsmith {
namespace {

constexpr std::size_t kGroup = 64;         // values in a group whose maximum stands for it
constexpr double kReaches[] = {3, 7, 12};  // guesses of how far down a nucleus reaches, in temperatures
constexpr std::size_t kFewest = 8;         // a row is worth narrowing to an eighth
constexpr int kSteps = 10;                 // halvings of a range before what is left of it is sorted
constexpr double kLargestScore = 1e9;      // beyond it scores are too coarse for bounds on noise

// A value that a cut may fall on.
template <class T> struct Entry {
    T value;
    std::int32_t index;
    double weight;
};

// Rooms that are used again by every call of a thread: a fresh one of this size would be mapped page by page.
template <class T> struct Rooms {
    std::vector<std::int32_t> indices, ids[2];
    std::vector<T> values[2], powers[2], maxima;
    std::vector<Entry<T>> entries;
};
template <class T> Rooms<T>& rooms() {
    static thread_local Rooms<T> found;
    return found;
}
template <class X> X* room(std::vector<X>& where, std::size_t size) {
    if (where.size() < size) where.resize(size);
    return where.data();
}

}  // namespace

template <class T>
Row<T>::Row(const T* values, std::size_t size, std::size_t best, const Rules& rules, const std::int32_t* ids)
    : values_(values), ids_(ids), size_(size), best_(best), largest_(values[best]),
      // Tokens at minus infinity are impossible under every rule.
      floor_(std::max(static_cast<T>(rules.floor), std::numeric_limits<T>::lowest())), rules_(rules) {}

// From here on the row is what the cut keeps, unless that is more than `limit`.
template <class T> void Row<T>::narrow(const Cut& cut, std::size_t limit) {
    Rooms<T>& own = rooms<T>();
    std::int32_t* indices = room(own.indices, limit + 2 * kGroup);
    const std::size_t found = select(values_, size_, cut.value, limit, indices);
    if (found > limit) return;
    // A row is narrowed twice at most: what is read now may lie in the room of the first time.
    const bool again = is_narrowed_;
    std::int32_t* ids = room(own.ids[again], found);
    T* values = room(own.values[again], found);
    T* powers = powers_ ? room(own.powers[1], found) : nullptr;
    std::size_t count = 0, best = 0;
    for (std::size_t i = 0; i < found; ++i) {
        const auto from = static_cast<std::size_t>(indices[i]);
        if (!cut.keeps(values_[from], indices[i])) continue;
        if (from == best_) best = count;
        ids[count] = static_cast<std::int32_t>(id_of(from));
        values[count] = values_[from];
        if (powers) powers[count] = powers_[from];
        ++count;
    }
    values_ = values;
    ids_ = ids;
    is_narrowed_ = true;
    powers_ = powers;
    size_ = count;
    best_ = best;
}

// Halves a range of values that the cut falls into: `measure` of the values from a bound up reaches `wanted` at the
// range's low end and not at its high one.
template <class T>
template <class Measure>
typename Row<T>::Range Row<T>::bracket(T low, double wanted, int num_steps, const Measure& measure) const {
    Range range{low, std::numeric_limits<T>::infinity(), 0};
    T high = largest_;
    for (int step = 0; step < num_steps; ++step) {
        const T middle = range.low + (high - range.low) / 2;
        if (!(range.low < middle && middle < range.high)) break;
        const double found = measure(middle);
        if (found >= wanted) {
            range.low = middle;
        } else {
            range.high = high = middle;
            range.above = found;
        }
    }
    return range;
}

template <class T>
template <class Weight>
typename Row<T>::Cut Row<T>::cut_in(const Range& range, double wanted, const Weight& weight) const {
    Rooms<T>& own = rooms<T>();
    std::int32_t* indices = room(own.indices, size_ + 2 * kGroup);
    const std::size_t count = select(values_, size_, range.low, size_, indices);
    std::vector<Entry<T>>& entries = own.entries;
    entries.clear();
    bool is_sorted = true;
    for (std::size_t i = 0; i < count; ++i) {
        const std::int32_t index = indices[i];
        if (values_[index] >= range.high) continue;
        is_sorted &= entries.empty() || entries.back().value >= values_[index];
        entries.push_back({values_[index], index, weight(index)});
    }
    const auto before = [](const Entry<T>& a, const Entry<T>& b) {
        return a.value > b.value || (a.value == b.value && a.index < b.index);
    };
    if (!is_sorted) std::sort(entries.begin(), entries.end(), before);
    double reached = range.above;
    for (const Entry<T>& entry : entries) {
        reached += entry.weight;
        if (reached >= wanted) return {entry.value, entry.index};
    }
    return floor_cut();
}

template <class T> void Row<T>::keep_top_k() {
    if (rules_.top_k <= 0 || static_cast<std::uint64_t>(rules_.top_k) >= size_) return;
    const auto count = static_cast<std::size_t>(rules_.top_k);
    const auto one = [](std::int32_t) { return 1.0; };
    const std::size_t num_groups = size_ / kGroup;
    Range range{-std::numeric_limits<T>::infinity(), std::numeric_limits<T>::infinity(), 0};
    if (count * 4 <= num_groups) {
        // As many group maxima reach the bound, so the wanted tokens are among those that do. A group is a column.
        T* maxima = room(rooms<T>().maxima, num_groups);
        std::copy(values_, values_ + num_groups, maxima);
        for (std::size_t row = 1; row < kGroup; ++row) {
            const T* values = values_ + row * num_groups;
            for (std::size_t i = 0; i < num_groups; ++i) maxima[i] = values[i] > maxima[i] ? values[i] : maxima[i];
        }
        std::nth_element(maxima, maxima + (count - 1), maxima + num_groups, std::greater<T>());
        range.low = maxima[count - 1];
    } else {
        constexpr T lowest = std::numeric_limits<T>::lowest();
        T low = largest_;
        for (std::size_t i = 0; i < size_; ++i) low = values_[i] < low && values_[i] >= lowest ? values_[i] : low;
        if (count_from(values_, size_, low) >= count) {
            const auto measure = [&](T bound) { return static_cast<double>(count_from(values_, size_, bound)); };
            range = bracket(low, static_cast<double>(count), kSteps, measure);
        }
    }
    narrow(cut_in(range, static_cast<double>(count), one), size_);
}

// Powers of all values, and the mass that the nucleus reaches.
template <class T> void Row<T>::weigh_all() {
    if (rules_.top_p >= 1) return;
    T* powers = room(rooms<T>().powers[0], size_ + 64);
    bits_ = weight_bits<T>(size_);
    const Weighing<T> by{largest_, static_cast<T>(rules_.inverse_temperature), bits_};
    wanted_ = rules_.top_p * weigh(values_, size_, by, powers);
    powers_ = powers;
    settle_near();
}

// Nearly always few tokens near the top are enough: then the row is only these.
template <class T> void Row<T>::settle_near() {
    const std::size_t limit = size_ / kFewest;
    std::int32_t* indices = room(rooms<T>().indices, limit + 2 * kGroup);
    for (const double reach : kReaches) {
        const auto bound = static_cast<T>(largest_ - reach / rules_.inverse_temperature);
        const std::size_t count = select(values_, size_, bound, limit, indices);
        if (count > limit) return;
        double mass = 0;
        for (std::size_t i = 0; i < count; ++i) mass += weight_of<T>(powers_[indices[i]], bits_);
        if (mass < wanted_) continue;
        floor_ = std::max(floor_, bound);
        return narrow({bound, static_cast<std::int64_t>(size_)}, limit);
    }
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

template <class T> typename Row<T>::Cut Row<T>::top_p_cut() const {
    const auto weight = [&](std::int32_t index) { return weight_of<T>(powers_[index], bits_); };
    const auto measure = [&](T bound) { return mass_from(values_, powers_, size_, bound, bits_); };
    // What weighs nothing (80 temperatures down) is reached last of all.
    const auto far = static_cast<T>(largest_ - 81 / rules_.inverse_temperature);
    const T low = std::max(std::numeric_limits<T>::lowest(), far);
    if (measure(low) < wanted_) return floor_cut();
    return cut_in(bracket(low, wanted_, size_ < 1024 ? 0 : kSteps, measure), wanted_, weight);
}

template <class T> double Row<T>::mass_before(std::size_t index) const {
    // Equals weigh the same, and those before `index` count.
    const T value = values_[index];
    const double from = mass_from(values_, powers_, size_, value, bits_);
    const auto later = static_cast<double>(std::count(values_ + index, values_ + size_, value));
    return from - later * weight_of<T>(powers_[index], bits_);
}

template <class T> std::int64_t Row<T>::sample(const Noise& noise) {
    keep_top_k();
    weigh_all();
    if (floor_ > std::numeric_limits<T>::lowest()) narrow(floor_cut(), size_ / kFewest);
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
// whose word passes the hurdle set by the best so far; its margin covers every rounding.
template <class T> std::size_t Row<T>::race(const Noise& noise, const Cut& cut) const {
    const double slope = rules_.inverse_temperature, most = static_cast<double>(largest_) * slope;
    const bool is_fine = std::abs(most) < kLargestScore;
    const auto noise_of = [](std::uint64_t word) { return gumbel_of<double, std::uint64_t>(word); };
    std::size_t best = best_;
    double reached = most + noise_of(noise.word(static_cast<std::uint64_t>(id_of(best))));
    // In units of a float's last exponent bit; the offset of a noise of 31 bits, and a margin of 0.002.
    Hurdle<T> hurdle{largest_, static_cast<T>(is_fine ? slope * kLog2E * 0x1p23 : 0), 2e9f};
    const auto raise = [&] {
        if (is_fine) hurdle.offset = static_cast<float>(((most - reached) * kLog2E + (127 + 31 + 0.002)) * 0x1p23);
    };
    raise();
    std::uint64_t words_of[kChunk + 3];
    T padded[kChunk];
    std::int32_t hits[kChunk];
    // Short chunks first: the hurdle is low until a few tokens have been seen.
    for (std::size_t begin = 0, chunk = 16; begin < size_; begin += chunk, chunk = std::min(2 * chunk, kChunk)) {
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
