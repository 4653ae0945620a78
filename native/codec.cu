// Elements as one bit or two, with error feedback (Seide et al., "1-bit stochastic gradient descent", 2014).  Codes
// stand in the order of the elements, the first one in the highest bits of its byte; an element's place is its index in
// the flat array, and members start on whole bytes.  The gradient `add` is added to the memory x in the pass that codes
// it; where there are no `addends`, add is x.
#include "marks.h"

// The codes of two bits.
#define UP 3
#define DOWN 2
#define NOT_FINITE 1

// x <- x + add; an entry that is then at least tau in magnitude sends tau, with its sign, and x keeps the rest.  What
// is not finite is sent as such, and x keeps nothing of it.  [integers, not branches: so the loop becomes vectors]
KERNEL(encode_two_bits)(long long n, real *x, const real *add, long long addends, long long bytes, byte_t *codes,
                        double threshold, SkipIf skip) {
  if (skips(skip)) return;
  const real tau = (real)threshold;
  FOR_EACH_PIECE(c, n) {
    SHARED Marks mark;
    byte_t *const marks = mark.one - c.begin;
    const long long words = (c.end - c.begin + 3) / 4;
    FOR_EACH_IN_BLOCK(i, c.end - c.begin, 4 * words) mark.one[i] = 0;
    FOR_EACH_IN(i, c, x, add, marks) {
      const real now = addends ? x[i] + add[i] : x[i];
      const bool finite = is_finite(now);
      const real seen = finite ? now : 0;
      const int up = seen >= tau, down = seen <= -tau;
      marks[i] = (byte_t)(up * UP + down * DOWN + !finite * NOT_FINITE);
      x[i] = seen - (real)(up - down) * tau;
    };
    block_sync();
    FOR_EACH_IN_BLOCK(b, 0, words) codes[c.begin / 4 + b] = pack_four(mark.four[b]);
    block_sync();
  }
}

// x <- the sum of what all ranks' codes stand for, added in rank order
KERNEL(decode_two_bits)(long long n, real *x, long long ranks, const byte_t *const *codes, double threshold) {
  const real tau = (real)threshold, nan = uint_as_float(0x7fc00000u);
  FOR_EACH_PIECE(c, n) {
    SHARED real total[CHUNK];
    SHARED Marks mark;
    real *const sums = total - c.begin;
    const byte_t *const marks = mark.one - c.begin;
    FOR_EACH_IN(i, c, sums) { sums[i] = 0; };
    for (long long r = 0; r < ranks; ++r) {
      const byte_t *const from = assume_global(codes[r]) + c.begin / 4;
      FOR_EACH_IN_BLOCK(b, 0, (c.end - c.begin + 3) / 4) mark.four[b] = unpack_four(from[b]);
      block_sync();
      FOR_EACH_IN(i, c, sums, marks) {
        const int direction = (marks[i] == UP) - (marks[i] == DOWN);
        const real size = marks[i] == NOT_FINITE ? nan : tau;
        sums[i] += (real)direction * size;
      };
      block_sync();
    }
    FOR_EACH_IN(i, c, sums, x) { x[i] = sums[i]; };
  }
}

// What a bit stands for is +-s: the single that is a payload's `header`, or 1 where there is none.
INLINE real scale_of(const byte_t *payload, long long header) {
  return header ? (real)*(const single_t *)payload : (real)1;
}

// x <- x + add; a bit is whether that lies above the threshold, and x keeps what it does not stand for, nothing of what
// is not finite.  The payload was zeros.
KERNEL(encode_one_bit)(Table table, real *x, const real *add, long long addends, byte_t *payload, long long header,
                       double threshold, SkipIf skip) {
  if (skips(skip)) return;
  const real bound = (real)threshold, s = scale_of(payload, header);
  FOR_EACH_CHUNK(c, table) {
    SHARED Marks mark;
    const long long at = table.members[c.member].offset, words = (c.end - c.begin + 7) / 8;
    byte_t *const marks = mark.one - c.begin, *const to = payload + header + (at + c.begin) / 8;
    real *const kept = x + at;
    const real *const increment = add + at;
    FOR_EACH_IN_BLOCK(i, c.end - c.begin, 8 * words) mark.one[i] = 0;
    FOR_EACH_IN(i, c, kept, increment, marks) {
      const real now = addends ? kept[i] + increment[i] : kept[i];
      const bool above = now > bound;
      const real rest = now - (above ? s : -s);
      marks[i] = above;
      kept[i] = is_finite(rest) ? rest : 0;
    };
    block_sync();
    FOR_EACH_IN_BLOCK(b, 0, words) to[b] = pack_eight(mark.eight[b]);
    block_sync();
  }
}

// x <- the sum of what all ranks' bits stand for, added in rank order; what is no member's stays
KERNEL(decode_one_bit)(Table table, real *x, long long ranks, const byte_t *const *payload, long long header) {
  FOR_EACH_CHUNK(c, table) {
    SHARED real total[CHUNK];
    SHARED Marks mark;
    const long long at = table.members[c.member].offset;
    real *const sums = total - c.begin, *const to = x + at;
    const byte_t *const marks = mark.one - c.begin;
    FOR_EACH_IN(i, c, sums) { sums[i] = 0; };
    for (long long r = 0; r < ranks; ++r) {
      const byte_t *const from = assume_global(payload[r]) + header + (at + c.begin) / 8;
      const real s = scale_of(assume_global(payload[r]), header);
      FOR_EACH_IN_BLOCK(b, 0, (c.end - c.begin + 7) / 8) mark.eight[b] = unpack_eight(from[b]);
      block_sync();
      FOR_EACH_IN(i, c, sums, marks) { sums[i] += marks[i] ? s : -s; };
      block_sync();
    }
    FOR_EACH_IN(i, c, sums, to) { to[i] = sums[i]; };
  }
}
