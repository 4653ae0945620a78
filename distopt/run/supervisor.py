"""Supervision of a job's ranks, of which none or all may be lost: its messages, and its exit code."""

import contextlib
import math
import signal
import subprocess
import time
from collections.abc import Sequence

from distopt.resilience import job
from distopt.resilience.report import waiting
from distopt.resilience.signals import Requests
from distopt.resilience.timeouts import VARIABLE, limits
from distopt.resilience.watchdog import EXIT as TOO_LATE
from distopt.run.exit_watch import Fault, exit_code
from distopt.run.processes import END_SECONDS, GRACE, POLL_SECONDS, TIMED_OUT, handling_signals, say
from distopt.run.supervised import Supervised

HEARING = 0.5  # seconds for all ranks that wait for too long to say so
# seconds for ranks that have waited for too long to notice that another one has ended meanwhile
RECOVERY = 5.0
MOMENT = 0.05  # seconds in which ranks raise an error that all of them have
UNSENT = "whatever it had not sent yet"
KILLING = (signal.SIGILL, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM)


class Supervisor:
    """Watches the ranks of a job, says what became of them, and ends those that cannot go on."""

    def __init__(
        self,
        started: Supervised,
        size: int,
        elastic: bool,
        restarts: int = 0,
        spares: int = 0,
        most: float = math.inf,
    ):
        # size: the number of ranks that begin together; those in the place of lost ones have higher numbers
        # elastic: ranks may be lost, and those that are left go on
        # restarts: how many processes are started in the place of lost ones, at most
        # spares: how many wait from the start for a place
        # most: how many there may be, as so many ranks live in them
        self._started, self._size, self._elastic, self._restarts = started, size, elastic, restarts
        self._spares, self._most = spares, most
        self._signalled = 0  # processes more, or fewer, that signals have asked for
        self._dismissed: set[int] = set()  # ranks that were ended so
        self._asked, self._signal = Requests(), 0  # to end, and the signal of the first one
        self._deadline = math.inf  # when ranks that were asked to end are ended
        self._fault: Fault | None = None  # of a job that may lose no rank
        self._living: list[job.Rank] = []
        self._ended: list[job.Rank] = []  # in this order
        # those who came to the end of the script, while nobody has gone on so far, and the votes of the others by then
        self._done: list[tuple[job.Rank, dict[int, int]]] = []
        self._lost_at = -math.inf
        self._heard: set[tuple[int, str]] = set()  # complaints of ranks that wait for too long
        self._hears_until = math.inf
        self._late: dict[int, str] = {}  # why this process has ended a rank
        # when MPI's start of a process began that a rank has started
        self._starts: dict[int, float] = {}
        self._code = 0  # of the job, if it is not that of its ranks

    @property
    def was_ended(self) -> bool:
        """Whether a signal or the time limit has ended the job."""
        return self._asked.count > 0 or self._code == TIMED_OUT

    def supervise(self, timeout: float | None) -> int:
        """Wait for the end of the job, at most ``timeout`` seconds; return its exit code."""
        limit = math.inf if timeout is None else time.monotonic() + timeout
        sizes = (signal.SIGUSR1, signal.SIGUSR2) if self._started.grows else ()
        with handling_signals(self.ask), handling_signals(self._ask_for_size, sizes):
            while self._started.running():
                self._look(POLL_SECONDS)
                if time.monotonic() > limit:
                    self._end(TIMED_OUT, f"not done after {timeout:g} s; ended the job")
                elif self._asked.count > 1 or time.monotonic() > self._deadline:
                    # here, as nobody must wait in a signal's handler
                    self._started.end(END_SECONDS if self._elastic else GRACE)
        for _ in range(2):  # a rank that one check finds is seen to have ended by the next one
            self._look(0.0)
        code = self._code or (self._code_of_last() if self._elastic else self._code_of_all())
        self._started.close(code)
        return code

    def ask(self, number: int) -> None:
        """Pass a signal on: to the ranks if all of them wait for one, else to whoever has started them."""
        if not self._asked.count_signal(number) or self._asked.count > 1:
            return
        self._signal = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        gone = {rank.rank for rank in self._ended}
        ranks = [rank for rank in self._started.marks() if rank.rank not in gone]
        if ranks and all(job.STOPS in rank.marks for rank in ranks):
            for rank in ranks:
                self._started.send(rank, self._signal)
        else:
            if self._elastic:  # a launcher of MPI ends its ranks soon
                self._deadline = time.monotonic() + GRACE
            self._started.signal(self._signal)

    def _end(self, code: int, text: str) -> None:
        """End the job, and say why."""
        self._code = code
        self._started.end(GRACE)
        say(text)

    def _code_of_all(self) -> int:
        """The exit code of a job that may lose no rank; says the fault of a rank that ended silently: no success."""
        ranks, code = self._started.marks(), exit_code(self._started.processes[0].returncode)
        if job.all_left(ranks, self._size):
            return 0
        if self._fault is None:
            if not self._asked.count:
                return code
            # launchers of MPI have codes of their own
            codes = [int(text) for r in ranks for kind in (job.EXIT, job.OS_EXIT) for text in r.marks.get(kind, ())]
            return code and next(filter(None, codes), 128 + self._signal)
        if self._fault.text:
            say(self._fault.text)
        if code in KILLING:  # MPICH's launcher has the signal's number alone
            code += 128
        return self._fault.code or code or 1

    def _code_of_last(self) -> int:
        """The exit code of the member that ended last, so that a job which lost some ends well if others do."""
        # a launcher of MPI that was asked to end has a code of its own
        launcher = 128 + self._signal if self._asked.count else exit_code(self._started.processes[0].returncode)
        members = [rank for rank in self._ended if self._is_member(rank)]
        if not members:
            return launcher
        last = self._started.end_of(members[-1])
        # SIGTERM is what an interrupt becomes for who is deaf to it
        code = launcher if self._asked.count and last.code == 128 + signal.SIGTERM else last.code
        return 0 if last.in_order else code or launcher or 1

    # ------------------------------------------------------------------------------------------- ends

    def _look(self, seconds: float) -> None:
        """Wait for an end for so many seconds; act on ends and complaints."""
        if self._spares and self._started.starts_soon:
            self._spares -= 1
            self._started.replace()
        for _ in range(self._started.missing()):
            say(f"rank {self._started.replace()} is started, as the ranks want to be more")
        self._resize_as_signalled()
        ranks = self._started.look(seconds)
        if not self._elastic:
            self._end_at_fault(ranks)
            return
        ended = self._started.ended(ranks)
        new, self._ended = ended[len(self._ended) :], ended
        gone = {rank.rank for rank in ended}
        self._living = [rank for rank in ranks if rank.rank not in gone]
        for rank in new:
            self._started.lose(rank.rank)
            if self._started.end_of(rank).in_order:
                self._done.append((rank, {other.rank: other.votes for other in self._living}))
            else:
                self._lost_at = time.monotonic()
                if not (self._asked.count or self._code):
                    self._go_on_without(rank)
        if not self._members_left():
            for rank in self._living:
                self._end_rank(rank, "nobody is left who could let it in")
        self._tell_of_the_done()
        if self._started.meet_all:
            self._check_start()
            self._limit_starts()
        self._hear()

    def _end_at_fault(self, ranks: Sequence[job.Rank]) -> None:
        """End a launcher that does not notice by itself that the job cannot go on."""
        if not (self._fault or self._asked.count or self._code):
            self._fault = self._started.fault(ranks)
            if self._fault and self._started.running():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._started.processes[0].wait(END_SECONDS)
                self._started.end(END_SECONDS)

    def _ask_for_size(self, number: int) -> None:
        self._signalled += 1 if number == signal.SIGUSR1 else -1

    def _resize_as_signalled(self) -> None:
        """Start a process for each SIGUSR1, and end that of the highest number for each SIGUSR2."""
        members = [rank for rank in self._living if self._is_member(rank)]
        if not (self._signalled and members):  # the job has not begun
            return
        change, self._signalled = self._signalled, 0
        size = int(min(max(len(members) + change, 1), max(self._most, len(members))))
        if size == len(members):
            say(f"{size} process{'es' * (size > 1)} stay: at least one, and at most as many as logical ranks")
        self._started.limit(size - len(members))
        for _ in range(size - len(members)):
            say(f"rank {self._started.replace()} is started, as SIGUSR1 asks for one more")
        for rank in members[size:]:
            self._dismissed.add(rank.rank)
            self._end_rank(rank, "SIGUSR2 asks for one less")

    def _go_on_without(self, rank: job.Rank) -> None:
        """Say how a rank has ended, and what is lost with it; start a process in its place, if it may be replaced."""
        others = self._members_left() - self._ending_with(rank)
        if not others and job.SPOKEN in rank.marks:  # the job ends, and the rank has said why itself
            return
        how, *trace = (self._late.get(rank.rank) or self._started.end_of(rank).words).splitlines()
        words = [how]
        if others and rank.votes:
            lost = f"lost with it: the gradients of its batch, and {rank.unsent or UNSENT}"
            words.append(job.ADOPTED if rank.unsent == job.ADOPTED else lost)
        if (rank.votes or not self._started.meet_all) and (others or self._is_member(rank)):
            words.append(_going_on(others) if others else "no rank is left")
        say("\n".join(["; ".join(words), *trace]))
        # There is somebody whom it could join.
        if self._restarts and others and rank.votes and rank.rank not in self._dismissed:
            self._restarts -= 1
            say(f"rank {self._started.replace()} is started in the place of rank {rank.rank}")

    def _is_member(self, rank: job.Rank) -> bool:
        """Tell if a rank is one of those that began together, or has been admitted by them."""
        return rank.rank < self._size or job.CAME in rank.marks

    def _members_left(self) -> int:
        """The number of members that have not ended."""
        began = self._size - sum(rank.rank < self._size for rank in self._ended)
        return began + sum(rank.rank >= self._size and self._is_member(rank) for rank in self._living)

    def _end_rank(self, rank: job.Rank, why: str) -> None:
        """End one rank, and no other; its end will tell why."""
        self._late.setdefault(rank.rank, f"rank {rank.rank} was ended {rank.where}, as {why}")
        self._started.send(rank, signal.SIGKILL)

    def _ending_with(self, rank: job.Rank) -> int:
        """The number of ranks that are about to end like one that has said why: all may have raised an error."""
        if job.SPOKEN not in rank.marks:
            return 0
        time.sleep(MOMENT)
        living = {rank.rank for rank in self._living}
        return sum(rank.rank in living and job.SPOKEN in rank.marks for rank in self._started.look(0.0))

    def _check_start(self) -> None:
        """End the job if ranks wait in MPI's start for one that has ended."""
        missing = [rank for rank in self._ended if not rank.votes and not rank.marks.keys() >= {job.MPI, job.DONE}]
        stuck = [rank.rank for rank in self._living if not rank.votes and job.MPI in rank.marks]
        stuck = [rank for rank in stuck if rank < self._size]  # others start MPI alone
        if missing and stuck and not (self._asked.count or self._code):
            text = f"{waiting(stuck)} in MPI's start, to which all ranks must come; ended the job"
            self._end(self._started.end_of(missing[0]).code or 1, text)

    def _limit_starts(self) -> None:
        """End processes that a rank has started if MPI's start takes too long: it never ends if that rank was lost."""
        now, allowed = time.monotonic(), limits()
        for rank in self._living:
            if rank.rank >= self._size and job.MPI in rank.marks and job.STARTED not in rank.marks and allowed:
                if now > self._starts.setdefault(rank.rank, now) + allowed.first:
                    self._end_rank(rank, f"MPI's start has taken more than {allowed.first:g} s ({VARIABLE})")

    def _tell_of_the_done(self) -> None:
        """Say of ranks that have come to the end of their script that others train on, if they do."""
        for done, votes in self._done[:]:
            if any(rank.votes > votes.get(rank.rank, rank.votes) for rank in self._living):
                self._done.remove((done, votes))
                say(f"rank {done.rank} has ended its script {done.where}; {_going_on(len(self._living))}")

    # ------------------------------------------------------------------------------------------- time limits

    def _hear(self) -> None:
        """Find the ranks that wait for too long, once all of them have had the time to say so."""
        complaints = {(rank.rank, text) for rank in self._living for text in rank.marks.get(job.LATE, ())}
        now = time.monotonic()
        if complaints <= self._heard:
            return
        self._hears_until = min(self._hears_until, now + HEARING)
        if now >= self._hears_until:
            self._heard, self._hears_until = complaints, math.inf
            # those that have not gone on since
            late = [
                rank
                for rank in self._living
                if any(int(text.partition(".")[0]) == rank.votes for text in rank.marks.get(job.LATE, ()))
            ]
            for rank in late if self._members_left() < self._size else ():
                if not self._is_member(rank):
                    self._end_rank(rank, "it waits for too long to be let in")
            if late := [rank for rank in late if self._is_member(rank)]:
                self._end_those_behind(late)

    def _end_those_behind(self, late: Sequence[job.Rank]) -> None:
        """End the ranks for which the ranks ``late`` wait for too long; all, if it cannot be told who they are."""
        most, awaited = max(rank.votes for rank in late), self._started.awaited()
        stopped = [rank for rank in self._living if self._started.is_stopped(rank)]
        voting = {rank.rank for rank in self._living if rank.votes < most and self._is_member(rank)}
        behind = [rank for rank in self._living if rank not in late and rank.rank in voting | awaited]
        whom = waiting(rank.rank for rank in late)
        for rank in {rank.rank: rank for rank in (*stopped, *behind)}.values():
            self._end_rank(rank, f"{whom} for too long")
        if not (stopped or behind) and time.monotonic() > self._lost_at + RECOVERY:
            self._end(TOO_LATE, f"{whom} for too long, and no rank is behind; ended the job")


def _going_on(others: int) -> str:
    return f"{others} ranks go on" if others > 1 else "1 rank goes on"
