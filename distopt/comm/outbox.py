"""Messages between ranks of one machine, through memory that they share."""

from collections.abc import Sequence

import numpy as np

from distopt.comm.board import Board
from distopt.comm.control import ControlChannel
from distopt.comm.shared_memory import SharedMemory, open_handle

HANDLE = 6  # numbers of a handle


class Outboxes:
    """Exchange arrays with ranks of one machine: each writes its own to memory from which the others read them.

    Each rank has two of these memories, of which it writes to one while the others may still read the last exchange's
    from the other one.  A memory that is too small is replaced by a larger one, of which the others hear in the frame
    that says where their parts are.

    Args:
        board: of frames of ``HANDLE + size`` numbers.
        rank: this rank.
        size: the number of ranks.
    """

    def __init__(self, board: Board, rank: int, size: int):
        self._board, self._rank, self._size = board, rank, size
        self._memory = SharedMemory()
        self._mine = [np.empty(0, np.uint8)] * 2
        self._handles = [np.zeros(HANDLE, np.int64)] * 2
        self._opened: dict[tuple[int, int], tuple[bytes, np.ndarray]] = {}  # by rank and turn
        self._turn = 0

    @classmethod
    def open(cls, control: ControlChannel) -> "Outboxes | None":
        """Make the outboxes of the ranks of a channel; None where they do not share memory.  Collective."""
        board = Board.open(control, HANDLE + control.size)
        return cls(board, control.rank, control.size) if board else None

    def exchange(self, parts: Sequence[np.ndarray], received: Sequence[np.ndarray]) -> None:
        """Send ``parts[r]`` to every other rank r, and receive ``received[r]``, flat arrays of known lengths.

        Raises:
            RankEnded: a rank has ended.
        """
        self._turn ^= 1
        frame = self._written(parts)
        for rank, said in enumerate(self._board.swap(frame)):
            if rank != self._rank and received[rank].size:
                start, into = int(said[HANDLE + self._rank]), received[rank].view(np.uint8)
                into[...] = self._of(rank, said[:HANDLE])[start : start + into.size]

    def close(self) -> None:
        """Release the board."""
        self._board.close()

    def _written(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Write the parts, each array once, and return the frame that says where they are."""
        starts: dict[int, int] = {}  # by address: a gather sends one array to all ranks
        end = 0
        for to, part in enumerate(parts):
            if to != self._rank and part.size and part.ctypes.data not in starts:
                starts[part.ctypes.data] = end
                end += -(-part.nbytes // 64) * 64
        self._reserve(end)
        frame, mine = np.zeros(HANDLE + self._size, np.int64), self._mine[self._turn]
        frame[:HANDLE] = self._handles[self._turn]
        written: set[int] = set()
        for to, part in enumerate(parts):
            address = part.ctypes.data
            if to != self._rank and part.size:
                start = frame[HANDLE + to] = starts[address]
                if address not in written:
                    mine[start : start + part.nbytes] = part.view(np.uint8)
                    written.add(address)
        return frame

    def _reserve(self, nbytes: int) -> None:
        if nbytes > self._mine[self._turn].size:
            memory = self._memory.alloc(max(2 * self._mine[self._turn].size, nbytes), np.uint8)
            if memory is None:
                raise MemoryError(f"{nbytes} bytes of memory that ranks share cannot be allocated")
            self._mine[self._turn] = memory
            self._handles[self._turn] = np.array(self._memory.handle(memory).split(), np.int64)

    def _of(self, rank: int, handle: np.ndarray) -> np.ndarray:
        """Return the memory of another rank, opened once."""
        known = self._opened.get((rank, self._turn))
        if known is None or known[0] != handle.tobytes():
            memory = open_handle(" ".join(map(str, handle.tolist())), np.uint8)
            if memory is None:
                raise RuntimeError(f"the memory of rank {rank} cannot be opened any more")
            known = self._opened[rank, self._turn] = handle.tobytes(), memory
        return known[1]
