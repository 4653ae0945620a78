// RMSProp as in SINGA: epsilon stands inside the root.
#include "update.h"

struct RmsProp : Update {
  double rho, one_minus_rho, epsilon;
};

// r <- rho r + (1 - rho) d^2;  w <- w - lr d / sqrt(r + epsilon)
KERNEL(rmsprop)(Table table, const real *grad, real *average, const RmsProp *hyper, SkipIf skip) {
  update_weights(table, skip, [=](const Member &m, const Chunk &c, real *w) {
    const real *g = grad + m.offset;
    real *r = average + m.offset;
    const real step = (real)(hyper->lr * m.lr), eps = (real)hyper->epsilon;
    const real rho = (real)hyper->rho, one_minus_rho = (real)hyper->one_minus_rho;
    const auto direction = direction_of(hyper, m);
    FOR_EACH_IN(i, c, g, w, r) {
      const real d = direction(g[i], w[i]), next = rho * r[i] + one_minus_rho * (d * d);
      r[i] = next;
      w[i] -= step * d / sqrt(next + eps);
    };
  });
}
