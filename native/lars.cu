// LARS (You, Gitman and Ginsburg, 2017), as in MXNet: the learning rate stands inside the momentum buffer.
#include "update.h"

struct Lars : Update {
  double momentum, eta, epsilon;
};

// partial[2 c] <- sum of w^2, partial[2 c + 1] <- sum of g^2, of chunk c
KERNEL(lars_squares)(Table table, const real *grad, double *partial) {
  FOR_EACH_CHUNK_BY_LANES(c, table) {
    const Member m = member(table, c);
    const real *g = grad + m.offset, *w = wide(m);
    Sums ww = {}, gg = {};
    in_lanes(c, [&](long long i, int j) {
      ww[j] += (double)w[i] * (double)w[i];
      gg[j] += (double)g[i] * (double)g[i];
    });
    const double w2 = folded(ww), g2 = folded(gg);
    if (leads_lanes()) partial[2 * c.index] = w2, partial[2 * c.index + 1] = g2;
  }
}

// b <- momentum b - lr q d;  w <- w + b          [q = eta |w| / (|g| + decay |w| + epsilon), 1 if a norm is 0]
// [g is rescaled and not yet clipped in |g|]
KERNEL(lars)(Table table, const real *grad, real *buffer, const double *squares, const Lars *now, Unless refused) {
  if (holds(refused)) return;
  FOR_EACH_CHUNK(c, table) {
    const Member m = member(table, c);
    const real *g = grad + m.offset;
    real *w = weights(m, c), *b = buffer + m.offset;
    const double norm = root(squares[2 * c.row]), slope = root(squares[2 * c.row + 1]) * magnitude_of(now->scale);
    const double decay = now->decay * m.decay;
    const bool adapts = m.adapts != 0 && norm > 0 && slope > 0;
    const double q = adapts ? now->eta * norm / (slope + decay * norm + now->epsilon) : 1;
    const real step = (real)(now->lr * m.lr * q), wd = (real)decay;
    const real mean = (real)now->scale, most = (real)now->limit, mu = (real)now->momentum;
    FOR_EACH_IN(i, c, g, w, b) {
      const real next = mu * b[i] - step * direction(g[i], w[i], mean, most, wd);
      b[i] = next;
      w[i] += next;
    };
    round_home(m, c);
  }
}
