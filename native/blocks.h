// Blocks of a chunk that have a number each: on the host one after the other, on a GPU all at once.
#pragma once
#include "portable.h"

#define SMALLEST 32  // elements of a block at least; a power of two, as all blocks are

// body(i, scale of its block, array[i] ...) for the elements i of a chunk.
template <class Body, class... T>
INLINE void each_with_scale(const Chunk &c, long long block, const real *scale, const Body &body, T *...array) {
#if HOST
  for (long long begin = c.begin; begin < c.end; begin += block) {
    const real mine = scale[(begin - c.begin) / block];
    const long long end = min(begin + block, c.end);
    INDEPENDENT for (long long i = begin; i < end; ++i) body(i, mine, array[i]...);
  }
#else
  const int shift = countr_zero(block);
  const auto each = [&](long long i, int j, auto *...at) { body(i, scale[(i - c.begin) >> shift], at[j]...); };
  grid_stride<1>(c.begin, c.end, 0, 1, each, array...);
#endif
}

// most[b] <- the largest magnitude of block b of `count` numbers.
INLINE void find_largest(const real *now, long long count, long long block, Magnitude *most) {
#if HOST
  for (long long b = 0; b * block < count; ++b) {
    const long long end = min((b + 1) * block, count);
    Magnitude mine = 0;
    for (long long i = b * block; i < end; ++i) mine = magnitude(now[i]) > mine ? magnitude(now[i]) : mine;
    most[b] = mine;
  }
#else
  FOR_EACH_IN_BLOCK(r, 0, (count + SMALLEST - 1) / SMALLEST) {
    Magnitude mine = 0;
    for (int j = 0; j < SMALLEST; ++j) {  // [each thread begins at another number: no two meet in a memory bank]
      const int i = (int)r * SMALLEST + (j + (int)r) % SMALLEST;
      if (i < count && magnitude(now[i]) > mine) mine = magnitude(now[i]);
    }
    most[r] = mine;
  }
  for (long long by = SMALLEST, runs = (count + by - 1) / by; by < block; by *= 2, runs = (runs + 1) / 2) {
    const long long step = by / SMALLEST;
    block_sync();
    FOR_EACH_IN_BLOCK(r, 0, runs / 2) {
      const Magnitude other = most[(2 * r + 1) * step];
      if (other > most[2 * r * step]) most[2 * r * step] = other;
    }
  }
#endif
  block_sync();
}
