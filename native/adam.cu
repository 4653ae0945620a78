// Adam (Kingma and Ba, 2015) as in SINGA: epsilon stands outside the root, after the bias correction.
#include "update.h"

struct Adam : Update {
  double b1, fade1, bias1, b2, fade2, bias2, epsilon;
};

// m <- b1 m + fade1 d;  v <- b2 v + fade2 d^2;  w <- w - lr (m / bias1) / (sqrt(v / bias2) + epsilon)
// [fade = 1 - b;  bias = 1 - b^t at update t = 1, 2, ...]
KERNEL(adam)(Table table, const real *grad, real *first, real *second, const Adam *now, Unless refused) {
  if (holds(refused)) return;
  FOR_EACH_CHUNK(c, table) {
    const Member row = member(table, c);
    const real *g = grad + row.offset;
    real *w = weights(row, c), *m = first + row.offset, *v = second + row.offset;
    const real step = (real)(now->lr * row.lr / now->bias1), wd = (real)(now->decay * row.decay);
    const real mean = (real)now->scale, most = (real)now->limit;
    const real keep1 = (real)now->b1, in1 = (real)now->fade1, keep2 = (real)now->b2, in2 = (real)now->fade2;
    const real correction = (real)(1 / now->bias2), eps = (real)now->epsilon;
    FOR_EACH_IN(i, c, g, w, m, v) {
      const real d = direction(g[i], w[i], mean, most, wd);
      const real mi = keep1 * m[i] + in1 * d, vi = keep2 * v[i] + in2 * (d * d);
      m[i] = mi;
      v[i] = vi;
      w[i] -= step * mi / (root(vi * correction) + eps);
    };
    round_home(row, c);
  }
}
