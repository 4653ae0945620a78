// Which entries are worth sending.  Entries are compared by `magnitude`, an integer that orders like |x|, NaN on top; so
// selection is exact, and ties are taken from the lowest index on.  [On a device one thread does it: right, and not yet
// fast]
#include "portable.h"
#ifndef __CUDACC__
#include "lanes.h"
#endif

typedef decltype(magnitude((real)0)) Magnitude;

#define BLOCK 64   // entries that are compared before one of them moves
#define LINE 16    // neighbours that are sampled together
#define LINES 257  // one line of so many is a sample: a prime, so that every column of a matrix gets its turn

// Entry i is written behind the `held` taken so far; only if it is `taken` it counts, and leaves x.  [without a branch]
INLINE void take(bool taken, real *x, long long i, int *index, real *entry, long long &held) {
  index[held] = (int)i;
  entry[held] = x[i];
  x[i] = taken ? 0 : x[i];
  held += taken;
}

#ifdef AVX512
AVX512 static void take_by_lanes(real *x, const real *add, long long &i, long long end, Magnitude bound, int *index,
                                 real *entry, long long &held) {
  const int lanes = 64 / sizeof(real);
  for (; i + lanes <= end; i += lanes) held += take_lanes(x, add, (int)i, bound, index + held, entry + held);
}
#endif

// x <- x + add on [begin, end), and what lies above `bound` then moves out of x, in order; returns how many entries.
// There is room for all of them.  No `add`, no sum.
INLINE long long take_above(real *x, const real *add, long long begin, long long end, Magnitude bound, int *index,
                            real *entry) {
  long long held = 0, i = begin;
#ifdef AVX512
  if (__builtin_cpu_supports("avx512vl")) take_by_lanes(x, add, i, end, bound, index, entry, held);
  else
#endif
  for (; i + BLOCK <= end; i += BLOCK) {
    union { unsigned char one[BLOCK]; unsigned long long eight[BLOCK / 8]; } large;
    for (int j = 0; j < BLOCK; ++j) {
      x[i + j] = add ? x[i + j] + add[i + j] : x[i + j];
      large.one[j] = magnitude(x[i + j]) > bound;
    }
    for (int e = 0; e < BLOCK / 8; ++e)
      if (large.eight[e])
        for (int j = 8 * e; j < 8 * e + 8; ++j) take(large.one[j], x, i + j, index, entry, held);
  }
  for (; i < end; ++i) {
    if (add) x[i] += add[i];
    take(magnitude(x[i]) > bound, x, i, index, entry, held);
  }
  return held;
}

INLINE Magnitude count_above(long long n, const real *entry, Magnitude bound) {
  Magnitude more = 0;
  for (long long i = 0; i < n; ++i) more += magnitude(entry[i]) > bound;
  return more;
}

// The k-th largest magnitude, bit by bit from the top: the largest number that k entries reach.
INLINE Magnitude kth_magnitude(long long n, const real *entry, long long k) {
  Magnitude found = 0;
  for (int bit = 8 * sizeof(real) - 2; bit >= 0; --bit) {
    const Magnitude higher = found | (Magnitude)1 << bit;
    if (count_above(n, entry, higher - 1) >= k) found = higher;
  }
  return found;
}

// A bound that a few more than k entries of x + add exceed, as far as a sample can tell; -1 if it cannot.
INLINE Magnitude guess(const real *x, const real *add, long long begin, long long end, long long k, real *sample) {
  long long drawn = 0;
  for (long long i = begin; i + LINE <= end; i += LINE * LINES)
    for (int j = 0; j < LINE; ++j) sample[drawn++] = add ? x[i + j] + add[i + j] : x[i + j];
  const double expected = (double)k * drawn / (end - begin);
  const long long rank = (long long)(expected + 4 * root(expected)) + 4;  // too high once in 30 000 times
  return rank < drawn ? kth_magnitude(drawn, sample, rank) - 1 : -1;
}

// The k largest of the entries held move to `index_kept` and `entry_kept`, in order, and the others back into x.
// Returns the least magnitude that was kept.
INLINE Magnitude keep_largest(long long k, real *x, long long held, const int *index, const real *entry, int *index_kept,
                              real *entry_kept) {
  const Magnitude least = kth_magnitude(held, entry, k);
  long long kept = 0, ties = k - count_above(held, entry, least);
  for (long long i = 0; i < held; ++i) {
    const Magnitude m = magnitude(entry[i]);
    if (m > least || (m == least && ties-- > 0)) {
      index_kept[kept] = index[i];
      entry_kept[kept++] = entry[i];
    } else {
      x[index[i]] = entry[i];
    }
  }
  return least;
}

// x <- x + add, and at least the k largest entries above `bound` move out of x, if there are so many; returns how many
// moved.  Whenever there is no room left all but the k largest move back: no smaller one can be among the k largest of
// all.
INLINE long long collect(long long k, real *x, const real *add, long long begin, long long end, Magnitude bound,
                         long long room, int *index, real *entry) {
  long long held = 0;
  for (long long i = begin; i < end; i += CHUNK) {
    if (held + CHUNK > room) bound = keep_largest(k, x, held, index, entry, index, entry), held = k;
    held += take_above(x, add, i, i + CHUNK < end ? i + CHUNK : end, bound, index + held, entry + held);
  }
  return held;
}

// x <- x + add, and all entries above `bound` move out of x: their indices, ascending, and values.  place[0] is how far
// in x, and place[1] how many entries, this call and earlier ones came: not to the end if there is no room for a chunk.
KERNEL(take_above)(long long n, real *x, long long given, const real *add, long long room, int *index, real *entry,
                   long long two, long long *place, long long bound) {
  FOR_EACH(thread, 1) {
    while (place[0] < n && place[1] + CHUNK <= room) {
      const long long begin = place[0], end = begin + CHUNK < n ? begin + CHUNK : n, held = place[1];
      place[1] += take_above(x, given ? add : 0, begin, end, (Magnitude)bound, index + held, entry + held);
      place[0] = end;
    }
  }
}

// x <- x + add, and of each part [offset, offset + size) of x the `count` largest entries move out of it, those of equal
// magnitude from the lowest index on.  They are k in all.  There is room for a chunk more than a part, or than its count
// twice; the more, the rarer entries move back.
KERNEL(take_largest)(long long n, real *x, long long given, const real *add, long long parts, const long long *offset,
                     const long long *size, const long long *count, long long k, int *index, real *entry,
                     long long room, int *candidate, real *large) {
  FOR_EACH(thread, 1) {
    for (long long p = 0; p < parts; ++p) {
      const long long begin = offset[p], end = begin + size[p];
      const real *const sum = given ? add : 0;
      const Magnitude bound = guess(x, sum, begin, end, count[p], large);
      long long held = collect(count[p], x, sum, begin, end, bound, room, candidate, large);
      if (held < count[p]) {  // guessed too high
        for (long long i = 0; i < held; ++i) x[candidate[i]] = large[i];
        held = collect(count[p], x, 0, begin, end, -1, room, candidate, large);
      }
      keep_largest(count[p], x, held, candidate, large, index, entry);
      index += count[p], entry += count[p];
    }
  }
}
