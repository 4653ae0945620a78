// Stochastic gradient descent, with SINGA's and PyTorch's momentum: the learning rate stands outside the buffer.
#include "update.h"

// w <- w - lr d
KERNEL(sgd)(Table table, const real *grad, const Update *now, Unless refused) {
  if (holds(refused)) return;
  FOR_EACH_CHUNK(c, table) {
    const Member m = member(table, c);
    const real *g = grad + m.offset;
    real *w = weights(m, c);
    const real step = (real)(now->lr * m.lr), wd = (real)(now->decay * m.decay);
    const real mean = (real)now->scale, most = (real)now->limit;
    FOR_EACH_IN(i, c, g, w) { w[i] -= step * direction(g[i], w[i], mean, most, wd); };
    round_home(m, c);
  }
}

struct Momentum : Update {
  double momentum, gain;
};

// b <- momentum b + gain d;  w <- w - lr b          [gain = 1 - dampening, from the first step on]
KERNEL(sgd_momentum)(Table table, const real *grad, real *buffer, const Momentum *now, Unless refused) {
  if (holds(refused)) return;
  FOR_EACH_CHUNK(c, table) {
    const Member m = member(table, c);
    const real *g = grad + m.offset;
    real *w = weights(m, c), *b = buffer + m.offset;
    const real step = (real)(now->lr * m.lr), wd = (real)(now->decay * m.decay);
    const real mean = (real)now->scale, most = (real)now->limit;
    const real mu = (real)now->momentum, in = (real)now->gain;
    FOR_EACH_IN(i, c, g, w, b) {
      const real next = mu * b[i] + in * direction(g[i], w[i], mean, most, wd);
      b[i] = next;
      w[i] -= step * next;
    };
    round_home(m, c);
  }
}

// b <- momentum b + d;  w <- w - lr (d + momentum b)          [Nesterov]
KERNEL(sgd_nesterov)(Table table, const real *grad, real *buffer, const Momentum *now, Unless refused) {
  if (holds(refused)) return;
  FOR_EACH_CHUNK(c, table) {
    const Member m = member(table, c);
    const real *g = grad + m.offset;
    real *w = weights(m, c), *b = buffer + m.offset;
    const real step = (real)(now->lr * m.lr), wd = (real)(now->decay * m.decay);
    const real mean = (real)now->scale, most = (real)now->limit;
    const real mu = (real)now->momentum;
    FOR_EACH_IN(i, c, g, w, b) {
      const real d = direction(g[i], w[i], mean, most, wd), next = mu * b[i] + d;
      b[i] = next;
      w[i] -= step * (d + mu * next);
    };
    round_home(m, c);
  }
}
