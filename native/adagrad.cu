// AdaGrad (Duchi et al., 2011) as in SINGA: epsilon stands inside the root.
#include "update.h"

struct AdaGrad : Update {
  double epsilon;
};

// h <- h + d^2;  w <- w - lr d / sqrt(h + epsilon)
KERNEL(adagrad)(Table table, const real *grad, real *history, const AdaGrad *now, Unless refused) {
  if (holds(refused)) return;
  FOR_EACH_CHUNK(c, table) {
    const Member m = member(table, c);
    const real *g = grad + m.offset;
    real *w = weights(m, c), *h = history + m.offset;
    const real step = (real)(now->lr * m.lr), wd = (real)(now->decay * m.decay);
    const real mean = (real)now->scale, most = (real)now->limit;
    const real eps = (real)now->epsilon;
    FOR_EACH_IN(i, c, g, w, h) {
      const real d = direction(g[i], w[i], mean, most, wd), next = h[i] + d * d;
      h[i] = next;
      w[i] -= step * d / root(next + eps);
    };
    round_home(m, c);
  }
}
