// From (index, value) entries of all ranks to a dense array.
#include "portable.h"

// Add one rank's entries; indices are distinct within a rank, and negative where there is no entry.
KERNEL(decode_sparse)(long long n, real *x, long long k, const int *index, const real *entry) {
  FOR_EACH(i, k, index, entry) {
    if (index[i] >= 0) x[index[i]] += entry[i];
  };
}

// x <- the sum of all ranks' entries, added in rank order: the bits of zeros and one decode_sparse after the other.
#define RANKS 64ll  // whose entries are looked for at once
KERNEL(decode_all)(long long n, real *x, long long ranks, const int *const *index, const real *const *entry,
                   const long long *lengths) {
  FOR_EACH_PIECE(c, n) {
    SHARED real total[CHUNK];
    SHARED long long edges[2 * RANKS];
    FOR_EACH_IN_BLOCK(i, 0, CHUNK) total[i] = 0;
    block_sync();
    for (long long first = 0; first < ranks; first += RANKS) {
      const long long count = min(ranks - first, RANKS);
      FOR_EACH_IN_BLOCK(e, 0, 2 * count) {
        const long long r = first + e / 2;
        edges[e] = first_from(e % 2 ? c.end : c.begin, assume_global(index[r]), lengths[r]);
      }
      block_sync();
      for (long long r = 0; r < count; ++r) {
        const int *indices = assume_global(index[first + r]);
        const real *values = assume_global(entry[first + r]);
        FOR_EACH_IN_BLOCK(j, edges[2 * r], edges[2 * r + 1])
          if (indices[j] >= c.begin && indices[j] < c.end)  // a damaged one may not
            total[indices[j] - c.begin] += values[j];
        block_sync();
      }
    }
    const real *sums = total - c.begin;
    FOR_EACH_IN(i, c, sums, x) { x[i] = sums[i]; };
    block_sync();
  }
}

// x <- the mean over the ranks that have sent an entry, times `brought`, where x is the sum over ranks.
//
// Of a rank whose number in `zeros` is 0, entries that are 0 do not count.
KERNEL(divide_by_senders)(long long n, real *x, long long ranks, const int *const *index, const real *const *entry,
                          const long long *lengths, const long long *zeros, double brought) {
  FOR_EACH_PIECE(c, n) {
    SHARED int senders[CHUNK];
    SHARED long long edges[2 * RANKS];
    FOR_EACH_IN_BLOCK(i, 0, CHUNK) senders[i] = 0;
    block_sync();
    for (long long first = 0; first < ranks; first += RANKS) {
      const long long count = min(ranks - first, RANKS);
      FOR_EACH_IN_BLOCK(e, 0, 2 * count) {
        const long long r = first + e / 2;
        edges[e] = first_from(e % 2 ? c.end : c.begin, assume_global(index[r]), lengths[r]);
      }
      block_sync();
      for (long long r = 0; r < count; ++r) {
        const int *indices = assume_global(index[first + r]);
        const real *values = assume_global(entry[first + r]);
        const bool all = zeros[first + r];
        FOR_EACH_IN_BLOCK(j, edges[2 * r], edges[2 * r + 1])
          if (indices[j] >= c.begin && indices[j] < c.end && (all || values[j] != 0)) ++senders[indices[j] - c.begin];
        block_sync();
      }
    }
    const int *const counts = senders - c.begin;
    FOR_EACH_IN(i, c, counts, x) { x[i] = counts[i] ? x[i] * (real)(brought / counts[i]) : x[i]; };
    block_sync();
  }
}
