// The search of topk_host.cu in vectors, on a host with AVX-512: only that has an instruction that compresses a vector.
#pragma once
#include "portable.h"

#ifdef __AVX512VL__

static inline __mmask16 sixteen_above(float *x, const float *add, int bound) {
  const __m512 sum = add ? _mm512_add_ps(_mm512_loadu_ps(x), _mm512_loadu_ps(add)) : _mm512_loadu_ps(x);
  const __m512i size = _mm512_and_si512(_mm512_castps_si512(sum), _mm512_set1_epi32(0x7fffffff));
  _mm512_storeu_ps(x, sum);
  return _mm512_cmpgt_epi32_mask(size, _mm512_set1_epi32(bound));
}

static inline __mmask8 eight_above(double *x, const double *add, long long bound) {
  const __m512d sum = add ? _mm512_add_pd(_mm512_loadu_pd(x), _mm512_loadu_pd(add)) : _mm512_loadu_pd(x);
  const __m512i size = _mm512_and_si512(_mm512_castpd_si512(sum), _mm512_set1_epi64(0x7fffffffffffffff));
  _mm512_storeu_pd(x, sum);
  return _mm512_cmpgt_epi64_mask(size, _mm512_set1_epi64(bound));
}

static inline __mmask16 sixteen_above(double *x, const double *add, long long bound) {
  return _mm512_kunpackb(eight_above(x + 8, add ? add + 8 : 0, bound), eight_above(x, add, bound));
}

static inline long long write_indices(__mmask16 above, long long first, int *index) {
  const __m512i order = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i places = _mm512_add_epi32(_mm512_set1_epi32((int)first), order);
  _mm512_storeu_si512(index, _mm512_maskz_compress_epi32(above, places));
  return __builtin_popcount(above);
}

// [begin, end) is a multiple of 32.
static long long find_by_32(real *x, const real *add, long long begin, long long end, long long bound, int *index) {
  long long held = 0;
  for (long long i = begin; i < end; i += 32) {
    const __mmask16 low = sixteen_above(x + i, add ? add + i : 0, bound);
    const __mmask16 high = sixteen_above(x + i + 16, add ? add + i + 16 : 0, bound);
    if (!(low | high) & (256 * held <= i - begin)) continue;  // a branch where few are above, none where many are
    held += write_indices(low, i, index + held);
    held += write_indices(high, i + 16, index + held);
  }
  return held;
}

// As find_above; i goes from where to begin to where the vectors end.
INLINE long long find_in_lanes(real *x, const real *add, long long &i, long long end, long long bound, int *index) {
  const long long begin = i;
  i = end - (end - begin) % 32;
  return find_by_32(x, add, begin, i, bound, index);
}

#else
INLINE long long find_in_lanes(real *, const real *, long long &, long long, long long, int *) { return 0; }
#endif
