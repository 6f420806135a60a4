// The row drafter without Python, for the sanitizers: chains, trees and batches on every number of threads and set of
// kernels give the bits of one sequence alone on one thread, also while two drafters share a pool.
// Built only with DRAFTSMITH_SANITIZE, run by `make sanitize`; prints what differs and exits with 1.
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "../../draftsmith/native/row_drafter.hpp"

using namespace draftsmith;

namespace {

constexpr int EMBEDDING = 40, WIDTH = 56, HEADS = 4, KV_HEADS = 2, HEAD_DIM = 48, MLP = 90, IDS = 300, VOCABULARY = 330;
constexpr int POSITIONS = 400, ROWS = 150;

using Random = std::mt19937;

Floats random_floats(Random& random, int count, float scale, float centre = 0.0f) {
    std::normal_distribution<float> normal(centre, scale);
    Floats values(static_cast<std::size_t>(count));
    for (float& value : values) value = normal(random);
    return values;
}

std::shared_ptr<Packed> matrix(Random& random, int outputs, int inputs, int bits) {
    const Floats values = random_floats(random, outputs * inputs, 1.0f / std::sqrt(static_cast<float>(inputs)));
    return pack_floats(values.data(), outputs, inputs, bits);
}

// EAGLE-3's shape with taps of another width than the layer, or the fused one.
std::unique_ptr<RowDrafter> make_drafter(int threads, const Kernels* kernels, CacheType cache, bool is_fused) {
    Random random(1);
    const int queries = HEADS * HEAD_DIM, keys = KV_HEADS * HEAD_DIM, bits = is_fused ? 4 : 8;
    const int embedding = is_fused ? WIDTH : EMBEDDING, features = is_fused ? WIDTH : 3 * EMBEDDING;
    const int input = is_fused ? WIDTH : EMBEDDING + WIDTH;
    const RowShape shape{features, embedding, WIDTH, HEADS, KV_HEADS, HEAD_DIM, MLP,     IDS,      1e-5f,
                         0.14f,    0.0f,      0.0f,  1.5f,  is_fused, false,    is_fused};
    RowWeights weights;
    if (is_fused) {
        weights.fuse = {{matrix(random, WIDTH, embedding + WIDTH, bits)}, random_floats(random, WIDTH, 0.1f)};
        weights.attention_norm = random_floats(random, WIDTH, 0.1f, 1.0f);
        weights.query_norm = random_floats(random, HEAD_DIM, 0.1f, 1.0f);
        weights.key_norm = random_floats(random, HEAD_DIM, 0.1f, 1.0f);
    } else {
        weights.reduce = {{matrix(random, WIDTH, features, bits)}, {}};
        weights.tap_norms = random_floats(random, features, 0.1f, 1.0f);
    }
    weights.qkv = {{matrix(random, queries, input, bits), matrix(random, keys, input, bits),
                    matrix(random, keys, input, bits)}, random_floats(random, queries + 2 * keys, 0.1f)};
    weights.output = {{matrix(random, WIDTH, queries, bits)}, {}};
    weights.gate_up = {{matrix(random, MLP, WIDTH, bits), matrix(random, MLP, WIDTH, bits)}, {}};
    weights.down = {{matrix(random, WIDTH, MLP, bits)}, {}};
    weights.head = {{matrix(random, IDS, WIDTH, bits)}, {}};
    weights.embedding_norm = random_floats(random, embedding, 0.1f, 1.0f);
    for (Floats* norm : {&weights.feature_norm, &weights.mlp_norm, &weights.final_norm}) {
        *norm = random_floats(random, WIDTH, 0.1f, 1.0f);
    }
    weights.embedding = matrix(random, VOCABULARY, embedding, 8);
    for (int id = 0; id < IDS; ++id) weights.ids.push_back(id + id / 10);
    auto drafter = std::make_unique<RowDrafter>(shape, std::move(weights), true, cache, shared_pool(threads, false), kernels);
    Floats cosines, sines;
    for (int i = 0; i < POSITIONS * HEAD_DIM / 2; ++i) {
        cosines.push_back(std::cos(static_cast<float>(i % 97)));
        sines.push_back(std::sin(static_cast<float>(i % 97)));
    }
    drafter->set_rotation(cosines.data(), sines.data(), POSITIONS);
    return drafter;
}

// Rows start..stop-1 of a text, the features beside them kept alive by the caller.
struct Text {
    std::vector<std::int32_t> tokens;
    Floats features;
    int feature_width;
    Text(int seed, int width) : feature_width(width) {
        Random random(static_cast<unsigned>(seed) + 50);
        features = random_floats(random, ROWS * width, 1.0f);
        for (int i = 0; i < ROWS; ++i) tokens.push_back(static_cast<std::int32_t>(random() % VOCABULARY));
    }
    TrueRows rows(std::int64_t sequence, int start, int stop) const {
        return {sequence, {tokens.begin() + start, tokens.begin() + stop}, features.data() + at(start, feature_width)};
    }
};

struct Drafts {
    std::vector<std::int32_t> tokens;
    std::vector<float> probs;
    Floats logits;  // of three levels behind
    bool operator==(const Drafts& other) const {
        return tokens == other.tokens && probs == other.probs && logits.size() == other.logits.size() &&
               std::memcmp(logits.data(), other.logits.data(), logits.size() * sizeof(float)) == 0;
    }
};

void work(RowDrafter& drafter) {
    drafter.run();
    drafter.finish();
}

// Chains of all sequences: drawn of all tokens, of few, and the likeliest; then for each a tree of two rows a level along
// one path.
std::vector<Drafts> draft(RowDrafter& drafter, const std::vector<TrueRows>& groups, int depth) {
    const std::size_t count = groups.size();
    std::vector<std::int32_t> tokens(count * static_cast<std::size_t>(depth));
    std::vector<float> probs(tokens.size());
    const std::vector<int> depths(count, depth);
    std::vector<TrueRows> again;
    for (const TrueRows& rows : groups) again.push_back({rows.sequence, {}, nullptr});
    std::vector<std::vector<std::int32_t>> drawn;
    for (const double top_p : {1.0, 0.9}) {
        const Draw draw{3, 1, 100, 1.4, 0, top_p, -std::numeric_limits<double>::infinity()};
        const std::vector<std::optional<Draw>> draws(count, draw);
        drafter.plan_chain(drawn.empty() ? groups : again, depths, 0.0f, draws, tokens.data(), probs.data());
        work(drafter);
        drawn.push_back(tokens);
    }
    drafter.plan_chain(again, depths, 0.0f, {}, tokens.data(), probs.data());
    work(drafter);
    Floats begun(count * IDS);
    drafter.plan_begin(again, begun.data());
    work(drafter);
    std::vector<Drafts> found(count);
    for (std::size_t i = 0; i < count; ++i) {
        const auto start = static_cast<std::ptrdiff_t>(i) * depth;
        found[i].tokens.assign(tokens.begin() + start, tokens.begin() + start + depth);
        found[i].probs.assign(probs.begin() + start, probs.begin() + start + depth);
        for (const std::vector<std::int32_t>& more : drawn) {
            found[i].tokens.insert(found[i].tokens.end(), more.begin() + start, more.begin() + start + depth);
        }
        found[i].logits.assign(begun.begin() + static_cast<std::ptrdiff_t>(i) * IDS,
                               begun.begin() + static_cast<std::ptrdiff_t>(i + 1) * IDS);
    }
    for (int level = 0; level < 3; ++level) {
        std::vector<SpeculativeRows> rows;
        for (const TrueRows& group : groups) {
            const int parent = level == 0 ? -1 : 2 * level - 1 - level % 2;
            rows.push_back({group.sequence, {level + 1, level + 20}, {parent, level == 0 ? -1 : 0}});
        }
        Floats logits(2 * count * IDS);
        drafter.plan_extend(rows, logits.data());
        work(drafter);
        for (std::size_t i = 0; i < count; ++i) {
            found[i].logits.insert(found[i].logits.end(), logits.begin() + static_cast<std::ptrdiff_t>(2 * i) * IDS,
                                   logits.begin() + static_cast<std::ptrdiff_t>(2 * i + 2) * IDS);
        }
    }
    return found;
}

int failures = 0;

void expect(bool is_right, const char* what, const RowDrafter& drafter, int threads, std::size_t sequence) {
    if (is_right) return;
    ++failures;
    std::printf("%s: %s kernels, %d threads, sequence %d differs\n", what, drafter.kernels_name(), threads,
                static_cast<int>(sequence));
}

const int SIZES[] = {1, 20, 33, 140, 64};

void check(RowDrafter& drafter, int threads, const std::vector<Text>& texts, const std::vector<Drafts>& expected) {
    for (int turn = 0; turn < 2; ++turn) {
        std::vector<TrueRows> first, rest;
        for (int i = 0; i < 5; ++i) {
            const int cut = turn == 0 ? SIZES[i] / 2 : SIZES[i] - 1;
            drafter.truncate(i, cut / 2);
            first.push_back(texts[static_cast<std::size_t>(i)].rows(i, drafter.num_rows(i), std::max(cut, drafter.num_rows(i))));
            rest.push_back(texts[static_cast<std::size_t>(i)].rows(i, std::max(cut, drafter.num_rows(i)), SIZES[i]));
        }
        drafter.plan_append(first);
        work(drafter);
        const std::vector<Drafts> found = draft(drafter, rest, 4);
        for (std::size_t i = 0; i < found.size(); ++i) expect(found[i] == expected[i], "batch", drafter, threads, i);
    }
    drafter.fork(3, 9, 100);
    const std::vector<Drafts> forked = draft(drafter, {texts[3].rows(9, 100, SIZES[3])}, 4);
    expect(forked.front() == expected[3], "fork", drafter, threads, 3);
    for (const std::int64_t sequence : {0, 1, 2, 3, 4, 9}) drafter.forget(sequence);
    try {
        drafter.plan_extend({{0, {1}, {-1}}}, nullptr);
        expect(false, "a level without a sequence", drafter, threads, 0);
    } catch (const std::invalid_argument&) {
    }
}

void check_kernels(const Kernels* kernels, CacheType cache, bool is_fused) {
    std::vector<Text> texts;
    std::vector<Drafts> expected;
    const auto alone = make_drafter(1, kernels, cache, is_fused);
    for (int i = 0; i < 5; ++i) {
        texts.emplace_back(i, alone->shape().feature_width);
        expected.push_back(draft(*alone, {texts.back().rows(i, 0, SIZES[i])}, 4).front());
    }
    for (int threads = 1; threads <= 3; ++threads) {
        const auto drafter = make_drafter(threads, kernels, cache, is_fused);
        std::this_thread::sleep_for(std::chrono::milliseconds(3));  // long enough for the pool to fall asleep
        check(*drafter, threads, texts, expected);
    }
    const auto first = make_drafter(2, kernels, cache, is_fused), second = make_drafter(2, kernels, cache, is_fused);
    std::thread other([&] { check(*second, 2, texts, expected); });
    check(*first, 2, texts, expected);
    other.join();
}

}  // namespace

int main() {
    for (const Kernels* kernels : {avx512_kernels(), avxvnni_kernels(), avx2_kernels(), portable_kernels()}) {
        if (kernels == nullptr) continue;
        for (const bool is_fused : {false, true}) check_kernels(kernels, CacheType::HALF, is_fused);
        check_kernels(kernels, CacheType::FLOAT, false);
        std::printf("%s: checked\n", kernels->name);
        std::fflush(stdout);
    }
    return failures == 0 ? 0 : 1;
}
