// What every update rule starts from.
#pragma once
#include "portable.h"

// d = clip(scale g) + decay w          [coupled weight decay, after clipping; limit = infinity clips nothing]
INLINE real direction(real g, real w, real scale, real limit, real decay) {
  return clamp(scale * g, limit) + decay * w;
}
