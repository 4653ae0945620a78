// Between gradients and the flat arrays of a bucket, and what is done to those: sums, scaling, counts.
#include "portable.h"

// flat[offset + i] <- scale data[i] for every member m; counts[m] grows by the number of its entries that are not at
// most `most` in magnitude, as NaN is not.  A member that already lies at its place in `flat` is not copied.
KERNEL(pack)(Table table, real *flat, double scale, long long *counts, double most) {
  const real factor = (real)scale, limit = (real)most;
  FOR_EACH_CHUNK(c, table) {
    const Member m = member(table, c);
    real *to = flat + m.offset;
    int beyond = 0;
    if (m.format == WIDE && m.data == to && factor == 1) {
      const real *x = to;
      FOR_EACH_IN(i, c, x) { beyond += !within(x[i], limit); };
    } else {
      with_format(m, [&](auto format, const auto *from) {
        FOR_EACH_IN(i, c, from, to) {
          const real x = factor * format.widen(from[i]);
          to[i] = x;
          beyond += !within(x, limit);
        };
      });
    }
    atomic_add(&counts[c.member], beyond);
  }
}

// data[i] <- scale flat[offset + i]
KERNEL(unpack)(Table table, const real *flat, double scale, SkipIf skip) {
  if (skips(skip)) return;
  const real factor = (real)scale;
  FOR_EACH_CHUNK(c, table) {
    const Member m = member(table, c);
    const real *from = flat + m.offset;
    with_format(m, [&](auto format, auto *to) {
      FOR_EACH_IN(i, c, from, to) { to[i] = format.round(factor * from[i]); };
    });
  }
}

// flat[offset + i] <- value, where kernels skip a step
KERNEL(overwrite)(Table table, real *flat, double value, SkipIf skip) {
  if (!skips(skip)) return;
  const real v = (real)value;
  FOR_EACH_CHUNK(c, table) {
    real *to = flat + member(table, c).offset;
    FOR_EACH_IN(i, c, to) { to[i] = v; };
  }
}

// data[i] <- flat[offset + i] + share (data[i] - flat[offset + i])
KERNEL(lerp)(Table table, const real *flat, double share, SkipIf skip) {
  if (skips(skip)) return;
  const real own = (real)share;
  FOR_EACH_CHUNK(c, table) {
    const Member m = member(table, c);
    const real *from = flat + m.offset;
    with_format(m, [&](auto format, auto *to) {
      FOR_EACH_IN(i, c, from, to) { to[i] = format.round(from[i] + own * (format.widen(to[i]) - from[i])); };
    });
  }
}

// Parameters of 16 bits, where they are worked on.
KERNEL(widen)(Table table, real *flat, SkipIf skip) {
  if (skips(skip)) return;
  FOR_EACH_CHUNK(c, table) {
    weights(member(table, c), c);
  }
}

// sum[j] <- (part[0] + part[1]) + ... for all j: flat arrays of the bucket, two parts or more; sums may be among them.
// What is not finite is counted: for part k in counts[k count + m], for the sum in counts[parts count + m], of member m.
KERNEL(add_parts)(Table table, long long parts, const real *const *part, long long sums, real *const *sum,
                  long long *counts) {
  FOR_EACH_CHUNK(c, table) {
    SHARED real chunk[CHUNK];
    real *const total = chunk - c.begin;
    const long long at = table.members[c.member].offset;
    int nonfinite = 0;
    for (long long k = 1; k < parts; ++k) {
      const real *before = k == 1 ? assume_global(part[0]) + at : total, *next = assume_global(part[k]) + at;
      nonfinite = 0;
      FOR_EACH_IN(i, c, before, next, total) {
        const real x = before[i] + next[i];
        total[i] = x;
        nonfinite += !is_finite(x);
      };
    }
    for (long long k = block_or(nonfinite) ? 0 : parts; k < parts; ++k) {
      const real *term = assume_global(part[k]) + at;
      int terms = 0;
      FOR_EACH_IN(i, c, term) { terms += !is_finite(term[i]); };
      atomic_add(&counts[k * table.count + c.member], terms);
    }
    atomic_add(&counts[parts * table.count + c.member], nonfinite);
    for (long long j = 0; j < sums; ++j) {
      real *to = assume_global(sum[j]) + at;
      FOR_EACH_IN(i, c, total, to) { to[i] = total[i]; };
    }
  }
}

// sum <- sum + x
KERNEL(accumulate)(long long n, const real *x, real *sum, SkipIf skip) {
  const long long count = skips(skip) ? 0 : n;
  FOR_EACH(i, count, x, sum) { sum[i] += x[i]; };
}

// x <- 0
KERNEL(clear)(long long n, real *x, SkipIf skip) {
  const long long count = skips(skip) ? 0 : n;
  FOR_EACH(i, count, x) { x[i] = 0; };
}

// x <- factor x
KERNEL(scale)(long long n, real *x, double factor, SkipIf skip) {
  const long long count = skips(skip) ? 0 : n;
  const real f = (real)factor;
  FOR_EACH(i, count, x) { x[i] *= f; };
}

// x <- x held between -limit and limit; NaN stays NaN
KERNEL(clip)(long long n, real *x, double limit) {
  const real most = (real)limit;
  FOR_EACH(i, n, x) { x[i] = clamp(x[i], most); };
}

// count[0] grows by the number of entries that are not finite.
KERNEL(count_nonfinite)(long long n, const real *x, long long one, long long *count) {
  long long nonfinite = 0;
  FOR_EACH(i, n, x) { nonfinite += !is_finite(x[i]); };
  atomic_add(count, nonfinite);
}

// total[0] grows by the number of entries whose magnitude is above `bound`.
KERNEL(count_above)(long long n, const real *x, long long one, long long *total, long long bound) {
  long long above = 0;
  FOR_EACH(i, n, x) { above += magnitude(x[i]) > bound; };
  atomic_add(total, above);
}

// total[0] grows by the sum of n counts, most of which are 0.
KERNEL(sum_counts)(long long n, const long long *count, long long one, long long *total) {
  long long sum = 0;
  FOR_EACH_PIECE(c, n) FOR_EACH_IN_BLOCK(i, c.begin, c.end) sum += count[i];
  atomic_add(total, sum);
}
