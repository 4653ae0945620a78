// What all update rules share.
#pragma once
#include "portable.h"

// Hyper-parameters of one update; a rule's own follow them.  They lie in memory, where the host writes them before the
// step, so that a captured step can be replayed with others.
struct Update {
  double scale, limit, lr, decay;
};

// d = clip(scale g) + decay w          [coupled weight decay, after clipping; limit = infinity clips nothing]
INLINE auto direction_of(const Update *hyper, const Member &m) {
  const real scale = (real)hyper->scale, limit = (real)hyper->limit, decay = (real)(hyper->decay * m.decay);
  return [=](real g, real w) { return clamp(scale * g, limit) + decay * w; };
}

// body(m, c, w) for every chunk of parameters, whose reals w go back to where the member m lives.
template <class Body>
INLINE void update_weights(const Table &table, SkipIf skip, const Body &body) {
  if (skips(skip)) return;
  FOR_EACH_CHUNK(c, table) {
    const Member m = member(table, c);
    body(m, c, weights(m, c));
    round_to_storage(m, c);
  }
}

INLINE double magnitude_of(double x) { return x < 0 ? -x : x; }

// x, or the bound of [lower, upper] that it is beyond; a bound that is not above 0 is none.
INLINE double clamp(double x, double lower, double upper) {
  const double raised = lower > 0 && x < lower ? lower : x;
  return upper > 0 && raised > upper ? upper : raised;
}

// |w| / |u|, to which layer-wise rules scale an update u; 1 if a norm is 0.
INLINE double trust_ratio(const Member &m, double norm, double length) {
  return m.adapts != 0 && norm > 0 && length > 0 ? norm / length : 1;
}
