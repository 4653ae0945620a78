"""Ranks with a socket between each two of them: a whole transport, of which ``distopt prove`` counts every byte."""

import contextlib
import itertools
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from distopt.comm.communicator import Communicator, Groups, group_of
from distopt.comm.control import ControlChannel, MessageControl, PeerLeft

FRAME = struct.Struct("<Q")  # precedes each message: the length of its data in bytes
BYTES_RECEIVED = struct.Struct("<Q"), 128  # tcpi_bytes_received of Linux's struct tcp_info, and its offset


class SocketRanks(Communicator):
    """Communicator over a socket between each two ranks, for one thread.

    Each message is a frame of 8 bytes, the length, and the array's bytes.  ``written`` and ``messages`` count what this
    rank has written, in bytes, frames included.  Votes go over the same sockets, or take another way, ``control``.
    """

    may_overlap, rank_ordered = False, True

    def __init__(self, rank: int, ends: Sequence[Any], control: ControlChannel | None = None):
        # ends: a connected socket for each rank but this one
        self.rank = self.local_rank = rank
        self.size, self.ends = len(ends), ends
        self.written = self.messages = 0
        self.control = control or MessageControl(self)

    def exchange(self, parts: Sequence[np.ndarray], received: Sequence[np.ndarray]) -> None:
        """Send ``parts[r]`` to every other rank r, and receive ``received[r]``.  Collective."""
        for other in range(self.size):  # the two of a pair come to it when all pairs before it are done
            if self.rank < other:
                self._write(other, parts[other])
            if self.rank != other and received[other].size:
                self._read(other, received[other])
            if self.rank > other:
                self._write(other, parts[other])

    def among(self, members: Sequence[int], control: ControlChannel | None = None) -> "SocketRanks":
        """Make a communicator of some ranks, over the same sockets."""
        return SocketRanks(members.index(self.rank), [self.ends[member] for member in members], control)

    def make_subgroup(self, groups: Groups) -> Communicator:
        members = group_of(self.rank, groups)
        return self.among(members, self.control.subgroup(members))

    def close(self) -> None:
        for end in filter(None, self.ends):
            end.close()

    def _write(self, other: int, x: np.ndarray) -> None:
        if x.size:
            data = FRAME.pack(x.nbytes) + x.tobytes()
            with _heard_of(other):
                self.ends[other].sendall(data)
            self.written += len(data)
            self.messages += 1

    def _read(self, other: int, x: np.ndarray) -> None:
        frame = bytearray(FRAME.size)
        self._fill(memoryview(frame), other)
        if FRAME.unpack(frame) != (x.nbytes,):
            text = f"rank {other} sends {FRAME.unpack(frame)[0]} bytes, rank {self.rank} expects {x.nbytes}"
            raise ValueError(f"ranks differ: {text}")
        self._fill(x.view(np.uint8).data, other)

    def _fill(self, rest: memoryview, other: int) -> None:
        while rest:
            with _heard_of(other):
                count = self.ends[other].recv_into(rest)
                if not count:
                    raise ConnectionResetError
            rest = rest[count:]

    def received_by_kernel(self, other: int) -> int | None:
        """Return the bytes that have come from a rank, as the kernel counts them over TCP; None where it does not."""
        field, offset = BYTES_RECEIVED
        state = self.ends[other].getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        return field.unpack_from(state, offset)[0] if len(state) >= offset + field.size else None


@contextlib.contextmanager
def _heard_of(rank: int) -> Iterator[None]:
    """A context that raises PeerLeft if a rank has closed its sockets."""
    try:
        yield
    except OSError:
        raise PeerLeft(f"rank {rank} closed the connection") from None


@contextlib.contextmanager
def connected(size: int = 2) -> Iterator[list[list[Any]]]:
    """Return a context with each rank's sockets, TCP connections through the loopback interface; it closes them."""
    ends: list[list[Any]] = [[None] * size for _ in range(size)]
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as stack:
        for low, high in itertools.combinations(range(size), 2):
            ends[low][high] = stack.enter_context(socket.create_connection(server.getsockname()))
            ends[high][low] = stack.enter_context(server.accept()[0])
            for end in (ends[low][high], ends[high][low]):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield ends
