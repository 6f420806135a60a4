// The tokens of all sequences of one suffix tree, with 32-bit positions.
// A sequence lies in segments of growing size. A new segment opens with a copy of the last `overlap`
// tokens, so the text of every suffix the tree knows (at most overlap + 1 tokens) lies in one piece at the
// suffix's *home*: its position in the last segment that holds its first token.
// Each position also carries the links of the list of suffixes that end at the same tree node.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "raw_vector.hpp"
#include "small_map.hpp"

namespace draftsmith {

struct Segment {
    std::uint32_t start;  // first position
    std::uint32_t size;   // positions, a power of two
    std::uint32_t base;   // index in the sequence of the token at `start`
};

class TokenPool {
public:
    explicit TokenPool(std::uint32_t max_depth)
        : overlap_(max_depth - 1), min_bits_(std::bit_width(2 * max_depth - 1)) {}

    std::int32_t token(std::uint32_t position) const { return tokens_[position]; }
    std::uint32_t next(std::uint32_t position) const { return links_[position].next; }
    std::uint32_t previous(std::uint32_t position) const { return links_[position].previous; }
    std::uint32_t& next(std::uint32_t position) { return links_[position].next; }
    std::uint32_t& previous(std::uint32_t position) { return links_[position].previous; }
    std::uint32_t owner(std::uint32_t position) const { return owners_[position >> min_bits_]; }
    void put(std::uint32_t position, std::int32_t token) { tokens_[position] = token; }

    // Append a segment for a sequence of `length` tokens and copy the overlap into it.
    void open_segment(std::vector<Segment>& segments, std::uint32_t length, std::uint32_t owner) {
        // Twice the last one, whose size is a power of two.
        const std::uint32_t doubled = segments.empty() ? min_bits_ : std::bit_width(segments.back().size);
        const std::uint32_t bits = std::min(doubled, min_bits_ + kMaxDoublings);
        const Segment fresh{take(bits, owner), 1u << bits, length - std::min(length, overlap_)};
        if (!segments.empty()) {
            const Segment& last = segments.back();
            for (std::uint32_t i = fresh.base; i < length; ++i) {
                tokens_[fresh.start + (i - fresh.base)] = tokens_[last.start + (i - last.base)];
            }
        }
        segments.push_back(fresh);
    }

    void release(const std::vector<Segment>& segments) {
        for (const Segment& segment : segments) {
            const std::uint32_t bits = std::bit_width(segment.size) - 1;
            if (free_.size() <= bits) free_.resize(bits + 1);
            free_[bits].push_back(segment.start);
        }
    }

    std::size_t bytes() const {
        std::size_t total = tokens_.capacity_bytes() + links_.capacity_bytes();
        total += owners_.capacity() * sizeof(std::uint32_t);
        for (const auto& list : free_) total += list.capacity() * sizeof(std::uint32_t);
        return total;
    }

private:
    static constexpr std::uint32_t kMaxDoublings = 5;
    struct Link {
        std::uint32_t next;
        std::uint32_t previous;
    };

    std::uint32_t take(std::uint32_t bits, std::uint32_t owner) {
        std::uint32_t start;
        const std::uint32_t size = 1u << bits;
        if (bits < free_.size() && !free_[bits].empty()) {
            start = free_[bits].back();
            free_[bits].pop_back();
        } else {
            if (tokens_.size() + size > kNone - 1) throw std::length_error("the suffix index is full (2^32 tokens)");
            start = static_cast<std::uint32_t>(tokens_.size());
            tokens_.resize(start + size);
            links_.resize(start + size);
            owners_.resize(tokens_.size() >> min_bits_);
        }
        for (std::uint32_t at = start; at < start + size; at += 1u << min_bits_) owners_[at >> min_bits_] = owner;
        return start;
    }

    std::uint32_t overlap_;
    std::uint32_t min_bits_;
    RawVector<std::int32_t> tokens_;
    RawVector<Link> links_;
    std::vector<std::uint32_t> owners_;
    std::vector<std::vector<std::uint32_t>> free_;
};

}  // namespace draftsmith
