// Softmax attention of rows of many tokens over the paged KV pool: tiles of queries against tiles of keys, with
// a running maximum (Dao et al., "FlashAttention", 2022). No mask is stored, and tiles that nobody sees are
// not computed. Key tiles begin at multiples of their size, whatever the chunk: only how a prompt is cut into
// chunks decides which queries share a tile, and that changes no sum.
#include "attention.hpp"
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

using namespace bien;

namespace {

constexpr int64_t KEYS = 64;     // of a tile: four vectors of scores
constexpr int64_t QUERIES = 96;  // rows of a tile, query heads of one KV head among them
constexpr float NONE = -std::numeric_limits<float>::infinity();

struct Task {
    int64_t row, head, first, tokens;  // sequence, KV head, first token of the row, tokens
};

// 16 rows of 16 floats, `stride` apart, as columns: out[k * KEYS + j] = rows[j][k].
inline void transpose16(const float *const *rows, float *out) {
    __m512 r[16], t[16];
    for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_ps(rows[i]);
    for (int i = 0; i < 8; ++i) {
        t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; ++i) {
        const __m512d a = _mm512_castps_pd(t[4 * i]), b = _mm512_castps_pd(t[4 * i + 1]);
        const __m512d c = _mm512_castps_pd(t[4 * i + 2]), d = _mm512_castps_pd(t[4 * i + 3]);
        r[4 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
        r[4 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
        r[4 * i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
        r[4 * i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
    }
    for (int i = 0; i < 4; ++i) {
        t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; ++i) {
        _mm512_storeu_ps(out + i * KEYS, _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88));
        _mm512_storeu_ps(out + (i + 8) * KEYS, _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd));
        _mm512_storeu_ps(out + (i + 4) * KEYS, _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88));
        _mm512_storeu_ps(out + (i + 12) * KEYS, _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd));
    }
}

// scores[m][j] = queries[m] . keys[j] for M queries and a tile of transposed keys.
template <int64_t M> inline void score(const float *queries, int64_t d, const float *keys, float *scores) {
    __m512 sums[M][4];
#pragma GCC unroll 16
    for (int64_t m = 0; m < M; ++m)
#pragma GCC unroll 16
        for (int64_t v = 0; v < 4; ++v) sums[m][v] = _mm512_setzero_ps();
    for (int64_t k = 0; k < d; ++k) {
        __m512 key[4];
#pragma GCC unroll 16
        for (int64_t v = 0; v < 4; ++v) key[v] = _mm512_load_ps(keys + k * KEYS + v * LANES);
#pragma GCC unroll 16
        for (int64_t m = 0; m < M; ++m) {
            const __m512 q = _mm512_set1_ps(queries[m * d + k]);
#pragma GCC unroll 16
            for (int64_t v = 0; v < 4; ++v) sums[m][v] = _mm512_fmadd_ps(q, key[v], sums[m][v]);
        }
    }
#pragma GCC unroll 16
    for (int64_t m = 0; m < M; ++m)
#pragma GCC unroll 16
        for (int64_t v = 0; v < 4; ++v) _mm512_store_ps(scores + m * KEYS + v * LANES, sums[m][v]);
}

// mixed[m] = mixed[m] * fade[m] + sum of weights[m][j] * values[j], for M queries and `keys` values.
template <int64_t M, int64_t V>
inline void mix(const float *weights, const float *const *values, int64_t keys, const float *fade, float *mixed) {
    __m512 sums[M][V];
#pragma GCC unroll 32
    for (int64_t m = 0; m < M; ++m)
#pragma GCC unroll 32
        for (int64_t v = 0; v < V; ++v)
            sums[m][v] = _mm512_mul_ps(_mm512_load_ps(mixed + (m * V + v) * LANES), _mm512_set1_ps(fade[m]));
    for (int64_t j = 0; j < keys; ++j) {
        __m512 value[V];
#pragma GCC unroll 32
        for (int64_t v = 0; v < V; ++v) value[v] = _mm512_loadu_ps(values[j] + v * LANES);
#pragma GCC unroll 32
        for (int64_t m = 0; m < M; ++m) {
            const __m512 w = _mm512_set1_ps(weights[m * KEYS + j]);
#pragma GCC unroll 32
            for (int64_t v = 0; v < V; ++v) sums[m][v] = _mm512_fmadd_ps(w, value[v], sums[m][v]);
        }
    }
#pragma GCC unroll 32
    for (int64_t m = 0; m < M; ++m)
#pragma GCC unroll 32
        for (int64_t v = 0; v < V; ++v) _mm512_store_ps(mixed + (m * V + v) * LANES, sums[m][v]);
}

thread_local Scratch worker;

// Softmax weights of one query's scores of a tile, those of positions low..high; updates its maximum and sum.
inline float weigh(float *scores, int64_t low, int64_t high, float *peak, float *sum) {
    __m512 s[4], top = _mm512_set1_ps(*peak);
    for (int v = 0; v < 4; ++v) {
        s[v] = _mm512_load_ps(scores + v * LANES);
        if (low > 0 || high < KEYS) {
            const int64_t first = v * LANES;
            const __mmask16 seen = head(std::max<int64_t>(0, high - first)) & ~head(std::max<int64_t>(0, low - first));
            s[v] = _mm512_mask_mov_ps(_mm512_set1_ps(NONE), seen, s[v]);
        }
        top = _mm512_max_ps(top, s[v]);
    }
    const float now = _mm512_reduce_max_ps(top);
    if (now == NONE) {  // nothing is seen yet
        for (int v = 0; v < 4; ++v) _mm512_store_ps(scores + v * LANES, _mm512_setzero_ps());
        return 1;
    }
    __m512 total = _mm512_setzero_ps();
    for (int v = 0; v < 4; ++v) {
        const __mmask16 seen = _mm512_cmp_ps_mask(s[v], _mm512_set1_ps(NONE), _CMP_GT_OQ);
        const __m512 e = _mm512_maskz_mov_ps(seen, exp16(_mm512_sub_ps(s[v], _mm512_set1_ps(now))));
        _mm512_store_ps(scores + v * LANES, e);
        total = _mm512_add_ps(total, e);
    }
    const float fade = *peak == NONE ? 0 : std::exp(*peak - now);
    *sum = *sum * fade + _mm512_reduce_add_ps(total);
    *peak = now;
    return fade;
}

template <int64_t V>
void tile(const Step &s, const Task &t, const float *query, int64_t q_stride, const float *pool, float *out) {
    constexpr int64_t d = V * LANES, MANY = V <= 4 ? 6 : V <= 6 ? 4 : V <= 8 ? 3 : 1;
    const int64_t width = 2 * s.kv_heads * d, share = s.share, queries = t.tokens * share;
    const int64_t start = s.starts[t.row] + t.first, end = start + t.tokens;
    const int64_t flat = s.offsets[t.row] + t.first;
    const int64_t room = ceil_div(queries, 6) * 6;
    float *memory = static_cast<float *>(
        worker.take(sizeof(float) * (KEYS * d + room * (2 * d + KEYS) + 3 * room + 64) + 2 * sizeof(float *) * KEYS));
    float *keys = memory, *rows = keys + KEYS * d, *mixed = rows + room * d, *scores = mixed + room * d;
    float *peak = scores + room * KEYS, *sum = peak + room, *fade = sum + room;
    const float **key = reinterpret_cast<const float **>(
        (reinterpret_cast<uintptr_t>(fade + room) + 63) & ~uintptr_t{63});
    const float **value = key + KEYS;
    for (int64_t i = 0; i < room; ++i) {
        const int64_t q = std::min(i, queries - 1);  // the last ones again, into rows that nobody reads
        const float *from = query + (flat + q / share) * q_stride + (t.head * share + q % share) * d;
        for (int64_t k = 0; k < d; ++k) rows[i * d + k] = from[k] * s.scale;
        for (int64_t k = 0; k < d; ++k) mixed[i * d + k] = 0;
        peak[i] = NONE;
        sum[i] = 0;
    }
    const int32_t *table = s.table + t.row * s.blocks;
    const int64_t begin = s.window ? std::max<int64_t>(0, start - s.window + 1) / KEYS * KEYS : 0;
    for (int64_t first = begin; first < end; first += KEYS) {
        const int64_t held = std::min(KEYS, end - first);
        for (int64_t j = 0; j < KEYS; ++j) {
            const int64_t position = first + std::min(j, held - 1);
            const int64_t entry = int64_t{table[position / s.block_tokens]} * s.block_tokens + position % s.block_tokens;
            key[j] = pool + entry * width + t.head * d;
            value[j] = key[j] + s.kv_heads * d;
        }
        for (int64_t j = 0; j < KEYS; j += LANES)
            for (int64_t k = 0; k < d; k += LANES) {
                const float *corner[16];
                for (int i = 0; i < 16; ++i) corner[i] = key[j + i] + k;
                transpose16(corner, keys + k * KEYS + j);
            }
        for (int64_t i = 0; i < room; i += 6) score<6>(rows + i * d, d, keys, scores + i * KEYS);
        for (int64_t i = 0; i < queries; ++i) {
            const int64_t position = start + i / share;
            const int64_t low = s.window ? position - s.window + 1 - first : 0;
            fade[i] = weigh(scores + i * KEYS, low, std::min(held, position + 1 - first), peak + i, sum + i);
        }
        int64_t i = 0;
        for (; i + MANY <= queries; i += MANY) mix<MANY, V>(scores + i * KEYS, value, held, fade + i, mixed + i * d);
        for (; i < queries; ++i) mix<1, V>(scores + i * KEYS, value, held, fade + i, mixed + i * d);
    }
    for (int64_t i = 0; i < queries; ++i) {
        float *y = out + (flat + i / share) * s.kv_heads * share * d + (t.head * share + i % share) * d;
        const float inverse = 1 / sum[i];
        for (int64_t k = 0; k < d; ++k) y[k] = mixed[i * d + k] * inverse;
    }
}

thread_local std::vector<Task> tasks;

template <int64_t V> void attend(const Step &s, const float *query, int64_t q_stride, const float *pool, float *out) {
    const int64_t each = std::max<int64_t>(1, QUERIES / s.share);
    tasks.clear();
    for (int64_t i = 0; i < s.long_rows; ++i) {
        const int64_t count = s.counts[s.longs[i]];
        // The last tokens see most: the longest tasks come first.
        for (int64_t first = (count - 1) / each * each; first >= 0; first -= each)
            for (int64_t h = 0; h < s.kv_heads; ++h)
                tasks.push_back({s.longs[i], h, first, std::min(each, count - first)});
    }
    const Task *all = tasks.data();
    const int64_t count = static_cast<int64_t>(tasks.size());
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t i = 0; i < count; ++i) tile<V>(s, all[i], query, q_stride, pool, out);
}

}  // namespace

// As bien_attention, of the sequences s->longs.
EXPORT int bien_attention_long(const Step *s, const float *query, int64_t q_stride, const float *pool, float *out) {
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
