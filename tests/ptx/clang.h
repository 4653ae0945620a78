// What the texts ask of CUDA, by clang's builtins, without CUDA's headers.
#pragma once
#pragma clang force_cuda_host_device begin  // NVRTC's --device-as-default-execution-space

#define __CUDACC__
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __shared__ __attribute__((shared))
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...) __attribute__((launch_bounds(__VA_ARGS__)))
#define __align__(bytes) __attribute__((aligned(bytes)))

typedef __SIZE_TYPE__ size_t;
struct uint3 { unsigned x, y, z; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };

#define AXIS(name, axis) (unsigned)__nvvm_read_ptx_sreg_##name##_##axis()
#define SPECIAL(name) (uint3{AXIS(name, x), AXIS(name, y), AXIS(name, z)})
#define threadIdx SPECIAL(tid)
#define blockIdx SPECIAL(ctaid)
#define blockDim SPECIAL(ntid)
#define gridDim SPECIAL(nctaid)

#define FUNCTION static __device__ __forceinline__

template <class To, class From>
FUNCTION To bits_as(From x) { return __builtin_bit_cast(To, x); }
FUNCTION unsigned __float_as_uint(float x) { return bits_as<unsigned>(x); }
FUNCTION float __uint_as_float(unsigned x) { return bits_as<float>(x); }
FUNCTION long long __double_as_longlong(double x) { return bits_as<long long>(x); }
FUNCTION double __longlong_as_double(long long x) { return bits_as<double>(x); }

FUNCTION float sqrt(float x) { return __builtin_sqrtf(x); }
FUNCTION double sqrt(double x) { return __builtin_sqrt(x); }
template <class T>
FUNCTION T min(T a, T b) { return b < a ? b : a; }
FUNCTION int __popc(unsigned x) { return __builtin_popcount(x); }
FUNCTION int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
FUNCTION int __ffs(unsigned x) { return __builtin_ffs(x); }
FUNCTION int __ffsll(unsigned long long x) { return __builtin_ffsll(x); }

FUNCTION bool __isGlobal(const void *p) { return __nvvm_isspacep_global(p); }
template <class T>
FUNCTION void __stwb(T *p, T value) { *p = value; }
FUNCTION unsigned long long atomicAdd(unsigned long long *p, unsigned long long n) { return __nvvm_atom_add_gen_ll((long long *)p, n); }
FUNCTION unsigned atomicAdd(unsigned *p, unsigned n) { return __nvvm_atom_add_gen_i((int *)p, n); }
FUNCTION int atomicAdd(int *p, int n) { return __nvvm_atom_add_gen_i(p, n); }

FUNCTION int __syncthreads_or(int mine) { return __nvvm_bar0_or(mine); }
FUNCTION void __syncwarp(unsigned mask = ~0u) { __nvvm_bar_warp_sync(mask); }
FUNCTION void __nanosleep(unsigned ns) { __nvvm_nanosleep(ns); }
FUNCTION bool __any_sync(unsigned mask, bool mine) { return __nvvm_vote_any_sync(mask, mine); }
FUNCTION unsigned __ballot_sync(unsigned mask, bool mine) { return __nvvm_vote_ballot_sync(mask, mine); }

// Words of 32 bits are shuffled one by one.  c: the last lane, of UP the first.
#define SHUFFLE(name, mode, c) \
  template <class T> \
  FUNCTION T name(unsigned mask, T value, int by) { \
    struct Words { int at[sizeof(T) / 4]; } words = bits_as<Words>(value); \
    for (int &word : words.at) word = __nvvm_shfl_sync_##mode##_i32(mask, word, by, c); \
    return bits_as<T>(words); \
  }
SHUFFLE(__shfl_sync, idx, 31)
SHUFFLE(__shfl_xor_sync, bfly, 31)
SHUFFLE(__shfl_up_sync, up, 0)
