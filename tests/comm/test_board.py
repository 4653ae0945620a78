"""Short messages and larger ones between processes of one machine, in memory that they share."""

import multiprocessing
import os
import signal
import time

import numpy as np
import pytest

from distopt.comm import run_ranks
from distopt.comm.board import HEAD, Board, RankEnded
from distopt.comm.outbox import Outboxes

ROUNDS = 300


def boards(size, length):
    """A board for each of several ranks of this process."""
    arrays = [np.zeros(HEAD + 2 * length, np.int64) for _ in range(size)]
    return [Board(arrays, rank, [os.pidfd_open(os.getpid()) for _ in range(size)]) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_all_ranks_read_what_each_wrote_in_the_round(size):
    made = boards(size, 4)

    def main(comm):
        board = made[comm.rank]
        for k in range(ROUNDS):
            if (k + comm.rank) % 7 == 0:
                time.sleep(1e-4)
            frames = board.swap(np.array([comm.rank, k, k * comm.rank, 1]))
            assert [f.tolist() for f in frames] == [[r, k, k * r, 1] for r in range(size)]
        return True

    assert run_ranks(size, main) == [True] * size


@pytest.mark.parametrize("size", [1, 2, 4])
def test_outboxes_bring_every_part_to_its_rank(size):
    """Of lengths that grow and shrink, 0 among them, of several dtypes, and one array for all."""

    def main(comm):
        outboxes = Outboxes.open(comm.control)
        assert outboxes is not None
        rng = [np.random.default_rng(source) for source in range(size)]
        for k in range(60):
            dtype = (np.float32, np.uint8, np.int64)[k % 3]
            sent = [
                [(rng[s].integers(0, 100, int(rng[s].integers(0, 40 * (k + 1))))).astype(dtype) for _ in range(size)]
                for s in range(size)
            ]
            if k % 5 == 0:
                sent = [[parts[0]] * size for parts in sent]
            received = [np.zeros_like(sent[s][comm.rank]) for s in range(size)]
            outboxes.exchange(sent[comm.rank], received)
            for s in range(size):
                if s != comm.rank:
                    np.testing.assert_array_equal(received[s], sent[s][comm.rank])
        outboxes.close()
        return True

    assert run_ranks(size, main) == [True] * size


def test_a_process_that_has_ended_is_noticed_and_one_that_is_late_is_not():
    late = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    late.start()
    try:
        arrays = [np.zeros(HEAD + 2, np.int64) for _ in range(2)]
        board = Board(arrays, 0, [os.pidfd_open(os.getpid()), os.pidfd_open(late.pid)])
        arrays[1][0] = 1
        assert len(board.swap(np.zeros(1, np.int64))) == 2  # it is there, whatever becomes of it later
        os.kill(late.pid, signal.SIGKILL)
        with pytest.raises(RankEnded, match="rank 1 has ended") as raised:
            board.swap(np.zeros(1, np.int64))
        assert raised.value.rank == 1
    finally:
        late.kill()
        late.join()


def test_there_is_no_board_without_descriptors_of_processes(monkeypatch):
    monkeypatch.setattr(os, "pidfd_open", lambda process: (_ for _ in ()).throw(OSError), raising=False)
    assert run_ranks(2, lambda comm: Board.open(comm.control, 1, 2)) == [[], []]
