// Which entries are worth sending.  Entries are compared by `magnitude`, an integer that orders like |x|, NaN on top; so
// selection is exact, and ties are taken from the lowest index on.
#include "portable.h"

// Entries counted by `digits` values of one digit of their magnitude: those whose bits above the digit are `prefix`.
KERNEL(count_digit)(long long n, const real *x, long long digits, long long *found, long long prefix, int shift) {
  FOR_EACH_COUNTED(i, n) {
    const long long above = (magnitude(x[i]) >> shift) - prefix * digits;
    if (above >= 0 && above < digits) add(&found[above], 1);
  }
}

// found[0] grows by the number of entries above `least`, found[1] by that of entries equal to it.
KERNEL(count_above)(long long n, const real *x, long long two, long long *found, long long least) {
  long long more = 0, equal = 0;
  FOR_EACH(i, n) {
    const long long m = magnitude(x[i]);
    more += m > least;
    equal += m == least;
  }
  add(&found[0], more);
  add(&found[1], equal);
}

// Move all entries above `least`, and the first `ties` equal to it, out of x: their indices, ascending, and values.
// There are k of them.  [On a device one thread does it: right, and not yet fast]
KERNEL(take_above)(long long n, real *x, long long k, int *index, real *entry, long long least, int ties) {
  FOR_EACH(thread, 1) {
    long long taken = 0;
    int left = ties;
    for (long long i = 0; i < n && taken < k; ++i) {
      const long long m = magnitude(x[i]);
      if (m < least || (m == least && left-- <= 0)) continue;
      index[taken] = (int)i;
      entry[taken++] = x[i];
      x[i] = 0;
    }
  }
}
