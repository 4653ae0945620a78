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
KERNEL(add_on_grid)(long long n, const real *x, double *total, long long chunks, const single_t *most, long long bits) {
  FOR_EACH_PIECE(c, n) {
    const long long exponent = float_as_uint(most[c.index]) >> 23;
    if (exponent == 255) {
      FOR_EACH_IN_BLOCK(i, c.begin, c.end) total[i] = longlong_as_double(NOT_A_NUMBER);
      continue;
    }
    // 2^52 times the grid, and half of that again: sums with it have no digits below the grid.
    const long long field = 1023 - 127 + (exponent ? exponent : 1) + bits;
    const double shift = longlong_as_double(field << 52 | 1ll << 51);
    FOR_EACH_IN_BLOCK(i, c.begin, c.end) total[i] += ((double)x[i] + shift) - shift;
  }
}

// x <- sum
KERNEL(round_sums)(long long n, const double *sum, real *x) {
  FOR_EACH_PIECE(c, n) {
    FOR_EACH_IN_BLOCK(i, c.begin, c.end) {
      // All machines have the same bits for what is no number, of which conversions make others.
      const bool is_number = ((Word64)double_as_longlong(sum[i]) << 1) <= 2047ull << 53;
      x[i] = is_number ? (real)sum[i] : (real)uint_as_float(0x7fc00000);
    }
  }
}
