// Entries in few bits: indices in the code of Elias ("Efficient storage and retrieval by content and address of static
// files", 1974) and Fano, values as 8 or 16 bits.  k ascending indices below n have L = floor(log2(n / k)) lower bits
// each, which are stored as they are; of the upper parts each is a one, at the bit (upper part) + (number of the
// entry), so that as many zeros stand before it as its upper part says.  That is k (L + 1) + n / 2^L bits, whatever the
// indices are: 0.6 more for each, where k < n / 20, than the shortest code that there can be of one length for all.
//
// Entries go in pieces of CHUNK.  Whatever bits a payload has, all of the planes is written, and nothing else is.
#include "portable.h"

typedef unsigned long long Word64;

#define STRETCH 128  // entries whose upper parts are one thread's
#define GROUP 64  // entries that share a scale
#define SCALES (CHUNK / GROUP)
#define ROWS 32  // entries whose lower bits fill whole words
#define COLUMNS (CHUNK / ROWS)

INLINE long long least(long long a, long long b) { return a < b ? a : b; }

// What stands where in a payload that has room for so many `places`; the last six are bytes from its start.  `kind` is
// how it begins; there are `bits` lower bits and `words` of 64 bits for the upper parts.
struct Packing {
  long long kind, format, n, places, bits, words, high, jumps, low, values, scales, bytes;
};

// How a payload begins.
struct Header {
  unsigned kind, n, entries, check;
};
INLINE Header header_of(const Packing &p, long long entries) {
  const unsigned kind = (unsigned)p.kind, n = (unsigned)p.n, k = (unsigned)entries;
  const Header h = {kind, n, k, kind * 0x9e3779b1 + n * 0x85ebca77 + k * 0xc2b2ae3d};
  return h;
}

// The number of entries in a payload; -1 if it is none of this kind and size, or damaged.
INLINE long long entries_of(const byte_t *payload, const Packing &p) {
  const Header found = *(const Header *)payload, due = header_of(p, found.entries);
  const bool whole = found.kind == due.kind && found.n == due.n && found.check == due.check;
  return whole && found.entries <= p.places ? (long long)found.entries : -1;
}

// The same of planes: places without an entry have the index -1, and stand at the end.
INLINE long long entries_of(const int *index, long long places) {
  long long low = 0;
  for (long long high = places; low < high;) {
    const long long middle = (low + high) / 2;
    if (index[middle] >= 0) low = middle + 1; else high = middle;
  }
  return low;
}

// ---------------------------------------------------------------------------------------------------------- indices

// The bit that stands for entry i.
INLINE long long place_of(const int *index, long long i, long long bits) { return (index[i] >> bits) + i; }

// Write the words whose first one stands for an entry of the stretch [begin, end); the others are zeros already.
INLINE void pack_stretch(const int *index, long long begin, long long end, long long k, long long bits, Word64 *high) {
  long long i = begin;
  while (i && i < end && place_of(index, i, bits) / 64 == place_of(index, i - 1, bits) / 64) ++i;
  while (i < end) {
    const long long w = place_of(index, i, bits) / 64;
    Word64 word = 0;
    for (long long at; i < k && (at = place_of(index, i, bits)) / 64 == w; ++i) word |= 1ull << at % 64;
    high[w] = word;
  }
}

// The upper parts of a piece, and where the first entry of every piece but the first one stands, so that none has to be
// read for another.
INLINE void pack_upper(const int *index, const Chunk &c, long long k, const Packing &p, byte_t *payload) {
  if (c.index && leads_block()) ((unsigned *)(payload + p.jumps))[c.index - 1] = place_of(index, c.begin, p.bits);
  FOR_EACH_HERE(r, 0, (c.end - c.begin + STRETCH - 1) / STRETCH) {
    const long long begin = c.begin + r * STRETCH;
    pack_stretch(index, begin, least(begin + STRETCH, c.end), k, p.bits, (Word64 *)(payload + p.high));
  }
}

// The upper parts of the stretch [begin, end), from the bit that stands for the entry `first`, its own or one in front
// of it; -1 where there is none, or none that is possible.
INLINE void unpack_stretch(const Word64 *high, const Packing &p, long long bit, long long first, long long begin,
                           long long end, int *index) {
  const long long most = (p.n - 1) >> p.bits;
  long long w = bit / 64, skip = begin - first;
  Word64 ones = w < p.words ? high[w] & ~0ull << bit % 64 : 0;
  for (int some; w < p.words && skip >= (some = count_ones(ones)); skip -= some) ones = ++w < p.words ? high[w] : 0;
  for (; ones && skip; --skip) ones &= ones - 1;
  for (long long i = begin; i < end; ++i) {
    while (!ones && w < p.words) ones = ++w < p.words ? high[w] : 0;
    const long long upper = ones ? 64 * w + lowest_one(ones) - i : -1;
    index[i] = upper >= 0 && upper <= most ? (int)upper : -1;
    ones &= ones - 1;
  }
}
INLINE void unpack_upper(const byte_t *payload, const Packing &p, const Chunk &c, int *index) {
  const long long bit = c.index ? ((const unsigned *)(payload + p.jumps))[c.index - 1] : 0;
  FOR_EACH_HERE(r, 0, (c.end - c.begin + STRETCH - 1) / STRETCH) {
    const long long begin = c.begin + r * STRETCH;
    unpack_stretch((const Word64 *)(payload + p.high), p, bit, c.begin, begin, least(begin + STRETCH, c.end), index);
  }
}

INLINE unsigned shifted(unsigned x, int by) { return by < 0 ? x >> -by : x << by; }

// Lower bits as a table: entry (row, column) has those from bit row L on of its column's words, and words of the same
// number stand beside each other, so that neighbours do the same.
INLINE void pack_table(const int *index, long long count, long long columns, int rows, int bits, unsigned *low) {
  const unsigned mask = (1u << bits) - 1;
  for (int w = 0; 32 * w < rows * bits; ++w, low += columns) {
    SCRATCH unsigned word[COLUMNS];
    FOR_EACH_HERE(l, 0, columns) word[l] = 0;
    for (int row = 32 * w / bits; row < rows && row * bits < 32 * (w + 1); ++row) {
      const int *const from = index + row * columns, by = row * bits - 32 * w;
      FOR_EACH_HERE(l, 0, least(columns, count - row * columns)) word[l] |= shifted(from[l] & mask, by);
    }
    FOR_EACH_HERE(l, 0, columns) low[l] = word[l];
  }
}

// index <- upper parts and lower bits together; -1 for what is no index of n elements.
INLINE void unpack_table(const unsigned *low, long long count, long long columns, int rows, int bits, unsigned n,
                         int *index) {
  const unsigned mask = (1u << bits) - 1;
  for (int row = 0; bits && row < rows; ++row, index += columns, count -= columns) {
    const int by = row * bits % 32;
    const bool split = by + bits > 32;  // between this word and the next one
    const unsigned *const word = low + row * bits / 32 * columns;
    FOR_EACH_HERE(l, 0, least(columns, count)) {
      const unsigned part = word[l] >> by | (split ? word[l + columns] << (32 - by) : 0);
      const unsigned whole = (unsigned)index[l] << bits | (part & mask);
      index[l] = whole < n ? (int)whole : -1;
    }
  }
}

// A piece is a table of 32 rows, whose columns fill whole words, and one of a single column for what is left behind the
// last piece.  Of the places of both, those before c.end have an entry.
INLINE void pack_lower(const int *index, const Chunk &c, const Packing &p, byte_t *payload) {
  const long long places = least(c.begin + CHUNK, p.places) - c.begin, columns = places / ROWS, held = c.end - c.begin;
  const int bits = (int)p.bits;
  unsigned *const low = (unsigned *)(payload + p.low) + c.begin / ROWS * bits;
  index += c.begin;
  pack_table(index, held, columns, ROWS, bits, low);
  const long long whole = columns * ROWS;
  pack_table(index + whole, held - whole, 1, (int)(places - whole), bits, low + columns * bits);
}
INLINE void unpack_lower(const byte_t *payload, const Packing &p, const Chunk &c, int *index) {
  const long long places = least(c.begin + CHUNK, p.places) - c.begin, columns = places / ROWS, held = c.end - c.begin;
  const int bits = (int)p.bits;
  const unsigned *const low = (const unsigned *)(payload + p.low) + c.begin / ROWS * bits;
  index += c.begin;
  unpack_table(low, held, columns, ROWS, bits, (unsigned)p.n, index);
  const long long whole = columns * ROWS;
  unpack_table(low + columns * bits, held - whole, 1, (int)(places - whole), bits, (unsigned)p.n, index + whole);
}

// ----------------------------------------------------------------------------------------------------------- values

#define INT8 3  // beside HALF and BFLOAT16
#define LEAST (-112)  // exponents of scales; beyond, factors there or back would be no normal singles
#define MOST 127

// Formats of values.  A group's largest one is scaled to [2^TOP, 2^(TOP + 1)); `limit` is the largest that there is
// below that, so that none is rounded to infinity, and `beyond` what stands for no finite one.
struct Half {
  typedef half_t Code;
  enum { TOP = 14 };
  INLINE real limit() { return 32752; }
  INLINE Code code(real x) { return half_of(x); }
  INLINE Code beyond(real x) { return x > 0 ? 0x7c00 : x < 0 ? 0xfc00 : 0x7e00; }
  INLINE real value(Code h) { return value_of_half(h); }
};
struct Bfloat16 {
  typedef bfloat16_t Code;
  enum { TOP = 0 };  // it has no scales
  INLINE real limit() { return ::value(0x7f7f0000u); }
  INLINE Code code(real x) { return bfloat16_of(x); }
  INLINE Code beyond(real x) { return x > 0 ? 0x7f80 : x < 0 ? 0xff80 : 0x7fc0; }
  INLINE real value(Code b) { return value_of_bfloat16(b); }
};
struct Int8 {
  typedef signed char Code;
  enum { TOP = 6, BEYOND = -128 };
  INLINE real limit() { return 127; }
  INLINE Code code(real x) {
    const real large = sizeof(real) == 4 ? (real)0x1.8p23 : (real)0x1.8p52;  // beside it there are integers only
    return (Code)(int)(x + large - large);  // to the nearest, ties to even
  }
  INLINE Code beyond(real) { return BEYOND; }
  // [NaN for BEYOND alone, which is below -127: a choice would make unpacking a sixth slower]
  INLINE real value(Code q) { return ::value(bits((float)q) | (unsigned)((q + 127) >> 31 & 0x7fc00000)); }
};

INLINE real power_of_two(int e) { return value((unsigned)(127 + e) << 23); }

// The exponent of the largest finite magnitude of a group.
INLINE int exponent_of(const real *entry, long long begin, long long end) {
  decltype(magnitude((real)0)) most = 0;
  for (long long i = begin; i < end; ++i) {
    const auto size = magnitude(is_finite(entry[i]) ? entry[i] : 0);
    most = size > most ? size : most;
  }
  const int e = sizeof(real) == 4 ? (int)(most >> 23) - 127 : (int)((long long)most >> 52) - 1023;
  return e < LEAST ? LEAST : e > MOST ? MOST : e;
}

// What a block knows of its piece: what groups are multiplied with on their way to the wire and back, and what entries
// are rounded by.  [one for all formats: a kernel declares it, since a block has little of such memory]
struct Notes {
  real there[SCALES], back[SCALES], left[CHUNK];
};

// Write the values of a piece, and to x, where zeros are, what they are rounded by: nothing of what is not finite.
template <class Format>
INLINE void pack_values(real *x, const int *index, const real *entry, const Chunk &c, Notes &notes, byte_t *values,
                        byte_t *scales) {
  typedef typename Format::Code Code;
  const long long count = c.end - c.begin;
  FOR_EACH_HERE(b, 0, (count + GROUP - 1) / GROUP) {
    const long long begin = c.begin + b * GROUP;
    const int e = Format::TOP ? exponent_of(entry, begin, least(begin + GROUP, c.end)) : 0;
    notes.there[b] = power_of_two(Format::TOP - e);
    notes.back[b] = power_of_two(e - Format::TOP);
    if (Format::TOP) scales[begin / GROUP] = (byte_t)(e - LEAST);
  }
  together();
  index += c.begin, entry += c.begin;
  Code *const code = (Code *)values + c.begin;
  FOR_EACH_HERE(i, 0, count) {
    const real seen = is_finite(entry[i]) ? entry[i] : 0;
    const Code sent = Format::code(clamp(seen * notes.there[(int)i / GROUP], Format::limit()));
    code[i] = sent;
    notes.left[i] = seen - Format::value(sent) * notes.back[(int)i / GROUP];
  }
  FOR_EACH_HERE(i, 0, count) {  // [what is seldom or scattered stands beside the loop that becomes vectors]
    if (!is_finite(entry[i])) code[i] = Format::beyond(entry[i]);
    x[index[i]] = notes.left[i];
  }
  together();
}

// entry <- the values of a piece; NaN at a place of its own where the index is none.
template <class Format>
INLINE void unpack_values(const byte_t *values, const byte_t *scales, const Chunk &c, real *back, int *index,
                          real *entry) {
  const long long count = c.end - c.begin;
  FOR_EACH_HERE(b, 0, (count + GROUP - 1) / GROUP)
    back[b] = Format::TOP ? power_of_two(scales[c.begin / GROUP + b] + LEAST - Format::TOP) : 1;
  together();
  index += c.begin, entry += c.begin;
  const typename Format::Code *const code = (const typename Format::Code *)values + c.begin;
  FOR_EACH_HERE(i, 0, count) entry[i] = Format::value(code[i]) * back[(int)i / GROUP];
  FOR_EACH_HERE(i, 0, count)
    if (index[i] < 0) {
      index[i] = (int)(c.begin + i);
      entry[i] = value(0x7fc00000u);
    }
  together();
}

// ---------------------------------------------------------------------------------------------------------- payloads

// payload <- what the planes hold; it was zeros.  x gets back what that cannot carry.
KERNEL(pack_planes)(long long n, real *x, long long places, const int *index, const real *entry, long long bytes,
                    byte_t *payload, const Packing *packing) {
  const Packing p = *packing;
  const long long k = entries_of(index, p.places);
  byte_t *const values = payload + p.values, *const scales = payload + p.scales;
  FOR_EACH_PIECE(once, 1) if (leads_block()) *(Header *)payload = header_of(p, k);
  FOR_EACH_PIECE(c, k) {
    SCRATCH Notes notes;
    pack_upper(index, c, k, p, payload);
    pack_lower(index, c, p, payload);
    if (p.format == HALF) pack_values<Half>(x, index, entry, c, notes, values, scales);
    else if (p.format == BFLOAT16) pack_values<Bfloat16>(x, index, entry, c, notes, values, scales);
    else pack_values<Int8>(x, index, entry, c, notes, values, scales);
  }
}

// The planes of all ranks, one behind the other, from payloads of one size.  A damaged one becomes NaN, at the first
// places of the array.
KERNEL(unpack_planes)(long long ranks, const byte_t *const *payload, long long total, int *index, real *entry,
                      const Packing *packing) {
  const Packing p = *packing;
  const long long pieces = (p.places + CHUNK - 1) / CHUNK;
  FOR_EACH_PIECE(turn, ranks * pieces * CHUNK) {
    const long long r = turn.index / pieces;
    SCRATCH real back[SCALES];
    const byte_t *const from = global(payload[r]), *const values = from + p.values, *const scales = from + p.scales;
    int *const place = index + r * p.places;
    real *const to = entry + r * p.places;
    const long long found = entries_of(from, p), k = found < 0 ? p.places : found;
    Chunk c = {turn.index % pieces, 0, 0, 0};
    cut(c, p.places);
    const long long end = c.end;
    c.end = k < c.begin ? c.begin : least(k, c.end);
    FOR_EACH_HERE(i, found < 0 ? c.begin : c.end, end) place[i] = -1, to[i] = 0;
    if (found >= 0) {
      unpack_upper(from, p, c, place);
      together();
      unpack_lower(from, p, c, place);
    }
    if (p.format == HALF) unpack_values<Half>(values, scales, c, back, place, to);
    else if (p.format == BFLOAT16) unpack_values<Bfloat16>(values, scales, c, back, place, to);
    else unpack_values<Int8>(values, scales, c, back, place, to);
  }
}
