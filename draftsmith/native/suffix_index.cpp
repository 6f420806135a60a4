// Requests, eviction and the choice between the local and the global draft.
#include "suffix_index.hpp"

namespace draftsmith {

bool SuffixIndex::start_request(std::int64_t request, const std::int32_t* prompt, std::size_t num_tokens) {
    if (active_.contains(request)) return false;
    Request fresh{std::make_unique<SuffixTree>(max_depth_), 0};
    fresh.sequence = fresh.local->open();
    for (std::size_t i = 0; i < num_tokens; ++i) fresh.local->append(fresh.sequence, prompt[i]);
    active_.emplace(request, std::move(fresh));
    if (max_cached_ != 0) {
        evict_request(request);
        arrival_[request] = new_cached(request, true);
    }
    return true;
}

std::uint64_t SuffixIndex::new_cached(std::int64_t request, bool has_request) {
    const std::uint64_t key = next_arrival_++;
    cached_.emplace(key, Cached{global_.open(), request, has_request});
    while (max_cached_ > 0 && cached_.size() > static_cast<std::size_t>(max_cached_)) evict(cached_.begin());
    return key;
}

void SuffixIndex::evict(std::map<std::uint64_t, Cached>::iterator at) {
    if (at->second.has_request) arrival_.erase(at->second.request);
    global_.remove(at->second.sequence);
    cached_.erase(at);
}

bool SuffixIndex::extend_request(std::int64_t request, const std::int32_t* tokens, std::size_t num_tokens) {
    const auto found = active_.find(request);
    if (found == active_.end()) return false;
    Request& r = found->second;
    for (std::size_t i = 0; i < num_tokens; ++i) r.local->append(r.sequence, tokens[i]);
    const auto key = arrival_.find(request);
    if (key != arrival_.end()) {
        const std::uint32_t sequence = cached_.at(key->second).sequence;
        for (std::size_t i = 0; i < num_tokens; ++i) global_.append(sequence, tokens[i]);
    }
    return true;
}

bool SuffixIndex::speculate(std::int64_t request, const DraftOptions& options, Draft& draft, bool& from_global) {
    const auto found = active_.find(request);
    if (found == active_.end()) return false;
    Request& r = found->second;
    r.local->tail(r.sequence, pattern_);
    r.local->speculate(pattern_, r.sequence, options, draft);
    const auto key = arrival_.find(request);
    const std::uint32_t own = key == arrival_.end() ? kNone : cached_.at(key->second).sequence;
    from_global = global_.speculate(pattern_, own, options, draft);
    return true;
}

std::int64_t SuffixIndex::request_len(std::int64_t request) const {
    const auto found = active_.find(request);
    if (found == active_.end()) return -1;
    return found->second.local->length(found->second.sequence);
}

void SuffixIndex::stop_request(std::int64_t request) {
    if (active_.erase(request) == 0) return;
    const auto key = arrival_.find(request);
    if (key != arrival_.end()) global_.close(cached_.at(key->second).sequence);
}

void SuffixIndex::evict_request(std::int64_t request) {
    const auto key = arrival_.find(request);
    if (key != arrival_.end()) evict(cached_.find(key->second));
}

void SuffixIndex::cached_sequences(std::vector<std::uint32_t>& lengths, std::vector<std::int32_t>& tokens) const {
    for (const auto& [key, cached] : cached_) {
        lengths.push_back(global_.length(cached.sequence));
        global_.copy_tokens(cached.sequence, tokens);
    }
}

void SuffixIndex::add_sequence(const std::int32_t* tokens, std::size_t num_tokens) {
    const std::uint32_t sequence = cached_.at(new_cached(0, false)).sequence;
    for (std::size_t i = 0; i < num_tokens; ++i) global_.append(sequence, tokens[i]);
    global_.close(sequence);
}

std::size_t SuffixIndex::bytes() const {
    std::size_t total = global_.bytes() + cached_.size() * 80 + arrival_.size() * 32 + active_.size() * 48;
    for (const auto& [id, request] : active_) total += request.local->bytes();
    return total;
}

void SuffixIndex::check() const {
    global_.check();
    for (const auto& [id, request] : active_) request.local->check();
}

}  // namespace draftsmith
