// Numbers: comparisons by bits, conversions that round the same on every platform, and random bits.
#pragma once

// |x| as an integer that orders like it, and back; NaN lies above infinity.
INLINE int magnitude(float x) { return float_as_uint(x) & 0x7fffffff; }
INLINE long long magnitude(double x) { return double_as_longlong(x) & 0x7fffffffffffffff; }
typedef decltype(magnitude((real)0)) Magnitude;
INLINE float of_magnitude(int size) { return uint_as_float((unsigned)size); }
INLINE double of_magnitude(long long size) { return longlong_as_double(size); }

// [x - x is 0 for every finite x and NaN for the others]
INLINE bool is_finite(real x) { return x - x == 0; }

// Is |x| at most so much?  NaN is not.
INLINE bool within(real x, real most) { return (x <= most) & (x >= -most); }

INLINE double squared(real x) { return (double)x * (double)x; }

// NaN stays NaN.
INLINE real clamp(real x, real limit) { return x > limit ? limit : x < -limit ? -limit : x; }

// double -> float rounding to odd, after which a second rounding to 16 bits is as good as one (Boldo and Melquiond,
// "When double rounding is odd", 2005).
INLINE float narrow(float x) { return x; }
INLINE float narrow(double x) {
  const float f = (float)x;
  const unsigned too_far = (f < 0 ? -(double)f : (double)f) > (x < 0 ? -x : x);
  return f == x || x != x ? f : uint_as_float((float_as_uint(f) - too_far) | 1);
}

// What a number may be stored as.  `round` goes to the nearest, ties to even, and overflow to infinity; 16 bits are
// made and read in integers, so that every compiler makes the same bits.
struct Wide {
  typedef real Bits;
  INLINE Bits round(real x) { return x; }
  INLINE real widen(Bits x) { return x; }
};
struct Float16 {
  typedef half_t Bits;
  INLINE Bits round(real x) {
    const unsigned u = float_as_uint(narrow(x)), sign = u >> 16 & 0x8000, magnitude = u & 0x7fffffff;
    const unsigned normal = (magnitude + 0xc8000fff + (magnitude >> 13 & 1)) >> 13;
    // [the adder rounds to multiples of 2^-24]
    const unsigned subnormal = float_as_uint(uint_as_float(magnitude) + 0.5f) - 0x3f000000;
    const unsigned special = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
    return (Bits)(sign | (magnitude >= 0x477ff000 ? special : magnitude < 0x38800000 ? subnormal : normal));
  }
  INLINE real widen(Bits h) {
    const unsigned magnitude = (unsigned)(h & 0x7fff) << 13, sign = (unsigned)(h & 0x8000) << 16;
    const unsigned special = magnitude | 0x7f800000;
    const unsigned finite = float_as_uint(uint_as_float(magnitude) * uint_as_float(0x77800000));  // times 2^112
    return uint_as_float(sign | ((h & 0x7c00) == 0x7c00 ? special : finite));
  }
};
struct Bfloat16 {
  typedef bfloat16_t Bits;
  INLINE Bits round(real x) {
    const unsigned u = float_as_uint(narrow(x));
    return (Bits)((u & 0x7fffffff) > 0x7f800000 ? u >> 16 | 0x40 : (u + 0x7fff + (u >> 16 & 1)) >> 16);
  }
  INLINE real widen(Bits b) { return uint_as_float((unsigned)b << 16); }
};

// SplitMix64 (Steele et al., 2014) of a key and a number, as `random_key` has it.
INLINE Word64 mixed(Word64 key, Word64 number) {
  key += number + 0x9e3779b97f4a7c15ull;
  key = (key ^ key >> 30) * 0xbf58476d1ce4e5b9ull;
  key = (key ^ key >> 27) * 0x94d049bb133111ebull;
  return key ^ key >> 31;
}
