// AdamW (Loshchilov and Hutter, 2019): weight decay beside the adaptive step, not inside the gradient.
#include "update.h"

struct AdamW : Update {
  double beta1, one_minus_beta1, beta2, one_minus_beta2, gain, epsilon;
};

// m <- b1 m + (1 - b1) d;  v <- b2 v + (1 - b2) d^2;  w <- w - lr (gain m / (sqrt(v) + epsilon) + decay w)
// [d has no decay in it;  gain = sqrt(1 - b2^t) / (1 - b1^t), or 1, so epsilon stands before the bias correction]
KERNEL(adamw)(Table table, const real *grad, real *first, real *second, const AdamW *hyper, SkipIf skip) {
  update_weights(table, skip, [=](const Member &param, const Chunk &c, real *w) {
    const real *g = grad + param.offset;
    real *m = first + param.offset, *v = second + param.offset;
    const double lr = hyper->lr * param.lr;
    const real step = (real)(lr * hyper->gain), shrink = (real)(lr * (hyper->decay * param.decay));
    const real scale = (real)hyper->scale, limit = (real)hyper->limit, eps = (real)hyper->epsilon;
    const real beta1 = (real)hyper->beta1, one_minus_beta1 = (real)hyper->one_minus_beta1;
    const real beta2 = (real)hyper->beta2, one_minus_beta2 = (real)hyper->one_minus_beta2;
    FOR_EACH_IN(i, c, g, w, m, v) {
      const real d = clamp(scale * g[i], limit);
      const real mi = beta1 * m[i] + one_minus_beta1 * d, vi = beta2 * v[i] + one_minus_beta2 * (d * d);
      m[i] = mi;
      v[i] = vi;
      w[i] -= step * mi / (sqrt(vi) + eps) + shrink * w[i];
    };
  });
}
