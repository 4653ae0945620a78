"""Nothing that waits is lost, whatever sends it and whatever exchanges it, from step to step and from job to job.

The reference knows three numbers of each element, in float64: what waits as a gradient, what waits as a frequency, and
the momentum of Deep Gradient Compression.  What was applied comes from the parameters.
"""

import itertools
import queue
import tempfile
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import distopt.exchange.choice
import tiers
from distopt import DistOpt, Parameter, run_ranks, simulate
from distopt.comm import ThreadCommunicator
from distopt.compress import (
    DCT,
    Chunks,
    DeepGradientCompression,
    ErrorFeedback,
    Half,
    Int4,
    Int8,
    OneBit,
    Packed,
    Threshold,
    TopK,
    TwoBit,
)
from distopt.optim import SGD

MOMENTUM, DECAY = 0.5, 0.75
SHAPES = [(12, 50), (7,), (3, 5, 9), (900,), (0,), ()]  # several buckets of 300 elements, some with gaps
EQUAL = [(30, 32)] * 2  # two buckets: of 3 nodes of 2, two ranks own the same between nodes and among all ranks
EXCHANGES = ("gather", "two_phase", "nodes", "auto")
GRADIENTS, FREQUENCIES = "gradients", "frequencies"  # what a memory waits as
STATES = {
    GRADIENTS: {"residual", "owed"},
    FREQUENCIES: {"frequencies of residual", "frequencies of owed"},
}


class Sender(NamedTuple):
    compressor: object
    waits: str = GRADIENTS
    decay: float = 1.0
    momentum: float | None = None
    rounds: bool = False  # sums are rounded on the wire, which nobody keeps


SENDERS = {
    "top-K": Sender(ErrorFeedback(TopK(0.05))),
    "top-K of tensors": Sender(ErrorFeedback(TopK(0.05, per_tensor=True))),
    "float16": Sender(ErrorFeedback(Packed(TopK(0.3)))),
    "two bits of top-K": Sender(ErrorFeedback(Packed(TopK(0.9), value="2bit"))),
    "chunks, decaying": Sender(ErrorFeedback(Chunks(4, of=64), DECAY), decay=DECAY),
    "threshold": Sender(ErrorFeedback(Threshold(6.0))),
    "two bits": Sender(ErrorFeedback(TwoBit(4.0))),
    "one bit": Sender(ErrorFeedback(OneBit())),
    "int8": Sender(ErrorFeedback(Int8(64, "stochastic"))),
    "int4": Sender(ErrorFeedback(Int4(32))),
    "half": Sender(ErrorFeedback(Half()), rounds=True),
    "dgc": Sender(DeepGradientCompression(TopK(0.1), MOMENTUM, factor_masking=False), momentum=MOMENTUM),
    "frequencies": Sender(DCT(ErrorFeedback(Chunks(4, of=64)), tile=8), FREQUENCIES),
    "frequencies, decaying": Sender(DCT(ErrorFeedback(Packed(TopK(0.1)), DECAY), tile=8), FREQUENCIES, DECAY),
}
ALL = {GRADIENTS: ErrorFeedback(TopK(1.0)), FREQUENCIES: DCT(ErrorFeedback(TopK(1.0)), tile=8)}


class Step(NamedTuple):
    sender: str
    exchange: str
    break_even: bool = False


class Ranks(NamedTuple):
    size: int
    per_node: int


class Job(NamedTuple):
    ranks: Ranks
    steps: list[Step]


def flat(arrays):
    return np.concatenate([np.ravel(a) for a in arrays]).astype(np.float64)


def gradients(rank, step, shapes=SHAPES):
    rng = np.random.default_rng([rank, step])
    return [rng.integers(-9, 10, shape).astype(np.float64) for shape in shapes]


def zeros(shapes):
    return [Parameter(f"p{k}", np.zeros(shape)) for k, shape in enumerate(shapes)]


class Reference:
    """What waits on all ranks together, by what was applied."""

    def __init__(self, n):
        self.waits, self.velocity = {GRADIENTS: np.zeros(n), FREQUENCIES: np.zeros(n)}, np.zeros(n)

    def step(self, sender, total, applied):
        if sender.momentum is not None:
            total = self.velocity = sender.momentum * self.velocity + total
        self.waits[sender.waits] = sender.decay * self.waits[sender.waits] + total - applied

    def resize(self, factor):
        """The mean over ranks of all that waits stays."""
        self.waits, self.velocity = {name: factor * x for name, x in self.waits.items()}, factor * self.velocity


def trained(comm, job, last, drained, shapes, first, folder):
    """Do a job, go on from ``folder`` unless it is the first one; then send all that waits, or save.

    Returns the parameters before each step and at the end, and the states before and after what was drained.
    """
    comm._hosts = [rank // job.ranks.per_node for rank in range(comm.size)]
    params, seen = zeros(shapes), []
    opt = DistOpt(SGD(1.0), comm, threshold=300)
    if first:
        opt.load(folder, params)

    def step(grads, *arguments):
        seen.append(flat([p.data for p in params]))
        opt.step(list(zip(params, grads, strict=True)), *arguments)

    for k, (name, exchange, break_even) in enumerate(job.steps, first):
        step(gradients(comm.rank, k, shapes), SENDERS[name].compressor, break_even, exchange)
    states = [opt.state_dict()["states"]]
    for waits in drained:
        step([p.data for p in zeros(shapes)], ALL[waits], False, last)
    if not drained:
        opt.save(folder, params)
    seen.append(flat([p.data for p in params]))
    return seen, [*states, opt.state_dict()["states"]]


_MESSAGES = {}  # queues by communicator, sender, receiver and tag


def messages(*key):
    return _MESSAGES.setdefault(key, queue.Queue())  # at once, unlike a defaultdict, in which two threads make two


def begin_exchange(comm, parts, received, tag):
    """Send messages as a network does, from thread to thread; return what waits for those of the others."""
    there = comm._rendezvous
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    for rank in others:
        messages(there, comm.rank, rank, tag).put(parts[rank].copy())

    def end():
        for rank in others:
            received[rank][...] = messages(there, rank, comm.rank, tag).get(timeout=20)

    return end


def walk(jobs, last, pipelines=False, shapes=SHAPES):
    """Do jobs, each of which goes on from the one before, then send all that waits by the ``last`` exchange; judge."""
    expected, first = Reference(sum(p.data.size for p in zeros(shapes))), 0
    used = {SENDERS[step.sender].waits for job in jobs for step in job.steps}
    drains = [waits for waits in ALL if waits in used] * 2  # the second step pays what owners owe
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(distopt.exchange.choice, "GATHER_BELOW", 0),  # or two phases would begin at larger models
        mock.patch.multiple(ThreadCommunicator, pipelines=pipelines, _begin_exchange=begin_exchange),
    ):
        for number, job in enumerate(jobs):
            size, drained = job.ranks.size, drains if number == len(jobs) - 1 else []
            if number:
                expected.resize(size / jobs[number - 1].ranks.size)
            arguments = job, last, drained, shapes, first, folder
            ranks = run_ranks(size, lambda comm, arguments=arguments: trained(comm, *arguments))
            seen = ranks[0][0]
            assert all(np.array_equal(others, seen) for others, _ in ranks)
            applied, rounding = [size * (a - b) for a, b in itertools.pairwise(seen)], 1e-9
            for k, (step, change) in enumerate(zip(job.steps, applied, strict=False), first):
                sender, total = SENDERS[step.sender], sum(flat(gradients(rank, k, shapes)) for rank in range(size))
                expected.step(sender, total, change)
                rounding += 2**-11 * size * abs(change).max() if sender.rounds else 0
            before, behind = (of_all([states[k] for _, states in ranks], shapes) for k in range(2))
            waits = sum(before[state] for state in STATES[GRADIENTS])
            np.testing.assert_allclose(waits, expected.waits[GRADIENTS], atol=rounding)
            np.testing.assert_allclose(before["velocity"], expected.velocity, atol=1e-9)
            expected.waits[GRADIENTS], first = waits, first + len(job.steps)
        for name, change in zip(drained, applied[len(job.steps) :], strict=True):
            np.testing.assert_allclose(change, expected.waits[name], atol=1e-9, err_msg=name)
            expected.waits[name] = np.zeros_like(change)
        for state in set().union(*STATES.values()):
            np.testing.assert_allclose(behind[state], 0, atol=1e-9, err_msg=state)


def of_all(states, shapes):
    """The sum over ranks of each state, flat; a rank has none of what it has not met."""
    names = {"velocity"}.union(*STATES.values())
    assert set().union(*states) <= names
    return {
        name: sum(
            flat([of_rank.get(name, {}).get(f"p{k}", np.zeros(shape)) for k, shape in enumerate(shapes)])
            for of_rank in states
        )
        for name in names
    }


def every_change(name, other="top-K"):
    """A program that meets every exchange after every other one, and another sender on its way."""
    path = [0, 0, 1, 1, 2, 2, 3, 3, 0, 2, 0, 3, 1, 3, 2, 1, 0]
    steps = [Step(name, EXCHANGES[k]) for k in path]
    return [*steps[:9], Step(other, "two_phase"), Step(other, "nodes"), *steps[9:]]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "last"), tiers.in_turn(SENDERS, EXCHANGES[:3]))
def test_every_sender_in_every_change_of_exchange(name, last):
    """What waits in the end is sent by each exchange in turn."""
    walk([Job(Ranks(6, 2), every_change(name, "frequencies" if name == "top-K" else "top-K"))], last)


@pytest.mark.parametrize("name", ["top-K", "dgc", "frequencies", "one bit"])
@pytest.mark.parametrize(("first", "then"), [((4, 2), (6, 3)), ((6, 2), (3, 1)), ((6, 3), (4, 2))])
@pytest.mark.sampled(2)
def test_other_ranks_on_other_nodes_go_on(name, first, then):
    """Those that save are heirs of buckets that they do not own after the resume."""
    by_nodes, two_phase = [Step(name, "nodes")], [Step(name, "two_phase")]
    walk([Job(Ranks(*first), by_nodes + two_phase), Job(Ranks(*then), by_nodes)], "nodes")


@pytest.mark.parametrize("name", ["top-K", "frequencies"])
def test_a_rank_pays_the_debts_of_its_neighbour_though_its_own_shard_stays(name):
    walk([Job(Ranks(6, 2), [Step(name, "two_phase")] * 2 + [Step(name, "nodes")])], "nodes", shapes=EQUAL)


@pytest.mark.parametrize("pipelines", [False, True])
@pytest.mark.parametrize("exchange", ["gather", "nodes"])
def test_what_owners_owe_is_sent_where_payloads_are_added_on_the_wire(exchange, pipelines, monkeypatch):
    """Also where a bucket is compressed while another one is on its way."""
    monkeypatch.setattr(ThreadCommunicator, "pipelines", pipelines)
    monkeypatch.setattr(ThreadCommunicator, "_begin_exchange", begin_exchange)

    def main(comm):
        comm._hosts = [0, 0, 1, 1]
        params, opt = zeros(SHAPES), DistOpt(SGD(1.0), comm, threshold=300)
        for k in range(2):
            grads = gradients(comm.rank, k)
            opt.step(list(zip(params, grads, strict=True)), ErrorFeedback(TopK(0.1)), False, "two_phase")
        for _ in range(8):  # of zeros: a half carries 11 bits of what is left
            opt.step([(p, np.zeros(p.data.shape)) for p in params], ErrorFeedback(Half()), exchange=exchange)
        return flat([p.data for p in params]), opt.state_dict()["states"]

    of_ranks = run_ranks(4, main)
    total = sum(flat(gradients(rank, k)) for rank in range(4) for k in range(2))
    np.testing.assert_allclose(-4 * of_ranks[0][0], total, atol=0.1)
    kept = of_all([states for _, states in of_ranks], SHAPES)
    np.testing.assert_allclose(kept["residual"] + kept["owed"], 0, atol=1e-9)


@pytest.mark.parametrize("name", ["frequencies", "top-K", "dgc"])
@pytest.mark.sampled(1)
def test_virtual_ranks_move_what_waits_as_threads_do(name, monkeypatch):
    monkeypatch.setattr(distopt.exchange.choice, "GATHER_BELOW", 0)
    program, hosts = every_change(name), [0, 0, 1, 1, 2, 2]

    def train(opt, loss):
        params = zeros(SHAPES)
        for k, step in enumerate(program):
            opt.step(loss(params, k), SENDERS[step.sender].compressor, step.break_even, step.exchange)
        return [p.data.tobytes() for p in params]

    def main(comm):
        comm._hosts = hosts
        opt = DistOpt(SGD(1.0), comm, threshold=300)
        return train(opt, lambda params, k: list(zip(params, gradients(comm.rank, k), strict=True)))

    virtual = simulate(6, SGD(1.0), hosts=hosts, threshold=300)
    turns = train(virtual, lambda params, k: lambda rank: list(zip(params, gradients(rank, k), strict=True)))
    assert turns == run_ranks(6, main)[0]


STEP = st.builds(Step, st.sampled_from(sorted(SENDERS)), st.sampled_from(EXCHANGES), st.booleans())
RANKS = st.sampled_from([Ranks(*r) for r in [(2, 1), (2, 2), (3, 1), (4, 2), (6, 2), (6, 3), (4, 4)]])
JOBS = st.lists(st.builds(Job, RANKS, st.lists(STEP, min_size=1, max_size=6)), min_size=1, max_size=3)


@pytest.mark.thorough
@pytest.mark.parametrize("programs", [100, pytest.param(300, marks=pytest.mark.full)])
def test_no_program_loses_anything(programs):
    @settings(max_examples=programs)
    @given(JOBS, st.sampled_from(EXCHANGES), st.booleans(), st.sampled_from([SHAPES, EQUAL]))
    def of_any(jobs, last, pipelines, shapes):
        walk(jobs, last, pipelines, shapes)

    of_any()
