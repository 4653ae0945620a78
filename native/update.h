// What every update rule starts from.
#pragma once
#include "portable.h"

// The numbers of one update; a rule's own follow them.  They lie in memory, where the host writes them before the step,
// so that a captured step can be done again with others.
struct Update {
  double scale, limit, lr, decay;
};

// d = clip(scale g) + decay w          [coupled weight decay, after clipping; limit = infinity clips nothing]
INLINE real direction(real g, real w, real scale, real limit, real decay) {
  return clamp(scale * g, limit) + decay * w;
}

INLINE double magnitude_of(double x) { return x < 0 ? -x : x; }

// x held in [lower, upper]; a bound that is not above 0 is none.
INLINE double held(double x, double lower, double upper) {
  const double raised = lower > 0 && x < lower ? lower : x;
  return upper > 0 && raised > upper ? upper : raised;
}
