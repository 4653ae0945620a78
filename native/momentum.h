// The velocities of Deep Gradient Compression (Lin et al., 2018, section 3.2): each rank's gradients with momentum.
#pragma once
#include "portable.h"

// The next u and the increment of v: as in the paper's equation 4, where that is u itself, and as Nesterov has it.
struct Vanilla {
  INLINE real next(real u, real g, real mu) { return mu * u + g; }
  INLINE real increment(real next, real g) { return next; }
};
struct Nesterov {
  INLINE real next(real u, real g, real mu) { return mu * (u + g); }
  INLINE real increment(real next, real g) { return next + g; }
};

// u <- the next u; returns the increment of v.
template <class Kind>
INLINE real advance(real &u, real g, real mu) {
  u = Kind::next(u, g, mu);
  return Kind::increment(u, g);
}
