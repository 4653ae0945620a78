// One text, two compilers.  g++ turns each KERNEL into a host function, NVRTC turns it into a __global__; each text is
// compiled once with -Dreal=float and once with -Dreal=double.  This is the only file that knows about either.
#pragma once

#ifndef real
#error "compile with -Dreal=float or -Dreal=double"
#endif

// Elements that one block works on at a time; also the block length of every fixed-order sum.
#define CHUNK 4096

typedef unsigned short half_t;      // the bits of an IEEE binary16
typedef unsigned short bfloat16_t;  // the upper half of an IEEE binary32

// One tensor of a bucket: where it lives, and its place in the bucket's flat arrays.  `first` counts the chunks of all
// members before it; `lr` and `decay` are this tensor's multipliers.  Offsets and sizes are in elements.
struct Member {
  real *data;
  long long offset, size, first;
  double lr, decay;
};

// Chunks [begin, end) of a bucket's members, which are numbered through; never more than there are.
struct Table {
  const Member *rows;
  long long count, begin, end;
};

// Elements [begin, end) of member `row`: the bucket's chunk number `index`.
struct Chunk {
  long long index, row, begin, end;
};

// Null, or a number in the kernel's memory: if it is not 0, the kernel changes nothing that outlasts the step.
typedef const long long *Unless;

#define PASTE_(name, type) name##_##type
#define PASTE(name, type) PASTE_(name, type)

#ifdef __CUDACC__

#define KERNEL(name) extern "C" __global__ void PASTE(name, real)
#define INLINE static __device__ __forceinline__
#define FOR_EACH(i, n)                                                                         \
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < (n);                \
       i += (long long)gridDim.x * blockDim.x)
#define FOR_EACH_COUNTED(i, n) FOR_EACH(i, n)
#define FOR_EACH_IN(i, c) for (long long i = c.begin + threadIdx.x; i < c.end; i += blockDim.x)
#define FOR_EACH_CHUNK(c, table) \
  for (Chunk c = {table.begin + blockIdx.x, 0, 0, 0}; c.index < table.end && find(c, table); c.index += gridDim.x)
#define SCRATCH __shared__  // memory of a block: in FOR_EACH_IN a thread meets only what it wrote itself

INLINE unsigned bits(float x) { return __float_as_uint(x); }
INLINE float value(unsigned u) { return __uint_as_float(u); }
INLINE long long bits(double x) { return __double_as_longlong(x); }
INLINE float root(float x) { return sqrtf(x); }
INLINE double root(double x) { return sqrt(x); }
INLINE void add(long long *total, long long n) {
  if (n) atomicAdd((unsigned long long *)total, (unsigned long long)n);
}

#else

#include <cstring>

#ifdef EVERY_SIMD_LEVEL  // given on the command line, to compile for one level only
#define ONE_SIMD_LEVEL
#elif defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define EVERY_SIMD_LEVEL __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define EVERY_SIMD_LEVEL
#endif
// Of lanes.h: a function that only a CPU with AVX-512 may run.
#if defined(__x86_64__) && defined(__GNUC__) && (defined(__AVX512VL__) || !defined(ONE_SIMD_LEVEL))
#include <immintrin.h>
#define AVX512 __attribute__((target("avx512f,avx512vl")))
#endif
#define KERNEL(name) extern "C" EVERY_SIMD_LEVEL void PASTE(name, real)
#define INLINE static inline __attribute__((always_inline))
// Iterations are independent: an array may be read and written at the same index, never at another.
#ifdef __clang__
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif
#define FOR_EACH(i, n) INDEPENDENT for (long long i = 0; i < (n); ++i)
#define FOR_EACH_COUNTED(i, n) for (long long i = 0; i < (n); ++i)  // iterations that meet in `add`
#define FOR_EACH_IN(i, c) INDEPENDENT for (long long i = c.begin; i < c.end; ++i)
#define FOR_EACH_CHUNK(c, table) for (Chunk c = {table.begin, 0, 0, 0}; c.index < table.end && next(c, table); ++c.index)
#define SCRATCH

INLINE unsigned bits(float x) { unsigned u; memcpy(&u, &x, sizeof u); return u; }
INLINE float value(unsigned u) { float x; memcpy(&x, &u, sizeof x); return x; }
INLINE long long bits(double x) { long long u; memcpy(&u, &x, sizeof u); return u; }
INLINE float root(float x) { return __builtin_sqrtf(x); }
INLINE double root(double x) { return __builtin_sqrt(x); }
INLINE void add(long long *total, long long n) { *total += n; }

#endif

// Let c be the chunk of number `index`: it lies in the last row whose first chunk is not behind it.
INLINE bool find(Chunk &c, const Table &table) {
  long long low = 0, high = table.count;
  while (high - low > 1) {
    const long long middle = (low + high) / 2;
    if (table.rows[middle].first <= c.index) low = middle; else high = middle;
  }
  const Member &m = table.rows[c.row = low];
  c.begin = (c.index - m.first) * CHUNK;
  c.end = c.begin + CHUNK < m.size ? c.begin + CHUNK : m.size;
  return true;
}

// The same from the chunk before, without a search.
INLINE bool next(Chunk &c, const Table &table) {
  if (!c.end) return find(c, table);
  while (c.end == table.rows[c.row].size) ++c.row, c.end = 0;
  c.begin = c.end;
  c.end = c.begin + CHUNK < table.rows[c.row].size ? c.begin + CHUNK : table.rows[c.row].size;
  return true;
}

// |x| as an integer that orders like it; NaN lies above infinity.
INLINE int magnitude(float x) { return bits(x) & 0x7fffffff; }
INLINE long long magnitude(double x) { return bits(x) & 0x7fffffffffffffff; }

// x - x is 0 for every finite x and NaN for the others.
INLINE bool is_finite(real x) { return x - x == 0; }

// NaN stays NaN.
INLINE real clamp(real x, real limit) { return x > limit ? limit : x < -limit ? -limit : x; }

// double -> float rounding to odd, after which a second rounding to 16 bits is as good as one.
INLINE float narrow(float x) { return x; }
INLINE float narrow(double x) {
  const float f = (float)x;
  const unsigned too_far = (f < 0 ? -(double)f : (double)f) > (x < 0 ? -x : x);
  return f == x || x != x ? f : value((bits(f) - too_far) | 1);
}

// Round to nearest even, overflow to infinity, in integers: the same bits from every compiler.
INLINE half_t half_of(real x) {
  const unsigned u = bits(narrow(x)), sign = u >> 16 & 0x8000, magnitude = u & 0x7fffffff;
  const unsigned normal = (magnitude + 0xc8000fff + (magnitude >> 13 & 1)) >> 13;
  const unsigned subnormal = bits(value(magnitude) + 0.5f) - 0x3f000000;  // the adder rounds to multiples of 2^-24
  const unsigned special = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
  return (half_t)(sign | (magnitude >= 0x477ff000 ? special : magnitude < 0x38800000 ? subnormal : normal));
}
INLINE real value_of_half(half_t h) {
  const unsigned magnitude = (unsigned)(h & 0x7fff) << 13, sign = (unsigned)(h & 0x8000) << 16;
  const unsigned special = magnitude | 0x7f800000, finite = bits(value(magnitude) * value(0x77800000));  // times 2^112
  return value(sign | ((h & 0x7c00) == 0x7c00 ? special : finite));
}
INLINE bfloat16_t bfloat16_of(real x) {
  const unsigned u = bits(narrow(x));
  return (bfloat16_t)((u & 0x7fffffff) > 0x7f800000 ? u >> 16 | 0x40 : (u + 0x7fff + (u >> 16 & 1)) >> 16);
}
INLINE real value_of_bfloat16(bfloat16_t b) { return value((unsigned)b << 16); }
