// The floors that kernels are measured against: the memory traffic, and next to no work.  Compiled for this very CPU.
extern "C" float read_pass(long long n, const float *x) {
  float sum[64] = {};
  for (long long i = 0; i + 64 <= n; i += 64)
    for (int j = 0; j < 64; ++j) sum[j] += x[i + j];
  for (int j = 1; j < 64; ++j) sum[0] += sum[j];
  return sum[0];
}
