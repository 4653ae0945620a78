// LARS (You, Gitman and Ginsburg, 2017), as in MXNet: the learning rate stands inside the momentum buffer.
#include "sums.h"
#include "update.h"

struct Lars : Update {
  double momentum, eta, epsilon;
};

// partial[2 c] <- sum of w^2, partial[2 c + 1] <- sum of g^2, of chunk c
KERNEL(lars_squares)(Table table, const real *grad, double *partial) {
  FOR_EACH_CHUNK(c, table) {
    const Member m = member(table, c);
    const real *g = grad + m.offset, *w = wide(m);
    SUM_CHUNK(i, c, partial, g, w) { return Squares{w[i], g[i]}; };
  }
}

// b <- momentum b - lr q d;  w <- w + b          [q = eta |w| / (|g| + decay |w| + epsilon), 1 if a norm is 0]
// [g is rescaled and not yet clipped in |g|]
KERNEL(lars)(Table table, const real *grad, real *buffer, const double *squares, const Lars *hyper, SkipIf skip) {
  update_weights(table, skip, [=](const Member &m, const Chunk &c, real *w) {
    const real *g = grad + m.offset;
    real *b = buffer + m.offset;
    const double norm = sqrt(squares[2 * c.member]);
    const double slope = sqrt(squares[2 * c.member + 1]) * magnitude_of(hyper->scale);
    const double decay = hyper->decay * m.decay;
    const bool adapts = m.adapts != 0 && norm > 0 && slope > 0;
    const double q = adapts ? hyper->eta * norm / (slope + decay * norm + hyper->epsilon) : 1;
    const real step = (real)(hyper->lr * m.lr * q), mu = (real)hyper->momentum;
    const auto direction = direction_of(hyper, m);
    FOR_EACH_IN(i, c, g, w, b) {
      const real next = mu * b[i] - step * direction(g[i], w[i]);
      b[i] = next;
      w[i] += next;
    };
  });
}
