// Rows of tensors that all ranks choose alike: each is known by a few sums of its elements, which ranks add up before
// they choose (ARC-Top-K, 2025).
#include "portable.h"

#define SIGNS 4       // an element's, so many numbers a sketch has of a row
#define TOGETHER 256  // rows of a block
#define LANES 8         // sums of a row, which a vector holds
#define AT_ONCE (HOST ? SIGNS : 1)  // numbers of a row, for want of registers

// `size` neighbours in a tensor, from `begin` on; the last row of a tensor may be shorter than the others.
struct TensorRow {
  long long begin, size;
};

// Signs, 1 or -1, that follow from a key.
KERNEL(draw_signs)(long long n, real *sign, long long key) {
  FOR_EACH_PIECE(c, n) {
    FOR_EACH_IN_BLOCK(i, c.begin, c.end) sign[i] = mixed(key, i) >> 63 ? (real)-1 : (real)1;
  }
}

// sketch[SIGNS r + j] <- the sum of row r, its element i times sign[of j + i]: LANES sums, each of every LANES-th
// element in their order, which are then added up in pairs.
KERNEL(sketch_rows)(long long n, const real *x, long long numbers, const long long *table, long long signs,
                    const real *sign, long long cells, real *sketch, long long rows, long long blocks) BLOCKS(blocks) {
  const long long of = signs / SIGNS;
  FOR_EACH_PIECE(c, blocks * CHUNK) {
    FOR_EACH_IN_BLOCK(r, c.index * TOGETHER, min(rows, (c.index + 1) * TOGETHER)) {
      const TensorRow row = ((const TensorRow *)table)[r];
      const real *const from = x + row.begin;
      for (int first = 0; first < SIGNS; first += AT_ONCE) {
        const real *const by = sign + of * first;
        real sum[AT_ONCE][LANES] = {};
        long long i = 0;
        NO_UNROLL for (; i + LANES <= row.size; i += LANES)
          for (int j = 0; j < AT_ONCE; ++j)
            for (int l = 0; l < LANES; ++l) sum[j][l] += by[of * j + i + l] * from[i + l];
        for (int j = 0; j < AT_ONCE; ++j) {
          for (int l = 0; l < LANES; ++l) sum[j][l] += i + l < row.size ? by[of * j + i + l] * from[i + l] : (real)0;
          for (int l = 0; l < 4; ++l) sum[j][l] += sum[j][l + 4];
          sketch[SIGNS * r + first + j] = (sum[j][0] + sum[j][2]) + (sum[j][1] + sum[j][3]);
        }
      }
    }
  }
}

// energy[r] <- the sum of the squares of what is known of row r.
KERNEL(row_energies)(long long cells, const real *sketch, long long rows, real *energy) {
  FOR_EACH_PIECE(c, rows) {
    FOR_EACH_IN_BLOCK(r, c.begin, c.end) {
      real sum = 0;
      for (int j = 0; j < SIGNS; ++j) sum += sketch[SIGNS * r + j] * sketch[SIGNS * r + j];
      energy[r] = sum;
    }
  }
}

// Move chosen rows out of x, one behind the other, with zeros where a row is shorter than `of`.
KERNEL(take_rows)(long long n, real *x, long long numbers, const long long *table, long long k, const int *chosen,
                  long long cells, real *payload, long long of, SkipIf skip) {
  const bool refused = skips(skip);
  FOR_EACH_PIECE(c, cells) {
    FOR_EACH_IN_BLOCK(i, c.begin, c.end) {
      const TensorRow row = ((const TensorRow *)table)[chosen[i / of]];
      const long long place = i % of;
      const bool there = place < row.size;
      payload[i] = there ? x[row.begin + place] : (real)0;
      if (there && !refused) x[row.begin + place] = 0;
    }
  }
}

// Put rows back where they were chosen.
KERNEL(put_rows)(long long n, real *x, long long numbers, const long long *table, long long k, const int *chosen,
                 long long cells, const real *payload, long long of) {
  FOR_EACH_PIECE(c, cells) {
    FOR_EACH_IN_BLOCK(i, c.begin, c.end) {
      const TensorRow row = ((const TensorRow *)table)[chosen[i / of]];
      const long long place = i % of;
      if (place < row.size) x[row.begin + place] = payload[i];
    }
  }
}
