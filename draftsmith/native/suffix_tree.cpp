// Growth and removal of sequences in the suffix tree.
#include "suffix_tree.hpp"

#include <stdexcept>

namespace draftsmith {

SuffixTree::SuffixTree(std::uint32_t max_depth) : max_depth_(max_depth), pool_(max_depth) {
    new_node(kNone, -1, 0, 0);
    nodes_[kTop].length = 0;
}

std::uint32_t SuffixTree::open() {
    std::uint32_t id;
    if (free_sequences_.empty()) {
        id = static_cast<std::uint32_t>(sequences_.size());
        sequences_.emplace_back();
    } else {
        id = free_sequences_.back();
        free_sequences_.pop_back();
    }
    sequences_[id].active.assign(max_depth_, kTop);
    sequences_[id].used = true;
    return id;
}

void SuffixTree::close(std::uint32_t sequence) { std::vector<std::uint32_t>().swap(sequences_[sequence].active); }

void SuffixTree::append(std::uint32_t sequence, std::int32_t token) {
    Sequence& s = sequences_[sequence];
    const std::uint32_t index = s.length;
    if (s.segments.empty() || index - s.segments.back().base == s.segments.back().size) move_to_new_segment(sequence);
    const Segment& home = s.segments.back();
    const std::uint32_t end = home.start + (index - home.base);
    pool_.put(end, token);
    ++s.length;
    ++num_tokens_;
    ++nodes_[kTop].count;
    s.active[index % max_depth_] = kTop;
    const std::uint32_t num_active = std::min(index + 1, max_depth_);
    std::uint32_t slot = (index + 1 - num_active) % max_depth_;
    for (std::uint32_t suffix = end + 1 - num_active; suffix <= end; ++suffix) {
        s.active[slot] = step(s.active[slot], suffix, end, token);
        if (++slot == max_depth_) slot = 0;
    }
}

// Open a segment and give the suffixes that still grow their home there.
void SuffixTree::move_to_new_segment(std::uint32_t sequence) {
    Sequence& s = sequences_[sequence];
    const bool is_first = s.segments.empty();
    const Segment old = is_first ? Segment{0, 0, 0} : s.segments.back();
    pool_.open_segment(s.segments, s.length, sequence);
    if (is_first) return;
    const Segment& fresh = s.segments.back();
    for (std::uint32_t index = fresh.base; index < s.length; ++index) {
        const std::uint32_t from = old.start + (index - old.base), to = fresh.start + (index - fresh.base);
        const std::uint32_t next = pool_.next(from), previous = pool_.previous(from);
        pool_.next(to) = next;
        pool_.previous(to) = previous;
        if (next != kNone) pool_.previous(next) = to;
        if (previous != kNone) {
            pool_.next(previous) = to;
        } else {
            nodes_[s.active[index % max_depth_]].ref += to - from;  // unsigned, wraps as it should
        }
    }
}

// Move the suffix that ends at `node` by the token at position `end`; the node where it ends now.
std::uint32_t SuffixTree::step(std::uint32_t node, std::uint32_t suffix, std::uint32_t end, std::int32_t token) {
    std::uint32_t child = find_child(node, token);
    if (child == kNone) {
        Node& n = nodes_[node];
        if (n.count == 1 && node != kTop) {
            ++n.length;  // only this suffix comes here, and the label already refers to its text
            return node;
        }
        child = new_node(node, token, end, 1);
        append_child(node, child);
    } else if (nodes_[node].count == nodes_[child].count + 1 && node != kTop) {
        return slide(node, child, suffix, end);
    } else {
        if (nodes_[child].length > 1) child = split(node, child, end);
        increment(child);
    }
    if (node != kTop) unlink_end(node, suffix, end - suffix);
    link_end(child, suffix, end + 1 - suffix);
    return child;
}

// All other suffixes that come to `node` go on to `child`: no branch arises, the boundary moves.
std::uint32_t SuffixTree::slide(std::uint32_t node, std::uint32_t child, std::uint32_t suffix, std::uint32_t end) {
    Node& n = nodes_[node];
    Node& c = nodes_[child];
    if (c.length > 1) {
        ++n.length;
        ++c.ref;
        --c.length;
        rename_child(node, child, pool_.token(c.ref));
        return node;
    }
    c.length = static_cast<std::uint16_t>(n.length + 1);
    c.ref -= n.length;
    c.token = n.token;
    ++c.count;
    replace_child(n.parent, node, child);
    free_node(node);
    link_end(child, suffix, end + 1 - suffix);
    return child;
}

// Cut the first token off the label of `child` into a node of its own, which is returned.
std::uint32_t SuffixTree::split(std::uint32_t node, std::uint32_t child, std::uint32_t end) {
    const std::uint32_t upper = new_node(node, nodes_[child].token, end, nodes_[child].count);
    replace_child(node, child, upper);
    Node& c = nodes_[child];
    c.parent = upper;
    c.previous = c.next = kNone;
    ++c.ref;
    --c.length;
    c.token = pool_.token(c.ref);
    nodes_[upper].first = child;
    return upper;
}

void SuffixTree::link_end(std::uint32_t node, std::uint32_t suffix, std::uint32_t depth) {
    Node& n = nodes_[node];
    const std::uint32_t parent_depth = depth - n.length;
    std::uint32_t head = kNone;
    if (n.flags & kHasEnds) {
        head = n.ref - parent_depth;
        pool_.previous(head) = suffix;
    }
    pool_.next(suffix) = head;
    pool_.previous(suffix) = kNone;
    n.flags |= kHasEnds;
    n.ref = suffix + parent_depth;
}

void SuffixTree::unlink_end(std::uint32_t node, std::uint32_t suffix, std::uint32_t depth) {
    const std::uint32_t next = pool_.next(suffix), previous = pool_.previous(suffix);
    if (next != kNone) pool_.previous(next) = previous;
    if (previous != kNone) {
        pool_.next(previous) = next;
        return;
    }
    Node& n = nodes_[node];
    if (next != kNone) n.ref = next + (depth - n.length);
    else n.flags &= static_cast<std::uint16_t>(~kHasEnds);  // the label still refers to this suffix's text
}

void SuffixTree::remove(std::uint32_t sequence) {
    Sequence& s = sequences_[sequence];
    each_suffix(s, [&](std::uint32_t index, std::uint32_t home) {
        remove_suffix(sequence, home, std::min(s.length - index, max_depth_));
    });
    num_tokens_ -= s.length;
    pool_.release(s.segments);
    s = Sequence{};
    free_sequences_.push_back(sequence);
}

void SuffixTree::remove_suffix(std::uint32_t sequence, std::uint32_t suffix, std::uint32_t num_tokens) {
    std::uint32_t node = kTop, depth = 0;
    bool ends_here = true;
    path_.clear();
    --nodes_[kTop].count;
    while (depth < num_tokens) {
        const std::uint32_t child = find_child(node, pool_.token(suffix + depth));
        if (nodes_[child].count == 1) {
            detach_child(node, child);
            free_node(child);
            ends_here = false;
            break;
        }
        decrement(child);
        depth += nodes_[child].length;
        node = child;
        path_.push_back(child);
    }
    if (node == kTop) return;
    if (ends_here) unlink_end(node, suffix, depth);
    merge_with_only_child(path_);
    repoint(path_, sequence);
}

// A node through which everything goes on to one child is that child.
void SuffixTree::merge_with_only_child(std::vector<std::uint32_t>& path) {
    const std::uint32_t node = path.back(), child = first_child(node);
    if (child == kNone || nodes_[child].count != nodes_[node].count) return;
    Node& n = nodes_[node];
    Node& c = nodes_[child];
    c.ref -= n.length;
    c.length = static_cast<std::uint16_t>(c.length + n.length);
    c.token = n.token;
    replace_child(n.parent, node, child);
    free_node(node);
    path.back() = child;
}

// Let labels on `path` that read a sequence being removed read another text with the same tokens.
void SuffixTree::repoint(const std::vector<std::uint32_t>& path, std::uint32_t gone) {
    bool any = false;
    for (const std::uint32_t node : path) {
        any |= !(nodes_[node].flags & kHasEnds) && pool_.owner(nodes_[node].ref) == gone;
    }
    if (!any) return;
    // Every label below a node is an occurrence of the whole path to it; a leaf's is that of a living suffix.
    std::uint32_t leaf = path.back();
    std::uint32_t distance = nodes_[leaf].length;
    for (std::uint32_t c = first_child(leaf); c != kNone; c = first_child(leaf)) {
        leaf = c;
        distance += nodes_[leaf].length;
    }
    if (pool_.owner(nodes_[leaf].ref) == gone) return;  // a later suffix of that sequence comes by here again
    std::uint32_t at = nodes_[leaf].ref + nodes_[leaf].length - distance;
    for (std::size_t i = path.size(); i-- > 0;) {
        Node& n = nodes_[path[i]];
        if (!(n.flags & kHasEnds) && pool_.owner(n.ref) == gone) n.ref = at;
        if (i > 0) at -= nodes_[path[i - 1]].length;
    }
}

void SuffixTree::tail(std::uint32_t sequence, std::vector<std::int32_t>& out) const {
    const Sequence& s = sequences_[sequence];
    out.clear();
    if (s.segments.empty()) return;
    const Segment& last = s.segments.back();
    const std::uint32_t wanted = std::min(s.length, max_depth_);
    // A fresh segment opens with max_depth - 1 tokens and is opened only to take another one.
    const std::uint32_t end = last.start + (s.length - last.base);
    for (std::uint32_t at = end - wanted; at < end; ++at) out.push_back(pool_.token(at));
}

void SuffixTree::copy_tokens(std::uint32_t sequence, std::vector<std::int32_t>& out) const {
    const Sequence& s = sequences_[sequence];
    each_suffix(s, [&](std::uint32_t, std::uint32_t home) { out.push_back(pool_.token(home)); });
}

std::size_t SuffixTree::bytes() const {
    std::size_t total = sizeof(*this) + nodes_.capacity_bytes() + pool_.bytes();
    total += fans_.capacity() * sizeof(Fan) + sequences_.capacity() * sizeof(Sequence);
    total += (free_fans_.capacity() + free_sequences_.capacity()) * sizeof(std::uint32_t);
    for (const Fan& fan : fans_) total += fan.by_token.bytes() + fan.by_count.bytes();
    for (const Sequence& s : sequences_) {
        total += s.segments.capacity() * sizeof(Segment) + s.active.capacity() * sizeof(std::uint32_t);
    }
    return total;
}

}  // namespace draftsmith
