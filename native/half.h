// The two formats of 16 bits, one number at a time and, where the CPU has instructions for it, eight at a time.
#pragma once
#include "portable.h"

struct Float16 {
  typedef half_t Bits;
  enum { HAS_EIGHTS = sizeof(real) == sizeof(float) };
  INLINE Bits of(real x) { return half_of(x); }
  INLINE real value(Bits h) { return value_of_half(h); }
};
struct Brain16 {
  typedef bfloat16_t Bits;
  enum { HAS_EIGHTS = 0 };  // a compiler finds them by itself
  INLINE Bits of(real x) { return bfloat16_of(x); }
  INLINE real value(Bits b) { return value_of_bfloat16(b); }
};

// x held between -limit and limit, if it is finite.
INLINE real clamp_finite(real x, real limit) { return is_finite(x) ? clamp(x, limit) : x; }

// `rest`, if x is finite, else 0.
INLINE real if_finite(real x, real rest) { return is_finite(x) ? rest : 0; }

#if HOST && defined(__F16C__)

// The instructions round as half_of does, but for NaN, which is seldom and goes one by one.
struct EightOfFloat16 {
  INLINE bool has_nan(__m256 x) { return _mm256_movemask_ps(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)) != 0; }
  INLINE __m128i of(__m256 x) {
    if (__builtin_expect(has_nan(x), 0)) return one_by_one(x);
    return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
  }
  INLINE __m256 value(__m128i h) {
    const __m256 x = _mm256_cvtph_ps(h);
    return __builtin_expect(has_nan(x), 0) ? one_by_one(h) : x;
  }
  static __m128i one_by_one(__m256 x) {
    float from[8];
    half_t to[8];
    memcpy(from, &x, sizeof from);
    for (int j = 0; j < 8; ++j) to[j] = half_of((real)from[j]);
    return _mm_loadu_si128((const __m128i *)to);
  }
  static __m256 one_by_one(__m128i h) {
    half_t from[8];
    float to[8];
    memcpy(from, &h, sizeof from);
    for (int j = 0; j < 8; ++j) to[j] = (float)value_of_half(from[j]);
    return _mm256_loadu_ps(to);
  }
};
INLINE __m256 finite_lanes(__m256 x) { return _mm256_cmp_ps(x - x, _mm256_setzero_ps(), _CMP_EQ_OQ); }
INLINE __m256 clamp_finite(__m256 x, float limit) {
  const __m256 held = _mm256_max_ps(_mm256_min_ps(x, _mm256_set1_ps(limit)), _mm256_set1_ps(-limit));
  return _mm256_blendv_ps(x, held, finite_lanes(x));
}
INLINE __m256 if_finite(__m256 x, __m256 rest) { return _mm256_and_ps(finite_lanes(x), rest); }

INLINE __m256 load_eight(const float *x) { return _mm256_loadu_ps(x); }
INLINE __m128i load_eight(const half_t *h) { return _mm_loadu_si128((const __m128i *)h); }
INLINE void store_eight(float *x, __m256 eight) { _mm256_storeu_ps(x, eight); }
INLINE void store_eight(half_t *h, __m128i eight) { _mm_storeu_si128((__m128i *)h, eight); }
INLINE void store_eight(const float *, __m256) {}
INLINE void store_eight(const half_t *, __m128i) {}

#endif

// body(format, x[i], bits[i]) for the elements i of a chunk; where there are instructions for it, x[i] and bits[i] are
// eight of each, which the format and the functions above know as well.
template <class Format, class X, class Bits, class Body>
INLINE void each_half(const Chunk &c, X *x, Bits *bits, const Body &body) {
#if HOST
  long long i = c.begin;
#ifdef __F16C__
  if constexpr (Format::HAS_EIGHTS)
    for (; i + 8 <= c.end; i += 8) {
      auto eight = load_eight(x + i);
      auto eight_bits = load_eight(bits + i);
      body(EightOfFloat16(), eight, eight_bits);
      store_eight(x + i, eight);
      store_eight(bits + i, eight_bits);
    }
#endif
  INDEPENDENT for (; i < c.end; ++i) body(Format(), x[i], bits[i]);
#else
  FOR_EACH_IN(i, c, x, bits) { body(Format(), x[i], bits[i]); };
#endif
}
