// Deep Gradient Compression (Lin et al., 2018, section 3), but for its selection, which is top-K.
#include "momentum.h"

// u <- the momentum of g;  g <- the increment of v     [for top-K a host does it on the way: topk_host.cu]
template <class Kind>
INLINE void momentum_correction(const Table &table, real *x, real *velocity, real mu) {
  FOR_EACH_CHUNK(c, table) {
    real *const g = x + table.members[c.member].offset, *const u = velocity + table.members[c.member].offset;
    FOR_EACH_IN(i, c, g, u) { g[i] = advance<Kind>(u[i], g[i], mu); };
  }
}
KERNEL(correct_momentum)(Table table, real *x, real *velocity, double momentum, long long nesterov, SkipIf skip) {
  if (skips(skip)) return;
  if (nesterov) momentum_correction<Nesterov>(table, x, velocity, (real)momentum);
  else momentum_correction<Vanilla>(table, x, velocity, (real)momentum);
}

// x <- v + x;  v <- 0     [members that are sent whole]
KERNEL(encode_whole)(Table table, real *x, real *residual, SkipIf skip) {
  if (skips(skip)) return;
  FOR_EACH_CHUNK(c, table) {
    real *const to = x + table.members[c.member].offset, *const v = residual + table.members[c.member].offset;
    FOR_EACH_IN(i, c, to, v) {
      to[i] = v[i] + to[i];
      v[i] = 0;
    };
  }
}

// The values of a chunk of parameters: where they live or, if they have 16 bits, in `room`.
INLINE const real *values(const Member &m, const Chunk &c, real *room) {
  real *const w = room - c.begin;
  if_narrow(m, [&](auto format, const auto *stored) {
    FOR_EACH_IN(i, c, stored, w) { w[i] = format.widen(stored[i]); };
  });
  return m.format == WIDE ? (const real *)m.data : w;
}

// u <- the momentum of the weight decay, which is the same on every rank;  increment <- what it adds to v
template <class Kind>
INLINE void decay(const Table &table, real *velocity, real *increment, real mu, double rate, real *room) {
  FOR_EACH_CHUNK(c, table) {
    const Member m = member(table, c);
    const real wd = (real)(rate * m.decay);
    const real *const w = values(m, c, room);
    real *const u = velocity + m.offset, *const dv = increment + m.offset;
    FOR_EACH_IN(i, c, w, u, dv) { dv[i] = advance<Kind>(u[i], wd * w[i], mu); };
  }
}
KERNEL(decay_momentum)(Table table, real *velocity, real *increment, double momentum, long long nesterov, double rate,
                       SkipIf skip) {
  SHARED real room[CHUNK];  // [one for both: a block has no more]
  if (skips(skip)) return;
  if (nesterov) decay<Nesterov>(table, velocity, increment, (real)momentum, rate, room);
  else decay<Vanilla>(table, velocity, increment, (real)momentum, rate, room);
}

// g <- g + rate w
KERNEL(add_decay)(Table table, real *x, double rate) {
  FOR_EACH_CHUNK(c, table) {
    SHARED real room[CHUNK];
    const Member m = member(table, c);
    const real wd = (real)(rate * m.decay);
    const real *const w = values(m, c, room);
    real *const g = x + m.offset;
    FOR_EACH_IN(i, c, w, g) { g[i] += wd * w[i]; };
  }
}

// Every member of x is scaled down to an L2 norm of `bound`, if it is longer.
KERNEL(clip_norms)(Table table, real *x, const double *squares, double bound) {
  FOR_EACH_CHUNK(c, table) {
    const double share = bound / (sqrt(squares[c.member]) + 1e-6);
    const real factor = share < 1 ? (real)share : 1;
    real *const g = x + table.members[c.member].offset;
    FOR_EACH_IN(i, c, g) { g[i] *= factor; };
  }
}

// x <- x + factor addend
KERNEL(add_scaled)(long long n, real *x, const real *addend, double factor) {
  const real times = (real)factor;
  FOR_EACH(i, n, x, addend) { x[i] += times * addend[i]; };
}

// velocity <- 0 where entries were sent     [momentum factor masking, section 3.3]
KERNEL(mask)(long long n, real *velocity, long long k, const int *index) {
  FOR_EACH(i, k, index) {
    if (index[i] >= 0) velocity[index[i]] = 0;
  };
}
