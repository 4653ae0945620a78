// Large-batch SGD, as in MXNet: gradients of several batches are added up, and the learning rate, which stands inside
// the momentum buffer, warms up to what the large batch allows.
#include "sums.h"
#include "update.h"

// `scale` takes the mean over ranks, `rescale` that over the batches, and the user's rescaling, behind it.
struct Lbsgd : Update {
  double rescale, momentum, batches;
};

// sum <- sum + scale g
KERNEL(lbsgd_gather)(Table table, const real *grad, real *total, const Lbsgd *hyper, SkipIf skip) {
  if (skips(skip)) return;
  FOR_EACH_CHUNK(c, table) {
    const Member m = member(table, c);
    const real *g = grad + m.offset;
    real *sum = total + m.offset;
    const real scale = (real)hyper->scale;
    FOR_EACH_IN(i, c, g, sum) { sum[i] += scale * g[i]; };
  }
}

// partial[2 c] <- sum of w^2, partial[2 c + 1] <- sum of s^2, of chunk c          [s = sum + scale g]
KERNEL(lbsgd_squares)(Table table, const real *grad, const real *total, double *partial, const Lbsgd *hyper) {
  FOR_EACH_CHUNK(c, table) {
    const Member m = member(table, c);
    const real *g = grad + m.offset, *sum = total + m.offset, *w = wide(m);
    const real scale = (real)hyper->scale;
    SUM_CHUNK(i, c, partial, g, sum, w) { return Squares{w[i], sum[i] + scale * g[i]}; };
  }
}

// d = clip(rescale s) + decay w;  b <- momentum b - lr d;  w <- w + b;  sum <- 0
INLINE void apply(const Member &m, const Chunk &c, real *w, const real *grad, real *total, real *buffer,
                  const Lbsgd *hyper, double lr) {
  const real *g = grad + m.offset;
  real *sum = total + m.offset, *b = buffer + m.offset;
  const real step = (real)(lr * m.lr), wd = (real)(hyper->decay * m.decay), mu = (real)hyper->momentum;
  const real scale = (real)hyper->scale, limit = (real)hyper->limit, rescale = (real)hyper->rescale;
  FOR_EACH_IN(i, c, g, sum, w, b) {
    const real d = clamp(rescale * (sum[i] + scale * g[i]), limit) + wd * w[i], next = mu * b[i] - step * d;
    b[i] = next;
    w[i] += next;
    sum[i] = 0;
  };
}

// [lr has the multiplier of a warm-up in it]
KERNEL(lbsgd)(Table table, const real *grad, real *total, real *buffer, const Lbsgd *hyper, SkipIf skip) {
  update_weights(table, skip, [=](const Member &m, const Chunk &c, real *w) {
    apply(m, c, w, grad, total, buffer, hyper, hyper->lr);
  });
}

// The same with lr <- lr sqrt(|w|^2 / (|s / batches|^2 + decay |w|^2 + 1e-18)), the factor held in [0.01, 100].
KERNEL(lbsgd_lars)(Table table, const real *grad, real *total, real *buffer, const double *squares, const Lbsgd *hyper,
                   SkipIf skip) {
  update_weights(table, skip, [=](const Member &m, const Chunk &c, real *w) {
    const double w2 = squares[2 * c.member], s2 = squares[2 * c.member + 1] / (hyper->batches * hyper->batches);
    const double factor = clamp(sqrt(w2 / (s2 + hyper->decay * m.decay * w2 + 1e-18)), 0.01, 100);
    apply(m, c, w, grad, total, buffer, hyper, hyper->lr * factor);
  });
}
