"""Logical ranks: where they live, and their collectives between the processes that have them."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_half_in_shared_memory import Apart

from distopt.comm import LocalCommunicator, Metered, in_rank_order, run_ranks, world
from distopt.comm.logical import (
    Logical,
    exchange_of_ranks,
    gather_of_ranks,
    numbers_of_ranks,
    peers_of_ranks,
    sum_of_ranks,
)
from distopt.comm.ranks import Ranks, placed


@st.composite
def placements(draw):
    """A number of ranks, and which of them processes have kept, of which some may be new, and others were lost."""
    size, processes = draw(st.integers(1, 12)), draw(st.integers(1, 6))
    homes = draw(st.lists(st.integers(0, 7), min_size=size, max_size=size))
    return size, [[rank for rank, home in enumerate(homes) if home == p] for p in range(min(processes, size))]


@given(placements())
def test_ranks_are_placed_evenly_and_as_few_as_can_be_move(case):
    size, kept = case
    found = placed(size, kept)
    assert sorted(itertools.chain.from_iterable(found)) == list(range(size))
    assert {len(there) for there in found} <= {size // len(kept), -(-size // len(kept))}
    stay = sum(len(set(there) & set(before)) for there, before in zip(found, kept, strict=True))
    least, more = divmod(size, len(kept))
    by_load = sorted(map(len, kept), reverse=True)
    assert stay == sum(min(n, least + (k < more)) for k, n in enumerate(by_load))


class Placed(Logical):
    """Logical ranks that live where a test says."""

    def __init__(self, comm, by_process):
        super().__init__(comm, sum(map(len, by_process)))
        self._ranks = Ranks(self._size, by_process[comm.rank], by_process, logical=True)


PLACES = [((0, 1, 2, 3),), ((1, 3), (0, 2, 4)), ((0,), (3, 4), (1, 2, 5)), ((1,), (0,)), ((2,), (0, 3), (1,))]


def of(rank, n, dtype):
    return np.random.default_rng((rank, n)).integers(-99, 99, n).astype(dtype) / np.dtype(dtype).type(3)


def on(by_process, main):
    return run_ranks(len(by_process), lambda comm: main(Placed(comm, by_process)))


@pytest.mark.sampled(9)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("n", [0, 1, 5, 1000])
@pytest.mark.parametrize("by_process", PLACES)
def test_sums_are_in_the_order_of_ranks_wherever_they_live(by_process, n, dtype):
    def main(comm):
        arrays = [of(rank, n, dtype) for rank in comm.ranks.here]
        sum_of_ranks(comm, arrays)
        return arrays[-1]

    size = sum(map(len, by_process))
    wide = np.float32 if dtype == np.float16 else dtype
    total = of(0, n, dtype).astype(wide)
    for rank in range(1, size):
        total = total + of(rank, n, dtype)
    for found in on(by_process, main):
        assert found.tobytes() == total.astype(dtype).tobytes()


@pytest.mark.parametrize("by_process", PLACES)
def test_arrays_of_all_ranks_are_opened_in_their_order(by_process):
    def main(comm):
        arrays = [np.array([rank]) for rank in comm.ranks.here]
        assert peers_of_ranks(Apart(comm), arrays) is None
        of_ranks, lasts = peers_of_ranks(comm, arrays)
        assert [x.item() for x in of_ranks] == list(range(comm.ranks.size))
        assert all(of_ranks[rank] is x for rank, x in zip(comm.ranks.here, arrays, strict=True))
        assert [x.item() for x in lasts] == [there[-1] for there in by_process]

    on(by_process, main)


@pytest.mark.parametrize("known", [False, True], ids=["lengths are sent", "known"])
@pytest.mark.parametrize("by_process", PLACES)
def test_every_rank_gets_what_each_has_for_it(by_process, known):
    size = sum(map(len, by_process))

    def part(sender, to):
        return np.full(3 * sender + to, 16 * sender + to, np.uint8)

    def main(comm):
        lengths = [[3 * s + rank for s in range(size)] for rank in comm.ranks.here] if known else None
        parts = [[part(rank, to) for to in range(size)] for rank in comm.ranks.here]
        found = exchange_of_ranks(comm, parts, lengths)
        gathered = gather_of_ranks(
            comm, [part(r, 0) for r in comm.ranks.here], [3 * s for s in range(size)] if known else None
        )
        assert numbers_of_ranks(comm, [7 * rank for rank in comm.ranks.here]) == [7 * rank for rank in range(size)]
        return list(zip(comm.ranks.here, found, strict=True)), gathered

    for of_ranks, gathered in on(by_process, main):
        assert [x.tolist() for x in gathered] == [part(sender, 0).tolist() for sender in range(size)]
        for rank, received in of_ranks:
            assert [x.tolist() for x in received] == [part(sender, rank).tolist() for sender in range(size)]


def test_a_process_is_one_rank_unless_somebody_says_otherwise():
    assert LocalCommunicator().ranks == Ranks(1, (0,))
    assert run_ranks(3, lambda comm: Metered(in_rank_order(comm)).ranks) == [Ranks(3, (rank,)) for rank in range(3)]
    comm = Metered(Logical(LocalCommunicator(), 3))
    assert (comm.size, comm.ranks.size, comm.ranks.here, comm.rank_ordered) == (1, 3, (0, 1, 2), True)
    assert in_rank_order(comm) is comm


def test_a_world_keeps_its_logical_ranks():
    def main(comm):
        assert world() is comm
        first = world(logical=5)
        assert first is world() is world(logical=5)
        with pytest.raises(ValueError, match="logical must stay 5, got 6"):
            world(logical=6)
        return first.ranks.here

    assert run_ranks(2, main) == [(0, 1, 2), (3, 4)]


def test_shares_that_differ_are_told(caplog):
    run_ranks(2, lambda comm: Logical(comm, 4))
    assert not caplog.records
    run_ranks(5, lambda comm: Logical(comm, 12))
    texts = [record.getMessage() for record in caplog.records]
    assert texts == ["distopt: 12 logical ranks live in 5 processes as 3, 3, 2, 2, 2"]


@pytest.mark.parametrize("wrong", [0, 1, -1])
def test_fewer_ranks_than_processes_are_refused(wrong):
    def main(comm):
        with pytest.raises(ValueError, match=f"logical must be at least [12].*, got {wrong}"):
            Logical(comm, wrong)

    run_ranks(2, main)


@pytest.mark.parametrize("wrong", [2.0, "2", True, None])
def test_what_is_no_number_of_ranks_is_refused(wrong):
    with pytest.raises(TypeError, match="logical must be an integer"):
        Logical(LocalCommunicator(), wrong)


def test_ranks_on_gpus_are_refused():
    comm = LocalCommunicator()
    comm.gpu = 0
    with pytest.raises(ValueError, match="logical must be None for ranks on GPUs, which are one process each, got 4"):
        Logical(comm, 4)


@pytest.mark.parametrize("wrong", ["many", "-3", ""])
def test_a_variable_that_is_no_number_of_ranks_is_refused(monkeypatch, wrong):
    monkeypatch.setenv("DISTOPT_LOGICAL", wrong)
    with pytest.raises(ValueError, match="DISTOPT_LOGICAL must be a number of ranks, got"):
        run_ranks(1, lambda comm: world())
