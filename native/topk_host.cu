// Top-K and selection by threshold on the host; a device's way is topk_device.cu, with the same result.  Entries are
// compared by `magnitude`, an integer that orders like |x|, NaN on top: so selection is exact.  Ties are broken by the
// lowest index.
//
// The k largest are selected in one pass over x: a sample suggests a bound that a few more than k entries lie above (as
// Lin et al., 2018, estimate theirs), those move out of x, and the k largest of them are kept.  If the bound was too
// high, there is a second pass.
#include "avx512.h"
#include "momentum.h"

#if HOST

#define RUN 2048   // entries that are compared, and while they are in the cache, moved; at most a CHUNK
#define BLOCK 64   // entries that are compared before the first index is written
#define LINE 16    // neighbours that are sampled together
#define LINES 257  // one line of so many is a sample: a prime, so that every column of a matrix gets its turn

// What is added to x: nothing, a gradient, or that with momentum.
struct Increment {
  const real *gradient;
  real *velocity, momentum;
  bool nesterov;

  __attribute__((always_inline)) real at(long long i) const {
    const real g = gradient[i];
    if (!velocity) return g;
    const real u = velocity[i];
    return nesterov ? Nesterov::increment(Nesterov::next(u, g, momentum), g) : Vanilla::next(u, g, momentum);
  }

  // The same for a run, whose velocities are updated: where it lies, in `room` if nowhere else, or 0 for nothing.
  __attribute__((always_inline)) const real *on(long long begin, long long end, real *room) const {
    const real *const g = gradient;
    real *const u = velocity, *const dv = room - begin;
    if (!gradient || !velocity) return gradient;
    if (!nesterov) {
      INDEPENDENT for (long long i = begin; i < end; ++i) u[i] = Vanilla::next(u[i], g[i], momentum);
      return u;
    }
    INDEPENDENT for (long long i = begin; i < end; ++i) dv[i] = advance<Nesterov>(u[i], g[i], momentum);
    return dv;
  }
};

// x <- x + add on [begin, end), a run or less; writes the indices of entries that are then above `bound`, ascending,
// and returns how many.  There is room for a run.  Without `add` nothing is added.
INLINE long long find_above(real *x, const real *add, long long begin, long long end, Magnitude bound, int *index) {
  long long i = begin, held = find_in_lanes(x, add, i, end, bound, index);
  for (; i + BLOCK <= end; i += BLOCK) {
    union { unsigned char one[BLOCK]; unsigned long long eight[BLOCK / 8]; } above;
    for (int j = 0; j < BLOCK; ++j) {
      x[i + j] = add ? x[i + j] + add[i + j] : x[i + j];
      above.one[j] = magnitude(x[i + j]) > bound;
    }
    for (int e = 0; e < BLOCK; e += 8)
      if (above.eight[e / 8])  // rare, as long as few are taken; without a branch from here on
        for (int j = e; j < e + 8; ++j) index[held] = (int)i + j, held += above.one[j];
  }
  for (; i < end; ++i) {
    if (add) x[i] += add[i];
    index[held] = (int)i, held += magnitude(x[i]) > bound;
  }
  return held;
}

// The same, and these entries move out of x.
INLINE long long move_above(real *x, const real *add, long long begin, long long end, Magnitude bound, int *index,
                            real *entry) {
  const long long held = find_above(x, add, begin, end, bound, index);
  for (long long j = 0; j < held; ++j) {
    entry[j] = x[index[j]];
    x[index[j]] = 0;
  }
  return held;
}

INLINE long long count_above(long long n, const real *entry, Magnitude bound) {
  Magnitude above = 0;  // as wide as what is compared
  for (long long i = 0; i < n; ++i) above += magnitude(entry[i]) > bound;
  return above;
}

// A magnitude that at least k of n entries reach, with no more than `spare` others, or else the k-th.  Interpolation
// search, which is fast, and bisection, which is sure, take turns.
INLINE Magnitude reached_by(long long k, long long spare, long long n, const real *entry) {
  Magnitude low = n ? magnitude(entry[0]) : 0, high = low;
  for (long long i = 0; i < n; ++i) {
    const Magnitude m = magnitude(entry[i]);
    low = m < low ? m : low;
    high = m > high ? m : high;
  }
  long long reach = n, above = 0;  // so many reach `low`, and lie above `high`
  for (bool halve = false; low < high && reach > k + spare; halve = !halve) {
    const double share = halve ? 0.5 : (double)(reach - k) / (reach - above);
    const Magnitude middle = low + (Magnitude)((high - low - 1) * share);
    const long long above_middle = count_above(n, entry, middle);
    if (above_middle >= k) low = middle + 1, reach = above_middle; else high = middle, above = above_middle;
  }
  return low;
}

// A bound that a few more than k entries of x + increment are above, estimated from a sample; -1 if that is too small.
INLINE Magnitude guess(long long k, const real *x, const Increment &increment, long long begin, long long end,
                       real *sample) {
  long long drawn = 0;
  for (long long i = begin; i + LINE <= end; i += LINE * LINES)
    for (int j = 0; j < LINE; ++j) sample[drawn++] = increment.gradient ? x[i + j] + increment.at(i + j) : x[i + j];
  if (!drawn) return -1;
  const double expected = (double)k * drawn / (end - begin), deviation = sqrt(expected) + 1;
  const long long rank = (long long)(expected + 3 * deviation);  // too high once in 700 times
  return rank < drawn ? reached_by(rank, (long long)deviation / 2, drawn, sample) - 1 : -1;
}

// The k largest of the entries held move to `kept_index` and `kept`, in order, and the others back into x.  Returns the
// least magnitude of the k, so that of entries behind them only larger ones can take their place.
INLINE Magnitude keep_largest(long long k, real *x, long long held, int *index, real *entry, int *kept_index,
                              real *kept) {
  const Magnitude least = reached_by(k, 0, held, entry);
  long long i = 0, back = 0, ties = k - count_above(held, entry, least);
  for (long long taken = 0; taken < k; ++i) {  // [without a branch]
    const Magnitude m = magnitude(entry[i]);
    const bool keep = (m > least) | ((m == least) & (ties > 0));
    ties -= m == least;
    kept_index[taken] = index[i];
    kept[taken] = entry[i];
    taken += keep;
    index[back] = index[i];
    entry[back] = entry[i];
    back += !keep;
  }
  for (long long j = 0; j < back; ++j) x[index[j]] = entry[j];
  for (; i < held; ++i) x[index[i]] = entry[i];
  return least;
}

// Drop the candidates from number `first` on that lie in gaps between members; returns how many there are then.
INLINE long long drop_gaps(const Edges &members, long long first, long long held, int *index, real *entry) {
  long long kept = first;
  for (long long j = first; j < held; ++j) {
    index[kept] = index[j];
    entry[kept] = entry[j];
    kept += entry[j] != 0 || in_member(members, index[j]);
  }
  return kept;
}

// x <- x + increment, and the entries above `bound`, or at least the k largest of them, move out of x; returns how
// many.  Whenever there is no room for more, all but the k largest move back.
INLINE long long collect(const Edges &members, long long k, real *x, const Increment &increment, long long begin,
                         long long end, Magnitude bound, long long room, int *index, real *entry, int *kept_index,
                         real *kept) {
  real increments[RUN];
  long long held = 0;
  for (long long i = begin; i < end; i += RUN) {
    if (held + RUN > room) {
      bound = keep_largest(k, x, held, index, entry, kept_index, kept);
      for (held = 0; held < k; ++held) index[held] = kept_index[held], entry[held] = kept[held];
    }
    const long long stop = min(i + RUN, end);
    const long long first = held;
    held += move_above(x, increment.on(i, stop, increments), i, stop, bound, index + held, entry + held);
    if (bound < 0) held = drop_gaps(members, first, held, index, entry);  // zeros are above no other bound
  }
  return held;
}

// Elements [offset, offset + size) of x, of which the `count` largest go to the places of the payload from `output` on.
struct ChunkOfX {
  long long offset, size, count, output;
};

// A bound for the next chunk, from this one's k-th largest magnitude, `least`, and from how many lay above the bound:
// three deviations more than k are wanted.  [an octave is what a magnitude doubles over; in most tensors the largest
// hundredth becomes 4 to 7 % more where a bound falls by a hundredth, so that a tenth of an error is mended at once]
INLINE Magnitude next_bound(long long k, long long held, Magnitude bound, Magnitude least) {
  const Magnitude octave = (Magnitude)1 << (sizeof(real) == 4 ? 23 : 52);
  const double wanted = k + 3 * sqrt((double)k), share = (held - wanted) / wanted;
  const Magnitude next = held < k || share > 1 ? least - octave / 16 : bound + (Magnitude)(octave * share / 64);
  return next < -1 ? -1 : next;
}

// x <- x + increment on [begin, end), and the k largest of that move out of x.  There is room for all of them.
INLINE Magnitude select_in_chunk(long long k, real *x, const Increment &increment, long long begin, long long end,
                                 Magnitude bound, int *candidate, real *large, int *index, real *entry) {
  real increments[RUN];
  long long held = 0, taken = 0;
  for (long long i = begin; i < end; i += RUN) {
    const long long stop = min(i + RUN, end);
    held += find_above(x, increment.on(i, stop, increments), i, stop, bound, candidate + held);
  }
  const long long found = held;
  if (held < k) {  // the bound was too high
    const Magnitude lower = reached_by(k, (long long)sqrt((double)k), end - begin, x + begin) - 1;
    held = find_above(x, 0, begin, end, lower, candidate);
  }
  for (long long i = 0; i < held; ++i) large[i] = x[candidate[i]];
  const Magnitude least = reached_by(k, 0, held, large);
  for (long long i = 0, ties = k - count_above(held, large, least); taken < k; ++i) {  // [without a branch]
    const Magnitude m = magnitude(large[i]);
    const bool keep = (m > least) | ((m == least) & (ties > 0));
    ties -= m == least;
    index[taken] = candidate[i];
    entry[taken] = large[i];
    taken += keep;
  }
  for (long long j = 0; j < k; ++j) x[index[j]] = 0;
  return next_bound(k, found, bound, least);
}

// The payload of a step that is skipped.
INLINE void no_entries(long long k, int *index, real *entry) {
  for (long long i = 0; i < k; ++i) index[i] = -1, entry[i] = 0;
}

// x <- x + add, and all entries above `bound` move out of x: their indices, ascending, and values.  progress[0] is how
// far in x, and progress[1] how many entries, this call and earlier ones came: not to the end if there is no room for a
// chunk.
KERNEL(encode_above)(long long n, real *x, long long addends, const real *add, long long room, int *index, real *entry,
                     long long two, long long *progress, long long bound, SkipIf skip) {
  if (skips(skip)) {
    progress[0] = n;
    no_entries(room, index, entry);
  }
  while (progress[0] < n && progress[1] + RUN <= room) {
    const long long begin = progress[0], end = min(begin + RUN, n), held = progress[1];
    progress[1] += move_above(x, addends ? add : 0, begin, end, (Magnitude)bound, index + held, entry + held);
    progress[0] = end;
  }
}

// x <- x + add, or + the momentum of add if there is a velocity; then the `count` largest entries of each part of x,
// its elements [offset, offset + size), move out of it, those of equal magnitude from the lowest index on, and nothing
// that lies between members.  They are k in all.  There is room for a chunk more than a part, or than twice its count;
// the more, the more seldom candidates return.
KERNEL(encode_largest)(long long n, real *x, long long addends, const real *add, long long moves, real *velocity,
                       double momentum, long long nesterov, long long edges, const long long *edge, long long parts,
                       const long long *offset, const long long *size, const long long *count, long long k, int *index,
                       real *entry, long long room, int *candidate, real *large, SkipIf skip) {
  if (skips(skip)) return no_entries(k, index, entry);
  const Increment increment = {addends ? add : 0, moves ? velocity : 0, (real)momentum, nesterov != 0}, grown = {};
  const Edges members = {edges, edge};
  for (long long p = 0; p < parts; ++p) {
    const long long begin = offset[p], end = begin + size[p];
    const Magnitude bound = guess(count[p], x, increment, begin, end, large);
    long long held = collect(members, count[p], x, increment, begin, end, bound, room, candidate, large, index, entry);
    if (held < count[p]) {  // the bound was too high
      for (long long i = 0; i < held; ++i) x[candidate[i]] = large[i];
      held = collect(members, count[p], x, grown, begin, end, -1, room, candidate, large, index, entry);
    }
    keep_largest(count[p], x, held, candidate, large, index, entry);
    index += count[p], entry += count[p];
  }
}

// The same, where parts are so many and so small that each one's bound is taken from those of the parts before it.
// Parts ascend, and there is room for 16 candidates more than the largest one has elements.
KERNEL(encode_chunks)(long long n, real *x, long long addends, const real *add, long long moves, real *velocity,
                      double momentum, long long nesterov, long long cells, const long long *table, long long k,
                      int *index, real *entry, long long room, int *candidate, real *large, SkipIf skip) {
  if (skips(skip)) return no_entries(k, index, entry);
  const Increment increment = {addends ? add : 0, moves ? velocity : 0, (real)momentum, nesterov != 0};
  const ChunkOfX *const end = (const ChunkOfX *)(table + cells);
  Magnitude bound = -1;
  for (const ChunkOfX *part = (const ChunkOfX *)table; part < end; ++part)
    bound = select_in_chunk(part->count, x, increment, part->offset, part->offset + part->size, bound, candidate, large,
                            index + part->output, entry + part->output);
}

#endif
