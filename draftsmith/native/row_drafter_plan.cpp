// The plan of a row drafter's call before its threads start: what was asked is checked and cut into passes.
// Invariant: whatever may fail (a wrong argument, no memory) fails before a count changes; pointers into a sequence's
// memory are taken after it has grown for the whole call.
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>

#include "row_drafter.hpp"

namespace draftsmith {
namespace {

constexpr int FILL_ROWS = 128;  // true rows worked out together
constexpr std::int64_t MOST_ROWS = std::int64_t{1} << 28;

}  // namespace

// ---- checks -------------------------------------------------------------------------------------

// A process forked while another thread was in a call finds nobody in it.
void RowDrafter::check_idle() const {
    if (running_in_ != 0 && running_in_ == getpid()) throw std::logic_error("the drafter is in another call");
}

void RowDrafter::check_token(std::int32_t token) const {
    if (token >= 0 && token < num_tokens()) return;
    throw std::invalid_argument("token " + std::to_string(token) + " is outside the vocabulary of " +
                                std::to_string(num_tokens()));
}

void RowDrafter::check_positions(std::int64_t positions) const {
    if (positions > num_positions_) throw std::invalid_argument("a position has no rotation");
}

void RowDrafter::check_groups(const std::vector<TrueRows>& groups, const std::vector<int>& depths,
                              bool has_outputs) const {
    std::set<std::int64_t> seen;
    std::int64_t total = 0;
    for (std::size_t i = 0; i < groups.size(); ++i) {
        const TrueRows& rows = groups[i];
        if (!seen.insert(rows.sequence).second) throw std::invalid_argument("a sequence is named twice");
        const int depth = depths.empty() ? 1 : depths[i];
        if (depth < 1 || depth > MOST_ROWS) throw std::invalid_argument("a chain of fewer than 1 token");
        const std::int64_t held = num_rows(rows.sequence) + static_cast<std::int64_t>(rows.tokens.size());
        if (has_outputs && rows.tokens.empty() && !knows_last(rows.sequence)) {
            throw std::invalid_argument("a sequence whose last row has to be given (again)");
        }
        check_positions(held + depth - 1);
        for (const std::int32_t token : rows.tokens) check_token(token);
        total += static_cast<std::int64_t>(rows.tokens.size()) + depth;
    }
    if (total > MOST_ROWS) throw std::invalid_argument("too many rows for one call");
}

void RowDrafter::check_draws(const std::vector<TrueRows>& groups, const std::vector<std::optional<Draw>>& draws) const {
    if (!draws.empty() && draws.size() != groups.size()) {
        throw std::invalid_argument("groups and draws differ in number");
    }
    for (const std::optional<Draw>& draw : draws) {
        if (!draw) continue;
        if (!has_ascending_ids_) throw std::invalid_argument("draws need the head's tokens in ascending order");
        const double slope = draw->inverse_temperature;
        if (!(std::isfinite(slope) && slope > 0.0 && draw->top_k >= 0 && draw->top_p > 0.0 && draw->top_p <= 1.0 &&
              draw->reach <= 0.0)) {
            throw std::invalid_argument("a draw with numbers that are none of a law");
        }
    }
}

void RowDrafter::check_levels(const std::vector<SpeculativeRows>& groups) const {
    std::set<std::int64_t> seen;
    std::int64_t total = 0;
    for (const SpeculativeRows& rows : groups) {
        if (!seen.insert(rows.sequence).second) throw std::invalid_argument("a sequence is named twice");
        const auto found = sequences_.find(rows.sequence);
        if (found == sequences_.end() || !found->second.is_begun) {
            throw std::invalid_argument("a sequence that has not begun to draft");
        }
        const Sequence& sequence = found->second;
        const auto drafted = static_cast<std::int64_t>(sequence.drafted.size());
        if (rows.parents.size() != rows.tokens.size()) throw std::invalid_argument("tokens and parents differ in number");
        for (std::size_t i = 0; i < rows.tokens.size(); ++i) {
            check_token(rows.tokens[i]);
            const int parent = rows.parents[i];
            if (parent < -1 || parent >= drafted) throw std::invalid_argument("a parent must stand before the level");
            check_positions(parent < 0 ? sequence.num_true + 1
                                       : sequence.drafted[static_cast<std::size_t>(parent)].position + 2);
        }
        total += static_cast<std::int64_t>(rows.tokens.size());
        if (total + drafted + sequence.num_true > MOST_ROWS) throw std::invalid_argument("too many rows for one call");
    }
}

// ---- plans --------------------------------------------------------------------------------------

void RowDrafter::plan_append(const std::vector<TrueRows>& groups) {
    check_idle();
    check_groups(groups, {}, false);
    plan_true(groups, {}, false);
    prepare_to_run();
}

void RowDrafter::plan_begin(const std::vector<TrueRows>& groups, float* logits) {
    check_idle();
    check_groups(groups, {}, true);
    plan_true(groups, {}, true);
    logits_ = logits;
    logit_stride_ = shape_.num_ids;
    prepare_to_run();
}

void RowDrafter::plan_chain(const std::vector<TrueRows>& groups, const std::vector<int>& depths, float least,
                            const std::vector<std::optional<Draw>>& draws, std::int32_t* tokens, float* probs) {
    check_idle();
    if (depths.size() != groups.size()) throw std::invalid_argument("groups and depths differ in number");
    check_groups(groups, depths, true);
    check_draws(groups, draws);
    plan_true(groups, depths, true);
    plan_steps(depths);
    first_picks_.clear();
    int first = 0;
    for (const int depth : depths) {
        first_picks_.push_back(first);
        first += depth;
    }
    chain_lengths_.assign(depths.size(), 0);
    least_ = least;
    for (Worker& worker : workers_) worker.reach.assign(depths.size(), 1.0f);
    picks_ = tokens;
    probs_ = probs;
    grow(own_logits_, at(static_cast<int>(groups.size()), padded_ids_));
    best_.resize(at(static_cast<int>(groups.size()), num_stretches()));
    draws_ = draws;
    drawn_.resize(draws.empty() ? 0 : best_.size());
    logits_ = own_logits_.data();
    logit_stride_ = padded_ids_;
    prepare_to_run();
}

void RowDrafter::plan_true(const std::vector<TrueRows>& groups, const std::vector<int>& depths, bool has_outputs) {
    passes_.clear();
    changes_.clear();
    chain_lengths_.clear();
    grow(features_, at(FILL_ROWS, padded_width_));
    Pass pass;
    for (std::size_t i = 0; i < groups.size(); ++i) {
        Sequence& sequence = sequences_[groups[i].sequence];
        admit(sequence, groups[i], !has_outputs ? 0 : depths.empty() ? 1 : depths[i]);
        const int num_new = static_cast<int>(groups[i].tokens.size());
        for (int row = 0; row < num_new - (has_outputs ? 1 : 0); ++row) {
            const int place = static_cast<int>(pass.rows.size());
            add_row(pass, true_row(sequence, static_cast<int>(i), groups[i], row, place));
            if (static_cast<int>(pass.rows.size()) < FILL_ROWS) continue;
            pass.num_filling = FILL_ROWS;
            passes_.push_back(std::exchange(pass, {}));
        }
    }
    pass.num_filling = static_cast<int>(pass.rows.size());
    for (std::size_t i = 0; has_outputs && i < groups.size(); ++i) {
        Sequence& sequence = *changes_[i].sequence;
        Row row = true_row(sequence, static_cast<int>(i), groups[i], static_cast<int>(groups[i].tokens.size()) - 1, 0);
        row.state = sequence.states.data();
        add_output(pass, row);
    }
    pass.is_chain = !depths.empty();
    if (!pass.rows.empty()) passes_.push_back(std::move(pass));
}

// Room for new true rows and the rows of a chain behind them. Nothing counts yet.
void RowDrafter::admit(Sequence& sequence, const TrueRows& rows, int depth) {
    const int num_new = static_cast<int>(rows.tokens.size()), num_true = sequence.num_true + num_new;
    const bool knows_last = num_new > 0 || sequence.knows_last;
    sequence.drafted.clear();
    sequence.is_begun = false;
    reserve(sequence, num_true + std::max(depth - 1, 0));
    grow(sequence.feature, static_cast<std::size_t>(padded_width_));
    grow(sequence.states, at(depth, padded_width_));
    sequence.drafted.reserve(static_cast<std::size_t>(std::max(depth - 1, 0)));
    changes_.push_back({&sequence, num_true, knows_last, depth > 0, {}});
    if (num_new == 0) return;
    sequence.knows_last = false;
    sequence.token = rows.tokens.back();
}

// The new true row `index`, or with -1 the last one there was. The last one's h stays, another's until the pass ends.
RowDrafter::Row RowDrafter::true_row(Sequence& sequence, int group, const TrueRows& rows, int index,
                                     int place_in_pass) {
    const int place = sequence.num_true + index;
    const bool is_last = index + 1 == static_cast<int>(rows.tokens.size());
    return {&sequence, group, index < 0 ? sequence.token : rows.tokens[static_cast<std::size_t>(index)], place, place,
            place + 1, 0, index < 0 ? nullptr : rows.features + at(index, shape_.feature_width),
            is_last ? sequence.feature.data() : &features_[at(place_in_pass, padded_width_)], nullptr};
}

void RowDrafter::add_row(Pass& pass, const Row& row) const {
    if (row.raw != nullptr) pass.raw.push_back(static_cast<int>(pass.rows.size()));
    pass.longest = std::max(pass.longest, row.position + 1);
    pass.rows.push_back(row);
}

void RowDrafter::add_output(Pass& pass, const Row& row) const {
    const int place = pass.num_outputs();
    add_row(pass, row);
    if (pass.groups.empty() || pass.groups.back().sequence != row.sequence) {
        pass.groups.push_back({row.sequence, place, 0});
    }
    ++pass.groups.back().num_rows;
}

// The rows of a chain behind the first: each in its place, its token and its feature those of the one before.
void RowDrafter::plan_steps(const std::vector<int>& depths) {
    const int most = depths.empty() ? 0 : *std::max_element(depths.begin(), depths.end());
    for (int step = 1; step < most; ++step) {
        Pass pass;
        pass.is_chain = true;
        for (std::size_t i = 0; i < depths.size(); ++i) {
            if (depths[i] <= step) continue;
            Change& change = changes_[i];
            Sequence& sequence = *change.sequence;
            const int position = change.num_true + step - 1;
            float* state = &sequence.states[at(step, padded_width_)];
            add_output(pass, {&sequence, static_cast<int>(i), -1, position, position, position + 1, 0, nullptr,
                              state - padded_width_, state});
            change.drafted.push_back({step - 2, position, position + 1});
        }
        passes_.push_back(std::move(pass));
    }
}

void RowDrafter::plan_extend(const std::vector<SpeculativeRows>& groups, float* logits) {
    check_idle();
    check_levels(groups);
    passes_.clear();
    changes_.clear();
    chain_lengths_.clear();
    Pass pass;
    for (std::size_t i = 0; i < groups.size(); ++i) {
        Sequence& sequence = sequences_.at(groups[i].sequence);
        const int drafted = static_cast<int>(sequence.drafted.size()), num_new = static_cast<int>(groups[i].tokens.size());
        reserve(sequence, sequence.num_true + drafted + num_new);
        grow(sequence.states, at(1 + drafted + num_new, padded_width_));
        sequence.drafted.reserve(sequence.drafted.size() + groups[i].tokens.size());
        changes_.push_back({&sequence, sequence.num_true, sequence.knows_last, true, {}});
        for (int row = 0; row < num_new; ++row) {
            const int parent = groups[i].parents[static_cast<std::size_t>(row)];
            const Drafted* above = parent < 0 ? nullptr : &sequence.drafted[static_cast<std::size_t>(parent)];
            const int position = above == nullptr ? sequence.num_true : above->position + 1;
            const int before = above == nullptr ? sequence.num_true : above->contiguous;
            const int slot = sequence.num_true + drafted + row;
            const int contiguous = before == position && slot == position ? position + 1 : before;
            const int path_start = static_cast<int>(pass.paths.size());
            pass.paths.resize(pass.paths.size() + static_cast<std::size_t>(position + 1 - contiguous));
            int at_slot = slot, next = parent;
            for (int p = position; p >= contiguous; --p) {
                pass.paths[static_cast<std::size_t>(path_start + p - contiguous)] = at_slot;
                at_slot = sequence.num_true + next;
                if (next >= 0) next = sequence.drafted[static_cast<std::size_t>(next)].parent;
            }
            add_output(pass, {&sequence, static_cast<int>(i), groups[i].tokens[static_cast<std::size_t>(row)], position,
                              slot, contiguous, path_start, nullptr, &sequence.states[at(1 + parent, padded_width_)],
                              &sequence.states[at(1 + drafted + row, padded_width_)]});
            changes_.back().drafted.push_back({parent, position, contiguous});
        }
    }
    if (!pass.rows.empty()) passes_.push_back(std::move(pass));
    logits_ = logits;
    logit_stride_ = shape_.num_ids;
    prepare_to_run();
}

void RowDrafter::prepare_to_run() {
    const int groups = std::max({padded_features_, padded_pair_, padded_width_, padded_heads_, padded_mlp_}) / GROUP;
    int rows = 1, outputs = 1, longest = 1;
    for (const Pass& pass : passes_) {
        rows = std::max(rows, static_cast<int>(pass.rows.size()));
        outputs = std::max(outputs, pass.num_outputs());
        longest = std::max(longest, pass.longest);
    }
    grow(hidden_, at(outputs, padded_width_));
    if (!weights_.fuse.parts.empty()) grow(fused_, at(rows, padded_width_));
    grow(queries_, at(outputs, padded_heads_));
    grow(mixed_, at(outputs, padded_heads_));
    shared_.resize(rows, groups);
    shared_outputs_.resize(outputs, groups);
    mixed_codes_.resize(outputs, padded_heads_ / GROUP);
    mlp_codes_.resize(outputs, padded_mlp_ / GROUP);
    for (Worker& worker : workers_) {
        worker.thread = static_cast<int>(&worker - workers_.data());
        worker.all.resize(FEW_ROWS, groups);
        worker.outputs.resize(FEW_ROWS, groups);
        grow(worker.wide, static_cast<std::size_t>(std::max(padded_features_, padded_pair_ + 2 * GROUP)));
        grow(worker.embedded, static_cast<std::size_t>(round_up(shape_.embedding_width, GROUP)));
        grow(worker.normed, static_cast<std::size_t>(padded_width_));
        grow(worker.part, std::max(at(rows, 2 * GROUP), at(MOST_QUERIES, shape_.head_dim)));
        grow(worker.scratch, std::max(attention_scratch(MOST_QUERIES, longest, shape_.head_dim),
                                      at(rows, shape_.head_dim)));
        grow(worker.powers, static_cast<std::size_t>(STRETCH + 64));
        worker.picked.resize(changes_.size());
    }
    running_in_ = getpid();
}

}  // namespace draftsmith
