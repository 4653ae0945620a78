"""Forecasts against ledgers of ranks that send; predictions and advice against arithmetic by hand."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_half_in_shared_memory import Apart

import distopt
import laws
from distopt import DistOpt, run_ranks, simulate, volume
from distopt.comm import LocalCommunicator, Logical, Metered
from distopt.compress import DeepGradientCompression, Half, Packed
from distopt.lab import (
    DEFAULT,
    Bounds,
    Compute,
    Network,
    Question,
    advise,
    buckets,
    cost,
    forecast,
    measure,
    mode,
    modes,
    network,
    observed,
    sendings,
    shapes,
    summary,
    wire,
)
from distopt.lab.break_even import bandwidth, density, pays, ranks
from distopt.lab.cost import LINKS, Link
from distopt.lab.fit import Fit, Line, Segment
from distopt.optim import SGD

FIXED = "dense half bfloat16 int8 int4 1bit 2bit=0.25 topk=0.1 topk=0.9 topk=0.05+per-tensor".split()
FIXED += ["topk=0.2+packed:int8", "topk=0.2+packed:2bit"]
FIXED += "dgc=0.1 dgc=0.02+1d dgc=0.3+packed dgc=1.0".split()
COUNTS = "payload", "values", "indices", "sent", "received", "sent_between", "received_between"
DENSE = mode("dense")


def written(ledger):
    """Messages of gradients: bucket, verb and bytes."""
    gradients_sent = [e for e in ledger.entries if e.phase == "gradients"]
    return sorted(((e.bucket, e.verb, *(getattr(e, name) for name in COUNTS)) for e in gradients_sent), key=str)


def plan_of(sizes, threshold, dtype="float32"):
    named = [(f"p{k}", shape) for k, shape in enumerate(sizes)]
    return buckets(named, threshold, [dtype] * len(named))


TWO = "two_phase"
SIZES = st.lists(st.lists(st.integers(0, 12), max_size=3).map(tuple), min_size=1, max_size=6)


@given(
    name=st.sampled_from(FIXED),
    size=st.integers(1, 9),
    sizes=SIZES,
    threshold=st.sampled_from([0, 20, 200, 10**6]),
    dtype=st.sampled_from(["float16", "float32", "float64"]),
    per_node=st.integers(1, 4),
    break_even=st.booleans(),
)
def test_a_forecast_is_the_ledger_of_virtual_ranks(name, size, sizes, threshold, dtype, per_node, break_even):
    chosen, params = mode(name), laws.parameters(sizes, dtype)
    hosts = [rank // per_node for rank in range(size)]
    sim = simulate(size, SGD(0.1), threshold=threshold, hosts=hosts)
    sim.step(lambda rank: laws.pairs(laws.VirtualRank(rank, size), params, 0), chosen.compressor, break_even=break_even)
    plan = plan_of([p.data.shape for p in params], threshold, dtype)
    assert written(volume.step_ledger(plan, chosen, size, per_node, break_even)) == written(sim.ledger)
    assert forecast(plan, chosen, size, per_node, break_even) == summary(sim.ledger, plan, chosen, 1)
    assert observed(sim.ledger, plan, chosen, 1) == sendings(plan, chosen, size, break_even)


@given(
    mode_and_block=st.sampled_from([("2bit", 1), ("1bit", 1), ("topk=0.01", 100), ("topk=0.01+packed:int8", 100)]),
    size=st.integers(1, 64),
    blocks=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    per_node=st.integers(1, 4),
)
def test_a_forecast_of_two_phases_is_the_ledger_of_virtual_ranks(mode_and_block, size, blocks, per_node):
    """To the byte: codes whatever they are, entries that are spread evenly, and are the same on all ranks."""
    name, block = mode_and_block
    chosen, shapes = mode(name), [(block * n,) for n in blocks]
    params = laws.parameters(shapes)
    for p in params:
        p.data[:] = 0
    grads = [np.zeros(shape, np.float32) for shape in shapes]
    for g, n in zip(grads, blocks, strict=True):
        g[block - 1 :: block] = np.arange(1, n + 1)
    hosts = [rank // per_node for rank in range(size)]
    sim, plan = simulate(size, SGD(0.1), threshold=0, hosts=hosts), plan_of(shapes, 0)
    sim.step(lambda rank: [(p, g.copy()) for p, g in zip(params, grads, strict=True)], chosen.compressor, False, TWO)
    ledger = volume.step_ledger(plan, chosen, size, per_node, False, TWO)
    assert written(ledger) == written(sim.ledger)
    assert forecast(plan, chosen, size, per_node, False, TWO) == summary(sim.ledger, plan, chosen, 1)
    assert observed(sim.ledger, plan, chosen, 1) == sendings(plan, chosen, size, False, TWO)


@pytest.mark.parametrize("size", [2, 8, 32])
def test_a_forecast_of_two_phases_is_close_to_the_ledger_of_any_gradients(size):
    shapes = [(300, 200), (100,), (7, 500)]
    params = laws.parameters(shapes)
    for name in ("topk=0.01+packed", "dgc=0.01+packed"):
        sim, plan = simulate(size, SGD(0.1)), plan_of(shapes, 1 << 21)
        step = lambda rank: laws.pairs(laws.VirtualRank(rank, size), params, 0)  # noqa: E731
        sim.step(step, mode(name).compressor, exchange=TWO)
        sent = summary(sim.ledger, plan, mode(name), 1).sent
        assert forecast(plan, mode(name), size, exchange=TWO).sent == pytest.approx(sent, rel=0.04)


@pytest.mark.parametrize("name", FIXED)
def test_a_forecast_is_the_ledger_of_ranks(name):
    """Of threads, whose messages a counting transport has seen byte for byte (test_ledger.py)."""
    sizes = [(40, 50), (7,), (3, 5, 9), (100,), (0,), ()]

    def main(comm):
        metered, params = Metered(comm), laws.parameters(sizes)
        opt = DistOpt(SGD(0.05), metered, threshold=200)
        opt.step(laws.pairs(comm, params, 0), mode(name).compressor)
        return metered.ledger

    ledger = volume.step_ledger(plan_of(sizes, 200), mode(name), 3, per_node=3)
    assert written(ledger) == written(run_ranks(3, main)[0])


def of_processes(processes, logical, shapes, pairs, compressor, *how):
    """The ledgers of processes, without memory that they share, that make one step of logical ranks."""

    def main(comm):
        metered, params = Metered(Logical(Apart(comm), logical)), laws.parameters(shapes)
        opt = DistOpt(SGD(0.05), metered, threshold=200)
        opt.step(lambda rank: pairs(rank, params), compressor, *how)
        return metered.ledger

    return run_ranks(processes, main)


@pytest.mark.parametrize("processes", [1, 5])
@pytest.mark.parametrize("name", FIXED)
def test_a_forecast_of_logical_ranks_is_the_ledger_of_their_first_process(name, processes):
    shapes, chosen, how = [(40, 50), (7,), (3, 5, 9), (100,), (0,), ()], mode(name), (True, "gather")
    pairs = lambda rank, params: laws.pairs(laws.VirtualRank(rank, 12), params, 0)  # noqa: E731
    ledgers, plan = of_processes(processes, 12, shapes, pairs, chosen.compressor, *how), plan_of(shapes, 200)
    assert written(volume.step_ledger(plan, chosen, processes, processes, *how, 12)) == written(ledgers[0])
    of_each = [summary(ledger, plan, chosen, 1) for ledger in ledgers]
    found = forecast(plan, chosen, processes, processes, *how, 12)
    assert found == of_each[0]._replace(fallen=forecast(plan, chosen, 12, 12, *how).fallen)
    assert of_each[0].payload == max(found.payload for found in of_each)


@pytest.mark.parametrize("processes", [1, 5])
@pytest.mark.parametrize("name", ["2bit", "1bit", "int8", "topk=0.01", "topk=0.01+packed:int8"])
def test_a_forecast_of_logical_ranks_in_two_phases_is_the_ledger_of_their_first_process(name, processes):
    """Entries are spread evenly, as in the test of virtual ranks."""
    shapes, chosen = [(1200,), (500,), (7200,)], mode(name)
    grads = [np.where(np.arange(n) % 100 == 99, np.arange(n), 0).astype(np.float32) for (n,) in shapes]

    def pairs(rank, params):
        return [(p, g.copy()) for p, g in zip(params, grads, strict=True)]

    ledgers = of_processes(processes, 12, shapes, pairs, chosen.compressor, False, TWO)
    ledger = volume.step_ledger(plan_of(shapes, 200), chosen, processes, processes, False, TWO, 12)
    assert written(ledger) == written(ledgers[0])


def test_a_forecast_has_the_bytes_worked_out_by_hand():
    """A bucket of 1000 and one of 600, with 16 elements to each 64 bytes, on four ranks of two nodes."""
    plan = buckets([("a", (1000,)), ("b", (20, 25)), ("c", (100,))], 900)
    assert [(b.names, b.extent) for b in plan] == [(("a",), 1000), (("b", "c"), 612)]
    prediction = forecast(plan, DENSE, 4, 2)
    assert (prediction.payload, prediction.dense, prediction.sent) == (4 * 1612, 4 * 1612, 2 * 3 * 1612)
    assert prediction.between == 2 * 2 * 1612
    prediction = forecast(plan, mode("topk=0.01"), 4)
    assert (prediction.payload, prediction.values, prediction.indices) == (8 * 16, 4 * 16, 4 * 16)
    assert (prediction.sent, prediction.fallen) == (3 * 8 * 16, ())
    prediction = forecast(plan, mode("dgc=0.01"), 4)  # vectors stay whole, one of them is a bucket
    assert prediction.payload == 4 * 1000 + 4 * 100 + 8 * 5
    assert (prediction.fallen, prediction.indices) == ((), 4 * 5)
    assert forecast(plan, mode("topk=0.9"), 4).fallen == (0, 1)
    assert forecast(plan, mode("topk=0.9"), 4, break_even=False).fallen == ()


def test_bytes_of_a_threshold_are_the_mean_of_recorded_steps():
    """Two steps, of 3 and of 1 entries above it: 24 and 8 bytes and their lengths."""
    p = laws.parameters([(100,)])[0]
    sim = simulate(2, SGD(0.1))
    for count in (3, 1):
        grad = np.zeros(100, np.float32)
        grad[:count] = 2
        sim.step(lambda rank: [(p, grad.copy())], mode("threshold=1").compressor)  # noqa: B023
    plan = plan_of([(100,)], 10**6)
    total = summary(sim.ledger, plan, mode("threshold=1"), 2)
    assert (total.payload, total.sent) == (8 + 16, 8 + 16)
    (sent,) = observed(sim.ledger, plan, mode("threshold=1"), 2)
    assert (sent.elements, sent.decompressed) == (100, 32)
    assert sorted(sent.collectives) == [("all_gather", 16), ("all_gather", 32)]
    with pytest.raises(
        ValueError, match=r"mode must send as much whatever the gradients are, got threshold=1; .*--gradients"
    ):
        forecast(plan, mode("threshold=1"), 2)


# ------------------------------------------------------------------------------------------------------------- modes


def test_names_of_modes_are_parsed_into_compressors():
    assert [m.name for m in modes("dense,topk=0.1+packed:int8")] == ["dense", "topk=0.1+packed:int8"]
    assert all(mode(name).name == name for name in (*FIXED, *DEFAULT))
    inner = mode("topk=0.1+packed:int8+per-tensor").compressor.compressor
    assert isinstance(inner, Packed)
    assert (inner.value, inner.density, inner.selector.per_tensor) == ("int8", 0.1, True)
    dgc = mode("dgc=0.01+1d").compressor
    assert isinstance(dgc, DeepGradientCompression)
    assert (dgc.exclude_1d, dgc.selector.density) == (False, 0.01)
    assert isinstance(mode("bfloat16").compressor, Half)
    assert mode("2bit").compressor.compressor.threshold == 0.5


def test_a_mode_can_be_given_another_density():
    for name in ("topk", "topk=0.3", "dgc+packed", "dgc=0.2+packed:int8+1d"):
        m = mode(name)
        assert m.at_density(0.125).density == 0.125
        assert m.at_density(0.125).kind == m.kind
        assert (m.at_density(1e-7).density, m.at_density(1.0).density) == (1e-7, 1.0)
    assert mode("2bit=0.1").density is None


def test_modes_of_chunks_say_how_many_of_how_many():
    m = mode("chunks=5/256+packed:2bit")
    assert repr(m.compressor) == "ErrorFeedback(Packed(Chunks(5, of=256), index='elias-fano', value='2bit'))"
    assert (m.kind, m.density) == ("chunks/256+packed:2bit", 5 / 256)
    assert [m.at_density(d).name for d in (1e-7, 5 / 256, 0.02, 1)] == [
        f"chunks={k}/256+packed:2bit" for k in (1, 5, 6, 256)
    ]
    assert m.at_density(1).kind == m.kind
    assert mode("chunks").compressor.compressor.density == 1 / 64
    for wrong in ("chunks=64", "chunks=0.01", "chunks=65/64", "chunks=1/100", "chunks+per-tensor", "chunks=0/64"):
        with pytest.raises(ValueError, match="chunks"):
            mode(wrong)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dnse", "there is no mode 'dnse': .* did you mean dense?"),
        ("", "there is no mode ''"),
        ("topk=", "mode topk must be with a number, as topk=0.01, got 'topk='"),
        ("topk=nan", "must be with a number"),
        ("topk=2", r"mode topk=2: density must be in \(0, 1\], got 2"),
        ("threshold=-1", "mode threshold=-1: magnitude must be finite and at least 0"),
        ("2bit=0", "mode 2bit=0: threshold must be positive"),
        ("half=2", "mode half must be without a number"),
        ("topk=0.1+pakced", "there is no option of topk 'pakced': .* did you mean packed?"),
        ("dense+packed", "there is no option of dense 'packed': there are none"),
        ("dgc=0.1+1d:x", "there is no option of dgc '1d:x'"),
        ("dgc=0.1+packed:int7", "mode dgc=0.1.packed:int7: value must be one of float16"),
        ("dgc=0.1+packed+packed:int8", "options of a mode must be different"),
        ("dense,half,dense", "modes must be different, got dense twice"),
    ],
)
def test_unknown_names_of_modes_are_refused(text, words):
    with pytest.raises(ValueError, match=words):
        modes(text)


def test_modes_must_be_texts_and_at_least_one():
    with pytest.raises(TypeError, match="a mode must be a text, got 3"):
        modes([3])
    with pytest.raises(ValueError, match="at least one"):
        modes([])


# ------------------------------------------------------------------------------------------------------------ shapes


@pytest.mark.parametrize("text", ['{"a": [2, 3], "b": []}', '[["a", [2, 3]], ["b", []]]'])
def test_shapes_are_read_from_a_json_file(text, tmp_path):
    file = tmp_path / "shapes.json"
    file.write_text(text)
    assert shapes(file) == shapes(str(file)) == [("a", (2, 3)), ("b", ())]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("{}", "for one tensor at least"),
        ("7", "must hold"),
        ('["a"]', "entry 0 must be a name and a shape, got 'a'"),
        ('[["a", [1]], ["", [1]]]', "entry 1 must be a name and a shape"),
        ('{"a": [3, -1]}', r"the shape of a must be a list of whole numbers of at least 0, got \[3, -1\]"),
        ('{"a": [1.5]}', "the shape of a must be a list of whole numbers"),
        ('{"a": [true]}', "the shape of a must be a list of whole numbers"),
        ('{"a": "12"}', "the shape of a must be a list of whole numbers"),
        ('{"a": 12}', "the shape of a must be a list of whole numbers"),
        ('{"a": [1], "a": [2]}', "names must be unique, got a 2 times"),
        ('{"a": [1099511627777]}', r"a must be of at most 2,147,483,584 elements, got 1,099,511,627,777"),
        (
            json.dumps({f"{k}": [2**31 - 64] for k in range(513)}),
            r"a model must be of 1 to 2\^40 elements, got 1,101,659,078,592",
        ),
        ('{"a": {}}', "the shape of a must be a list of whole numbers of at least 0"),
        ('{"a": [0]}', "got 0"),
    ],
)
def test_files_that_have_no_shapes_are_refused(text, words, tmp_path):
    file = tmp_path / "shapes.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=words) as caught:
        shapes(file)
    assert str(file) in str(caught.value)


def test_unknown_models_are_refused_with_a_suggestion():
    with pytest.raises(ValueError, match=r"there is no model 'resnet': .* did you mean resnet50\?"):
        shapes("resnet")
    with pytest.raises(ValueError, match="threshold must be at least 0, got -1"):
        buckets(shapes("lstm"), -1)


# ------------------------------------------------------------------------------------------------------- predictions


def test_predicted_seconds_have_the_values_worked_out_by_hand():
    """Two ranks, no latency, 100 bytes a second: dense 4 n, half 2 n, top-K of 1 % 8 ceil(n / 100) bytes each way."""
    plan = buckets([("a", (1000,)), ("b", (600,))], 0)
    wire = Network(Link("slow", 0.0, 100.0, 0.0))
    q = Question(plan, 2, wire, computes={("topk", 0.01): Compute(0.001, 0.5)})
    assert q.predict(DENSE) == (64, 0, 64)
    assert q.predict(mode("half")).wire == 32
    prediction = q.predict(mode("topk=0.01"))
    assert prediction.wire == pytest.approx(8 * 16 / 100)
    assert prediction.compute == pytest.approx(0.001 * 1600 + 0.5 * 2 * 8 * 16)
    assert prediction.exchange == pytest.approx(prediction.wire + prediction.compute)


def test_buckets_sent_during_the_backward_pass_hide_after_it():
    """Gradients of a come after 1000 / 1600 of it, and both buckets are sent one after the other, 40 and 24 s."""
    plan = buckets([("a", (1000,)), ("b", (600,))], 0)
    q = Question(plan, 2, Network(Link("slow", 0.0, 100.0, 0.0)))
    for backward, step in ((16, 10 + 64), (160, 160 + 24), (80, 50 + 40 + 24), (0, 64)):
        assert q._replace(backward=backward).predict(DENSE).exchange == pytest.approx(step)
        entries = q._replace(backward=backward).predict(mode("topk=0.01"))  # 0.8 of the bytes, and a residual
        assert backward <= entries.exchange < backward + entries.wire or backward == 0
        owners = q._replace(backward=backward, ranks=3, exchange="two_phase").predict(mode("topk=0.01"))
        assert owners.exchange == pytest.approx(backward + owners.wire)  # which have all buckets together


def test_ranks_of_a_node_share_its_link():
    link, inside = Link("between", 1.0, 100.0, 0.0), Link("inside", 0.1, 1000.0, 0.0)
    wire = Network(link, 2, inside)
    assert wire.seconds("all_gather", 800, 2) == pytest.approx(0.1 + 400 / 1000)
    between = 2 * 1.0 + 400 * 3 / 4 / 50  # half of it to three nodes, two steps that double, half of the link
    assert wire.seconds("all_gather", 800, 8) == pytest.approx(between + 0.1 + 400 / 1000)
    summed = 2 * (0.1 + 400 / 1000) + 1.0 + 400 / 50  # between two nodes all of it at once, there and back
    assert wire.seconds("all_reduce", 800, 4) == pytest.approx(summed)
    with pytest.raises(ValueError, match="ranks must fill nodes of 2, got 3"):
        wire.seconds("all_reduce", 800, 3)
    with pytest.raises(ValueError, match="verb must be all_reduce, all_gather or all_to_all where nodes"):
        wire.seconds("broadcast", 800, 4)


@pytest.mark.thorough
def test_measure_times_compression_and_decompression():
    """By a clock of our own: each call takes a second, so nothing depends on the number of payloads."""
    ticks = iter(range(10**6))
    measured = measure(mode("topk=0.01"), lambda: next(ticks))
    assert measured == (pytest.approx(2 / 2**23), 0)
    half = measure(mode("half"), lambda: next(ticks))
    assert half == (pytest.approx(1 / 2**23), pytest.approx(1 / 2**24))
    assert measure(DENSE) == (0, 0)
    assert measure(mode("dgc=1"), lambda: next(ticks)) == (pytest.approx(1 / 2**23), 0), "nothing is gathered"


def test_measure_tells_seconds_per_element_from_seconds_per_byte(monkeypatch):
    """By a clock of a second for each byte that is decompressed, and ten for each element compressed."""
    now = [0.0]

    def compress(self, x, state, context):
        now[0] += 10 * x.size
        return np.zeros(1000, np.uint8)

    def decompress_all(compressor, payloads, out, context):
        now[0] += sum(p.nbytes for p in payloads)

    monkeypatch.setattr("distopt.compress.ErrorFeedback.compress", compress)
    monkeypatch.setattr("distopt.compress.ErrorFeedback.decompress_all", decompress_all)
    assert measure(mode("topk=0.01"), lambda: now[0]) == pytest.approx((10, 1))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["topk=0.1", "dgc=0.1+packed", "1bit", "half"])
def test_measured_compression_takes_a_plausible_time(name):
    measured = measure(mode(name))
    assert 1e-11 < measured.per_element < 1e-6


def test_advise_measures_the_densities_asked_for_and_some_between():
    """Those asked for, and some more between which compute is known; others have none."""
    seen = []
    advise(MODEL, 8, network("1GbE"), "half,topk=0.02", measure=lambda m: seen.append(m.name) or Compute())
    assert sorted(seen) == ["dense", "half", "topk=0.001", "topk=0.01", "topk=0.02", "topk=0.1", "topk=0.5"]


def test_compute_is_interpolated_between_measured_densities():
    computes = {("dgc", 0.001): Compute(1.0, 4.0), ("dgc", 0.1): Compute(3.0, 2.0), ("topk", 0.1): Compute(9.0, 9.0)}
    q = Question([], 2, network("10GbE"), computes=computes)
    assert q.compute(mode("dgc=0.0505")) == pytest.approx((2.0, 3.0))
    assert q.compute(mode("dgc=0.0001")) == pytest.approx((1.0, 4.0))
    assert q.compute(mode("dgc=0.5+packed")) == (0, 1e-10), "nothing but adding up"


# ------------------------------------------------------------------------------------------------------------ advice

MODEL = buckets(shapes("alexnet")[::-1])
TWO_BUCKETS = buckets(shapes("alexnet")[::-1], 1 << 25)
COMPUTES = {
    ("half", 1.0): Compute(1e-9, 1e-10),
    ("topk", 0.01): Compute(1e-9, 3e-10),
    ("dgc", 0.001): Compute(2e-9, 2e-9),
    ("2bit", 1.0): Compute(1e-9, 5e-10),
}


@pytest.mark.thorough
@given(
    name=st.sampled_from(["half", "topk=0.01", "dgc=0.001", "2bit"]),
    size=st.integers(2, 200),
    link=st.sampled_from(["1GbE", "10GbE", "100GbE", "NVLink", "40Mbit/s"]),
    backward=st.sampled_from([0.0, 0.01, 0.3]),
)
def test_compression_pays_just_below_a_break_even_and_not_just_above_it(name, size, link, backward):
    """A prediction just below a break-even and one just above it say which is faster."""
    m = mode(name)
    q = Question(TWO_BUCKETS, size, network(link), backward, COMPUTES)
    dense = q.predict(DENSE).exchange
    edge = density(q, m)
    if edge is not None and 0 < edge < 1:
        assert q.predict(m.at_density(edge)).exchange < dense <= q.predict(m.at_density(edge * 1.0002)).exchange
    if edge == 0:
        assert q.predict(m.at_density(1e-7)).exchange >= dense
    rate = bandwidth(q, m)
    below, above = (q._replace(wire=q.wire.at_bandwidth(b)) for b in (rate or 1e3, 1.0002 * (rate or 1e3)))
    assert pays(below, m) == (rate > 0)
    assert not pays(above, m) or rate == math.inf
    prediction = ranks(q, m)
    assert any(b.first <= size <= (b.last or size) for b in prediction) == pays(q, m), (
        "at the ranks that were asked about"
    )
    for first, last in prediction:
        assert pays(q._replace(ranks=first), m)
        assert first == 2 or not pays(q._replace(ranks=first - 1), m)
        assert last is None or (pays(q._replace(ranks=last), m) and not pays(q._replace(ranks=last + 1), m))
    within = [n for n in (2, 8, 64, 512, 4096) if pays(q._replace(ranks=n), m)]
    assert all(any(b.first <= n <= (b.last or n) for b in prediction) for n in within)


def test_break_even_has_the_values_worked_out_by_hand():
    """By gather.  Top-K's 8 d n (P - 1) bytes against dense's 8 n (P - 1) / P: d is 1 / P; two bits: P is 32."""
    plan = buckets([("a", (1 << 20,))], 0)
    q = Question(plan, 8, Network(Link("slow", 0.0, 1e6, 0.0)), exchange="gather")
    assert density(q, mode("topk")) == pytest.approx(1 / 8, rel=1e-3)
    assert density(q._replace(ranks=100), mode("topk")) == pytest.approx(1 / 100, rel=1e-3)
    assert ranks(q, mode("2bit")) == [Bounds(2, 31)]
    assert bandwidth(q, mode("half")) == math.inf
    assert bandwidth(q._replace(ranks=64), mode("2bit")) == 0
    costs = {("half", 1.0): Compute(1e-6, 0.0)}  # dense takes 7 n / b, half 3.5 n / b and n us more
    assert bandwidth(q._replace(computes=costs), mode("half")) == pytest.approx(3.5e6, rel=1e-3)
    costs = {("half", 1.0): Compute(0.805 * 4e-6, 0.0)}  # made up for where (P - 1) / P is more than 0.805
    assert ranks(q._replace(computes=costs), mode("half")) == [Bounds(6, None)]
    assert ranks(q._replace(wire=Network(q.wire.link, 4)), mode("2bit")) == [Bounds(4, 32)]  # nodes that are full


def test_in_two_phases_compression_pays_at_any_number_of_ranks():
    """Where messages cost nothing: two bits are 16 times fewer bytes; indices of all entries have two bits each."""
    plan = buckets([("a", (1 << 20,))], 0)
    q = Question(plan, 8, Network(Link("slow", 0.0, 1e6, 0.0)))
    assert ranks(q, mode("2bit")) == [Bounds(2, None)]
    assert q.predict(DENSE).wire / q.predict(mode("2bit")).wire == pytest.approx(16, rel=1e-3)
    assert bandwidth(q._replace(ranks=64), mode("2bit")) == math.inf
    assert density(q, mode("topk")) == pytest.approx(0.939, rel=1e-3)  # 33 d + 1 bits an element against 32
    assert density(q._replace(ranks=100), mode("topk")) == pytest.approx(0.939, rel=2e-3)


def free(_):
    return Compute()


def some(m):
    return next((c for (kind, _), c in COMPUTES.items() if kind == m.kind), Compute())


def test_advice_is_to_compress_on_a_slow_link_and_not_on_a_fast_one():
    slow = advise(TWO_BUCKETS, 8, network("1GbE"), "half,topk=0.01,2bit,dgc=0.001", measure=some)
    steps = [c.takes.exchange for c in slow.choices]
    assert steps == sorted(steps)
    assert {c.mode.name for c in slow.choices} == {"dense", "half", "topk=0.01", "2bit", "dgc=0.001"}
    assert slow.best.name == "topk=0.01"
    gain = slow.dense.takes.exchange / steps[0]
    assert slow.verdict.startswith("Use topk=0.01: the exchange takes ")
    assert slow.verdict.endswith(f"and dense {gain:.3g} times as long. What it does to learning, only training tells.")
    fast = advise(TWO_BUCKETS, 8, network("NVLink"), "half,topk=0.01", 0.1, some)
    assert fast.best.name == "dense"
    assert fast.verdict.startswith("Do not compress: dense takes 100 ms")
    assert "of the exchange behind the backward pass; half takes" in fast.verdict
    assert not any(c.ranks for c in fast.choices)
    assert "none" in str(fast)


def test_advice_prints_its_verdict_and_its_assumptions():
    alone = MODEL, 1, network("1GbE"), ["half", "topk=0.01"]
    assert advise(*alone, measure=free).verdict == "Do not compress: one rank sends nothing."
    advice = advise(MODEL, 4, network("1GbE"), ["half"], 100.0, None)
    assert advice.verdict.startswith("Hardly worth it: half takes 100 s, and dense 10")
    text = str(advise(TWO_BUCKETS, 64, network("10GbE", 8), ["half", "topk=0.99"], 0.05, None))
    assert "64 ranks, 10GbE (9.40 Gbit/s, 30.0 us) for the 8 ranks of a node, NVLink inside; backward 50.0 ms" in text
    assert f"topk=0.99: {len(TWO_BUCKETS)} buckets sent as dense, which is less" in text
    assert "compute: adding up alone" in text
    assert (
        "wire bytes: each rank to all others, or by nodes where a step goes so; wire time: within nodes first" in text
    )
    assert str(advise(*alone, measure=None)).startswith("1 rank, 1GbE")


@pytest.mark.parametrize(("gain", "word"), [(1.04, "Hardly"), (1.06, "Use")])
def test_a_gain_below_five_percent_is_hardly_worth_it(gain, word):
    advice = advise(MODEL, 8, network(Link("x", 0.0, 1e8, 0.0)), "half", measure=None)
    dense = advice.dense.takes.exchange
    costs = Compute((dense / gain - dense / 2) / sum(b.extent for b in MODEL))
    measure = {"dense": Compute(), "half": costs}
    assert advise(MODEL, 8, advice.question.wire, "half", measure=lambda m: measure[m.name]).verdict.startswith(word)


def test_what_makes_no_difference_is_not_advised():
    """A thousandth of a second is what Python takes in a step."""
    advice = advise(buckets([("a", (100,))]), 8, network("1GbE"), "half,topk=0.01", measure=None)
    assert advice.best.name == "topk=0.01"
    assert advice.verdict.startswith("Hardly worth it: topk=0.01 takes")


def test_without_measured_compute_more_bytes_are_never_advised():
    """Adding up what was gathered costs time too: on an endless bandwidth more bytes are not faster."""
    endless = Link("endless", 0.0, 1e30, 1e-10)
    assert advise(MODEL, 64, network(endless), "topk=0.97", measure=None).best.name == "dense"


def test_without_overlap_no_exchange_hides_after_the_backward_pass():
    for overlap, wanted in ((True, max), (False, sum)):
        seconds = advise(MODEL, 8, network("1GbE"), "half", 100.0, None, overlap).dense.takes
        assert seconds.exchange == pytest.approx(wanted((100.0, seconds.wire)), rel=0.01)


def test_a_mode_that_check_refuses_is_left_out_and_named():
    def check(m):
        if m.name == "half":
            raise ValueError("half is not for us")

    advice = advise(MODEL, 8, network("1GbE"), "half,topk=0.01", measure=None, check=check)
    assert {c.mode.name for c in advice.choices} == {"dense", "topk=0.01"}
    assert "  half: not here. half is not for us" in str(advice).splitlines()


@pytest.mark.parametrize("per_node", [1, 8])
def test_one_rank_more_or_less_makes_no_jump(per_node):
    """Libraries have algorithms for numbers of ranks that are no powers of two."""
    for name in ("resnet50", "bert-base"):
        q = Question(buckets(shapes(name)[::-1]), 2, network("100GbE", per_node))
        for nodes in (3, 17, 63, 100):
            a, b = (q._replace(ranks=n * per_node).predict(DENSE).exchange for n in (nodes, nodes + 1))
            assert b == pytest.approx(a, rel=0.1 if nodes > 3 else 0.35)


def test_advice_on_a_measured_network_uses_the_fit():
    """A fit predicts as it says; there is no bandwidth of it to vary."""
    line = Line(0.0, (Segment(0.0, 1e-4, 1e-9),), ((1 << 25, 0.03),))
    measured = Fit(Link("measured", 1e-4, 1e9, 0.0), dict.fromkeys(cost.ALGORITHMS, line), {"ranks": 4})
    advice = advise(MODEL, 4, measured, "half", measure=None)
    nbytes = [b.extent * 4 for b in MODEL]
    assert advice.dense.takes.wire == pytest.approx(sum(1e-4 + n * 1e-9 for n in nbytes))
    assert advice.choices[0].bandwidth is None
    assert str(advice).startswith("4 ranks, measured (8.00 Gbit/s, 100 us), up to 33.6 MB; bytes")
    other = advise(MODEL, 64, measured, "half", measure=None)
    assert other.dense.takes == advise(MODEL, 64, network(measured.link), "half", measure=None).dense.takes
    assert ", up to 33.6 MB, for others by formula; bytes" in str(other)


def test_wrong_questions_are_refused():
    with pytest.raises(ValueError, match="ranks must be at least 1, got 0"):
        advise(MODEL, 0, network("1GbE"), measure=None)
    with pytest.raises(ValueError, match="backward must be finite and in"):
        advise(MODEL, 2, network("1GbE"), backward=-1.0, measure=None)
    with pytest.raises(ValueError, match="did you mean 10GbE"):
        network("10GB")
    with pytest.raises(ValueError, match="per_node must be at least 1, got 0"):
        network("1GbE", 0)

    for wrong, words in (
        (Link("x", -1.0, 1e9), "latency must be finite and in"),
        (Link("x", math.nan, 1e9), "latency must be finite"),
        (Link("x", 0.0, 0), "bandwidth must be finite and above 0, got 0"),
    ):
        with pytest.raises(ValueError, match=words):
            network(wrong)
        with pytest.raises(ValueError, match=words):
            wire(Network(LINKS["1GbE"], 2, wrong))
        with pytest.raises(ValueError, match=words):
            cost.seconds("all_reduce", 1, 2, wrong)
    with pytest.raises(TypeError, match="link must be a name or a rate as text, got 5"):
        wire(5)
    with pytest.raises(TypeError, match="link must be a Link, got '1GbE'"):
        cost.seconds("all_reduce", 1, 2, "1GbE")
    with pytest.raises(ValueError, match=r"backward must be finite and in \[0.0, 1000000.0\]"):
        advise(MODEL, 2, network("1GbE"), backward=1e308, measure=None)
    for bad in ({"ranks": 0}, {"ranks": 2, "per_node": 0}):
        with pytest.raises(ValueError, match="must be at least 1, got 0"):
            forecast(MODEL, DENSE, **bad)

    def never(_):
        raise AssertionError("measured before the modes were looked at")

    with pytest.raises(ValueError, match="--gradients"):
        advise(MODEL, 2, network("1GbE"), "half,threshold=1", measure=never)


@pytest.mark.thorough
def test_advise_of_an_optimizer_uses_its_plan(monkeypatch):
    """On its own plan, for its ranks or others."""
    monkeypatch.setattr("distopt.lab.compute.SHAPE", (256, 1024))  # not to measure for half a minute
    params = laws.parameters([(300, 40), (70,)])
    sim = simulate(4, SGD(0.1), threshold=100)
    with pytest.raises(RuntimeError, match="the plan of buckets is not made yet"):
        sim.advise("1GbE")
    sim(lambda rank: laws.pairs(laws.VirtualRank(rank, 4), params, 0))
    advice = sim.advise("1GbE", modes="half,topk=0.01", measure=False)
    expected = advise(plan_of([(300, 40), (70,)], 100), 4, network("1GbE"), "half,topk=0.01", measure=None)
    assert str(advice) == str(expected)
    asked = sim.advise(Link("x", 0.0, 1e6), 16, backward=1.0).question
    assert (asked.ranks, asked.overlap) == (16, True), "as ranks that are processes would"


def test_advice_leaves_out_what_the_optimizers_options_forbid():
    """Without a mode that its momentum forbids, nothing hidden where nothing overlaps, and of what is nothing."""
    grads = {"a": np.ones((400, 500), np.float32)}
    params = {name: distopt.Parameter(name, np.zeros_like(g)) for name, g in grads.items()}

    def opt(**options):
        made = DistOpt(SGD(0.1, momentum=0.9), LocalCommunicator(), **options)
        for _ in range(options.get("num_batches", 1)):
            made([(p, grads[name]) for name, p in params.items()])
        return made

    advice = opt().advise("1Mbit/s", 8, backward=10.0, measure=False)
    assert [name for name, _ in advice.refused] == ["dgc=0.001", "dgc=0.001+packed"]
    assert "as DeepGradientCompression has one on each rank" in str(advice)
    wire_time = advice.dense.takes.wire
    assert advice.dense.takes.exchange == pytest.approx(10 + wire_time)  # one bucket, which is ready at the end
    many = {"threshold": 1}
    for more, hidden in (({}, True), ({"overlap": False}, False), ({"num_batches": 2}, False)):
        grads["b"] = np.ones(300_000, np.float32)
        params["b"] = distopt.Parameter("b", np.zeros(300_000, np.float32))
        takes = opt(**many, **more).advise("1Mbit/s", 8, "half", 10.0, measure=False).dense.takes
        assert (takes.exchange < 10 + takes.wire - 0.1) == hidden
    with pytest.raises(TypeError, match="measure must be True or False, got 'no'"):
        opt().advise("1GbE", 8, measure="no")
    nothing = DistOpt(SGD(0.1), LocalCommunicator(), threshold=0)
    nothing([(distopt.Parameter("e", np.zeros(0, np.float32)), np.zeros(0, np.float32))])
    assert nothing.advise("1GbE", 8, "half", measure=False).verdict.startswith(("Do not compress", "Hardly"))


@pytest.mark.parametrize(
    ("name", "exchange"), [("int8", "auto"), ("half", "auto"), ("dense", "auto"), ("2bit", "nodes")]
)
@pytest.mark.parametrize("nodes", [3, 8])
def test_seconds_by_nodes_are_those_of_the_bytes_that_leave_a_node(name, exchange, nodes):
    """On a link without latency, and with neighbours next door: of each node its ranks' bytes, one after the other."""
    link, inside = Link("line", 0.0, 1e8, 0.0), Link("bus", 0.0, 1e30, 0.0)
    plan = buckets([(f"p{k}", (1000, 400)) for k in range(8)], 400_000)
    question = Question(plan, 4 * nodes, Network(link, 4, inside), exchange=exchange)
    chosen = mode(name)
    between = forecast(plan, chosen, 4 * nodes, 4, exchange=exchange).between
    assert question.predict(chosen).wire == pytest.approx(4 * between / 1e8, rel=1e-3)
    if name in ("int8", "2bit"):
        others = question._replace(exchange="two_phase").predict(chosen)
        # Payloads of four ranks in place of one in the first phase; sums are gathered within nodes first there too.
        assert others.wire / question.predict(chosen).wire == pytest.approx((4 + 1) / 2, rel=0.01)
        computes = {(chosen.kind, 1.0): Compute(1e-9, 0.0)}
        alone, all_ranks = (
            question._replace(computes=computes, exchange=e).predict(chosen).compute for e in (exchange, "two_phase")
        )
        assert alone == pytest.approx(all_ranks / 4)


def test_a_node_alone_and_nodes_of_one_rank_are_predicted_as_ranks_are():
    plan, chosen = buckets([("w", (1000, 1000))]), mode("int8")
    for per_node, size in ((1, 8), (8, 8)):
        by_nodes, by_all = (
            Question(plan, size, network("1GbE", per_node), exchange=e).predict(chosen).wire for e in ("nodes", "auto")
        )
        assert by_nodes == by_all if per_node == 1 else by_nodes > 0
