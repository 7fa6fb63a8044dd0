// Softmax attention of rows of few tokens over the paged KV pool, read where it lies.
//
// A row's keys are taken in pieces of one size, whatever the batch and the threads, and the pieces' results
// are merged in order (as flash-decoding does): a row's output does not depend on what else is computed.
#include "attention.hpp"
#include <algorithm>
#include <cmath>
#include <limits>

using namespace bien;

namespace {

constexpr int64_t PIECE = 256;
constexpr float NONE = -std::numeric_limits<float>::infinity();

// The sums of the lanes of 16 vectors.
inline __m512 sums16(const __m512 *v) {
    __m512 a[8], b[4], c[2];
    for (int i = 0; i < 8; ++i)
        a[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
    for (int i = 0; i < 4; ++i) {
        const __m512d x = _mm512_castps_pd(a[2 * i]), y = _mm512_castps_pd(a[2 * i + 1]);
        b[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
    }
    for (int i = 0; i < 2; ++i)
        c[i] = _mm512_add_ps(_mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0x88),
                             _mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(c[0], c[1], 0x88), _mm512_shuffle_f32x4(c[0], c[1], 0xdd));
}

// The 16 keys' scores of one query. Keys may lie anywhere.
template <int64_t V> inline __m512 scores16(const float *query, const float *const *keys) {
    __m512 q[V], sums[16];
    for (int64_t v = 0; v < V; ++v) q[v] = _mm512_loadu_ps(query + v * LANES);
#pragma GCC unroll 16
    for (int j = 0; j < 16; ++j) {
        sums[j] = _mm512_mul_ps(q[0], _mm512_loadu_ps(keys[j]));
        for (int64_t v = 1; v < V; ++v) sums[j] = _mm512_fmadd_ps(q[v], _mm512_loadu_ps(keys[j] + v * LANES), sums[j]);
    }
    return sums16(sums);
}

// out[q] = sum of weights[q][j] * values[j] for Q queries; weights PIECE floats apart.
template <int64_t V, int64_t Q>
inline void mix(const float *weights, const float *const *values, int64_t keys, float *out) {
    __m512 sums[Q][V];
#pragma GCC unroll 16
    for (int64_t q = 0; q < Q; ++q)
#pragma GCC unroll 16
        for (int64_t v = 0; v < V; ++v) sums[q][v] = _mm512_setzero_ps();
    for (int64_t j = 0; j < keys; ++j) {
        __m512 value[V];
#pragma GCC unroll 16
        for (int64_t v = 0; v < V; ++v) value[v] = _mm512_loadu_ps(values[j] + v * LANES);
#pragma GCC unroll 16
        for (int64_t q = 0; q < Q; ++q) {
            const __m512 w = _mm512_set1_ps(weights[q * PIECE + j]);
#pragma GCC unroll 16
            for (int64_t v = 0; v < V; ++v) sums[q][v] = _mm512_fmadd_ps(w, value[v], sums[q][v]);
        }
    }
#pragma GCC unroll 16
    for (int64_t q = 0; q < Q; ++q)
#pragma GCC unroll 16
        for (int64_t v = 0; v < V; ++v) _mm512_storeu_ps(out + (q * V + v) * LANES, sums[q][v]);
}

thread_local Scratch worker, shared;

// Partial results of one piece: per query its maximum, its sum of weights, and its mix of values.
template <int64_t V>
void piece(const Step &s, const float *query, int64_t q_stride, const float *pool, int64_t task, float *most,
           float *total, float *mixed) {
    const int64_t row = s.rows[task], first = s.firsts[task];
    const int64_t start = s.starts[row], count = s.counts[row];
    const int64_t end = std::min(start + count, first + PIECE), keys = end - first;
    const int64_t d = V * LANES, width = 2 * s.kv_heads * d, queries = count * s.share;
    constexpr int64_t Q = V <= 4 ? 4 : V <= 8 ? 2 : 1;
    const int64_t room = ceil_div(keys, LANES) * LANES;
    char *memory = static_cast<char *>(worker.take(sizeof(float) * queries * PIECE + 3 * sizeof(float *) * PIECE));
    float *weights = reinterpret_cast<float *>(memory);
    const float **entry = reinterpret_cast<const float **>(memory + sizeof(float) * queries * PIECE);
    const float **key = entry + PIECE, **value = key + PIECE;
    const int32_t *table = s.table + row * s.blocks;
    for (int64_t j = 0; j < keys; ++j) {
        const int64_t position = first + j;
        entry[j] = pool + (table[position / s.block_tokens] * s.block_tokens + position % s.block_tokens) * width;
    }
    for (int64_t j = keys; j < room; ++j) entry[j] = entry[keys - 1];
    for (int64_t h = 0; h < s.kv_heads; ++h) {
        for (int64_t j = 0; j < room; ++j) {
            key[j] = entry[j] + h * d;
            value[j] = key[j] + s.kv_heads * d;
        }
        for (int64_t i = 0; i < queries; ++i) {
            const int64_t token = i / s.share, position = start + token;
            const float *q = query + (s.offsets[row] + token) * q_stride + (h * s.share + i % s.share) * d;
            // The keys that this query sees, as a part of the piece.
            const int64_t low = s.window ? std::max<int64_t>(0, position - s.window + 1 - first) : 0;
            const int64_t high = std::min(keys, position + 1 - first);
            float *w = weights + i * PIECE;
            __m512 top = _mm512_set1_ps(NONE);
            const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
            for (int64_t j = 0; j < room; j += LANES) {
                const __m512i at = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int32_t>(j)), lane);
                const __mmask16 seen = _mm512_cmpge_epi32_mask(at, _mm512_set1_epi32(static_cast<int32_t>(low))) &
                                       _mm512_cmplt_epi32_mask(at, _mm512_set1_epi32(static_cast<int32_t>(high)));
                __m512 score = _mm512_set1_ps(NONE);
                if (seen)
                    score = _mm512_mask_mul_ps(score, seen, scores16<V>(q, key + j), _mm512_set1_ps(s.scale));
                _mm512_storeu_ps(w + j, score);
                top = _mm512_max_ps(top, score);
            }
            const float peak = _mm512_reduce_max_ps(top);
            __m512 sum = _mm512_setzero_ps();
            for (int64_t j = 0; j < room; j += LANES) {
                __m512 e = _mm512_setzero_ps();
                const __m512 score = _mm512_loadu_ps(w + j);
                const __mmask16 seen = _mm512_cmp_ps_mask(score, _mm512_set1_ps(NONE), _CMP_GT_OQ);
                if (seen) e = _mm512_maskz_mov_ps(seen, exp16(_mm512_sub_ps(score, _mm512_set1_ps(peak))));
                _mm512_storeu_ps(w + j, e);
                sum = _mm512_add_ps(sum, e);
            }
            most[h * queries + i] = peak;
            total[h * queries + i] = _mm512_reduce_add_ps(sum);
        }
        float *out = mixed + h * queries * d;
        int64_t i = 0;
        for (; i + Q <= queries; i += Q) mix<V, Q>(weights + i * PIECE, value, keys, out + i * d);
        for (; i < queries; ++i) mix<V, 1>(weights + i * PIECE, value, keys, out + i * d);
    }
}

// The pieces of one row, merged in the order of their keys.
void merge(const Step &s, int64_t task, int64_t last, const float *most, const float *total, const float *mixed,
           float *out) {
    const int64_t row = s.rows[task], count = s.counts[row], queries = count * s.share, d = s.d;
    for (int64_t h = 0; h < s.kv_heads; ++h)
        for (int64_t i = 0; i < queries; ++i) {
            const int64_t at = h * queries + i;
            float peak = NONE;
            for (int64_t t = task; t < last; ++t) peak = std::max(peak, most[s.places[t] + at]);
            float sum = 0;
            float *y = out + (s.offsets[row] + i / s.share) * s.kv_heads * s.share * d + (h * s.share + i % s.share) * d;
            for (int64_t k = 0; k < d; ++k) y[k] = 0;
            for (int64_t t = task; t < last; ++t) {
                const int64_t place = s.places[t] + at;
                const float factor = most[place] == NONE ? 0 : std::exp(most[place] - peak);
                sum += factor * total[place];
                const float *x = mixed + place * d;
                for (int64_t k = 0; k < d; ++k) y[k] += factor * x[k];
            }
            const float inverse = 1 / sum;
            for (int64_t k = 0; k < d; ++k) y[k] *= inverse;
        }
}

template <int64_t V> void attend(const Step &s, const float *query, int64_t q_stride, const float *pool, float *out) {
    float *most = static_cast<float *>(shared.take(sizeof(float) * s.queries * (s.d + 2)));
    float *total = most + s.queries, *mixed = total + s.queries;
#pragma omp parallel num_threads(threads) if (s.tasks > 1)
    {
#pragma omp for schedule(dynamic)
        for (int64_t t = 0; t < s.tasks; ++t)
            piece<V>(s, query, q_stride, pool, t, most + s.places[t], total + s.places[t], mixed + s.places[t] * s.d);
#pragma omp for schedule(static) nowait
        for (int64_t t = 0; t < s.tasks; ++t) {
            if (t && s.rows[t] == s.rows[t - 1]) continue;  // the row's first piece merges them all
            int64_t last = t + 1;
            while (last < s.tasks && s.rows[last] == s.rows[t]) ++last;
            merge(s, t, last, most, total, mixed, out);
        }
    }
}

}  // namespace

EXPORT int64_t bien_attention_piece() { return PIECE; }

// query: token i's heads begin at query + i * q_stride; pool [blocks, block_tokens, 2, kv_heads, d];
// out [tokens, heads * d], written where the step's rows are. Returns 0, or 1 for a d that it does not take.
EXPORT int bien_attention(const Step *s, const float *query, int64_t q_stride, const float *pool, float *out) {
    switch (s->d / LANES) {
        case 1: attend<1>(*s, query, q_stride, pool, out); return 0;
        case 2: attend<2>(*s, query, q_stride, pool, out); return 0;
        case 4: attend<4>(*s, query, q_stride, pool, out); return 0;
        case 5: attend<5>(*s, query, q_stride, pool, out); return 0;
        case 6: attend<6>(*s, query, q_stride, pool, out); return 0;
        case 8: attend<8>(*s, query, q_stride, pool, out); return 0;
        case 16: attend<16>(*s, query, q_stride, pool, out); return 0;
        default: return 1;
    }
}
