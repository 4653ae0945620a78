// AdaGrad (Duchi et al., 2011) as in SINGA: epsilon stands inside the root.
#include "update.h"

struct AdaGrad : Update {
  double epsilon;
};

// h <- h + d^2;  w <- w - lr d / sqrt(h + epsilon)
KERNEL(adagrad)(Table table, const real *grad, real *history, const AdaGrad *hyper, SkipIf skip) {
  update_weights(table, skip, [=](const Member &m, const Chunk &c, real *w) {
    const real *g = grad + m.offset;
    real *h = history + m.offset;
    const real step = (real)(hyper->lr * m.lr), eps = (real)hyper->epsilon;
    const auto direction = direction_of(hyper, m);
    FOR_EACH_IN(i, c, g, w, h) {
      const real d = direction(g[i], w[i]), next = h[i] + d * d;
      h[i] = next;
      w[i] -= step * d / sqrt(next + eps);
    };
  });
}
