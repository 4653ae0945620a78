// LAMB (You et al., 2020): Adam's direction with decoupled weight decay, as long as the parameter itself.
#include "update.h"

struct Lamb : Update {
  double b1, fade1, bias1, b2, fade2, bias2, epsilon, lower, upper;
};

// u = (m / bias1) / (sqrt(v / bias2) + epsilon) + decay w          [unbias = 1 / bias]
INLINE real ratio(real m, real v, real unbias1, real unbias2, real eps) {
  return m * unbias1 / (root(v * unbias2) + eps);
}

// m <- b1 m + fade1 d;  v <- b2 v + fade2 d^2          [d has no decay in it]
// partial[2 c] <- sum of w^2, partial[2 c + 1] <- sum of u^2, of chunk c
KERNEL(lamb_moments)(Table table, const real *grad, real *first, real *second, double *partial, const Lamb *now,
                     Unless refused) {
  if (holds(refused)) return;
  FOR_EACH_CHUNK_BY_LANES(c, table) {
    const Member row = member(table, c);
    const real *g = grad + row.offset, *w = wide(row);
    real *m = first + row.offset, *v = second + row.offset;
    const real mean = (real)now->scale, most = (real)now->limit, wd = (real)(now->decay * row.decay);
    const real keep1 = (real)now->b1, in1 = (real)now->fade1, keep2 = (real)now->b2, in2 = (real)now->fade2;
    const real unbias1 = (real)(1 / now->bias1), unbias2 = (real)(1 / now->bias2), eps = (real)now->epsilon;
    Sums ww = {}, uu = {};
    in_lanes(c, [&](long long i, int j) {
      const real d = clamp(mean * g[i], most);
      const real mi = keep1 * m[i] + in1 * d, vi = keep2 * v[i] + in2 * (d * d);
      m[i] = mi;
      v[i] = vi;
      const real u = ratio(mi, vi, unbias1, unbias2, eps) + wd * w[i];
      ww[j] += (double)w[i] * (double)w[i];
      uu[j] += (double)u * (double)u;
    });
    const double w2 = folded(ww), u2 = folded(uu);
    if (leads_lanes()) partial[2 * c.index] = w2, partial[2 * c.index + 1] = u2;
  }
}

// w <- w - lr r u          [r = |w| / |u|, |w| held in [lower, upper]; 1 if a norm is 0]
KERNEL(lamb)(Table table, const real *first, const real *second, const double *squares, const Lamb *now, Unless refused) {
  if (holds(refused)) return;
  FOR_EACH_CHUNK(c, table) {
    const Member row = member(table, c);
    real *w = weights(row, c);
    const real *m = first + row.offset, *v = second + row.offset;
    const double norm = held(root(squares[2 * c.row]), now->lower, now->upper), length = root(squares[2 * c.row + 1]);
    const double r = row.adapts != 0 && norm > 0 && length > 0 ? norm / length : 1;
    const real step = (real)(now->lr * row.lr * r), wd = (real)(now->decay * row.decay);
    const real unbias1 = (real)(1 / now->bias1), unbias2 = (real)(1 / now->bias2), eps = (real)now->epsilon;
    FOR_EACH_IN(i, c, w, m, v) { w[i] -= step * (ratio(m[i], v[i], unbias1, unbias2, eps) + wd * w[i]); };
    round_home(row, c);
  }
}
