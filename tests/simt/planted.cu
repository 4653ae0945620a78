// Kernels with known answers, and kernels with known mistakes.
#include "portable.h"

// y <- x reversed within a block, by way of shared memory
KERNEL(reverse)(long long n, const real *x, real *y, long long wait) {
  __shared__ real s[256];
  const int first = blockIdx.x * blockDim.x, last = blockDim.x - 1;
  s[threadIdx.x] = x[first + threadIdx.x];
  if (wait) __syncthreads();
  y[first + threadIdx.x] = s[last - threadIdx.x];
}

KERNEL(read_what_nobody_wrote)(long long n, real *y) {
  __shared__ real s[32];
  y[threadIdx.x] = s[threadIdx.x];
}

// What every warp operation and barrier answers to one warp, in 16 rows.
KERNEL(ask)(long long n, long long *y) {
  const int lane = threadIdx.x;
  y[lane] = __shfl_sync(~0u, 100 + lane, 5);
  y[32 + lane] = __shfl_xor_sync(~0u, 1ll << 40 | lane, 3);
  y[64 + lane] = __shfl_up_sync(~0u, lane, 2);
  y[96 + lane] = __shfl_down_sync(~0u, lane, 2);
  y[128 + lane] = __ballot_sync(~0u, lane % 3 == 0);
  y[160 + lane] = __any_sync(~0u, lane == 7) + 2 * __all_sync(~0u, lane < 32);
  y[192 + lane] = __match_any_sync(~0u, lane / 4);
  y[224 + lane] = __syncthreads_count(lane % 2);
  y[256 + lane] = __syncthreads_or(lane == 3) + 2 * __syncthreads_and(lane < 31);
  y[288 + lane] = (long long)(__shfl_xor_sync(~0u, 0.5 * lane, 1) * 2);
  if (lane < 8) y[320 + lane] = __shfl_sync(0xff, lane, 7);
  __syncwarp();
}

KERNEL(lane_missing)(long long n, real *y) {
  if (threadIdx.x < 16) y[threadIdx.x] = __shfl_xor_sync(~0u, y[threadIdx.x], 1);
  __syncthreads();
}
KERNEL(lane_gone)(long long n, real *y) {
  if (threadIdx.x < 16) return;
  y[threadIdx.x] = __shfl_xor_sync(~0u, y[threadIdx.x], 1);
}
KERNEL(lane_not_named)(long long n, real *y) { y[threadIdx.x] = __shfl_sync(1u, y[threadIdx.x], 0); }
KERNEL(two_operations)(long long n, real *y) {
  if (threadIdx.x < 16) __ballot_sync(~0u, 1);
  else __syncwarp();
}
KERNEL(barrier_of_some)(long long n, real *y) {
  if (threadIdx.x < 40) __syncthreads();
}
KERNEL(two_barriers)(long long n, real *y) {
  if (threadIdx.x < 40) __syncthreads();
  else __syncthreads();
}
KERNEL(waits_for_ever)(long long n, real *y) {
  for (volatile real *flag = y; flag[0] != 12345;) __nanosleep(20);
}

// Every block waits for the one before it, which runs already, because tickets are given in order.
KERNEL(chain)(long long n, long long *y) {
  __shared__ long long ticket;
  if (!threadIdx.x) ticket = (long long)atomicAdd((unsigned long long *)y, 1ull);
  __syncthreads();
  volatile long long *told = y + 1;
  if (!threadIdx.x) {
    while (ticket && !told[ticket - 1]) __nanosleep(20);
    told[ticket] = (ticket ? told[ticket - 1] : 0) + ticket + 1;
  }
}

// One element too many.
KERNEL(overrun)(long long n, real *y) { FOR_EACH(i, n + 1, y) { y[i] = 1; }; }
