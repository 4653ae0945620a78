"""Messages between ranks of one machine, through memory that they share."""

from collections.abc import Sequence

import numpy as np

from distopt.comm.board import Board, RankEnded
from distopt.comm.control import ControlChannel
from distopt.comm.shared_memory import allocate, handle_of, open_handle

HANDLE = 6  # numbers of a handle
# seconds from when a process's memory cannot be opened any more until it is known to have ended
ENDS = 1.0
NOTHING = np.empty(0, np.uint8)


class Outboxes:
    """Exchange arrays with ranks of one machine: each writes its own to memory from which the others read them."""

    # Each rank has two of these memories: it writes to one while the others may still read the last exchange from the
    # other one.  A memory that is too small is replaced by a larger one; the frame that says where the parts are tells
    # the others.  All have opened it before its rank continues, and may end.

    def __init__(self, board: Board, rank: int, size: int):
        # board: of frames of `HANDLE + size` numbers
        self._board, self._rank, self._size = board, rank, size
        self._mine = [NOTHING] * 2
        self._handles = [np.zeros(HANDLE, np.int64)] * 2
        # handle and memory, by rank and turn
        self._opened: dict[tuple[int, int], tuple[bytes, np.ndarray]] = {}
        self._turn = 0

    @classmethod
    def open(cls, control: ControlChannel) -> "Outboxes | None":
        """Make the outboxes of the ranks of a channel; None where they do not share memory.  Collective."""
        boards = Board.open(control, HANDLE + control.size)
        return cls(boards[0], control.rank, control.size) if boards else None

    def exchange(self, parts: Sequence[np.ndarray], received: Sequence[np.ndarray]) -> None:
        """Send ``parts[r]`` to every other rank r, and receive ``received[r]``, flat arrays of known lengths."""
        # Raises RankEnded: a rank has ended.
        self._turn ^= 1
        frames, any_new = self._board.swap(self._written(parts)), False
        for rank, frame in enumerate(frames):
            memory, new = self._of(rank, frame[:HANDLE])
            any_new |= new
            if rank != self._rank and received[rank].size:
                start, into = int(frame[HANDLE + self._rank]), received[rank].view(np.uint8)
                into[...] = memory[start : start + into.size]
        if any_new:  # which all ranks see alike
            self._board.swap(np.zeros(HANDLE + self._size, np.int64))

    def revoke(self) -> None:
        self._board.revoke()

    def close(self) -> None:
        self._board.close()

    def _written(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Write the parts, each array once, and return the frame that says where they are."""
        # a gather sends one array to all ranks
        places: dict[tuple[int, int], tuple[int, np.ndarray]] = {}
        frame, end = np.zeros(HANDLE + self._size, np.int64), 0
        for to, part in enumerate(parts):
            if to != self._rank and part.size:
                start, _ = places.setdefault((part.ctypes.data, part.nbytes), (end, part))
                frame[HANDLE + to], end = start, max(end, start + -(-part.nbytes // 64) * 64)
        self._reserve(end)
        frame[:HANDLE], mine = self._handles[self._turn], self._mine[self._turn]
        for start, part in places.values():
            mine[start : start + part.nbytes] = part.view(np.uint8)
        return frame

    def _reserve(self, nbytes: int) -> None:
        if nbytes > self._mine[self._turn].size:
            memory = allocate(max(2 * self._mine[self._turn].size, nbytes), np.uint8)
            if memory is None:
                raise MemoryError(f"{nbytes} bytes of memory that ranks share cannot be allocated")
            self._mine[self._turn] = memory
            self._handles[self._turn] = np.array(handle_of(memory).split(), np.int64)

    def _of(self, rank: int, handle: np.ndarray) -> tuple[np.ndarray, bool]:
        """Return the memory of a rank in this turn, and whether it is another one than two exchanges ago."""
        text = handle.tobytes()
        known = self._opened.get((rank, self._turn), (bytes(len(text)), NOTHING))
        if known[0] == text:
            return known[1], False
        memory = self._mine[self._turn]
        if rank != self._rank:
            opened = open_handle(" ".join(map(str, handle.tolist())), np.uint8)
            if opened is None:
                if self._board.has_ended(rank, ENDS):
                    raise RankEnded(rank)
                raise RuntimeError(f"the memory of rank {rank} cannot be opened")
            memory = opened
        self._opened[rank, self._turn] = text, memory
        return memory, True
