"""A thread per process that notices when this rank waits for too long, and answers other ranks that ask where it is.

It works while the main thread is stuck in MPI or in the user's code, unless that holds the interpreter lock.  A
watchdog that finds an operation over its limit asks all ranks of its communicator where they are, lets them write
their flight records, writes one report, and ends the job with exit code 75.  Of several that find it at the same moment
the lowest rank speaks.  In a job that goes on without the ranks it loses, it reports the wait to ``distopt run``, which
ends those that keep the others waiting, and it watches on.
"""

import contextlib
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

from distopt.resilience import flight_recorder, job, membership
from distopt.resilience.operation_log import Operation, OperationRecorder
from distopt.resilience.report import Answer, answer, names, report
from distopt.resilience.timeouts import VARIABLE, Limits

EXIT = 75  # EX_TEMPFAIL of sysexits.h: trying again may help
POLL_SECONDS = 0.1  # between two checks
ANSWER_SECONDS = 0.5  # for the others to answer, and again to write
TRUST = 3.0  # seconds that a rank has to end the job after it said so
ABORT = 2.0  # seconds for MPI to end the job
# the most seconds that count between two checks: a job that was stopped and continues has not waited
HICCUP = 1.0
WARN_FROM = 60.0  # seconds: with a shorter limit there is no warning before the end
WARN_EVERY = 60.0

HOW, WHY, HERE, END, WRITTEN = "how", "why", "here", "end", "written"  # the kinds of messages


class Mailbox(Protocol):
    """Short texts between the watchdogs of some ranks, which never wait for main threads."""

    ranks: Sequence[int]  # their numbers among all processes of the job
    rank: int  # index of this one among them

    def send(self, to: int, text: str) -> None:
        """Send a text to one of them, by its index."""

    def receive(self) -> tuple[int, str] | None:
        """Return the sender's index and the text of a message; None if none has come."""


class Watchdog:
    """A thread that watches over this process."""

    def __init__(
        self,
        rank: int,
        recorder: OperationRecorder,
        limits: Limits,
        abort: Callable[[int], Any] | None,
        mailboxes: Sequence[Mailbox] = (),
    ):
        # rank: number of this process in the job
        # abort: ends the other processes of the job, with an exit code; None if they will notice by themselves
        # mailboxes: the ways to other watchdogs, one for each communicator; the list may grow
        self.rank, self._recorder, self._limits, self._abort, self._mailboxes = rank, recorder, limits, abort, mailboxes
        self._act = self._complain if membership.wanted() and job.is_rank() else self._finish
        self._waited: dict[tuple[str, int], float] = {}  # seconds, by operation
        # until then another rank is to end the job, or distopt run to end one that is late
        self._quiet_until = 0.0
        self._warned = -WARN_EVERY
        self._question = 0
        self._asking = ""
        self._yields = False
        self._answers: dict[int, Answer] = {}
        self._written: dict[int, str] = {}
        self._stopping = threading.Event()
        self._last_words: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="distopt's watch", daemon=True)
        self._thread.start()
        # made now, since Python starts no thread at its end; it speaks, since pipes can be full, and MPI stuck
        threading.Thread(target=self._print_and_abort, name="distopt's last words", daemon=True).start()

    def stop(self) -> None:
        """Stop the thread, before MPI ends."""
        self._stopping.set()
        self._thread.join(ABORT)

    def _run(self) -> None:
        previous = time.monotonic()
        try:
            while not self._stopping.wait(POLL_SECONDS):
                now = time.monotonic()
                self._take_messages()
                self._check_operations(now, min(now - previous, HICCUP))
                previous = now
        except Exception as error:  # a job that is well goes on without a watch
            say(f"distopt: rank {self.rank}: no time limits any more: {type(error).__name__}: {error}\n")

    def _check_operations(self, now: float, passed: float) -> None:
        """Add up how long operations take, and act on those that take too long."""
        waited, lasting = self._waited, self._recorder.open()
        self._waited = {o.key: waited.get(o.key, 0.0) + min(passed, now - o.began) for o in lasting}
        limit = self._limits.first if self._recorder.first else self._limits.usual
        for operation in lasting:
            seconds = self._waited[operation.key]
            if not operation.log.limited:
                self._miss(operation, seconds, limit, now)
            elif seconds >= limit and now >= self._quiet_until:
                self._act(operation, seconds, limit)
            elif limit >= WARN_FROM and seconds >= limit / 10 and now >= self._warned + WARN_EVERY:
                self._warn(operation, seconds, limit)

    # ------------------------------------------------------------------------------------------- questions

    def _warn(self, operation: Operation, seconds: float, limit: float) -> None:
        self._warned = time.monotonic()
        if self._ask(operation.log.mailbox, HOW):
            end = f"the job ends when this has taken {limit:g} s ({VARIABLE})"
            end = "\n".join(filter(None, (operation.log.others(), end)))
            say(report(self.rank, operation, seconds, self._ranks(operation), self._answers, end))

    def _miss(self, operation: Operation, seconds: float, limit: float, now: float) -> None:
        """Report, from time to time, ranks that give no answer in an operation that may take as long as it needs."""
        patience = limit / 10 if limit >= WARN_FROM else limit
        if seconds < patience or now < self._warned + WARN_EVERY:
            return
        self._warned = time.monotonic()
        ranks = self._ranks(operation)
        if self._ask(operation.log.mailbox, HOW) and len(self._answers) < len(ranks):
            end = "it waits for them without a limit; who gives no answer may never come"
            say(report(self.rank, operation, seconds, ranks, self._answers, end))

    def _finish(self, operation: Operation, seconds: float, limit: float) -> None:
        mailbox = operation.log.mailbox
        if not self._ask(mailbox, WHY):
            self._quiet_until = time.monotonic() + TRUST
            return
        answers = dict(self._answers)
        reason = f"{operation} took more than {limit:g} s"
        self._let_write(mailbox, reason)
        end = f"the limit is {limit:g} s ({VARIABLE}); {self._records()}"
        end = "\n".join(filter(None, (operation.log.others(), end)))
        self._end(report(self.rank, operation, seconds, self._ranks(operation), answers, end))

    def _complain(self, operation: Operation, seconds: float, limit: float) -> None:
        """Tell ``distopt run`` that this rank waits for too long, and again if it still does after the limit."""
        self._quiet_until = time.monotonic() + limit
        job.complain()
        if self._ask(operation.log.mailbox, HOW):
            end = f"the limit is {limit:g} s ({VARIABLE}); distopt run ends who keeps it waiting"
            end = "\n".join(filter(None, (operation.log.others(), end)))
            say(report(self.rank, operation, seconds, self._ranks(operation), self._answers, end))

    def _ranks(self, operation: Operation) -> Sequence[int]:
        return operation.log.mailbox.ranks if operation.log.mailbox else [self.rank]

    def _ask(self, mailbox: Mailbox | None, kind: str) -> bool:
        """Ask all ranks where they are, and wait a while for answers; False if another rank is to speak."""
        self._question += 1
        self._asking, self._yields, self._answers = kind, False, {self.rank: answer(self._recorder)}
        self._send_all(mailbox, kind)
        self._await(lambda: self._yields or mailbox is None or len(self._answers) == len(mailbox.ranks))
        self._asking = ""
        return not self._yields

    def _let_write(self, mailbox: Mailbox | None, reason: str) -> None:
        """Write this rank's flight record, and let the ranks that have answered write theirs."""
        answered = set(self._answers)
        self._written = {self.rank: self._write(reason)}
        self._send_all(mailbox, END, reason)
        self._await(lambda: set(self._written) >= answered)

    def _await(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + ANSWER_SECONDS
        while not done() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS / 10)
            self._take_messages()

    def _records(self) -> str:
        writers = [rank for rank, error in self._written.items() if not error]
        if not writers:
            return f"no flight records: {self._written[self.rank]}"
        return f"distopt trace reads the flight records of {names(writers)} in {flight_recorder.folder()}"

    # ------------------------------------------------------------------------------------------- answers

    def _take_messages(self) -> None:
        for mailbox in list(self._mailboxes):
            while message := mailbox.receive():
                sender, text = message
                self._handle(mailbox, sender, *json.loads(text))

    def _handle(self, mailbox: Mailbox, sender: int, kind: str, question: int, content: Any) -> None:
        if kind in (HOW, WHY):
            self._send(mailbox, sender, HERE, question, answer(self._recorder))
            self._defer(mailbox, sender, kind)
        elif kind == END:
            self._send(mailbox, sender, WRITTEN, question, self._write(content))
            self._wait_for_the_end()
        elif question == self._question:
            replies = self._answers if kind == HERE else self._written
            replies[mailbox.ranks[sender]] = content

    def _defer(self, mailbox: Mailbox, sender: int, kind: str) -> None:
        """Leave the report to the rank that asks, unless this rank asks too and is the lower one."""
        self._warned = time.monotonic()
        if kind == WHY:
            self._quiet_until = self._warned + TRUST
        outranked = sender < mailbox.rank if kind == self._asking else kind == WHY
        self._yields = self._yields or outranked

    def _send_all(self, mailbox: Mailbox | None, kind: str, content: Any = None) -> None:
        for index in range(len(mailbox.ranks) if mailbox else 0):
            if mailbox and index != mailbox.rank:
                self._send(mailbox, index, kind, self._question, content)

    def _send(self, mailbox: Mailbox, to: int, kind: str, question: int, content: Any) -> None:
        with contextlib.suppress(Exception):  # a rank that cannot be reached does not answer
            mailbox.send(to, json.dumps([kind, question, content]))

    # ------------------------------------------------------------------------------------------- ends

    def _write(self, reason: str) -> str:
        """Write this rank's flight record; return the error, or '' if it was written."""
        try:
            flight_recorder.write(self._recorder, self.rank, reason)
        except Exception as error:  # whatever it is, the job must end
            return f"{type(error).__name__}: {error}"
        return ""

    def _end(self, text: str) -> NoReturn:
        self._last_words.put(text)
        time.sleep(ABORT)
        os._exit(EXIT)

    def _print_and_abort(self) -> None:
        say(self._last_words.get())
        if self._abort:
            time.sleep(POLL_SECONDS)  # a launcher may lose text that it has not read yet
            self._abort(EXIT)
        else:
            os._exit(EXIT)

    def _wait_for_the_end(self) -> NoReturn:
        """Wait until another rank ends the job; if it does not, end this process alone."""
        time.sleep(TRUST)
        os._exit(EXIT)


def say(text: str) -> None:
    """Write a text to standard error past the locks of ``sys.stderr``, which a stuck thread may hold."""
    rest = text.encode(errors="backslashreplace")
    with contextlib.suppress(OSError, ValueError):
        while rest:  # a pipe that nobody waits for takes a part
            rest = rest[os.write(2, rest) :]
