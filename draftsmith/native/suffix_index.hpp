// Local trees of the active requests and the global tree of responses; the logic of PythonSuffixIndex in
// drafters/suffix_index.py, whose abstract class documents every method.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "suffix_tree.hpp"

namespace draftsmith {

class SuffixIndex {
public:
    SuffixIndex(std::uint32_t max_depth, std::int64_t max_cached)
        : max_depth_(max_depth), max_cached_(max_cached), global_(max_depth) {}

    // The bool results say whether the request was in the state the call needs.
    bool start_request(std::int64_t request, const std::int32_t* prompt, std::size_t num_tokens);
    bool extend_request(std::int64_t request, const std::int32_t* tokens, std::size_t num_tokens);
    bool speculate(std::int64_t request, const DraftOptions& options, Draft& draft, bool& from_global);
    std::int64_t request_len(std::int64_t request) const;
    void stop_request(std::int64_t request);
    void evict_request(std::int64_t request);

    void cached_sequences(std::vector<std::uint32_t>& lengths, std::vector<std::int32_t>& tokens) const;
    void add_sequence(const std::int32_t* tokens, std::size_t num_tokens);

    std::uint64_t num_tokens() const { return global_.num_tokens(); }
    std::uint64_t num_nodes() const { return global_.num_nodes(); }
    std::size_t num_cached() const { return cached_.size(); }
    std::size_t bytes() const;
    void check() const;

private:
    struct Request {
        std::unique_ptr<SuffixTree> local;
        std::uint32_t sequence = 0;
    };
    struct Cached {
        std::uint32_t sequence;
        std::int64_t request;
        bool has_request;
    };

    std::uint64_t new_cached(std::int64_t request, bool has_request);
    void evict(std::map<std::uint64_t, Cached>::iterator at);

    std::uint32_t max_depth_;
    std::int64_t max_cached_;
    SuffixTree global_;
    std::unordered_map<std::int64_t, Request> active_;
    std::map<std::uint64_t, Cached> cached_;                 // by arrival
    std::unordered_map<std::int64_t, std::uint64_t> arrival_;  // request -> key in cached_
    std::uint64_t next_arrival_ = 0;
    std::vector<std::int32_t> pattern_;
};

}  // namespace draftsmith
