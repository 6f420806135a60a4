// Brute-force check of every invariant of the suffix tree; used by the tests and by `make sanitize`.
#include <stdexcept>
#include <string>

#include "suffix_tree.hpp"

namespace draftsmith {

namespace {

void require(bool holds, const char* what) {
    if (!holds) throw std::logic_error(std::string("suffix tree: ") + what);
}

}  // namespace

void SuffixTree::check() const {
    std::vector<std::uint32_t> visits(nodes_.size(), 0), ends(nodes_.size(), 0), depths(nodes_.size(), 0);
    std::uint64_t tokens = 0;
    // Every suffix of every sequence is a path whose last node lists it.
    for (const Sequence& s : sequences_) {
        tokens += s.length;
        each_suffix(s, [&](std::uint32_t index, std::uint32_t suffix) {
            const std::uint32_t full = std::min(s.length - index, max_depth_);
            std::uint32_t node = kTop, depth = 0;
            ++visits[kTop];
            while (depth < full) {
                node = find_child(node, pool_.token(suffix + depth));
                require(node != kNone, "a suffix is missing");
                ++visits[node];
                const Node& n = nodes_[node];
                require(depth + n.length <= full, "a suffix ends inside a label");
                require(depths[node] == 0 || depths[node] == depth + n.length, "a node has two depths");
                depths[node] = depth + n.length;
                for (std::uint32_t i = 0; i < n.length; ++i) {
                    require(pool_.token(n.ref + i) == pool_.token(suffix + depth + i), "a label has other tokens");
                }
                depth += n.length;
            }
            ++ends[node];
            require(nodes_[node].flags & kHasEnds, "a suffix ends at a node that lists none");
            std::uint32_t at = nodes_[node].ref - (depth - nodes_[node].length), before = kNone;
            while (at != suffix) {
                require(pool_.previous(at) == before, "a list of suffixes is broken");
                before = at;
                at = pool_.next(at);
                require(at != kNone, "a suffix is not in the list of its node");
            }
            if (!s.active.empty() && index + max_depth_ >= s.length) {
                require(s.active[index % max_depth_] == node, "a growing suffix is elsewhere");
            }
        });
    }
    require(tokens == num_tokens_, "the number of tokens is wrong");
    std::uint64_t reached = 0;
    std::vector<std::uint32_t> waiting{kTop};
    while (!waiting.empty()) {
        const std::uint32_t node = waiting.back();
        waiting.pop_back();
        ++reached;
        const Node& n = nodes_[node];
        require(n.count == visits[node], "a count is wrong");
        std::uint32_t listed = 0;
        if (n.flags & kHasEnds) {
            for (std::uint32_t at = n.ref - (depths[node] - n.length); at != kNone; at = pool_.next(at)) ++listed;
        }
        require(listed == ends[node], "a node lists suffixes that do not end there");
        require(node == kTop || sequences_[pool_.owner(n.ref)].used, "a label refers to a removed sequence");
        std::uint32_t before = kNone, num_children = 0, below = 0;
        for (std::uint32_t c = first_child(node); c != kNone; before = c, c = nodes_[c].next) {
            const Node& child = nodes_[c];
            ++num_children;
            below += child.count;
            require(child.parent == node && child.previous == before, "a sibling list is broken");
            require(before == kNone || nodes_[before].count >= child.count, "siblings are out of order");
            require(child.token == pool_.token(child.ref), "a first token is wrong");
            require(find_child(node, child.token) == c, "a child cannot be found");
            require(node == kTop || child.count < n.count, "a node should have been merged");
            if (n.flags & kWide) {
                const bool leads = before == kNone || nodes_[before].count != child.count;
                require(!leads || fans_[n.first].by_count.find(child.count) == c, "a group's head is wrong");
            }
            waiting.push_back(c);
        }
        require(below + ends[node] == n.count, "counts do not add up");
        require(!(n.flags & kWide) || (fans_[n.first].by_token.size() == num_children && fans_[n.first].last == before),
                "a fan does not fit its list");
    }
    require(reached == num_nodes(), "nodes are lost");
}

}  // namespace draftsmith
