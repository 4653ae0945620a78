// The floors that kernels are measured against: the memory traffic, and next to no work.  Compiled for this very CPU.
#include <cmath>
extern "C" float read_pass(long long n, const float *x) {
  float sum[64] = {};
  for (long long i = 0; i + 64 <= n; i += 64)
    for (int j = 0; j < 64; ++j) sum[j] += x[i + j];
  for (int j = 1; j < 64; ++j) sum[0] += sum[j];
  return sum[0];
}

#define UPDATE(name) extern "C" void name(long long n, float *__restrict p, const float *__restrict g, float *__restrict m, \
                                          float *__restrict v, float scale, float lr, float decay)

UPDATE(sgd) {  // with momentum
  for (long long i = 0; i < n; ++i) m[i] = 0.9f * m[i] + (scale * g[i] + decay * p[i]), p[i] -= lr * m[i];
}

UPDATE(rmsprop) {
  for (long long i = 0; i < n; ++i) {
    const float d = scale * g[i] + decay * p[i];
    m[i] = 0.9f * m[i] + 0.1f * (d * d);
    p[i] -= lr * d / sqrtf(m[i] + 1e-8f);
  }
}

UPDATE(adagrad) {
  for (long long i = 0; i < n; ++i) {
    const float d = scale * g[i] + decay * p[i];
    m[i] += d * d;
    p[i] -= lr * d / sqrtf(m[i] + 1e-8f);
  }
}

UPDATE(adam) {
  for (long long i = 0; i < n; ++i) {
    const float d = scale * g[i] + decay * p[i];
    m[i] = 0.9f * m[i] + 0.1f * d;
    v[i] = 0.999f * v[i] + 0.001f * (d * d);
    p[i] -= lr * m[i] / (sqrtf(v[i]) + 1e-8f);
  }
}
