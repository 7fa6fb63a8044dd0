// What the kernels share: vectors of 16 floats, rows of bytes, scratch memory.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <immintrin.h>
#include <memory>
#include <omp.h>

#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512VNNI__)
#error "the native kernels need AVX-512 with BW and VNNI"
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace bien {

constexpr int64_t LANES = 16;  // floats of a vector; outputs of a weight panel

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int threads = 1;  // of every parallel region; set once by bien_set_threads

// The first `n` of 16 lanes.
inline __mmask16 head(int64_t n) { return n >= LANES ? 0xffff : static_cast<__mmask16>((1u << n) - 1); }

// Memory of one calling thread that is used again by every later call of it; 64-byte aligned.
class Scratch {
  public:
    void *take(std::size_t bytes) {
        if (bytes > size_) {
            size_ = (bytes + 4095) & ~std::size_t{4095};
            memory_.reset(std::aligned_alloc(64, size_));
            if (!memory_) std::abort();  // nothing can be thrown through a C interface
        }
        return memory_.get();
    }

  private:
    struct Free {
        void operator()(void *p) const { std::free(p); }
    };
    std::size_t size_ = 0;
    std::unique_ptr<void, Free> memory_;
};

// sums += the dot products of 16 times 4 unsigned and signed bytes, in place: gcc 12 moves the accumulators of
// the intrinsic to and fro, which takes twice the time.
inline void dot(__m512i &sums, __m512i unsigned_bytes, __m512i signed_bytes) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(unsigned_bytes), "v"(signed_bytes));
}

// exp of 16 floats to about 1 ulp: 2^n times a polynomial of degree 6 on [-ln2/2, ln2/2]. -inf gives 0.
inline __m512 exp16(__m512 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-104.0f));
    x = _mm512_min_ps(x, _mm512_set1_ps(88.7f));
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.0f / 720);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 120));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 24));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 6));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

}  // namespace bien
