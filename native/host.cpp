// What only a host library has: the sources and the SIMD level that it was built from, the level of this CPU, a reader
// of numpy's arrays, the end of MPI, and rounds of ranks that share memory.
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#endif

extern "C" const char *source_hash() { return SOURCE_HASH; }

extern "C" const char *simd_level() { return SIMD_LEVEL; }

// Has this CPU all that the compiler takes for granted at the levels x86-64-v3 and -v4, and the system their registers?
extern "C" const char *cpu_level() {
#if defined(__x86_64__)
  unsigned eax, ebx, ecx = 0, edx, extended = 0;
  const unsigned fma = 1 << 12, movbe = 1 << 22, f16c = 1 << 29, lzcnt = 1 << 5, v3 = fma | movbe | f16c;
  __get_cpuid(1, &eax, &ebx, &ecx, &edx);
  __get_cpuid(0x80000001, &eax, &ebx, &extended, &edx);
  __builtin_cpu_init();
  if ((ecx & v3) == v3 && extended & lzcnt && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
      __builtin_cpu_supports("bmi2"))
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                   __builtin_cpu_supports("avx512vl")
               ? "v4"
               : "v3";
#endif
  return "v1";
}

// How numpy lays out an array behind the header that all Python objects have (PyArrayObject_fields in ndarraytypes.h).
// It is part of numpy's binary interface: every extension module has it compiled in.
struct Array {
  void *data;
  int dimensions;
  const long long *shape, *strides;
  const void *base, *dtype;
  int flags;
};

// address[i] <- where array i keeps its elements.  Returns how many, from the first on, have all of these `flags`, and
// are of exactly the type, dtype and shape that is expected of them; `shapes` has all shapes in one row.  An object's
// last header word is its type, so that nothing but an array is taken for one; a null `type` takes any array.
extern "C" long long array_addresses(long long count, const char *const *objects, long long header, const void *type,
                                     int flags, const void *const *dtypes, const long long *dimensions,
                                     const long long *shapes, void **address) {
  for (long long i = 0; i < count; shapes += dimensions[i++]) {
    const Array *a = (const Array *)(objects[i] + header);
    if (type && ((const void *const *)a)[-1] != type) return i;
    if (a->dtype != dtypes[i] || a->dimensions != dimensions[i] || (a->flags & flags) != flags) return i;
    for (int d = 0; d < a->dimensions; ++d)
      if (a->shape[d] != shapes[d]) return i;
    address[i] = a->data;
  }
  return count;
}

// second[i] <- the second item of pair i.  Returns how many pairs, from the first on, are exactly tuples of two of which
// the first item is the object that is expected; `items` is where a tuple's items begin (cpython/tupleobject.h).
extern "C" long long second_items(long long count, const char *const *pairs, const void *tuple, long long header,
                                  long long items, const void *const *expected, const void **second) {
  for (long long i = 0; i < count; ++i) {
    const auto *word = (const void *const *)(pairs[i] + header);
    if (word[-1] != tuple || *(const long long *)word != 2) return i;
    const auto *item = (const void *const *)(pairs[i] + items);
    if (item[0] != expected[i]) return i;
    second[i] = item[1];
  }
  return count;
}

// The first array that begins where an earlier one does, or `count`; those without elements, or at no address, are
// passed over.  `seen` is 2^bits addresses, all null and more than `count`: a hash table.
extern "C" long long repeated(long long count, void *const *address, const long long *sizes, int bits, void **seen) {
  for (long long i = 0; i < count; ++i) {
    if (!address[i] || !sizes[i]) continue;
    unsigned long long slot = ((unsigned long long)address[i] * 0x9E3779B97F4A7C15ull) >> (64 - bits);
    while (seen[slot] && seen[slot] != address[i]) slot = (slot + 1) & ((1ull << bits) - 1);
    if (seen[slot]) return i;
    seen[slot] = address[i];
  }
  return count;
}

// What ends MPI at the very end of the interpreter: in the process that has called the first function, not in a forked
// child of it, where it would wait for ever, and once only.
static int (*mpi_initialized)(int *), (*mpi_finalized)(int *), (*mpi_finalize)();
static pid_t mpi_process;

extern "C" void end_mpi_with(int (*initialized)(int *), int (*finalized)(int *), int (*finalize)()) {
  mpi_initialized = initialized, mpi_finalized = finalized, mpi_finalize = finalize;
  mpi_process = getpid();
}

extern "C" void end_mpi() {
  int begun = 0, ended = 1;
  if (getpid() != mpi_process || mpi_initialized(&begun) || !begun || mpi_finalized(&ended) || ended) return;
  mpi_finalize();
}

// Lets the process that calls this end by a signal if it ends with a status other than 0.
extern "C" void fail_by_signal() {
#if defined(__GLIBC__)
  on_exit(
      [](int status, void *process) {
        if (!status || getpid() != (pid_t)(long long)process) return;
        fflush(nullptr);
        raise(SIGKILL);
      },
      (void *)(long long)getpid());
#endif
}

// The rounds of a board (distopt/comm/board.py), which ranks of one machine count in memory that they share.  Waiters
// sleep on the lower half of a count.
static int *lower_half(const long long *count) {
  return (int *)count + (__BYTE_ORDER__ == __ORDER_BIG_ENDIAN__);
}

extern "C" void begin_round(long long *mine, long long round) {
  __atomic_store_n(mine, round, __ATOMIC_SEQ_CST);
#if defined(__linux__)
  syscall(SYS_futex, lower_half(mine), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
}

// The first of `count` ranks that has not begun `round` after `patience` nanoseconds, or `count`.  Spins at first, for
// ranks that come within microseconds.
extern "C" long long first_late(long long count, const long long *const *rounds, long long round, long long patience) {
  const long long spin = 50000;  // nanoseconds
  const auto now = [] {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
  };
  const long long begun = now();
  for (long long k = 0, looks = 1;; ++looks) {
    long long seen = round;
    while (k < count && (seen = __atomic_load_n(rounds[k], __ATOMIC_ACQUIRE)) >= round) ++k;
    if (k == count) return count;
    if (looks % 32) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
      continue;
    }
    const long long waited = now() - begun;
    if (waited >= patience) return k;
    if (waited < spin) continue;
    looks = -1;  // look at the clock each time from now on
    const long long left = patience - waited;
    const timespec nap = {left / 1000000000, left % 1000000000};
#if defined(__linux__)
    syscall(SYS_futex, lower_half(rounds[k]), FUTEX_WAIT, (int)seen, &nap, nullptr, 0);
#else
    const timespec moment = {0, 50000};
    nanosleep(&moment, nullptr);
#endif
  }
}
