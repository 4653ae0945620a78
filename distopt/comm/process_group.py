"""Ranks that torch's gloo connects: votes and collectives of numpy arrays, without MPI.

They are those of torch's default process group, or those that ``distopt run --elastic`` has started.

Messages go from rank to rank, and are added up here, in rank order: gloo's own collectives add in another order, and a
vote takes them longer.  On one machine all ranks share the memory of what ``alloc`` returns: sums need no messages, and
votes are written on a board.
"""

import atexit
import contextlib
import functools
import itertools
import os
import socket
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np
import torch
import torch.distributed as dist

from distopt.comm.board import Board, RankEnded
from distopt.comm.communicator import Communicator, Groups, group_of
from distopt.comm.control import LEAVE, ControlChannel, PeerLeft, agreed
from distopt.comm.epoch_ranks import EpochRanks
from distopt.comm.gloo import NO_LIMIT, GlooMessages, GlooRanks, TorchRanks, Works
from distopt.comm.joiner import Joiner
from distopt.comm.launchers import LOOPBACK, SlurmStep, meeting
from distopt.comm.outbox import Outboxes
from distopt.comm.shared_memory import SharingCommunicator
from distopt.comm.sockets import watch
from distopt.resilience import job
from distopt.resilience.abort import abort_on_exception
from distopt.resilience.environment import ADDRESS, torchs
from distopt.resilience.membership import LauncherLink, line
from distopt.resilience.operation_log import OperationLog, meeting_of, recorder
from distopt.resilience.report import names

# int64 numbers of a message of votes: a vote, the bytes of a text, and room for words of farewell
FRAME = 32
LENGTH, WORDS = 9, 10
TRIALS = 3  # to make a communicator of the same ranks
PAGE = 512  # numbers of a text that are written at once
TOLD = 64  # ranks, at most, whose texts the launcher passes on: a message to each has all of them


class ProcessGroupControl(ControlChannel):
    """Votes over a gloo group."""

    # Each rank sends its vote to all others.  A rank whose script has ended sends words of farewell in place of its
    # next vote, and the others raise them.

    def __init__(self, ranks: GlooRanks, members: Sequence[int]):
        # members: numbers of those that have the channel, ascending
        if len(members) > 1:
            watch(ranks.rank)
        # Without connections as long as the launcher can pass texts on: these are half of what a new epoch takes.
        self._tell = ranks.gather if isinstance(ranks, EpochRanks) and len(members) <= TOLD else None
        self._among, self.ranks = ranks, list(members)
        self._messages = GlooMessages(ranks, members, connect=self._tell is None)
        self.rank, self.size = self._messages.rank, self._messages.size
        self._numbers, name = itertools.count(), f"{names(members)} {ranks.place}"
        channel = _channels[name] = _channels.get(name, 0) + 1
        self._name = f"{name}, channel {channel}"
        self._votes = self.log("votes")
        self.waits = OperationLog(recorder, f"waits of rank {ranks.rank} ({self._name})", [ranks.rank])
        self._frames = np.zeros((self.size, FRAME), np.int64)
        self._board: Board | None = None  # until there are boards, votes and texts are messages
        self._pages: Board | None = None
        if self.size > 1:
            _controls.add(self)
            _join(ranks.rank)
        if not self._tell:
            self.vote_on_version()
        if self.size > 1:
            for board in (boards := Board.open(self, FRAME, PAGE)):
                self._among.keep(board)  # it is revoked with the channel
            self._board, self._pages = boards or (None, None)
        if self._tell:
            self._tell = None
            if not self._board:
                self._messages.connect()
            self.vote_on_version()

    def log(self, name: str) -> OperationLog:
        return OperationLog(recorder, f"{name} ({self._name}, {next(self._numbers)})", self.ranks)

    def maximum(self, votes: np.ndarray) -> None:
        recorder.step = self.progress
        # who has left waits for as long as the others train on, or evaluate; a benchmark's vector is of any length
        self._votes.limited = tuple(votes.tolist()) != LEAVE
        with self._votes("vote", 0, self.progress + self.part):
            frames = self._swap(votes, 0)
        np.max(frames[:, : votes.size], axis=0, out=votes)

    def gather_strings(self, text: str) -> list[str]:
        if self._tell:
            return self._tell(self.ranks, text)
        mine = np.frombuffer(text.encode(errors="backslashreplace"), np.uint8)
        with self._votes("gather"):
            lengths = self._swap(np.zeros(0, np.int64), mine.size)[:, LENGTH].tolist()
            texts = [np.empty(n, np.uint8) for n in lengths]
            with self._hears_of_ends():
                if self._pages:
                    _write_pages(self._pages, mine, texts)
                else:
                    self._messages.exchange([mine] * self.size, texts)
            texts[self.rank] = mine
        return [part.tobytes().decode() for part in texts]

    def check_ends(self) -> None:
        if isinstance(self._among, EpochRanks):
            self._messages.check()
            with self._hears_of_ends():
                if self._board:
                    self._board.check()

    def subgroup(self, members: tuple[int, ...]) -> "ProcessGroupControl":
        return ProcessGroupControl(self._among, [self.ranks[member] for member in members])

    def close(self) -> None:
        self.forget()
        for board in filter(None, (self._board, self._pages)):
            board.close()
        self._messages.close()

    def forget(self) -> None:
        """Say no farewell on this channel when this process ends."""
        _controls.discard(self)

    def begin_leaving(self) -> Works:
        """Begin to send all ranks words of farewell in place of the next vote."""
        if self._gone or not self._messages.usable:
            return []
        words = np.frombuffer(f"rank {self.rank} left after {self.progress}".encode(), np.uint8)
        frame = np.zeros(FRAME, np.int64)
        frame[: len(LEAVE)] = LEAVE
        room = frame[WORDS:].view(np.uint8)
        room[: words.size] = words[: room.size]
        if self._board:
            self._board.write(frame)
            return []
        return self._messages.begin([frame] * self.size, list(self._frames))

    def end_leaving(self, works: Works) -> None:
        """Wait until each rank has read the words, or has left."""
        for work in works:
            with contextlib.suppress(RankEnded):
                self._messages.finish([work])

    def _swap(self, vote: np.ndarray, length: int) -> np.ndarray:
        """Return the frames of all ranks, ``(size, FRAME)``."""
        # Raises PeerLeft: a rank has sent words of farewell, or has ended without.
        frames = self._frames
        mine = frames[self.rank]
        mine[:] = 0
        mine[: vote.size], mine[LENGTH] = vote, length
        with self._hears_of_ends():
            if self._board:
                self._messages.check()
                frames[...] = self._board.swap(mine)
            else:
                self._messages.exchange([mine] * self.size, list(frames))
        for rank, frame in enumerate(frames):
            words = frame[WORDS:].view(np.uint8)
            if words[0]:
                self._raise_left(rank, words.tobytes().rstrip(b"\0").decode(errors="replace"))
        return frames

    @contextlib.contextmanager
    def _hears_of_ends(self) -> Iterator[None]:
        """Turn the news that a rank has ended into PeerLeft, and raise it at once if one has ended before."""
        if self._gone:
            raise self._gone
        try:
            yield
        except RankEnded as error:
            self._raise_left(error.rank, str(error))

    def _raise_left(self, rank: int, words: str) -> NoReturn:
        """Raise PeerLeft now and at every later vote; the lowest of the other ranks prints where."""
        self._gone = agreed(PeerLeft(f"{words}, before {self.progress}"), speaks=self.rank == (0 if rank else 1))
        raise self._gone from None


def _write_pages(pages: Board, mine: np.ndarray, texts: Sequence[np.ndarray]) -> None:
    """Write a text a page at a time, and fill in the texts of all ranks, in rank order."""
    for start in range(0, max(text.size for text in texts), 8 * PAGE):
        page = np.zeros(PAGE, np.int64)
        written = mine[start : start + 8 * PAGE]
        page.view(np.uint8)[: written.size] = written
        for text, read in zip(texts, pages.swap(page), strict=True):
            part = text[start : start + 8 * PAGE]
            part[...] = read.view(np.uint8)[: part.size]


_controls: "weakref.WeakSet[ProcessGroupControl]" = weakref.WeakSet()  # that say farewell
# how many were made of these ranks, which is the same on all of them
_channels: dict[str, int] = {}


@functools.cache
def _join(rank: int) -> None:
    """Set up this process as a rank, once: it ends at an uncaught exception, time limits hold, and it says farewell."""
    abort_on_exception(rank, os._exit)
    watch(rank)
    atexit.register(_leave)
    os.register_at_fork(after_in_child=_controls.clear)  # a forked child is no rank


def _leave() -> None:
    """Tell the ranks that still want to exchange, on any channel, that this rank has left; called at exit."""
    leaving = [(control, control.begin_leaving()) for control in list(_controls)]
    for control, works in leaving:
        control.end_leaving(works)


def meet() -> None:
    """Initialize the default process group, as the environment tells.  Collective."""
    # torchrun has made a store.  In a Slurm step rank 0 listens for the others: if all are on one machine, on its
    # loopback interface alone, as gloo's sockets do then; else on all interfaces, as torch's store does everywhere.
    at = meeting()
    launch = at or torchs()
    rank = launch.rank if launch else 0
    if launch and launch.size > 1:
        watch(rank)
    with meeting_of(rank, functools.partial(_place, at)):
        if at is None:
            dist.init_process_group("gloo")
            return
        if at.host == LOOPBACK:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        try:
            store = _store(at)
        except (OSError, RuntimeError) as error:
            raise RuntimeError(
                f"rank {at.rank} of a Slurm step: ranks cannot meet at {at.host}, port {at.port} ({error}); export "
                "MASTER_ADDR and MASTER_PORT before srun: the first host's name, and a port that is free there"
            ) from None
        dist.init_process_group("gloo", store=store, rank=at.rank, world_size=at.size)


def _place(at: SlurmStep | None) -> str:
    """Return a line on where ranks meet for the first time, and who has said so."""
    if at:
        return f"  all {at.size} ranks of the Slurm step {at.name} must come to {at.host}, port {at.port}"
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    told = ", ".join(f"{name}={os.environ.get(name, '')}" for name in names)
    return f"  all ranks must come to rank 0's address: {told}; unset RANK and WORLD_SIZE if there are no others"


def _store(at: SlurmStep) -> Any:
    """Return the store over which the ranks of a Slurm step learn each other's addresses; rank 0 has it."""
    socket.getaddrinfo(at.host, at.port)  # torch's store would try again and again
    listener = None
    if at.rank == 0 and at.host == LOOPBACK:
        listener = socket.create_server((LOOPBACK, at.port)).detach()
    store = dist.TCPStore(  # type: ignore[attr-defined]
        at.host, at.port, at.size, at.rank == 0, NO_LIMIT, wait_for_workers=False, master_listen_fd=listener
    )
    return dist.PrefixStore(at.name, store)  # type: ignore[attr-defined]  # should another step use the port


def join(ranks: Sequence[int] | None = None) -> tuple[ProcessGroupControl, int, list[int]]:
    """Make votes of some ranks of the default process group, as ``join_among``; None for all.  Collective of them."""
    return join_among(_torch_ranks(), ranks)


def join_among(ranks: GlooRanks, members: Sequence[int] | None = None) -> tuple[ProcessGroupControl, int, list[int]]:
    """Make votes of these ranks.  Collective of them."""
    # members: their numbers, ascending; None for all.
    # Returns the votes; this rank's number among those of its machine; and the machine of each rank, as numbers.
    control = ProcessGroupControl(ranks, ranks.all if members is None else members)
    machines = control.gather(_machine())
    hosts = [machines.index(machine) for machine in machines]
    return control, hosts[: control.rank].count(hosts[control.rank]), hosts


def _torch_ranks() -> TorchRanks:
    """Return the ranks of the default process group, which is initialized if it is not yet.  Collective."""
    if not dist.is_initialized():
        meet()
    return TorchRanks()


class ProcessGroupCommunicator(SharingCommunicator):
    """Communicator of the ranks of torch's default process group, for numpy arrays, over gloo.

    Making one is collective.  The process group is initialized if it is not yet, as ``torchrun``, Slurm and others tell
    in the environment; its backend may be any.  With more than one rank, an uncaught exception ends this process from
    then on; the launcher ends the others.

    Under ``distopt run --elastic`` there is no default process group, which would end with any of its ranks.  There the
    launcher tells who the ranks are, and those that live go on without one that was lost (``next_epoch``).

    Args:
        reason: why this transport was chosen, for ``repr``.

    Raises:
        RuntimeError: rank 0 of a Slurm step cannot listen for the others.
        ValueError: on every rank alike, if ranks run different versions of distopt.

    Example:
        Skipped where examples run as tests: it needs two processes, ``torchrun --nproc-per-node 2 script.py``.

        >>> import numpy as np
        >>> from distopt.comm.process_group import ProcessGroupCommunicator
        >>> comm = ProcessGroupCommunicator()  # doctest: +SKIP
        >>> x = np.ones(2, np.float32)
        >>> comm.all_reduce(x)  # doctest: +SKIP
        >>> x.tolist()  # doctest: +SKIP
        [2.0, 2.0]
    """

    wire = "gloo"

    rank_ordered = True
    control: ProcessGroupControl

    def __init__(self, reason: str = ""):
        launcher = line()
        if launcher is None:
            self._make(_torch_ranks(), None, reason)
        else:
            _join(launcher.member)
            self._enter(launcher, "world", "", reason)

    def _enter(
        self, launcher: LauncherLink, name: str, text: str, reason: str, admit: bool = False, limited: bool = True
    ) -> list[str]:
        """Become a member of a communicator's next epoch, of which no rank is lost meanwhile.  Collective of these."""
        # All members return with the same epoch, since the launcher decides if all have come as far.
        # admit: whether processes that wait may become members.
        # limited: whether the time limit holds for the wait for the others.
        # Returns a text of each member.
        # Raises PeerLeft: these ranks cannot connect, though none was lost meanwhile.
        met: list[list[int]] = []
        while True:
            ranks, failure = EpochRanks.next(launcher, name, text, admit, limited), None
            met.append(ranks.all)
            try:
                self._make(ranks, None, reason)
            except PeerLeft as error:
                ranks.revoke()
                failure = error
            if ranks.agree(failure is None):
                return ranks.epoch.texts
            ranks.revoke()
            if failure and met.count(ranks.all) > TRIALS:
                raise failure

    def _make(self, ranks: GlooRanks, members: Sequence[int] | None, reason: str) -> None:
        """Set up messages and votes of some of the ranks, or of all."""
        self._among, self._why = ranks, reason
        self.control, self.local_rank, self._hosts = join_among(ranks, members)
        self.rank, self.size, self._ranks = self.control.rank, self.control.size, self.control.ranks
        outboxes = Outboxes.open(self.control) if self.size > 1 else None
        self._messages: GlooMessages | Outboxes = outboxes or GlooMessages(ranks, self._ranks)
        if outboxes:
            ranks.keep(outboxes)
        self._log = self.control.log("data")
        self.pipelines = self.spans_hosts
        places = "several hosts" if self.spans_hosts else "one host"
        self.reason = self._place = "; ".join(filter(None, (f"torch {torch.__version__}, gloo", reason, places)))

    def exchange(self, parts: Sequence[np.ndarray], received: Sequence[np.ndarray]) -> None:
        """Send ``parts[r]`` to every other rank r, and receive ``received[r]``.  Collective."""
        self._messages.exchange(parts, received)

    def _begin_exchange(
        self, parts: Sequence[np.ndarray], received: Sequence[np.ndarray], tag: int = 0
    ) -> Callable[[], None]:
        messages = self._messages
        if not isinstance(messages, GlooMessages):
            return super()._begin_exchange(parts, received, tag)
        messages.check()
        return functools.partial(messages.finish, messages.begin(parts, received, tag))

    def make_duplicate(self) -> Communicator:
        """Make a communicator of the same ranks over messages of its own.  Collective."""
        return self._of(self._among, self._ranks, f"beside rank {self.rank}'s other one")

    def make_subgroup(self, groups: Groups) -> Communicator:
        """Make a communicator of a group over messages of its own.  Collective."""
        members = group_of(self.rank, groups)
        return self._of(self._among, [self._ranks[m] for m in members], f"{len(members)} of {self.size} ranks")

    # -- ranks that are lost

    def revoke(self) -> None:
        """Make all that any rank waits for on this communicator raise PeerLeft, now and from now on.

        That is what its duplicates and its subgroups wait for too, and who makes one of them.
        """
        self._among.revoke()

    def next_epoch(self, text: str, admit: bool = False) -> tuple[Communicator, list[str]]:
        """Return a communicator of the ranks that live, in their order, and a text of each.  Collective of these.

        Args:
            text: this rank's.
            admit: whether processes that wait to be let in may be among them.

        Raises:
            ConnectionError: the launcher has ended, or has given this rank up.
            ValueError: the ranks are torch's, which are lost together, or this communicator is a subgroup.
        """
        if not isinstance(self._among, EpochRanks) or self._ranks != self._among.all:
            return super().next_epoch(text, admit)
        self._forget()
        new, launcher = type(self).__new__(type(self)), cast(LauncherLink, line())
        return new, new._enter(launcher, self._among.name, text, self._why, admit)

    def joiner_waits(self) -> bool:
        return job.awaited()

    @classmethod
    def waiting(cls, reason: str = "") -> Joiner:
        """Return a communicator of this process alone, which waits until it is admitted by the ranks of a job."""
        launcher = cast(LauncherLink, line())
        _join(launcher.member)

        def enter(text: str) -> tuple[Communicator, list[str]]:
            comm = cls.__new__(cls)
            # the others let it in between two steps, however long these are
            return comm, comm._enter(launcher, "world", text, reason, admit=True, limited=False)

        far = os.environ.get(ADDRESS, LOOPBACK) != LOOPBACK
        return Joiner(enter, cls.rank_ordered, reason, (0, 1) if far else ())

    def _forget(self) -> None:
        """Say no farewell on this communicator."""
        self.control.forget()
        for other in self._made_of_it():
            if isinstance(other, ProcessGroupCommunicator):
                other._forget()

    def close(self) -> None:
        """Release the groups; nothing may be called after it.  Collective."""
        for other in self._made_of_it():
            other.close()
        self.control.close()
        self._messages.close()

    @classmethod
    def of_ranks(cls, ranks: Sequence[int], reason: str) -> "ProcessGroupCommunicator":
        """Make a communicator of some ranks of the default group.  Collective of them.

        Args:
            ranks: their numbers there, ascending.
            reason: why there is one, for ``repr``.
        """
        return cls._of(_torch_ranks(), ranks, reason)

    @classmethod
    def _of(cls, ranks: GlooRanks, members: Sequence[int], reason: str) -> "ProcessGroupCommunicator":
        """Make a communicator of some of the ranks.  Collective of these."""
        comm = cls.__new__(cls)
        comm._make(ranks, members, reason)
        return comm


def _machine() -> str:
    """A text that is the same for processes of one machine."""
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
    return socket.gethostname()
