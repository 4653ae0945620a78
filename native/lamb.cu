// LAMB (You et al., 2020): Adam's direction with decoupled weight decay, as long as the parameter itself.
#include "adam.h"
#include "sums.h"

struct Lamb : Adam {
  double lower, upper;
};

// u = (m / bias1) / (sqrt(v / bias2) + epsilon) + decay w
INLINE real update(const AdamReals &r, real m, real v, real w) {
  return m * r.unbias1 / (sqrt(v * r.unbias2) + r.epsilon) + r.decay * w;
}

// m <- b1 m + (1 - b1) d;  v <- b2 v + (1 - b2) d^2          [d has no decay in it]
// partial[2 c] <- sum of w^2, partial[2 c + 1] <- sum of u^2, of chunk c
KERNEL(lamb_moments)(Table table, const real *grad, real *first, real *second, double *partial, const Lamb *hyper,
                     SkipIf skip) {
  if (skips(skip)) return;
  FOR_EACH_CHUNK(c, table) {
    const Member param = member(table, c);
    const real *g = grad + param.offset, *w = wide(param);
    real *m = first + param.offset, *v = second + param.offset;
    const AdamReals r = reals_of(hyper, param);
    SUM_CHUNK(i, c, partial, g, m, v, w) {
      const auto [mi, vi] = average(r, clamp(r.scale * g[i], r.limit), m[i], v[i]);
      return Squares{w[i], update(r, mi, vi, w[i])};
    };
  }
}

// w <- w - lr r u          [r = |w| / |u|, |w| held in [lower, upper]; 1 if a norm is 0]
KERNEL(lamb)(Table table, const real *first, const real *second, const double *squares, const Lamb *hyper,
             SkipIf skip) {
  update_weights(table, skip, [=](const Member &param, const Chunk &c, real *w) {
    const real *m = first + param.offset, *v = second + param.offset;
    const double norm = clamp(sqrt(squares[2 * c.member]), hyper->lower, hyper->upper);
    const real step = (real)(hyper->lr * param.lr * trust_ratio(param, norm, sqrt(squares[2 * c.member + 1])));
    const AdamReals r = reals_of(hyper, param);
    FOR_EACH_IN(i, c, w, m, v) { w[i] -= step * update(r, m[i], v[i], w[i]); };
  });
}
