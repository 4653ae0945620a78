// Codes of one bit or two, the first one in the highest bits of its byte.
#pragma once
#include "portable.h"

// The codes of a chunk, a byte each.  [both sides store the lowest byte of a word first]
union Marks {
  byte_t one[CHUNK];
  unsigned four[CHUNK / 4];
  unsigned long long eight[CHUNK / 8];
};

// Four marks of two bits to one byte and back; a product of marks is their sum, shifted so that none meets another.
INLINE byte_t pack_four(unsigned marks) { return (byte_t)(marks * 0x40100401 >> 24); }
INLINE unsigned unpack_four(unsigned codes) {
  return (codes >> 6 | codes << 4 | codes << 14 | codes << 24) & 0x03030303;
}

// The same for eight marks of one bit; each comes back as a byte that is 0 or not.
INLINE byte_t pack_eight(unsigned long long marks) { return (byte_t)(marks * 0x8040201008040201 >> 56); }
INLINE unsigned long long unpack_eight(unsigned long long codes) {
  return codes * 0x0101010101010101 & 0x0102040810204080;
}
