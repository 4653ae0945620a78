// Large-batch SGD, as in MXNet: gradients of several batches are added up, and the learning rate, which stands inside
// the momentum buffer, warms up to what the large batch allows.
#include "update.h"

// `scale` takes the mean over ranks, `rescale` that over the batches, and the user's rescaling, behind it.
struct Lbsgd : Update {
  double rescale, momentum, batches;
};

// sum <- sum + scale g
KERNEL(lbsgd_gather)(Table table, const real *grad, real *total, const Lbsgd *now, Unless refused) {
  if (holds(refused)) return;
  FOR_EACH_CHUNK(c, table) {
    const Member m = member(table, c);
    const real *g = grad + m.offset;
    real *sum = total + m.offset;
    const real mean = (real)now->scale;
    FOR_EACH_IN(i, c, g, sum) { sum[i] += mean * g[i]; };
  }
}

// partial[2 c] <- sum of w^2, partial[2 c + 1] <- sum of s^2, of chunk c          [s = sum + scale g]
KERNEL(lbsgd_squares)(Table table, const real *grad, const real *total, double *partial, const Lbsgd *now) {
  FOR_EACH_CHUNK_BY_LANES(c, table) {
    const Member m = member(table, c);
    const real *g = grad + m.offset, *sum = total + m.offset, *w = wide(m);
    const real mean = (real)now->scale;
    Sums ww = {}, ss = {};
    in_lanes(c, [&](long long i, int j) {
      const real s = sum[i] + mean * g[i];
      ww[j] += (double)w[i] * (double)w[i];
      ss[j] += (double)s * (double)s;
    });
    const double w2 = folded(ww), s2 = folded(ss);
    if (leads_lanes()) partial[2 * c.index] = w2, partial[2 * c.index + 1] = s2;
  }
}

// d = clip(rescale s) + decay w;  b <- momentum b - lr d;  w <- w + b;  sum <- 0
INLINE void apply(const Member &m, const Chunk &c, const real *grad, real *total, real *buffer, const Lbsgd *now, double lr) {
  const real *g = grad + m.offset;
  real *sum = total + m.offset, *b = buffer + m.offset, *w = weights(m, c);
  const real step = (real)(lr * m.lr), wd = (real)(now->decay * m.decay), mu = (real)now->momentum;
  const real mean = (real)now->scale, most = (real)now->limit, rescale = (real)now->rescale;
  FOR_EACH_IN(i, c, g, sum, w, b) {
    const real next = mu * b[i] - step * direction(sum[i] + mean * g[i], w[i], rescale, most, wd);
    b[i] = next;
    w[i] += next;
    sum[i] = 0;
  };
  round_home(m, c);
}

// [lr has the multiplier of a warm-up in it]
KERNEL(lbsgd)(Table table, const real *grad, real *total, real *buffer, const Lbsgd *now, Unless refused) {
  if (holds(refused)) return;
  FOR_EACH_CHUNK(c, table) apply(member(table, c), c, grad, total, buffer, now, now->lr);
}

// The same with lr <- lr sqrt(|w|^2 / (|s / batches|^2 + decay |w|^2 + 1e-18)), the factor held in [0.01, 100].
KERNEL(lbsgd_lars)(Table table, const real *grad, real *total, real *buffer, const double *squares, const Lbsgd *now,
                   Unless refused) {
  if (holds(refused)) return;
  FOR_EACH_CHUNK(c, table) {
    const Member m = member(table, c);
    const double w2 = squares[2 * c.row], s2 = squares[2 * c.row + 1] / (now->batches * now->batches);
    const double factor = held(root(w2 / (s2 + now->decay * m.decay * w2 + 1e-18)), 0.01, 100);
    apply(m, c, grad, total, buffer, now, now->lr * factor);
  }
}
