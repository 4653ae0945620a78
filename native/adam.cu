// Adam (Kingma and Ba, 2015) as in SINGA: epsilon stands outside the root, after the bias correction.
#include "update.h"

// m <- b1 m + fade1 d;  v <- b2 v + fade2 d^2;  w <- w - lr (m / bias1) / (sqrt(v / bias2) + epsilon)
// [fade = 1 - b;  bias = 1 - b^t at update t = 1, 2, ...]
KERNEL(adam)(Table table, const real *grad, real *first, real *second, double scale, double limit, double lr,
             double decay, double b1, double fade1, double bias1, double b2, double fade2, double bias2, double epsilon) {
  FOR_EACH_CHUNK(c, table) {
    const Member row = member(table, c);
    const real *g = grad + row.offset;
    real *w = row.data, *m = first + row.offset, *v = second + row.offset;
    const real step = (real)(lr * row.lr / bias1), wd = (real)(decay * row.decay), mean = (real)scale;
    const real most = (real)limit, keep1 = (real)b1, in1 = (real)fade1, keep2 = (real)b2, in2 = (real)fade2;
    const real correction = (real)(1 / bias2), eps = (real)epsilon;
    FOR_EACH_IN(i, c, g, w, m, v) {
      const real d = direction(g[i], w[i], mean, most, wd);
      const real mi = keep1 * m[i] + in1 * d, vi = keep2 * v[i] + in2 * (d * d);
      m[i] = mi;
      v[i] = vi;
      w[i] -= step * mi / (root(vi * correction) + eps);
    };
  }
}
