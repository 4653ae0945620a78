// Every kernel at edge sizes on exactly sized heap memory, for the sanitizers.
#include "adagrad.cu"
#include "adam.cu"
#include "adamw.cu"
#include "blocks.cu"
#include "cast.cu"
#include "codec.cu"
#include "dct.cu"
#include "dgc.cu"
#include "exact.cu"
#include "lamb.cu"
#include "lans.cu"
#include "lars.cu"
#include "lbsgd.cu"
#include "muon.cu"
#include "pack.cu"
#include "packed.cu"
#include "reduce.cu"
#include "rmsprop.cu"
#include "rows.cu"
#include "sgd.cu"
#include "share.cu"
#include "signum.cu"
#include "sparse.cu"
#include "topk_host.cu"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

int main() {
  const long long sizes[] = {0, 1, 15, 16, 17, 63, 64, 65, CHUNK - 1, CHUNK, CHUNK + 1};
  std::vector<std::vector<real>> tensors;
  std::vector<Member> rows;
  long long offset = 0, first = 0;
  for (long long n : sizes) {
    tensors.emplace_back(n, (real)0.5);
    rows.push_back({tensors.back().data(), nullptr, offset, n, first, WIDE, 0, 1.0, 1.0, 1.0});
    offset += n, first += (n + CHUNK - 1) / CHUNK;
  }
  const long long count = (long long)rows.size();
  const Table table = {rows.data(), count, 0, first};
  std::vector<real> flat(offset), state(offset), peer(offset);
  std::vector<long long> bad(count), wrong(3 * count);
  pack_float(table, flat.data(), 0.5, bad.data(), 1);
  const Update plain = {1, INFINITY, 0.1, 0.01};
  const Momentum momentum = {plain, 0.9, 1};
  const AdaGrad adagrad = {plain, 1e-8};
  const RmsProp rmsprop = {plain, 0.9, 0.1, 1e-8};
  const Adam adam = {plain, 0.9, 0.1, 0.1, 0.9, 0.1, 0.1, 1};
  sgd_float(table, flat.data(), &plain, nullptr);
  sgd_momentum_float(table, flat.data(), state.data(), &momentum, nullptr);
  sgd_nesterov_float(table, flat.data(), state.data(), &momentum, nullptr);
  std::vector<real> second(offset);
  rmsprop_float(table, flat.data(), state.data(), &rmsprop, nullptr);
  adagrad_float(table, flat.data(), state.data(), &adagrad, nullptr);
  adam_float(table, flat.data(), state.data(), second.data(), &adam, nullptr);
  unpack_float(table, flat.data(), 2, nullptr);
  lerp_float(table, flat.data(), 0.5, nullptr);
  std::vector<double> pieces(3 * first), sums(3 * count);
  const AdamW adamw = {plain, 0.9, 0.1, 0.9, 0.1, 1, 1e-6};
  const Lars lars = {plain, 0.9, 0.001, 1e-8};
  const Lamb lamb = {plain, 0.9, 0.1, 0.1, 0.9, 0.1, 0.1, 1e-6, 0, 10};
  const Lans lans = {plain, 0.9, 0.1, 0.1, 0.9, 0.1, 0.1, 1e-6, 0, 10};
  const Lbsgd lbsgd = {plain, 0.5, 0.9, 2};
  const Muon muon = {plain, 0.9, 0.1};
  const Signum signum = {plain, 0.9};
  const long long refused = 1;
  for (long long format : {WIDE, HALF, BFLOAT16}) {
    std::vector<std::vector<half_t>> narrow;
    for (Member &m : rows) {
      narrow.emplace_back(m.size, (half_t)0x3c00);
      m.wide = peer.data() + m.offset;
      m.format = format;
      if (format != WIDE) m.data = narrow.back().data();
    }
    pack_float(table, flat.data(), 0.5, bad.data(), 1);
    unpack_float(table, flat.data(), 2, nullptr);
    lerp_float(table, flat.data(), 0.5, nullptr);
    widen_float(table, peer.data(), nullptr);
    sgd_float(table, flat.data(), &plain, nullptr);
    adamw_float(table, flat.data(), state.data(), second.data(), &adamw, nullptr);
    lars_squares_float(table, flat.data(), pieces.data());
    fold_partials_float(table, pieces.data(), sums.data(), 2);
    lars_float(table, flat.data(), state.data(), sums.data(), &lars, nullptr);
    lamb_moments_float(table, flat.data(), state.data(), second.data(), pieces.data(), &lamb, nullptr);
    lamb_float(table, state.data(), second.data(), sums.data(), &lamb, nullptr);
    lans_moments_float(table, flat.data(), state.data(), second.data(), sums.data(), pieces.data(), &lans, nullptr);
    fold_partials_float(table, pieces.data(), sums.data(), 3);
    lans_float(table, flat.data(), state.data(), second.data(), sums.data(), sums.data(), &lans, nullptr);
    lbsgd_gather_float(table, flat.data(), state.data(), &lbsgd, nullptr);
    lbsgd_squares_float(table, flat.data(), state.data(), pieces.data(), &lbsgd);
    lbsgd_float(table, flat.data(), state.data(), second.data(), &lbsgd, nullptr);
    lbsgd_lars_float(table, flat.data(), state.data(), second.data(), sums.data(), &lbsgd, nullptr);
    for (long long nesterov = 0; nesterov < 2; ++nesterov)
      muon_average_float(table, flat.data(), state.data(), second.data(), nesterov, pieces.data(), &muon, nullptr);
    muon_float(table, second.data(), 1.5, &muon, nullptr);
    sign_descent_float(table, flat.data(), &plain, nullptr);
    signum_float(table, flat.data(), state.data(), &signum, nullptr);
    overwrite_float(table, flat.data(), 0.5, &refused);
  }
  const real *const parts[] = {flat.data(), peer.data()};
  real *const totals[] = {peer.data(), flat.data()};
  for (long long share = 0; share < 3; ++share)
    add_parts_float({rows.data(), count, first * share / 3, first * (share + 1) / 3}, 2, parts, 2, totals,
                    wrong.data());
  const std::vector<single_t> most((offset + CHUNK - 1) / CHUNK, 1);
  for (long long share = 0; share < 3; ++share)
    add_parts_on_grid_float({rows.data(), count, first * share / 3, first * (share + 1) / 3}, 2, parts, 2, totals,
                            most.data(), wrong.data());
  std::vector<double> partial(first), squares(count);
  partial_squares_float(table, flat.data(), partial.data());
  fold_partials_float(table, partial.data(), squares.data(), 1);
  for (long long n : sizes) {
    std::vector<real> x(n, (real)1e30), y(n);
    std::vector<half_t> half(n);
    accumulate_float(n, x.data(), y.data(), nullptr);
    clear_float(n, y.data(), nullptr);
    scale_float(n, x.data(), 3, nullptr);
    clip_float(n, x.data(), 2);
    to_half_float(n, x.data(), half.data());
    from_half_float(n, half.data(), y.data());
    to_bfloat16_float(n, x.data(), half.data());
    from_bfloat16_float(n, half.data(), y.data());
    add_half_float(n, half.data(), y.data());
    add_bfloat16_float(n, half.data(), y.data());
    encode_half_float(n, x.data(), half.data(), 0, x.data(), 0.5, 65504, nullptr);
    decode_half_float(n, half.data(), y.data(), 0.5);
    encode_bfloat16_float(n, x.data(), half.data(), 0, x.data(), 0.5, 1e30, nullptr);
    decode_bfloat16_float(n, half.data(), y.data(), 0.5);
    copy_half_float(n, x.data(), half.data(), 0.5, 65504, nullptr);
    copy_bfloat16_float(n, x.data(), half.data(), 0.5, 1e30, nullptr);
    std::vector<half_t> summed(n);
    const half_t *const terms[] = {half.data(), summed.data(), half.data()};
    sum_half_float(n, summed.data(), 3, terms);
    sum_bfloat16_float(n, summed.data(), 3, terms);
    const Member single = {x.data(), nullptr, 0, n, 0, WIDE, 0, 1.0, 1.0, 1.0};
    const Table only = {&single, 1, 0, (n + CHUNK - 1) / CHUNK};
    add_half_parts_float(only, 3, terms, y.data(), 0.5);
    add_bfloat16_parts_float(only, 3, terms, y.data(), 0.5);
    long long found = 0;
    count_nonfinite_float(n, x.data(), 1, &found);
    count_above_float(n, x.data(), 1, &found, 5);
    sum_counts_float(1, bad.data(), 1, &found);
    std::fill(x.begin(), x.end(), (real)0.5);
    std::vector<double> exact(n);
    std::vector<single_t> magnitudes((n + CHUNK - 1) / CHUNK);
    largest_magnitudes_float(n, x.data(), magnitudes.size(), magnitudes.data());
    for (int k = 0; k < 3; ++k)
      add_on_grid_float(n, x.data(), exact.data(), magnitudes.size(), magnitudes.data(), 2);
    round_sums_float(n, exact.data(), y.data());
    for (real one : y) bad[0] += one != (real)1.5;
    for (long long every : {1, 3})  // what is taken is put back
      for (long long format : {WIDE, HALF, BFLOAT16}) {
        const long long blocks = (n + every - 1) / every, size[] = {n};
        void *const stored = format == WIDE ? (void *)x.data() : half.data();
        const Member shared = {stored, y.data(), 0, blocks, 0, format, format == HALF, 1.0, 1.0, 1.0};
        const Table cut = {&shared, 1, 0, (blocks + CHUNK - 1) / CHUNK};
        std::vector<real> taken(blocks);
        take_share_float(cut, taken.data(), size, every, every - 1, 1234567890123);
        put_share_float(cut, taken.data(), size, every, every - 1, 1234567890123, 1, nullptr);
      }
    for (long long i = 0; i < n; ++i) bad[0] += x[i] != (real)0.5 || y[i] != (real)1.5;
    {
      const long long of = 5, rows = (n + of - 1) / of;  // all rows are taken, and put back
      std::vector<TensorRow> stretches(rows);
      std::vector<int> all_rows(rows);
      for (long long r = 0; r < rows; ++r) stretches[r] = {r * of, min(of, n - r * of)}, all_rows[r] = (int)r;
      std::vector<real> sign(SIGNS * of), sketch(SIGNS * rows), energy(rows), in_rows(rows * of);
      const long long *const at = (const long long *)stretches.data(), blocks = (rows + TOGETHER - 1) / TOGETHER;
      draw_signs_float(SIGNS * of, sign.data(), 7);
      sketch_rows_float(n, x.data(), 2 * rows, at, SIGNS * of, sign.data(), SIGNS * rows, sketch.data(), rows, blocks);
      row_energies_float(SIGNS * rows, sketch.data(), rows, energy.data());
      take_rows_float(n, x.data(), 2 * rows, at, rows, all_rows.data(), rows * of, in_rows.data(), of, nullptr);
      for (real one : x) bad[0] += one != 0;
      put_rows_float(n, x.data(), 2 * rows, at, rows, all_rows.data(), rows * of, in_rows.data(), of);
      for (real one : x) bad[0] += one != (real)0.5;
    }

    const long long k = (n + 1) / 2, room = n + CHUNK, whole[] = {0}, size[] = {n}, count[] = {k}, all[] = {0, n};
    std::vector<int> index(k), candidate(room);
    std::vector<real> entry(k), large(room), add(n, (real)0.5);
    long long place[2] = {0, 0};
    std::fill(x.begin(), x.end(), (real)0.5);
    encode_above_float(n, x.data(), n, add.data(), room, candidate.data(), large.data(), 2, place,
                       magnitude((real)1) - 1, nullptr);
    bad[0] += place[0] != n || place[1] != n;
    decode_sparse_float(n, x.data(), n, candidate.data(), large.data());
    encode_largest_float(n, x.data(), 0, nullptr, 0, nullptr, 0, 0, 2, all, 1, whole, size, count, k, index.data(),
                         entry.data(), room, candidate.data(), large.data(), nullptr);
    decode_sparse_float(n, x.data(), k, index.data(), entry.data());
    for (real one : x) bad[0] += one != 1;
    const int *const places[] = {index.data(), candidate.data()};
    const real *const values[] = {entry.data(), large.data()};
    const long long lengths[] = {k, 0};
    decode_all_float(n, y.data(), 2, places, values, lengths);
    const long long zeros[] = {0, 1};
    divide_by_senders_float(n, y.data(), 2, places, values, lengths, zeros, 2);
    for (long long i = 0; i < n; ++i) bad[0] += y[i] != (i < k ? 2 : 0);

    std::vector<byte_t> two((n + 3) / 4), one(4 + (n + 7) / 8);
    const byte_t *const twice[] = {two.data(), two.data()}, *const once[] = {one.data()};
    encode_two_bits_float(n, x.data(), add.data(), 1, two.size(), two.data(), 0.5, nullptr);
    decode_two_bits_float(n, y.data(), 2, twice, 0.5);
    for (long long i = 0; i < n; ++i) bad[0] += x[i] != 1 || y[i] != 1;
    const long long chunks = (n + CHUNK - 1) / CHUNK;
    const Member row = {x.data(), nullptr, 0, n, 0, WIDE, 0, 1.0, 1.0, 1.0};
    const Table alone = {&row, 1, 0, chunks};
    std::vector<double> sums(chunks);
    partial_magnitudes_float(alone, x.data(), add.data(), 1, sums.data(), nullptr);
    mean_of_partials_float(chunks, sums.data(), 1, (single_t *)one.data(), n, nullptr);
    encode_one_bit_float(alone, x.data(), x.data(), 0, one.data(), 4, 0, nullptr);
    decode_one_bit_float(alone, y.data(), 1, once, 4);
    for (long long i = 0; i < n; ++i) bad[0] += x[i] != 0 || y[i] != (real)1.5;

    for (long long block : {32, CHUNK}) {  // what is sent twice, and what stays twice, is twice the sum
      const long long scales = ((n + block - 1) / block + 1) / 2 * 4, begin[] = {0}, number[] = {0};
      std::vector<byte_t> eight((n + 3) / 4 * 4 + scales), four((n + 7) / 8 * 4 + scales);
      const byte_t *const eights[] = {eight.data(), eight.data()}, *const fours[] = {four.data(), four.data()};
      std::fill(x.begin(), x.end(), (real)0.5);
      encode_int8_float(alone, x.data(), add.data(), 1, eight.data(), begin, block, nullptr);
      decode_int8_float(alone, y.data(), 2, eights, begin, number, 2, block, 0);
      for (long long i = 0; i < n; ++i) bad[0] += y[i] + 2 * x[i] != 2;
      std::fill(x.begin(), x.end(), (real)7);
      encode_int4_float(alone, x.data(), x.data(), 0, four.data(), begin, block, nullptr);
      decode_int4_float(alone, y.data(), 2, fours, begin, number, 1, block, 1);
      for (long long i = 0; i < n; ++i) bad[0] += x[i] != 0;
      dither_int8_float(alone, y.data(), y.data(), 0, eight.data(), begin, block, 1234567890123, 5, nullptr);
      dither_int4_float(alone, y.data(), add.data(), 1, four.data(), begin, block, -7, 5, nullptr);
    }

    std::vector<real> velocity(n, 1), grown(n, 1);
    for (long long nesterov = 0; nesterov < 2; ++nesterov) {  // every entry comes to 2, and half of them leave
      std::fill(velocity.begin(), velocity.end(), (real)1);
      std::fill(x.begin(), x.end(), nesterov ? (real)0.5 : (real)1);
      encode_largest_float(n, x.data(), n, add.data(), n, velocity.data(), nesterov ? 2.0 / 3 : 0.5, nesterov, 2, all, 1,
                           whole, size, count, k, index.data(), entry.data(), room, candidate.data(), large.data(), nullptr);
      for (long long i = 0; i < n; ++i) bad[0] += x[i] != (i < k ? 0 : 2) || velocity[i] != 1;
      mask_float(n, velocity.data(), k, index.data());
      for (long long i = 0; i < n; ++i) bad[0] += velocity[i] != (i < k ? 0 : 1);
    }
    std::vector<ChunkOfX> chosen;  // half of every 64 elements, by bounds of the chunks before
    long long sent = 0;
    for (long long i = 0; i < n; i += 64) {
      const long long size = min(64, n - i), half = (size + 1) / 2;
      chosen.push_back({i, size, half, sent}), sent += half;
    }
    const long long *const cells = (const long long *)chosen.data(), spare = min(64, n) + 16;
    std::vector<int> where(sent), maybe(spare);
    std::vector<real> what(sent), large_ones(spare);
    for (long long nesterov = 0; nesterov < 2; ++nesterov) {
      std::fill(velocity.begin(), velocity.end(), (real)1);
      std::fill(x.begin(), x.end(), nesterov ? (real)0.5 : (real)1);
      encode_chunks_float(n, x.data(), n, add.data(), n, velocity.data(), nesterov ? 2.0 / 3 : 0.5, nesterov,
                          4 * chosen.size(), cells, sent, where.data(), what.data(), spare, maybe.data(),
                          large_ones.data(), nullptr);
      for (int i : where) bad[0] += x[i] != 0;
      for (real one : what) bad[0] += one != 2;
    }
    correct_momentum_float(alone, add.data(), velocity.data(), 0.5, 0, nullptr);
    correct_momentum_float(alone, add.data(), velocity.data(), 0.5, 1, nullptr);
    encode_whole_float(alone, add.data(), velocity.data(), nullptr);
    decay_momentum_float(alone, velocity.data(), grown.data(), 0.5, 0, 0.5, nullptr);
    decay_momentum_float(alone, velocity.data(), grown.data(), 0.5, 1, 0.5, nullptr);
    add_decay_float(alone, add.data(), 0.5);
    const double square[] = {4};
    clip_norms_float(alone, add.data(), square, 1);
    add_scaled_float(n, add.data(), grown.data(), 3);

    // all entries, at one lower bit for each, so that there is room for twice as many elements
    for (long long i = 0; i < n; ++i) candidate[i] = (int)(2 * i), large[i] = (real)(i % 3);
    for (long long format : {HALF, BFLOAT16, INT8, TWO_BITS}) {
      const long long words = (3 * n + 63) / 64, low = (n + 31) / 32, jumps = (n + CHUNK - 1) / CHUNK - (n > 0);
      const long long first = 16 + 8 * words, second = first + 4 * jumps, third = second + 4 * low;
      const long long end = third + (format == TWO_BITS ? (n + 15) / 16 * 4 : format == INT8 ? n : 2 * n);
      const long long bytes = end + (format == TWO_BITS ? (n + 255) / 256 * 4 : (n + 63) / 64);
      const Packing all = {1, format, 2 * n, n, 1, words, 16, first, second, third, end, bytes};
      std::vector<byte_t> payload(all.bytes);
      std::vector<real> kept(2 * n), entries(2 * n);
      std::vector<int> indices(2 * n);
      pack_planes_float(2 * n, kept.data(), n, candidate.data(), large.data(), all.bytes, payload.data(), &all);
      const byte_t *const both[] = {payload.data(), payload.data()};
      unpack_planes_float(2, both, 2 * n, indices.data(), entries.data(), &all);
      for (long long i = 0; i < 2 * n; ++i) bad[0] += indices[i] != 2 * (i % n) || kept[indices[i]] + entries[i] != (real)(i % n % 3);
      for (long long i = 0; i < all.bytes; ++i) payload[i] = i < 16 ? payload[i] : (byte_t)(167 * i);
      unpack_planes_float(2, both, 2 * n, indices.data(), entries.data(), &all);
      for (int i : indices) bad[0] += i < 0 || i >= 2 * n;
    }

    // the same in two sections, of which the second has one element and its entry
    std::vector<int> in_order(n + 1), indices(n + 1);
    std::vector<real> entries(n + 1), found_entries(n + 1);
    for (long long i = 0; i <= n; ++i) in_order[i] = (int)(2 * i), entries[i] = (real)(i % 3);
    const long long borders[] = {0, 2 * n, 2 * n + 1};
    long long begins[3];
    find_edges_float(3, borders, begins, n + 1, in_order.data());
    bad[0] += begins[0] != 0 || begins[1] != n || begins[2] != n + 1;
    for (long long format : {HALF, BFLOAT16, INT8, TWO_BITS}) {
      std::vector<real> kept(2 * n + 1);
      std::vector<Section> sections;
      long long at = 0;
      for (long long s = 0; s < 2; ++s) {
        const long long size = borders[s + 1] - borders[s], k = begins[s + 1] - begins[s], bits = !s;
        const long long words = (k + (size >> bits) + 63) / 64, low = 4 + 4 * ((k + CHUNK - 1) / CHUNK - (k > 0));
        const long long high = (low + 4 * ((k * bits + 31) / 32) + 7) / 8 * 8, first = high + 8 * words;
        const long long last = first + (format == TWO_BITS ? (k + 15) / 16 * 4 : format == INT8 ? k : 2 * k);
        const long long bytes = k ? last + (format == TWO_BITS ? (k + 255) / 256 * 4 : (k + 63) / 64) : 4;
        sections.push_back({{1, format, size, k, bits, words, high, 4, low, first, last, bytes},
                            borders[s], at, begins[s], n + 1, kept.data(), in_order.data(), entries.data()});
        at += s ? bytes : (bytes + 7) / 8 * 8;
      }
      std::vector<byte_t> payload(at);
      const long long *const table = (const long long *)sections.data(), turns = 2 * ((n + CHUNK - 1) / CHUNK + !n);
      const long long cells = 2 * sizeof(Section) / sizeof(long long);
      pack_sections_float(at, payload.data(), cells, table, turns);
      const byte_t *const each[] = {payload.data(), payload.data() + sections[1].at};
      for (bool damaged : {false, true}) {
        unpack_sections_float(2, each, n + 1, indices.data(), found_entries.data(), cells, table, turns);
        for (long long i = 0; i <= n && !damaged; ++i) bad[0] += indices[i] != 2 * i || kept[2 * i] != (real)(i % 3);
        for (long long i = 4; i < at; ++i) payload[i] = i / 4 == sections[1].at / 4 ? payload[i] : (byte_t)(167 * i);
      }
    }

    // what a damaged payload may become: indices in any order, and none
    std::reverse(candidate.begin(), candidate.begin() + n);
    if (n) candidate[n / 2] = -1;
    std::vector<real> wide(2 * n);
    const long long held[] = {0, n};
    decode_all_float(2 * n, wide.data(), 2, places, values, held);
    decode_sparse_float(2 * n, wide.data(), n, candidate.data(), large.data());
  }
  std::vector<real> same((SIDE + 1) * ENTRIES);  // transforms that change nothing
  for (long long side = 1; side <= SIDE; ++side)
    for (long long i = 0; i < side; ++i) same[side * ENTRIES + i * SIDE + i] = 1;
  for (long long rows : {1, 3, 15, 16, 17, SIDE})
    for (long long columns : {1, 15, 16, 17, SIDE}) {  // two tiles side by side
      const long long n = 2 * rows * columns;
      const TensorTile tiles[] = {{0, 2 * columns, rows, columns, 0}, {columns, 2 * columns, rows, columns, n / 2}};
      std::vector<real> x(n), coefficients(n), back(n);
      for (long long i = 0; i < n; ++i) x[i] = (real)i;
      const auto transform = [&](const std::vector<real> &from, std::vector<real> &to, long long inverse) {
        transform_tiles_float(n, from.data(), n, to.data(), 10, (const long long *)tiles, same.size(), same.data(),
                              same.size(), same.data(), 2, inverse);
      };
      transform(x, coefficients, 0);
      transform(coefficients, back, 1);
      bad[0] += coefficients[n / 2] != columns || back != x;
    }
  puts(bad[0] ? "encode and decode lost something" : "done");
}
