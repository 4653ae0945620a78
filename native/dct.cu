// The cosine transform of tiles of matrices, and back: DCT-II, orthonormal, so that the inverse is the transpose.
#include "portable.h"

#define SIDE 64               // of a tile at most, and of all matrices here, whose other entries are zeros
#define TALL 4                // rows that are computed at once, and columns
#define ACROSS (HOST ? 16 : 4)
#define ENTRIES (SIDE * SIDE)

// A tile of rows x columns: entry (r, c) of it stands at `at` + r `stride` + c in a tensor, and its coefficients one
// row behind the other from `place` on.
struct TensorTile {
  long long at, stride, rows, columns, place;
};

// ACROSS neighbours in a row.  [a host's compiler keeps such vectors in registers, and arrays in memory]
#if !HOST
struct Lanes {
  real at[ACROSS];
};
INLINE void add_product(Lanes &sum, real left, const real *right) {
#pragma unroll
  for (int w = 0; w < ACROSS; ++w) sum.at[w] += left * right[w];
}
INLINE real lane(const Lanes &lanes, int w) { return lanes.at[w]; }
INLINE void copy_lanes(real *to, const real *from) {
#pragma unroll
  for (int w = 0; w < ACROSS; ++w) to[w] = from[w];
}
#else
typedef real Lanes __attribute__((vector_size(ACROSS * sizeof(real)), aligned(sizeof(real)), may_alias));
INLINE void add_product(Lanes &sum, real left, const real *right) { sum += left * *(const Lanes *)right; }
INLINE real lane(const Lanes &lanes, int w) { return lanes[w]; }
INLINE void copy_lanes(real *to, const real *from) { *(Lanes *)to = *(const Lanes *)from; }
#endif

// to <- rows x columns entries of left right, whose sums are formed in the order of the `inner` indices on every side.
INLINE void multiply(const real *left, const real *right, long long inner, const TensorTile &t, real *to,
                     long long stride) {
  const long long across = (t.columns + ACROSS - 1) / ACROSS, blocks = (t.rows + TALL - 1) / TALL * across;
  NO_UNROLL FOR_EACH_IN_BLOCK(b, 0, blocks) {
    const long long row = b / across * TALL, column = b % across * ACROSS;
    const real *const l = left + row * SIDE, *const r = right + column;
    Lanes sum0 = {}, sum1 = {}, sum2 = {}, sum3 = {};
    NO_UNROLL for (long long j = 0; j < inner; ++j) {
      add_product(sum0, l[j], r + j * SIDE);
      add_product(sum1, l[j + SIDE], r + j * SIDE);
      add_product(sum2, l[j + 2 * SIDE], r + j * SIDE);
      add_product(sum3, l[j + 3 * SIDE], r + j * SIDE);
    }
    real *const out = to + row * stride + column;
    for (int w = 0; w < ACROSS && column + w < t.columns; ++w) {
      out[w] = lane(sum0, w);
      if (row + 1 < t.rows) out[w + stride] = lane(sum1, w);
      if (row + 2 < t.rows) out[w + 2 * stride] = lane(sum2, w);
      if (row + 3 < t.rows) out[w + 3 * stride] = lane(sum3, w);
    }
  }
}

// shared <- rows x columns entries
INLINE void fetch(real *shared, const real *from, const TensorTile &t, long long stride) {
  const long long across = (t.columns + ACROSS - 1) / ACROSS;
  NO_UNROLL FOR_EACH_IN_BLOCK(b, 0, t.rows * across) {
    const long long row = b / across, column = b % across * ACROSS;
    real *const to = shared + row * SIDE + column;
    const real *const at = from + row * stride + column;
    if (column + ACROSS <= t.columns) copy_lanes(to, at);
    else
      for (int w = 0; column + w < t.columns; ++w) to[w] = at[w];
  }
}

// to <- left(rows) x right(columns) for each tile x of `from`: coefficients of a tensor's entries, or with `inverse`
// entries of coefficients.  Of each side length s up to SIDE, left[s ENTRIES] and right[s ENTRIES] are a matrix: the
// basis, one function in each row, and its transpose, or for the inverse the other way round.
KERNEL(transform_tiles)(long long n, const real *from, long long same, real *to, long long cells,
                        const long long *table, long long numbers, const real *left, long long others,
                        const real *right, long long tiles, long long inverse) BLOCKS(tiles) {
  FOR_EACH_PIECE(c, tiles * CHUNK) {
    SHARED real shared[ENTRIES];
    const TensorTile t = ((const TensorTile *)table)[c.index];
    const long long apart = t.stride, together = t.columns;
    real *const out = to + (inverse ? t.at : t.place);
    const long long stride = inverse ? apart : together;
    FOR_EACH_IN_BLOCK(i, 0, ENTRIES) shared[i] = 0;
    block_sync();
    fetch(shared, from + (inverse ? t.place : t.at), t, inverse ? together : apart);
    block_sync();
    multiply(shared, right + t.columns * ENTRIES, t.columns, t, out, stride);
    block_sync();
    fetch(shared, out, t, stride);
    block_sync();
    multiply(left + t.rows * ENTRIES, shared, t.rows, t, out, stride);
    block_sync();
  }
}
