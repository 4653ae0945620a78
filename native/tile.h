// What sift.cu does by blocks: a tile of entries, of which some are marked, gets places in the order of indices.
#pragma once
#include "portable.h"

#if !HOST

typedef unsigned long long Word64;

#define GROUPS (CHUNK / WIDTH)  // of a tile, which is a CHUNK; a thread looks at the WIDTH entries of a group at once
#define ALL_LANES (~0u)

// Two counts in one number, of entries above a bound and of entries at it: below 2^31 each.
typedef Word64 Counts;
INLINE Counts counts(long long above, long long ties) { return (Counts)above | (Counts)ties << 31; }
INLINE long long above_of(Counts c) { return (long long)(c & 0x7fffffff); }
INLINE long long ties_of(Counts c) { return (long long)(c >> 31 & 0x7fffffff); }

// Groups first, first + threads, ... of the entries from[begin], ... from[end - 1]: read all before one is used, so that
// reads overlap.  Beyond the end are zeros.
#define BATCH 2
struct Batch {
  real at[BATCH][WIDTH];
};
INLINE long long left_of(long long begin, long long end, int first, int b) {
  return end - begin - (long long)(first + b * (int)blockDim.x) * WIDTH;
}
INLINE void read(Batch &batch, const real *from, long long begin, long long end, int first) {
  const bool aligned = is_aligned(from + begin);
#pragma unroll
  for (int b = 0; b < BATCH; ++b) {
    const long long left = left_of(begin, end, first, b);
    if (aligned && left >= WIDTH) {
      const Lanes<const real> all(from + end - left);
#pragma unroll
      for (int w = 0; w < WIDTH; ++w) batch.at[b][w] = all.at()[w];
    } else {
#pragma unroll
      for (int w = 0; w < WIDTH; ++w) batch.at[b][w] = w < left ? from[end - left + w] : 0;
    }
  }
}
INLINE void write(const Batch &batch, real *to, long long begin, long long end, int first) {
  const bool aligned = is_aligned(to + begin);
#pragma unroll
  for (int b = 0; b < BATCH; ++b) {
    const long long left = left_of(begin, end, first, b);
    if (aligned && left >= WIDTH) {
      Lanes<real>(to + end - left, batch.at[b]).store();
    } else {
#pragma unroll
      for (int w = 0; w < WIDTH; ++w)
        if (w < left) to[end - left + w] = batch.at[b][w];
    }
  }
}

// What a tile tells those behind it, in one word, so that no fence is needed: nothing yet, its own counts, or its own
// and those of all tiles before it in its part.
#define OWN (1ull << 62)
#define ALL (2ull << 62)
#define COUNTS (OWN - 1)

// marks[g]: which entries of group g are above the bound (low half), and which are at it (high half).
struct Tile {
  unsigned char marks[GROUPS];
  Counts warps[8], before;
};

INLINE Counts counts_of(unsigned marks) { return counts(__popc(marks & 15), __popc(marks >> 4)); }

// The groups whose places a thread gives: [begin, end), neighbours, so that places ascend with threads.
INLINE void share(int &begin, int &end) {
  const int each = (GROUPS + blockDim.x - 1) / blockDim.x;
  begin = threadIdx.x * each < GROUPS ? threadIdx.x * each : GROUPS;
  end = begin + each < GROUPS ? begin + each : GROUPS;
}

// The counts of all tiles of the part before this one, which stands `back` tiles behind the part's first: a warp asks 32
// of them at once, from the nearest on, as far as to one that knows all before it.
INLINE Counts look_back(const volatile Word64 *tile, long long back) {
  const int lane = threadIdx.x % 32;
  Counts sum = 0;
  for (long long near = 1; near <= back;) {
    const Word64 told = near + lane <= back ? tile[-near - lane] : ALL;
    const unsigned silent = __ballot_sync(ALL_LANES, told < OWN), knows = __ballot_sync(ALL_LANES, told >= ALL);
    const int last = knows ? __ffs(knows) - 1 : 31;  // so far it counts
    if (silent << (31 - last)) {
      __nanosleep(20);
      continue;
    }
    Counts part = lane <= last ? told & COUNTS : 0;
    for (int by = 16; by; by /= 2) part += __shfl_xor_sync(ALL_LANES, part, by);
    sum += part;
    if (knows) break;
    near += 32;
  }
  return sum;
}

// What is marked before this thread's share, in all tiles of the part; `told` is this tile's word.  All threads of the
// block come, after the marks of all are seen; `total` gets what is marked up to the end of this tile.
INLINE Counts places(Tile &tile, volatile Word64 *told, long long back, Counts &total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  int begin, end;
  share(begin, end);
  Counts mine = 0;
  for (int g = begin; g < end; ++g) mine += counts_of(tile.marks[g]);
  Counts upto = mine;
  for (int by = 1; by < 32; by *= 2) {
    const Counts left = __shfl_up_sync(ALL_LANES, upto, by);
    upto += lane < by ? 0 : left;
  }
  if (lane == 31) tile.warps[warp] = upto;
  __syncthreads();
  Counts before = upto - mine, own = 0;
  for (int w = 0; w < warps; ++w) {
    before += w < warp ? tile.warps[w] : 0;
    own += tile.warps[w];
  }
  if (!warp) {
    if (!lane) *told = (back ? OWN : ALL) | own;
    const Counts earlier = look_back(told, back);
    if (!lane) {
      if (back) *told = ALL | (earlier + own);
      tile.before = earlier;
    }
  }
  __syncthreads();
  total = tile.before + own;
  return tile.before + before;
}

// The next tile of all that there are: those before it are taken by blocks that run already, so that waiting for them
// ends.
INLINE long long take_ticket(long long *tickets) {
  __shared__ long long ticket;
  __syncthreads();
  if (!threadIdx.x) ticket = (long long)atomicAdd((Word64 *)tickets, 1ull);
  __syncthreads();
  return ticket;
}

#endif
