// The two formats of 16 bits, one number at a time and, where the CPU has instructions for it, eight at a time.
#pragma once
#include "portable.h"

// x held between -limit and limit, if it is finite.
INLINE real clamp_finite(real x, real limit) { return is_finite(x) ? clamp(x, limit) : x; }

// `rest`, if x is finite, else 0.
INLINE real if_finite(real x, real rest) { return is_finite(x) ? rest : 0; }

#if HOST && defined(__F16C__) && defined(__AVX2__)

INLINE bool has_nan(__m256 x) { return __builtin_expect(_mm256_movemask_ps(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)), 0); }

template <class Format>
static __m128i one_by_one(__m256 x) {
  float from[8];
  typename Format::Bits to[8];
  memcpy(from, &x, sizeof from);
  for (int j = 0; j < 8; ++j) to[j] = Format::round(from[j]);
  return _mm_loadu_si128((const __m128i *)to);
}
template <class Format>
static __m256 one_by_one(__m128i bits) {
  typename Format::Bits from[8];
  float to[8];
  memcpy(from, &bits, sizeof from);
  for (int j = 0; j < 8; ++j) to[j] = (float)Format::widen(from[j]);
  return _mm256_loadu_ps(to);
}

// Eight numbers of a format.  NaN is seldom, and goes one by one: the instructions have rules of their own for it.
template <class Format> struct EightOf;
template <> struct EightOf<Float16> {
  INLINE __m128i round(__m256 x) {
    return has_nan(x) ? one_by_one<Float16>(x) : _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
  }
  INLINE __m256 widen(__m128i bits) {
    const __m256 x = _mm256_cvtph_ps(bits);
    return has_nan(x) ? one_by_one<Float16>(bits) : x;
  }
};
template <> struct EightOf<Bfloat16> {
  INLINE __m128i round(__m256 x) {
    if (has_nan(x)) return one_by_one<Bfloat16>(x);
    const __m256i u = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i upper = _mm256_srli_epi32(up, 16), both = _mm256_packus_epi32(upper, upper);
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(both, 0x08));
  }
  INLINE __m256 widen(__m128i bits) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
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

// body(format, x[i], bits[i], more[i] ...) for the elements i of a chunk; where there are instructions for it, they are
// eight of each, which the format and the functions above know as well.
template <class Format, class X, class Bits, class Body, class... More>
INLINE void each_half(const Chunk &c, X *x, Bits *bits, const Body &body, const More *...more) {
#if HOST
  long long i = c.begin;
#if defined(__F16C__) && defined(__AVX2__)
  if constexpr (sizeof(*x) == sizeof(float))
    for (; i + 8 <= c.end; i += 8) {
      auto eight = load_eight(x + i);
      auto eight_bits = load_eight(bits + i);
      body(EightOf<Format>(), eight, eight_bits, load_eight(more + i)...);
      store_eight(x + i, eight);
      store_eight(bits + i, eight_bits);
    }
#endif
  INDEPENDENT for (; i < c.end; ++i) body(Format(), x[i], bits[i], more[i]...);
#else
  const auto each = [&](long long, int j, X *number, Bits *code, const More *...at) {
    body(Format(), number[j], code[j], at[j]...);
  };
  grid_stride<1>(c.begin, c.end, 0, 1, each, x, bits, more...);
#endif
}
