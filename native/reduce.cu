// Norms and means of whole tensors, from sums in a fixed order.
#include "sums.h"

// partial[c] <- the sum of squares of chunk c, for all chunks that this call is given
KERNEL(partial_squares)(Table table, const real *flat, double *partial) {
  FOR_EACH_CHUNK(c, table) {
    const real *x = flat + table.members[c.member].offset;
    SUM_CHUNK(i, c, partial, x) { return Squares{x[i]}; };
  }
}

// x <- x + add, where there are `addends`; else add is x.  partial[c] <- the sum of magnitudes of chunk c
KERNEL(partial_magnitudes)(Table table, real *x, const real *add, long long addends, double *partial, SkipIf skip) {
  if (skips(skip)) return;
  if (addends)
    FOR_EACH_CHUNK(c, table) {
      const long long at = table.members[c.member].offset;
      real *const to = x + at;
      const real *const increment = add + at;
      SUM_CHUNK(i, c, partial, to, increment) { return Magnitudes{to[i] += increment[i]}; };
    }
  else
    FOR_EACH_CHUNK(c, table) {
      const real *const from = add + table.members[c.member].offset;
      SUM_CHUNK(i, c, partial, from) { return Magnitudes{from[i]}; };
    }
}

// sum[kinds m + k] <- the sum of partial[kinds c + k] over that member's chunks c, for every kind k of sum
KERNEL(fold_partials)(Table table, const double *partial, double *sum, long long kinds) BLOCKS(members) {
  FOR_EACH_MEMBER(m, table) {
    const long long begin = table.members[m].first, chunks = (table.members[m].size + CHUNK - 1) / CHUNK;
    for (long long k = 0; k < kinds; ++k) {
      const double total = sum_in_turn(partial + k, begin, begin + chunks, kinds);
      if (is_block_leader()) sum[m * kinds + k] = total;
    }
  }
}

// mean[0] <- the sum of all n chunks, which have `count` elements, over their count; 0 if there are none
KERNEL(mean_of_partials)(long long n, const double *partial, long long one, single_t *mean, double count,
                         SkipIf skip) {
  if (skips(skip)) return;
  FOR_EACH_PIECE(alone, 1) {  // one block
    const double total = sum_in_turn(partial, 0, n, 1);
    if (is_block_leader()) mean[0] = (single_t)(count > 0 ? total / count : 0);
  }
}
