// Which entries are worth sending.  Entries are compared by `magnitude`, an integer that orders like |x|, NaN on top;
// so selection is exact, and ties are taken from the lowest index on.  This is the host's way; a device's is in sift.cu,
// and comes to the same.
#include "lanes.h"
#include "momentum.h"

#if HOST

typedef decltype(magnitude((real)0)) Magnitude;

#define RUN 2048   // entries that are compared, and while they are in the cache, moved; at most a CHUNK
#define BLOCK 64   // entries that are compared before one of them is noted
#define LINE 16    // neighbours that are sampled together
#define LINES 257  // one line of so many is a sample: a prime, so that every column of a matrix gets its turn

// By what x grows: nothing, a gradient, or that with momentum.
struct Growth {
  const real *gradient;
  real *velocity, momentum;
  bool nesterov;

  __attribute__((always_inline)) real at(long long i) const {
    const real g = gradient[i];
    if (!velocity) return g;
    const real u = velocity[i];
    return nesterov ? Nesterov::growth(Nesterov::next(u, g, momentum), g) : Vanilla::next(u, g, momentum);
  }

  // Of a run, whose velocities are brought up to date, in `room` if it is nowhere else; 0 for nothing.
  __attribute__((always_inline)) const real *on(long long begin, long long end, real *room) const {
    const real *const g = gradient;
    real *const u = velocity, *const more = room - begin;
    if (!gradient || !velocity) return gradient;
    if (!nesterov) {
      INDEPENDENT for (long long i = begin; i < end; ++i) u[i] = Vanilla::next(u[i], g[i], momentum);
      return u;
    }
    INDEPENDENT for (long long i = begin; i < end; ++i) {
      const real next = Nesterov::next(u[i], g[i], momentum);
      u[i] = next;
      more[i] = Nesterov::growth(next, g[i]);
    }
    return more;
  }
};

// x <- x + add on [begin, end), a run or less: the indices of what then lies above `bound`, ascending; returns how
// many.  There is room for a run.  Without `add` nothing is added.
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

// The same, and what was found moves out of x.
INLINE long long take_above(real *x, const real *add, long long begin, long long end, Magnitude bound, int *index,
                            real *entry) {
  const long long held = find_above(x, add, begin, end, bound, index);
  for (long long j = 0; j < held; ++j) {
    entry[j] = x[index[j]];
    x[index[j]] = 0;
  }
  return held;
}

INLINE long long count_above(long long n, const real *entry, Magnitude bound) {
  Magnitude more = 0;  // as wide as what is compared
  for (long long i = 0; i < n; ++i) more += magnitude(entry[i]) > bound;
  return more;
}

// A magnitude that at least k of n entries reach, with no more than `spare` others, or else the k-th: by turns of
// interpolation, which is fast, and bisection, which is sure.
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
    const long long more = count_above(n, entry, middle);
    if (more >= k) low = middle + 1, reach = more; else high = middle, above = more;
  }
  return low;
}

// A bound that a few more than k entries of x, grown, are above, as far as a sample can tell; -1 if it cannot.
INLINE Magnitude guess(long long k, const real *x, const Growth &growth, long long begin, long long end, real *sample) {
  long long drawn = 0;
  for (long long i = begin; i + LINE <= end; i += LINE * LINES)
    for (int j = 0; j < LINE; ++j) sample[drawn++] = growth.gradient ? x[i + j] + growth.at(i + j) : x[i + j];
  if (!drawn) return -1;
  const double expected = (double)k * drawn / (end - begin), deviation = root(expected) + 1;
  const long long rank = (long long)(expected + 3 * deviation);  // too high once in 700 times
  return rank < drawn ? reached_by(rank, (long long)deviation / 2, drawn, sample) - 1 : -1;
}

// The k largest of the entries held move to `kept_index` and `kept`, in order, and the others back into x.  Returns a
// magnitude that all of the k reach, so that of any entries behind them only larger ones can be worth more.
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

// x grows, and the entries above `bound`, or at least the k largest of them, move out of x; returns how many.
// Whenever there is no room for more, all but the k largest move back.
INLINE long long collect(long long k, real *x, const Growth &growth, long long begin, long long end, Magnitude bound,
                         long long room, int *index, real *entry, int *kept_index, real *kept) {
  real more[RUN];
  long long held = 0;
  for (long long i = begin; i < end; i += RUN) {
    if (held + RUN > room) {
      bound = keep_largest(k, x, held, index, entry, kept_index, kept);
      for (held = 0; held < k; ++held) index[held] = kept_index[held], entry[held] = kept[held];
    }
    const long long stop = i + RUN < end ? i + RUN : end;
    held += take_above(x, growth.on(i, stop, more), i, stop, bound, index + held, entry + held);
  }
  return held;
}

// What a payload is in a step that is refused.
INLINE void no_entries(long long k, int *index, real *entry) {
  for (long long i = 0; i < k; ++i) index[i] = -1, entry[i] = 0;
}

// x <- x + add, and all entries above `bound` move out of x: their indices, ascending, and values.  place[0] is how far
// in x, and place[1] how many entries, this call and earlier ones came: not to the end if there is no room for a chunk.
KERNEL(take_above)(long long n, real *x, long long given, const real *add, long long room, int *index, real *entry,
                   long long two, long long *place, long long bound, Unless refused) {
  if (holds(refused)) {
    place[0] = n;
    no_entries(room, index, entry);
  }
  while (place[0] < n && place[1] + RUN <= room) {
    const long long begin = place[0], end = begin + RUN < n ? begin + RUN : n, held = place[1];
    place[1] += take_above(x, given ? add : 0, begin, end, (Magnitude)bound, index + held, entry + held);
    place[0] = end;
  }
}

// x grows by add, or by the momentum of that if there is a velocity; and of each part [offset, offset + size) of x the
// `count` largest entries move out of it, those of equal magnitude from the lowest index on.  They are k in all.  There
// is room for a chunk more than a part, or than twice its count; the more room, the more seldom candidates move back.
KERNEL(take_largest)(long long n, real *x, long long given, const real *add, long long moves, real *velocity,
                     double momentum, long long nesterov, long long parts, const long long *offset,
                     const long long *size, const long long *count, long long k, int *index, real *entry, long long room,
                     int *candidate, real *large, Unless refused) {
  if (holds(refused)) return no_entries(k, index, entry);
  const Growth growth = {given ? add : 0, moves ? velocity : 0, (real)momentum, nesterov != 0}, grown = {};
  for (long long p = 0; p < parts; ++p) {
    const long long begin = offset[p], end = begin + size[p];
    const Magnitude bound = guess(count[p], x, growth, begin, end, large);
    long long held = collect(count[p], x, growth, begin, end, bound, room, candidate, large, index, entry);
    if (held < count[p]) {  // guessed too high
      for (long long i = 0; i < held; ++i) x[candidate[i]] = large[i];
      held = collect(count[p], x, grown, begin, end, -1, room, candidate, large, index, entry);
    }
    keep_largest(count[p], x, held, candidate, large, index, entry);
    index += count[p], entry += count[p];
  }
}

#endif
