"""Short messages between all ranks of one machine, through memory that they share."""

import ctypes
import json
import os
import select
import weakref
from collections.abc import Sequence

import numpy as np

from distopt.comm.control import ControlChannel, PeerLeft
from distopt.comm.shared_memory import allocate, handle_of, open_handle
from distopt.kernels.signatures import library

HEAD = 8  # int64 numbers before the frames of a rank: a cache line, in which its round is
REVOKED = 1  # index of the number in it that is 1 when the rank has revoked the board
PATIENCE = 20_000_000  # nanoseconds between two looks at whether the others still live


class RankEnded(PeerLeft):
    """The process of a rank has ended, and has written nothing more."""

    def __init__(self, rank: int, how: str = "has ended"):
        super().__init__(f"rank {rank} {how}")
        self.rank = rank


class Board:
    """Frames of all ranks of one machine, one per round and rank, in memory that all of them read."""

    # A round takes microseconds, while a message through a socket takes a tenth of a millisecond.  Frames of two rounds
    # have places of their own: a rank can begin a round only when all have read the last but one.

    def __init__(self, arrays: Sequence[np.ndarray], rank: int, ends: Sequence[int]):
        length = (arrays[rank].size - HEAD) // 2
        # arrays: those of all ranks, in rank order, with `HEAD` numbers and two frames each
        # ends: file descriptors by which each process tells that it has ended, in rank order
        self._arrays, self._rank, self._ends = arrays, rank, ends
        self._closing = weakref.finalize(self, _close, ends)
        self._frames = [[a[HEAD + k * length : HEAD + (k + 1) * length] for a in arrays] for k in (0, 1)]
        self._rounds = (ctypes.c_void_p * len(arrays))(*(a.ctypes.data for a in arrays))
        self._round = 0

    @classmethod
    def open(cls, control: ControlChannel, *lengths: int) -> "list[Board]":
        """Make boards of the ranks of a channel; [] where they do not share memory.  Collective."""
        # lengths: int64 numbers of a frame of each.
        # Two gathers for all of them: before there are boards, each is four messages to every other rank.
        mine = [allocate(HEAD + 2 * n, np.int64) for n in lengths]
        told = control.gather(json.dumps([os.getpid(), *("" if x is None else handle_of(x) for x in mine)]))
        processes, *handles = zip(*map(json.loads, told), strict=True)
        arrays = [
            [x if rank == control.rank else open_handle(handle, np.int64) for rank, handle in enumerate(of_board)]
            for x, of_board in zip(mine, handles, strict=True)
        ]
        ends = [_ends(processes) for _ in lengths]
        whole = all(x is not None for of_board in arrays for x in of_board) and all(ends)
        if not all(control.gather("yes" * whole)):
            for opened in ends:
                _close(opened)
            return []
        return [cls([x for x in a if x is not None], control.rank, e) for a, e in zip(arrays, ends, strict=True)]

    def write(self, frame: np.ndarray) -> list[np.ndarray]:
        """Write this rank's frame of the next round, and return where the frames of all ranks will be."""
        self._round += 1
        frames = self._frames[self._round & 1]
        frames[self._rank][...] = frame
        library().begin_round(self._rounds[self._rank], self._round)
        return frames

    def swap(self, frame: np.ndarray) -> list[np.ndarray]:
        """Write this rank's frame, and return those of all ranks, which stay until the next round.  Collective."""
        self._check_revoked(self._rank)
        frames = self.write(frame)
        while (late := self._late(PATIENCE)) is not None:
            for rank in range(len(self._arrays)):
                self._check_revoked(rank)
            if self.has_ended(late) and self._late(0) == late:  # not in between
                raise RankEnded(late)
        return frames

    def check(self) -> None:
        """Raise RankEnded if a rank has ended, or has revoked the board."""
        for rank in range(len(self._arrays)):
            self._check_revoked(rank)
            if self.has_ended(rank):
                raise RankEnded(rank)

    def revoke(self) -> None:
        """From now on RankEnded is raised on every rank that waits, or will wait, on this board."""
        self._arrays[self._rank][REVOKED] = 1

    def has_ended(self, rank: int, patience: float = 0.0) -> bool:
        """Tell if the process of a rank has ended, or does so within ``patience`` seconds."""
        return bool(select.select([self._ends[rank]], [], [], patience)[0])

    def close(self) -> None:
        self._closing()

    def _check_revoked(self, rank: int) -> None:
        if self._arrays[rank][REVOKED]:
            raise RankEnded(rank, "goes on without a rank that was lost")

    def _late(self, patience: int) -> int | None:
        """Return a rank that has not begun this round after so many nanoseconds; None if all have."""
        first = int(library().first_late(len(self._arrays), self._rounds, self._round, patience))
        return None if first == len(self._arrays) else first


def _close(ends: Sequence[int]) -> None:
    for end in ends:
        os.close(end)


def _ends(processes: Sequence[int]) -> list[int]:
    """Return descriptors of processes, which can be read when they have ended; [] where the kernel has none."""
    try:
        return [os.pidfd_open(process) for process in processes]
    except (AttributeError, OSError):
        return []
