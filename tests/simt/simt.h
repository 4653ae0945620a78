// CUDA's words for a compiler that does not know them, so that kernels run on the CPU as they would on a device.
//
// A thread is a fiber; barriers and warp operations switch fibers.  A seed shuffles the order of blocks, warps and lanes,
// and how many blocks are resident at once: some, or
// many for seeds that end in 9; seed 0 is the plain order.  Shared memory is poisoned before every block.
// What this finds: results that depend on order, warp operations with missing lanes, barriers not reached by all, and
// waiting without end.  What it cannot: how a device orders memory, and how fast it is.  A shared variable of a template
// is one for all blocks here, as GCC ignores its section: such a template must have no barrier.
#pragma once
#define __CUDACC__
#include <pthread.h>
#include <sys/mman.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>

#if !defined(__x86_64__) || defined(SIMT_UCONTEXT)
#include <ucontext.h>
#define SIMT_PORTABLE
#endif

#define __global__
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __builtin_assume(condition)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static __attribute__((section("simt_shared")))

struct dim3 {
  unsigned x, y, z;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
static dim3 threadIdx, blockIdx, blockDim, gridDim;

// The bounds of the section of all shared memory; the first word is there so that it is never empty.
extern "C" char __start_simt_shared[], __stop_simt_shared[];
__attribute__((used)) __shared__ long long simt_section;

namespace simt {

const int WARP = 32, THREADS = 1024, RESIDENT = 48;
const size_t STACK = 128 << 10;
const unsigned EVERYONE = ~0u;

enum State { READY, AT_WARP, AT_BARRIER, PAUSED, DONE };
enum Operation { MEET, VOTE, SHUFFLE, MATCH };
const char *const STATES[] = {"running", "in a warp operation", "at a barrier", "waiting for another block", "done"};

struct Fiber {
#ifdef SIMT_PORTABLE
  ucontext_t context;
#else
  void *stack;
#endif
  State state;
  int line;  // where it waits
  unsigned mask, from;
  Operation operation;
  uint64_t given, got;
};

struct Barrier {
  int arrived, line, yes;
  int count, any, all;  // the answers of the last one
};

struct Block {
  Fiber fibers[THREADS];
  char *stacks, *shared;
  dim3 index;
  int done;
  Barrier barrier;
};

// What a launch is about; launches of several OS threads come one after the other.
struct Machine {
  Block *blocks[RESIDENT], *block, *inside;  // the last is whose shared memory the section is
  int thread, threads;
  uint64_t seed, random, launches;
  void (*body)(void *);
  void *argument;
#ifdef SIMT_PORTABLE
  ucontext_t scheduler;
#else
  void *scheduler;
#endif
};
static Machine machine;
static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;

[[noreturn]] inline void die(const char *text) {
  fprintf(stderr, "simt: block %u: %s\n", blockIdx.x, text);
  for (int shown = 0, i = 0; machine.block && i < machine.threads && shown < 40; ++i) {
    const Fiber &f = machine.block->fibers[i];
    if (f.state == READY) continue;
    fprintf(stderr, "  thread %d: %s", i, STATES[f.state]);
    if (f.state == AT_WARP) fprintf(stderr, " of lanes %08x", f.mask);
    if (f.state != DONE) fprintf(stderr, ", line %d", f.line);
    fprintf(stderr, "\n"), ++shown;
  }
  fflush(stderr);
  abort();
}

inline unsigned draw(unsigned below) {  // xorshift64*
  uint64_t &s = machine.random;
  s ^= s >> 12, s ^= s << 25, s ^= s >> 27;
  return (unsigned)((s * 2685821657736338717u >> 33) % below);
}

// order <- 0, 1, ... n - 1, shuffled if there is a seed.
inline void shuffle(int n, int *order) {
  for (int i = 0; i < n; ++i) {
    const int j = machine.seed ? (int)draw(i + 1) : i;
    order[i] = order[j];
    order[j] = i;
  }
}

#ifndef SIMT_PORTABLE
extern "C" void simt_switch(void **save, void *to);
asm(R"(
.text
.weak simt_switch
.type simt_switch, @function
simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size simt_switch, .-simt_switch
)");
#endif

inline void to_scheduler() {
  Fiber &f = machine.block->fibers[machine.thread];
#ifdef SIMT_PORTABLE
  swapcontext(&f.context, &machine.scheduler);
#else
  simt_switch(&f.stack, machine.scheduler);
#endif
}

inline void wait(State state, int line) {
  Fiber &f = machine.block->fibers[machine.thread];
  f.state = state, f.line = line;
  to_scheduler();
}

inline void run_thread() {
  machine.body(machine.argument);
  ++machine.block->done;
  wait(DONE, 0);
}

inline void prepare(Block &block, int thread) {
  Fiber &f = block.fibers[thread];
  f.state = READY;
  char *const bottom = block.stacks + thread * STACK;
#ifdef SIMT_PORTABLE
  getcontext(&f.context);
  f.context.uc_stack.ss_sp = bottom, f.context.uc_stack.ss_size = STACK, f.context.uc_link = nullptr;
  makecontext(&f.context, run_thread, 0);
#else
  void **top = (void **)(bottom + STACK - 64 - thread % 61 * 320);  // equal tops would share a set of the cache
  *--top = nullptr;
  *--top = (void *)run_thread;
  f.stack = top - 6;
#endif
}

inline void resume(Block &block, int thread) {
  machine.thread = thread;
  threadIdx.x = thread % blockDim.x;
  threadIdx.y = thread / blockDim.x % blockDim.y;
  threadIdx.z = thread / blockDim.x / blockDim.y;
#ifdef SIMT_PORTABLE
  swapcontext(&machine.scheduler, &block.fibers[thread].context);
#else
  simt_switch(&machine.scheduler, block.fibers[thread].stack);
#endif
}

// The last lane that comes answers for all.
inline void answer(Fiber *warp, unsigned mask) {
  for (unsigned m = mask; m; m &= m - 1) {
    Fiber &f = warp[__builtin_ctz(m)];
    f.got = 0;
    if (f.operation == SHUFFLE) f.got = mask >> f.from & 1 ? warp[f.from].given : 0xdeadbeefdeadbeef;
    for (unsigned k = f.operation == VOTE || f.operation == MATCH ? mask : 0; k; k &= k - 1) {
      const int lane = __builtin_ctz(k);
      f.got |= (uint64_t)(f.operation == VOTE ? warp[lane].given != 0 : warp[lane].given == f.given) << lane;
    }
  }
  for (unsigned m = mask; m; m &= m - 1) warp[__builtin_ctz(m)].state = READY;
}

inline uint64_t meet(Operation operation, unsigned mask, uint64_t given, unsigned from, int line) {
  const int lane = machine.thread % WARP, first = machine.thread - lane;
  Fiber *const warp = machine.block->fibers + first, &mine = warp[lane];
  mine.operation = operation, mine.mask = mask, mine.given = given, mine.from = from, mine.line = line;
  if (!(mask >> lane & 1)) die("a lane is in a warp operation whose mask lacks it");
  if (first + 31 - __builtin_clz(mask) >= machine.threads) die("a mask names lanes that the block does not have");
  mine.state = AT_WARP;
  bool complete = true;
  for (unsigned m = mask; m; m &= m - 1) {
    const Fiber &f = warp[__builtin_ctz(m)];
    if (f.state == DONE) die("a mask names a lane that is gone");
    const bool here = f.state == AT_WARP && f.mask == mask;  // or with others first
    if (here && (f.operation != operation || f.line != line)) die("lanes are in different warp operations");
    complete &= here;
  }
  if (complete) answer(warp, mask); else to_scheduler();
  return mine.got;
}

inline Barrier &barrier(int vote, int line) {
  Barrier &b = machine.block->barrier;
  if (b.arrived && b.line != line) die("threads are at different barriers");
  b.line = line;
  b.yes += vote != 0;
  ++b.arrived;
  wait(AT_BARRIER, line);
  return machine.block->barrier;
}

inline void open(Block &block) {
  Barrier &b = block.barrier;
  b.count = b.yes, b.any = b.yes > 0, b.all = b.yes == machine.threads;
  b.arrived = b.yes = 0;
  for (int i = 0; i < machine.threads; ++i) block.fibers[i].state = READY;
}

inline void start(Block &block, unsigned index) {
  block.index = {index % gridDim.x, index / gridDim.x % gridDim.y, index / gridDim.x / gridDim.y};
  block.done = 0, block.barrier = {};
  memset(machine.inside == &block ? __start_simt_shared : block.shared, 0xc3, __stop_simt_shared - __start_simt_shared);
  for (int i = 0; i < machine.threads; ++i) prepare(block, i);
}

// Every thread that can run does, warp by warp.
inline void run_warps(Block &block) {
  int warps[THREADS / WARP], lanes[WARP];
  shuffle((machine.threads + WARP - 1) / WARP, warps);
  for (int w = 0; w * WARP < machine.threads; ++w) {
    const int first = warps[w] * WARP, lanes_here = machine.threads - first < WARP ? machine.threads - first : WARP;
    for (bool again = true; again;) {
      again = false;
      shuffle(lanes_here, lanes);
      for (int l = 0; l < lanes_here; ++l)
        if (block.fibers[first + lanes[l]].state == READY) resume(block, first + lanes[l]), again = true;
    }
  }
}

// A turn of one block: up to its end, to where it waits for another block, or, now and then, to a barrier.
// Returns whether it waits for another.
inline bool turn(Block &block, bool alone) {
  machine.block = &block, blockIdx = block.index;
  if (machine.inside != &block) {
    const size_t size = __stop_simt_shared - __start_simt_shared;
    if (machine.inside) memcpy(machine.inside->shared, __start_simt_shared, size);
    memcpy(__start_simt_shared, block.shared, size);
    machine.inside = &block;
  }
  bool paused = false;
  for (;;) {
    run_warps(block);
    if (block.done == machine.threads) return false;
    if (block.barrier.arrived < machine.threads) break;
    open(block);
    if (!alone && !draw(4)) return false;
  }
  for (int i = 0; i < machine.threads; ++i)
    if (block.fibers[i].state == PAUSED) block.fibers[i].state = READY, paused = true;
  if (!paused) die("deadlock: some threads wait for others that will not come");
  return true;
}

inline void run_grid(unsigned blocks) {
  const int resident = machine.seed % 10 == 9 ? RESIDENT : machine.seed ? 1 + (int)draw(4) : 1;
  int *const order = (int *)malloc(blocks * sizeof(int));
  shuffle((int)blocks, order);
  unsigned next = 0;
  int waits = 0;  // in a row
  bool busy[RESIDENT] = {};
  for (int running = 0;;) {
    for (int r = 0; r < resident; ++r)
      if (!busy[r] && next < blocks) start(*machine.blocks[r], order[next++]), busy[r] = true, ++running;
    if (!running) break;
    int r = resident > 1 ? (int)draw(resident) : 0;
    while (!busy[r]) r = (r + 1) % resident;
    waits = turn(*machine.blocks[r], resident == 1) ? waits + 1 : 0;
    if (waits > 10000) die("deadlock: blocks wait for each other without end");
    if (machine.blocks[r]->done == machine.threads) busy[r] = false, --running;
  }
  free(order);
}

inline void *memory(size_t size) {
  void *found = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) die("no memory");
  return found;
}

inline void launch(const unsigned *dims, void (*body)(void *), void *argument) {
  pthread_mutex_lock(&one_at_a_time);
  gridDim = {dims[0], dims[1], dims[2]}, blockDim = {dims[3], dims[4], dims[5]};
  machine.threads = (int)(dims[3] * dims[4] * dims[5]), ++machine.launches;
  machine.random = machine.seed * 0x9e3779b97f4a7c15 + 1;
  machine.body = body, machine.argument = argument, machine.block = nullptr;
  if (machine.threads < 1 || machine.threads > THREADS) die("a block has 1 to 1024 threads");
  if (dims[0] < 1 || dims[1] < 1 || dims[2] < 1) die("a grid has at least one block");
  for (Block *&b : machine.blocks)
    if (!b) {
      b = (Block *)memory(sizeof(Block));
      b->stacks = (char *)memory(STACK * THREADS);
      b->shared = (char *)memory(__stop_simt_shared - __start_simt_shared);
    }
  run_grid(dims[0] * dims[1] * dims[2]);
  machine.block = nullptr;
  pthread_mutex_unlock(&one_at_a_time);
}

// As cuLaunchKernel's kernelParams: arguments[i] points at the value of argument i.
template <class... T, size_t... I>
void call(void (*kernel)(T...), void **arguments, std::index_sequence<I...>) {
  kernel(*(std::remove_reference_t<T> *)arguments[I]...);
}
template <auto kernel, class... T>
void run_one(void (*)(T...), void *arguments) {
  call<T...>(kernel, (void **)arguments, std::index_sequence_for<T...>{});
}

template <class T>
uint64_t to_bits(T value) {
  static_assert(sizeof value == 4 || sizeof value == 8, "a warp passes on 32 or 64 bits");
  uint64_t u = 0;
  memcpy(&u, &value, sizeof value);
  return u;
}
template <class T>
T from_bits(uint64_t u) {
  T value;
  memcpy(&value, &u, sizeof value);
  return value;
}
template <class T>
T shuffle(unsigned mask, T value, int from, int line) {
  return from_bits<T>(meet(SHUFFLE, mask, to_bits(value), (unsigned)from, line));
}
inline int lane() { return machine.thread % WARP; }

}  // namespace simt

#define SIMT_EXPORT(kernel)                                                                      \
  extern "C" void launch_##kernel(const unsigned *dims, size_t, void **arguments) {              \
    simt::launch(dims, [](void *a) { simt::run_one<&kernel>(&kernel, a); }, (void *)arguments);  \
  }

#define SIMT_LINE int line = __builtin_LINE()

inline void __syncthreads(SIMT_LINE) { simt::barrier(0, line); }
inline int __syncthreads_or(int vote, SIMT_LINE) { return simt::barrier(vote, line).any; }
inline int __syncthreads_and(int vote, SIMT_LINE) { return simt::barrier(vote, line).all; }
inline int __syncthreads_count(int vote, SIMT_LINE) { return simt::barrier(vote, line).count; }
inline void __syncwarp(unsigned mask = simt::EVERYONE, SIMT_LINE) { simt::meet(simt::MEET, mask, 0, 0, line); }
inline unsigned __ballot_sync(unsigned mask, int vote, SIMT_LINE) {
  return (unsigned)simt::meet(simt::VOTE, mask, vote != 0, 0, line);
}
inline int __any_sync(unsigned mask, int vote, SIMT_LINE) { return __ballot_sync(mask, vote, line) != 0; }
inline int __all_sync(unsigned mask, int vote, SIMT_LINE) { return __ballot_sync(mask, vote, line) == mask; }
template <class T>
unsigned __match_any_sync(unsigned mask, T value, SIMT_LINE) {
  return (unsigned)simt::meet(simt::MATCH, mask, simt::to_bits(value), 0, line);
}
template <class T>
T __shfl_sync(unsigned mask, T value, int from, SIMT_LINE) {
  return simt::shuffle(mask, value, from & 31, line);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int with, SIMT_LINE) {
  return simt::shuffle(mask, value, (simt::lane() ^ with) & 31, line);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned by, SIMT_LINE) {
  return simt::shuffle(mask, value, simt::lane() - (simt::lane() < (int)by ? 0 : (int)by), line);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned by, SIMT_LINE) {
  return simt::shuffle(mask, value, simt::lane() + (simt::lane() + (int)by > 31 ? 0 : (int)by), line);
}

inline void __nanosleep(unsigned, SIMT_LINE) { simt::wait(simt::PAUSED, line); }
inline void __threadfence() {}
inline bool __isGlobal(const void *) { return true; }
template <class T>
void __stwb(T *p, T value) { *p = value; }
using std::sqrt;
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }

inline unsigned __float_as_uint(float x) { unsigned u; memcpy(&u, &x, sizeof u); return u; }
inline float __uint_as_float(unsigned u) { float x; memcpy(&x, &u, sizeof x); return x; }
inline long long __double_as_longlong(double x) { long long u; memcpy(&u, &x, sizeof u); return u; }
inline double __longlong_as_double(long long u) { double x; memcpy(&x, &u, sizeof x); return x; }

// Fibers switch nowhere else than above, so plain accesses are atomic.
template <class T>
T atomicAdd(T *total, T n) { const T before = *total; *total = before + n; return before; }
template <class T>
T atomicOr(T *flags, T more) { const T before = *flags; *flags = before | more; return before; }
template <class T>
T atomicMax(T *most, T n) { const T before = *most; *most = before < n ? n : before; return before; }
template <class T>
T atomicMin(T *least, T n) { const T before = *least; *least = n < before ? n : before; return before; }
template <class T>
T atomicExch(T *place, T n) { const T before = *place; *place = n; return before; }
template <class T>
T atomicCAS(T *place, T expected, T n) { const T before = *place; if (before == expected) *place = n; return before; }
