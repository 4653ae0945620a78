// One text, two compilers.  g++ turns each KERNEL into a host function, NVRTC turns it into a __global__; each text is
// compiled once with -Dreal=float and once with -Dreal=double.  This is the only file that knows about either.
#pragma once

#ifndef real
#error "compile with -Dreal=float or -Dreal=double"
#endif

// Elements that one block works on at a time; also the block length of every fixed-order sum.
#define CHUNK 4096
#define LANES 16  // accumulators of such a sum, which take elements in turn and are folded pairwise

typedef unsigned short half_t;      // the bits of an IEEE binary16
typedef unsigned short bfloat16_t;  // the upper half of an IEEE binary32
typedef float single_t;             // a number that is one for every real
typedef unsigned char byte_t;

// One tensor of a bucket: where it lives, and its place in the bucket's flat arrays.  `first` counts the chunks of all
// members before it; `lr` and `decay` are this tensor's multipliers, and `adapts` is 1, or 0 for a tensor that takes no
// part in layer-wise learning rates.  Offsets and sizes are in elements.
//
// `data` holds reals, or 16-bit numbers: `format`.  A parameter of 16 bits is updated in `wide`, of reals, and rounded
// from there.  If that is a `master`, it knows more bits of the parameter, from update to update, as long as nobody else
// has changed that: what it would round to is compared.
#define WIDE 0
#define HALF 1
#define BFLOAT16 2
struct Member {
  void *data;
  real *wide;
  long long offset, size, first, format, master;
  double lr, decay, adapts;
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

// A kernel's last parameter where a step may be refused: null, or one number that lies where the arrays do.  If that is
// not 0, the kernel changes nothing that outlasts the step, and payloads are zeros.
typedef const long long *Unless;

#define PASTE_(name, type) name##_##type
#define PASTE(name, type) PASTE_(name, type)

// What follows the head of a kernel that wants another grid than the usual one, which is a thread for every 16 bytes of
// its first array, or a block for every chunk of its table, as far as the device has room: one block for each of a
// parameter, or of the table's `rows`.  Every grid of blocks of 32, 64, ... 256 threads is right: this is about speed.
#define BLOCKS(count)

// A loop names the arrays that its body meets at i, and nowhere else; a body ends with `};`.
#ifdef __CUDACC__

#define HOST 0  // for the few texts that only one side has

// At most 256 threads; that there is room for two blocks keeps the compiler from spilling to make room for more.
#define KERNEL(name) extern "C" __global__ void __launch_bounds__(256, 2) PASTE(name, real)
#define INLINE static __device__ __forceinline__
#define SCRATCH __shared__ __align__(16)  // a block's memory: in loops over one chunk a thread meets what it wrote itself
#define FOR_EACH(i, n, ...) LOOP(i, 0, n, blockIdx.x, gridDim.x, __VA_ARGS__)
#define FOR_EACH_IN(i, c, ...) LOOP(i, c.begin, c.end, 0, 1, __VA_ARGS__)
#define FOR_EACH_CHUNK(c, table) \
  for (Chunk c = {table.begin + blockIdx.x, 0, 0, 0}; c.index < table.end && find(c, table); c.index += gridDim.x)

#define FOR_EACH_PIECE(c, n) \
  for (Chunk c = {blockIdx.x, 0, 0, 0}; c.index * CHUNK < (n) && cut(c, n); c.index += gridDim.x)
#define FOR_EACH_ROW(row, table) for (long long row = blockIdx.x; row < table.count; row += gridDim.x)
#define FOR_EACH_HERE(i, begin, end) for (long long i = (begin) + threadIdx.x; i < (end); i += blockDim.x)
#define FOR_EACH_CHUNK_BY_LANES(c, table)                                                            \
  for (Chunk c = {table.begin + (blockIdx.x * (long long)blockDim.x + threadIdx.x) / LANES, 0, 0, 0}; \
       c.index < table.end && find(c, table); c.index += (long long)gridDim.x * blockDim.x / LANES)
#define EACH_LANE(j) if (const int j = threadIdx.x % LANES; true)

#define LOOP(i, begin, end, block, blocks, ...) \
  loop(begin, end, block, blocks, __VA_ARGS__) = [&](int i, NAMES(__VA_ARGS__, 5, 4, 3, 2, 1, 0)(__VA_ARGS__))
#define NAMES(_1, _2, _3, _4, _5, n, ...) NAMES_##n
#define NAMES_1(a) auto *a
#define NAMES_2(a, b) auto *a, auto *b
#define NAMES_3(a, b, c) auto *a, auto *b, auto *c
#define NAMES_4(a, b, c, d) auto *a, auto *b, auto *c, auto *d
#define NAMES_5(a, b, c, d, e) auto *a, auto *b, auto *c, auto *d, auto *e

#define WIDTH (16 / (int)sizeof(real))  // elements that a thread reads and writes at once

// What one access to memory moves.
template <int bytes> struct Word;
template <> struct Word<16> { typedef uint4 Type; };
template <> struct Word<8> { typedef uint2 Type; };
template <> struct Word<4> { typedef unsigned Type; };
template <> struct Word<2> { typedef unsigned short Type; };

// WIDTH elements of an array in registers; those of an array that may change go back.
template <class T>
struct Lanes {
  struct alignas(sizeof(T) * WIDTH) Value { T at[WIDTH]; };
  typedef typename Word<sizeof(Value)>::Type Whole;
  T *home;
  Value value;
  __device__ __forceinline__ explicit Lanes(T *p) : home(p), value(*(const Value *)p) {}
  __device__ __forceinline__ Lanes(T *p, const T *from) : home(p) {
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) value.at[j] = from[j];
  }
  __device__ __forceinline__ T *at() { return value.at; }
  __device__ __forceinline__ void store() const {
    if (__isGlobal(home)) __stwb((Whole *)home, *(const Whole *)&value);  // [in one piece, which a plain store is not]
    else *(Value *)home = value;
  }
};
template <class T>
struct Lanes<const T> {
  typename Lanes<T>::Value value;
  __device__ __forceinline__ explicit Lanes(const T *p) : value(*(const typename Lanes<T>::Value *)p) {}
  __device__ __forceinline__ const T *at() const { return value.at; }
  __device__ __forceinline__ void store() const {}
};

template <class T>
INLINE bool is_aligned(const T *p) { return (size_t)p % (sizeof(T) * WIDTH) == 0; }

template <class Body, class... Some>
INLINE void at_once(const Body &body, Some... lanes) {
#pragma unroll
  for (int j = 0; j < WIDTH; ++j) body(j, lanes.at()...);
  (lanes.store(), ...);
}

// body(0, array + i, ...) for i in [begin, end), each WIDTH of them by one thread, which does not depend on where the
// arrays lie: what is not aligned, and the end, goes one by one.
template <class Body, class... T>
INLINE void each(long long begin, long long end, unsigned block, unsigned blocks, const Body &body, T *...array) {
  const bool aligned = (is_aligned(array + begin) && ...);
  const long long step = (long long)blocks * blockDim.x * WIDTH;
  for (long long i = begin + ((long long)block * blockDim.x + threadIdx.x) * WIDTH; i < end; i += step) {
    if (aligned && i + WIDTH <= end) at_once(body, Lanes<T>(array + i)...);
    else
#pragma unroll 1
      for (long long j = i; j < end && j < i + WIDTH; ++j) body(0, array + j...);
  }
}

// `loop(...) = body` runs the body, so that a loop can be written in front of it.
template <class Run>
struct Loop {
  Run run;
  template <class Body>
  __device__ __forceinline__ void operator=(const Body &body) const { run(body); }
};
template <class... T>
INLINE auto loop(long long begin, long long end, unsigned block, unsigned blocks, T *...array) {
  const auto run = [=](const auto &body) { each(begin, end, block, blocks, body, array...); };
  return Loop<decltype(run)>{run};
}

INLINE unsigned bits(float x) { return __float_as_uint(x); }
INLINE float value(unsigned u) { return __uint_as_float(u); }
INLINE long long bits(double x) { return __double_as_longlong(x); }
INLINE float root(float x) { return sqrtf(x); }
INLINE double root(double x) { return sqrt(x); }
INLINE int count_ones(unsigned long long x) { return __popcll(x); }
INLINE int lowest_one(unsigned long long x) { return __ffsll(x) - 1; }

// A pointer that a kernel found in memory is not known to lie in no block's own, and is slower until it is said so.
template <class T>
INLINE T *global(T *p) {
  __builtin_assume(__isGlobal(p));
  return p;
}

// Where all threads of a block come: what one wrote before, others may read behind it.
INLINE void together() { __syncthreads(); }

// Where all threads of a block come: does one of them say so?
INLINE bool anywhere(bool here) { return __syncthreads_or(here); }

// Does this thread write what its block, or what the LANES threads of a chunk, found together?
INLINE bool leads_block() { return threadIdx.x == 0; }
INLINE bool leads_lanes() { return threadIdx.x % LANES == 0; }

// The accumulators of a chunk, one in each of LANES threads.
struct Sums {
  double mine;
  __device__ __forceinline__ double &operator[](int) { return mine; }
};
INLINE double folded(Sums sums) {
  const unsigned lanes = 0xffffu << threadIdx.x % 32 / LANES * LANES;
  for (int by = LANES / 2; by; by /= 2) sums.mine += __shfl_xor_sync(lanes, sums.mine, by);
  return sums.mine;
}

// Where all threads of a warp come: one of them adds for all, if there is anything to add.
INLINE void add(long long *total, long long n) {
  if (!__any_sync(~0u, n != 0)) return;
  for (int by = 16; by; by /= 2) n += __shfl_xor_sync(~0u, n, by);
  if (threadIdx.x % 32 == 0) atomicAdd((unsigned long long *)total, (unsigned long long)n);
}

#else

#define HOST 1
#include <cstring>

#if defined(__F16C__) || defined(__AVX512VL__)
#include <immintrin.h>
#endif
#define KERNEL(name) extern "C" void PASTE(name, real)
#define INLINE static inline __attribute__((always_inline))
// Iterations are independent: an array may be read and written at the same index, never at another.
#ifdef __clang__
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#define WHOLE
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#define WHOLE _Pragma("GCC unroll 1")  // a short loop that is taken apart does not become vectors
#endif
#define FOR_EACH(i, n, ...) INDEPENDENT for (long long i = 0; i < (n); ++i)
#define FOR_EACH_IN(i, c, ...) INDEPENDENT for (long long i = c.begin; i < c.end; ++i)
#define FOR_EACH_CHUNK(c, table) for (Chunk c = {table.begin, 0, 0, 0}; c.index < table.end && next(c, table); ++c.index)
#define FOR_EACH_PIECE(c, n) for (Chunk c = {0, 0, 0, 0}; c.index * CHUNK < (n) && cut(c, n); ++c.index)
#define FOR_EACH_ROW(row, table) for (long long row = 0; row < table.count; ++row)
#define FOR_EACH_HERE(i, begin, end) INDEPENDENT for (long long i = (begin); i < (end); ++i)
#define FOR_EACH_CHUNK_BY_LANES(c, table) FOR_EACH_CHUNK(c, table)
#define EACH_LANE(j) WHOLE INDEPENDENT for (int j = 0; j < LANES; ++j)
#define SCRATCH

INLINE unsigned bits(float x) { unsigned u; memcpy(&u, &x, sizeof u); return u; }
INLINE float value(unsigned u) { float x; memcpy(&x, &u, sizeof x); return x; }
INLINE long long bits(double x) { long long u; memcpy(&u, &x, sizeof u); return u; }
INLINE float root(float x) { return __builtin_sqrtf(x); }
INLINE double root(double x) { return __builtin_sqrt(x); }
INLINE int count_ones(unsigned long long x) { return __builtin_popcountll(x); }
INLINE int lowest_one(unsigned long long x) { return __builtin_ctzll(x); }
template <class T>
INLINE T *global(T *p) { return p; }
INLINE void together() {}
INLINE bool anywhere(bool here) { return here; }
INLINE bool leads_block() { return true; }
INLINE bool leads_lanes() { return true; }
struct Sums {
  double at[LANES];
  double &operator[](int j) { return at[j]; }
};
INLINE double folded(Sums sums) {
  for (int by = LANES / 2; by; by /= 2)
    for (int j = 0; j < by; ++j) sums.at[j] += sums.at[j + by];
  return sums.at[0];
}
INLINE void add(long long *total, long long n) { *total += n; }

#endif

// The member that a chunk belongs to.
INLINE Member member(const Table &table, const Chunk &c) {
  Member m = table.rows[c.row];
  m.data = global(m.data);
  m.wide = global(m.wide);
  return m;
}

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

// Let c be piece number `index` of n elements.
INLINE bool cut(Chunk &c, long long n) {
  c.begin = c.index * CHUNK;
  c.end = c.begin + CHUNK < n ? c.begin + CHUNK : n;
  return true;
}

INLINE bool holds(Unless refused) { return refused && *refused; }

// |x| as an integer that orders like it; NaN lies above infinity.
INLINE int magnitude(float x) { return bits(x) & 0x7fffffff; }
INLINE long long magnitude(double x) { return bits(x) & 0x7fffffffffffffff; }

// x - x is 0 for every finite x and NaN for the others.
INLINE bool is_finite(real x) { return x - x == 0; }

// Is |x| at most so much?  NaN is not.
INLINE bool within(real x, real most) { return (x <= most) & (x >= -most); }

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

// The parameter as reals: at home, or in `wide`, as of the last `weights`.
INLINE real *wide(const Member &m) { return m.format == WIDE ? (real *)m.data : m.wide; }

// The same for a chunk that is about to be updated.
INLINE real *weights(const Member &m, const Chunk &c) {
  real *w = wide(m);
  if (m.format == HALF) {
    const half_t *h = (const half_t *)m.data;
    FOR_EACH_IN(i, c, h, w) { w[i] = m.master && half_of(w[i]) == h[i] ? w[i] : value_of_half(h[i]); };
  } else if (m.format == BFLOAT16) {
    const bfloat16_t *b = (const bfloat16_t *)m.data;
    FOR_EACH_IN(i, c, b, w) { w[i] = m.master && bfloat16_of(w[i]) == b[i] ? w[i] : value_of_bfloat16(b[i]); };
  }
  return w;
}

// A chunk has been updated in `wide`: round it to where the parameter lives.
INLINE void round_home(const Member &m, const Chunk &c) {
  const real *w = m.wide;
  if (m.format == HALF) {
    half_t *h = (half_t *)m.data;
    FOR_EACH_IN(i, c, w, h) { h[i] = half_of(w[i]); };
  } else if (m.format == BFLOAT16) {
    bfloat16_t *b = (bfloat16_t *)m.data;
    FOR_EACH_IN(i, c, w, b) { b[i] = bfloat16_of(w[i]); };
  }
}

// body(i, j) for the elements i of a chunk, j of LANES accumulators taking them in turn: for FOR_EACH_CHUNK_BY_LANES.
template <class Body>
INLINE void in_lanes(const Chunk &c, const Body &body) {
  long long i = c.begin;
  for (; i + LANES <= c.end; i += LANES)
    EACH_LANE(j) body(i + j, j);
  EACH_LANE(j)
    if (i + j < c.end) body(i + j, j);
}
