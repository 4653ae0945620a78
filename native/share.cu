// Partial averaging by seed: of so many neighbours in a tensor one is averaged (SPARTA: Beton et al., "Improving the
// efficiency of distributed training using sparse parameter averaging", 2025).  Which one follows from a key that all
// ranks have, so that no index is sent.
#include "portable.h"

// A tensor of `size` elements, cut into blocks of `every` neighbours, of which the last may be shorter.  Each block
// begins somewhere and goes round: in as many turns each of its elements is `chosen` once.
struct Share {
  Word64 key;
  long long size, every, turn;
  long long chosen(long long block) const {
    const long long place = (long long)((mixed(key, block) >> 32) * every >> 32) + turn;
    return block * every + (place < every ? place : place - every);
  }
};

// flat[offset + j] <- what is chosen of block j of every member, from its master copy if it has one; 0 if a last block
// is too short.  The table has a number for each block; `sizes` are the members'.
KERNEL(take_share)(Table table, real *flat, const long long *sizes, long long every, long long turn, long long key) {
  FOR_EACH_CHUNK(c, table) {
    const Member m = member(table, c);
    const Share share = {mixed(key, c.member), sizes[c.member], every, turn};
    real *to = flat + m.offset;
    const auto take = [&](auto format, const auto *from) {
      FOR_EACH_IN_BLOCK(j, c.begin, c.end) {
        const long long at = share.chosen(j);
        to[j] = at < share.size ? format.widen(from[at]) : (real)0;
      }
    };
    if (m.master) take(Wide(), m.wide);
    else with_format(m, take);
  }
}

// What was chosen <- scale flat[offset + j], in master copies too.
KERNEL(put_share)(Table table, const real *flat, const long long *sizes, long long every, long long turn, long long key,
                  double scale, SkipIf skip) {
  if (skips(skip)) return;
  const real factor = (real)scale;
  FOR_EACH_CHUNK(c, table) {
    const Member m = member(table, c);
    const Share share = {mixed(key, c.member), sizes[c.member], every, turn};
    const real *from = flat + m.offset;
    with_format(m, [&](auto format, auto *to) {
      FOR_EACH_IN_BLOCK(j, c.begin, c.end) {
        const long long at = share.chosen(j);
        if (at >= share.size) continue;
        const real mean = factor * from[j];
        if (m.master) m.wide[at] = mean;
        to[at] = format.round(mean);
      }
    });
  }
}
