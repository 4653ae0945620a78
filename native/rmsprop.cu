// RMSProp as in SINGA: epsilon stands inside the root.
#include "update.h"

// r <- rho r + fade d^2;  w <- w - lr d / sqrt(r + epsilon)          [fade = 1 - rho]
KERNEL(rmsprop)(Table table, const real *grad, real *average, double scale, double limit, double lr, double decay,
                double rho, double fade, double epsilon) {
  FOR_EACH_CHUNK(c, table) {
    const Member m = member(table, c);
    const real *g = grad + m.offset;
    real *w = m.data, *r = average + m.offset;
    const real step = (real)(lr * m.lr), wd = (real)(decay * m.decay), mean = (real)scale, most = (real)limit;
    const real keep = (real)rho, in = (real)fade, eps = (real)epsilon;
    FOR_EACH_IN(i, c, g, w, r) {
      const real d = direction(g[i], w[i], mean, most, wd), next = keep * r[i] + in * (d * d);
      r[i] = next;
      w[i] -= step * d / root(next + eps);
    };
  }
}
