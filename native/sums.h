// Sums in a fixed order, so that they are the same for every split of the work: LANES accumulators take the elements of
// a chunk in turn, and are folded pairwise; then FOLD accumulators take the sums of a tensor's chunks, likewise.
#pragma once
#include "portable.h"

#define LANES 16
#define FOLD 256ll

// What an element adds to each of n sums: the squares of these numbers,
template <int n>
struct Squares {
  static constexpr int SUMS = n;
  real of[n];
  INLINE double term(real x) { return squared(x); }
};
template <class... T> Squares(T...) -> Squares<sizeof...(T)>;

// or their magnitudes, in which what is finite counts as no more than a single can hold.
template <int n>
struct Magnitudes {
  static constexpr int SUMS = n;
  real of[n];
  INLINE double term(real x) {
    const double most = 0x1.fffffep127, size = x < 0 ? -x : x;
    return is_finite(x) && size > most ? most : size;
  }
};
template <class... T> Magnitudes(T...) -> Magnitudes<sizeof...(T)>;

// SUM_CHUNK(i, c, partial, arrays) { ... return Squares{...}; };
// partial[n c + k] <- sum number k of the n of chunk c, to which element i adds what the body returns.  The body may
// change the elements that it meets; all threads of a block come here.
#define SUM_CHUNK(i, c, partial, ...) sums_of(c, partial, __VA_ARGS__) = BODY(i, __VA_ARGS__)

// Fold `count` accumulators pairwise, until n are left.  All threads of a block come here.
INLINE void fold(double *sum, int count, int n) {
  for (int by = count / 2; by >= n; by /= 2) {
    FOR_EACH_IN_BLOCK(j, 0, by) sum[j] += sum[j + by];
    block_sync();
  }
}

#if HOST

template <class TermsOf, class... T>
INLINE void sum_chunk(const Chunk &c, double *partial, const TermsOf &terms_of, T *...) {
  typedef decltype(terms_of(c.begin)) Terms;
  constexpr int n = Terms::SUMS;
  double sum[n][LANES] = {};
  const auto add = [&](long long i, int j) {
    const Terms terms = terms_of(i);
    for (int k = 0; k < n; ++k) sum[k][j] += Terms::term(terms.of[k]);
  };
  long long i = c.begin;
  for (; i + LANES <= c.end; i += LANES)
    NO_UNROLL INDEPENDENT for (int j = 0; j < LANES; ++j) add(i + j, j);
  for (int j = 0; i + j < c.end; ++j) add(i + j, j);
  for (int k = 0; k < n; ++k) {
    fold(sum[k], LANES, 1);
    partial[n * c.index + k] = sum[k][0];
  }
}

#else

// What a block has of a chunk in shared memory: the numbers that elements add, and the accumulators.  [one for all
// kinds of sums; a template would have one for each]
#define VECTORS 4  // that a thread reads at once
struct Room {
  real numbers[VECTORS * 256 * WIDTH];
  double sum[VECTORS * LANES];
};
INLINE Room &room_of_block() {
  SHARED Room room;
  return room;
}

// A block takes as many elements at once as its threads can read in VECTORS, one at least of every array, and leaves
// what they add in shared memory, from where n LANES threads sum it up.
template <class TermsOf, class... T>
INLINE void sum_chunk(const Chunk &c, double *partial, const TermsOf &terms_of, T *...array) {
  typedef decltype(terms_of(0, 0, array...)) Terms;
  constexpr int n = Terms::SUMS, lanes = n * LANES, arrays = sizeof...(T);
  constexpr int rows = arrays < VECTORS ? VECTORS / arrays : 1, stage = rows * 256 * WIDTH;
  static_assert(n * rows <= VECTORS, "a block has no more room");
  Room &room = room_of_block();
  Terms *const terms = (Terms *)room.numbers;
  double *const sum = room.sum;  // number k of lane j in sum[n j + k]
  for (long long begin = c.begin; begin < c.end; begin += stage) {
    const int count = (int)min(c.end - begin, (long long)stage);
    const auto keep = [&](long long i, int j, auto *...at) { terms[i] = terms_of(i, j, at...); };
    grid_stride<rows>(0, count, 0, 1, keep, array + begin...);
    block_sync();
    FOR_EACH_IN_BLOCK(l, 0, lanes) {
      double mine = begin > c.begin ? sum[l] : 0;
#pragma unroll 8
      for (int j = (int)l; j < n * count; j += lanes) mine += Terms::term(room.numbers[j]);
      sum[l] = mine;
    }
    block_sync();
  }
  fold(sum, lanes, n);
  FOR_EACH_IN_BLOCK(k, 0, n) partial[n * c.index + k] = sum[k];
}

#endif

template <class... T>
INLINE auto sums_of(const Chunk &c, double *partial, T *...array) {
  const auto run = [=](const auto &terms_of) { sum_chunk(c, partial, terms_of, array...); };
  return Loop<decltype(run)>{run};
}

// The sum of values[step begin], ..., values[step (end - 1)] by FOLD accumulators.  All threads of a block come here,
// and its leader gets the sum; the others get 0, since it may have begun to write the next one.
INLINE double sum_in_turn(const double *values, long long begin, long long end, long long step) {
  SHARED double sum[FOLD];
  FOR_EACH_IN_BLOCK(j, 0, FOLD) {
    double mine = 0;
    for (long long i = begin + j; i < end; i += FOLD) mine += values[i * step];
    sum[j] = mine;
  }
  block_sync();
  fold(sum, FOLD, 1);
  return is_block_leader() ? sum[0] : 0;
}
