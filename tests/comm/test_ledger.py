"""The ledger, byte for byte against a transport that counts its messages, and against what compressors say."""

import csv
import itertools
import json
import math
import sys
import threading
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import laws
import tiers
from distopt import DistOpt, run_ranks
from distopt.comm import LocalCommunicator, Metered, Ordered
from distopt.comm.ledger import KEEP, REST, Ledger
from distopt.comm.message import LedgerEntry, apportion
from distopt.compress import (
    DeepGradientCompression,
    ErrorFeedback,
    ExchangeContext,
    Half,
    OneBit,
    Packed,
    Threshold,
    TopK,
    TwoBit,
)
from distopt.kernels.breakdown import PayloadBreakdown
from distopt.optim import LARS, SGD
from doubles.counted import Around, Everyone, run_counted

KINDS = (Everyone, Around)
SHAPES = [(40, 50), (7,), (3, 5, 9), (100,), (0,), ()]
MODES = {
    "dense": None,
    "half": Half(),
    "top-K": ErrorFeedback(TopK(0.02)),
    "top-K per tensor": ErrorFeedback(TopK(0.02, per_tensor=True)),
    "top-K beyond break even": ErrorFeedback(TopK(0.9)),
    "threshold": ErrorFeedback(Threshold(1.5)),
    "2 bits": ErrorFeedback(TwoBit(0.5)),
    "1 bit": ErrorFeedback(OneBit()),
    "packed": ErrorFeedback(Packed(TopK(0.05))),
    "DGC": DeepGradientCompression(TopK(0.01)),
    "packed DGC": DeepGradientCompression(Packed(TopK(0.01), value="int8")),
}


def counted(comm):
    return sum(comm.sent), sum(comm.received)


def written(metered):
    total = metered.ledger.total()
    return total["sent"], total["received"]


@pytest.mark.parametrize("kind", KINDS)
@given(size=st.integers(1, 5), n=st.integers(0, 40), root=st.integers(0, 4), dtype=st.sampled_from(["f4", "f8", "u1"]))
def test_the_ledger_counts_the_bytes_of_every_verb(kind, size, n, root, dtype):
    def main(comm):
        metered = Metered(comm)
        own = np.arange(n + comm.rank).astype(dtype)
        calls = (
            lambda: metered.all_reduce(np.ones(n, dtype)),
            lambda: metered.around(Ordered(comm)).all_reduce(np.ones(n, dtype)),
            lambda: metered.all_gather(own, ragged=True),
            lambda: metered.all_to_all([np.ones(3 * r + n % (k + 1), dtype) for k, r in enumerate(range(size))], True),
            lambda: metered.broadcast(np.ones(n, dtype), root % size),
            lambda: metered.lengths(n),
        )
        for call in calls:
            call()
            assert written(metered) == counted(comm)
        if kind is Everyone:
            metered.reduce_scatter(np.ones(n, dtype))
            assert written(metered) == counted(comm)
        return True

    assert all(run_counted(size, kind, main))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", tiers.one_by_default(3, of=(2, 3, 5)))
def test_the_ledger_counts_the_bytes_of_every_mode(kind, mode, size):
    """Of a whole training, with the broadcast and the averaging of parameters; parts add up to their entries."""

    def main(comm):
        metered = Metered(comm)
        params = laws.parameters(SHAPES, rank=comm.rank)
        opt = DistOpt(SGD(0.05), metered, threshold=50)
        for step in range(3):
            opt.step(laws.pairs(comm, params, step), MODES[mode])
        opt.backward_and_partial_update(laws.pairs(comm, params, 3))
        assert written(metered) == counted(comm)
        entries = list(metered.ledger.entries)
        for entry in entries:
            assert 0 <= entry.values + entry.indices <= entry.payload
            assert sum(entry.parts) <= entry.values + entry.indices
        assert {e.step for e in entries if e.phase == "gradients"} == {1, 2, 3}
        assert {e.step for e in entries if e.phase == "start"} == {0}  # broadcast first
        assert {e.step for e in entries if e.phase == "parameters"} == {4}  # averaged last
        assert {e.phase for e in entries} == {"start", "gradients", "parameters"}
        return True

    assert all(run_counted(size, kind, main))


def test_norms_of_shared_parameters_are_part_of_the_update():
    def main(comm):
        metered, params = Metered(comm), laws.parameters([(30,), (50,)])
        opt = DistOpt(LARS(0.1), metered, broadcast=False)
        for p, view in zip(params, opt.parameter_views(params), strict=True):
            p.data = view
        for step in range(2):
            opt(laws.pairs(comm, params, step))
        return metered.ledger

    for ledger in run_ranks(3, main):
        found = [(row["step"], row["phase"], row["verb"]) for row in ledger.by("step", "phase", "verb")]
        assert found == [(k, phase, "all_reduce") for k in (1, 2) for phase in ("gradients", "update")]


def test_hosts_are_told_apart():
    """Two machines of two and three ranks: what leaves one of them, in both algorithms."""
    hosts = (0, 0, 3, 3, 3)

    def main(comm):
        comm._hosts = hosts
        metered = Metered(comm)
        metered.all_reduce(np.ones(17, np.float32))
        metered.all_gather(np.ones(comm.rank, np.uint8), ragged=True)
        metered.broadcast(np.ones(10), 2)
        total = metered.ledger.total()
        away = [r for r in range(5) if hosts[r] != hosts[comm.rank]]
        assert total["sent_between"] == sum(comm.sent[r] for r in away)
        assert total["received_between"] == sum(comm.received[r] for r in away)
        assert ("sent_between" in metered.ledger.table()) == bool(total["sent_between"] or total["received_between"])
        return total["sent_between"]

    for kind in KINDS:
        assert any(run_counted(5, kind, main))


def ledger_of(compressor, shapes, size=1, steps=1, threshold=10**6, dtype="float32"):
    """Rank 0's, of the gradients alone."""

    def main(comm):
        metered = Metered(comm)
        params = laws.parameters(shapes, dtype)
        opt = DistOpt(SGD(0.05), metered, threshold=threshold, broadcast=False)
        for step in range(steps):
            opt.step(laws.pairs(comm, params, step), compressor, break_even=False)
        return metered.ledger

    return run_ranks(size, main)[0]


def test_an_entry_tells_values_indices_and_the_ideal_bits():
    n, k = 2000, 100
    (entry,) = ledger_of(ErrorFeedback(TopK(0.05)), [(n,)]).entries
    assert (entry.payload, entry.values, entry.indices) == (8 * k, 4 * k, 4 * k)
    assert entry.ideal == round(math.log2(math.comb(n, k))) + 32 * k
    (entry,) = ledger_of(ErrorFeedback(Packed(TopK(0.05), value="bfloat16")), [(n,)]).entries
    assert entry.values == 2 * k
    assert 16 <= entry.payload - entry.values - entry.indices < 24  # a header; whole words of 64 bits
    assert entry.ideal == round(math.log2(math.comb(n, k))) + 16 * k
    assert entry.ideal - 16 * k < 8 * entry.indices < 1.3 * (entry.ideal - 16 * k)
    (entry,) = ledger_of(None, [(n,)]).entries
    assert (entry.payload, entry.values, entry.indices, entry.ideal) == (4 * n, 4 * n, 0, 32 * n)
    (entry,) = ledger_of(ErrorFeedback(OneBit()), [(n,)]).entries
    assert (entry.payload, entry.values) == (4 + 252, 252)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mode", ["bucket", "tensor", "DGC"])
def test_the_ideal_of_a_choice_per_tensor_adds_up_over_tensors(mode, packed):
    shapes = [(1, 1)] * 50 + [(30, 100), (40, 50)]
    selector = TopK(0.01, per_tensor=mode == "tensor")
    selector = Packed(selector, value="bfloat16") if packed else selector
    compressor = DeepGradientCompression(selector) if mode == "DGC" else ErrorFeedback(selector)
    entry = ledger_of(compressor, shapes).entries[-1]
    ones = 0 if mode == "DGC" else 50  # of DGC they are sent whole
    sent = {"bucket": [(5050, 51)], "tensor": [(1, 1)] * ones + [(3000, 30), (2000, 20)]}
    chosen = sent["bucket" if mode == "bucket" else "tensor"]
    assert entry.verb == "all_gather"
    assert entry.ideal - 8 * entry.values == pytest.approx(sum(math.log2(math.comb(*nk)) for nk in chosen), abs=2)


def shannon(codes):
    """Bits that as many symbols have together, each of them counted."""
    _, counts = np.unique(codes, return_counts=True)
    return float(counts @ np.log2(codes.size / counts)) + 0.0


def ideal(compressor, x):
    payload = compressor.compress(x.copy(), {}, ExchangeContext())
    return compressor.breakdown(payload, x, ExchangeContext())().ideal


def columns(rows, width, first, last):
    """A matrix of zeros, but for +1 and -1 in some columns."""
    x = np.zeros((rows, width), np.float32)
    x[:, first:last] = np.random.default_rng(width).choice([-1, 1], (rows, last - first))
    return x.reshape(-1)


@pytest.mark.parametrize("rows", [20, 333])
@pytest.mark.parametrize("width", [16, 64, 100, 256, 1000, 1024, 2048, 4096])
def test_the_ideal_of_codes_is_their_entropy(rows, width):
    """The ledger samples elements; the entropy here is of all of them."""
    for first, last in ((0, width // 8), (width // 2, width // 2 + width // 16), (width // 16, width)):
        x = columns(rows, width, first, last)
        assert ideal(TwoBit(1.0), x) == pytest.approx(shannon(np.sign(x)), rel=0.05)
        assert ideal(OneBit(0.5), x) == pytest.approx(shannon(x > 0.5) + 32, rel=0.05)
        assert ideal(OneBit(0.5, scale="unit"), x) == pytest.approx(shannon(x > 0.5), rel=0.05)


@given(n=st.integers(0, 3000), seed=st.integers(0, 9))
def test_the_ideal_of_few_codes_is_exact(n, seed):
    x = np.random.default_rng(seed).choice(np.float32([0, 1, -1]), n, p=[0.8, 0.1, 0.1])
    assert ideal(TwoBit(1.0), x) == round(shannon(x))
    assert ideal(OneBit(0.5, scale="unit"), x) == round(shannon(x > 0))
    assert ideal(OneBit(), np.ones(n, np.float32)) == 32


@pytest.mark.parametrize("mode", [m for m in MODES if m not in ("dense", "half", "2 bits", "1 bit")])
def test_bytes_of_tensors_are_their_entries(mode):
    """On one rank the entries of each tensor are known: what arrives is its own."""
    shapes = [(30, 20), (50,), (8, 9)]
    sent = []

    def main(comm):
        metered = Metered(comm)
        params = laws.parameters(shapes)
        before = [p.data.copy() for p in params]
        opt = DistOpt(SGD(1.0), metered, threshold=10**6, broadcast=False)
        opt.step(laws.pairs(comm, params, 0), MODES[mode], break_even=False)
        for p, b in zip(params, before, strict=True):
            sent.append((p.name, int((p.data != b).sum())))
        return metered.ledger

    (ledger,) = run_ranks(1, main)
    found = ledger.tensors()
    whole = 4 if "DGC" in mode else None  # bytes of an entry of a tensor of one dimension
    gathered = [e for e in ledger.entries if e.verb == "all_gather"]
    bytes_each = sum(e.values + e.indices for e in gathered)
    entries = sum(n for name, n in sent if not (whole and found[name] == 4 * 50))
    for name, n in sent:
        each = whole if whole and n == 50 else bytes_each / entries
        assert found[name] == pytest.approx(n * each, abs=1), name
    assert sum(found.values()) == ledger.total()["payload"]


def test_totals_cover_entries_that_are_no_longer_kept(tmp_path):
    def main(comm):
        metered = Metered(comm, keep=5)
        params = laws.parameters([(10,), (20,)])
        opt = DistOpt(SGD(0.1), metered, threshold=0, broadcast=False)
        for step in range(10):
            opt(laws.pairs(comm, params, step))
        return metered

    metered = run_ranks(2, main)[1]
    ledger = metered.ledger
    assert len(ledger.entries) == 5
    assert ledger.total()["calls"] == 20
    assert ledger.total()["payload"] == metered.report()["all_reduce"]["payload"] == 10 * 4 * 30
    assert sorted(ledger.tensors().items()) == sorted({"p0": 400, "p1": 800, REST: 0}.items())
    by_step = ledger.by("step")
    assert [row["step"] for row in by_step] == [8, 9, 10]
    assert sum(row["payload"] for row in ledger.by("bucket", "verb")) == 1200
    ledger.write_json(tmp_path / "a.json")
    ledger.write_csv(tmp_path / "a.csv")
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["totals"][0]["calls"] == 10
    assert found["tensors"]["gradients"] == ledger.tensors()
    assert [entry["tensors"] for entry in found["entries"]] == [{"p1": 80}, {"p0": 40}] * 2 + [{"p1": 80}]
    with open(tmp_path / "a.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["payload"]) for row in rows] == [e.payload for e in ledger.entries]
    assert rows[-1]["step"] == "10"
    table = ledger.table("bucket")
    assert table.splitlines()[-1].split()[:3] == ["total", "20", "1,200"]
    *lines, rest, total = ledger.table("step", "bucket").splitlines()
    assert rest.split()[:4] == ["(not", "kept)", "15", "880"]
    assert sum(int(line.split()[2]) for line in lines[-5:]) + 15 == int(total.split()[1])
    metered.reset()
    assert ledger.total()["payload"] == 0
    assert ledger.by("verb") == []


@pytest.mark.thorough
def test_a_thousand_tensors_take_few_megabytes():
    """Of whole buckets, once for all messages: the default number of entries, traced."""

    def main(comm):
        metered, params = Metered(comm), laws.parameters([(2,)] * 1000)
        opt = DistOpt(SGD(0.1), metered, broadcast=False)
        opt(laws.pairs(comm, params, 0))
        tag = opt.engine.step_context.tag(opt.engine.store.buckets[0])
        tracemalloc.start()
        with metered.tagged(tag):
            for _ in range(KEEP):
                metered._meter.all_reduce(tag.members.extent, 4)
        assert len(metered.ledger.entries) == KEEP
        assert tracemalloc.get_traced_memory()[0] < 1000 * KEEP  # a number of each tensor would be 8 times as much
        tracemalloc.stop()

    run_ranks(1, main)


def test_the_ledger_may_be_read_while_another_thread_writes():
    """A reader finds what there was at one moment, and neither thread fails."""
    ledger, stop = Ledger(keep=3), threading.Event()
    reads = (lambda: ledger.entries[-3:], lambda: ledger.by("step"), ledger.by, ledger.tensors, ledger.as_dict)

    def write():
        for k in itertools.takewhile(lambda k: not stop.is_set(), itertools.count()):
            ledger.write(
                lambda k=k: LedgerEntry(k, "gradients", k % 101, "all_reduce", *[8] * 8, (f"p{k % 103}",), [8])
            )
            if k % 500 == 499:
                ledger.clear()

    writer = threading.Thread(target=write)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    writer.start()
    try:
        for _ in range(15):
            for read in reads:
                read()
            steps = [entry.step for entry in ledger.entries]
            assert steps == list(range(steps[0], steps[0] + len(steps))) if steps else True
    finally:
        stop.set()
        writer.join()
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("mode", MODES)
def test_rows_by_tensor_add_up_to_the_payload(mode, tmp_path):
    """By step or not: to the payload of their messages, and to what ``tensors`` says."""
    ledger = ledger_of(MODES[mode], SHAPES, size=2, steps=3, threshold=500)
    whole = {row["phase"]: row["payload"] for row in ledger.by("phase")}
    for columns in (("phase",), ("step", "phase"), ("step", "phase", "bucket", "verb")):
        sums = Counter()
        for row in ledger.by(*columns, "tensor"):
            assert list(row) == [*columns, "tensor", "calls", "payload"]
            sums[row["phase"]] += row["payload"]
        assert sums == whole
    names = {f"p{k}" for k in range(len(SHAPES))}
    found = {row["tensor"]: row["payload"] for row in ledger.by("tensor")}
    assert {REST: 0} | found == ledger.tensors()
    assert set(found) - {REST} == names
    path = tmp_path / "steps.csv"
    ledger.write_csv(path, "step", "tensor")
    with open(path, newline="") as file:
        assert list(csv.DictReader(file)) == [{k: str(v) for k, v in r.items()} for r in ledger.by("step", "tensor")]
    assert ledger.table("tensor").splitlines()[0].split() == ["tensor", "calls", "payload"]


class Sharp(TopK):
    """A compressor of a user's own, with a breakdown of its own, whose numbers are numpy's."""

    def breakdown(self, payload, x, context):
        numbers = np.array([payload.nbytes, 0], np.int32)
        return lambda: PayloadBreakdown(*numbers, ideal=np.float64(12.0), counts=np.array([1, 2], np.uint8))


def test_a_breakdown_may_have_numpys_numbers(tmp_path):
    ledger = ledger_of(Sharp(0.1), [(20,), (30,)])
    ledger.write_json(tmp_path / "a.json")
    (entry,) = json.loads((tmp_path / "a.json").read_text())["entries"]
    assert (entry["values"], entry["indices"], entry["ideal"]) == (entry["payload"], 0, 12)
    assert entry["tensors"] == {"p0": 13, "p1": 27}


def test_wrong_arguments_of_the_ledger_are_refused(tmp_path):
    for keep, error in ((-1, ValueError), ("a", TypeError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match="keep must be"):
            Metered(LocalCommunicator(), keep=keep)
    ledger = Ledger()
    for columns, text in (((1,), "1"), (("stp", "bucket"), "stp"), ((None,), "None")):
        for method in (ledger.by, ledger.table, lambda *columns: ledger.write_csv(tmp_path / "a.csv", *columns)):
            with pytest.raises(
                ValueError, match=f"columns must be among step, phase, bucket, verb, tensor, got {text}"
            ):
                method(*columns)
    assert not (tmp_path / "a.csv").exists()
    with pytest.raises(ValueError, match=r"phase must be one of gradients, parameters, .*, got 'gradient'"):
        ledger.tensors("gradient")
    assert ledger.tensors() == ledger.tensors("update") == {REST: 0}


@given(total=st.integers(0, 10**12), counts=st.lists(st.integers(0, 10**6), max_size=20))
def test_shares_of_a_total_add_up(total, counts):
    found = apportion(total, counts)
    assert len(found) == len(counts)
    assert sum(found) == (total if sum(counts) else 0)
    for part, count in zip(found, counts, strict=True):
        assert abs(part - total * count / max(1, sum(counts))) < 1 + 1e-6 * total
