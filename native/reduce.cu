// Sums in a fixed order, so that they are the same for every split of the work: blocks of CHUNK consecutive elements of
// one tensor, LANES interleaved accumulators each, folded pairwise; then the blocks one after the other.
#include "portable.h"

// partial[c] <- the sum of squares of chunk c, for all chunks that this call is given
KERNEL(partial_squares)(Table table, const real *flat, double *partial) {
  FOR_EACH_CHUNK_BY_LANES(c, table) {
    const real *x = flat + table.rows[c.row].offset;
    Sums sums = {};
    in_lanes(c, [&](long long i, int j) { sums[j] += (double)x[i] * (double)x[i]; });
    const double sum = folded(sums);
    if (leads_lanes()) partial[c.index] = sum;
  }
}

// sum[kinds row + k] <- the sum of partial[kinds c + k] over that member's chunks c, for every kind k of sum
#define STAGE 256  // chunks that are read at once
KERNEL(fold_partials)(Table table, const double *partial, double *sum, long long kinds) BLOCKS(rows) {
  FOR_EACH_ROW(row, table) {
    SCRATCH double some[STAGE];
    const long long begin = table.rows[row].first, end = begin + (table.rows[row].size + CHUNK - 1) / CHUNK;
    for (long long k = 0; k < kinds; ++k) {
      double total = 0;
      for (long long first = begin; first < end; first += STAGE) {
        const long long count = end - first < STAGE ? end - first : STAGE;
        FOR_EACH_HERE(j, 0, count) some[j] = partial[(first + j) * kinds + k];
        together();
        if (leads_block())
          for (long long j = 0; j < count; ++j) total += some[j];
        together();
      }
      if (leads_block()) sum[row * kinds + k] = total;
    }
  }
}
