// Adam (Kingma and Ba, 2015) as in SINGA: epsilon stands outside the root, after the bias correction.
#include "adam.h"

// m <- b1 m + (1 - b1) d;  v <- b2 v + (1 - b2) d^2;  w <- w - lr (m / bias1) / (sqrt(v / bias2) + epsilon)
KERNEL(adam)(Table table, const real *grad, real *first, real *second, const Adam *hyper, SkipIf skip) {
  update_weights(table, skip, [=](const Member &param, const Chunk &c, real *w) {
    const real *g = grad + param.offset;
    real *m = first + param.offset, *v = second + param.offset;
    const real step = (real)(hyper->lr * param.lr / hyper->bias1);
    const auto direction = direction_of(hyper, param);
    const AdamReals r = reals_of(hyper, param);
    FOR_EACH_IN(i, c, g, w, m, v) {
      const auto [mi, vi] = average(r, direction(g[i], w[i]), m[i], v[i]);
      w[i] -= step * mi / (sqrt(vi * r.unbias2) + r.epsilon);
    };
  });
}
