"""Buckets whose payloads are under way at the same time have the bits of buckets that go one after the other."""

import time

import numpy as np
import pytest
from test_memories import begin_exchange

import distopt.exchange.choice
from distopt import DistOpt, Parameter, run_ranks
from distopt.comm import ThreadCommunicator
from distopt.comm.message import UNTAGGED
from distopt.compress import Dense, ErrorFeedback, Half, Int4, Int8, OneBit
from distopt.exchange import program
from distopt.optim import SGD

SHAPES = [(300,), (40, 30), (7,), (900,), (500,), (3,), (800,)]


def trained(comm, compressor, exchange, overlap, hosts=(0, 1, 2)):
    """Parameters after steps whose gradients take their time, at other places on each rank."""
    comm._hosts = hosts
    pauses = np.random.default_rng([3, comm.rank])
    params = [Parameter(f"p{k}", np.zeros(shape, np.float32)) for k, shape in enumerate(SHAPES)]
    opt = DistOpt(SGD(0.1), comm, threshold=300, overlap=overlap)

    def loss(step):
        rng = np.random.default_rng([comm.rank, step])
        for p in params:
            if pauses.random() < 0.4:
                time.sleep(0.003)
            yield p, rng.standard_normal(p.data.shape, np.float32)

    for step in range(5):
        opt.step(loss(step), compressor, break_even=False, exchange=exchange)
    return np.concatenate([p.data.reshape(-1) for p in params]), opt.state_dict()["states"]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("compressor", "exchange"),
    [
        (Dense(), "auto"),
        (ErrorFeedback(Half()), "auto"),
        (ErrorFeedback(Int8()), "gather"),
        (ErrorFeedback(Int8()), "two_phase"),
        (Int4(rounding="stochastic"), "gather"),
        (ErrorFeedback(OneBit()), "gather"),
    ],
    ids=lambda value: repr(value),
)
def test_buckets_under_way_have_the_bits_of_one_after_the_other(compressor, exchange, overlap, monkeypatch):
    monkeypatch.setattr(distopt.exchange.choice, "GATHER_BELOW", 0)
    expected = run_ranks(3, lambda comm: trained(comm, compressor, exchange, overlap))
    seen = []

    def in_turn(exchanges, comm):
        return original(seen.append(exchanges) or exchanges, comm)

    original = program.in_turn
    monkeypatch.setattr("distopt.engine.reducers.in_turn", in_turn)
    monkeypatch.setattr(ThreadCommunicator, "pipelines", True)
    monkeypatch.setattr(ThreadCommunicator, "_begin_exchange", begin_exchange)
    found = run_ranks(3, lambda comm: trained(comm, compressor, exchange, overlap))
    # Without overlap all buckets of two phases have their shards together, and threads add up in shared memory.
    assert bool(seen) == (overlap or not (exchange == "two_phase" or isinstance(compressor, Dense)))
    for (x, states), (want, wanted) in zip(found, expected, strict=True):
        np.testing.assert_array_equal(x, want)
        np.testing.assert_equal(states, wanted)


@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (0, 0, 1, 1, 2, 2)], ids=str)
@pytest.mark.parametrize("compressor", [Half(), ErrorFeedback(Int8())], ids=repr)
def test_ranks_of_nodes_that_pause_do_not_wait_for_each_other_in_a_circle(compressor, hosts, monkeypatch):
    """One that sent what is under way to its end would wait for a rank that waits for a neighbour which does so too."""
    monkeypatch.setattr(distopt.exchange.choice, "GATHER_BELOW", 0)
    monkeypatch.setattr(ThreadCommunicator, "pipelines", True)
    monkeypatch.setattr(ThreadCommunicator, "_begin_exchange", begin_exchange)
    found = [
        run_ranks(len(hosts), lambda comm, overlap=overlap: trained(comm, compressor, "nodes", overlap, hosts)[0])
        for overlap in (False, True)
    ]
    for without, overlapped in zip(*found, strict=True):
        np.testing.assert_array_equal(overlapped, without)


@pytest.mark.parametrize("turn", range(3))
def test_a_program_that_fails_ends_all_that_are_under_way(turn, monkeypatch):
    """Its error comes out; the others are not asked for anything more."""
    monkeypatch.setattr(ThreadCommunicator, "_begin_exchange", begin_exchange)

    def main(comm):
        arrays = [np.full(4, k + 1.0) for k in range(4)]

        def one(k):
            yield program.Sum(arrays[k])
            if k == turn:
                raise ValueError(f"bucket {k}")

        complete = []
        with pytest.raises(ValueError, match=f"bucket {turn}"):
            complete.extend(program.in_turn([(arrays[k], UNTAGGED, one(k)) for k in range(4)], comm))
        return len(complete)

    assert run_ranks(2, main) == [turn] * 2
