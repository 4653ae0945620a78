// Blocks of a chunk that have a number each: on the host one after the other, on a GPU all at once.
#pragma once
#include "portable.h"

#define SMALLEST 32  // elements of a block at least; a power of two, as all blocks are

// FOR_EACH_STRETCH(s, c, block): the stretches of a chunk that are worked on at a time, which are one block on the host,
// so that memory is read while the last one is computed, and the whole chunk on a GPU.
#if HOST
#define FOR_EACH_STRETCH(s, c, block)                                                          \
  for (Chunk s = {c.index, c.member, c.begin, min(c.begin + (block), c.end)}; s.begin < c.end; \
       s.begin = s.end, s.end = min(s.begin + (block), c.end))
#else
#define FOR_EACH_STRETCH(s, c, block) for (Chunk s = c; s.begin < c.end; s.begin = c.end)
#endif

// body(i, scale of its block, array[i] ...) for the elements i of a stretch or a chunk.
template <class Body, class... T>
INLINE void each_with_scale(const Chunk &c, long long block, const real *scale, const Body &body, T *...array) {
#if HOST
  for (long long begin = c.begin; begin < c.end; begin += block, ++scale) {
    const real mine = *scale;
    const long long end = min(begin + block, c.end);
    INDEPENDENT for (long long i = begin; i < end; ++i) body(i, mine, array[i]...);
  }
#else
  const int shift = countr_zero(block);
  const auto each = [&](long long i, int j, auto *...at) { body(i, scale[(i - c.begin) >> shift], at[j]...); };
  grid_stride<1>(c.begin, c.end, 0, 1, each, array...);
#endif
}

// now <- x + add, or x where there are no `addends`, of a stretch that begins at now[0]; the first of a block's
// numbers in `most`, which has one for every SMALLEST elements, <- its largest magnitude.
INLINE void add_and_measure(const Chunk &s, long long block, const real *x, const real *add, bool addends, real *now,
                            Magnitude *most) {
  real *const sums = now - s.begin;
#if HOST
  Magnitude mine = 0;
  const auto measure = [&](long long i) { mine = magnitude(sums[i]) > mine ? magnitude(sums[i]) : mine; };
  if (addends)
    for (long long i = s.begin; i < s.end; ++i) sums[i] = x[i] + add[i], measure(i);
  else
    for (long long i = s.begin; i < s.end; ++i) sums[i] = x[i], measure(i);
  most[0] = mine;
#else
  const int count = (int)(s.end - s.begin);
  FOR_EACH_IN(i, s, x, add, sums) { sums[i] = addends ? x[i] + add[i] : x[i]; };
  block_sync();
  FOR_EACH_IN_BLOCK(r, 0, (count + SMALLEST - 1) / SMALLEST) {
    Magnitude mine = 0;
    for (int j = 0; j < SMALLEST; ++j) {  // [each thread begins at another number: no two meet in a memory bank]
      const int i = (int)r * SMALLEST + (j + (int)r) % SMALLEST;
      if (i < count && magnitude(now[i]) > mine) mine = magnitude(now[i]);
    }
    most[r] = mine;
  }
  for (int by = SMALLEST, runs = (count + by - 1) / by; by < block; by *= 2, runs = (runs + 1) / 2) {
    const int step = by / SMALLEST;
    block_sync();
    FOR_EACH_IN_BLOCK(r, 0, runs / 2) {
      const Magnitude other = most[(2 * r + 1) * step];
      if (other > most[2 * r * step]) most[2 * r * step] = other;
    }
  }
  block_sync();
#endif
}
