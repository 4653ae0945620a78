// Selection by AVX-512, which compresses: 16 floats or 8 doubles at once, however many of them are taken.  Elsewhere
// select.cu's own loop does the same; the device's compiler never reads this.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && (defined(__AVX512VL__) || !defined(ONE_SIMD_LEVEL))
#include <immintrin.h>
#define AVX512 __attribute__((target("avx512f,avx512vl")))

AVX512 static inline int take_lanes(float *x, const float *add, int i, int bound, int *index, float *entry) {
  const __m512 now = add ? _mm512_add_ps(_mm512_loadu_ps(x + i), _mm512_loadu_ps(add + i)) : _mm512_loadu_ps(x + i);
  const __m512i size = _mm512_and_si512(_mm512_castps_si512(now), _mm512_set1_epi32(0x7fffffff));
  const __m512i order = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __mmask16 taken = _mm512_cmpgt_epi32_mask(size, _mm512_set1_epi32(bound));
  _mm512_storeu_ps(x + i, _mm512_maskz_mov_ps(~taken, now));
  _mm512_storeu_ps(entry, _mm512_maskz_compress_ps(taken, now));
  _mm512_storeu_si512(index, _mm512_maskz_compress_epi32(taken, _mm512_add_epi32(_mm512_set1_epi32(i), order)));
  return __builtin_popcount(taken);
}

AVX512 static inline int take_lanes(double *x, const double *add, int i, long long bound, int *index, double *entry) {
  const __m512d now = add ? _mm512_add_pd(_mm512_loadu_pd(x + i), _mm512_loadu_pd(add + i)) : _mm512_loadu_pd(x + i);
  const __m512i size = _mm512_and_si512(_mm512_castpd_si512(now), _mm512_set1_epi64(0x7fffffffffffffff));
  const __m512i order = _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0);
  const __mmask8 taken = _mm512_cmpgt_epi64_mask(size, _mm512_set1_epi64(bound));
  _mm512_storeu_pd(x + i, _mm512_maskz_mov_pd(~taken, now));
  _mm512_storeu_pd(entry, _mm512_maskz_compress_pd(taken, now));
  const __m512i places = _mm512_maskz_compress_epi64(taken, _mm512_add_epi64(_mm512_set1_epi64(i), order));
  _mm256_storeu_si256((__m256i *)index, _mm512_cvtepi64_epi32(places));
  return __builtin_popcount(taken);
}
#endif
