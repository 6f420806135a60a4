// The decoder without Python, for the sanitizers: every cut of rows, number of threads and set of kernels gives the
// bits that one row at a time gives on one thread, also while two decoders share a pool and pools come and go.
// Built only with DRAFTSMITH_SANITIZE, run by `make sanitize`; prints what differs and exits with 1.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "../../draftsmith/native/decoder.hpp"

using namespace draftsmith;

namespace {

constexpr int WIDTH = 72, HEADS = 4, KV_HEADS = 2, HEAD_DIM = 48, MLP = 90, VOCABULARY = 130, LAYERS = 3;
constexpr int WINDOW = 20, POSITIONS = 256, CAPACITY = 128, TOKENS = 70;

using Random = std::mt19937;

Floats random_floats(Random& random, int count, float scale, float centre = 0.0f) {
    std::normal_distribution<float> normal(centre, scale);
    Floats values(static_cast<std::size_t>(count));
    for (float& value : values) value = normal(random);
    return values;
}

std::shared_ptr<Packed> random_weights(Random& random, int outputs, int inputs, int bits) {
    const Floats values = random_floats(random, outputs * inputs, 1.0f / std::sqrt(static_cast<float>(inputs)));
    return pack_floats(values.data(), outputs, inputs, bits);
}

Layer random_layer(Random& random, int index) {
    const int queries = HEADS * HEAD_DIM, keys = KV_HEADS * HEAD_DIM, bits = index % 2 == 0 ? 8 : 4;
    Layer layer;
    layer.qkv.parts = {random_weights(random, queries, WIDTH, bits), random_weights(random, keys, WIDTH, bits),
                       random_weights(random, keys, WIDTH, bits)};
    layer.qkv.bias = random_floats(random, queries + 2 * keys, 0.1f);
    layer.output = {{random_weights(random, WIDTH, queries, bits)}, random_floats(random, WIDTH, 0.1f)};
    layer.gate_up = {{random_weights(random, MLP, WIDTH, bits), random_weights(random, MLP, WIDTH, bits)},
                     random_floats(random, 2 * MLP, 0.1f)};
    layer.down = {{random_weights(random, WIDTH, MLP, bits)}, {}};
    for (Floats* norm : {&layer.attention_norm, &layer.mlp_norm}) *norm = random_floats(random, WIDTH, 0.1f, 1.0f);
    if (index == 1) {
        for (Floats* norm : {&layer.attention_out_norm, &layer.mlp_out_norm}) {
            *norm = random_floats(random, WIDTH, 0.1f, 1.0f);
        }
        for (Floats* norm : {&layer.query_norm, &layer.key_norm}) *norm = random_floats(random, HEAD_DIM, 0.1f, 1.0f);
    }
    // The first and the last layer see all, the middle one a window.
    layer.kind = index % 2;
    layer.place = index / 2;
    layer.window = index % 2 == 0 ? 0 : WINDOW;
    return layer;
}

struct Rotations {
    Floats cosines, sines;
    Rotations() {
        for (int position = 0; position < POSITIONS; ++position) {
            for (int i = 0; i < HEAD_DIM / 2; ++i) {
                const float angle = static_cast<float>(position) / std::pow(1e4f, 2.0f * static_cast<float>(i) / HEAD_DIM);
                cosines.push_back(std::cos(angle));
                sines.push_back(std::sin(angle));
            }
        }
    }
};
const Rotations rotations;

std::unique_ptr<Decoder> make_decoder(int threads, const Kernels* kernels, CacheType cache, bool is_gelu) {
    Random random(1);
    std::vector<Layer> layers;
    for (int index = 0; index < LAYERS; ++index) layers.push_back(random_layer(random, index));
    const Shape shape{WIDTH, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCABULARY, 1e-6f, 0.14f, 30.0f, 10.0f, 1.5f, is_gelu};
    auto embedding = random_weights(random, VOCABULARY, WIDTH, 8);
    Linear head{{embedding}, {}};
    auto decoder = std::make_unique<Decoder>(shape, std::move(layers), std::move(embedding), std::move(head),
                                             random_floats(random, WIDTH, 0.1f, 1.0f), cache,
                                             shared_pool(threads, false), kernels);
    for (int kind = 0; kind < decoder->num_kinds(); ++kind) {
        decoder->set_rotation(kind, rotations.cosines.data(), rotations.sines.data(), POSITIONS);
    }
    return decoder;
}

struct Sequence {
    std::vector<std::uint8_t> rows[2];
    std::vector<Slots> slots;
    int committed = 0;
    Sequence() {
        for (int kind = 0; kind < 2; ++kind) {
            rows[kind].resize(static_cast<std::size_t>(kind == 0 ? 2 : 1) * 2 * KV_HEADS * CAPACITY * HEAD_DIM * 4);
            slots.push_back({rows[kind].data(), 0, CAPACITY});
        }
    }
};

struct Asked {
    Sequence* sequence;
    std::vector<std::int32_t> tokens, parents;
};

// Logits of all rows, and with them the last layer's tap and the normed one.
std::vector<Floats> score(Decoder& decoder, const std::vector<Asked>& asked) {
    std::vector<std::int32_t> tokens, logit_rows;
    std::vector<Group> groups;
    for (const Asked& part : asked) {
        groups.push_back({static_cast<int>(part.tokens.size()), part.sequence->committed, part.parents.data(),
                          part.sequence->slots.data()});
        tokens.insert(tokens.end(), part.tokens.begin(), part.tokens.end());
    }
    const std::size_t num_rows = tokens.size();
    for (std::size_t row = 0; row < num_rows; ++row) logit_rows.push_back(static_cast<std::int32_t>(row));
    Floats logits(num_rows * VOCABULARY), tap(num_rows * WIDTH), last(num_rows * WIDTH);
    const Tap taps[] = {{LAYERS, tap.data()}};
    decoder.score({tokens, groups, logit_rows, logits.data(), taps, last.data()});
    std::vector<Floats> found;
    const auto append = [](Floats& to, const Floats& from, std::size_t row, std::size_t size) {
        to.insert(to.end(), from.begin() + static_cast<std::ptrdiff_t>(row * size),
                  from.begin() + static_cast<std::ptrdiff_t>((row + 1) * size));
    };
    for (std::size_t row = 0; row < num_rows; ++row) {
        Floats values;
        append(values, logits, row, VOCABULARY);
        append(values, tap, row, WIDTH);
        append(values, last, row, WIDTH);
        found.push_back(std::move(values));
    }
    return found;
}

bool are_same(const Floats& a, const Floats& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

std::vector<std::int32_t> chain(int rows) {
    std::vector<std::int32_t> parents;
    for (int row = 0; row < rows; ++row) parents.push_back(row - 1);
    return parents;
}

std::vector<std::int32_t> text(int seed) {
    Random random(static_cast<unsigned>(seed));
    std::vector<std::int32_t> tokens;
    for (int i = 0; i < TOKENS; ++i) tokens.push_back(static_cast<std::int32_t>(random() % VOCABULARY));
    return tokens;
}

std::vector<std::int32_t> part_of(const std::vector<std::int32_t>& tokens, int start, int rows) {
    return {tokens.begin() + start, tokens.begin() + start + rows};
}

std::vector<Floats> one_by_one(Decoder& decoder, const std::vector<std::int32_t>& tokens) {
    Sequence sequence;
    std::vector<Floats> found;
    for (const std::int32_t token : tokens) {
        found.push_back(score(decoder, {{&sequence, {token}, {-1}}}).front());
        ++sequence.committed;
    }
    return found;
}

int failures = 0;

void expect(bool is_right, const char* what, const char* kernels, int threads, int row) {
    if (is_right) return;
    ++failures;
    std::printf("%s: %s kernels, %d threads, row %d differs\n", what, kernels, threads, row);
}

// Chunks of two sequences side by side, of sizes that cross blocks of rows and of positions.
void check_chunks(Decoder& decoder, int threads, const std::vector<Floats> (&expected)[2]) {
    Sequence sequences[2];
    const std::vector<std::int32_t> texts[2] = {text(0), text(1)};
    int step = 0;
    const int sizes[] = {1, 9, 2, 17, 5};
    while (sequences[0].committed < TOKENS || sequences[1].committed < TOKENS) {
        std::vector<Asked> asked;
        for (int i = 0; i < 2; ++i) {
            const int rows = std::min(sizes[(step + i) % 5], TOKENS - sequences[i].committed);
            if (rows > 0) asked.push_back({&sequences[i], part_of(texts[i], sequences[i].committed, rows), chain(rows)});
        }
        const std::vector<Floats> found = score(decoder, asked);
        std::size_t row = 0;
        for (const Asked& part : asked) {
            const int which = part.sequence == &sequences[0] ? 0 : 1;
            for (std::size_t i = 0; i < part.tokens.size(); ++i) {
                const std::size_t place = static_cast<std::size_t>(part.sequence->committed) + i;
                expect(are_same(found[row++], expected[which][place]), "chunks", decoder.kernels_name(), threads,
                       static_cast<int>(place));
            }
            part.sequence->committed += static_cast<int>(part.tokens.size());
        }
        ++step;
    }
}

// Behind 30 tokens: the text goes on along every third row, wrong tokens hang between.
void check_tree(Decoder& decoder, int threads, const std::vector<Floats>& expected) {
    Sequence sequence;
    const std::vector<std::int32_t> tokens = text(0);
    score(decoder, {{&sequence, part_of(tokens, 0, 30), chain(30)}});
    sequence.committed = 30;
    Asked tree{&sequence, {}, {}};
    for (int level = 0; level < 8; ++level) {
        const int above = level == 0 ? -1 : (level - 1) * 3 + 2;
        for (int wrong = 1; wrong <= 2; ++wrong) {
            tree.tokens.push_back((tokens[static_cast<std::size_t>(30 + level)] + wrong) % VOCABULARY);
            tree.parents.push_back(wrong == 1 ? above : level * 3);
        }
        tree.tokens.push_back(tokens[static_cast<std::size_t>(30 + level)]);
        tree.parents.push_back(above);
    }
    const std::vector<Floats> found = score(decoder, {tree});
    for (std::size_t level = 0; level < 8; ++level) {
        expect(are_same(found[level * 3 + 2], expected[30 + level]), "tree", decoder.kernels_name(), threads,
               static_cast<int>(level));
    }
}

void check_kernels(const Kernels* kernels, CacheType cache) {
    std::vector<Floats> expected[2];
    {
        const auto decoder = make_decoder(1, kernels, cache, cache == CacheType::HALF);
        for (int i = 0; i < 2; ++i) expected[i] = one_by_one(*decoder, text(i));
    }
    for (int threads = 1; threads <= 3; ++threads) {
        const auto decoder = make_decoder(threads, kernels, cache, cache == CacheType::HALF);
        check_chunks(*decoder, threads, expected);
        // Long enough for the pool to fall asleep.
        std::this_thread::sleep_for(std::chrono::milliseconds(3));
        check_tree(*decoder, threads, expected[0]);
    }
    // Two decoders on one pool, each driven by a thread of its own.
    const auto first = make_decoder(2, kernels, cache, cache == CacheType::HALF);
    const auto second = make_decoder(2, kernels, cache, cache == CacheType::HALF);
    std::thread other([&] { check_chunks(*second, 2, expected); });
    check_chunks(*first, 2, expected);
    other.join();
}

}  // namespace

int main() {
    for (const Kernels* kernels : {avx512_kernels(), avxvnni_kernels(), avx2_kernels(), portable_kernels()}) {
        if (kernels == nullptr) continue;
        for (const CacheType cache : {CacheType::HALF, CacheType::BFLOAT, CacheType::FLOAT}) {
            check_kernels(kernels, cache);
        }
        std::printf("%s: checked\n", kernels->name);
        std::fflush(stdout);
    }
    return failures == 0 ? 0 : 1;
}
