// Entries in few bits: indices in the code of Elias ("Efficient storage and retrieval by content and address of static
// files", 1974) and Fano, values as 2, 8 or 16 bits.  k ascending indices below n have L = floor(log2(n / k)) lower bits
// each, which are stored as they are; of the upper parts each is a one, at the bit (upper part) + (number of the
// entry), so that as many zeros stand before it as its upper part says.  That is k (L + 1) + n / 2^L bits, whatever the
// indices are: 0.6 more for each, where k < n / 20, than the shortest code that there can be of one length for all.
//
// Entries go in pieces of CHUNK.  Whatever bits a payload has, all of the planes is written, and nothing else is.
//
// A payload is one of two: `pack_planes` writes the entries of an array behind a header of 16 bytes; `pack_sections`
// cuts them at borders, and writes those of each section of the array behind a header of 4.
#include "marks.h"

#define STRETCH 128  // entries whose upper parts are one thread's
#define GROUP 64  // entries that share a scale
#define SCALES (CHUNK / GROUP)
#define PAIRED 256  // entries that share two magnitudes
#define PAIRS (CHUNK / PAIRED)
#define ROWS 32  // entries whose lower bits fill whole words
#define COLUMNS (CHUNK / ROWS)

// What stands where in a payload that has room for so many `places`; the last six are bytes from its start.  `kind` is
// how it begins; there are `bits` lower bits and `words` of 64 bits for the upper parts.
struct Packing {
  long long kind, format, n, places, bits, words, high, jumps, low, values, scales, bytes;
};

// A payload of the elements [base, base + n) of x, which begins at the byte `at` of those of all sections; the planes of
// its entries begin at the place `plane`.  Those of all entries of x are `index` and `entry`, of so many places `held`.
struct Section : Packing {
  long long base, at, plane, held;
  real *x;
  const int *index;
  const real *entry;
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
  const Header header = *(const Header *)payload, expected = header_of(p, header.entries);
  const bool intact = header.kind == expected.kind && header.n == expected.n && header.check == expected.check;
  return intact && header.entries <= p.places ? (long long)header.entries : -1;
}

// How a section begins: with its number of entries, times an odd number so that one wrong bit makes it another number
// altogether, beside the section's kind and size.
#define SPREAD 0x9e3779b1u
#define GATHERED 0x0e8b2f51u  // times SPREAD that is 1
INLINE unsigned salt_of(const Packing &p) { return (unsigned)p.kind * 0xc2b2ae3d + (unsigned)p.n * 0x85ebca77; }
INLINE unsigned section_header(const Packing &p, long long entries) { return ((unsigned)entries * SPREAD) ^ salt_of(p); }
INLINE long long entries_of_section(const byte_t *payload, const Packing &p) {
  const unsigned entries = (*(const unsigned *)payload ^ salt_of(p)) * GATHERED;
  return entries <= p.places ? (long long)entries : -1;
}

// The same of planes: places without an entry have the index -1, and stand at the end.
INLINE long long entries_of(const int *index, long long places) {
  return partition_point(0, places, [=](long long j) { return index[j] >= 0; });
}

// The indices of entries, from an element of the array on.
struct Indices {
  const int *index;
  int base;
  int operator[](long long i) const { return index[i] - base; }
  Indices operator+(long long i) const { return {index + i, base}; }
};

// ---------------------------------------------------------------------------------------------------------- indices

// The bit that stands for entry i.
INLINE long long place_of(const Indices &index, long long i, long long bits) { return (index[i] >> bits) + i; }

// Write the words whose first one stands for an entry of the stretch [begin, end); the others are zeros already.
INLINE void pack_stretch(const Indices &index, long long begin, long long end, long long k, long long bits, Word64 *high) {
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
INLINE void pack_upper(const Indices &index, const Chunk &c, long long k, const Packing &p, byte_t *payload) {
  if (c.index && is_block_leader()) ((unsigned *)(payload + p.jumps))[c.index - 1] = place_of(index, c.begin, p.bits);
  FOR_EACH_IN_BLOCK(r, 0, (c.end - c.begin + STRETCH - 1) / STRETCH) {
    const long long begin = c.begin + r * STRETCH;
    pack_stretch(index, begin, min(begin + STRETCH, c.end), k, p.bits, (Word64 *)(payload + p.high));
  }
}

// The upper parts of the stretch [begin, end), from the bit that stands for the entry `first`, its own or one in front
// of it; -1 where there is none, or none that is possible.
INLINE void unpack_stretch(const Word64 *high, const Packing &p, long long bit, long long first, long long begin,
                           long long end, int *index) {
  const long long most = (p.n - 1) >> p.bits;
  long long w = bit / 64, skip = begin - first;
  Word64 ones = w < p.words ? high[w] & ~0ull << bit % 64 : 0;
  for (int count; w < p.words && skip >= (count = popcount(ones)); skip -= count) ones = ++w < p.words ? high[w] : 0;
  for (; ones && skip; --skip) ones &= ones - 1;
  for (long long i = begin; i < end; ++i) {
    while (!ones && w < p.words) ones = ++w < p.words ? high[w] : 0;
    const long long upper = ones ? 64 * w + countr_zero(ones) - i : -1;
    index[i] = upper >= 0 && upper <= most ? (int)upper : -1;
    ones &= ones - 1;
  }
}
INLINE void unpack_upper(const byte_t *payload, const Packing &p, const Chunk &c, int *index) {
  const long long bit = c.index ? ((const unsigned *)(payload + p.jumps))[c.index - 1] : 0;
  FOR_EACH_IN_BLOCK(r, 0, (c.end - c.begin + STRETCH - 1) / STRETCH) {
    const long long begin = c.begin + r * STRETCH;
    unpack_stretch((const Word64 *)(payload + p.high), p, bit, c.begin, begin, min(begin + STRETCH, c.end), index);
  }
}

INLINE unsigned shifted(unsigned x, int by) { return by < 0 ? x >> -by : x << by; }

// Lower bits as a table: entry (row, column) has those from bit row L on of its column's words, and words of the same
// number stand beside each other, so that neighbours do the same.
INLINE void pack_table(const Indices &index, long long count, long long columns, int rows, int bits, unsigned *low) {
  const unsigned mask = (1u << bits) - 1;
  for (int w = 0; 32 * w < rows * bits; ++w, low += columns) {
    SHARED unsigned word[COLUMNS];
    FOR_EACH_IN_BLOCK(l, 0, columns) word[l] = 0;
    for (int row = 32 * w / bits; row < rows && row * bits < 32 * (w + 1); ++row) {
      const Indices from = index + row * columns;
      const int by = row * bits - 32 * w;
      FOR_EACH_IN_BLOCK(l, 0, min(columns, count - row * columns)) word[l] |= shifted(from[l] & mask, by);
    }
    FOR_EACH_IN_BLOCK(l, 0, columns) low[l] = word[l];
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
    FOR_EACH_IN_BLOCK(l, 0, min(columns, count)) {
      const unsigned part = word[l] >> by | (split ? word[l + columns] << (32 - by) : 0);
      const unsigned joined = (unsigned)index[l] << bits | (part & mask);
      index[l] = joined < n ? (int)joined : -1;
    }
  }
}

// A piece is a table of 32 rows, whose columns fill whole words, and one of a single column for what is left behind the
// last piece.  Of the places of both, those before c.end have an entry.
INLINE void pack_lower(Indices index, const Chunk &c, const Packing &p, byte_t *payload) {
  const long long places = min(c.begin + CHUNK, p.places) - c.begin, columns = places / ROWS, count = c.end - c.begin;
  const int bits = (int)p.bits;
  unsigned *const low = (unsigned *)(payload + p.low) + c.begin / ROWS * bits;
  index = index + c.begin;
  pack_table(index, count, columns, ROWS, bits, low);
  const long long in_table = columns * ROWS;
  pack_table(index + in_table, count - in_table, 1, (int)(places - in_table), bits, low + columns * bits);
}
INLINE void unpack_lower(const byte_t *payload, const Packing &p, const Chunk &c, int *index) {
  const long long places = min(c.begin + CHUNK, p.places) - c.begin, columns = places / ROWS, count = c.end - c.begin;
  const int bits = (int)p.bits;
  const unsigned *const low = (const unsigned *)(payload + p.low) + c.begin / ROWS * bits;
  index += c.begin;
  unpack_table(low, count, columns, ROWS, bits, (unsigned)p.n, index);
  const long long in_table = columns * ROWS;
  unpack_table(low + columns * bits, count - in_table, 1, (int)(places - in_table), bits, (unsigned)p.n,
               index + in_table);
}

// ----------------------------------------------------------------------------------------------------------- values

#define INT8 3  // beside HALF, BFLOAT16, and WIDE for values as they are
#define TWO_BITS 4
#define LEAST (-112)  // exponents of scales; beyond, factors there or back would be no normal singles
#define MOST 127

// Formats of values.  A group's largest one is scaled to [2^TOP, 2^(TOP + 1)), unless TOP is 0; `limit` is the largest
// that there is below that, so that none is rounded to infinity, and `beyond` what stands for no finite one.
struct ExactValue : Wide {
  static constexpr int TOP = 0;
  INLINE real limit() { return sizeof(real) == 4 ? (real)0x1.fffffep127 : (real)0x1.fffffffffffffp1023; }
  INLINE Bits beyond(real x) { return x; }
};
struct HalfValue : Float16 {
  static constexpr int TOP = 14;
  INLINE real limit() { return 32752; }
  INLINE Bits beyond(real x) { return x > 0 ? 0x7c00 : x < 0 ? 0xfc00 : 0x7e00; }
};
struct Bfloat16Value : Bfloat16 {
  static constexpr int TOP = 0;  // it needs no scales
  INLINE real limit() { return uint_as_float(0x7f7f0000u); }
  INLINE Bits beyond(real x) { return x > 0 ? 0x7f80 : x < 0 ? 0xff80 : 0x7fc0; }
};
struct Int8Value {
  typedef signed char Bits;
  static constexpr int TOP = 6;
  INLINE Bits round(real x) {
    const real large = sizeof(real) == 4 ? (real)0x1.8p23 : (real)0x1.8p52;  // beside it there are integers only
    return (Bits)(int)(x + large - large);  // to the nearest, ties to even
  }
  // [NaN for what stands beyond, which alone is below -127: a choice would make unpacking a sixth slower]
  INLINE real widen(Bits q) {
    return uint_as_float(float_as_uint((float)q) | (unsigned)((q + 127) >> 31 & 0x7fc00000));
  }
  INLINE real limit() { return 127; }
  INLINE Bits beyond(real) { return -128; }
};

INLINE real power_of_two(int e) { return uint_as_float((unsigned)(127 + e) << 23); }

// The exponent of the largest finite magnitude among every `step`-th of some entries.
INLINE int exponent_of(const real *entry, long long begin, long long end, int step = 1) {
  Magnitude most = 0;
  for (long long i = begin; i < end; i += step) {
    const Magnitude size = magnitude(is_finite(entry[i]) ? entry[i] : 0);
    most = size > most ? size : most;
  }
  const int e = sizeof(real) == 4 ? (int)(most >> 23) - 127 : (int)((long long)most >> 52) - 1023;
  return e < LEAST ? LEAST : e > MOST ? MOST : e;
}

// What groups are multiplied with on their way to the wire and back, and what entries are rounded by.
struct Rounding {
  real factor[SCALES], back[SCALES], rest[CHUNK];
};

// Write the values of a piece, and to x, where zeros are, what they are rounded by: nothing of what is not finite.
template <class Format>
INLINE void pack_values(real *x, const int *index, const real *entry, const Chunk &c, Rounding &notes, byte_t *values,
                        byte_t *scales) {
  typedef typename Format::Bits Bits;
  const long long count = c.end - c.begin;
  FOR_EACH_IN_BLOCK(b, 0, (count + GROUP - 1) / GROUP) {
    const long long begin = c.begin + b * GROUP;
    const int e = Format::TOP ? exponent_of(entry, begin, min(begin + GROUP, c.end)) : 0;
    notes.factor[b] = power_of_two(Format::TOP - e);
    notes.back[b] = power_of_two(e - Format::TOP);
    if (Format::TOP) scales[begin / GROUP] = (byte_t)(e - LEAST);
  }
  block_sync();
  index += c.begin, entry += c.begin;
  Bits *const code = (Bits *)values + c.begin;
  FOR_EACH_IN_BLOCK(i, 0, count) {
    const real seen = is_finite(entry[i]) ? entry[i] : 0;
    const Bits sent = Format::round(clamp(seen * notes.factor[(int)i / GROUP], Format::limit()));
    code[i] = sent;
    notes.rest[i] = seen - Format::widen(sent) * notes.back[(int)i / GROUP];
  }
  FOR_EACH_IN_BLOCK(i, 0, count) {  // [what is seldom or scattered stands beside the loop that becomes vectors]
    if (!is_finite(entry[i])) code[i] = Format::beyond(entry[i]);
    x[index[i]] = notes.rest[i];
  }
  block_sync();
}

// entry <- the values of a piece
template <class Format>
INLINE void unpack_values(const byte_t *values, const byte_t *scales, const Chunk &c, real *back, real *entry) {
  const long long count = c.end - c.begin;
  FOR_EACH_IN_BLOCK(b, 0, (count + GROUP - 1) / GROUP)
    back[b] = Format::TOP ? power_of_two(scales[c.begin / GROUP + b] + LEAST - Format::TOP) : 1;
  block_sync();
  entry += c.begin;
  const typename Format::Bits *const code = (const typename Format::Bits *)values + c.begin;
  FOR_EACH_IN_BLOCK(i, 0, count) entry[i] = Format::widen(code[i]) * back[(int)i / GROUP];
}

// ---------------------------------------------------------------------------------------------------------- two bits

// A code is a sign, and whether the magnitude is nearer to the upper than to the lower one of the two that PAIRED
// neighbours share; none stands for 0, since what a selector chooses is far from it.  If an entry is not finite, `upper`
// is NaN, which is nearer to no other entry.
#define UPPER 1
#define NEGATIVE 2
struct TwoMagnitudes {
  bfloat16_t lower, upper;
};

// The codes of a piece, and what each one stands for in each group.
struct Coded {
  real value[PAIRS][4];
  Marks mark;
};
INLINE real decoded(const Coded &coded, long long i) { return coded.value[(int)i / PAIRED][coded.mark.one[i]]; }
INLINE void set_values(real (&value)[4], const TwoMagnitudes &pair) {
  value[0] = Bfloat16::widen(pair.lower), value[NEGATIVE] = -value[0];
  value[UPPER] = Bfloat16::widen(pair.upper), value[NEGATIVE | UPPER] = -value[UPPER];
}

// Magnitudes up to a bound and those above it: how many there are, and their sums in steps of 2^-22 of the power of two
// in the group's largest.  [integers, whose sums do not depend on who adds them up]
#define STEPS 22
struct Halves {
  int below, above, lower, upper;
};
INLINE Halves sum_of(const Halves &a, const Halves &b) {
  return {a.below + b.below, a.above + b.above, a.lower + b.lower, a.upper + b.upper};
}

// The same of the finite ones among every `step`-th of these entries, which are `factor` steps.
INLINE Halves halves_of(const real *entry, long long begin, long long end, int step, real factor, int bound) {
  Halves h = {0, 0, 0, 0};
  NO_UNROLL for (long long i = begin; i < end; i += step) {
    const bool finite = is_finite(entry[i]);
    const real seen = finite ? entry[i] : 0;
    const int size = (int)clamp((seen < 0 ? -seen : seen) * factor, (real)((2 << STEPS) - 1));
    const int above = size > bound, below = finite & !above;
    h = sum_of(h, {below, above, below * size, above * size});
  }
  return h;
}

// The search for the two magnitudes of each group, of which TEAM threads have a part each.
#define TEAM (HOST ? 1 : 16)
struct Search {
  real factor[PAIRS], back[PAIRS];
  int bound[PAIRS], exponent[PAIRS * TEAM];
  Halves part[PAIRS * TEAM];
};

INLINE bfloat16_t nearest_finite(real x) { return Bfloat16::round(clamp(x, uint_as_float(0x7f7f0000u))); }

// The two magnitudes are the means of two halves: what is above a bound, and the rest.  The first bound is such that all
// is one half, the second one the mean, the third one what the halves' means are with each other's weight.  [So squared
// errors of Laplacian, normal and top-K of normal entries are within 2 % of the least that two magnitudes can have.  They
// would be within 6 % if the third bound were half-way between the means, as Lloyd's, and 13 % without a third one.]
INLINE void find_magnitudes(const real *entry, long long count, Search &search, TwoMagnitudes *pair) {
  const long long groups = (count + PAIRED - 1) / PAIRED;
  NO_UNROLL FOR_EACH_IN_BLOCK(t, 0, groups * TEAM) {
    const long long begin = t / TEAM * PAIRED;
    search.exponent[t] = exponent_of(entry, begin + t % TEAM, min(begin + PAIRED, count), TEAM);
  }
  block_sync();
  NO_UNROLL FOR_EACH_IN_BLOCK(g, 0, groups) {
    int e = STEPS - 126;  // beyond, steps would be no normal singles
    NO_UNROLL for (int l = 0; l < TEAM; ++l) e = e < search.exponent[g * TEAM + l] ? search.exponent[g * TEAM + l] : e;
    search.factor[g] = power_of_two(STEPS - e);
    search.back[g] = power_of_two(e - STEPS);
    search.bound[g] = 2 << STEPS;
  }
  block_sync();
  NO_UNROLL for (int pass = 0; pass < 3; ++pass) {
    NO_UNROLL FOR_EACH_IN_BLOCK(t, 0, groups * TEAM) {
      const long long g = t / TEAM, begin = g * PAIRED, end = min(begin + PAIRED, count);
      search.part[t] = halves_of(entry, begin + t % TEAM, end, TEAM, search.factor[g], search.bound[g]);
    }
    block_sync();
    NO_UNROLL FOR_EACH_IN_BLOCK(g, 0, groups) {
      Halves h = {0, 0, 0, 0};
      NO_UNROLL for (int l = 0; l < TEAM; ++l) h = sum_of(h, search.part[g * TEAM + l]);
      const int finite = h.below + h.above;
      const real below = (real)h.below, above = (real)h.above;
      const real lower = h.below ? (real)h.lower / below : 0, upper = h.above ? (real)h.upper / above : lower;
      if (finite) search.bound[g] = (int)((above * lower + below * upper) / (real)finite);
      const bool all_finite = finite == min((g + 1) * PAIRED, count) - g * PAIRED;
      pair[g].lower = nearest_finite(lower * search.back[g]);
      pair[g].upper = all_finite ? nearest_finite(upper * search.back[g]) : 0x7fc0;
    }
    block_sync();
  }
}

INLINE void pack_two_bits(real *x, const int *index, const real *entry, const Chunk &c, Search &search, Coded &coded,
                          byte_t *values, byte_t *scales) {
  const long long count = c.end - c.begin, bytes = (count + 3) / 4;
  TwoMagnitudes *const pair = (TwoMagnitudes *)scales + c.begin / PAIRED;
  index += c.begin, entry += c.begin, values += c.begin / 4;
  find_magnitudes(entry, count, search, pair);
  NO_UNROLL FOR_EACH_IN_BLOCK(g, 0, (count + PAIRED - 1) / PAIRED) set_values(coded.value[g], pair[g]);
  NO_UNROLL FOR_EACH_IN_BLOCK(i, count, 4 * bytes) coded.mark.one[i] = 0;
  block_sync();
  NO_UNROLL FOR_EACH_IN_BLOCK(i, 0, count) {
    const real *const value = coded.value[(int)i / PAIRED], size = entry[i] < 0 ? -entry[i] : entry[i];
    const int nearer = size - value[0] > value[UPPER] - size, finite = is_finite(entry[i]), negative = entry[i] < 0;
    coded.mark.one[i] = (byte_t)((nearer | !finite) * UPPER + negative * NEGATIVE);
  }
  block_sync();
  NO_UNROLL FOR_EACH_IN_BLOCK(b, 0, bytes) values[b] = pack_four(coded.mark.four[b]);
  NO_UNROLL FOR_EACH_IN_BLOCK(i, 0, count) x[index[i]] = is_finite(entry[i]) ? entry[i] - decoded(coded, i) : 0;
  block_sync();
}

INLINE void unpack_two_bits(const byte_t *values, const byte_t *scales, const Chunk &c, Coded &coded, real *entry) {
  const long long count = c.end - c.begin;
  const TwoMagnitudes *const pair = (const TwoMagnitudes *)scales + c.begin / PAIRED;
  entry += c.begin, values += c.begin / 4;
  NO_UNROLL FOR_EACH_IN_BLOCK(g, 0, (count + PAIRED - 1) / PAIRED) set_values(coded.value[g], pair[g]);
  NO_UNROLL FOR_EACH_IN_BLOCK(b, 0, (count + 3) / 4) coded.mark.four[b] = unpack_four(values[b]);
  block_sync();
  NO_UNROLL FOR_EACH_IN_BLOCK(i, 0, count) entry[i] = decoded(coded, i);
}

// ------------------------------------------------------------------------------------------------------------ pieces

// What a block knows of its piece when it packs it, and when it unpacks it.  [one for all formats: a kernel declares it,
// since a block has little of such memory]
union Notes {
  Rounding rounding;
  struct {
    Search search;
    Coded coded;
  } halving;
};
union Sizes {
  real back[SCALES];
  Coded coded;
};

// What an entry's index and value become in a payload, and back.
INLINE void pack_piece(real *x, const Indices &index, const real *entry, const Chunk &c, long long k, const Packing &p,
                       byte_t *payload, Notes &notes) {
  byte_t *const values = payload + p.values, *const scales = payload + p.scales;
  pack_upper(index, c, k, p, payload);
  pack_lower(index, c, p, payload);
  Rounding &rounding = notes.rounding;
  if (p.format == HALF) pack_values<HalfValue>(x, index.index, entry, c, rounding, values, scales);
  else if (p.format == BFLOAT16) pack_values<Bfloat16Value>(x, index.index, entry, c, rounding, values, scales);
  else if (p.format == INT8) pack_values<Int8Value>(x, index.index, entry, c, rounding, values, scales);
  else if (p.format == TWO_BITS)
    pack_two_bits(x, index.index, entry, c, notes.halving.search, notes.halving.coded, values, scales);
  else pack_values<ExactValue>(x, index.index, entry, c, rounding, values, scales);
}

// The places of piece number `number` of a payload of so many entries, or of a damaged one, whose places become NaN.
INLINE void unpack_piece(const byte_t *payload, const Packing &p, long long number, long long entries, int *index,
                         real *entry, Sizes &sizes) {
  const byte_t *const values = payload + p.values, *const scales = payload + p.scales;
  const long long k = entries < 0 ? p.places : entries;
  Chunk c = {number, 0, 0, 0};
  begin_at(c, number * CHUNK, p.places);
  const long long end = c.end;
  c.end = k < c.begin ? c.begin : min(k, c.end);
  FOR_EACH_IN_BLOCK(i, entries < 0 ? c.begin : c.end, end) index[i] = -1, entry[i] = 0;
  if (entries >= 0) {
    unpack_upper(payload, p, c, index);
    block_sync();
    unpack_lower(payload, p, c, index);
  }
  if (p.format == HALF) unpack_values<HalfValue>(values, scales, c, sizes.back, entry);
  else if (p.format == BFLOAT16) unpack_values<Bfloat16Value>(values, scales, c, sizes.back, entry);
  else if (p.format == INT8) unpack_values<Int8Value>(values, scales, c, sizes.back, entry);
  else if (p.format == TWO_BITS) unpack_two_bits(values, scales, c, sizes.coded, entry);
  else unpack_values<ExactValue>(values, scales, c, sizes.back, entry);
  NO_UNROLL FOR_EACH_IN_BLOCK(i, c.begin, c.end)  // NaN at a place of its own where the index is none
    if (index[i] < 0) {
      index[i] = (int)i;
      entry[i] = uint_as_float(0x7fc00000u);
    }
  block_sync();
}

// ---------------------------------------------------------------------------------------------------------- payloads

// payload <- what the planes hold; it was zeros.  x gets back what that cannot carry.
KERNEL(pack_planes)(long long n, real *x, long long places, const int *index, const real *entry, long long bytes,
                    byte_t *payload, const Packing *packing) {
  const Packing p = *packing;
  const long long k = entries_of(index, p.places);
  const Indices indices = {index, 0};
  FOR_EACH_PIECE(once, 1) if (is_block_leader()) *(Header *)payload = header_of(p, k);
  FOR_EACH_PIECE(c, k) {
    SHARED Notes notes;
    pack_piece(x, indices, entry, c, k, p, payload, notes);
  }
}

// The planes of all ranks, one behind the other, from payloads of one size.  A damaged one becomes NaN, at the first
// places of the array.
KERNEL(unpack_planes)(long long ranks, const byte_t *const *payload, long long total, int *index, real *entry,
                      const Packing *packing) {
  const Packing &p = *packing;  // [a copy would want more registers than there are]
  const long long pieces = (p.places + CHUNK - 1) / CHUNK;
  FOR_EACH_PIECE(turn, ranks * pieces * CHUNK) {
    const long long r = turn.index / pieces;
    SHARED Sizes sizes;
    const byte_t *const from = assume_global(payload[r]);
    unpack_piece(from, p, turn.index % pieces, entries_of(from, p), index + r * p.places, entry + r * p.places, sizes);
  }
}

// ---------------------------------------------------------------------------------------------------------- sections

// place <- the first of k ascending indices that is not below each edge; those below 0 are no entries.
KERNEL(find_edges)(long long edges, const long long *edge, long long *place, long long k, const int *index) {
  FOR_EACH_PIECE(c, edges)
    FOR_EACH_IN_BLOCK(e, c.begin, c.end) place[e] = first_from(edge[e], index, k);
}

// payload <- the entries of each section, behind one another; it was zeros.  Each section's x gets back what that cannot
// carry, and the entries that a section has no places for.  A section has a turn for each piece of the largest one.
KERNEL(pack_sections)(long long bytes, byte_t *payload, long long cells, const long long *table, long long turns)
    BLOCKS(turns) {
  const Section *const section = (const Section *)table;
  const long long pieces = turns / (cells * sizeof(long long) / sizeof(Section));
  FOR_EACH_PIECE(turn, turns * CHUNK) {
    SHARED Notes notes;
    const Section s = section[turn.index / pieces];
    const int *const index = assume_global(s.index);
    const real *const entry = assume_global(s.entry);
    real *const x = assume_global(s.x);
    const long long first = first_from(s.base, index, s.held), found = first_from(s.base + s.n, index, s.held) - first;
    const long long k = min(found, s.places), number = turn.index % pieces;
    byte_t *const to = payload + s.at;
    if (!number && is_block_leader()) *(unsigned *)to = section_header(s, k);
    if (!number) FOR_EACH_IN_BLOCK(i, first + k, first + found) x[index[i]] = entry[i];
    Chunk c = {number, 0, 0, 0};
    begin_at(c, number * CHUNK, k);
    const Indices indices = {index + first, (int)s.base};
    if (c.begin < k) pack_piece(x, indices, entry + first, c, k, s, to, notes);
  }
}

// The planes of sections, each at its place, with indices from each section's base on, and x <- x + the entries of those
// that have an x.  A damaged one becomes NaN, at the section's first elements.
KERNEL(unpack_sections)(long long sections, const byte_t *const *payload, long long total, int *index, real *entry,
                        long long cells, const long long *table, long long turns) BLOCKS(turns) {
  const Section *const section = (const Section *)table;
  const long long pieces = turns / sections;
  FOR_EACH_PIECE(turn, turns * CHUNK) {
    SHARED Sizes sizes;
    const Section &s = section[turn.index / pieces];  // [no copy, as above]
    const long long number = turn.index % pieces, begin = number * CHUNK;
    if (begin >= s.places) continue;
    const byte_t *const from = assume_global(payload[turn.index / pieces]);
    unpack_piece(from, s, number, entries_of_section(from, s), index + s.plane, entry + s.plane, sizes);
    real *const x = assume_global(s.x);
    FOR_EACH_IN_BLOCK(i, s.plane + begin, s.plane + min(begin + CHUNK, s.places)) {
      index[i] += index[i] < 0 ? 0 : (int)s.base;
      if (x && index[i] >= 0) x[index[i]] += entry[i];
    }
    block_sync();
  }
}
