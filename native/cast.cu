// Flat arrays as numbers of 16 bits, and the sums of those over ranks.
#include "half.h"

// What each_half does with a number and its bits.
INLINE auto rounding() {
  return [](const auto &format, const auto &x, auto &bits) { bits = format.round(x); };
}
INLINE auto widening() {
  return [](const auto &format, auto &x, const auto &bits) { x = format.widen(bits); };
}
INLINE auto adding() {
  return [](const auto &format, auto &x, const auto &bits) { x += format.widen(bits); };
}

// body(format, x[i], bits[i], more[i] ...) for n elements, as the other each_half for those of a chunk.
template <class Format, class X, class Bits, class Body, class... More>
INLINE void each_half(long long n, X *x, Bits *bits, const Body &body, const More *...more) {
  FOR_EACH_PIECE(c, n) each_half<Format>(c, x, bits, body, more...);
}

// bits <- scale (x + add), clamped to +-most first; what is not finite stays so.  [scale is a power of two, so that only
// rounding loses anything]  With `keeps_rest`, x becomes what bits cannot carry: the rounding error, and what lies
// beyond +-most; of what is not finite, nothing.
template <class Format, bool keeps_rest, class X, class... Add>
INLINE void encode(long long n, X *x, typename Format::Bits *bits, double scale, double most, SkipIf skip,
                   bool addends = false, const Add *...add) {
  const real factor = (real)scale, back = (real)(1 / scale), limit = (real)most;
  if (skips(skip)) {
    FOR_EACH(i, n, bits) { bits[i] = 0; };
    return;
  }
  const auto code = [=](const auto &format, auto &number, auto &code, const auto &...increment) {
    const auto now = (number + ... + increment);
    code = format.round(clamp_finite(now, limit) * factor);
    if constexpr (keeps_rest) number = if_finite(now, now - format.widen(code) * back);
  };
  if (addends) each_half<Format>(n, x, bits, code, add...);  // [here, so that either loop becomes vectors]
  else each_half<Format>(n, x, bits, code);
}
// The gradient `add`, if there are `addends`, is added to the memory x in the pass that codes it.
KERNEL(encode_half)(long long n, real *x, half_t *bits, long long addends, const real *add, double scale, double most,
                    SkipIf skip) {
  encode<Float16, true>(n, x, bits, scale, most, skip, addends, addends ? add : x);
}
KERNEL(encode_bfloat16)(long long n, real *x, bfloat16_t *bits, long long addends, const real *add, double scale,
                        double most, SkipIf skip) {
  encode<Bfloat16, true>(n, x, bits, scale, most, skip, addends, addends ? add : x);
}
KERNEL(copy_half)(long long n, const real *x, half_t *bits, double scale, double most, SkipIf skip) {
  encode<Float16, false>(n, x, bits, scale, most, skip);
}
KERNEL(copy_bfloat16)(long long n, const real *x, bfloat16_t *bits, double scale, double most, SkipIf skip) {
  encode<Bfloat16, false>(n, x, bits, scale, most, skip);
}

// x <- bits / scale
template <class Format>
INLINE void decode(long long n, const typename Format::Bits *bits, real *x, double scale) {
  const real back = (real)(1 / scale);
  each_half<Format>(n, x, bits, [=](const auto &format, auto &number, const auto &code) {
    number = format.widen(code) * back;
  });
}
KERNEL(decode_half)(long long n, const half_t *bits, real *x, double scale) { decode<Float16>(n, bits, x, scale); }
KERNEL(decode_bfloat16)(long long n, const bfloat16_t *bits, real *x, double scale) {
  decode<Bfloat16>(n, bits, x, scale);
}

// bits <- x
KERNEL(to_half)(long long n, const real *x, half_t *bits) { each_half<Float16>(n, x, bits, rounding()); }
KERNEL(to_bfloat16)(long long n, const real *x, bfloat16_t *bits) { each_half<Bfloat16>(n, x, bits, rounding()); }

// x <- bits
KERNEL(from_half)(long long n, const half_t *bits, real *x) { each_half<Float16>(n, x, bits, widening()); }
KERNEL(from_bfloat16)(long long n, const bfloat16_t *bits, real *x) { each_half<Bfloat16>(n, x, bits, widening()); }

// x <- x + bits
KERNEL(add_half)(long long n, const half_t *bits, real *x) { each_half<Float16>(n, x, bits, adding()); }
KERNEL(add_bfloat16)(long long n, const bfloat16_t *bits, real *x) { each_half<Bfloat16>(n, x, bits, adding()); }

// total <- (part[0] + part[1]) + ... of a chunk that starts at `at` in every part, in singles, whatever `real` is: the
// same bits wherever ranks are added up
template <class Format>
INLINE void add_up(const Chunk &c, long long at, long long parts, const typename Format::Bits *const *part,
                   single_t *total) {
  for (long long k = 0; k < parts; ++k) {
    const auto *const next = assume_global(part[k]) + at;
    if (k == 0) each_half<Format>(c, total, next, widening());
    else each_half<Format>(c, total, next, adding());
  }
}

// sum <- (part[0] + part[1]) + ..., added as singles and rounded once; sum may be one of them.
template <class Format, class Bits = typename Format::Bits>
INLINE void sum_parts(long long n, Bits *sum, long long parts, const Bits *const *part) {
  FOR_EACH_PIECE(c, n) {
    SHARED single_t sums[CHUNK];
    single_t *const total = sums - c.begin;
    add_up<Format>(c, 0, parts, part, total);
    each_half<Format>(c, total, sum, rounding());
  }
}
KERNEL(sum_half)(long long n, half_t *sum, long long parts, const half_t *const *part) {
  sum_parts<Float16>(n, sum, parts, part);
}
KERNEL(sum_bfloat16)(long long n, bfloat16_t *sum, long long parts, const bfloat16_t *const *part) {
  sum_parts<Bfloat16>(n, sum, parts, part);
}

// sum <- ((part[0] + part[1]) + ...) / scale, as above: flat arrays of the bucket.
template <class Format, class Bits = typename Format::Bits>
INLINE void sum_tables(const Table &table, long long parts, const Bits *const *part, real *sum, double scale) {
  const real back = (real)(1 / scale);
  FOR_EACH_CHUNK(c, table) {
    SHARED single_t sums[CHUNK];
    SHARED Bits rounded[CHUNK];
    const long long at = table.members[c.member].offset;
    single_t *const total = sums - c.begin;
    real *const to = sum + at;
    Bits *const bits = rounded - c.begin;
    add_up<Format>(c, at, parts, part, total);
    each_half<Format>(c, total, bits, rounding());
    each_half<Format>(c, to, bits, [=](const auto &format, auto &x, const auto &h) { x = format.widen(h) * back; });
  }
}
KERNEL(add_half_parts)(Table table, long long parts, const half_t *const *part, real *sum, double scale) {
  sum_tables<Float16>(table, parts, part, sum, scale);
}
KERNEL(add_bfloat16_parts)(Table table, long long parts, const bfloat16_t *const *part, real *sum, double scale) {
  sum_tables<Bfloat16>(table, parts, part, sum, scale);
}
