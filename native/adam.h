// What Adam, LAMB and LANS share: running averages of the gradients, and of their squares.
#pragma once
#include "update.h"

// [bias = 1 - b^t at update t = 1, 2, ...]
struct Adam : Update {
  double beta1, one_minus_beta1, bias1, beta2, one_minus_beta2, bias2, epsilon;
};

// The same for one parameter, as reals          [unbias = 1 / bias]
struct AdamReals {
  real scale, limit, decay, beta1, one_minus_beta1, unbias1, beta2, one_minus_beta2, unbias2, epsilon;
};
INLINE AdamReals reals_of(const Adam *hyper, const Member &m) {
  return {(real)hyper->scale, (real)hyper->limit, (real)(hyper->decay * m.decay),
          (real)hyper->beta1, (real)hyper->one_minus_beta1, (real)(1 / hyper->bias1),
          (real)hyper->beta2, (real)hyper->one_minus_beta2, (real)(1 / hyper->bias2), (real)hyper->epsilon};
}

struct Pair {
  real first, second;
};

// m <- b1 m + (1 - b1) d;  v <- b2 v + (1 - b2) d^2; returns both
INLINE Pair average(const AdamReals &r, real d, real &m, real &v) {
  const Pair next = {r.beta1 * m + r.one_minus_beta1 * d, r.beta2 * v + r.one_minus_beta2 * (d * d)};
  m = next.first;
  v = next.second;
  return next;
}
