// Stochastic gradient descent, with SINGA's and PyTorch's momentum: the learning rate stands outside the buffer.
#include "update.h"

// w <- w - lr d
KERNEL(sgd)(Table table, const real *grad, const Update *hyper, SkipIf skip) {
  update_weights(table, skip, [=](const Member &m, const Chunk &c, real *w) {
    const real *g = grad + m.offset;
    const real step = (real)(hyper->lr * m.lr);
    const auto direction = direction_of(hyper, m);
    FOR_EACH_IN(i, c, g, w) { w[i] -= step * direction(g[i], w[i]); };
  });
}

struct Momentum : Update {
  double momentum, gain;
};

template <bool nesterov>
INLINE void descend(const Table &table, const real *grad, real *buffer, const Momentum *hyper, SkipIf skip) {
  update_weights(table, skip, [=](const Member &m, const Chunk &c, real *w) {
    const real *g = grad + m.offset;
    real *b = buffer + m.offset;
    const real step = (real)(hyper->lr * m.lr), mu = (real)hyper->momentum, gain = nesterov ? 1 : (real)hyper->gain;
    const auto direction = direction_of(hyper, m);
    FOR_EACH_IN(i, c, g, w, b) {
      const real d = direction(g[i], w[i]), next = mu * b[i] + gain * d;
      b[i] = next;
      w[i] -= step * (nesterov ? d + mu * next : next);
    };
  });
}

// b <- momentum b + gain d;  w <- w - lr b          [gain = 1 - dampening, from the first step on]
KERNEL(sgd_momentum)(Table table, const real *grad, real *buffer, const Momentum *hyper, SkipIf skip) {
  descend<false>(table, grad, buffer, hyper, skip);
}

// b <- momentum b + d;  w <- w - lr (d + momentum b)          [Nesterov]
KERNEL(sgd_nesterov)(Table table, const real *grad, real *buffer, const Momentum *hyper, SkipIf skip) {
  descend<true>(table, grad, buffer, hyper, skip);
}
