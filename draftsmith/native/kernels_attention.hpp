// Attention of a few queries over the keys and values of one sequence and kv head; included by kernels_impl.hpp alone,
// after the vectors and the elementwise kernels. Invariant: what a query gets depends on itself and its own positions
// alone, bit for bit: scores are summed over the head's dimensions and values over positions, each in one order.
#pragma once

namespace draftsmith {
namespace {

// Asks for the bytes some rows further on, which will be next.
constexpr int PREFETCH_ROWS = 32;

template <class T>
inline void prefetch_ahead(const T* row, int head_dim, int num_elements) {
    const auto* ahead = reinterpret_cast<const char*>(row + PREFETCH_ROWS * head_dim);
    const int bytes = num_elements * static_cast<int>(sizeof(T));
    for (int at = 0; at < bytes; at += 64) __builtin_prefetch(ahead + at);
}

template <class T>
struct Attend {
    const Attention& shared;
    const Query* queries;
    int num_queries;
    int base, stride;           // the first position of the score buffers (a multiple of 16) and their length
    int lowest;                 // the first position seen by any query
    int common, reach;          // positions below are stored in place for every query, for some query

    float* scores(int query) const { return shared.scratch + query * stride; }
    const T* row(const void* rows, int storage) const {
        return static_cast<const T*>(rows) + static_cast<std::int64_t>(storage - shared.storage_first) * shared.head_dim;
    }
    int storage_of(const Query& query, int position) const {
        return position < query.contiguous ? position : query.path[position - query.contiguous];
    }

    F16 capped(F16 scores) const {
        if (shared.cap == 0.0f) return scores;
        return f_mul(f_set(shared.cap), f_tanh(f_div(scores, f_set(shared.cap))));
    }

    // Scores of all positions a query sees, 16 at a time from multiples of 16 on: a position's lane, and the order in
    // which its dimensions are summed, depend on nothing else. Where a query's path leaves the order of storage it is
    // on its own. What lies beyond a query's end, or before its first position, is scored and then not used.
    void score() const {
        for (int q = 0; q < num_queries; q += ATTENTION_QUERIES) {
            const int count = num_queries - q < ATTENTION_QUERIES ? num_queries - q : ATTENTION_QUERIES;
            for (int start = base; start < reach; start += KEY_BLOCK) {
                score_set(q, count, row(shared.keys, start), start);
            }
        }
        for (int q = 0; q < num_queries; ++q) {
            if (queries[q].contiguous < queries[q].end) score_path(q);
        }
    }

    // NQ queries against a block of keys [head_dim, 16]; even and odd dimensions are summed apart.
    template <int NQ>
    void score_block(int first_query, const T* keys, int start) const {
        F16 even[NQ], odd[NQ];
        const float* query[NQ];
#pragma GCC unroll 6
        for (int q = 0; q < NQ; ++q) {
            even[q] = odd[q] = f_zero();
            query[q] = queries[first_query + q].query;
        }
        for (int d = 0; d < shared.head_dim; d += 2) {
            const F16 a = load_elements(keys + d * KEY_BLOCK), b = load_elements(keys + (d + 1) * KEY_BLOCK);
            prefetch_ahead(keys + d * KEY_BLOCK, shared.head_dim, 2 * KEY_BLOCK);
#pragma GCC unroll 6
            for (int q = 0; q < NQ; ++q) {
                even[q] = f_fma(f_set(query[q][d]), a, even[q]);
                odd[q] = f_fma(f_set(query[q][d + 1]), b, odd[q]);
            }
        }
#pragma GCC unroll 6
        for (int q = 0; q < NQ; ++q) {
            f_store(scores(first_query + q) + start - base, capped(f_add(even[q], odd[q])));
        }
    }

    void score_set(int first_query, int count, const T* keys, int start) const {
        switch (count) {
            case 1: return score_block<1>(first_query, keys, start);
            case 2: return score_block<2>(first_query, keys, start);
            case 3: return score_block<ATTENTION_QUERIES < 3 ? 1 : 3>(first_query, keys, start);
            case 4: return score_block<ATTENTION_QUERIES < 4 ? 1 : 4>(first_query, keys, start);
            case 5: return score_block<ATTENTION_QUERIES < 5 ? 1 : 5>(first_query, keys, start);
            default: return score_block<ATTENTION_QUERIES < 6 ? 1 : 6>(first_query, keys, start);
        }
    }

    // The blocks in which a query's own path lies, put together from where its keys are.
    void score_path(int index) const {
        const Query& query = queries[index];
        T* copy = reinterpret_cast<T*>(shared.scratch + num_queries * stride);
        // A window narrower than the tree is deep begins behind the rows in place.
        const int from = query.contiguous > base ? query.contiguous / KEY_BLOCK * KEY_BLOCK : base;
        for (int start = from; start < query.end; start += KEY_BLOCK) {
            const std::size_t elements = static_cast<std::size_t>(KEY_BLOCK * shared.head_dim);
            __builtin_memcpy(copy, row(shared.keys, start), elements * sizeof(T));
            const int end = start + KEY_BLOCK < query.end ? start + KEY_BLOCK : query.end;
            int position = start > query.contiguous ? start : query.contiguous;
            for (position = position > query.first ? position : query.first; position < end; ++position) {
                const int slot = query.path[position - query.contiguous];
                const T* stored = row(shared.keys, slot / KEY_BLOCK * KEY_BLOCK) + slot % KEY_BLOCK;
                T* to = copy + position % KEY_BLOCK;
                for (int d = 0; d < shared.head_dim; ++d) to[d * KEY_BLOCK] = stored[d * KEY_BLOCK];
            }
            score_block<1>(index, copy, start);
        }
    }

    // Turns scores into weights that are 0 outside first..end; returns the inverse of their sum.
    float weigh(int index) const {
        const Query& query = queries[index];
        float* weights = scores(index) - base;
        const int start = query.first / 16 * 16, stop = (query.end + 15) / 16 * 16;
        constexpr float NOTHING = -__builtin_huge_valf();
        for (int p = start; p < query.first; ++p) weights[p] = NOTHING;
        for (int p = query.end; p < stop; ++p) weights[p] = NOTHING;
        F16 largest = f_load(weights + start);
        for (int p = start + 16; p < stop; p += 16) largest = f_max(largest, f_load(weights + p));
        const F16 most = f_set(f_largest(largest));
        F16 sum = f_zero();
        for (int p = start; p < stop; p += 16) {
            f_store(weights + p, f_exp(f_sub(f_load(weights + p), most)));
            if (p == start) {
                for (int j = p; j < query.first; ++j) weights[j] = 0.0f;
            }
            if (p + 16 == stop) {
                for (int j = query.end; j < stop; ++j) weights[j] = 0.0f;
            }
            sum = f_add(sum, f_load(weights + p));
        }
        for (int p = base; p < start; ++p) weights[p] = 0.0f;
        return 1.0f / f_sum(sum);
    }

    // Sums the values of the common positions for NQ queries, then each query's own, dimensions part by part.
    template <int NQ, int NP>
    void mix(int first_query, int dim, const float* inverses) const {
        F16 sums[NQ][NP];
        for (int q = 0; q < NQ; ++q) {
            for (int i = 0; i < NP; ++i) sums[q][i] = f_zero();
        }
        const float* weights[NQ];
        for (int q = 0; q < NQ; ++q) weights[q] = scores(first_query + q) - base;
        const T* value = row(shared.values, lowest) + dim;
        for (int p = lowest; p < common; ++p, value += shared.head_dim) {
            F16 parts[NP];
            prefetch_ahead(value, shared.head_dim, 16 * NP);
#pragma GCC unroll 4
            for (int i = 0; i < NP; ++i) parts[i] = load_elements(value + 16 * i);
#pragma GCC unroll 6
            for (int q = 0; q < NQ; ++q) {
                const F16 weight = f_set(weights[q][p]);
#pragma GCC unroll 4
                for (int i = 0; i < NP; ++i) sums[q][i] = f_fma(weight, parts[i], sums[q][i]);
            }
        }
#pragma GCC unroll 6
        for (int q = 0; q < NQ; ++q) {
            const Query& query = queries[first_query + q];
            F16 own[NP];
            for (int i = 0; i < NP; ++i) own[i] = sums[q][i];
            for (int p = common < query.first ? query.first : common; p < query.end; ++p) {
                const T* at = row(shared.values, storage_of(query, p)) + dim;
                const F16 weight = f_set(weights[q][p]);
                for (int i = 0; i < NP; ++i) own[i] = f_fma(weight, load_elements(at + 16 * i), own[i]);
            }
            const F16 inverse = f_set(inverses[first_query + q]);
            for (int i = 0; i < NP; ++i) f_store(query.output + dim + 16 * i, f_mul(own[i], inverse));
        }
    }

    template <int NP>
    void mix_set(int first_query, int count, int dim, const float* inverses) const {
        switch (count) {
            case 1: return mix<1, NP>(first_query, dim, inverses);
            case 2: return mix<2, NP>(first_query, dim, inverses);
            case 3: return mix<ATTENTION_QUERIES < 3 ? 1 : 3, NP>(first_query, dim, inverses);
            case 4: return mix<ATTENTION_QUERIES < 4 ? 1 : 4, NP>(first_query, dim, inverses);
            case 5: return mix<ATTENTION_QUERIES < 5 ? 1 : 5, NP>(first_query, dim, inverses);
            default: return mix<ATTENTION_QUERIES < 6 ? 1 : 6, NP>(first_query, dim, inverses);
        }
    }

    void run(float* inverses) const {
        score();
        for (int q = 0; q < num_queries; ++q) inverses[q] = weigh(q);
        for (int q = 0; q < num_queries; q += ATTENTION_QUERIES) {
            const int count = num_queries - q < ATTENTION_QUERIES ? num_queries - q : ATTENTION_QUERIES;
            int dim = 0;
            for (; dim + 16 * ATTENTION_PARTS <= shared.head_dim; dim += 16 * ATTENTION_PARTS) {
                mix_set<ATTENTION_PARTS>(q, count, dim, inverses);
            }
            for (; dim < shared.head_dim; dim += 16) mix_set<1>(q, count, dim, inverses);
        }
    }
};

template <class T>
void attend_as(const Attention& shared, const Query* queries, int num_queries) {
    int lowest = queries[0].first, common = queries[0].contiguous, reach = common, longest = queries[0].end;
    for (int q = 1; q < num_queries; ++q) {
        const Query& query = queries[q];
        lowest = query.first < lowest ? query.first : lowest;
        common = query.contiguous < common ? query.contiguous : common;
        reach = query.contiguous > reach ? query.contiguous : reach;
        longest = query.end > longest ? query.end : longest;
    }
    const int base = lowest / KEY_BLOCK * KEY_BLOCK;
    const int stride = (longest + 15) / 16 * 16 - base + 16;
    float inverses[MOST_QUERIES];
    Attend<T>{shared, queries, num_queries, base, stride, lowest, common, reach}.run(inverses);
}

void attend(CacheType type, const Attention& shared, const Query* queries, int num_queries) {
    if (type == CacheType::FLOAT) attend_as<float>(shared, queries, num_queries);
    else if (type == CacheType::HALF) attend_as<Half>(shared, queries, num_queries);
    else attend_as<Bfloat>(shared, queries, num_queries);
}

}  // namespace
}  // namespace draftsmith
