"""Launchers of one elastic job on several machines: one of them starts the job, the others start ranks for it.

Node 0's launcher knows all ranks: who is a member of what, who has ended and why.  The launcher of each other node has
one connection to it, over which it passes on what its ranks say, and the marks that they leave.  When the connection
ends, or its machine gives no sign of life for ``SILENCE``, all ranks of that node are lost; and that node's
launcher ends them, so that none of them wakes up in a job that has gone on.  A launcher that comes with that node's
number later brings other ranks, which wait to be let in.
"""

import contextlib
import hashlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from distopt.comm.keepalive import keep_alive
from distopt.comm.launchers import LOOPBACK, meeting
from distopt.comm.listener import ACCEPTED, TIMEVAL, RankListener, Words, connect
from distopt.resilience import job
from distopt.resilience.environment import ADDRESS, JOINS
from distopt.resilience.report import names
from distopt.resilience.signals import Requests
from distopt.resilience.timeouts import Limits, limits
from distopt.run.exit_watch import End
from distopt.run.processes import END_SECONDS, POLL_SECONDS, handling_signals, say
from distopt.run.rendezvous import Rendezvous
from distopt.run.supervised import Children

# environment variable: the same text on all machines, known to nobody else
SECRET = "DISTOPT_SECRET"
# Seconds without a sign of life.  Less than for connections between ranks: what they say when they notice would begin
# the time anew.
SILENCE = 3
GRACE = 5  # seconds for another launcher to read what it is sent
LEAST = 60.0  # seconds for all nodes to come, where ranks wait for a shorter time
QUIET = 10.0  # seconds until a launcher says that it waits for others
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
        >>> place(2, 1, "10.0.0.1:29400", {"DISTOPT_SECRET": "9f3c51e0"})
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


class NodeLink:
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
                self._connection.send_bytes(json.dumps(message, default=sorted).encode())
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


class Node:
    """What node 0 knows of the ranks of another node."""

    def __init__(self, number: int, link: NodeLink, first: int):
        # first: the number of the first of its ranks
        self.number, self.link = number, link
        self.ranks = ranks = range(first, first + (link.receive() or {"ranks": 0})["ranks"])
        # marks of its ranks, as far as they have come; their process ids mean nothing here
        self.marks = {rank: job.Rank(rank, 0, {}, 0, "", "") for rank in ranks}
        # ended: the ends of its ranks, in this order
        self.ended: dict[int, End] = {}
        self.stopped: set[int] = set()  # ranks that a signal has stopped
        self.reached = True  # whether the connection lasts

    def running(self) -> bool:
        """Whether any of its ranks runs, as far as it can be reached."""
        return self.reached and len(self.ended) < len(self.ranks)

    def hear(self, tell: Callable[[int, Mapping[str, Any] | None], object]) -> None:
        """Act on what its launcher says, until that is gone."""
        # tell: is given a rank, and what it says; None when it has ended.
        try:
            while heard := self.link.receive():
                match heard:
                    case {"of": member, "message": message}:
                        tell(member, message)
                    case {"ranks": ranks, "stopped": stopped, "ended": ended}:
                        for rank, _, marks, *more in ranks:
                            self.marks[rank] = job.Rank(rank, 0, {kind: set(of) for kind, of in marks.items()}, *more)
                        self.stopped = set(stopped)
                        self.ended |= {end.rank: end for end in (End(*end) for end in ended)}
                    case {"asked": number}:
                        os.kill(os.getpid(), number)  # as if this launcher were asked
        finally:  # whatever has ended this thread: the others must not wait for ranks that nobody hears of any more
            self.reached = False
            for rank in self.ranks:
                if rank not in self.ended:
                    how = f"rank {rank} is lost with node {self.number}, which cannot be reached"
                    self.ended[rank] = End(rank, False, f"{how}, {self.marks[rank].where}", KILLED)
                    tell(rank, None)


def patience() -> float:
    """Return the seconds in which all nodes are to come."""
    return max(LEAST, (limits() or Limits()).first)


@contextlib.contextmanager
def waiting_for(whom: str) -> Iterator[None]:
    """A context in which this process waits for others: it says so after a while, and ends when it is asked to."""
    timer = threading.Timer(QUIET, say, [f"waits for {whom}"])
    timer.start()
    try:
        # The first process of a container is deaf to signals that it has no function for.
        with handling_signals(lambda number: sys.exit(128 + number)):
            yield
    finally:
        timer.cancel()
        timer.join()


def listen(at: Place) -> RankListener:
    """Listen for the launchers of other nodes, as soon as this machine's name is known."""
    deadline = time.monotonic() + patience()
    while True:
        try:
            address = socket.gethostbyname(at.host)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise RuntimeError(f"--at: {at.host} has no address after {patience():g} s: {error}") from None
            time.sleep(POLL_SECONDS)
    # all, where this machine's name is known to itself alone
    address = "" if address.startswith("127.") and address != LOOPBACK else address
    return RankListener((address, at.port), key(), at.nodes, patience(), NODES)


def meet(at: Place, ranks: int) -> list[Node]:
    """Wait for all other nodes, and tell them the numbers of their ranks, which follow the ``ranks`` of node 0."""
    # Raises RuntimeError if nodes are missing, or two have one number.
    others, first = [], ranks
    with waiting_for(f"the launchers of {at.nodes} nodes at {at.host}:{at.port}"):
        come = listen(at).connections(time.monotonic() + patience())
    for number, line in come.items():
        others.append(Node(number, NodeLink(line), first))
        first += len(others[-1].ranks)
    for node in others:
        node.link.send(first=node.ranks.start, joins=False)
    return others


class Members(Children):
    """The ranks of an elastic job without MPI: this node's children, those of all other nodes, and their rendezvous."""

    grows = True

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        ranks: int,
        folder: Path,
        nodes: Sequence[Node] = (),
        warm: bool = False,
        at: Place | None = None,
    ):
        # at: where other nodes find this one; None if it is alone
        self._nodes = list(nodes)  # whose launchers start ranks of this job too
        self._count = ranks + sum(len(node.ranks) for node in nodes)
        self._rendezvous = Rendezvous(range(self._count), self._send, folder, self._count)
        self._order: list[int] = []  # in which ranks ended, as far as it is known here
        env = {**env, ADDRESS: nodes[0].link.address if nodes else LOOPBACK}
        super().__init__(command, env, range(ranks), folder, self._rendezvous.hear, warm)
        self.lines.start()
        self._threads = [self._hear(node) for node in nodes]
        self._door = listen(at) if at else None  # for those that come in the place of lost ones

    def _hear(self, node: Node) -> threading.Thread:
        thread = threading.Thread(target=node.hear, args=[self._rendezvous.hear], name=f"node {node.number}")
        thread.daemon = True
        thread.start()
        return thread

    def look(self, seconds: float) -> list[job.Rank]:
        for number, line in self._door.comers() if self._door else ():
            for before in self._nodes:
                if before.number == number:
                    before.link.shut()
            node = Node(number, NodeLink(line), self._count)
            self._count += len(node.ranks)
            for rank in node.ranks:
                self._rendezvous.add(rank)
            node.link.send(first=node.ranks.start, joins=True)
            say(f"node {number} has come again, with {names(node.ranks)}")
            self._nodes.append(node)
            self._threads.append(self._hear(node))
        return super().look(seconds)

    def _node(self, rank: int) -> Node | None:
        """Return the node of a rank; None for this one."""
        return next((node for node in self._nodes if rank in node.ranks), None)

    def _send(self, member: int, message: Mapping[str, Any]) -> None:
        node = self._node(member)
        node.link.send(to=member, message=message) if node else self.lines.send(member, message)

    def marks(self) -> list[job.Rank]:
        return super().marks() + [rank for node in self._nodes for rank in list(node.marks.values())]

    def ended(self, ranks: Sequence[job.Rank]) -> list[job.Rank]:
        numbers = self._ended + [rank for node in self._nodes for rank in list(node.ended)]
        self._order += [number for number in numbers if number not in self._order]
        by_number = {rank.rank: rank for rank in ranks}
        return [by_number[number] for number in self._order]

    def end_of(self, rank: job.Rank) -> End:
        node = self._node(rank.rank)
        return node.ended[rank.rank] if node else super().end_of(rank)

    def is_stopped(self, rank: job.Rank) -> bool:
        node = self._node(rank.rank)
        return rank.rank in node.stopped if node else super().is_stopped(rank)

    def send(self, rank: job.Rank, number: int) -> None:
        node = self._node(rank.rank)
        node.link.send(signal=number, rank=rank.rank) if node else super().send(rank, number)

    def lose(self, rank: int) -> None:
        self._rendezvous.hear(rank, None)

    def awaited(self) -> set[int]:
        return self._rendezvous.awaited()

    def missing(self) -> int:
        missing, self._rendezvous.missing = self._rendezvous.missing, 0
        return missing

    def limit(self, change: int) -> None:
        self._rendezvous.limit(change)

    def replace(self) -> int:
        member = self._count
        self._count += 1
        self._rendezvous.add(member)
        self.add(member)
        return member

    def running(self) -> bool:
        return super().running() or any(node.running() for node in self._nodes)

    def signal(self, number: int) -> None:
        super().signal(number)
        for node in self._nodes:
            for rank in node.ranks:
                node.link.send(signal=number, rank=rank)

    def end(self, grace: float) -> None:
        """Make the launchers of all nodes end their ranks within so many seconds."""
        for node in self._nodes:
            node.link.send(end=grace)
        deadline = time.monotonic() + grace + END_SECONDS
        while any(node.running() for node in self._nodes) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        for node in self._nodes:
            if node.running():
                node.link.shut()
        super().end(grace)

    def close(self, code: int = 0) -> None:
        super().close(code)
        if self._door:
            self._door.close()
        for node in self._nodes:
            node.link.send(over=code)
        for node, thread in zip(self._nodes, self._threads, strict=True):
            thread.join(GRACE)
            node.link.shut()


class Agent:
    """The launcher of a node that is not the first one: starts ranks there, and tells node 0 all about them."""

    def __init__(self, at: Place, command: Sequence[str], env: Mapping[str, str], ranks: int, folder: Path):
        # Raises RuntimeError if node 0 does not come, or refuses.
        try:
            with waiting_for(f"node 0 at {at.host}:{at.port}"):
                line, answer = connect((at.host, at.port), key(), at.node, at.nodes, time.monotonic() + patience())
        except TimeoutError:
            raise RuntimeError(f"node 0 did not come to {at.host}:{at.port} within {patience():g} s") from None
        except AuthenticationError:
            raise RuntimeError(f"who listens at {at.host}:{at.port} has not the same {SECRET}") from None
        if answer[:1] != ACCEPTED:
            raise RuntimeError(answer[1:].decode())
        self._link = NodeLink(line)  # to node 0's launcher
        self._link.send(ranks=ranks)
        heard = self._link.receive()
        if heard is None:
            raise RuntimeError("node 0 has ended before the job began")
        self._first = heard["first"]  # the number of the first of its ranks
        self._children = Children(
            command,
            {**env, ADDRESS: self._link.address, JOINS: "1" * heard["joins"]},
            range(self._first, self._first + ranks),
            folder,
            lambda member, message: self._link.send(of=member, message=message),
        )
        self._asked = Requests()
        self._code: int | None = None  # of the job
        self._grace: float | None = None  # in which ranks are to end

    def supervise(self) -> int:
        """Tell node 0 of the ranks until the job ends, or node 0 is gone; return the job's exit code."""
        ranks = self._children
        ranks.lines.start()
        node_0 = threading.Thread(target=self._hear, name="node 0", daemon=True)
        node_0.start()
        before: dict[str, Any] = {}  # the last that node 0 has heard of them
        with handling_signals(self._ask):
            while node_0.is_alive():
                marks = ranks.look(POLL_SECONDS)
                news = {
                    "ranks": marks,
                    "stopped": [rank.rank for rank in marks if ranks.is_stopped(rank)],
                    "ended": [ranks.end_of(rank) for rank in ranks.ended(marks)],
                }
                if news != before:
                    self._link.send(**news)
                    before = news
                if self._asked.count > 1:
                    ranks.end(END_SECONDS)
                elif self._grace is not None:
                    ranks.end(self._grace)
                    self._grace = None
            if self._code is None:
                say("node 0 cannot be reached; ended the ranks of this node")
                ranks.end(END_SECONDS)
        ranks.close()
        return 1 if self._code is None else self._code

    def _hear(self) -> None:
        """Do what node 0 says, until the job is over, or its connection ends."""
        while heard := self._link.receive():
            match heard:
                case {"to": member, "message": message}:
                    self._children.lines.send(member, message)
                case {"signal": number, "rank": rank}:
                    self._children.processes[rank - self._first].send_signal(number)
                case {"end": grace}:
                    self._grace = grace
                case {"over": code}:
                    self._code = code
                    return

    def _ask(self, number: int) -> None:
        if self._asked.count_signal(number):
            self._link.send(asked=number)
