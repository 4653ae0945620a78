"""The largest entries of each chunk: which, how many, where shards begin, and the bytes of it all."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import laws
from distopt import DistOpt, Parameter, run_ranks
from distopt.comm import Metered
from distopt.compress import (
    BucketContext,
    Chunks,
    DeepGradientCompression,
    DeviceContext,
    ErrorFeedback,
    ExchangeContext,
    Packed,
    TopK,
)
from distopt.exchange import two_phases
from distopt.exchange.entry_counts import DeviceCounts
from distopt.exchange.sharding import cut_for
from distopt.exchange.step_traffic import step_messages
from distopt.kernels.layout import BucketLayout
from distopt.lab.models import resnet50
from distopt.optim import SGD

SIZES = st.lists(st.sampled_from([0, 1, 5, 63, 64, 65, 100, 128, 700]), min_size=1, max_size=5)
VALUES = np.array([0.0, -0.0, 1.0, -1.0, 0.25, 1e-30, np.inf, -np.inf, np.nan, 7.0])


def bucket(sizes, dtype):
    """A layout with gaps, as a plan has it."""
    room = np.array([-(-n // 16) * 16 for n in sizes])
    return BucketLayout([f"p{k}" for k in range(len(sizes))], [(n,) for n in sizes], np.cumsum(room) - room, dtype)


def filled(layout, seed, few):
    rng, x = np.random.default_rng(seed), np.zeros(layout.extent, layout.dtype)
    for row, size in enumerate(layout.records["size"]):
        layout.view(x, row)[...] = rng.choice(VALUES, size) if few else rng.standard_normal(size)
    return x


def chosen(x, layout, k, of):
    """The indices by the definition: of each chunk the first of its entries by falling magnitude, then by index."""
    found = []
    for offset, size in zip(layout.records["offset"], layout.records["size"], strict=True):
        for begin in range(offset, offset + size, of):
            part = np.abs(x[begin : min(begin + of, offset + size)].astype(np.float64))
            by_size = np.lexsort((np.arange(part.size), -np.nan_to_num(part, nan=0.0), ~np.isnan(part)))
            found += sorted((begin + by_size[: -(-k * part.size // of)]).tolist())
    return np.array(found, np.int32)


@settings(max_examples=60, deadline=None)
@given(
    sizes=SIZES,
    k=st.integers(1, 64),
    of=st.sampled_from([64, 128, 256]),
    few=st.booleans(),
    dtype=st.sampled_from(["float32", "float64"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_largest_of_each_chunk_leave_and_ties_go_to_the_lowest_index(sizes, k, of, few, dtype, seed):
    layout = bucket(sizes, dtype)
    memory, add = filled(layout, seed, few), filled(layout, seed + 1, few)
    with np.errstate(invalid="ignore"):
        before = memory + add
    index = chosen(before, layout, k, of)
    context = ExchangeContext(bucket=BucketContext(layout))
    payload = ErrorFeedback(Chunks(k, of)).compress(add, {"residual": memory}, context)
    split = index.size * before.itemsize
    np.testing.assert_array_equal(payload[split : split + 4 * index.size].view(np.int32), index)
    np.testing.assert_array_equal(payload[:split].view(dtype), before[index])
    assert payload.nbytes == Chunks(k, of).payload_bytes(layout.extent, before.itemsize, layout)
    before[index] = 0
    np.testing.assert_array_equal(memory, before)


@pytest.mark.parametrize("scales", [[1.0] * 8, [1e-6, 1e3, 1.0, 0.0, 0.0, 1e30, 1.0, 1e-40]], ids=["even", "jumping"])
@pytest.mark.parametrize("k", [1, 64, 700, 4096])
def test_bounds_that_are_taken_from_chunks_before_change_nothing(k, scales):
    """Magnitudes jump from chunk to chunk, so that bounds are too high, and too low."""
    x = np.concatenate([s * np.random.default_rng(1).standard_normal(4096) for s in scales] * 3).astype(np.float32)
    expected = np.sort(np.argsort(-np.abs(x.reshape(-1, 4096)), 1, kind="stable")[:, :k], 1)
    index = (expected + 4096 * np.arange(24)[:, None]).ravel()
    payload = Chunks(k).compress(x.copy(), {}, ExchangeContext())
    np.testing.assert_array_equal(payload[4 * index.size :].view(np.int32), index)
    np.testing.assert_array_equal(payload[: 4 * index.size].view(np.float32), x[index])


@settings(max_examples=30, deadline=None)
@given(n=st.integers(0, 600), k=st.integers(1, 64), seed=st.integers(0, 99))
@pytest.mark.parametrize("value", ["exact", "float16", "bfloat16", "int8", "2bit"])
def test_what_is_sent_and_what_stays_add_up(value, n, k, seed):
    x = np.random.default_rng(seed).standard_normal(n).astype(np.float32)
    compressor = Chunks(k, 64) if value == "exact" else Packed(Chunks(k, 64), value=value)
    laws.conservation(compressor, x, ulps=1 if value in ("int8", "2bit") else 0)


def test_a_refused_step_sends_nothing_and_keeps_the_residual():
    x, residual = np.ones(200, np.float32), np.full(200, 2, np.float32)
    context = ExchangeContext(device=DeviceContext(np.ones(1, np.int64)))
    payload = ErrorFeedback(Chunks(8, 64)).compress(x, {"residual": residual}, context)
    assert (payload[4 * 25 :].view(np.int32) == -1).all()
    assert (residual == 2).all()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"k": 0}, ValueError),
        ({"k": 65, "of": 64}, ValueError),
        ({"k": 1.5}, TypeError),
        ({"of": 100}, ValueError),
        ({"of": 0}, ValueError),
        ({"reselect": 1}, TypeError),
    ],
)
def test_impossible_chunks_are_refused(arguments, error):
    with pytest.raises(error):
        Chunks(**arguments)


def test_another_density_is_another_k():
    assert repr(Chunks().at_density(0.001)) == "Chunks(5, of=4096)"
    assert repr(Packed(Chunks(reselect=False)).at_density(1).selector) == "Chunks(4096, of=4096, reselect=False)"
    assert Chunks().at_density(Chunks().density).k == 64
    with pytest.raises(ValueError, match="density"):
        Chunks().at_density(0)


@settings(max_examples=40, deadline=None)
@given(sizes=SIZES, ranks=st.integers(2, 9), k=st.integers(1, 64), reselect=st.booleans())
def test_shards_begin_where_chunks_do_and_their_entries_are_known(sizes, ranks, k, reselect):
    codec = Packed(Chunks(k, 64, reselect)).sharded()
    layouts = [bucket(sizes, "float32"), bucket([1, *sizes], "float32")]
    found = [0, 0]
    for pieces in cut_for(codec, layouts, ranks, (1, 2, 3)).of_bucket:
        for piece in pieces:
            starts = layouts[piece.bucket].records["offset"]
            assert (piece.start - starts[starts <= piece.start][-1]) % 64 == 0
            found[piece.bucket] += codec.known_entries(piece, summed=False)
            assert codec.known_entries(piece, True) == (codec.known_entries(piece, False) if reselect else None)
    assert found == [Chunks(k, 64).counts(layout.records["size"]).sum() for layout in layouts]


class Silent:
    """A rank of several that must not tell the others anything."""

    size, rank = 4, 1

    @property
    def control(self):
        raise AssertionError("a rank was told what it knows")


def test_nobody_is_told_how_many_entries_there_are_unless_all_of_a_sum_are_sent():
    layouts = [bucket([100, 5000], "float32")]
    for reselect in (True, False):
        codec = Packed(Chunks(8, 64, reselect)).sharded()
        shards = cut_for(codec, layouts, 4, ())
        told = DeviceCounts(codec, [4], shards, Silent())
        told.tell(np.zeros(0, np.int64))
        mine = shards.of_owner[1]
        assert told.lengths == [sum(codec.payload_bytes(codec.known_entries(p, False), p, 4, False) for p in mine)] * 4
        if reselect:
            told.tell_sums([codec.known_entries(piece, True) for piece in mine])
        else:
            with pytest.raises(AssertionError, match="told"):
                told.tell_sums([7 for _ in mine])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("exchange", ["gather", "two_phase"])
def test_the_ledger_is_the_forecast(exchange, packed):
    compressor = ErrorFeedback(Packed(Chunks(4, 64), value="2bit") if packed else Chunks(4, 64))
    shapes = [(40, 50), (7,), (1000,), ()]

    def main(comm):
        params = [Parameter(f"p{k}", np.zeros(shape, np.float32)) for k, shape in enumerate(shapes)]
        opt = DistOpt(SGD(0.1), Metered(comm), threshold=1500, broadcast=False)
        opt.step(list(laws.pairs(comm, params, 0)), compressor, False, exchange)
        plan = [b.gradients for b in opt.engine.store.buckets]
        messages = step_messages(plan, compressor, comm.size, False, exchange)
        return opt.communicator.ledger.total()["sent"], sum(message.sent(comm.size) for message in messages)

    sent, forecast = zip(*run_ranks(3, main), strict=True)
    assert sum(sent) == pytest.approx(sum(forecast), rel=1e-12)


def test_a_payload_and_its_forecast_consist_of_the_same():
    layout, x = bucket([100, 700], "float32"), np.ones(812, np.float32)
    context = ExchangeContext(bucket=BucketContext(layout))
    for compressor in (Chunks(4, 64), Packed(Chunks(4, 64), value="int8")):
        found = compressor.breakdown(compressor.compress(x.copy(), {}, context), x, context)()
        assert found[:3] == compressor.breakdown(None, x, context)()[:3]
        assert found.counts.tolist() == [7, 44]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("ranks", range(2, 33))
def test_two_bits_of_64_in_4096_are_200_times_below_dense_and_190_times_on_the_wire(ranks):
    compressor, layouts = ErrorFeedback(Packed(Chunks(), value="2bit")), []
    shapes = dict(reversed(resnet50()))
    room, names, sizes = 0, [], []
    for name, shape in shapes.items():
        names, sizes, room = [*names, name], [*sizes, int(np.prod(shape))], room + int(np.prod(shape))
        if room > 2**21 or name == list(shapes)[-1]:
            offsets = np.cumsum([0, *(-(-n // 16) * 16 for n in sizes[:-1])])
            layouts.append(BucketLayout(names, [(n,) for n in sizes], offsets, np.float32))
            room, names, sizes = 0, [], []
    dense = 4 * sum(int(np.prod(shape)) for shape in shapes.values())
    payload = sum(compressor.payload_bytes(layout.extent, 4, layout) for layout in layouts)
    sent = sum(message.sent(ranks) for message in step_messages(layouts, compressor, ranks))
    assert dense / payload > 200
    assert 2 * dense * (ranks - 1) / ranks / sent > 190
    assert (two_phases("auto", compressor, layouts, ranks) is not None) == (ranks > 2)


def test_all_of_every_chunk_is_the_dense_sum_to_the_bit():
    def main(comm):
        found = []
        for use in (Chunks(64, 64), ErrorFeedback(Chunks(64, 64, reselect=False)), None):
            params = laws.parameters(rank=0)
            opt = DistOpt(SGD(0.1), comm, threshold=60, deterministic=True)
            for step in range(3):
                opt.step(laws.pairs(comm, params, step), use, False, "two_phase")
            found.append(laws.digest(params))
        return found

    for one, exact, dense in run_ranks(3, main):
        assert one == exact == dense


def test_deep_gradient_compression_takes_chunks_and_warms_up():
    dgc = DeepGradientCompression(Chunks(8, 64), 0.5, warmup=[0.5, 1 - 1 / 8], steps_per_epoch=1, exclude_1d=False)
    assert [repr(dgc.at_step(k).selector) for k in (0, 1, 5)] == [f"Chunks({k}, of=64)" for k in (32, 8, 8)]

    def main(comm):
        params = laws.parameters(rank=0)
        opt = DistOpt(SGD(0.1), comm, threshold=60)
        for step in range(3):
            opt.step(laws.pairs(comm, params, step), dgc, False, "two_phase")
        return laws.digest(params)

    assert len(set(run_ranks(3, main))) == 1


def test_chunks_of_whole_tensors_are_top_k_per_tensor():
    x = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    both = [c.compress(x.copy(), {}, ExchangeContext()) for c in (Chunks(41), TopK(0.01, per_tensor=True))]
    assert both[0].tobytes() == both[1].tobytes()
