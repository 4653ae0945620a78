// What Deep Gradient Compression (Lin et al., 2018, section 3) does beside selection.
#include "momentum.h"

// u <- the momentum of g;  g <- by what v grows     [where entries are selected, a host does this meanwhile: select.cu]
template <class Kind>
INLINE void correct(const Table &table, real *x, real *velocity, real mu) {
  FOR_EACH_CHUNK(c, table) {
    real *const g = x + table.rows[c.row].offset, *const u = velocity + table.rows[c.row].offset;
    FOR_EACH_IN(i, c, g, u) {
      const real now = g[i], next = Kind::next(u[i], now, mu);
      u[i] = next;
      g[i] = Kind::growth(next, now);
    };
  }
}
KERNEL(correct_momentum)(Table table, real *x, real *velocity, double momentum, long long nesterov, Unless refused) {
  if (holds(refused)) return;
  if (nesterov) correct<Nesterov>(table, x, velocity, (real)momentum);
  else correct<Vanilla>(table, x, velocity, (real)momentum);
}

// x <- v + x;  v <- 0     [members that go to the wire whole]
KERNEL(take_whole)(Table table, real *x, real *residual, Unless refused) {
  if (holds(refused)) return;
  FOR_EACH_CHUNK(c, table) {
    real *const to = x + table.rows[c.row].offset, *const v = residual + table.rows[c.row].offset;
    FOR_EACH_IN(i, c, to, v) {
      to[i] = v[i] + to[i];
      v[i] = 0;
    };
  }
}

// The values of a chunk of parameters, which lie at home or, if those are of 16 bits, in `room`.
INLINE const real *values(const Member &m, const Chunk &c, real *room) {
  const half_t *half = (const half_t *)m.data;
  const bfloat16_t *upper = (const bfloat16_t *)m.data;
  real *const w = room - c.begin;
  if (m.format == HALF) {
    FOR_EACH_IN(i, c, half, w) { w[i] = value_of_half(half[i]); };
  } else if (m.format == BFLOAT16) {
    FOR_EACH_IN(i, c, upper, w) { w[i] = value_of_bfloat16(upper[i]); };
  }
  return m.format == WIDE ? (const real *)m.data : w;
}

// u <- the momentum of the weight decay, which is the same on every rank;  growth <- what it adds
template <class Kind>
INLINE void decay(const Table &table, real *velocity, real *growth, real mu, double rate, real *room) {
  FOR_EACH_CHUNK(c, table) {
    const Member m = member(table, c);
    const real wd = (real)(rate * m.decay);
    const real *const w = values(m, c, room);
    real *const u = velocity + m.offset, *const more = growth + m.offset;
    FOR_EACH_IN(i, c, w, u, more) {
      const real now = wd * w[i], next = Kind::next(u[i], now, mu);
      u[i] = next;
      more[i] = Kind::growth(next, now);
    };
  }
}
KERNEL(decay_momentum)(Table table, real *velocity, real *growth, double momentum, long long nesterov, double rate,
                       Unless refused) {
  SCRATCH real room[CHUNK];  // [one for both: a block has no more]
  if (holds(refused)) return;
  if (nesterov) decay<Nesterov>(table, velocity, growth, (real)momentum, rate, room);
  else decay<Vanilla>(table, velocity, growth, (real)momentum, rate, room);
}

// g <- g + rate w
KERNEL(add_decay)(Table table, real *x, double rate) {
  FOR_EACH_CHUNK(c, table) {
    SCRATCH real room[CHUNK];
    const Member m = member(table, c);
    const real wd = (real)(rate * m.decay);
    const real *const w = values(m, c, room);
    real *const g = x + m.offset;
    FOR_EACH_IN(i, c, w, g) { g[i] += wd * w[i]; };
  }
}

// Every member of x is held to an L2 norm of `bound`.
KERNEL(clip_norms)(Table table, real *x, const double *squares, double bound) {
  FOR_EACH_CHUNK(c, table) {
    const double share = bound / (root(squares[c.row]) + 1e-6);
    const real factor = share < 1 ? (real)share : 1;
    real *const g = x + table.rows[c.row].offset;
    FOR_EACH_IN(i, c, g) { g[i] *= factor; };
  }
}

// x <- x + factor more
KERNEL(add_scaled)(long long n, real *x, const real *more, double factor) {
  const real times = (real)factor;
  FOR_EACH(i, n, x, more) { x[i] += times * more[i]; };
}

// velocity <- 0 where entries were sent     [momentum factor masking, section 3.3]
KERNEL(mask)(long long n, real *velocity, long long k, const int *index) {
  FOR_EACH(i, k, index) {
    if (index[i] >= 0) velocity[index[i]] = 0;
  };
}
