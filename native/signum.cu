// Signum (Bernstein et al., "signSGD: compressed optimisation for non-convex problems", 2018), with weight decay beside
// the step.
#include "update.h"

// -1, 0 or 1; NaN of NaN
INLINE real sign_of(real x) { return x > 0 ? (real)1 : x < 0 ? (real)-1 : x == 0 ? (real)0 : x; }

// w <- w - lr decay w;  w <- w - lr sign(d)          [d has no decay in it]
KERNEL(sign_descent)(Table table, const real *grad, const Update *hyper, SkipIf skip) {
  update_weights(table, skip, [=](const Member &m, const Chunk &c, real *w) {
    const real *g = grad + m.offset;
    const double lr = hyper->lr * m.lr;
    const real step = (real)lr, keep = (real)(1 - lr * (hyper->decay * m.decay));
    const real scale = (real)hyper->scale, limit = (real)hyper->limit;
    FOR_EACH_IN(i, c, g, w) { w[i] = keep * w[i] - step * sign_of(clamp(scale * g[i], limit)); };
  });
}

struct Signum : Update {
  double momentum;
};

// b <- momentum b + d;  w <- w - lr decay w;  w <- w - lr sign(b)
KERNEL(signum)(Table table, const real *grad, real *buffer, const Signum *hyper, SkipIf skip) {
  update_weights(table, skip, [=](const Member &m, const Chunk &c, real *w) {
    const real *g = grad + m.offset;
    real *b = buffer + m.offset;
    const double lr = hyper->lr * m.lr;
    const real step = (real)lr, keep = (real)(1 - lr * (hyper->decay * m.decay)), mu = (real)hyper->momentum;
    const real scale = (real)hyper->scale, limit = (real)hyper->limit;
    FOR_EACH_IN(i, c, g, w, b) {
      const real next = mu * b[i] + clamp(scale * g[i], limit);
      b[i] = next;
      w[i] = keep * w[i] - step * sign_of(next);
    };
  });
}
