// The platform of a host: g++ or clang++.  A host thread is all of a grid, so that barriers are nothing, and what a
// block shares are plain variables.
#pragma once

#define HOST 1
#include <cmath>
#include <cstring>

#if defined(__F16C__) || defined(__AVX512VL__)
#include <immintrin.h>
#endif

#define KERNEL(name) extern "C" void PASTE(name, real)
#define INLINE static inline __attribute__((always_inline))
// Iterations are independent: an array may be read and written at the same index, never at another.
#ifdef __clang__
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#define NO_UNROLL
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#define NO_UNROLL _Pragma("GCC unroll 1")  // a short loop that is taken apart does not become vectors
#endif
#define FOR_EACH(i, n, ...) INDEPENDENT for (long long i = 0; i < (n); ++i)
#define FOR_EACH_IN(i, c, ...) INDEPENDENT for (long long i = c.begin; i < c.end; ++i)
#define FOR_EACH_CHUNK(c, table) \
  for (Chunk c = {table.begin, 0, 0, 0}; c.index < table.end && next(c, table); ++c.index)
#define FOR_EACH_PIECE(c, n) \
  for (Chunk c = {0, 0, 0, 0}; c.index * CHUNK < (n) && begin_at(c, c.index * CHUNK, n); ++c.index)
#define FOR_EACH_MEMBER(m, table) for (long long m = 0; m < table.count; ++m)
#define FOR_EACH_IN_BLOCK(i, begin, end) INDEPENDENT for (long long i = (begin); i < (end); ++i)
#define BODY(i, ...) [&](long long i)
#define SHARED

using std::sqrt;

INLINE unsigned float_as_uint(float x) { unsigned u; memcpy(&u, &x, sizeof u); return u; }
INLINE float uint_as_float(unsigned u) { float x; memcpy(&x, &u, sizeof x); return x; }
INLINE long long double_as_longlong(double x) { long long u; memcpy(&u, &x, sizeof u); return u; }
INLINE double longlong_as_double(long long u) { double x; memcpy(&x, &u, sizeof x); return x; }
INLINE long long min(long long a, long long b) { return a < b ? a : b; }
INLINE int popcount(unsigned long long x) { return __builtin_popcountll(x); }
INLINE int countr_zero(unsigned long long x) { return __builtin_ctzll(x); }

template <class T>
INLINE T *assume_global(T *p) { return p; }

INLINE void block_sync() {}
INLINE bool block_or(bool mine) { return mine; }
INLINE bool is_block_leader() { return true; }

INLINE void atomic_add(long long *total, long long n) { *total += n; }
