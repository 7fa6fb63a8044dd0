// y = x @ w.T with 4-bit weights, w = scale * level + offset per group of a row, and activations that are
// quantized to int8 per group and token on the way (as llama.cpp's Q4_1 x Q8_1 products do).
//
// 16 outputs by 8 inputs are one vector: byte b of a lane holds the levels of inputs b (low) and 4 + b (high).
#include "common.hpp"

using namespace bien;

namespace {

constexpr int64_t OCT = 8;       // inputs of one vector of weights
constexpr int64_t TOKENS = 96;   // tokens that a task takes
constexpr int64_t ALONE = 8;     // fewer tokens are quantized by the calling thread

struct Product {
    const int8_t *x;         // [tokens, depth]
    const float *x_scale;    // [tokens, groups]
    const float *x_sum;      // [tokens, groups]: of the quantized activations
    const uint8_t *w;        // [panels, depth / 8, 64]
    const uint16_t *scales;  // [panels, groups, 2, 16] float16: scale, offset
    const float *bias;       // [outputs] or null
    float *y;                // [tokens, outputs]
    int64_t depth, groups, group, outputs;
};

void quantize(const float *x, int64_t groups, int64_t group, int8_t *levels, float *scale, float *sum) {
    for (int64_t g = 0; g < groups; ++g, x += group, levels += group) {
        __m512 most = _mm512_setzero_ps();
        for (int64_t k = 0; k < group; k += LANES) most = _mm512_max_ps(most, _mm512_abs_ps(_mm512_loadu_ps(x + k)));
        float s = _mm512_reduce_max_ps(most) / 127.0f;
        if (!(s >= 1.17549435e-38f)) s = 1.17549435e-38f;
        const __m512 divisor = _mm512_set1_ps(s);
        __m512i total = _mm512_setzero_si512();
        for (int64_t k = 0; k < group; k += LANES) {
            const __m512i q = _mm512_cvtps_epi32(_mm512_div_ps(_mm512_loadu_ps(x + k), divisor));
            total = _mm512_add_epi32(total, q);
            _mm_storeu_si128(reinterpret_cast<__m128i *>(levels + k), _mm512_cvtsepi32_epi8(q));
        }
        scale[g] = s;
        sum[g] = s * static_cast<float>(_mm512_reduce_add_epi32(total));
    }
}

inline __m512 half16(const uint16_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
}

template <int64_t M, int64_t N> void tile(const Product &p, int64_t token, int64_t panel) {
    __m512 y[M][N];
#pragma GCC unroll 16
    for (int64_t m = 0; m < M; ++m)
#pragma GCC unroll 16
        for (int64_t n = 0; n < N; ++n) y[m][n] = _mm512_setzero_ps();
    const int64_t stride = p.depth * LANES / 2;  // bytes of a panel
    const uint8_t *w = p.w + panel * stride;
    const uint16_t *scales = p.scales + panel * p.groups * 2 * LANES;
    const int8_t *x = p.x + token * p.depth;
    const __m512i nibble = _mm512_set1_epi8(0x0f);
    for (int64_t g = 0; g < p.groups; ++g) {
        __m512i sums[M][N];
#pragma GCC unroll 16
        for (int64_t m = 0; m < M; ++m)
#pragma GCC unroll 16
            for (int64_t n = 0; n < N; ++n) sums[m][n] = _mm512_setzero_si512();
        for (int64_t k = g * p.group; k < (g + 1) * p.group; k += OCT) {
            __m512i low[N], high[N];
#pragma GCC unroll 16
            for (int64_t n = 0; n < N; ++n) {
                const __m512i both = _mm512_load_si512(w + n * stride + k * (LANES / 2));
                low[n] = _mm512_and_si512(both, nibble);
                high[n] = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
            }
#pragma GCC unroll 16
            for (int64_t m = 0; m < M; ++m) {
                const int32_t *levels = reinterpret_cast<const int32_t *>(x + m * p.depth + k);
                const __m512i first = _mm512_set1_epi32(levels[0]), second = _mm512_set1_epi32(levels[1]);
#pragma GCC unroll 16
                for (int64_t n = 0; n < N; ++n) dot(sums[m][n], low[n], first);
#pragma GCC unroll 16
                for (int64_t n = 0; n < N; ++n) dot(sums[m][n], high[n], second);
            }
        }
#pragma GCC unroll 16
        for (int64_t n = 0; n < N; ++n) {
            const uint16_t *of = scales + (n * p.groups + g) * 2 * LANES;
            const __m512 scale = half16(of), offset = half16(of + LANES);
#pragma GCC unroll 16
            for (int64_t m = 0; m < M; ++m) {
                const int64_t at = (token + m) * p.groups + g;
                const __m512 part = _mm512_mul_ps(_mm512_cvtepi32_ps(sums[m][n]), scale);
                y[m][n] = _mm512_fmadd_ps(part, _mm512_set1_ps(p.x_scale[at]), y[m][n]);
                y[m][n] = _mm512_fmadd_ps(offset, _mm512_set1_ps(p.x_sum[at]), y[m][n]);
            }
        }
    }
#pragma GCC unroll 16
    for (int64_t n = 0; n < N; ++n) {
        const int64_t first = (panel + n) * LANES;
        const __mmask16 valid = head(p.outputs - first);
        const __m512 bias = p.bias ? _mm512_maskz_loadu_ps(valid, p.bias + first) : _mm512_setzero_ps();
#pragma GCC unroll 16
        for (int64_t m = 0; m < M; ++m)
            _mm512_mask_storeu_ps(p.y + (token + m) * p.outputs + first, valid, _mm512_add_ps(y[m][n], bias));
    }
}

// Few tokens take many panels at once, many tokens few: the accumulators of both kinds fill the registers.
template <int64_t N> void few(const Product &p, int64_t token, int64_t count, int64_t panel) {
    if (count == 1) tile<1, N>(p, token, panel);
    if (count == 2) tile<2, N>(p, token, panel);
}

template <int64_t N> void rows(const Product &p, int64_t token, int64_t end, int64_t panel) {
    for (; token + 6 <= end; token += 6) tile<6, N>(p, token, panel);
    switch (end - token) {
        case 5: tile<5, N>(p, token, panel); break;
        case 4: tile<4, N>(p, token, panel); break;
        case 3: tile<3, N>(p, token, panel); break;
        case 2: tile<2, N>(p, token, panel); break;
        case 1: tile<1, N>(p, token, panel); break;
        default: break;
    }
}

void block(const Product &p, int64_t token, int64_t end, int64_t panel, int64_t panels) {
    const int64_t count = end - token;
    if (count <= 2) {
        switch (panels - panel) {
            case 3: few<3>(p, token, count, panel); break;
            case 2: few<2>(p, token, count, panel); break;
            case 1: few<1>(p, token, count, panel); break;
            default: few<4>(p, token, count, panel); break;
        }
        return;
    }
    for (int64_t i = panel; i < panel + 4 && i < panels; i += 2) {
        if (i + 1 < panels)
            rows<2>(p, token, end, i);
        else
            rows<1>(p, token, end, i);
    }
}

thread_local Scratch scratch;

}  // namespace

// levels [outputs, depth] of 0..15 -> packed [ceil(outputs/16), depth/8, 64]; depth a multiple of 8.
EXPORT void bien_pack_int4(const uint8_t *levels, int64_t outputs, int64_t depth, uint8_t *packed) {
    const int64_t panels = ceil_div(outputs, LANES);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t panel = 0; panel < panels; ++panel)
        for (int64_t k = 0; k < depth; k += OCT)
            for (int64_t lane = 0; lane < LANES; ++lane)
                for (int64_t b = 0; b < 4; ++b) {
                    const int64_t n = panel * LANES + lane;
                    const uint8_t *of = levels + n * depth + k + b;
                    const unsigned low = n < outputs ? of[0] : 0, high = n < outputs ? of[4] : 0;
                    packed[(panel * depth + k) * (LANES / 2) + lane * 4 + b] = static_cast<uint8_t>(low | high << 4);
                }
}

// x [tokens, depth] with rows `stride` floats apart; group a multiple of 16 that divides depth; scales
// [ceil(outputs/16), depth/group, 2, 16] float16 -> y [tokens, outputs].
EXPORT void bien_linear_int4(const float *x, int64_t stride, int64_t tokens, int64_t depth, int64_t group,
                             const uint8_t *packed, const uint16_t *scales, const float *bias, float *y,
                             int64_t outputs) {
    const int64_t panels = ceil_div(outputs, LANES), groups = depth / group;
    char *memory = static_cast<char *>(scratch.take(tokens * (8 * groups + depth)));
    float *x_scale = reinterpret_cast<float *>(memory);
    float *x_sum = x_scale + tokens * groups;
    int8_t *levels = reinterpret_cast<int8_t *>(x_sum + tokens * groups);
    const Product p{levels, x_scale, x_sum, packed, scales, bias, y, depth, groups, group, outputs};
    const bool alone = tokens < ALONE;
    const auto prepare = [&](int64_t m) {
        quantize(x + m * stride, groups, group, levels + m * depth, x_scale + m * groups, x_sum + m * groups);
    };
    if (alone)
        for (int64_t m = 0; m < tokens; ++m) prepare(m);
#pragma omp parallel num_threads(threads)
    {
        if (!alone) {
#pragma omp for schedule(static)
            for (int64_t m = 0; m < tokens; ++m) prepare(m);
        }
#pragma omp for collapse(2) schedule(static) nowait
        for (int64_t panel = 0; panel < panels; panel += 4)
            for (int64_t token = 0; token < tokens; token += TOKENS)
                block(p, token, token + TOKENS < tokens ? token + TOKENS : tokens, panel, panels);
    }
}
