"""Ranges of the phases of a step: there while somebody profiles, with the ledger's bytes, and then no more."""

import collections
import itertools
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from test_memories import begin_exchange

import distopt
from distopt.cli import main
from distopt.comm import Metered, run_ranks
from distopt.comm.threads import ThreadCommunicator
from distopt.compress import Dense, ErrorFeedback, Half, Int8, Packed, TopK
from distopt.device import nvtx
from distopt.engine import phases
from distopt.optim import SGD
from distopt.resilience import flight_recorder
from distopt.resilience.operation_log import recorder

TOP = ErrorFeedback(Packed(TopK(0.05)))
MODES = {
    "dense": (Dense(), {}),
    "half": (Half(), {}),
    "gathered entries": (TOP, {"exchange": "gather"}),
    "entries, two phases": (TOP, {"exchange": "two_phase"}),
    "codes, two phases": (ErrorFeedback(Int8()), {"exchange": "two_phase"}),
}


@pytest.fixture
def profile(monkeypatch):
    """A profile of the kind 'flight', without the file that it leaves at the end of the process."""
    ends = []
    monkeypatch.setattr(phases, "atexit", SimpleNamespace(register=lambda *of: ends.append(of)))
    monkeypatch.setattr(phases, "WANTED", "flight")
    recorder.ranges.clear()
    yield ends
    phases.WANTED = ""
    phases.follow(0)
    recorder.ranges.clear()


@pytest.fixture
def no_nvtx():
    nvtx.push_and_pop.cache_clear()
    yield
    nvtx.push_and_pop.cache_clear()


def train(comm, modes, deterministic=False):
    """A step of each mode after the first, whose plan threads make by messages that no ledger counts."""
    comm, rng = Metered(comm), np.random.default_rng(comm.rank)
    opt = distopt.DistOpt(SGD(0.1), comm, deterministic=deterministic)
    opt.threshold = 500
    pairs = [(distopt.Parameter(k, np.zeros(400, np.float32)), rng.standard_normal(400, np.float32)) for k in "abc"]
    opt(pairs)
    comm.barrier()
    if comm.rank == 0:
        recorder.ranges.clear()
    comm.reset()
    comm.barrier()
    for mode in modes:
        compressor, options = MODES[mode]
        opt.step(pairs, compressor, **options)
    comm.barrier()
    return comm.ledger.by("bucket")


def of(phase):
    return [r for r in list(recorder.ranges) if r.phase == phase]


@pytest.mark.parametrize("deterministic", [False, True, "exact"])
def test_the_bytes_of_exchanges_are_those_of_the_ledgers_bucket_by_bucket(profile, deterministic):
    ledgers = run_ranks(2, lambda comm: train(comm, MODES, deterministic))
    for rank, rows in enumerate(ledgers):
        found = collections.Counter()
        for r in of("exchange"):
            if r.thread == f"rank {rank}":
                found[r.bucket] += r.bytes
        assert found == {row["bucket"]: row["payload"] for row in rows}


@pytest.mark.parametrize("mode", MODES)
def test_a_step_has_every_phase_in_order(profile, mode):
    run_ranks(2, lambda comm: train(comm, [mode]))
    mine = sorted((r for r in recorder.ranges if r.thread == "rank 0"), key=lambda r: r.began)
    order = list(dict.fromkeys(r.phase for r in mine))
    assert order == [phase for phase in ("pack", "vote", "select", "exchange", "update") if phase in order]
    assert set(order) >= {"pack", "vote", "exchange", "update"} | ({"select"} if mode != "dense" else set())
    assert [r.bytes for r in mine if r.phase == "pack"] == [3200, 1600]  # two of 400 float32, and one
    assert [r.bucket for r in mine if r.phase == "pack"] == [0, 1]
    assert all(r.began <= r.ended for r in mine)


def test_exchanges_that_are_under_way_together_are_ranges_too(profile, monkeypatch):
    monkeypatch.setattr(ThreadCommunicator, "pipelines", True)
    monkeypatch.setattr(ThreadCommunicator, "_begin_exchange", begin_exchange)

    def step(comm):
        pairs = [(distopt.Parameter(k, np.zeros(400, np.float32)), np.full(400, comm.rank, np.float32)) for k in "abc"]
        opt = distopt.DistOpt(SGD(0.1), comm)
        opt.threshold = 400
        opt.step(pairs, TOP, exchange="gather", break_even=False)
        return {b.number for b in opt.engine.store.buckets}

    buckets = run_ranks(2, step)[0]
    mine = [r for r in of("exchange") if r.thread == "rank 0" and r.bucket is not None]
    assert {r.bucket for r in mine} == buckets
    assert len(mine) == len(buckets)
    assert any(later.began < r.ended for r, later in itertools.pairwise(mine))


def test_without_a_profiler_every_method_is_its_own(profile):
    step, vote = ThreadCommunicator.all_reduce, distopt.comm.control.ControlChannel.vote
    run_ranks(2, lambda comm: train(comm, ["dense"]))
    assert step is not ThreadCommunicator.all_reduce
    phases.WANTED = ""
    phases.follow(0)
    recorder.ranges.clear()
    assert (step, vote) == (ThreadCommunicator.all_reduce, distopt.comm.control.ControlChannel.vote)
    run_ranks(2, lambda comm: train(comm, ["dense"]))
    assert not recorder.ranges


def test_a_phase_that_raises_ends_its_range(profile):
    phases.follow(0)
    with pytest.raises(ValueError, match="parts must be 1"):
        distopt.comm.LocalCommunicator().all_to_all([])
    distopt.comm.LocalCommunicator().all_to_all(parts=[np.ones(3)])
    assert [r.bytes for r in of("exchange")] == [0, 24]


@pytest.mark.parametrize("wanted", ["1", "nvtx"])
def test_what_is_not_there_is_refused_before_the_first_step(no_nvtx, monkeypatch, wanted):
    monkeypatch.setattr(phases, "WANTED", wanted)
    monkeypatch.setattr(nvtx, "PACKAGES", ())
    with pytest.raises(ValueError, match=r"DISTOPT_PROFILE must be one of|nvtx, cupy, or a torch with CUDA must be"):
        distopt.DistOpt(SGD(0.1), distopt.comm.LocalCommunicator())


def test_nvtx_is_pushed_and_popped(profile, no_nvtx, monkeypatch):
    calls = []
    monkeypatch.setattr(phases, "WANTED", "nvtx")
    monkeypatch.setattr(nvtx, "PACKAGES", [("ours", "ours", "push", "pop")])
    monkeypatch.setitem(sys.modules, "ours", SimpleNamespace(push=calls.append, pop=lambda: calls.append("pop")))
    phases.follow(0)
    distopt.comm.LocalCommunicator().all_reduce(np.ones(3))
    assert calls == ["distopt exchange, 24 bytes", "pop"]


def test_a_trace_has_a_row_for_each_thread_and_the_ledgers_bytes(profile, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(flight_recorder.VARIABLE, str(tmp_path))
    ledgers = run_ranks(2, lambda comm: train(comm, MODES))
    ((write, *arguments),) = profile
    write(*arguments)
    assert main(["trace", str(tmp_path), "--chrome", str(tmp_path / "trace.json")]) == 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    rows = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    for rank, ledger in enumerate(ledgers):
        mine = [e for e in events if e["ph"] == "X" and e["tid"] == rows[f"rank {rank}"]]
        exchanges = [e["args"]["bytes"] for e in mine if e["name"] == "exchange"]
        assert sum(exchanges) == sum(row["payload"] for row in ledger)
        assert {e["pid"] for e in mine} == {arguments[1]}
        assert all(
            e["dur"] >= 0 and abs(e["ts"] / 1e6 - flight_recorder.record(recorder, 0, "")["wall"]) < 600 for e in mine
        )


def test_a_record_whose_ranges_are_none_is_refused(tmp_path, capsys):
    good = flight_recorder.record(recorder, 0, "a test")
    for ranges in ({}, [1], [{"phase": "vote"}], [dict.fromkeys(flight_recorder.RANGE, "x")]):
        (tmp_path / "distopt-flight.0.json").write_text(json.dumps(good | {"ranges": ranges}))
        assert main(["trace", str(tmp_path), "--chrome", str(tmp_path / "trace.json")]) == 1
    assert "must be a flight record" in capsys.readouterr().err
    assert not (tmp_path / "trace.json").exists()


def test_waits_of_older_records_are_in_a_trace(tmp_path):
    """Without ranges, and with an operation that lasts and one beside which another one was begun."""
    waits = [("vote", 1.0, 2.0), ("all_reduce of bucket 0", 3.0, 0.0), ("all_reduce of bucket 1", 4.0, 0.0)]
    rows = [
        {"log": "data", "number": k, "text": text, "bytes": 8, "began": began, "ended": ended}
        for k, (text, began, ended) in enumerate(waits)
    ]
    record = flight_recorder.record(recorder, 3, "a test") | {"operations": rows, "wall": 1006.0, "now": 6.0}
    del record["ranges"]
    (tmp_path / "distopt-flight.3.json").write_text(json.dumps(record))
    assert main(["trace", str(tmp_path), "--chrome", str(tmp_path / "trace.json")]) == 0
    events = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    found = {e["name"]: (e["pid"], e["ts"], e["dur"]) for e in events}
    assert found == {
        "vote": (3, 1001e6, 1e6),
        "all_reduce of bucket 0": (3, 1003e6, 1e6),
        "all_reduce of bucket 1": (3, 1004e6, 2e6),
    }
