// y = x @ w.T with int8 weights per output channel and int8 activations per token.
//
// The dot product of VNNI multiplies unsigned by signed bytes. Weights are stored as level + 128, so that a
// token's levels are the signed operand, which an instruction can broadcast; 128 times the sum of a token's
// levels is subtracted at the end. Integers are exact, and the scales are applied in the order of the torch
// kernels: both give the same bits.
#include "common.hpp"

using namespace bien;

namespace {

constexpr int64_t QUAD = 4;        // bytes that one instruction sums per lane
constexpr int64_t PANELS = 2;      // weight panels of a tile
constexpr int64_t ROWS = 12;        // tokens of a tile: 24 accumulators
constexpr int64_t TOKENS = 96;     // tokens that a task takes
constexpr int64_t ALONE = 8;       // fewer tokens are quantized by the calling thread

struct Product {
    const int8_t *x;       // [tokens, depth]
    const int32_t *sum;    // [tokens]
    const float *x_scale;  // [tokens]
    const uint8_t *w;      // [panels, depth / 4, 16, 4]
    const float *w_scale;  // [panels * 16]
    const float *bias;     // [outputs] or null
    float *y;              // [tokens, outputs]
    int64_t depth, outputs;
};

void quantize(const float *x, int64_t width, int64_t depth, int8_t *levels, float *scale, int32_t *sum) {
    __m512 most = _mm512_setzero_ps();
    for (int64_t k = 0; k < width; k += LANES)
        most = _mm512_max_ps(most, _mm512_abs_ps(_mm512_maskz_loadu_ps(head(width - k), x + k)));
    float s = _mm512_reduce_max_ps(most) / 127.0f;
    if (!(s >= 1.17549435e-38f)) s = 1.17549435e-38f;
    const __m512 divisor = _mm512_set1_ps(s);
    __m512i total = _mm512_setzero_si512();
    for (int64_t k = 0; k < depth; k += LANES) {
        const __m512 v = _mm512_div_ps(_mm512_maskz_loadu_ps(head(width - k > 0 ? width - k : 0), x + k), divisor);
        const __m512i q = _mm512_cvtps_epi32(v);
        total = _mm512_add_epi32(total, q);
        _mm_mask_storeu_epi8(levels + k, head(depth - k), _mm512_cvtsepi32_epi8(q));
    }
    *scale = s;
    *sum = _mm512_reduce_add_epi32(total);
}

template <int64_t M, int64_t N> void tile(const Product &p, int64_t token, int64_t panel) {
    __m512i sums[M][N];
#pragma GCC unroll 16
    for (int64_t m = 0; m < M; ++m)
#pragma GCC unroll 16
        for (int64_t n = 0; n < N; ++n) sums[m][n] = _mm512_setzero_si512();
    const uint8_t *w = p.w + panel * p.depth * LANES;
    const int8_t *x = p.x + token * p.depth;
    const int64_t stride = p.depth * LANES;
    for (int64_t k = 0; k < p.depth; k += QUAD) {
        __m512i weights[N];
#pragma GCC unroll 16
        for (int64_t n = 0; n < N; ++n) weights[n] = _mm512_load_si512(w + n * stride + k * LANES);
#pragma GCC unroll 16
        for (int64_t m = 0; m < M; ++m) {
            const __m512i levels = _mm512_set1_epi32(*reinterpret_cast<const int32_t *>(x + m * p.depth + k));
#pragma GCC unroll 16
            for (int64_t n = 0; n < N; ++n) dot(sums[m][n], weights[n], levels);
        }
    }
#pragma GCC unroll 16
    for (int64_t n = 0; n < N; ++n) {
        const int64_t first = (panel + n) * LANES;
        const __mmask16 valid = head(p.outputs - first);
        const __m512 scale = _mm512_loadu_ps(p.w_scale + first);
        const __m512 bias = p.bias ? _mm512_maskz_loadu_ps(valid, p.bias + first) : _mm512_setzero_ps();
#pragma GCC unroll 16
        for (int64_t m = 0; m < M; ++m) {
            const __m512i exact = _mm512_sub_epi32(sums[m][n], _mm512_set1_epi32(128 * p.sum[token + m]));
            __m512 y = _mm512_mul_ps(_mm512_cvtepi32_ps(exact), _mm512_set1_ps(p.x_scale[token + m]));
            y = _mm512_mul_ps(y, scale);
            if (p.bias) y = _mm512_add_ps(y, bias);
            _mm512_mask_storeu_ps(p.y + (token + m) * p.outputs + first, valid, y);
        }
    }
}

template <int64_t M, int64_t N> void rest(const Product &p, int64_t token, int64_t count, int64_t panel) {
    if (count == M) return tile<M, N>(p, token, panel);
    if constexpr (M > 1) rest<M - 1, N>(p, token, count, panel);
}

template <int64_t N> void rows(const Product &p, int64_t token, int64_t end, int64_t panel) {
    for (; token + ROWS <= end; token += ROWS) tile<ROWS, N>(p, token, panel);
    if (token < end) rest<ROWS - 1, N>(p, token, end - token, panel);
}

void block(const Product &p, int64_t token, int64_t end, int64_t panel, int64_t panels) {
    if (panel + 1 < panels)
        rows<2>(p, token, end, panel);
    else
        rows<1>(p, token, end, panel);
}

thread_local Scratch scratch;

}  // namespace

// levels [outputs, width] int8 -> packed [ceil(outputs/16), depth/4, 16, 4], depth = width rounded up to 4.
EXPORT void bien_pack_int8(const int8_t *levels, int64_t outputs, int64_t width, uint8_t *packed) {
    const int64_t depth = ceil_div(width, QUAD) * QUAD, panels = ceil_div(outputs, LANES);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t panel = 0; panel < panels; ++panel)
        for (int64_t k = 0; k < depth; ++k)
            for (int64_t lane = 0; lane < LANES; ++lane) {
                const int64_t n = panel * LANES + lane;
                const int level = n < outputs && k < width ? levels[n * width + k] : 0;
                packed[((panel * depth + k / QUAD * QUAD) * LANES) + lane * QUAD + k % QUAD] =
                    static_cast<uint8_t>(level + 128);
            }
}

// x [tokens, width] with rows `stride` floats apart, w_scale padded to whole panels -> y [tokens, outputs].
EXPORT void bien_linear_int8(const float *x, int64_t stride, int64_t tokens, int64_t width, const uint8_t *packed,
                             const float *w_scale, const float *bias, float *y, int64_t outputs) {
    const int64_t depth = ceil_div(width, QUAD) * QUAD, panels = ceil_div(outputs, LANES);
    char *memory = static_cast<char *>(scratch.take(tokens * (depth + 8) + 64));
    float *x_scale = reinterpret_cast<float *>(memory);
    int32_t *sum = reinterpret_cast<int32_t *>(memory + 4 * tokens);
    int8_t *levels = reinterpret_cast<int8_t *>(memory + 8 * tokens);
    const Product p{levels, sum, x_scale, packed, w_scale, bias, y, depth, outputs};
    const bool alone = tokens < ALONE;
    if (alone)
        for (int64_t m = 0; m < tokens; ++m)
            quantize(x + m * stride, width, depth, levels + m * depth, x_scale + m, sum + m);
#pragma omp parallel num_threads(threads)
    {
        if (!alone) {
#pragma omp for schedule(static)
            for (int64_t m = 0; m < tokens; ++m)
                quantize(x + m * stride, width, depth, levels + m * depth, x_scale + m, sum + m);
        }
        // A thread keeps a block of weights while it goes through the tokens.
#pragma omp for collapse(2) schedule(static) nowait
        for (int64_t panel = 0; panel < panels; panel += PANELS)
            for (int64_t token = 0; token < tokens; token += TOKENS)
                block(p, token, token + TOKENS < tokens ? token + TOKENS : tokens, panel, panels);
    }
}
