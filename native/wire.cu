// What stands between a gradient and the wire.
#include "portable.h"

// flat[offset + i] <- scale data[i] for every member; bad[row] grows by the member's count of entries that are not finite.
// A member that already lies at its place in `flat` is not copied.
KERNEL(pack)(const Member *rows, long long count, real *flat, double scale, long long *bad) {
  const real factor = (real)scale;
  FOR_EACH_CHUNK(c, rows, count) {
    const real *from = rows[c.row].data;
    real *to = flat + rows[c.row].offset;
    int found = 0;
    if (from == to && factor == 1) {
      FOR_EACH_IN(i, c) found += !finite(to[i]);
    } else {
      FOR_EACH_IN(i, c) {
        const real x = factor * from[i];
        to[i] = x;
        found += !finite(x);
      }
    }
    add(&bad[c.row], found);
  }
}

// data[i] <- scale flat[offset + i]
KERNEL(unpack)(const Member *rows, long long count, const real *flat, double scale) {
  const real factor = (real)scale;
  FOR_EACH_CHUNK(c, rows, count) {
    const real *from = flat + rows[c.row].offset;
    real *to = rows[c.row].data;
    FOR_EACH_IN(i, c) to[i] = factor * from[i];
  }
}

// sum <- sum + x
KERNEL(accumulate)(long long n, const real *x, real *sum) {
  FOR_EACH(i, n) sum[i] += x[i];
}

// x <- factor x
KERNEL(scale)(long long n, real *x, double factor) {
  const real f = (real)factor;
  FOR_EACH(i, n) x[i] *= f;
}

// x <- x held between -limit and limit; NaN stays NaN
KERNEL(clip)(long long n, real *x, double limit) {
  const real most = (real)limit;
  FOR_EACH(i, n) x[i] = clamp(x[i], most);
}

KERNEL(to_half)(long long n, const real *x, half_t *wire) {
  FOR_EACH(i, n) wire[i] = half_of(x[i]);
}

KERNEL(from_half)(long long n, const half_t *wire, real *x) {
  FOR_EACH(i, n) x[i] = value_of_half(wire[i]);
}

KERNEL(to_bfloat16)(long long n, const real *x, bfloat16_t *wire) {
  FOR_EACH(i, n) wire[i] = bfloat16_of(x[i]);
}

KERNEL(from_bfloat16)(long long n, const bfloat16_t *wire, real *x) {
  FOR_EACH(i, n) x[i] = value_of_bfloat16(wire[i]);
}
