// What only the host library has: the sources it was built from, and the SIMD level that it runs at here.
extern "C" const char *source_hash() { return SOURCE_HASH; }

extern "C" const char *simd_level() {
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__)
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512vl") ? "x86-64-v4 (AVX-512)"
         : __builtin_cpu_supports("avx2")   ? "x86-64-v3 (AVX2)"
                                            : "x86-64 (SSE2)";
#else
  return "the compiler's default";
#endif
}
