// The platform of a GPU: NVRTC, or anything else that knows CUDA.
#pragma once

#define HOST 0  // the few texts that only one side has ask for it

// At most 256 threads, in 64 registers each, or 128 where reals are doubles: four blocks of a multiprocessor, or two.
#define KERNEL(name) extern "C" __global__ void __launch_bounds__(256, 16 / sizeof(real)) PASTE(name, real)
#define INLINE static __device__ __forceinline__
#define SHARED __shared__ __align__(16)  // [two FOR_EACH_IN over one chunk give a thread the same elements: no barrier]

#define FOR_EACH(i, n, ...) LOOP(i, 0, n, blockIdx.x, gridDim.x, __VA_ARGS__)
#define FOR_EACH_IN(i, c, ...) LOOP(i, c.begin, c.end, 0, 1, __VA_ARGS__)
#define FOR_EACH_CHUNK(c, table) \
  for (Chunk c = {table.begin + blockIdx.x, 0, 0, 0}; c.index < table.end && locate(c, table); c.index += gridDim.x)
#define FOR_EACH_PIECE(c, n) \
  for (Chunk c = {blockIdx.x, 0, 0, 0}; c.index * CHUNK < (n) && begin_at(c, c.index * CHUNK, n); c.index += gridDim.x)
#define FOR_EACH_MEMBER(m, table) for (long long m = blockIdx.x; m < table.count; m += gridDim.x)
#define NO_UNROLL _Pragma("unroll 1")  // one iteration at a time, for want of registers
#define FOR_EACH_IN_BLOCK(i, begin, end) for (long long i = (begin) + threadIdx.x; i < (end); i += blockDim.x)

#define LOOP(i, begin, end, block, blocks, ...) loop(begin, end, block, blocks, __VA_ARGS__) = BODY(i, __VA_ARGS__)
#define BODY(i, ...) [&](long long, int i, NAMES(__VA_ARGS__, 5, 4, 3, 2, 1, 0)(__VA_ARGS__))
#define NAMES(_1, _2, _3, _4, _5, n, ...) NAMES_##n
#define NAMES_1(a) auto *a
#define NAMES_2(a, b) auto *a, auto *b
#define NAMES_3(a, b, c) auto *a, auto *b, auto *c
#define NAMES_4(a, b, c, d) auto *a, auto *b, auto *c, auto *d
#define NAMES_5(a, b, c, d, e) auto *a, auto *b, auto *c, auto *d, auto *e

#define WIDTH (16 / (int)sizeof(real))  // elements that a thread reads and writes at once

// What one access to memory moves.
template <int bytes> struct Access;
template <> struct Access<16> { typedef uint4 Type; };
template <> struct Access<8> { typedef uint2 Type; };
template <> struct Access<4> { typedef unsigned Type; };
template <> struct Access<2> { typedef unsigned short Type; };

// WIDTH elements of an array in registers; those of an array that may change go back.
template <class T>
struct Vector {
  struct alignas(sizeof(T) * WIDTH) Value { T at[WIDTH]; };
  typedef typename Access<sizeof(Value)>::Type AtOnce;
  T *origin;
  Value value;
  Vector() = default;
  __device__ __forceinline__ explicit Vector(T *p) : origin(p) {
    if constexpr (sizeof(T) > 1) value = *(const Value *)p;  // [bytes are codes, all of which a loop writes]
  }
  __device__ __forceinline__ Vector(T *p, const T *from) : origin(p) {
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) value.at[j] = from[j];
  }
  __device__ __forceinline__ T *at() { return value.at; }
  __device__ __forceinline__ void store() const {
    // [__stwb is one access, which a plain store is not]
    if (__isGlobal(origin)) __stwb((AtOnce *)origin, *(const AtOnce *)&value);
    else *(Value *)origin = value;
  }
};
template <class T>
struct Vector<const T> {
  typename Vector<T>::Value value;
  Vector() = default;
  __device__ __forceinline__ explicit Vector(const T *p) : value(*(const typename Vector<T>::Value *)p) {}
  __device__ __forceinline__ const T *at() const { return value.at; }
  __device__ __forceinline__ void store() const {}
};

template <class T>
INLINE bool is_aligned(const T *p) { return (size_t)p % (sizeof(T) * WIDTH) == 0; }

// Some vectors of an array, `step` elements apart.
template <int rows, class T>
struct Rows {
  Vector<T> row[rows];
  __device__ __forceinline__ Rows(T *p, long long step) {
#pragma unroll
    for (int r = 0; r < rows; ++r) row[r] = Vector<T>(p + r * step);
  }
};

// What the arguments have read is in registers by then, and nothing is written before all of it has been used.
template <int rows, class Body, class... T>
INLINE void apply_to(const Body &body, long long i, long long step, Rows<rows, T>... of) {
#pragma unroll
  for (int r = 0; r < rows; ++r)
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) body(i + r * step + j, j, of.row[r].at()...);
#pragma unroll
  for (int r = 0; r < rows; ++r) (of.row[r].store(), ...);
}

// A grid-stride loop: body(i, 0, array + i, ...) for i in [begin, end), each WIDTH of them by one thread, which reads
// `rows` of these at once where there are as many.  Which thread that is does not depend on where the arrays lie: what
// is not aligned, and the end, goes one by one.
template <int rows, class Body, class... T>
INLINE void grid_stride(long long begin, long long end, unsigned block, unsigned blocks, const Body &body,
                        T *...array) {
  const bool aligned = (is_aligned(array + begin) && ...);
  const long long step = (long long)blocks * blockDim.x * WIDTH;
  long long i = begin + ((long long)block * blockDim.x + threadIdx.x) * WIDTH;
  if constexpr (rows > 1)
    for (; aligned && i + (rows - 1) * step + WIDTH <= end; i += rows * step)
      apply_to(body, i, step, Rows<rows, T>(array + i, step)...);
  for (; i < end; i += step) {
    if (aligned && i + WIDTH <= end) apply_to(body, i, step, Rows<1, T>(array + i, step)...);
    else
#pragma unroll 1
      for (long long j = i; j < end && j < i + WIDTH; ++j) body(j, 0, array + j...);
  }
}

template <class... T>
INLINE auto loop(long long begin, long long end, unsigned block, unsigned blocks, T *...array) {
  const auto run = [=](const auto &body) { grid_stride<1>(begin, end, block, blocks, body, array...); };
  return Loop<decltype(run)>{run};
}

INLINE unsigned float_as_uint(float x) { return __float_as_uint(x); }
INLINE float uint_as_float(unsigned u) { return __uint_as_float(u); }
INLINE long long double_as_longlong(double x) { return __double_as_longlong(x); }
INLINE double longlong_as_double(long long u) { return __longlong_as_double(u); }
INLINE int popcount(unsigned long long x) { return __popcll(x); }
INLINE int countr_zero(unsigned long long x) { return __ffsll(x) - 1; }

// A pointer that a kernel has read from memory.  The compiler takes it for a generic one, which may point to a block's
// shared memory and is slower, until it is told that it does not.
template <class T>
INLINE T *assume_global(T *p) {
  __builtin_assume(__isGlobal(p));
  return p;
}

// All threads of a block come here; what one has written before, the others may read afterwards.
INLINE void block_sync() { __syncthreads(); }

INLINE bool block_or(bool mine) { return __syncthreads_or(mine); }

INLINE bool is_block_leader() { return threadIdx.x == 0; }

// Warp-aggregated: all threads of a warp come here, and one of them adds for all, if there is anything to add.
INLINE void atomic_add(long long *total, long long n) {
  if (!__any_sync(~0u, n != 0)) return;
  for (int by = 16; by; by /= 2) n += __shfl_xor_sync(~0u, n, by);
  if (threadIdx.x % 32 == 0) atomicAdd((unsigned long long *)total, (unsigned long long)n);
}
