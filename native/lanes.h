// The comparison of select.cu for AVX-512, which compresses: 16 floats or 8 doubles at once, however many of them are
// above the bound.  The host's compiler alone reads this; for other CPUs select.cu has a loop of its own.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && (defined(__AVX512VL__) || !defined(ONE_SIMD_LEVEL))
#include <immintrin.h>
#define AVX512 __attribute__((target("avx512f,avx512vl")))
#define LANES (long long)(64 / sizeof(real))

AVX512 static inline int lanes_above(float *x, const float *add, int i, int bound, int *index) {
  const __m512i order = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512 sum = add ? _mm512_add_ps(_mm512_loadu_ps(x + i), _mm512_loadu_ps(add + i)) : _mm512_loadu_ps(x + i);
  const __m512i size = _mm512_and_si512(_mm512_castps_si512(sum), _mm512_set1_epi32(0x7fffffff));
  const __mmask16 above = _mm512_cmpgt_epi32_mask(size, _mm512_set1_epi32(bound));
  _mm512_storeu_ps(x + i, sum);
  _mm512_storeu_si512(index, _mm512_maskz_compress_epi32(above, _mm512_add_epi32(_mm512_set1_epi32(i), order)));
  return __builtin_popcount(above);
}

AVX512 static inline int lanes_above(double *x, const double *add, int i, long long bound, int *index) {
  const __m512i order = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7);
  const __m512d sum = add ? _mm512_add_pd(_mm512_loadu_pd(x + i), _mm512_loadu_pd(add + i)) : _mm512_loadu_pd(x + i);
  const __m512i size = _mm512_and_si512(_mm512_castpd_si512(sum), _mm512_set1_epi64(0x7fffffffffffffff));
  const __mmask8 above = _mm512_cmpgt_epi64_mask(size, _mm512_set1_epi64(bound));
  const __m512i places = _mm512_maskz_compress_epi64(above, _mm512_add_epi64(_mm512_set1_epi64(i), order));
  _mm512_storeu_pd(x + i, sum);
  _mm256_storeu_si256((__m256i *)index, _mm512_cvtepi64_epi32(places));
  return __builtin_popcount(above);
}

// [begin, end) is a whole number of vectors.  [not inlined: the callers are compiled for other CPUs too]
AVX512 __attribute__((noinline)) static long long vectors_above(real *x, const real *add, long long begin, long long end, long long bound, int *index) {
  long long held = 0;
  for (long long i = begin; i < end; i += LANES) held += lanes_above(x, add, (int)i, bound, index + held);
  return held;
}
#endif
