// Blocks of elements as integers of 8 bits or 4 times a scale of each block (Dettmers et al., "8-bit optimizers via
// block-wise quantization", 2022; of gradients on their way, Wang et al., "ZeRO++", 2023), with error feedback.  The
// gradient `add` is added to the memory x in the pass that codes it; where there are no `addends`, add is x.
//
// A member is a run of codes, then the scales of its blocks, each filled up with zeros to a multiple of 4 bytes; it
// begins at the byte `place` of its payload.  Blocks begin at the member's start, and the last one may be short.
#include "blocks.h"

#define NAN_SCALE 0x7fc0

// A scale s is a normal bfloat16, by which the block's largest magnitude M has a code of LEVELS, no more and no less:
// it is M / room, rounded up.  Up is by a factor of at most 1 + 2^-7, so that M / s lies between room / (1 + 2^-7) and
// room, which are both rounded to LEVELS.  The scale of the decoded block is the same: its M is LEVELS s, and there is
// no bfloat16 from LEVELS s / room up to s.  For 8 bits 127.488 < room < 127.498 has both; s may be a power of two,
// below which the next bfloat16 is only a factor of 1 - 2^-8 away.  So what was decoded is coded alike.
//
// Scales have bounds.  At the least, 2^-126, codes may be smaller, and a block that would have none but zeros has the
// scale 0.  At the largest, LEVELS s is just a finite single; what a double has beyond that stays behind.
struct Int8 {
  static constexpr int BITS = 8, LEVELS = 127, LARGEST = 0x7c01;
  INLINE real room() { return (real)127.4921875; }
  INLINE byte_t mark(int code) { return (byte_t)code; }
  INLINE int code(byte_t mark) { return (signed char)mark; }
};
struct Int4 {
  static constexpr int BITS = 4, LEVELS = 7, LARGEST = 0x7e12;
  INLINE real room() { return 7; }
  INLINE byte_t mark(int code) { return (byte_t)(code & 15); }
  INLINE int code(byte_t mark) { return (mark ^ 8) - 8; }
};

// To the nearest integer, ties to even.
struct Nearest {
  template <class Code>
  INLINE real room() { return Code::room(); }
  INLINE real nearest(real x) {
    const real large = sizeof(real) == 4 ? (real)0x1.8p23 : (real)0x1.8p52;  // beside it there are integers only
    return x + large - large;
  }
  // [of a single it is LEVELS at most; a double may be beyond the largest scale]
  real operator()(real x, long long, real levels) const {
    return sizeof(real) == 4 ? nearest(x) : clamp(nearest(x), levels);
  }
};

// To one of the two integers beside x, so that x is the mean (Alistarh et al., "QSGD", 2017): floor(x + u), u uniform in
// [0, 1) and a function of the key and the position alone.  The largest code has no integer above it.
struct Dithered {
  unsigned low, high, base;
  template <class Code>
  INLINE real room() { return Code::LEVELS; }
  // "lowbias32" of Wellons, "Prospecting for hash functions", 2018
  INLINE unsigned hash(unsigned h) {
    h = (h ^ h >> 16) * 0x7feb352du;
    h = (h ^ h >> 15) * 0x846ca68bu;
    return h ^ h >> 16;
  }
  real operator()(real x, long long i, real levels) const {
    const unsigned bits = hash(hash((base + (unsigned)i) ^ low) + high) >> 8;
    const real moved = x + (real)(int)bits * (real)0x1p-24, whole = Nearest::nearest(moved);
    return clamp(whole - (real)(whole > moved), levels);
  }
};
INLINE Dithered dithered(long long key, long long base) {
  return {(unsigned)key, (unsigned)((unsigned long long)key >> 32), (unsigned)base};
}

// What threads share of a chunk.  [a kernel declares it, one for all formats; both sides store the lowest byte first]
struct Blocks {
  real now[CHUNK];
  Magnitude most[CHUNK / SMALLEST];
  real scale[CHUNK / SMALLEST];
  union {
    byte_t one[CHUNK];
    unsigned short two[CHUNK / 2];
  } mark;
};

// Where a chunk's codes and scales are in a payload.
template <class Code, class Bytes, class Scales>
struct MemberCodes {
  Bytes *codes;
  Scales *scales;
  long long bytes, blocks, slots;  // of codes, and scales, with what fills them up
};
template <class Code>
INLINE long long code_bytes(long long n) { return (n * Code::BITS + 31) / 32 * 4; }
template <class Code, class Scales, class Bytes>
INLINE MemberCodes<Code, Bytes, Scales> coded(Bytes *member, long long size, const Chunk &c, long long block) {
  const long long before = c.begin / block, blocks = (c.end - c.begin + block - 1) / block;
  const bool fills = c.end == size && (before + blocks) % 2;
  return {member + c.begin * Code::BITS / 8, (Scales *)(member + code_bytes<Code>(size)) + before,
          code_bytes<Code>(c.end - c.begin), blocks, blocks + fills};
}

// The scale of a block whose largest magnitude is `most`.
template <class Code>
INLINE bfloat16_t scale_of(real most, real room) {
  if (!is_finite(most)) return NAN_SCALE;
  if (most <= (real)0x1p-127) return 0;  // half of the least scale
  const unsigned up = (float_as_uint((float)(most / room)) + 0xffff) >> 16;
  return (bfloat16_t)(up < 0x80 ? 0x80 : up > Code::LARGEST ? Code::LARGEST : up);
}

// x <- x + add; the payload gets codes of it, and x keeps what they do not stand for.  A block in which something is not
// finite becomes NaN, and x keeps nothing of it.
template <class Code, class Round>
INLINE void encode_blocks(const Table &table, real *x, const real *add, long long addends, byte_t *payload,
                          const long long *place, long long block, const Round &round, SkipIf skip, Blocks &blocks) {
  const bool refused = skips(skip);
  const real levels = Code::LEVELS, room = Round::template room<Code>(), infinite = uint_as_float(0x7f800000u);
  FOR_EACH_CHUNK(c, table)
    FOR_EACH_STRETCH(s, c, block) {
      const long long at = table.members[c.member].offset, count = s.end - s.begin;
      const auto to = coded<Code, bfloat16_t>(payload + place[c.member], table.members[c.member].size, s, block);
      if (refused) {
        FOR_EACH_IN_BLOCK(i, 0, to.bytes) to.codes[i] = 0;
        FOR_EACH_IN_BLOCK(b, 0, to.slots) to.scales[b] = 0;
        continue;
      }
      add_and_measure(s, block, x + at, add + at, addends, blocks.now, blocks.most);
      FOR_EACH_IN_BLOCK(b, 0, to.slots) {
        const Magnitude most = b < to.blocks ? blocks.most[b * (block / SMALLEST)] : 0;
        const bfloat16_t bits = scale_of<Code>(of_magnitude(most), room);
        to.scales[b] = bits;
        blocks.scale[b] = bits == NAN_SCALE ? 0 : Bfloat16::widen(bits);
        if (bits == NAN_SCALE)
          for (long long i = b * block; i < min((b + 1) * block, count); ++i) blocks.now[i] = 0;
      }
      block_sync();
      byte_t *const mark = Code::BITS == 8 ? to.codes : blocks.mark.one;
      FOR_EACH_IN_BLOCK(i, count, to.bytes * 8 / Code::BITS) mark[i] = 0;
      const auto code = [&](long long i, real scale, const real &number, real &rest, byte_t &sent) {
        const real whole = round(number / (scale > 0 ? scale : infinite), at + i, levels);
        sent = Code::mark((int)whole);
        rest = number - whole * scale;
      };
      each_with_scale(s, block, blocks.scale, code, (const real *)blocks.now - s.begin, x + at, mark - s.begin);
      block_sync();
      if (Code::BITS == 4)
        FOR_EACH_IN_BLOCK(b, 0, to.bytes) to.codes[b] = (byte_t)((blocks.mark.two[b] & 15) | blocks.mark.two[b] >> 4);
      block_sync();
    }
}
KERNEL(encode_int8)(Table table, real *x, const real *add, long long addends, byte_t *payload, const long long *place,
                    long long block, SkipIf skip) {
  SHARED Blocks blocks;
  encode_blocks<Int8>(table, x, add, addends, payload, place, block, Nearest(), skip, blocks);
}
KERNEL(encode_int4)(Table table, real *x, const real *add, long long addends, byte_t *payload, const long long *place,
                    long long block, SkipIf skip) {
  SHARED Blocks blocks;
  encode_blocks<Int4>(table, x, add, addends, payload, place, block, Nearest(), skip, blocks);
}
// The same with stochastic rounding; positions count from `base` on.
KERNEL(dither_int8)(Table table, real *x, const real *add, long long addends, byte_t *payload, const long long *place,
                    long long block, long long key, long long base, SkipIf skip) {
  SHARED Blocks blocks;
  encode_blocks<Int8>(table, x, add, addends, payload, place, block, dithered(key, base), skip, blocks);
}
KERNEL(dither_int4)(Table table, real *x, const real *add, long long addends, byte_t *payload, const long long *place,
                    long long block, long long key, long long base, SkipIf skip) {
  SHARED Blocks blocks;
  encode_blocks<Int4>(table, x, add, addends, payload, place, block, dithered(key, base), skip, blocks);
}

// x <- the sum of what so many `ranks` have sent of it, added in their order, to x itself where `adds`.  A member is in
// the payload `first`, and in those behind it.
template <class Code>
INLINE void decode_blocks(const Table &table, real *x, const byte_t *const *payload, const long long *place,
                          const long long *first, long long ranks, long long block, long long adds, Blocks &blocks) {
  FOR_EACH_CHUNK(c, table) {
    const Member &m = table.members[c.member];
    real *const to = x + m.offset, *const sums = blocks.now - c.begin;
    if (adds || !ranks) FOR_EACH_IN(i, c, to, sums) { sums[i] = adds ? to[i] : 0; };
    for (long long r = 0; r < ranks; ++r) {
      const byte_t *const member = assume_global(payload[first[c.member] + r]) + place[c.member];
      const auto from = coded<Code, const bfloat16_t>(member, m.size, c, block);
      const byte_t *const marks = (Code::BITS == 8 ? from.codes : blocks.mark.one) - c.begin;
      FOR_EACH_IN_BLOCK(b, 0, from.blocks) blocks.scale[b] = Bfloat16::widen(from.scales[b]);
      if (Code::BITS == 4)
        FOR_EACH_IN_BLOCK(b, 0, (c.end - c.begin + 1) / 2)
          blocks.mark.two[b] = (unsigned short)((from.codes[b] & 15) | (from.codes[b] & 240) << 4);
      block_sync();
      const auto begin = [](long long, real scale, real &sum, const byte_t &mark) {
        sum = (real)Code::code(mark) * scale;
      };
      const auto go_on = [](long long, real scale, real &sum, const byte_t &mark) {
        sum += (real)Code::code(mark) * scale;
      };
      if (r || adds) each_with_scale(c, block, blocks.scale, go_on, sums, marks);
      else each_with_scale(c, block, blocks.scale, begin, sums, marks);
      block_sync();
    }
    FOR_EACH_IN(i, c, sums, to) { to[i] = sums[i]; };
  }
}
KERNEL(decode_int8)(Table table, real *x, long long payloads, const byte_t *const *payload, const long long *place,
                    const long long *first, long long ranks, long long block, long long adds) {
  SHARED Blocks blocks;
  decode_blocks<Int8>(table, x, payload, place, first, ranks, block, adds, blocks);
}
KERNEL(decode_int4)(Table table, real *x, long long payloads, const byte_t *const *payload, const long long *place,
                    const long long *first, long long ranks, long long block, long long adds) {
  SHARED Blocks blocks;
  decode_blocks<Int4>(table, x, payload, place, first, ranks, block, adds, blocks);
}
