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

// x <- x + add, where anything is `given` to add; else add is x.  partial[c] <- the sum of magnitudes of chunk c, in
// which what is finite counts as no more than a single can hold.
INLINE double meet(real &x, real add, bool given) {
  if (given) x += add;
  const double most = 0x1.fffffep127, size = x < 0 ? -x : x;
  return is_finite(x) && size > most ? most : size;
}
KERNEL(partial_magnitudes)(Table table, real *x, const real *add, long long given, double *partial, Unless refused) {
  if (holds(refused)) return;
  FOR_EACH_CHUNK_BY_LANES(c, table) {
    real *const to = x + table.rows[c.row].offset;
    const real *const more = add + table.rows[c.row].offset;
    Sums sums = {};
    in_lanes(c, [&](long long i, int j) { sums[j] += meet(to[i], more[i], given); });
    const double sum = folded(sums);
    if (leads_lanes()) partial[c.index] = sum;
  }
}

// The sum of values[step begin], ..., values[step (end - 1)], one after the other; the thread that leads its block has it.
#define STAGE 256  // chunks that are read at once
INLINE double in_order(const double *values, long long begin, long long end, long long step) {
  SCRATCH double some[STAGE];
  double total = 0;
  for (long long first = begin; first < end; first += STAGE) {
    const long long count = end - first < STAGE ? end - first : STAGE;
    FOR_EACH_HERE(j, 0, count) some[j] = values[(first + j) * step];
    together();
    if (leads_block())
      for (long long j = 0; j < count; ++j) total += some[j];
    together();
  }
  return total;
}

// sum[kinds row + k] <- the sum of partial[kinds c + k] over that member's chunks c, for every kind k of sum
KERNEL(fold_partials)(Table table, const double *partial, double *sum, long long kinds) BLOCKS(rows) {
  FOR_EACH_ROW(row, table) {
    const long long begin = table.rows[row].first, chunks = (table.rows[row].size + CHUNK - 1) / CHUNK;
    for (long long k = 0; k < kinds; ++k) {
      const double total = in_order(partial + k, begin, begin + chunks, kinds);
      if (leads_block()) sum[row * kinds + k] = total;
    }
  }
}

// mean[0] <- the sum of all n chunks, which have `count` elements, over their count; 0 if there are none
KERNEL(mean_of_partials)(long long n, const double *partial, long long one, single_t *mean, double count,
                         Unless refused) {
  if (holds(refused)) return;
  FOR_EACH_PIECE(alone, 1) {  // one block
    const double total = in_order(partial, 0, n, 1);
    if (leads_block()) mean[0] = (single_t)(count > 0 ? total / count : 0);
  }
}
