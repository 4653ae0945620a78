// LANS (Zheng et al., 2020): LAMB on gradients of length 1, with Nesterov's momentum; the parts of old and new gradient
// each have the parameter's length.
#include "update.h"

struct Lans : Update {
  double b1, fade1, bias1, b2, fade2, bias2, epsilon, lower, upper;
};

// h = clip(scale g / |scale g|), 0 for a gradient of zeros          [`length` is |g| with scale's sign]
INLINE real of_length_1(real g, real length, real limit) { return clamp(g / length, limit); }

INLINE real signed_length(double square, double scale) {
  return square > 0 ? (real)(scale < 0 ? -root(square) : root(square)) : (real)1;
}

// m <- b1 m + fade1 h;  v <- b2 v + fade2 h^2
// partial[3 c ...] <- sums of w^2, um^2, ug^2 of chunk c
// [um = (m / bias1) / den + decay w, ug = h / den + decay w, den = sqrt(v / bias2) + epsilon; unbias = 1 / bias]
KERNEL(lans_moments)(Table table, const real *grad, real *first, real *second, const double *square, double *partial,
                     const Lans *now, Unless refused) {
  if (holds(refused)) return;
  FOR_EACH_CHUNK_BY_LANES(c, table) {
    const Member row = member(table, c);
    const real *g = grad + row.offset, *w = wide(row);
    real *m = first + row.offset, *v = second + row.offset;
    const real length = signed_length(square[c.row], now->scale), most = (real)now->limit;
    const real wd = (real)(now->decay * row.decay), eps = (real)now->epsilon;
    const real keep1 = (real)now->b1, in1 = (real)now->fade1, keep2 = (real)now->b2, in2 = (real)now->fade2;
    const real unbias1 = (real)(1 / now->bias1), unbias2 = (real)(1 / now->bias2);
    Sums ww = {}, mm = {}, gg = {};
    in_lanes(c, [&](long long i, int j) {
      const real h = of_length_1(g[i], length, most);
      const real mi = keep1 * m[i] + in1 * h, vi = keep2 * v[i] + in2 * (h * h);
      m[i] = mi;
      v[i] = vi;
      const real den = root(vi * unbias2) + eps;
      const real um = mi * unbias1 / den + wd * w[i], ug = h / den + wd * w[i];
      ww[j] += (double)w[i] * (double)w[i];
      mm[j] += (double)um * (double)um;
      gg[j] += (double)ug * (double)ug;
    });
    const double w2 = folded(ww), m2 = folded(mm), g2 = folded(gg);
    if (leads_lanes()) partial[3 * c.index] = w2, partial[3 * c.index + 1] = m2, partial[3 * c.index + 2] = g2;
  }
}

// w <- w - lr (b1 rm um + fade1 rg ug)          [r = |w| / |u|, |w| held in [lower, upper]; 1 if a norm is 0]
KERNEL(lans)(Table table, const real *grad, const real *first, const real *second, const double *square,
             const double *squares, const Lans *now, Unless refused) {
  if (holds(refused)) return;
  FOR_EACH_CHUNK(c, table) {
    const Member row = member(table, c);
    const real *g = grad + row.offset, *m = first + row.offset, *v = second + row.offset;
    real *w = weights(row, c);
    const real length = signed_length(square[c.row], now->scale), most = (real)now->limit;
    const real wd = (real)(now->decay * row.decay), eps = (real)now->epsilon;
    const real unbias1 = (real)(1 / now->bias1), unbias2 = (real)(1 / now->bias2);
    const double norm = held(root(squares[3 * c.row]), now->lower, now->upper);
    const double past = root(squares[3 * c.row + 1]), present = root(squares[3 * c.row + 2]), lr = now->lr * row.lr;
    const bool adapts = row.adapts != 0 && norm > 0;
    const real step_m = (real)(lr * now->b1 * (adapts && past > 0 ? norm / past : 1));
    const real step_g = (real)(lr * now->fade1 * (adapts && present > 0 ? norm / present : 1));
    FOR_EACH_IN(i, c, g, w, m, v) {
      const real h = of_length_1(g[i], length, most), den = root(v[i] * unbias2) + eps;
      const real um = m[i] * unbias1 / den + wd * w[i], ug = h / den + wd * w[i];
      w[i] -= step_m * um + step_g * ug;
    };
    round_home(row, c);
  }
}
