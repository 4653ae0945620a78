// What PTX's instructions do that C++ has no operator for, on the fibers of simt.h; translate.py writes the rest.
//
// Traps name the kernel, block, thread and line of the PTX: an access that is misaligned, one of shared memory outside
// of all variables or of bytes that no thread has written, two accesses that nothing orders, a global access of shared
// memory or of null, and a block of more threads than the entry was compiled for.  Accesses outside of an array in global
// memory are AddressSanitizer's.
#pragma once
#include "simt.h"

#include <unordered_map>

#ifdef PTX_COUNT
#include "count.h"
#else
#define PTX_STEP
#define PTX_BRANCH(taken) taken
#define PTX_NOTE(address, bytes, kind, line)
#endif

namespace ptx {

enum Space { GLOBAL, SHARED, LOCAL, GENERIC, VOLATILE };
enum Mode { BFLY, IDX, UP, DOWN };

struct Variable {
  unsigned start, bytes;
};
struct Entry {
  const char *name, *file;
  int most_threads, variables;
  Variable shared[16];
};

__shared__ __align__(16) char arena[PTX_SHARED];
__shared__ unsigned char written[PTX_SHARED];  // WRITTEN, or what a block begins with
const unsigned char WRITTEN = 1;
static const Entry *entry;  // that runs, as launches come one after the other
static bool allotted[PTX_SHARED];

[[noreturn]] inline void trap(const char *text, int line) {
  char message[400];
  snprintf(message, sizeof message, "%s, thread %d, %s:%d: %s", entry->name, simt::machine.thread, entry->file, line, text);
  simt::die(message);
}

inline void begin(const Entry &mine) {
  if (entry == &mine) return;
  entry = &mine;
  memset(allotted, 0, sizeof allotted);
  for (int k = 0; k < mine.variables; ++k) memset(allotted + mine.shared[k].start, 1, mine.shared[k].bytes);
}

inline void check_threads(int line) {
  if (simt::machine.threads > entry->most_threads) trap("a block of more threads than .maxntid", line);
}

enum Kind { READ, WRITE, ATOMIC };

// What a thread has been ordered by so far: barriers, which all threads of a block pass, and operations of its warp.
struct Order {
  unsigned barriers, warps;
};
struct Access {
  unsigned block;
  int thread, line, bytes;  // a bit for each of a word's; 0 is no access
  Order order;
};
// The last accesses of a word: within a launch, or of shared memory within a block of one.
struct Word {
  uint64_t within;
  Access wrote, added, read, other;  // added: atomically; other: a read by another thread than that of `read`
};

inline bool same_thread(const Access &a, const Access &b) { return a.thread == b.thread && a.block == b.block; }

// Nothing orders two accesses of two threads, of which one writes, if they are of two blocks, if no barrier lies
// between, nor within a warp one of its operations.
inline void check_order(const Access &before, const Access &mine) {
  if (!(before.bytes & mine.bytes) || same_thread(before, mine)) return;
  const bool one_block = before.block == mine.block, one_warp = before.thread / simt::WARP == mine.thread / simt::WARP;
  if (one_block && before.order.barriers != mine.order.barriers) return;
  if (one_block && one_warp && before.order.warps < mine.order.warps) return;
  char text[120];
  snprintf(text, sizeof text, "a race with block %u, thread %d, line %d", before.block, before.thread, before.line);
  trap(text, mine.line);
}

inline void note_access(Word &word, uint64_t within, const Access &mine, Kind kind) {
  if (word.within != within) word = {within};
  check_order(word.wrote, mine);
  if (kind != ATOMIC) check_order(word.added, mine);
  if (kind != READ) check_order(word.read, mine), check_order(word.other, mine);
  if (kind == READ && !same_thread(word.read, mine)) word.other = word.read;
  (kind == READ ? word.read : kind == WRITE ? word.wrote : word.added) = mine;
}

inline unsigned block_number() { return blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z); }

// The words of an access: `word` finds one by its number.
template <class Find>
void note_words(uint64_t address, size_t bytes, Order now, Kind kind, int line, uint64_t within, const Find &word) {
  const int all = bytes < 4 ? (1 << bytes) - 1 << address % 4 : 15;
  const Access mine = {block_number(), simt::machine.thread, line, all, now};
  for (uint64_t w = address / 4; 4 * w < address + bytes; ++w) note_access(word(w), within, mine, kind);
}

inline void order_in_shared(uint64_t address, size_t bytes, Order now, Kind kind, int line) {
  static std::unordered_map<simt::Block *, Word *> words;
  Word *&all = words[simt::machine.block];
  if (!all) all = (Word *)simt::memory((PTX_SHARED / 4 + 1) * sizeof(Word));
  const uint64_t within = simt::machine.launches << 32 | block_number();
  note_words(address, bytes, now, kind, line, within, [&](uint64_t w) -> Word & { return all[w]; });
}

// Lines of global memory by address: a table with free places behind each, which a launch finds empty.
struct Line {
  uint64_t number, within;
  Word words[16];
};
static Line *lines;
static size_t line_places, lines_taken;
static uint64_t lines_of;  // the launch that has filled them

inline Line &line_place(uint64_t number) {
  for (size_t k = number * 0x9e3779b97f4a7c15 >> 32;; ++k) {
    Line &found = lines[k & (line_places - 1)];
    if (found.within != lines_of || found.number == number) return found;
  }
}

inline Line &line_of(uint64_t number) {
  if (lines_of != simt::machine.launches) {
    lines_of = simt::machine.launches, lines_taken = 0;
    if (!lines) line_places = 1 << 10, lines = (Line *)simt::memory(line_places * sizeof(Line));
  }
  Line *found = &line_place(number);
  if (found->within == lines_of) return *found;
  if (2 * ++lines_taken > line_places) {
    Line *const old = lines;
    const size_t count = line_places;
    line_places *= 4, lines = (Line *)simt::memory(line_places * sizeof(Line));
    for (size_t k = 0; k < count; ++k)
      if (old[k].within == lines_of) line_place(old[k].number) = old[k];
    munmap(old, count * sizeof(Line));
    found = &line_place(number);
  }
  found->number = number, found->within = lines_of;
  return *found;
}

inline void order_in_global(uint64_t address, size_t bytes, Order now, Kind kind, int line) {
  Line &found = line_of(address / 64);
  const auto word = [&](uint64_t w) -> Word & { return found.words[w % 16]; };
  note_words(address, bytes, now, kind, line, lines_of, word);
}

inline char *in_shared(uint64_t address, size_t bytes, Order now, Kind kind, int line) {
  if (address > PTX_SHARED - bytes) trap("outside of shared memory", line);
  for (size_t k = 0; k < bytes; ++k) {
    if (!allotted[address + k]) trap("shared memory outside of all variables", line);
    if (kind == WRITE) written[address + k] = WRITTEN;
    else if (written[address + k] != WRITTEN) trap("shared memory that no thread has written", line);
  }
  order_in_shared(address, bytes, now, kind, line);
  PTX_NOTE(address, bytes, SHARED_KIND + kind, line);
  return arena + address;
}

template <Space space>
char *place(uint64_t address, size_t bytes, Order now, Kind kind, int line) {
  if (address % bytes) trap("misaligned", line);
  if (space == SHARED) return in_shared(address, bytes, now, kind, line);
  const uint64_t offset = address - (uint64_t)arena;
  if (offset < PTX_SHARED && (space == GENERIC || space == VOLATILE)) return in_shared(offset, bytes, now, kind, line);
  if (offset < PTX_SHARED) trap("a global access of shared memory", line);
  if (address < 4096) trap("a null pointer", line);
  if (space == VOLATILE) kind = ATOMIC;  // it is there for what other threads do meanwhile
#ifndef __SANITIZE_ADDRESS__  // four times as slow: in one order of four, and not under a sanitizer
  if (space != LOCAL && simt::machine.seed % 4 == 2) order_in_global(address, bytes, now, kind, line);
#endif
  PTX_NOTE(address, bytes, kind, line);
  return (char *)address;
}

// A register from memory: its bits if it has as many, else a narrower number, extended.
template <class T, class R>
void read(const char *from, R &to) {
  T value;
  memcpy(&value, from, sizeof value);
  if constexpr (sizeof(T) == sizeof(R)) memcpy(&to, &value, sizeof to);
  else to = (R)value;
}
template <class T, class R>
void write(char *to, R from) {
  if constexpr (sizeof(T) == sizeof(R)) {
    memcpy(to, &from, sizeof from);
  } else {
    const T value = (T)from;
    memcpy(to, &value, sizeof value);
  }
}

template <Space space, class T, class... R>
void load(uint64_t address, Order now, int line, R &...to) {
  const char *from = place<space>(address, sizeof(T) * sizeof...(R), now, READ, line);
  ((read<T>(from, to), from += sizeof(T)), ...);
}
template <Space space, class T, class... R>
void store(uint64_t address, Order now, int line, R... from) {
  char *to = place<space>(address, sizeof(T) * sizeof...(R), now, WRITE, line);
  ((write<T>(to, from), to += sizeof(T)), ...);
}
template <Space space, class T>
T add(uint64_t address, Order now, int line, T value) {
  T before;
  char *const there = place<space>(address, sizeof(T), now, ATOMIC, line);
  read<T>(there, before);
  write<T>(there, (T)(before + value));
  return before;
}

inline uint64_t from_shared(uint64_t address) { return (uint64_t)arena + address; }
inline uint64_t to_global(uint64_t address, int line) {
  if (address - (uint64_t)arena < PTX_SHARED) trap("an address of shared memory becomes a global one", line);
  return address;
}

// By value: registers whose addresses are taken make the sanitizers' build five times as long.
template <class To, class From>
To as(From from) {
  static_assert(sizeof(To) == sizeof from, "registers of two sizes");
  return __builtin_bit_cast(To, from);
}
template <class T>
T sink;  // for what is not asked for
template <class From, class... To>
void unpack(From from, To &...to) {
  static_assert(sizeof from == (sizeof to + ...), "registers of other sizes");
  const char *at = (const char *)&from;
  ((memcpy(&to, at, sizeof to), at += sizeof to), ...);
}
template <class To, class... From>
To packed(From... from) {
  static_assert(sizeof(To) == (sizeof from + ...), "registers of other sizes");
  To to;
  char *at = (char *)&to;
  ((memcpy(at, &from, sizeof from), at += sizeof from), ...);
  return to;
}
inline float single(uint64_t bits) { return simt::from_bits<float>(bits); }
inline double real64(uint64_t bits) { return simt::from_bits<double>(bits); }

// shfl.sync: c has the last lane of a segment in bits 0 to 4, and in bits 8 to 12 what all lanes of one have in common.
template <Mode mode>
unsigned shuffle(unsigned value, unsigned by, unsigned c, unsigned mask, bool &inside, int line) {
  const int lane = simt::lane(), common = c >> 8 & 31, last = (lane & common) | (c & 31 & ~common), first = lane & common;
  int from = mode == UP ? lane - (int)(by & 31) : mode == DOWN ? lane + (int)(by & 31) : mode == BFLY ? lane ^ (int)(by & 31) : 0;
  if (mode == IDX) from = first | (int)(by & 31 & ~common);
  inside = mode == UP ? from >= last : from <= last;  // of UP c has the first lane
  if (!inside) from = lane;
  return (unsigned)simt::meet(simt::SHUFFLE, mask, value, (unsigned)from, line);
}
template <Mode mode>
unsigned shuffle(unsigned value, unsigned by, unsigned c, unsigned mask, int line) {
  bool inside;
  return shuffle<mode>(value, by, c, mask, inside, line);
}

// Shifts by as many bits as there are, or more, leave nothing but the sign.
template <class T>
T shl(T x, unsigned by) {
  return by < 8 * sizeof x ? (T)(x << by) : 0;
}
template <class T>
T shr(T x, unsigned by) {
  return by < 8 * sizeof x ? (T)(x >> by) : (T)(x < 0 ? -1 : 0);
}
template <class T>
T div_(T a, T b) {
  return b ? (T)(a / b) : (T)-1;
}
template <class T>
T rem_(T a, T b) {
  return b ? (T)(a % b) : a;
}
template <class T>
T min_(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) return std::fmin(a, b);
  return a < b ? a : b;
}
template <class T>
T max_(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) return std::fmax(a, b);
  return a > b ? a : b;
}
template <class T>
unsigned popc_(T x) {
  return __builtin_popcountll(x);
}
template <class T>
unsigned clz_(T x) {
  return x ? __builtin_clzll(x) - (64 - 8 * (unsigned)sizeof x) : 8 * (unsigned)sizeof x;
}
inline unsigned brev_(unsigned x) {
  unsigned found = 0;
  for (int k = 0; k < 32; ++k) found |= (x >> k & 1) << (31 - k);
  return found;
}
// bfind.shiftamt: by how much the highest bit must be moved up; all ones without one.
inline unsigned bfind_(unsigned x) { return x ? __builtin_clz(x) : ~0u; }
// bfe: bits beyond the highest are 0, or of a signed type what the highest that there is says.
template <class T>
T bfe_(T a, unsigned at, unsigned bits) {
  const unsigned all = 8 * sizeof a;
  at &= 255, bits &= 255;
  if (!bits) return 0;
  if (at >= all) return a < 0 ? -1 : 0;
  if (at + bits > all) bits = all - at;
  return (T)((std::make_unsigned_t<T>)a << (all - at - bits)) >> (all - bits);
}
template <class T>
T bfi_(T a, T b, unsigned at, unsigned bits) {
  at &= 255, bits &= 255;
  if (!bits || at >= 8 * sizeof a) return b;
  const T mask = (T)((bits >= 8 * sizeof a ? (T)-1 : (T)(((T)1 << bits) - 1)) << at);
  return (T)((b & ~mask) | (a << at & mask));
}
// shf.r.wrap: the lower half of what both are together, shifted.
inline unsigned shf_(unsigned a, unsigned b, unsigned by) { return (unsigned)(((uint64_t)b << 32 | a) >> (by & 31)); }
inline unsigned prmt_(unsigned a, unsigned b, unsigned chosen) {
  const uint64_t bytes = (uint64_t)b << 32 | a;
  unsigned found = 0;
  for (int k = 0; k < 4; ++k) {
    const unsigned which = chosen >> 4 * k & 15, byte = (unsigned)(bytes >> 8 * (which & 7)) & 255;
    found |= (which & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * k;
  }
  return found;
}
// cvt.rzi: what is beyond a type becomes its bound, and a NaN 0.
template <class T, class F>
T towards_zero(F x) {
  const F beyond = (F)(1ull << (8 * sizeof(T) - 1 - 1)) * 2;
  if (x != x) return 0;
  if (x >= beyond) return (T)(((uint64_t)1 << (8 * sizeof(T) - 1)) - 1);
  if (x < -beyond) return (T)((uint64_t)1 << (8 * sizeof(T) - 1));
  return (T)x;
}

}  // namespace ptx
