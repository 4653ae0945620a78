// Muon (Jordan et al., 2024): momentum, and steps along directions that matrix products have made orthogonal.
#include "sums.h"
#include "update.h"

struct Muon : Update {
  double momentum, one_minus_momentum;
};

// m <- mu m + (1 - mu) d;  u <- m, or mu m + (1 - mu) d with the new m if `nesterov`          [d has no decay in it]
// partial[c] <- sum of u^2, of chunk c
KERNEL(muon_average)(Table table, const real *grad, real *moments, real *direction, long long nesterov, double *partial,
                     const Muon *hyper, SkipIf skip) {
  if (skips(skip)) return;
  const real scale = (real)hyper->scale, limit = (real)hyper->limit;
  const real mu = (real)hyper->momentum, rest = (real)hyper->one_minus_momentum;
  FOR_EACH_CHUNK(c, table) {
    const long long at = table.members[c.member].offset;
    const real *g = grad + at;
    real *m = moments + at, *u = direction + at;
    SUM_CHUNK(i, c, partial, g, m, u) {
      const real d = clamp(scale * g[i], limit), next = mu * m[i] + rest * d;
      m[i] = next;
      u[i] = nesterov ? mu * next + rest * d : next;
      return Squares{u[i]};
    };
  }
}

// w <- w - lr (stretch x + decay w)
KERNEL(muon)(Table table, const real *direction, double stretch, const Muon *hyper, SkipIf skip) {
  update_weights(table, skip, [=](const Member &param, const Chunk &c, real *w) {
    const real *x = direction + param.offset;
    const double lr = hyper->lr * param.lr;
    const real step = (real)(lr * stretch), shrink = (real)(lr * (hyper->decay * param.decay));
    FOR_EACH_IN(i, c, x, w) { w[i] -= step * x[i] + shrink * w[i]; };
  });
}
