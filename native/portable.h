// One text, two compilers: g++ turns each KERNEL into a host function, NVRTC turns it into a __global__.  Each text is
// compiled once with -Dreal=float and once with -Dreal=double.  Only the two platform headers know either compiler.
#pragma once

#ifndef real
#error "compile with -Dreal=float or -Dreal=double"
#endif

#define CHUNK 4096  // elements that a block works on at a time; also the block length of every fixed-order sum

typedef unsigned short half_t;      // the bits of an IEEE binary16
typedef unsigned short bfloat16_t;  // the upper half of an IEEE binary32
typedef float single_t;             // binary32, whatever `real` is
typedef unsigned char byte_t;
typedef unsigned long long Word64;

// Formats of stored numbers, for `Member.format`.
#define WIDE 0  // a real
#define HALF 1
#define BFLOAT16 2

// `Loop{run} = body` runs the body, so that a loop can be written in front of it.
template <class Run>
struct Loop {
  Run run;
  template <class Body>
  void operator=(const Body &body) const { run(body); }
};

#define PASTE_(name, type) name##_##type
#define PASTE(name, type) PASTE_(name, type)

// What follows the head of a kernel that wants another grid than the usual one, which is a thread for every 16 bytes of
// its first array, or a block for every chunk of its table, as far as the device has room: one block for each of a
// parameter, or of the table's `members`.  Every grid of blocks of 32, 64, ... 256 threads is right: this is for speed.
#define BLOCKS(count)

// A platform has:
//   KERNEL(name)(parameters)             the head of a kernel
//   INLINE, SHARED                       qualifiers of a function, and of a variable that a block's threads share
//   FOR_EACH(i, n, arrays) { ... };      i in [0, n), divided among all threads
//   FOR_EACH_IN(i, c, arrays) { ... };   i in the chunk c, divided among the threads of a block
//   FOR_EACH_IN_BLOCK(i, begin, end)     i in [begin, end), likewise, one by one
//   FOR_EACH_CHUNK(c, table)             the chunks of a table,
//   FOR_EACH_PIECE(c, n)                 n elements, CHUNK at a time,
//   FOR_EACH_MEMBER(m, table)            and the members of a table: a block each
//   BODY(i, arrays)                      the head of a lambda for what these loops do with the elements at i
//   block_sync, block_or, atomic_add     barriers, and a sum over all threads
//   is_block_leader                      whether this thread writes what its block computed
//   float_as_uint, uint_as_float, double_as_longlong, longlong_as_double, sqrt, min, popcount, countr_zero,
//   assume_global
// FOR_EACH and FOR_EACH_IN name the arrays that their body meets at i, and nowhere else; the body ends with `};`.
#ifdef __CUDACC__
#include "platform_cuda.h"
#else
#include "platform_host.h"
#endif

#include "numeric.h"
#include "layout.h"
