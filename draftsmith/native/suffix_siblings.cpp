// Nodes and the ordered lists of their children; the rule for equal counts is that of drafters/suffix_tree.py.
#include "suffix_tree.hpp"

namespace draftsmith {

std::uint32_t SuffixTree::new_node(std::uint32_t parent, std::int32_t token, std::uint32_t ref, std::uint32_t count) {
    std::uint32_t node = free_node_;
    if (node != kNone) {
        free_node_ = nodes_[node].next;
        --num_free_;
    } else {
        node = static_cast<std::uint32_t>(nodes_.size());
        nodes_.resize(nodes_.size() + 1);
    }
    nodes_[node] = Node{count, token, ref, 1, 0, parent, kNone, kNone, kNone};
    return node;
}

void SuffixTree::free_node(std::uint32_t node) {
    if (nodes_[node].flags & kWide) {
        fans_[nodes_[node].first] = Fan{};
        free_fans_.push_back(nodes_[node].first);
    }
    nodes_[node].next = free_node_;
    free_node_ = node;
    ++num_free_;
}

std::uint32_t SuffixTree::first_child(std::uint32_t node) const {
    const Node& n = nodes_[node];
    return n.flags & kWide ? fans_[n.first].first : n.first;
}

std::uint32_t SuffixTree::find_child(std::uint32_t node, std::int32_t token) const {
    const Node& n = nodes_[node];
    if (n.flags & kWide) return fans_[n.first].by_token.find(static_cast<std::uint32_t>(token));
    std::uint32_t child = n.first;
    while (child != kNone && nodes_[child].token != token) child = nodes_[child].next;
    return child;
}

void SuffixTree::append_child(std::uint32_t parent, std::uint32_t child) {
    std::uint32_t num_children = 1;
    if (!(nodes_[parent].flags & kWide)) {
        for (std::uint32_t c = nodes_[parent].first; c != kNone; c = nodes_[c].next) ++num_children;
    }
    link_last(nodes_[parent], child);
    if (nodes_[parent].flags & kWide) {
        Fan& fan = fans_[nodes_[parent].first];
        fan.by_token.put(static_cast<std::uint32_t>(nodes_[child].token), child);
        const std::uint32_t before = nodes_[child].previous;
        if (before == kNone || nodes_[before].count != nodes_[child].count) {
            fan.by_count.put(nodes_[child].count, child);
        }
    } else if (num_children > kFanSize) {
        widen(parent);
    }
}

// Let `fresh`, of the same first token and count, take the place of `old`.
void SuffixTree::replace_child(std::uint32_t parent, std::uint32_t old, std::uint32_t fresh) {
    Node& p = nodes_[parent];
    const std::uint32_t before = nodes_[old].previous, after = nodes_[old].next;
    nodes_[fresh].previous = before;
    nodes_[fresh].next = after;
    nodes_[fresh].parent = parent;
    if (before != kNone) nodes_[before].next = fresh;
    else set_first(p, fresh);
    if (after != kNone) nodes_[after].previous = fresh;
    if (p.flags & kWide) {
        Fan& fan = fans_[p.first];
        if (after == kNone) fan.last = fresh;
        fan.by_token.put(static_cast<std::uint32_t>(nodes_[old].token), fresh);
        if (fan.by_count.find(nodes_[old].count) == old) fan.by_count.put(nodes_[old].count, fresh);
    }
}

// Change the first token of the label of `child`.
void SuffixTree::rename_child(std::uint32_t parent, std::uint32_t child, std::int32_t token) {
    if (nodes_[parent].flags & kWide) {
        Fan& fan = fans_[nodes_[parent].first];
        fan.by_token.erase(static_cast<std::uint32_t>(nodes_[child].token));
        fan.by_token.put(static_cast<std::uint32_t>(token), child);
    }
    nodes_[child].token = token;
}

void SuffixTree::detach_child(std::uint32_t parent, std::uint32_t child) {
    Node& p = nodes_[parent];
    leave_group(p, child);
    unlink_sibling(p, child);
    if (p.flags & kWide) {
        Fan& fan = fans_[p.first];
        fan.by_token.erase(static_cast<std::uint32_t>(nodes_[child].token));
        if (fan.by_token.size() <= kFanSize / 2) narrow(parent);
    }
}

// Count one occurrence more: to the front of the next group if the node led its own, else to the end of it.
void SuffixTree::increment(std::uint32_t node) {
    Node& p = nodes_[nodes_[node].parent];
    const std::uint32_t before = nodes_[node].previous;
    if (before == kNone) {
        leave_group(p, node);
    } else if (nodes_[before].count > nodes_[node].count + 1) {
        leave_group(p, node);
    } else {
        const std::uint32_t target = group_head(p, before);
        leave_group(p, node);
        unlink_sibling(p, node);
        link_before(p, node, target);
    }
    const std::uint32_t count = ++nodes_[node].count;
    if (p.flags & kWide) {
        const std::uint32_t previous = nodes_[node].previous;
        if (previous == kNone || nodes_[previous].count != count) fans_[p.first].by_count.put(count, node);
    }
}

// Count one occurrence less: to the front of the next lower group.
void SuffixTree::decrement(std::uint32_t node) {
    Node& p = nodes_[nodes_[node].parent];
    const std::uint32_t count = nodes_[node].count;
    std::uint32_t after = nodes_[node].next;
    const bool moves = after != kNone && nodes_[after].count == count;
    if (moves && (p.flags & kWide)) {
        const std::uint32_t lower = fans_[p.first].by_count.find(count - 1);
        if (lower != kNone) after = lower;
    }
    leave_group(p, node);
    if (moves) {
        while (after != kNone && nodes_[after].count == count) after = nodes_[after].next;
        unlink_sibling(p, node);
        if (after == kNone) link_last(p, node);
        else link_before(p, node, after);
    }
    nodes_[node].count = count - 1;
    if (p.flags & kWide) fans_[p.first].by_count.put(count - 1, node);
}

void SuffixTree::widen(std::uint32_t node) {
    std::uint32_t id;
    if (free_fans_.empty()) {
        id = static_cast<std::uint32_t>(fans_.size());
        fans_.emplace_back();
    } else {
        id = free_fans_.back();
        free_fans_.pop_back();
    }
    Fan& fan = fans_[id];
    fan.first = nodes_[node].first;
    std::uint32_t count = kNone;
    for (std::uint32_t c = fan.first; c != kNone; c = nodes_[c].next) {
        fan.by_token.put(static_cast<std::uint32_t>(nodes_[c].token), c);
        if (nodes_[c].count != count) fan.by_count.put(count = nodes_[c].count, c);
        fan.last = c;
    }
    nodes_[node].first = id;
    nodes_[node].flags |= kWide;
}

void SuffixTree::narrow(std::uint32_t node) {
    const std::uint32_t id = nodes_[node].first;
    nodes_[node].first = fans_[id].first;
    nodes_[node].flags &= static_cast<std::uint16_t>(~kWide);
    fans_[id] = Fan{};
    free_fans_.push_back(id);
}

// First sibling with the same count as `node`.
std::uint32_t SuffixTree::group_head(const Node& parent, std::uint32_t node) const {
    if (parent.flags & kWide) return fans_[parent.first].by_count.find(nodes_[node].count);
    const std::uint32_t count = nodes_[node].count;
    while (nodes_[node].previous != kNone && nodes_[nodes_[node].previous].count == count) node = nodes_[node].previous;
    return node;
}

// Let the next sibling of equal count, if there is one, lead the group that `node` leads.
void SuffixTree::leave_group(Node& parent, std::uint32_t node) {
    if (!(parent.flags & kWide)) return;
    SmallMap& by_count = fans_[parent.first].by_count;
    const std::uint32_t count = nodes_[node].count, after = nodes_[node].next;
    if (by_count.find(count) != node) return;
    if (after != kNone && nodes_[after].count == count) by_count.put(count, after);
    else by_count.erase(count);
}

void SuffixTree::set_first(Node& parent, std::uint32_t node) {
    if (parent.flags & kWide) fans_[parent.first].first = node;
    else parent.first = node;
}

void SuffixTree::unlink_sibling(Node& parent, std::uint32_t node) {
    const std::uint32_t before = nodes_[node].previous, after = nodes_[node].next;
    if (before != kNone) nodes_[before].next = after;
    else set_first(parent, after);
    if (after != kNone) nodes_[after].previous = before;
    else if (parent.flags & kWide) fans_[parent.first].last = before;
}

void SuffixTree::link_before(Node& parent, std::uint32_t node, std::uint32_t other) {
    const std::uint32_t before = nodes_[other].previous;
    nodes_[node].previous = before;
    nodes_[node].next = other;
    nodes_[other].previous = node;
    if (before != kNone) nodes_[before].next = node;
    else set_first(parent, node);
}

void SuffixTree::link_last(Node& parent, std::uint32_t node) {
    std::uint32_t last = kNone;
    if (parent.flags & kWide) {
        last = fans_[parent.first].last;
        fans_[parent.first].last = node;
    } else {
        for (std::uint32_t c = parent.first; c != kNone; c = nodes_[c].next) last = c;
    }
    nodes_[node].previous = last;
    nodes_[node].next = kNone;
    if (last != kNone) nodes_[last].next = node;
    else set_first(parent, node);
}

}  // namespace draftsmith
