// What PTX's instructions do that C++ has no operator for, on the fibers of simt.h; translate.py writes the rest.
//
// Traps name the kernel, block, thread and line of the PTX: an access that is misaligned, one of shared memory outside
// of all variables or of bytes that no thread has written, two accesses of shared memory that nothing orders, a global
// access of shared memory or of null, and a block of more threads than the entry was compiled for.  Accesses outside of
// an array in global memory are AddressSanitizer's.
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

enum Space { GLOBAL, SHARED, LOCAL, GENERIC };
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
// The last access of a byte of shared memory by one thread; of no block that runs if `stamp` is another's.
struct Access {
  unsigned stamp;
  Order order;
  int thread, line;
};
struct Byte {
  Access wrote, added, read, other;  // added: atomically; other: a read by another thread than that of `read`
};
__shared__ unsigned stamp;  // of the block: 0xc3c3c3c3 before its first access
static unsigned stamps;
static std::unordered_map<simt::Block *, Byte *> bytes_of;

// Nothing orders two accesses of two threads, of which one writes, if no barrier lies between, nor within a warp one of
// its operations.
inline void check_order(const Access &before, Order now, int line) {
  const int thread = simt::machine.thread;
  if (before.stamp != stamp || before.thread == thread || before.order.barriers != now.barriers) return;
  if (before.thread / simt::WARP == thread / simt::WARP && before.order.warps < now.warps) return;
  char text[120];
  snprintf(text, sizeof text, "a race with thread %d, line %d, in shared memory", before.thread, before.line);
  trap(text, line);
}

inline void order(uint64_t address, size_t bytes, Order now, Kind kind, int line) {
  if (stamp == 0xc3c3c3c3) stamp = ++stamps;
  Byte *&all = bytes_of[simt::machine.block];
  if (!all) all = (Byte *)simt::memory(PTX_SHARED * sizeof(Byte));
  for (Byte *byte = all + address; byte < all + address + bytes; ++byte) {
    const Access mine = {stamp, now, simt::machine.thread, line};
    check_order(byte->wrote, now, line);
    if (kind != ATOMIC) check_order(byte->added, now, line);
    if (kind != READ) check_order(byte->read, now, line), check_order(byte->other, now, line);
    if (kind == READ && byte->read.stamp == stamp && byte->read.thread != mine.thread) byte->other = byte->read;
    (kind == READ ? byte->read : kind == WRITE ? byte->wrote : byte->added) = mine;
  }
}

inline char *in_shared(uint64_t address, size_t bytes, Order now, Kind kind, int line) {
  if (address > PTX_SHARED - bytes) trap("outside of shared memory", line);
  for (size_t k = 0; k < bytes; ++k) {
    if (!allotted[address + k]) trap("shared memory outside of all variables", line);
    if (kind == WRITE) written[address + k] = WRITTEN;
    else if (written[address + k] != WRITTEN) trap("shared memory that no thread has written", line);
  }
  order(address, bytes, now, kind, line);
  PTX_NOTE(address, bytes, SHARED_KIND + kind, line);
  return arena + address;
}

template <Space space>
char *place(uint64_t address, size_t bytes, Order now, Kind kind, int line) {
  if (address % bytes) trap("misaligned", line);
  if (space == SHARED) return in_shared(address, bytes, now, kind, line);
  const uint64_t offset = address - (uint64_t)arena;
  if (offset < PTX_SHARED && space == GENERIC) return in_shared(offset, bytes, now, kind, line);
  if (offset < PTX_SHARED) trap("a global access of shared memory", line);
  if (address < 4096) trap("a null pointer", line);
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
