// CUDA's words for a compiler that does not know them: one thread after the other, for kernels without barriers.
// A test sets who is running and calls the kernel once for every thread of every block.
#pragma once
#define __CUDACC__
#include <cmath>
#include <cstring>

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__  // a thread runs to its end alone

struct Index {
  unsigned x;
};
inline thread_local Index threadIdx, blockIdx, blockDim, gridDim;

static inline unsigned __float_as_uint(float x) { unsigned u; memcpy(&u, &x, sizeof u); return u; }
static inline float __uint_as_float(unsigned u) { float x; memcpy(&x, &u, sizeof x); return x; }
static inline long long __double_as_longlong(double x) { long long u; memcpy(&u, &x, sizeof u); return u; }
static inline unsigned long long atomicAdd(unsigned long long *total, unsigned long long n) {
  const unsigned long long before = *total;
  *total += n;
  return before;
}
