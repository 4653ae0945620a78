// The velocities of Deep Gradient Compression (Lin et al., 2018, section 3.2): each rank's gradients with momentum.
#pragma once
#include "portable.h"

// The next u, and by what v grows: as in the paper's equation 4, where that is u itself, and Nesterov's.
struct Vanilla {
  INLINE real next(real u, real g, real mu) { return mu * u + g; }
  INLINE real growth(real next, real g) { return next; }
};
struct Nesterov {
  INLINE real next(real u, real g, real mu) { return mu * (u + g); }
  INLINE real growth(real next, real g) { return next + g; }
};
