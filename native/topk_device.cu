// Top-K and selection by threshold on a device: the bits of topk_host.cu, in passes that no host waits for.
//
// The threshold takes two launches: blank, sift_above.  The k largest of each part of x are a radix select from the
// highest digit on (Alabi et al., "Fast k-Selection Algorithms for Graphics Processing Units", 2012), of candidates
// that lie above a bound, which is guessed from a sample (as Lin et al., 2018, estimate theirs):
//   blank           zeros all counters, and clears the payload
//   guess_bounds    a bound that some more than k entries of a part lie above, from a sample
//   sift_parts      x <- x + add; entries above the bound become candidates and leave x
//   put_back        where the guess was bad - fewer candidates than k, or more than there is room for - they return;
//                   the passes below work on x there, and on the candidates everywhere else
//   count_digits    once for each digit, from the highest on: a histogram of it, over the entries whose digits before
//                   it are those of the k-th largest; its own digit follows from that
//   deliver         larger entries, and the first of those that are equal, go to the payload; other candidates return
// A bad guess costs time, and changes no bit.
#include "block_scan.h"

#if !HOST

#define LINE 16     // neighbours that are sampled together
#define LINES 1024  // of them in a sample, or all that there are
#define DRAW 4      // groups of it that a thread has under way at once
#define BITS (8 * (int)sizeof(real) - 1)  // of a magnitude
#define DIGITS ((BITS + 7) / 8)           // of 8 bits, but for the last
#define NOTHING ((Magnitude)((1ull << BITS) - 1))  // the bound that no entry is above

// Elements [offset, offset + size) of x, whose `count` largest are wanted.  `first` is the number of tiles of the parts
// before it, `output` that of their entries in the payload; candidates lie in [held, held + room).  The entry of number
// `rank` in the sample is the guess; 0 means that there shall be no candidates.
struct Part {
  long long offset, size, count, first, output, held, room, rank;
};

// Memory that the launches of one selection share, all zero at first: 8 + parts (2 + 128 DIGITS) + 2 tiles words.
struct State {
  long long *tickets, *bound, *candidates;
  unsigned *bins;
  Word64 *status;  // of tiles in sift_parts, then in deliver
};
INLINE State state_in(long long *words, long long parts) {
  long long *const bound = words + 8, *const candidates = bound + parts, *const bins = candidates + parts;
  return {words, bound, candidates, (unsigned *)bins, (Word64 *)(bins + parts * DIGITS * 128)};
}
INLINE unsigned *bins_of(const State &state, long long p, int digit) { return state.bins + (p * DIGITS + digit) * 256; }

INLINE long long tiles_of(long long n) { return (n + CHUNK - 1) / CHUNK; }
INLINE long long tiles_of(const long long *table, long long parts) {
  const Part *const end = (const Part *)table + parts;
  return parts ? end[-1].first + tiles_of(end[-1].size) : 0;
}

// The part that a tile belongs to, by bisection; empty parts have no tile.
INLINE long long part_of(const long long *table, long long parts, long long tile) {
  return partition_point(1, parts, [=](long long p) { return ((const Part *)table)[p].first <= tile; }) - 1;
}

// index <- -1, entry <- 0, state <- 0
KERNEL(blank)(long long k, int *index, real *entry, long long words, long long *state) {
  real *const zeros = (real *)state;
  FOR_EACH(i, k, index, entry) {
    index[i] = -1;
    entry[i] = 0;
  };
  FOR_EACH(i, words * (long long)(sizeof *state / sizeof *zeros), zeros) { zeros[i] = 0; };
}

// x <- x + add on one tile, [begin, end); entries that are then above the bound are marked.
INLINE void mark_above(Tile &tile, real *x, const real *add, long long begin, long long end, Magnitude bound) {
  for (int first = threadIdx.x; first < GROUPS; first += BATCH * blockDim.x) {
    Batch now, increment;
    read(now, x, begin, end, first);
    if (add) {
      read(increment, add, begin, end, first);
#pragma unroll
      for (int b = 0; b < BATCH; ++b)
#pragma unroll
        for (int w = 0; w < WIDTH; ++w) now.at[b][w] += increment.at[b][w];
      write(now, x, begin, end, first);
    }
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
      const long long left = left_of(begin, end, first, b);
      unsigned above = 0;
#pragma unroll
      for (int w = 0; w < WIDTH; ++w) above |= (unsigned)(w < left && magnitude(now.at[b][w]) > bound) << w;
      if (first + b * blockDim.x < GROUPS) tile.marks[first + b * blockDim.x] = (unsigned char)above;
    }
  }
  __syncthreads();
}

// Marked entries move out of x, as far as there is room; `before` counts those before this thread's groups.
INLINE void move_marked(const Tile &tile, real *x, long long begin, Counts before, long long room, int *index,
                        real *entry) {
  long long at = above_of(before);
  int g, end;
  groups_of_thread(g, end);
  for (; g < end; ++g)
    for (unsigned marks = tile.marks[g]; marks && at < room; marks &= marks - 1, ++at) {
      const long long i = begin + g * WIDTH + __ffs(marks) - 1;
      index[at] = (int)i;
      entry[at] = x[i];
      x[i] = 0;
    }
}

// x <- x + add, and the entries above `bound` move out of x, as long as there is room; the others stay.  progress[1] is
// how many there are, progress[0] is n: all were compared.  The state is 8 words, and one for each CHUNK of x.
KERNEL(sift_above)(long long n, real *x, long long addends, const real *add, long long room, int *index, real *entry,
                   long long two, long long *progress, long long words, long long *state, long long bound,
                   SkipIf skip) {
  __shared__ Tile tile;
  Word64 *const status = (Word64 *)state + 8;
  const long long tiles = skips(skip) ? 0 : tiles_of(n);
  if (!blockIdx.x && !threadIdx.x) {
    progress[0] = n;
    if (!tiles) progress[1] = 0;
  }
  for (long long t; (t = take_ticket(state)) < tiles;) {
    const long long begin = t * CHUNK, end = min(begin + CHUNK, n);
    mark_above(tile, x, addends ? add : 0, begin, end, (Magnitude)bound);
    Counts total;
    const Counts before = exclusive_scan(tile, status + t, t, total);
    move_marked(tile, x, begin, before, room, index, entry);
    if (t == tiles - 1 && !threadIdx.x) progress[1] = above_of(total);
  }
}

// The digit of the rank-th largest of the entries that 256 bins count; rank becomes its rank among those of that digit.
// All threads of a warp come here, and all get the answer.
INLINE int digit_at(const unsigned *bins, long long &rank) {
  const int lane = threadIdx.x % 32, highest = 255 - 8 * lane;
  long long mine = 0;
#pragma unroll 4
  for (int b = 0; b < 8; ++b) mine += bins[highest - (b + lane / 4) % 8];  // [no two lanes meet in a memory bank]
  const long long upto = warp_inclusive_sum(mine);
  const unsigned reached = __ballot_sync(ALL_LANES, upto >= rank);
  const int owner = reached ? __ffs(reached) - 1 : 31;
  long long rest = rank - (upto - mine);
  int b = 0;
  while (lane == owner && b < 7 && rest > bins[highest - b]) rest -= bins[highest - b++];
  rank = __shfl_sync(ALL_LANES, rest, owner);
  return __shfl_sync(ALL_LANES, highest - b, owner);
}

INLINE int width_of(int digit) { return BITS - 8 * digit < 8 ? BITS - 8 * digit : 8; }
INLINE int shift_of(int digit) { return BITS - 8 * digit - width_of(digit); }

// Count m's digit where the digits before it are `prefix`.
INLINE void count_digit(unsigned *bins, Magnitude m, int digit, Magnitude prefix) {
  const int width = width_of(digit), shift = shift_of(digit);
  if (m >> shift >> width == prefix) atomicAdd(&bins[m >> shift & ((1 << width) - 1)], 1u);
}

// Where line l of a sample of `lines` lines starts: at a place in the l-th part of x that a hash of l says (Knuth's
// multiplicative one), so that no column of a matrix is sampled more often than others.
INLINE long long line_at(long long l, long long lines, long long size) {
  const Word64 all = size / LINE, jitter = all * ((unsigned)l * 2654435761u) >> 32;
  return (long long)((l * all + jitter) / lines) * LINE;
}

// The sample's rank-th magnitude, or a bit less, since only its first three digits are computed.
INLINE Magnitude ranked(unsigned *bins, const real *x, const real *add, long long size, long long rank) {
  const long long lines = size / LINE < LINES ? size / LINE : LINES, groups = lines * (LINE / WIDTH);
  Magnitude prefix = 0;
  for (int digit = 0; digit < 3; ++digit) {
    for (int b = threadIdx.x; b < 256; b += blockDim.x) bins[b] = 0;
    __syncthreads();
    for (long long first = threadIdx.x; first < groups; first += DRAW * blockDim.x) {
      real now[DRAW][WIDTH];
#pragma unroll
      for (int b = 0; b < DRAW; ++b) {
        const long long g = first + b * blockDim.x, l = g / (LINE / WIDTH), j = g % (LINE / WIDTH) * WIDTH;
        const long long i = g < groups ? line_at(l, lines, size) + j : 0;
#pragma unroll
        for (int w = 0; w < WIDTH; ++w) now[b][w] = add ? x[i + w] + add[i + w] : x[i + w];
      }
#pragma unroll
      for (int b = 0; b < DRAW; ++b)
#pragma unroll
        for (int w = 0; w < WIDTH; ++w)
          if (first + b * blockDim.x < groups) count_digit(bins, magnitude(now[b][w]), digit, prefix);
    }
    __syncthreads();
    prefix = prefix << width_of(digit) | digit_at(bins, rank);
    __syncthreads();
  }
  return prefix << shift_of(2);
}

// A bound for each part.
KERNEL(guess_bounds)(long long n, const real *x, long long addends, const real *add, long long cells,
                     const long long *table, long long words, long long *state, long long parts,
                     SkipIf skip) BLOCKS(parts) {
  __shared__ unsigned bins[256];
  for (long long p = blockIdx.x; p < parts && !skips(skip); p += gridDim.x) {
    const Part part = ((const Part *)table)[p];
    Magnitude bound = NOTHING;
    const real *const increment = addends ? add + part.offset : 0;
    if (part.rank) bound = ranked(bins, x + part.offset, increment, part.size, part.rank) - 1;
    if (!threadIdx.x) state_in(state, parts).bound[p] = bound;
  }
}

// x <- x + add, and entries above their part's bound move to its candidates, as long as there is room.
KERNEL(sift_parts)(long long n, real *x, long long addends, const real *add, long long cells, const long long *table,
                   long long words, long long *state, long long held, int *candidate, real *large, long long parts,
                   SkipIf skip) {
  __shared__ Tile tile;
  const State all = state_in(state, parts);
  const long long tiles = skips(skip) ? 0 : tiles_of(table, parts);
  for (long long t; (t = take_ticket(all.tickets)) < tiles;) {
    const long long p = part_of(table, parts, t);
    const Part part = ((const Part *)table)[p];
    const long long back = t - part.first, begin = part.offset + back * CHUNK, stop = part.offset + part.size;
    const long long end = min(begin + CHUNK, stop);
    mark_above(tile, x, addends ? add : 0, begin, end, (Magnitude)all.bound[p]);
    Counts total;
    const Counts before = exclusive_scan(tile, all.status + t, back, total);
    move_marked(tile, x, begin, before, part.room, candidate + part.held, large + part.held);
    if (end == stop && !threadIdx.x) all.candidates[p] = above_of(total);
  }
}

// Where the k-th largest of a part is searched, and which elements of that are tile t: the part's candidates, or x
// itself if those are too few, or did not fit.
struct Source {
  Part part;
  long long p, begin, end, back;  // [begin, end) in the candidates, or in x; `back` tiles behind the part's first
  bool guessed;
};
INLINE Source source_of(const long long *table, const State &state, long long parts, long long t) {
  Source s;
  s.p = part_of(table, parts, t);
  s.part = ((const Part *)table)[s.p];
  const long long candidates = state.candidates[s.p];
  s.guessed = s.part.count <= candidates && candidates <= s.part.room;
  s.back = t - s.part.first;
  const long long start = s.guessed ? s.part.held : s.part.offset, all = s.guessed ? candidates : s.part.size;
  const long long from = s.back * CHUNK, to = min(from + CHUNK, all);
  s.begin = start + from, s.end = start + (s.part.count ? to : 0);
  return s;
}

// The candidates of a part whose bound was guessed badly return to x.
KERNEL(put_back)(long long n, real *x, long long cells, const long long *table, long long words, long long *state,
                 long long held, const int *candidate, const real *large, long long parts, SkipIf skip) {
  const State all = state_in(state, parts);
  const long long tiles = skips(skip) ? 0 : tiles_of(table, parts);
  for (long long t = blockIdx.x; t < tiles; t += gridDim.x) {
    const Source s = source_of(table, all, parts, t);
    if (s.guessed) continue;
    const long long candidates = all.candidates[s.p], stop = s.part.held + min(candidates, s.part.room);
    const long long begin = s.part.held + s.back * CHUNK, end = min(begin + CHUNK, stop);
    for (long long i = begin + threadIdx.x; i < end; i += blockDim.x) x[candidate[i]] = large[i];
  }
}

// The digits of a part's k-th largest before `digit`, from what was counted; rank becomes its rank among those entries
// that have them.
INLINE Magnitude digits_before(const State &state, long long p, int digit, long long &rank) {
  Magnitude prefix = 0;
  for (int d = 0; d < digit; ++d) prefix = prefix << width_of(d) | digit_at(bins_of(state, p, d), rank);
  return prefix;
}

// Add a block's histogram to that of all, and clear it.
INLINE void flush(unsigned *bins, unsigned *sum) {
  __syncthreads();
  for (int b = threadIdx.x; b < 256; b += blockDim.x) {
    if (bins[b]) atomicAdd(&sum[b], bins[b]);
    bins[b] = 0;
  }
  __syncthreads();
}

// The histogram of a digit, for every part.
KERNEL(count_digits)(long long n, const real *x, long long cells, const long long *table, long long words,
                     long long *state, long long held, const real *large, long long parts, long long digit,
                     SkipIf skip) {
  __shared__ unsigned bins[256];
  const State all = state_in(state, parts);
  const long long tiles = skips(skip) ? 0 : tiles_of(table, parts);
  const int d = (int)digit;
  long long p = -1, rank = 0;  // the part that is being counted
  Magnitude prefix = 0;
  for (int b = threadIdx.x; b < 256; b += blockDim.x) bins[b] = 0;
  __syncthreads();
  for (long long t = blockIdx.x; t < tiles; t += gridDim.x) {
    const Source s = source_of(table, all, parts, t);
    if (s.begin >= s.end) continue;
    if (s.p != p) {
      if (p >= 0) flush(bins, bins_of(all, p, d));
      p = s.p, rank = s.part.count;
      prefix = digits_before(all, p, d, rank);
    }
    for (int first = threadIdx.x; first < GROUPS; first += BATCH * blockDim.x) {
      Batch now;
      read(now, s.guessed ? large : x, s.begin, s.end, first);
      for (int b = 0; b < BATCH; ++b)
        for (int w = 0; w < WIDTH; ++w)
          if (w < left_of(s.begin, s.end, first, b)) count_digit(bins, magnitude(now.at[b][w]), d, prefix);
    }
  }
  if (p >= 0) flush(bins, bins_of(all, p, d));
}

// Entries that are larger than `least` are marked, and those that are equal, apart.  Smaller candidates return to x.
INLINE void mark_largest(Tile &tile, const Source &s, real *x, const int *candidate, const real *large,
                         Magnitude least) {
  for (int first = threadIdx.x; first < GROUPS; first += BATCH * blockDim.x) {
    Batch now;
    read(now, s.guessed ? large : x, s.begin, s.end, first);
    for (int b = 0; b < BATCH; ++b) {
      const long long left = left_of(s.begin, s.end, first, b);
      unsigned marks = 0;
      for (int w = 0; w < WIDTH && w < left; ++w) {
        const Magnitude m = magnitude(now.at[b][w]);
        marks |= (unsigned)(m > least) << w | (unsigned)(m == least) << (4 + w);
        if (s.guessed && m < least) x[candidate[s.end - left + w]] = now.at[b][w];
      }
      if (first + b * blockDim.x < GROUPS) tile.marks[first + b * blockDim.x] = (unsigned char)marks;
    }
  }
  __syncthreads();
}

// Entries that are equal, to zero, are marked no more where they lie between members.
INLINE void unmark_gaps(Tile &tile, const Source &s, const int *candidate, const Edges &members) {
  for (int g = threadIdx.x; g < GROUPS; g += blockDim.x)
    for (int w = 0; w < WIDTH && tile.marks[g] >> 4; ++w) {
      const long long i = s.begin + g * WIDTH + w;
      const bool equal = tile.marks[g] >> (4 + w) & 1;
      if (equal && !in_member(members, s.guessed ? candidate[i] : i)) tile.marks[g] &= ~(16 << w);
    }
  __syncthreads();
}

// The payload of every part: the entries that are larger than its k-th largest, and the first of those that are equal,
// but for zeros that lie between members.
KERNEL(deliver)(long long n, real *x, long long edges, const long long *edge, long long cells, const long long *table,
                long long words, long long *state, long long held, const int *candidate, const real *large, long long k,
                int *index, real *entry, long long parts, SkipIf skip) {
  __shared__ Tile tile;
  const State all = state_in(state, parts);
  const long long tiles = skips(skip) ? 0 : tiles_of(table, parts);
  const Edges members = {edges, edge};
  long long p = -1, ties = 0;
  Magnitude least = 0;
  for (long long t; (t = take_ticket(all.tickets + 1)) < tiles;) {
    const Source s = source_of(table, all, parts, t);
    if (s.begin >= s.end) continue;
    if (s.p != p) {
      p = s.p, ties = s.part.count;
      least = digits_before(all, p, DIGITS, ties);
    }
    mark_largest(tile, s, x, candidate, large, least);
    if (!least) unmark_gaps(tile, s, candidate, members);
    Counts total;
    const Counts before = exclusive_scan(tile, all.status + tiles + t, s.back, total);
    long long above = above_of(before), equal = ties_of(before);
    int g, end;
    groups_of_thread(g, end);
    for (; g < end; ++g)
      for (int j = 0, marks = tile.marks[g]; j < WIDTH && marks; ++j) {
        const bool larger = marks >> j & 1, same = marks >> (4 + j) & 1;
        if (!larger && !same) continue;
        const long long i = s.begin + g * WIDTH + j, position = s.guessed ? candidate[i] : i;
        const real now = s.guessed ? large[i] : x[i];
        if (larger || equal < ties) {
          const long long at = s.part.output + above + min(equal, ties);
          index[at] = (int)position;
          entry[at] = now;
          x[position] = 0;
        } else if (s.guessed) {
          x[position] = now;
        }
        above += larger, equal += same;
      }
  }
}

// Elements [offset, offset + size) of x, of which the `count` largest go to the places of the payload from `output` on.
struct ChunkOfX {
  long long offset, size, count, output;
};

// x <- x + add on [begin, end).
INLINE void add_to(real *x, const real *add, long long begin, long long end) {
  for (int first = threadIdx.x; first * WIDTH < end - begin; first += BATCH * blockDim.x) {
    Batch now, increment;
    read(now, x, begin, end, first);
    read(increment, add, begin, end, first);
#pragma unroll
    for (int b = 0; b < BATCH; ++b)
#pragma unroll
      for (int w = 0; w < WIDTH; ++w) now.at[b][w] += increment.at[b][w];
    write(now, x, begin, end, first);
  }
}

// The k-th largest magnitude of x[begin], ... x[end - 1]; of entries that are equal to it, the first `ties` are wanted.
INLINE Magnitude least_of(unsigned *bins, const real *x, long long begin, long long end, long long k, long long &ties) {
  Magnitude prefix = 0;
  ties = k;
  for (int digit = 0; digit < DIGITS; ++digit) {
    for (int b = threadIdx.x; b < 256; b += blockDim.x) bins[b] = 0;
    __syncthreads();
    for (int first = threadIdx.x; first * WIDTH < end - begin; first += BATCH * blockDim.x) {
      Batch now;
      read(now, x, begin, end, first);
      for (int b = 0; b < BATCH; ++b)
        for (int w = 0; w < WIDTH; ++w)
          if (w < left_of(begin, end, first, b)) count_digit(bins, magnitude(now.at[b][w]), digit, prefix);
    }
    __syncthreads();
    prefix = prefix << width_of(digit) | digit_at(bins, ties);
    __syncthreads();
  }
  return prefix;
}

// x <- x + add, and the largest entries of each chunk move out of it, those of equal magnitude from the lowest index on.
// A block has a chunk for itself, so that one launch does, and nothing is guessed.
KERNEL(select_chunks)(long long n, real *x, long long addends, const real *add, long long cells, const long long *table,
                      long long k, int *index, real *entry, long long chunks, SkipIf skip) BLOCKS(chunks) {
  __shared__ Tile tile;
  __shared__ unsigned bins[256];
  __shared__ Word64 status;
  const bool skipped = skips(skip);
  for (long long c = blockIdx.x; c < chunks; c += gridDim.x) {
    const ChunkOfX chunk = ((const ChunkOfX *)table)[c];
    const long long begin = chunk.offset, end = begin + chunk.size;
    for (long long j = threadIdx.x; skipped && j < chunk.count; j += blockDim.x)
      index[chunk.output + j] = -1, entry[chunk.output + j] = 0;
    if (skipped) continue;
    if (addends) add_to(x, add, begin, end);
    __syncthreads();
    long long ties, above = 0, equal = 0;
    const Magnitude least = least_of(bins, x, begin, end, chunk.count, ties);
    for (long long from = begin; from < end; from += CHUNK) {
      const Source s = {{}, 0, from, min(from + CHUNK, end), 0, false};
      mark_largest(tile, s, x, 0, 0, least);
      Counts total;
      const Counts before = exclusive_scan(tile, &status, 0, total);
      long long larger = above + above_of(before), same = equal + ties_of(before);
      int g, last;
      groups_of_thread(g, last);
      for (; g < last; ++g)
        for (int j = 0, marks = tile.marks[g]; j < WIDTH && marks; ++j) {
          const bool is_larger = marks >> j & 1, is_same = marks >> (4 + j) & 1;
          const long long i = from + g * WIDTH + j, at = chunk.output + larger + min(same, ties);
          if (is_larger || (is_same && same < ties)) {
            index[at] = (int)i;
            entry[at] = x[i];
            x[i] = 0;
          }
          larger += is_larger, same += is_same;
        }
      above += above_of(total), equal += ties_of(total);
      __syncthreads();
    }
  }
}

#endif
