// Sums in a fixed order, so that they are the same for every split of the work: blocks of CHUNK consecutive elements of
// one tensor, LANES interleaved accumulators each, folded pairwise; then the blocks one after the other.
#include "portable.h"

// partial[c] <- the sum of squares of chunk c, for all chunks that this call is given
KERNEL(partial_squares)(Table table, const real *flat, double *partial) {
  FOR_EACH_CHUNK_BY_LANES(c, table) {
    const real *x = flat + table.members[c.member].offset;
    sum_chunk(c, partial, [&](long long i) { return Terms{squared(x[i])}; });
  }
}

// x <- x + add, where there are `addends`; else add is x.  partial[c] <- the sum of magnitudes of chunk c, in
// which what is finite counts as no more than a single can hold.
INLINE double add_and_measure(real &x, real add, bool addends) {
  if (addends) x += add;
  const double most = 0x1.fffffep127, size = x < 0 ? -x : x;
  return is_finite(x) && size > most ? most : size;
}
KERNEL(partial_magnitudes)(Table table, real *x, const real *add, long long addends, double *partial, SkipIf skip) {
  if (skips(skip)) return;
  FOR_EACH_CHUNK_BY_LANES(c, table) {
    real *const to = x + table.members[c.member].offset;
    const real *const increment = add + table.members[c.member].offset;
    sum_chunk(c, partial, [&](long long i) { return Terms{add_and_measure(to[i], increment[i], addends)}; });
  }
}

// The sum of values[step begin], ..., values[step (end - 1)], one after the other; the thread that leads its block gets
// it.
#define STAGE 256ll  // chunks that are read at once
INLINE double in_order(const double *values, long long begin, long long end, long long step) {
  SHARED double stage[STAGE];
  double total = 0;
  for (long long first = begin; first < end; first += STAGE) {
    const long long count = min(end - first, STAGE);
    FOR_EACH_IN_BLOCK(j, 0, count) stage[j] = values[(first + j) * step];
    block_sync();
    if (is_block_leader())
      for (long long j = 0; j < count; ++j) total += stage[j];
    block_sync();
  }
  return total;
}

// sum[kinds m + k] <- the sum of partial[kinds c + k] over that member's chunks c, for every kind k of sum
KERNEL(fold_partials)(Table table, const double *partial, double *sum, long long kinds) BLOCKS(members) {
  FOR_EACH_MEMBER(m, table) {
    const long long begin = table.members[m].first, chunks = (table.members[m].size + CHUNK - 1) / CHUNK;
    for (long long k = 0; k < kinds; ++k) {
      const double total = in_order(partial + k, begin, begin + chunks, kinds);
      if (is_block_leader()) sum[m * kinds + k] = total;
    }
  }
}

// mean[0] <- the sum of all n chunks, which have `count` elements, over their count; 0 if there are none
KERNEL(mean_of_partials)(long long n, const double *partial, long long one, single_t *mean, double count,
                         SkipIf skip) {
  if (skips(skip)) return;
  FOR_EACH_PIECE(alone, 1) {  // one block
    const double total = in_order(partial, 0, n, 1);
    if (is_block_leader()) mean[0] = (single_t)(count > 0 ? total / count : 0);
  }
}
