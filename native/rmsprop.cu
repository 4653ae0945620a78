// RMSProp as in SINGA: epsilon stands inside the root.
#include "update.h"

struct RmsProp : Update {
  double rho, fade, epsilon;
};

// r <- rho r + fade d^2;  w <- w - lr d / sqrt(r + epsilon)          [fade = 1 - rho]
KERNEL(rmsprop)(Table table, const real *grad, real *average, const RmsProp *now, Unless refused) {
  if (holds(refused)) return;
  FOR_EACH_CHUNK(c, table) {
    const Member m = member(table, c);
    const real *g = grad + m.offset;
    real *w = weights(m, c), *r = average + m.offset;
    const real step = (real)(now->lr * m.lr), wd = (real)(now->decay * m.decay);
    const real mean = (real)now->scale, most = (real)now->limit;
    const real keep = (real)now->rho, in = (real)now->fade, eps = (real)now->epsilon;
    FOR_EACH_IN(i, c, g, w, r) {
      const real d = direction(g[i], w[i], mean, most, wd), next = keep * r[i] + in * (d * d);
      r[i] = next;
      w[i] -= step * d / root(next + eps);
    };
    round_home(m, c);
  }
}
