// What stands between a gradient and the wire.
#include "half.h"

// flat[offset + i] <- scale data[i] for every member; bad[row] grows by the member's count of entries that are not at most
// `most` in magnitude, as NaN is not.  A member that already lies at its place in `flat` is not copied.
KERNEL(pack)(Table table, real *flat, double scale, long long *bad, double most) {
  const real factor = (real)scale, limit = (real)most;
  FOR_EACH_CHUNK(c, table) {
    const Member m = member(table, c);
    const real *from = (const real *)m.data;
    const half_t *half = (const half_t *)m.data;
    const bfloat16_t *upper = (const bfloat16_t *)m.data;
    real *to = flat + m.offset;
    int found = 0;
    if (m.format == WIDE && from == to && factor == 1) {
      FOR_EACH_IN(i, c, from) { found += !within(from[i], limit); };
    } else if (m.format == WIDE) {
      FOR_EACH_IN(i, c, from, to) {
        const real x = factor * from[i];
        to[i] = x;
        found += !within(x, limit);
      };
    } else if (m.format == HALF) {
      FOR_EACH_IN(i, c, half, to) {
        const real x = factor * value_of_half(half[i]);
        to[i] = x;
        found += !within(x, limit);
      };
    } else {
      FOR_EACH_IN(i, c, upper, to) {
        const real x = factor * value_of_bfloat16(upper[i]);
        to[i] = x;
        found += !within(x, limit);
      };
    }
    add(&bad[c.row], found);
  }
}

// data[i] <- scale flat[offset + i]
KERNEL(unpack)(Table table, const real *flat, double scale, Unless refused) {
  if (holds(refused)) return;
  const real factor = (real)scale;
  FOR_EACH_CHUNK(c, table) {
    const Member m = member(table, c);
    const real *from = flat + m.offset;
    real *to = (real *)m.data;
    half_t *half = (half_t *)m.data;
    bfloat16_t *upper = (bfloat16_t *)m.data;
    if (m.format == WIDE) {
      FOR_EACH_IN(i, c, from, to) { to[i] = factor * from[i]; };
    } else if (m.format == HALF) {
      FOR_EACH_IN(i, c, from, half) { half[i] = half_of(factor * from[i]); };
    } else {
      FOR_EACH_IN(i, c, from, upper) { upper[i] = bfloat16_of(factor * from[i]); };
    }
  }
}

// Parameters of 16 bits, where they are worked on.
KERNEL(widen)(Table table, real *flat, Unless refused) {
  if (holds(refused)) return;
  FOR_EACH_CHUNK(c, table) {
    const Member m = member(table, c);
    weights(m, c);
  }
}

// sum <- (part[0] + part[1]) + ..., flat arrays of the bucket, two or more; sum may be one of them.  What is not finite
// is counted: for part k in bad[k count + row], for the sum in bad[parts count + row].
KERNEL(add_parts)(Table table, long long parts, const real *const *part, real *sum, long long *bad) {
  FOR_EACH_CHUNK(c, table) {
    SCRATCH real total[CHUNK];
    real *const sums = total - c.begin;
    const long long at = table.rows[c.row].offset;
    int found = 0;
    for (long long k = 1; k < parts; ++k) {
      const real *before = k == 1 ? global(part[0]) + at : sums, *next = global(part[k]) + at;
      found = 0;
      FOR_EACH_IN(i, c, before, next, sums) {
        const real x = before[i] + next[i];
        sums[i] = x;
        found += !is_finite(x);
      };
    }
    for (long long k = anywhere(found) ? 0 : parts; k < parts; ++k) {
      const real *term = global(part[k]) + at;
      int terms = 0;
      FOR_EACH_IN(i, c, term) { terms += !is_finite(term[i]); };
      add(&bad[k * table.count + c.row], terms);
    }
    add(&bad[parts * table.count + c.row], found);
    real *to = sum + at;
    FOR_EACH_IN(i, c, sums, to) { to[i] = sums[i]; };
  }
}

// sum <- sum + x
KERNEL(accumulate)(long long n, const real *x, real *sum, Unless refused) {
  const long long count = holds(refused) ? 0 : n;
  FOR_EACH(i, count, x, sum) { sum[i] += x[i]; };
}

// x <- 0
KERNEL(clear)(long long n, real *x, Unless refused) {
  const long long count = holds(refused) ? 0 : n;
  FOR_EACH(i, count, x) { x[i] = 0; };
}

// x <- factor x
KERNEL(scale)(long long n, real *x, double factor) {
  const real f = (real)factor;
  FOR_EACH(i, n, x) { x[i] *= f; };
}

// x <- x held between -limit and limit; NaN stays NaN
KERNEL(clip)(long long n, real *x, double limit) {
  const real most = (real)limit;
  FOR_EACH(i, n, x) { x[i] = clamp(x[i], most); };
}

// What a number of 16 bits can hold of x, times scale: what lies beyond +-most is held there, and what is not finite stays
// so.  [scale is a power of two, so that only rounding loses anything]
template <class Format, class X>
INLINE auto sent(const Format &format, const X &x, real factor, real limit) {
  return format.of(clamp_finite(x, limit) * factor);
}

// That moves to the wire, and x keeps the rest: the rounding error, and what lies beyond; of what is not finite, nothing.
template <class Format>
INLINE void take(long long n, real *x, typename Format::Bits *wire, double scale, double most, Unless refused) {
  const real factor = (real)scale, back = (real)(1 / scale), limit = (real)most;
  if (holds(refused)) {
    FOR_EACH(i, n, wire) { wire[i] = 0; };
    return;
  }
  FOR_EACH_PIECE(c, n)
    each_half<Format>(c, x, wire, [=](const auto &format, auto &now, auto &bits) {
      bits = sent(format, now, factor, limit);
      now = if_finite(now, now - format.value(bits) * back);
    });
}
KERNEL(take_half)(long long n, real *x, half_t *wire, double scale, double most, Unless refused) {
  take<Float16>(n, x, wire, scale, most, refused);
}
KERNEL(take_bfloat16)(long long n, real *x, bfloat16_t *wire, double scale, double most, Unless refused) {
  take<Brain16>(n, x, wire, scale, most, refused);
}

// The same, but x stays as it is.
template <class Format>
INLINE void copy(long long n, const real *x, typename Format::Bits *wire, double scale, double most, Unless refused) {
  const real factor = (real)scale, limit = (real)most;
  if (holds(refused)) {
    FOR_EACH(i, n, wire) { wire[i] = 0; };
    return;
  }
  FOR_EACH_PIECE(c, n)
    each_half<Format>(c, x, wire, [=](const auto &format, const auto &now, auto &bits) {
      bits = sent(format, now, factor, limit);
    });
}
KERNEL(copy_half)(long long n, const real *x, half_t *wire, double scale, double most, Unless refused) {
  copy<Float16>(n, x, wire, scale, most, refused);
}
KERNEL(copy_bfloat16)(long long n, const real *x, bfloat16_t *wire, double scale, double most, Unless refused) {
  copy<Brain16>(n, x, wire, scale, most, refused);
}

// x <- wire / scale
template <class Format>
INLINE void give(long long n, const typename Format::Bits *wire, real *x, double scale) {
  const real back = (real)(1 / scale);
  FOR_EACH_PIECE(c, n)
    each_half<Format>(c, x, wire, [=](const auto &format, auto &now, const auto &bits) {
      now = format.value(bits) * back;
    });
}
KERNEL(give_half)(long long n, const half_t *wire, real *x, double scale) { give<Float16>(n, wire, x, scale); }
KERNEL(give_bfloat16)(long long n, const bfloat16_t *wire, real *x, double scale) { give<Brain16>(n, wire, x, scale); }

// total <- (part[0] + part[1]) + ... of a chunk that starts at `at` in every part
template <class Format>
INLINE void add_up(const Chunk &c, long long at, long long parts, const typename Format::Bits *const *part, real *total) {
  for (long long k = 0; k < parts; ++k) {
    const auto *const next = global(part[k]) + at;
    if (k == 0)
      each_half<Format>(c, total, next, [](const auto &format, auto &sum, const auto &bits) { sum = format.value(bits); });
    else
      each_half<Format>(c, total, next, [](const auto &format, auto &sum, const auto &bits) { sum += format.value(bits); });
  }
}

// sum <- (part[0] + part[1]) + ..., added as reals and rounded once; sum may be one of them.
template <class Format>
INLINE void add_halves(long long n, typename Format::Bits *sum, long long parts,
                       const typename Format::Bits *const *part) {
  FOR_EACH_PIECE(c, n) {
    SCRATCH real room[CHUNK];
    real *const total = room - c.begin;
    add_up<Format>(c, 0, parts, part, total);
    each_half<Format>(c, total, sum, [](const auto &format, const auto &x, auto &bits) { bits = format.of(x); });
  }
}
KERNEL(sum_half)(long long n, half_t *sum, long long parts, const half_t *const *part) {
  add_halves<Float16>(n, sum, parts, part);
}
KERNEL(sum_bfloat16)(long long n, bfloat16_t *sum, long long parts, const bfloat16_t *const *part) {
  add_halves<Brain16>(n, sum, parts, part);
}

// sum <- ((part[0] + part[1]) + ...) / scale, as above: flat arrays of the bucket.
template <class Format>
INLINE void add_shares(const Table &table, long long parts, const typename Format::Bits *const *part, real *sum,
                       double scale) {
  const real back = (real)(1 / scale);
  FOR_EACH_CHUNK(c, table) {
    SCRATCH real room[CHUNK];
    SCRATCH typename Format::Bits rounded[CHUNK];
    const long long at = table.rows[c.row].offset;
    real *const total = room - c.begin, *const to = sum + at;
    typename Format::Bits *const bits = rounded - c.begin;
    add_up<Format>(c, at, parts, part, total);
    each_half<Format>(c, total, bits, [](const auto &format, const auto &x, auto &h) { h = format.of(x); });
    each_half<Format>(c, to, bits, [=](const auto &format, auto &x, const auto &h) { x = format.value(h) * back; });
  }
}
KERNEL(add_half_parts)(Table table, long long parts, const half_t *const *part, real *sum, double scale) {
  add_shares<Float16>(table, parts, part, sum, scale);
}
KERNEL(add_bfloat16_parts)(Table table, long long parts, const bfloat16_t *const *part, real *sum, double scale) {
  add_shares<Brain16>(table, parts, part, sum, scale);
}

// Add one rank's entries; indices are distinct within a rank, and negative where there is no entry.
KERNEL(give_sparse)(long long n, real *x, long long k, const int *index, const real *entry) {
  FOR_EACH(i, k, index, entry) {
    if (index[i] >= 0) x[index[i]] += entry[i];
  };
}

// The first of n ascending indices that is not below `at`; negative ones, which are no entries, stand at the end.
INLINE long long first_from(long long at, const int *index, long long n) {
  long long low = 0;
  for (long long high = n; low < high;) {
    const long long middle = (low + high) / 2;
    if ((unsigned)index[middle] < at) low = middle + 1; else high = middle;
  }
  return low;
}

// x <- the sum of all ranks' entries, added in rank order: the bits of zeros and one give_sparse after the other.
#define RANKS 64  // whose entries are looked for at once
KERNEL(give_all)(long long n, real *x, long long ranks, const int *const *index, const real *const *entry,
                 const long long *lengths) {
  FOR_EACH_PIECE(c, n) {
    SCRATCH real total[CHUNK];
    SCRATCH long long edges[2 * RANKS];
    FOR_EACH_HERE(i, 0, CHUNK) total[i] = 0;
    together();
    for (long long first = 0; first < ranks; first += RANKS) {
      const long long some = ranks - first < RANKS ? ranks - first : RANKS;
      FOR_EACH_HERE(e, 0, 2 * some) {
        const long long r = first + e / 2;
        edges[e] = first_from(e % 2 ? c.end : c.begin, global(index[r]), lengths[r]);
      }
      together();
      for (long long r = 0; r < some; ++r) {
        const int *place = global(index[first + r]);
        const real *value = global(entry[first + r]);
        FOR_EACH_HERE(j, edges[2 * r], edges[2 * r + 1])
          if (place[j] >= c.begin && place[j] < c.end) total[place[j] - c.begin] += value[j];  // a damaged one may not
        together();
      }
    }
    const real *sums = total - c.begin;
    FOR_EACH_IN(i, c, sums, x) { x[i] = sums[i]; };
    together();
  }
}

// bad[0] grows by the number of entries that are not finite.
KERNEL(count_nonfinite)(long long n, const real *x, long long one, long long *bad) {
  long long found = 0;
  FOR_EACH(i, n, x) { found += !is_finite(x[i]); };
  add(bad, found);
}

// total[0] grows by the number of entries whose magnitude is above `bound`.
KERNEL(count_above)(long long n, const real *x, long long one, long long *total, long long bound) {
  long long found = 0;
  FOR_EACH(i, n, x) { found += magnitude(x[i]) > bound; };
  add(total, found);
}

// total[0] grows by the sum of n counts, most of which are 0.
KERNEL(sum_counts)(long long n, const long long *count, long long one, long long *total) {
  long long found = 0;
  FOR_EACH_PIECE(c, n) FOR_EACH_HERE(i, c.begin, c.end) found += count[i];
  add(total, found);
}

// wire <- x
template <class Format>
INLINE void narrow_all(long long n, const real *x, typename Format::Bits *wire) {
  FOR_EACH_PIECE(c, n)
    each_half<Format>(c, x, wire, [](const auto &format, const auto &now, auto &bits) { bits = format.of(now); });
}
KERNEL(to_half)(long long n, const real *x, half_t *wire) { narrow_all<Float16>(n, x, wire); }
KERNEL(to_bfloat16)(long long n, const real *x, bfloat16_t *wire) { narrow_all<Brain16>(n, x, wire); }

// x <- wire
template <class Format>
INLINE void widen_all(long long n, const typename Format::Bits *wire, real *x) {
  FOR_EACH_PIECE(c, n)
    each_half<Format>(c, x, wire, [](const auto &format, auto &now, const auto &bits) { now = format.value(bits); });
}
KERNEL(from_half)(long long n, const half_t *wire, real *x) { widen_all<Float16>(n, wire, x); }
KERNEL(from_bfloat16)(long long n, const bfloat16_t *wire, real *x) { widen_all<Brain16>(n, wire, x); }

// x <- x + wire
template <class Format>
INLINE void add_all(long long n, const typename Format::Bits *wire, real *x) {
  FOR_EACH_PIECE(c, n)
    each_half<Format>(c, x, wire, [](const auto &format, auto &now, const auto &bits) { now += format.value(bits); });
}
KERNEL(add_half)(long long n, const half_t *wire, real *x) { add_all<Float16>(n, wire, x); }
KERNEL(add_bfloat16)(long long n, const bfloat16_t *wire, real *x) { add_all<Brain16>(n, wire, x); }
