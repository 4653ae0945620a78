// Where the tensors of a bucket are, and how kernels walk over them.  distopt reads these structs from this text.
#pragma once

// One tensor of a bucket: where it lives, and its place in the bucket's flat arrays.  `first` counts the chunks of all
// members before it; `lr` and `decay` are this tensor's multipliers, and `adapts` is 1, or 0 for a tensor that takes no
// part in layer-wise learning rates.  Offsets and sizes are in elements.
//
// `data` holds numbers of a `format`.  A parameter of 16 bits is updated in `wide`, of reals, and rounded from there.
// If `master` is not 0, `wide` is the parameter's master copy, which keeps its bits from update to update, as long as
// nobody else has changed the parameter: what the copy would round to is compared.
struct Member {
  void *data;
  real *wide;
  long long offset, size, first, format, master;
  double lr, decay, adapts;
};

// Chunks [begin, end) of a bucket's members, which are numbered through; never more than there are.
struct Table {
  const Member *members;
  long long count, begin, end;
};

// Elements [begin, end) of the member of index `member`: the bucket's chunk number `index`.
struct Chunk {
  long long index, member, begin, end;
};

// A kernel's last parameter where a step may be refused: null, or one number that lies where the arrays do.  If that is
// not 0, the kernel changes nothing that outlasts the step, and payloads are zeros.
typedef const long long *SkipIf;

INLINE bool skips(SkipIf skip) { return skip && *skip; }

// The first i of [low, high) with !before(i), or high: by bisection, as std::partition_point.
template <class Before>
INLINE long long partition_point(long long low, long long high, const Before &before) {
  while (low < high) {
    const long long middle = (low + high) / 2;
    if (before(middle)) low = middle + 1; else high = middle;
  }
  return low;
}

// The first of n ascending indices that is not below `at`; negative ones, which are no entries, stand at the end.
INLINE long long first_from(long long at, const int *index, long long n) {
  return partition_point(0, n, [=](long long j) { return (unsigned)index[j] < at; });
}

// Where members of a bucket begin and end in its flat arrays, ascending.
struct Edges {
  long long count;
  const long long *edge;
};

// Whether element i of the flat arrays is one of a member, and lies in no gap between two.
INLINE bool in_member(const Edges &edges, long long i) {
  return partition_point(0, edges.count, [&](long long j) { return edges.edge[j] <= i; }) % 2;
}

// The member that a chunk belongs to.
INLINE Member member(const Table &table, const Chunk &c) {
  Member m = table.members[c.member];
  m.data = assume_global(m.data);
  m.wide = assume_global(m.wide);
  return m;
}

// Let c begin at an element of n, and end a CHUNK further or behind the last one.
INLINE bool begin_at(Chunk &c, long long begin, long long n) {
  c.begin = begin;
  c.end = min(begin + CHUNK, n);
  return true;
}

// Let c be the chunk of number `index`: it lies in the last member whose first chunk is not behind it.
INLINE bool locate(Chunk &c, const Table &table) {
  c.member = partition_point(1, table.count, [&](long long m) { return table.members[m].first <= c.index; }) - 1;
  const Member &m = table.members[c.member];
  return begin_at(c, (c.index - m.first) * CHUNK, m.size);
}

// Let c, which is the chunk before number `index`, or none yet, be that one: without a search.
INLINE bool next(Chunk &c, const Table &table) {
  if (!c.end) return locate(c, table);
  while (c.end == table.members[c.member].size) ++c.member, c.end = 0;
  return begin_at(c, c.end, table.members[c.member].size);
}

// body(format, data) for a member of 16 bits, with the format and the type that its data is stored in.
template <class Body>
INLINE void if_narrow(const Member &m, const Body &body) {
  if (m.format == HALF) body(Float16(), (half_t *)m.data);
  else if (m.format == BFLOAT16) body(Bfloat16(), (bfloat16_t *)m.data);
}

// The same for a member of any format.
template <class Body>
INLINE void with_format(const Member &m, const Body &body) {
  if (m.format == WIDE) body(Wide(), (real *)m.data);
  else if_narrow(m, body);
}

// The parameter as reals: where it lives, or in `wide`, as of the last `weights`.
INLINE real *wide(const Member &m) { return assume_global(m.format == WIDE ? (real *)m.data : m.wide); }

// The same for a chunk that is about to be updated.
INLINE real *weights(const Member &m, const Chunk &c) {
  real *w = wide(m);
  if_narrow(m, [&](auto format, const auto *stored) {
    FOR_EACH_IN(i, c, stored, w) {
      w[i] = m.master && format.round(w[i]) == stored[i] ? w[i] : format.widen(stored[i]);
    };
  });
  return w;
}

// A chunk has been updated in `wide`: round it to where the parameter lives.
INLINE void round_to_storage(const Member &m, const Chunk &c) {
  const real *w = m.wide;
  if_narrow(m, [&](auto format, auto *stored) {
    FOR_EACH_IN(i, c, w, stored) { stored[i] = format.round(w[i]); };
  });
}
