"""Launchers of one elastic job on several machines: one of them starts the job, the others start ranks for it.

Node 0's launcher knows all ranks: who is a member of what, who has ended and why.  The launcher of each other node has
one connection to it, over which it passes on what its ranks say, and the marks that they leave.  When the connection
ends, or its machine gives no sign of life for ``SILENCE``, all ranks of that node are lost; and that node's
launcher ends them, so that none of them wakes up in a job that has gone on.
"""

import contextlib
import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from distopt.comm.keepalive import keep_alive
from distopt.comm.launchers import LOOPBACK, meeting
from distopt.comm.listener import TIMEVAL, RankListener, Words
from distopt.resilience import job
from distopt.run.elastic_job import AllEnds
from distopt.run.ends import Ends
from distopt.run.processes import END_SECONDS, POLL_SECONDS

# environment variable: the same text on all machines, known to nobody else
SECRET = "DISTOPT_SECRET"
# Seconds without a sign of life.  Less than for connections between ranks: what they say when they notice would begin
# the time anew.
SILENCE = 3
GRACE = 5  # seconds for another launcher to read what it is told
PATIENCE = 60.0  # seconds for all nodes to come
NODES = Words("node", "--node ", "--nodes ")
KILLED = 137  # exit code of a rank that was lost with its machine


class Place(NamedTuple):
    """This machine's place in a job."""

    nodes: int
    node: int
    host: str  # where node 0 listens
    port: int


def place(nodes: int, node: int | None, at: str | None, environ: Mapping[str, str] = os.environ) -> Place:
    """Return this machine's place in a job of several; ValueError if something is missing, or is out of range.

    Example:
        >>> place(2, 1, "10.0.0.1:29400", {})
        Place(nodes=2, node=1, host='10.0.0.1', port=29400)
    """
    # node: this one's number; None if Slurm tells it.
    # at: HOST:PORT, where node 0 listens; None if Slurm tells it.
    step = meeting(environ)
    if step and step.size == nodes:
        node = step.rank if node is None else node
        at = f"{step.host}:{step.port}" if at is None else at
    if node is None or at is None:
        raise ValueError("--node and --at must be given with --nodes; srun --ntasks-per-node=1 tells them")
    if not 0 <= node < nodes:
        raise ValueError(f"--node must be from 0 to {nodes - 1}, got {node}")
    host, _, port = at.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"--at must be HOST:PORT, with a port from 1 to 65535, got {at!r}")
    if not environ.get(SECRET):
        raise ValueError(
            f"{SECRET} must be the same text on all nodes, known to nobody else: "
            f"export {SECRET}=$(openssl rand -hex 16) before srun, or write it down"
        )
    return Place(nodes, node, host, int(port))


class Trunk:
    """The connection between the launchers of two nodes."""

    def __init__(self, connection: Connection):
        self._connection, self._lock = connection, threading.Lock()
        with socket.socket(fileno=os.dup(connection.fileno())) as own:
            keep_alive(own, SILENCE)
            own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, TIMEVAL.pack(GRACE, 0))
            self.address: str = own.getsockname()[0]  # this machine's, as the other one knows it

    def send(self, **message: Any) -> None:
        """Send a message; an end that is gone, or that has not read for ``GRACE`` seconds, is given up."""
        try:
            with self._lock:
                self._connection.send_bytes(json.dumps(message).encode())
        except OSError:
            self.shut()

    def receive(self) -> dict[str, Any] | None:
        """Wait for a message, and return it; None if the other end is gone."""
        try:
            return dict(json.loads(self._connection.recv_bytes()))
        except (EOFError, OSError, ValueError):
            return None

    def shut(self) -> None:
        """``receive`` returns None from now on, at both ends."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as own:
            own.shutdown(socket.SHUT_RDWR)


def key() -> bytes:
    """What the launchers of a job prove that they know."""
    return hashlib.blake2b(os.environ[SECRET].encode(), digest_size=32, person=b"distopt nodes").digest()


class End(NamedTuple):
    """How a rank of another node has ended: what ``Ends`` says of it there."""

    rank: int
    in_order: bool
    told: str
    code: int


class Node:
    """What node 0 knows of the ranks of another node."""

    def __init__(self, number: int, trunk: Trunk, ranks: range):
        self.number, self.trunk, self.ranks = number, trunk, ranks
        # marks of its ranks, as far as they have come
        self.marks = {rank: job.Rank(rank, 0, {}, 0, "", "") for rank in ranks}
        # ended: the ends of its ranks, in this order
        self.ended: dict[int, End] = {}
        self.stopped: set[int] = set()  # ranks that a signal has stopped
        self.reached = True  # whether the connection lasts

    def send(self, member: int, message: Mapping[str, Any]) -> None:
        """Send a message to one of its ranks."""
        self.trunk.send(to=member, message=message)

    def hear(self, tell: Callable[[int, Mapping[str, Any] | None], object]) -> None:
        """Act on what its launcher says, until that is gone."""
        # tell: is given a rank, and what it says; None when it has ended.
        while told := self.trunk.receive():
            match told:
                case {"of": member, "message": message}:
                    tell(member, message)
                case {"ranks": ranks, "stopped": stopped, "ended": ended}:
                    self.marks |= {rank.rank: rank for rank in map(_unpacked, ranks)}
                    self.stopped = set(stopped)
                    self.ended |= {end.rank: end for end in (End(*end) for end in ended)}
                case {"asked": number}:
                    os.kill(os.getpid(), number)  # as if this launcher were asked
        self.reached = False
        for rank in self.ranks:
            if rank not in self.ended:
                how = f"rank {rank} is lost with node {self.number}, which cannot be reached, {self.marks[rank].where}"
                self.ended[rank] = End(rank, False, how, KILLED)
                tell(rank, None)


class Nodes:
    """The launchers of all other nodes, as node 0 knows them."""

    def __init__(self, others: Sequence[Node] = ()):
        self.others = others
        self._threads: list[threading.Thread] = []

    @classmethod
    def meet(cls, at: Place, ranks: int) -> "Nodes":
        """Wait for all other nodes, and tell them the numbers of their ranks, which follow the ``ranks`` of node 0."""
        # Raises RuntimeError if nodes are missing, or two have one number.
        listener = RankListener((_listening(at.host), at.port), key(), at.nodes, PATIENCE, NODES)
        lines = listener.connections(time.monotonic() + PATIENCE)
        others, first = [], ranks
        for number, line in lines.items():
            trunk = Trunk(line)
            count = (trunk.receive() or {"ranks": 0})["ranks"]
            others.append(Node(number, trunk, range(first, first + count)))
            first += count
        for node in others:
            node.trunk.send(first=node.ranks.start)
        return cls(others)

    @property
    def ranks(self) -> int:
        """The number of ranks of all other nodes."""
        return sum(len(node.ranks) for node in self.others)

    @property
    def address(self) -> str:
        """This machine's address, as the others know it."""
        return self.others[0].trunk.address if self.others else LOOPBACK

    def of(self, rank: int) -> Node | None:
        """Return the node of a rank; None for node 0."""
        return next((node for node in self.others if rank in node.ranks), None)

    def ends(self, own: Ends) -> AllEnds:
        """Return the ends of all ranks; ``own`` are those of this node's."""
        return EndsOfNodes(own, self) if self.others else own

    def start(self, tell: Callable[[int, Mapping[str, Any] | None], object]) -> None:
        """Start to read what the other nodes say; the argument is that of ``Node.hear``."""
        for node in self.others:
            thread = threading.Thread(target=node.hear, args=[tell], name=f"node {node.number}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def running(self) -> bool:
        """Whether any rank of other nodes runs."""
        return any(node.reached and len(node.ended) < len(node.ranks) for node in self.others)

    def signal(self, number: int) -> None:
        for node in self.others:
            for rank in node.ranks:
                node.trunk.send(signal=number, rank=rank)

    def end(self, grace: float) -> None:
        """Let the launchers of all nodes end their ranks within so many seconds."""
        for node in self.others:
            node.trunk.send(end=grace)
        deadline = time.monotonic() + grace + END_SECONDS
        while self.running() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        for node in self.others:
            if node.reached and len(node.ended) < len(node.ranks):
                node.trunk.shut()

    def close(self, code: int) -> None:
        """End all other launchers, with the job's exit code."""
        for node in self.others:
            node.trunk.send(over=code)
        for node, thread in zip(self.others, self._threads, strict=True):
            thread.join(GRACE)
            node.trunk.shut()


class EndsOfNodes:
    """The ends of the ranks of all nodes."""

    def __init__(self, own: Ends, nodes: Nodes):
        self._own, self._nodes = own, nodes
        self._order: list[int] = []  # in which they ended, as far as it is known here

    def look(self, seconds: float) -> list[job.Rank]:
        return self._own.look(seconds) + [rank for node in self._nodes.others for rank in list(node.marks.values())]

    def ended(self, ranks: Sequence[job.Rank]) -> list[job.Rank]:
        own = self._own.ended([rank for rank in ranks if not self._nodes.of(rank.rank)])
        numbers = [rank.rank for rank in own] + [rank for node in self._nodes.others for rank in list(node.ended)]
        self._order += [number for number in numbers if number not in self._order]
        by_number = {rank.rank: rank for rank in ranks}
        return [by_number[number] for number in self._order]

    def in_order(self, rank: job.Rank) -> bool:
        node = self._nodes.of(rank.rank)
        return node.ended[rank.rank].in_order if node else self._own.in_order(rank)

    def told(self, rank: job.Rank) -> str:
        node = self._nodes.of(rank.rank)
        return node.ended[rank.rank].told if node else self._own.told(rank)

    def code(self, rank: job.Rank) -> int:
        node = self._nodes.of(rank.rank)
        return node.ended[rank.rank].code if node else self._own.code(rank)

    def is_stopped(self, rank: job.Rank) -> bool:
        node = self._nodes.of(rank.rank)
        return rank.rank in node.stopped if node else self._own.is_stopped(rank)

    def send(self, rank: int, number: int) -> None:
        node = self._nodes.of(rank)
        node.trunk.send(signal=number, rank=rank) if node else self._own.send(rank, number)

    def close(self) -> None:
        self._own.close()


def _listening(host: str) -> str:
    """The address at which node 0 listens: all, where this machine's name is known to itself alone."""
    address = socket.gethostbyname(host)
    return "" if address.startswith("127.") and address != LOOPBACK else address


def _unpacked(fields: Sequence[Any]) -> job.Rank:
    rank = job.Rank(*fields)
    return rank._replace(marks={kind: set(details) for kind, details in rank.marks.items()})
