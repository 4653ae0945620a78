// A prefix sum over all tiles of a launch, in one pass: every block gets the number of marked entries before its tile,
// so that they are written in the order of their indices.  This is Merrill and Garland's decoupled look-back
// ("Single-pass Parallel Prefix Scan with Decoupled Look-back", NVIDIA NVR-2016-002, 2016): a tile publishes its own
// counts at once; then it adds up those of the tiles before it, back to one that has published the sum of all up to its
// end, and does the same.
#pragma once
#include "portable.h"

#if !HOST

#define GROUPS (CHUNK / WIDTH)  // of a tile, which is a CHUNK; a thread reads the WIDTH entries of a group at once
#define ALL_LANES (~0u)

// Two counts in one number, which are added at once: entries above a bound, and entries at it.  Below 2^31 each.
typedef Word64 Counts;
INLINE Counts counts(long long above, long long ties) { return (Counts)above | (Counts)ties << 31; }
INLINE long long above_of(Counts c) { return (long long)(c & 0x7fffffff); }
INLINE long long ties_of(Counts c) { return (long long)(c >> 31 & 0x7fffffff); }

// Groups first, first + threads, ... of the entries from[begin], ... from[end - 1].  All are read before one is used,
// so that reads overlap.  Beyond the end are zeros.
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
      const Vector<const real> all(from + end - left);
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
      Vector<real>(to + end - left, batch.at[b]).store();
    } else {
#pragma unroll
      for (int w = 0; w < WIDTH; ++w)
        if (w < left) to[end - left + w] = batch.at[b][w];
    }
  }
}

// The sum of what this lane of a warp has and those before it have.
template <class T>
INLINE T warp_inclusive_sum(T mine) {
  T upto = mine;
  for (int by = 1; by < 32; by *= 2) {
    const T left = __shfl_up_sync(ALL_LANES, upto, by);
    upto += threadIdx.x % 32 < by ? 0 : left;
  }
  return upto;
}

// The status of a tile, in the same word as its counts, so that no fence is needed.  0 is the paper's X, nothing yet;
// AGGREGATE (A): the tile's own counts; PREFIX (P): those and the counts of all tiles before it in its part.
#define AGGREGATE (1ull << 62)
#define PREFIX (2ull << 62)
#define COUNTS (AGGREGATE - 1)

// marks[g]: which entries of group g are above the bound (low half), and which are at it (high half).
struct Tile {
  unsigned char marks[GROUPS];
  Counts warps[8], before;
};

INLINE Counts counts_of(unsigned marks) { return counts(__popc(marks & 15), __popc(marks >> 4)); }

// The groups that a thread scans: [begin, end), neighbours, so that places ascend with threads.
INLINE void groups_of_thread(int &begin, int &end) {
  const int each = (GROUPS + blockDim.x - 1) / blockDim.x;
  begin = threadIdx.x * each < GROUPS ? threadIdx.x * each : GROUPS;
  end = begin + each < GROUPS ? begin + each : GROUPS;
}

// The counts of all tiles of the part before this one, which is tile number `back` of the part: a warp reads the status
// of 32 of them at once, from the nearest on, as far as to one that has its prefix.
INLINE Counts look_back(const volatile Word64 *status, long long back) {
  const int lane = threadIdx.x % 32;
  Counts sum = 0;
  for (long long near = 1; near <= back;) {
    const Word64 word = near + lane <= back ? status[-near - lane] : PREFIX;
    const unsigned absent = __ballot_sync(ALL_LANES, word < AGGREGATE);
    const unsigned prefix = __ballot_sync(ALL_LANES, word >= PREFIX);
    const int last = prefix ? __ffs(prefix) - 1 : 31;  // lanes up to this one count
    if (absent << (31 - last)) {
      __nanosleep(20);
      continue;
    }
    Counts part = lane <= last ? word & COUNTS : 0;
    for (int by = 16; by; by /= 2) part += __shfl_xor_sync(ALL_LANES, part, by);
    sum += part;
    if (prefix) break;
    near += 32;
  }
  return sum;
}

// The counts of what is marked before this thread's groups, in all tiles of the part; `status` is this tile's word.
// All threads of the block come here, once all marks are set; `total` gets the counts up to the end of this tile.
INLINE Counts exclusive_scan(Tile &tile, volatile Word64 *status, long long back, Counts &total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  int begin, end;
  groups_of_thread(begin, end);
  Counts mine = 0;
  for (int g = begin; g < end; ++g) mine += counts_of(tile.marks[g]);
  const Counts upto = warp_inclusive_sum(mine);
  if (lane == 31) tile.warps[warp] = upto;
  __syncthreads();
  Counts before = upto - mine, own = 0;
  for (int w = 0; w < warps; ++w) {
    before += w < warp ? tile.warps[w] : 0;
    own += tile.warps[w];
  }
  if (!warp) {
    if (!lane) *status = (back ? AGGREGATE : PREFIX) | own;
    const Counts earlier = look_back(status, back);
    if (!lane) {
      if (back) *status = PREFIX | (earlier + own);
      tile.before = earlier;
    }
  }
  __syncthreads();
  total = tile.before + own;
  return tile.before + before;
}

// The number of the next tile.  Tiles before it belong to blocks that run already, whatever order blocks are started
// in, so that waiting for them ends.
INLINE long long take_ticket(long long *tickets) {
  __shared__ long long ticket;
  __syncthreads();
  if (!threadIdx.x) ticket = (long long)atomicAdd((Word64 *)tickets, 1ull);
  __syncthreads();
  return ticket;
}

#endif
