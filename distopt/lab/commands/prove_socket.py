"""Two ranks with one TCP connection between them, whose every byte is counted, for ``distopt prove``."""

import contextlib
import socket
import struct
from collections.abc import Iterator, Sequence

import numpy as np

from distopt.comm.communicator import (
    Communicator,
    Ragged,
    all_reduce_in_rank_order,
    as_flat,
    check_root,
    flat_parts,
)
from distopt.comm.control import ControlChannel, PeerLeft

FRAME = struct.Struct("<Q")  # precedes each message: the length of its data in bytes
BYTES_RECEIVED = struct.Struct("<Q"), 128  # tcpi_bytes_received of Linux's struct tcp_info, and its offset


@contextlib.contextmanager
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Return a context with both ends of a TCP connection through the loopback interface; it closes them."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as one,
        server.accept()[0] as other,
    ):
        for end in (one, other):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield one, other


class SocketPair(Communicator):
    """Communicator of two ranks that send each other arrays, and nothing else, over a TCP connection.

    Each message is a frame of 8 bytes, the length, and the array's bytes.  Sums are formed in rank order: each rank
    sends the slice that the other one owns, and the sum of its own.  ``written`` and ``messages`` count what this rank
    has written, in bytes, frames included.  Votes take another way, ``control``.
    """

    size, may_overlap, rank_ordered = 2, False, True

    def __init__(self, end: socket.socket, rank: int, control: ControlChannel):
        self.rank = self.local_rank = rank
        self.control, self._end = control, end
        self.written = self.messages = 0

    @property
    def received_by_kernel(self) -> int | None:
        """Bytes that have come over the connection, as the kernel counts them; None where it does not."""
        field, offset = BYTES_RECEIVED
        state = self._end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        return field.unpack_from(state, offset)[0] if len(state) >= offset + field.size else None

    def all_reduce(self, x: np.ndarray) -> None:
        all_reduce_in_rank_order(self, x)

    def all_gather(self, x: np.ndarray, ragged: Ragged = False, into: np.ndarray | None = None) -> list[np.ndarray]:
        """Return both ranks' x, flat; a message has its length, and ``into`` is not used.  Collective."""
        return self.all_to_all([x, x])

    def all_to_all(self, parts: Sequence[np.ndarray], ragged: Ragged = False) -> list[np.ndarray]:
        flat = flat_parts(parts, self.size)
        own, to_other = flat[self.rank].copy(), flat[1 - self.rank]
        if self.rank == 0:  # who writes first, so that neither waits for the other
            self._write(to_other)
            return [own, self._read(own.dtype)]
        other = self._read(own.dtype)
        self._write(to_other)
        return [other, own]

    def broadcast(self, x: np.ndarray, root: int = 0) -> None:
        flat = as_flat(x)
        if self.rank == check_root(root, self.size):
            self._write(flat)
        else:
            flat[:] = self._read(flat.dtype)

    def barrier(self) -> None:
        """Wait for the other rank by a vote, which sends nothing over the connection.  Collective."""
        self.control.gather("")

    def make_duplicate(self) -> Communicator:
        """Return this communicator: one thread alone may exchange."""
        return self

    def close(self) -> None:
        self._end.close()

    def _write(self, x: np.ndarray) -> None:
        data = FRAME.pack(x.nbytes) + x.tobytes()
        self._end.sendall(data)
        self.written += len(data)
        self.messages += 1

    def _read(self, dtype: np.dtype) -> np.ndarray:
        (nbytes,) = FRAME.unpack(self._receive(FRAME.size))
        return np.frombuffer(self._receive(nbytes), dtype)

    def _receive(self, nbytes: int) -> bytearray:
        data = bytearray(nbytes)
        rest = memoryview(data)
        while rest:
            count = self._end.recv_into(rest)
            if not count:
                raise PeerLeft(f"rank {1 - self.rank} closed the connection")
            rest = rest[count:]
        return data
