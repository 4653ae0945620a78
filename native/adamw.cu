// AdamW (Loshchilov and Hutter, 2019): weight decay beside the adaptive step, not inside the gradient.
#include "update.h"

struct AdamW : Update {
  double b1, fade1, b2, fade2, gain, epsilon;
};

// m <- b1 m + fade1 d;  v <- b2 v + fade2 d^2;  w <- w - lr (gain m / (sqrt(v) + epsilon) + decay w)
// [d has no decay in it;  gain = sqrt(1 - b2^t) / (1 - b1^t), or 1, so epsilon stands before the bias correction]
KERNEL(adamw)(Table table, const real *grad, real *first, real *second, const AdamW *now, Unless refused) {
  if (holds(refused)) return;
  FOR_EACH_CHUNK(c, table) {
    const Member row = member(table, c);
    const real *g = grad + row.offset;
    real *w = weights(row, c), *m = first + row.offset, *v = second + row.offset;
    const double lr = now->lr * row.lr;
    const real step = (real)(lr * now->gain), shrink = (real)(lr * (now->decay * row.decay));
    const real mean = (real)now->scale, most = (real)now->limit, eps = (real)now->epsilon;
    const real keep1 = (real)now->b1, in1 = (real)now->fade1, keep2 = (real)now->b2, in2 = (real)now->fade2;
    FOR_EACH_IN(i, c, g, w, m, v) {
      const real d = clamp(mean * g[i], most);
      const real mi = keep1 * m[i] + in1 * d, vi = keep2 * v[i] + in2 * (d * d);
      m[i] = mi;
      v[i] = vi;
      w[i] -= step * mi / (root(vi) + eps) + shrink * w[i];
    };
    round_home(row, c);
  }
}
