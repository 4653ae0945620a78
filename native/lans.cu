// LANS (Zheng et al., 2020): LAMB on gradients of length 1, with Nesterov's momentum; the parts of old and new gradient
// each have the parameter's length.
#include "adam.h"
#include "sums.h"

struct Lans : Adam {
  double lower, upper;
};

// What brings a gradient to length 1, with scale's sign; 1 for zeros, and a finite number for the smallest ones.
INLINE real unit_of(double square, double scale) {
  const double unit = square > 0 ? clamp(1 / sqrt(square), 0, 0x1p127) : 1;
  return (real)(scale < 0 ? -unit : unit);
}

// um = (m / bias1) rate + decay w, ug = h rate + decay w          [rate = 1 / (sqrt(v / bias2) + epsilon)]
INLINE Pair updates(const AdamReals &r, real m, real v, real h, real w) {
  const real rate = 1 / (sqrt(v * r.unbias2) + r.epsilon);
  return {m * r.unbias1 * rate + r.decay * w, h * rate + r.decay * w};
}

// m <- b1 m + (1 - b1) h;  v <- b2 v + (1 - b2) h^2          [h = clip(scale g / |scale g|), 0 for a gradient of zeros]
// partial[3 c ...] <- sums of w^2, um^2, ug^2 of chunk c
KERNEL(lans_moments)(Table table, const real *grad, real *first, real *second, const double *square, double *partial,
                     const Lans *hyper, SkipIf skip) {
  if (skips(skip)) return;
  FOR_EACH_CHUNK(c, table) {
    const Member param = member(table, c);
    const real *g = grad + param.offset, *w = wide(param);
    real *m = first + param.offset, *v = second + param.offset;
    const real unit = unit_of(square[c.member], hyper->scale);
    const AdamReals r = reals_of(hyper, param);
    SUM_CHUNK(i, c, partial, g, m, v, w) {
      const real h = clamp(unit * g[i], r.limit);
      const auto [mi, vi] = average(r, h, m[i], v[i]);
      const auto [um, ug] = updates(r, mi, vi, h, w[i]);
      return Squares{w[i], um, ug};
    };
  }
}

// w <- w - lr (b1 rm um + (1 - b1) rg ug)          [r = |w| / |u|, |w| held in [lower, upper]; 1 if a norm is 0]
KERNEL(lans)(Table table, const real *grad, const real *first, const real *second, const double *square,
             const double *squares, const Lans *hyper, SkipIf skip) {
  update_weights(table, skip, [=](const Member &param, const Chunk &c, real *w) {
    const real *g = grad + param.offset, *m = first + param.offset, *v = second + param.offset;
    const double norm = clamp(sqrt(squares[3 * c.member]), hyper->lower, hyper->upper), lr = hyper->lr * param.lr;
    const double past = sqrt(squares[3 * c.member + 1]), present = sqrt(squares[3 * c.member + 2]);
    const real step_m = (real)(lr * hyper->beta1 * trust_ratio(param, norm, past));
    const real step_g = (real)(lr * hyper->one_minus_beta1 * trust_ratio(param, norm, present));
    const real unit = unit_of(square[c.member], hyper->scale);
    const AdamReals r = reals_of(hyper, param);
    FOR_EACH_IN(i, c, g, w, m, v) {
      const auto [um, ug] = updates(r, m[i], v[i], clamp(unit * g[i], r.limit), w[i]);
      w[i] -= step_m * um + step_g * ug;
    };
  });
}
