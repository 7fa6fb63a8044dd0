// What happens to each token on its own: norm, rotation, activation, the write into the KV pool.
#include "common.hpp"
#include <cmath>
#include <cstring>

using namespace bien;

namespace {

constexpr int64_t WORTH = 1 << 17;  // elements for which it is worth waking other threads

void norm(const float *x, const float *weight, float eps, float *y, int64_t width) {
    __m512 squares = _mm512_setzero_ps();
    for (int64_t k = 0; k < width; k += LANES) {
        const __m512 v = _mm512_maskz_loadu_ps(head(width - k), x + k);
        squares = _mm512_fmadd_ps(v, v, squares);
    }
    const float mean = _mm512_reduce_add_ps(squares) / static_cast<float>(width);
    const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(mean + eps));
    for (int64_t k = 0; k < width; k += LANES) {
        const __mmask16 valid = head(width - k);
        const __m512 v = _mm512_mul_ps(_mm512_maskz_loadu_ps(valid, x + k), scale);
        _mm512_mask_storeu_ps(y + k, valid, _mm512_mul_ps(v, _mm512_maskz_loadu_ps(valid, weight + k)));
    }
}

}  // namespace

EXPORT void bien_set_threads(int64_t count) { threads = static_cast<int>(count); }

// y[i] = x[i] / sqrt(mean(x[i]^2) + eps) * weight; x and y [tokens, width].
EXPORT void bien_rms_norm(const float *x, const float *weight, float eps, float *y, int64_t tokens, int64_t width) {
#pragma omp parallel for num_threads(threads) schedule(static) if (tokens * width >= WORTH)
    for (int64_t i = 0; i < tokens; ++i) norm(x + i * width, weight, eps, y + i * width, width);
}

// sum = x + update, y = norm(sum); all [tokens, width]; sum may be x.
EXPORT void bien_add_rms_norm(const float *x, const float *update, const float *weight, float eps, float *sum, float *y,
                              int64_t tokens, int64_t width) {
#pragma omp parallel for num_threads(threads) schedule(static) if (tokens * width >= WORTH)
    for (int64_t i = 0; i < tokens; ++i) {
        const int64_t at = i * width;
        for (int64_t k = 0; k < width; ++k) sum[at + k] = x[at + k] + update[at + k];
        norm(sum + at, weight, eps, y + at, width);
    }
}

// y = silu(gate) * up; gate_up [tokens, 2 * width] = gate then up.
EXPORT void bien_silu_mul(const float *gate_up, float *y, int64_t tokens, int64_t width) {
#pragma omp parallel for num_threads(threads) schedule(static) if (4 * tokens * width >= WORTH)
    for (int64_t i = 0; i < tokens; ++i) {
        const float *gate = gate_up + 2 * i * width, *up = gate + width;
        for (int64_t k = 0; k < width; k += LANES) {
            const __mmask16 valid = head(width - k);
            const __m512 g = _mm512_maskz_loadu_ps(valid, gate + k), u = _mm512_maskz_loadu_ps(valid, up + k);
            const __m512 below = _mm512_add_ps(_mm512_set1_ps(1), exp16(_mm512_sub_ps(_mm512_setzero_ps(), g)));
            _mm512_mask_storeu_ps(y + i * width + k, valid, _mm512_mul_ps(_mm512_div_ps(g, below), u));
        }
    }
}

// Rotate pairs in place: x [tokens, heads, d] with tokens `stride` floats apart, angles [tokens, d/2, 2] = cos, sin.
EXPORT void bien_rope(float *x, int64_t stride, const float *angles, int64_t tokens, int64_t heads, int64_t d) {
#pragma omp parallel for num_threads(threads) schedule(static) if (tokens * heads * d >= WORTH)
    for (int64_t i = 0; i < tokens; ++i) {
        const float *turn = angles + i * d;
        for (int64_t h = 0; h < heads; ++h) {
            float *v = x + i * stride + h * d;
            for (int64_t k = 0; k < d; k += LANES) {
                const __mmask16 valid = head(d - k);
                const __m512 a = _mm512_maskz_loadu_ps(valid, v + k), t = _mm512_maskz_loadu_ps(valid, turn + k);
                const __m512 swapped = _mm512_permute_ps(a, 0xb1), c = _mm512_moveldup_ps(t), s = _mm512_movehdup_ps(t);
                // even lanes: a c - b s, odd lanes: b c + a s
                _mm512_mask_storeu_ps(v + k, valid, _mm512_fmaddsub_ps(a, c, _mm512_mul_ps(swapped, s)));
            }
        }
    }
}

// pool[entries[i]] = kv[i]: pool [.., width], kv [tokens, width] with tokens `stride` floats apart.
EXPORT void bien_write_kv(float *pool, const float *kv, int64_t stride, const int64_t *entries, int64_t tokens,
                          int64_t width) {
#pragma omp parallel for num_threads(threads) schedule(static) if (tokens * width >= 2 * WORTH)
    for (int64_t i = 0; i < tokens; ++i)
        std::memcpy(pool + entries[i] * width, kv + i * stride, static_cast<std::size_t>(width) * sizeof(float));
}
