// Sums that do not depend on their order.  Numbers are rounded to a grid that all ranks have for each CHUNK of them, so
// coarse that doubles hold every sum exactly (Demmel and Nguyen, "Parallel reproducible summation", 2015), and so fine
// that singles within 2^27 of the chunk's largest lose nothing, for four ranks; for 2^h within 2^(29 - h).
#include "portable.h"

#define NOT_A_NUMBER (2047ll << 52 | 1ll << 51)  // the bits of a double

// The bits of the largest magnitude of a chunk, as a single; those of an infinity, or above, where one is not finite.
INLINE unsigned largest_bits(const Chunk &c, const real *x) {
#if HOST
  unsigned most = 0;
  INDEPENDENT for (long long i = c.begin; i < c.end; ++i) {
    const unsigned bits = float_as_uint((single_t)x[i]) & 0x7fffffffu;
    most = bits > most ? bits : most;
  }
  return most;
#else
  SHARED unsigned most[256];
  FOR_EACH_IN_BLOCK(j, 0, 256) {
    unsigned mine = 0;
    for (long long i = c.begin + j; i < c.end; i += 256) {
      const unsigned bits = float_as_uint((single_t)x[i]) & 0x7fffffffu;
      mine = bits > mine ? bits : mine;
    }
    most[j] = mine;
  }
  block_sync();
  for (int by = 128; by; by /= 2) {
    FOR_EACH_IN_BLOCK(j, 0, by) most[j] = most[j] > most[j + by] ? most[j] : most[j + by];
    block_sync();
  }
  return most[0];
#endif
}

// most[c] <- the largest of itself and of the magnitudes of chunk c; infinite where one is not finite
KERNEL(largest_magnitudes)(long long n, const real *x, long long chunks, single_t *most) {
  FOR_EACH_PIECE(c, n) {
    const unsigned bits = largest_bits(c, x);
    const single_t magnitude = uint_as_float(bits < 0x7f800000u ? bits : 0x7f800000u);
    if (is_block_leader() && magnitude > most[c.index]) most[c.index] = magnitude;
    block_sync();
  }
}

// total <- total + x, rounded to the grid of a sum of 2^bits such numbers, `bits` >= 2; NaN where most is infinite
INLINE void add_to_grid(const Chunk &c, const real *x, double *total, single_t most, long long bits) {
  const long long exponent = float_as_uint(most) >> 23;
  if (exponent == 255) {
    FOR_EACH_IN_BLOCK(i, c.begin, c.end) total[i] = longlong_as_double(NOT_A_NUMBER);
    return;
  }
  // 2^52 times the grid, and half of that again: sums with it have no digits below the grid.
  const long long field = 1023 - 127 + (exponent ? exponent : 1) + bits;
  const double shift = longlong_as_double(field << 52 | 1ll << 51);
  FOR_EACH_IN_BLOCK(i, c.begin, c.end) total[i] += ((double)x[i] + shift) - shift;
}

// A sum as a real.  All machines have the same bits for what is no number, of which conversions make others.
INLINE real rounded(double sum) {
  const bool is_number = ((Word64)double_as_longlong(sum) << 1) <= 2047ull << 53;
  return is_number ? (real)sum : (real)uint_as_float(0x7fc00000);
}

// The same for all elements, by the `most` of their chunks
KERNEL(add_on_grid)(long long n, const real *x, double *total, long long chunks, const single_t *most, long long bits) {
  FOR_EACH_PIECE(c, n) {
    add_to_grid(c, x, total, most[c.index], bits);
  }
}

// x <- sum
KERNEL(round_sums)(long long n, const double *sum, real *x) {
  FOR_EACH_PIECE(c, n) {
    FOR_EACH_IN_BLOCK(i, c.begin, c.end) x[i] = rounded(sum[i]);
  }
}

// sum[j] <- part[0] + part[1] + ..., on the grids that `most` has for each CHUNK of these flat arrays of the bucket, for
// all j; sums may be among the parts.  What is not finite is counted as in `add_parts`, but for sums without a grid.
KERNEL(add_parts_on_grid)(Table table, long long parts, const real *const *part, long long sums, real *const *sum,
                          const single_t *most, long long *counts) {
  long long bits = 2;
  while (1ll << bits < parts) ++bits;
  FOR_EACH_CHUNK(c, table) {
    SHARED double chunk[CHUNK];
    const long long at = table.members[c.member].offset;
    for (Chunk d = c; d.begin < c.end; d.begin = d.end) {  // what lies in one grid
      const long long grid = (at + d.begin) / CHUNK;
      d.end = min(c.end, (grid + 1) * CHUNK - at);
      double *const total = chunk - d.begin;
      const bool bounded = float_as_uint(most[grid]) < 0x7f800000u;
      FOR_EACH_IN_BLOCK(i, d.begin, d.end) total[i] = 0;
      for (long long k = 0; k < parts; ++k) {
        const real *term = assume_global(part[k]) + at;
        add_to_grid(d, term, total, most[grid], bits);
        if (bounded) continue;
        int terms = 0;
        FOR_EACH_IN_BLOCK(i, d.begin, d.end) terms += !is_finite(term[i]);
        atomic_add(&counts[k * table.count + c.member], terms);
      }
      int nonfinite = 0;
      for (long long j = 0; j < sums; ++j) {
        real *to = assume_global(sum[j]) + at;
        nonfinite = 0;
        FOR_EACH_IN_BLOCK(i, d.begin, d.end) {
          const real x = rounded(total[i]);
          to[i] = x;
          nonfinite += !is_finite(x);
        }
      }
      atomic_add(&counts[parts * table.count + c.member], bounded ? nonfinite : 0);
    }
  }
}
