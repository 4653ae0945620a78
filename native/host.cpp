// What only the host library has: the sources it was built from, the SIMD level that it runs at here, and a reader of
// numpy's arrays.
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

// How numpy lays out an array behind the header that all Python objects have (PyArrayObject_fields in ndarraytypes.h).
// It is part of numpy's binary interface: every extension module has it compiled in.
struct Array {
  void *data;
  int dimensions;
  const long long *shape, *strides;
  const void *base, *dtype;
  int flags;
};
static const int CONTIGUOUS_AND_ALIGNED = 0x1 | 0x100;

// address[i] <- where array i keeps its elements.  Returns how many, from the first on, are contiguous arrays of exactly
// the type, dtype and shape that is expected of them; `shapes` has all shapes in one row.  An object's last header word
// is its type, so that nothing but an array is taken for one.
extern "C" long long locate(long long count, const char *const *objects, long long header, const void *type,
                            const void *const *dtypes, const long long *dimensions, const long long *shapes,
                            void **address) {
  for (long long i = 0; i < count; shapes += dimensions[i++]) {
    const Array *a = (const Array *)(objects[i] + header);
    if (((const void *const *)a)[-1] != type || a->dtype != dtypes[i] || a->dimensions != dimensions[i]) return i;
    if ((a->flags & CONTIGUOUS_AND_ALIGNED) != CONTIGUOUS_AND_ALIGNED) return i;
    for (int d = 0; d < a->dimensions; ++d)
      if (a->shape[d] != shapes[d]) return i;
    address[i] = a->data;
  }
  return count;
}
