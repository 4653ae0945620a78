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

UPDATE(signum) {
  for (long long i = 0; i < n; ++i) {
    m[i] = 0.9f * m[i] + scale * g[i];
    p[i] -= lr * ((m[i] > 0) - (m[i] < 0) + decay * p[i]);
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

UPDATE(adamw) {
  for (long long i = 0; i < n; ++i) {
    const float d = scale * g[i];
    m[i] = 0.9f * m[i] + 0.1f * d;
    v[i] = 0.999f * v[i] + 0.001f * (d * d);
    p[i] -= lr * (m[i] / (sqrtf(v[i]) + 1e-6f) + decay * p[i]);
  }
}

UPDATE(lbsgd) {  // v is the sum of a window, of one call
  for (long long i = 0; i < n; ++i) {
    m[i] = 0.9f * m[i] - lr * ((v[i] + scale * g[i]) + decay * p[i]);
    v[i] = 0;
    p[i] += m[i];
  }
}

// What needs norms goes over memory more than once; `body` adds to LANES of a sum.
#define LANES 64
#define IN_LANES(body)                                                         \
  for (long long i = 0; i + LANES <= n; i += LANES)                            \
    for (int j = 0; j < LANES; ++j) { const long long k = i + j; body; }       \
  for (long long k = n / LANES * LANES; k < n; ++k) { const int j = (int)(k % LANES); body; }
static float root_of(const float *lanes) {
  double sum = 0;
  for (int j = 0; j < LANES; ++j) sum += lanes[j];
  return (float)sqrt(sum);
}

UPDATE(lars) {
  float pp[LANES] = {}, gg[LANES] = {};
  IN_LANES(pp[j] += p[k] * p[k]; gg[j] += g[k] * g[k])
  const float length = root_of(pp), q = 1e-3f * length / (scale * root_of(gg) + decay * length + 1e-8f);
  for (long long i = 0; i < n; ++i) m[i] = 0.9f * m[i] - lr * q * (scale * g[i] + decay * p[i]), p[i] += m[i];
}

UPDATE(lamb) {
  float pp[LANES] = {}, uu[LANES] = {};
  IN_LANES(const float d = scale * g[k]; m[k] = 0.9f * m[k] + 0.1f * d; v[k] = 0.999f * v[k] + 0.001f * (d * d);
           const float u = m[k] / (sqrtf(v[k]) + 1e-6f) + decay * p[k]; pp[j] += p[k] * p[k]; uu[j] += u * u)
  const float step = lr * root_of(pp) / root_of(uu);
  for (long long i = 0; i < n; ++i) p[i] -= step * (m[i] / (sqrtf(v[i]) + 1e-6f) + decay * p[i]);
}

UPDATE(lans) {
  float gg[LANES] = {}, pp[LANES] = {}, mm[LANES] = {}, hh[LANES] = {};
  IN_LANES(gg[j] += g[k] * g[k])
  const float unit = 1 / root_of(gg);
  IN_LANES(const float h = unit * g[k]; m[k] = 0.9f * m[k] + 0.1f * h; v[k] = 0.999f * v[k] + 0.001f * (h * h);
           const float rate = 1 / (sqrtf(v[k]) + 1e-6f); const float um = m[k] * rate + decay * p[k];
           const float ug = h * rate + decay * p[k]; pp[j] += p[k] * p[k]; mm[j] += um * um; hh[j] += ug * ug)
  const float past = lr * 0.9f * root_of(pp) / root_of(mm), present = lr * 0.1f * root_of(pp) / root_of(hh);
  for (long long i = 0; i < n; ++i) {
    const float h = unit * g[i], rate = 1 / (sqrtf(v[i]) + 1e-6f);
    p[i] -= past * (m[i] * rate + decay * p[i]) + present * (h * rate + decay * p[i]);
  }
}
