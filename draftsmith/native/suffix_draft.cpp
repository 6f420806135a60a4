// Matching and drafting. The estimate D of a token is its count over that of the match (the product of the
// ratios along the path); a draft's score is the sum of its estimates.
//
// Where the text's own sequence is in the tree, its growing suffixes are the matches, and nothing is searched.
// A match of m tokens can score at most its budget (and on a path at most max_depth - m, where the tree ends),
// so matches are tried from the highest bound on and those that cannot win are skipped.
#include <algorithm>

#include "suffix_tree.hpp"

namespace draftsmith {

namespace {

std::uint32_t budget(std::uint32_t match_len, const DraftOptions& options) {
    const double limit = match_len * options.factor + options.offset + 1e-6;
    if (!(limit >= 1.0)) return 0;  // also for NaN
    return limit >= options.max_tokens ? options.max_tokens : static_cast<std::uint32_t>(limit);
}

// Whole numbers up to the one division, so equal estimates and equal scores compare as equal.
double estimate(std::uint64_t count, std::uint32_t matched) { return static_cast<double>(count) / matched; }

}  // namespace

bool SuffixTree::speculate(const std::vector<std::int32_t>& pattern, std::uint32_t sequence,
                           const DraftOptions& options, Draft& best) {
    const std::uint32_t longest = static_cast<std::uint32_t>(std::min<std::size_t>(pattern.size(), max_depth_));
    if (longest < 2 || nodes_[kTop].count == 0 || budget(longest - 1, options) <= best.score) return false;
    match(pattern, sequence, longest - 1);
    std::uint32_t num_matches = static_cast<std::uint32_t>(places_.size());
    // A match that only the text itself makes has nothing below it.
    const auto is_alone = [&](Place place) {
        return nodes_[place.node].count == 1 && place.used == nodes_[place.node].length;
    };
    while (num_matches > 0 && is_alone(places_[num_matches - 1])) --num_matches;
    const auto bound = [&](std::uint32_t m) {
        return options.tree ? budget(m, options) : std::min(budget(m, options), max_depth_ - m);
    };
    std::uint32_t peak = num_matches;
    while (peak > 1 && bound(peak - 1) > bound(peak)) --peak;
    bool own = false;
    for (std::uint32_t m = peak; m >= 1 && bound(m) > best.score; --m) {
        own |= consider(m, options, bound(m), own, best);
    }
    for (std::uint32_t m = peak + 1; m <= num_matches && bound(m) >= best.score; ++m) {
        own |= consider(m, options, bound(m), own, best);
    }
    if (own && !options.tree) draft_path(places_[best.match_len - 1], bound(best.match_len), options.min_prob, best);
    return own;
}

// Let the match of `match_len` tokens replace `best` if it scores more, or as much and is longer.
bool SuffixTree::consider(std::uint32_t match_len, const DraftOptions& options, std::uint32_t bound, bool own,
                          Draft& best) {
    double score;
    if (options.tree) {
        draft_tree(places_[match_len - 1], bound, options.min_prob, trial_);
        score = trial_.score;
    } else {
        score = score_path(places_[match_len - 1], bound, options.min_prob);
    }
    if (!(score > best.score || (own && score == best.score && match_len > best.match_len))) return false;
    if (options.tree) std::swap(best, trial_);
    best.score = score;
    best.match_len = match_len;
    return true;
}

// Fill `places_` with the ends of the last 1, 2, ... tokens of `pattern`, up to `limit` or the first that is nowhere.
void SuffixTree::match(const std::vector<std::int32_t>& pattern, std::uint32_t sequence, std::uint32_t limit) {
    places_.clear();
    if (sequence != kNone && !sequences_[sequence].active.empty()) {
        const Sequence& s = sequences_[sequence];
        const std::uint32_t num_active = std::min({limit, s.length, max_depth_});
        for (std::uint32_t m = 1; m <= num_active; ++m) {
            const std::uint32_t node = s.active[(s.length - m) % max_depth_];
            places_.push_back({node, nodes_[node].length});
        }
    }
    Place place;
    for (std::uint32_t m = static_cast<std::uint32_t>(places_.size()) + 1; m <= limit; ++m) {
        if (!locate(pattern.data() + pattern.size() - m, m, place)) return;
        places_.push_back(place);
    }
}

bool SuffixTree::locate(const std::int32_t* tokens, std::uint32_t num_tokens, Place& place) const {
    std::uint32_t node = kTop, read = 0;
    for (;;) {
        node = find_child(node, tokens[read]);
        if (node == kNone) return false;
        const Node& n = nodes_[node];
        const std::uint32_t length = std::min<std::uint32_t>(n.length, num_tokens - read);
        for (std::uint32_t i = 1; i < length; ++i) {
            if (pool_.token(n.ref + i) != tokens[read + i]) return false;
        }
        read += length;
        if (read == num_tokens) {
            place = {node, length};
            return true;
        }
    }
}

double SuffixTree::score_path(Place place, std::uint32_t budget, double min_prob) const {
    const std::uint32_t matched = nodes_[place.node].count;
    std::uint64_t sum = 0;
    std::uint32_t left = budget, node = place.node;
    std::uint32_t label = nodes_[node].length - place.used;
    while (estimate(nodes_[node].count, matched) >= min_prob) {
        const std::uint32_t taken = std::min(label, left);
        sum += std::uint64_t{taken} * nodes_[node].count;
        left -= taken;
        if (left == 0) break;
        node = first_child(node);
        if (node == kNone) break;
        label = nodes_[node].length;
    }
    return estimate(sum, matched);
}

void SuffixTree::draft_path(Place place, std::uint32_t budget, double min_prob, Draft& draft) const {
    draft.clear();
    const std::uint32_t matched = nodes_[place.node].count;
    std::uint64_t sum = 0;
    std::uint32_t node = place.node, used = place.used;
    for (;;) {
        const Node& n = nodes_[node];
        const double prob = estimate(n.count, matched);
        if (prob < min_prob) break;
        for (; used < n.length && draft.tokens.size() < budget; ++used) {
            draft.add(pool_.token(n.ref + used), static_cast<std::int32_t>(draft.tokens.size()) - 1, prob);
            sum += n.count;
        }
        if (draft.tokens.size() == budget) break;
        node = first_child(node);
        if (node == kNone) break;
        used = 0;
    }
    draft.score = estimate(sum, matched);
}

// The likeliest `budget` nodes below the match; equal estimates in order of arrival.
void SuffixTree::draft_tree(Place place, std::uint32_t budget, double min_prob, Draft& draft) {
    draft.clear();
    const std::uint32_t matched = nodes_[place.node].count;
    const auto later = [](const HeapItem& a, const HeapItem& b) {
        return a.count < b.count || (a.count == b.count && a.arrival > b.arrival);
    };
    std::uint32_t arrivals = 0;
    const auto push = [&](std::uint32_t count, Place where, std::int32_t parent) {
        heap_.push_back({count, arrivals++, where, parent});
        std::push_heap(heap_.begin(), heap_.end(), later);
    };
    std::uint64_t sum = 0;
    heap_.clear();
    if (min_prob <= 1.0) push(matched, place, -1);
    while (!heap_.empty() && draft.tokens.size() < budget) {
        std::pop_heap(heap_.begin(), heap_.end(), later);
        const HeapItem item = heap_.back();
        heap_.pop_back();
        const Node& n = nodes_[item.place.node];
        if (item.place.used < n.length) {
            draft.add(pool_.token(n.ref + item.place.used), item.parent, estimate(n.count, matched));
            sum += n.count;
            const auto drafted = static_cast<std::int32_t>(draft.tokens.size()) - 1;
            push(n.count, {item.place.node, item.place.used + 1}, drafted);
            continue;
        }
        // More than `budget` children cannot all be drafted, and the first ones are the likeliest.
        std::uint32_t num_pushed = 0;
        for (std::uint32_t c = first_child(item.place.node); c != kNone && num_pushed < budget; c = nodes_[c].next) {
            if (estimate(nodes_[c].count, matched) < min_prob) break;
            push(nodes_[c].count, {c, 0}, item.parent);
            ++num_pushed;
        }
    }
    draft.score = estimate(sum, matched);
}

}  // namespace draftsmith
