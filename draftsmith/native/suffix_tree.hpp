// Suffix tree over many growing sequences: every substring of at most max_depth tokens with its count.
// Called by SuffixIndex; behaves exactly like drafters/suffix_tree.py, whose docstring states the order of
// equal counts. Source: SuffixDecoding (arXiv 2411.04975), section 3.
//
// A node is 32 bytes. Its label is pool[ref, ref + length). The suffixes that end at a node form a linked
// list through the pool's links; the list has no head pointer: while it is not empty, `ref` is kept equal to
// (first suffix of the list) + (depth of the parent). Siblings form a list in non-increasing count; a node
// with more than kFanSize children has a Fan, an index of that list by token and by count.
#pragma once

#include <cstdint>
#include <vector>

#include "raw_vector.hpp"
#include "small_map.hpp"
#include "token_pool.hpp"

namespace draftsmith {

// Where a match ends: a node and how many tokens of its label are read.
struct Place {
    std::uint32_t node;
    std::uint32_t used;
};

struct DraftOptions {
    std::uint32_t max_tokens;
    double factor;
    double offset;
    double min_prob;
    bool tree;
};

struct Draft {
    std::vector<std::int32_t> tokens;
    std::vector<std::int32_t> parents;  // -1: the match point
    std::vector<double> probs;
    double score = 0.0;
    std::uint32_t match_len = 0;

    void clear() {
        tokens.clear();
        parents.clear();
        probs.clear();
    }
    void add(std::int32_t token, std::int32_t parent, double prob) {
        tokens.push_back(token);
        parents.push_back(parent);
        probs.push_back(prob);
    }
};

class SuffixTree {
public:
    explicit SuffixTree(std::uint32_t max_depth);

    std::uint32_t open();  // a new empty sequence
    void append(std::uint32_t sequence, std::int32_t token);
    void close(std::uint32_t sequence);  // it will not grow any more
    void remove(std::uint32_t sequence);

    // Improve `best` with what follows the last tokens of `pattern` (at most max_depth tokens are looked at).
    // `sequence`: an open sequence of this tree whose text ends with the last tokens of the pattern, or kNone.
    // A better score wins; within this tree an equal score of a longer match wins too. True when it changed.
    bool speculate(const std::vector<std::int32_t>& pattern, std::uint32_t sequence, const DraftOptions& options,
                   Draft& best);

    std::uint32_t length(std::uint32_t sequence) const { return sequences_[sequence].length; }
    // The last tokens of a sequence, at most max_depth.
    void tail(std::uint32_t sequence, std::vector<std::int32_t>& out) const;
    void copy_tokens(std::uint32_t sequence, std::vector<std::int32_t>& out) const;
    std::uint64_t num_tokens() const { return num_tokens_; }
    std::uint64_t num_nodes() const { return nodes_.size() - num_free_; }
    std::size_t bytes() const;
    // Check every invariant by brute force (tests); throws std::logic_error that names the broken one.
    void check() const;

private:
    static constexpr std::uint32_t kTop = 0;
    static constexpr std::uint32_t kFanSize = 6;
    static constexpr std::uint16_t kHasEnds = 1;
    static constexpr std::uint16_t kWide = 2;

    struct Node {
        std::uint32_t count;
        std::int32_t token;  // first token of the label
        std::uint32_t ref;
        std::uint16_t length;
        std::uint16_t flags;
        std::uint32_t parent;
        std::uint32_t first;     // first child, or the fan of a wide node
        std::uint32_t next;      // sibling of lower or equal count
        std::uint32_t previous;  // sibling of higher or equal count
    };
    static_assert(sizeof(Node) == 32);

    struct Fan {
        std::uint32_t first = kNone;
        std::uint32_t last = kNone;
        SmallMap by_token;
        SmallMap by_count;  // count -> first child of that count
    };

    struct Sequence {
        std::vector<Segment> segments;
        std::vector<std::uint32_t> active;  // node where suffix i ends, at i % max_depth; empty once closed
        std::uint32_t length = 0;
        bool used = false;
    };

    // Nodes
    std::uint32_t new_node(std::uint32_t parent, std::int32_t token, std::uint32_t ref, std::uint32_t count);
    void free_node(std::uint32_t node);

    // Children in order (suffix_siblings.cpp)
    std::uint32_t first_child(std::uint32_t node) const;
    std::uint32_t find_child(std::uint32_t node, std::int32_t token) const;
    void append_child(std::uint32_t parent, std::uint32_t child);
    void replace_child(std::uint32_t parent, std::uint32_t old, std::uint32_t fresh);
    void rename_child(std::uint32_t parent, std::uint32_t child, std::int32_t token);
    void detach_child(std::uint32_t parent, std::uint32_t child);
    void increment(std::uint32_t node);
    void decrement(std::uint32_t node);
    void widen(std::uint32_t node);
    void narrow(std::uint32_t node);
    std::uint32_t group_head(const Node& parent, std::uint32_t node) const;
    void unlink_sibling(Node& parent, std::uint32_t node);
    void link_before(Node& parent, std::uint32_t node, std::uint32_t other);
    void link_last(Node& parent, std::uint32_t node);
    void leave_group(Node& parent, std::uint32_t node);
    void set_first(Node& parent, std::uint32_t node);

    // Call `visit(index, home)` for every suffix of a sequence, first to last.
    template <typename F>
    static void each_suffix(const Sequence& s, F&& visit) {
        for (std::size_t k = 0; k < s.segments.size(); ++k) {
            const Segment& segment = s.segments[k];
            const std::uint32_t stop = k + 1 < s.segments.size() ? s.segments[k + 1].base : s.length;
            for (std::uint32_t index = segment.base; index < stop; ++index) {
                visit(index, segment.start + (index - segment.base));
            }
        }
    }

    // Growth and removal (suffix_tree.cpp)
    void move_to_new_segment(std::uint32_t sequence);
    std::uint32_t step(std::uint32_t node, std::uint32_t suffix, std::uint32_t end, std::int32_t token);
    std::uint32_t slide(std::uint32_t node, std::uint32_t child, std::uint32_t suffix, std::uint32_t end);
    std::uint32_t split(std::uint32_t node, std::uint32_t child, std::uint32_t end);
    void link_end(std::uint32_t node, std::uint32_t suffix, std::uint32_t depth);
    void unlink_end(std::uint32_t node, std::uint32_t suffix, std::uint32_t depth);
    void remove_suffix(std::uint32_t sequence, std::uint32_t suffix, std::uint32_t num_tokens);
    void merge_with_only_child(std::vector<std::uint32_t>& path);
    void repoint(const std::vector<std::uint32_t>& path, std::uint32_t gone);

    // Drafting (suffix_draft.cpp)
    struct HeapItem {
        std::uint32_t count;
        std::uint32_t arrival;
        Place place;
        std::int32_t parent;
    };
    void match(const std::vector<std::int32_t>& pattern, std::uint32_t sequence, std::uint32_t limit);
    bool locate(const std::int32_t* tokens, std::uint32_t num_tokens, Place& place) const;
    double score_path(Place place, std::uint32_t budget, double min_prob) const;
    void draft_path(Place place, std::uint32_t budget, double min_prob, Draft& draft) const;
    void draft_tree(Place place, std::uint32_t budget, double min_prob, Draft& draft);
    bool consider(std::uint32_t match_len, const DraftOptions& options, std::uint32_t bound, bool own, Draft& best);

    std::uint32_t max_depth_;
    TokenPool pool_;
    RawVector<Node> nodes_;
    std::uint32_t free_node_ = kNone;
    std::uint64_t num_free_ = 0;
    std::vector<Fan> fans_;
    std::vector<std::uint32_t> free_fans_;
    std::vector<Sequence> sequences_;
    std::vector<std::uint32_t> free_sequences_;
    std::uint64_t num_tokens_ = 0;
    // Scratch memory of one call, kept between calls.
    std::vector<Place> places_;
    std::vector<HeapItem> heap_;
    Draft trial_;
    std::vector<std::uint32_t> path_;
};

}  // namespace draftsmith
