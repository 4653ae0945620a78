"""A thread per process that looks whether this rank waits for too long, and answers those who ask where it is.

It can do so while the main thread is stuck in MPI or in the user's code, unless that holds the interpreter lock.  Who
finds an operation over its limit asks all ranks of its communicator where they are, lets them write their flight
records, says it all in one report, and ends the job with exit code 75.  Of several that find it at the same moment the
lowest rank speaks.
"""

import contextlib
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

from distopt.watch import flight
from distopt.watch.limits import VARIABLE, Limits
from distopt.watch.recorder import Operation, Recorder
from distopt.watch.report import Answer, answer, names, report

EXIT = 75  # EX_TEMPFAIL of sysexits.h: trying again may help
LOOK = 0.1  # seconds between two looks
PATIENCE = 0.5  # seconds for the others to answer, and again to write
TRUST = 3.0  # seconds until a rank that promised to end the job is not believed any more
ABORT = 2.0  # seconds for MPI to end the job
HICCUP = 1.0  # seconds at most that count between two looks: a job that was stopped and goes on has not waited
WARN_FROM = 60.0  # seconds of limit below which nobody is warned before the end
WARN_EVERY = 60.0

HOW, WHY, HERE, END, WRITTEN = "how", "why", "here", "end", "written"  # what a message is


class Mail(Protocol):
    """Short texts between the watchmen of ``ranks``, whatever their main threads do; never waits."""

    ranks: Sequence[int]  # their numbers among all processes of the job
    rank: int  # this one's place among them

    def send(self, to: int, text: str) -> None:
        """To one of them, by its place."""

    def receive(self) -> tuple[int, str] | None:
        """The place of a sender and what it sent, if something has come."""


class Watchman:
    """Watches over one process; ``rank`` is its number among all of the job.

    ``abort`` ends the other processes of the job; None if they will notice by themselves.  ``mails`` may grow.
    """

    def __init__(
        self,
        rank: int,
        recorder: Recorder,
        limits: Limits,
        abort: Callable[[int], Any] | None,
        mails: Sequence[Mail] = (),
    ):
        self.rank, self._recorder, self._limits, self._abort, self._mails = rank, recorder, limits, abort, mails
        self._waited: dict[tuple[str, int], float] = {}  # by operation
        self._quiet_until = 0.0  # another rank ends the job
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
        threading.Thread(target=self._speak, name="distopt's last words", daemon=True).start()

    def stop(self) -> None:
        """Before MPI ends."""
        self._stopping.set()
        self._thread.join(ABORT)

    def _run(self) -> None:
        before = time.monotonic()
        try:
            while not self._stopping.wait(LOOK):
                now = time.monotonic()
                self._take_mail()
                self._look(now, min(now - before, HICCUP))
                before = now
        except Exception as error:  # a job that is well goes on without a watch
            say(f"distopt: rank {self.rank}: no time limits any more: {type(error).__name__}: {error}\n")

    def _look(self, now: float, passed: float) -> None:
        """Count how long operations take, and find one that takes too long."""
        known, lasting = self._waited, self._recorder.open()
        self._waited = {o.key: known.get(o.key, 0.0) + min(passed, now - o.began) for o in lasting}
        limit = self._limits.first if self._recorder.first else self._limits.usual
        for operation in lasting:
            seconds = self._waited[operation.key]
            if not operation.log.limited:
                self._miss(operation, seconds, limit, now)
            elif seconds >= limit and now >= self._quiet_until:
                self._finish(operation, seconds, limit)
            elif limit >= WARN_FROM and seconds >= limit / 10 and now >= self._warned + WARN_EVERY:
                self._warn(operation, seconds, limit)

    # ------------------------------------------------------------------------------------------- who asks

    def _warn(self, operation: Operation, seconds: float, limit: float) -> None:
        self._warned = time.monotonic()
        if self._ask(operation.log.mail, HOW):
            end = f"the job ends when this has taken {limit:g} s ({VARIABLE})"
            say(report(self.rank, operation, seconds, self._ranks(operation), self._answers, end))

    def _miss(self, operation: Operation, seconds: float, limit: float, now: float) -> None:
        """Who may take as long as it needs must still answer; who does not is named, from time to time."""
        patience = limit / 10 if limit >= WARN_FROM else limit
        if seconds < patience or now < self._warned + WARN_EVERY:
            return
        self._warned = time.monotonic()
        ranks = self._ranks(operation)
        if self._ask(operation.log.mail, HOW) and len(self._answers) < len(ranks):
            end = "it waits for them without a limit; who gives no answer may never come"
            say(report(self.rank, operation, seconds, ranks, self._answers, end))

    def _finish(self, operation: Operation, seconds: float, limit: float) -> None:
        mail = operation.log.mail
        if not self._ask(mail, WHY):
            self._quiet_until = time.monotonic() + TRUST
            return
        answers = dict(self._answers)
        reason = f"{operation} took more than {limit:g} s"
        self._let_write(mail, reason)
        end = f"the limit is {limit:g} s ({VARIABLE}); {self._records()}"
        end = "\n".join(filter(None, (operation.log.others(), end)))
        self._end(report(self.rank, operation, seconds, self._ranks(operation), answers, end))

    def _ranks(self, operation: Operation) -> Sequence[int]:
        return operation.log.mail.ranks if operation.log.mail else [self.rank]

    def _ask(self, mail: Mail | None, kind: str) -> bool:
        """Ask all where they are, and wait for the answers a while; False if this rank is not to speak."""
        self._question += 1
        self._asking, self._yields, self._answers = kind, False, {self.rank: answer(self._recorder)}
        self._send_all(mail, kind)
        self._await(lambda: self._yields or mail is None or len(self._answers) == len(mail.ranks))
        self._asking = ""
        return not self._yields

    def _let_write(self, mail: Mail | None, reason: str) -> None:
        """All flight records, of those who answer in time."""
        answered = set(self._answers)
        self._written = {self.rank: self._write(reason)}
        self._send_all(mail, END, reason)
        self._await(lambda: set(self._written) >= answered)

    def _await(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not done() and time.monotonic() < deadline:
            time.sleep(LOOK / 10)
            self._take_mail()

    def _records(self) -> str:
        there = [rank for rank, error in self._written.items() if not error]
        if not there:
            return f"no flight records: {self._written[self.rank]}"
        return f"distopt trace reads the flight records of {names(there)} in {flight.folder()}"

    # ------------------------------------------------------------------------------------------- who is asked

    def _take_mail(self) -> None:
        for mail in list(self._mails):
            while message := mail.receive():
                sender, text = message
                self._hear(mail, sender, *json.loads(text))

    def _hear(self, mail: Mail, sender: int, kind: str, question: int, content: Any) -> None:
        if kind in (HOW, WHY):
            self._send(mail, sender, HERE, question, answer(self._recorder))
            self._defer(mail, sender, kind)
        elif kind == END:
            self._send(mail, sender, WRITTEN, question, self._write(content))
            self._wait_for_the_end()
        elif question == self._question:
            heard = self._answers if kind == HERE else self._written
            heard[mail.ranks[sender]] = content

    def _defer(self, mail: Mail, sender: int, kind: str) -> None:
        """Who asks will speak, unless this rank does."""
        self._warned = time.monotonic()
        if kind == WHY:
            self._quiet_until = self._warned + TRUST
        outranked = sender < mail.rank if kind == self._asking else kind == WHY
        self._yields = self._yields or outranked

    def _send_all(self, mail: Mail | None, kind: str, content: Any = None) -> None:
        for place in range(len(mail.ranks) if mail else 0):
            if mail and place != mail.rank:
                self._send(mail, place, kind, self._question, content)

    def _send(self, mail: Mail, to: int, kind: str, question: int, content: Any) -> None:
        with contextlib.suppress(Exception):  # who cannot be reached does not answer
            mail.send(to, json.dumps([kind, question, content]))

    # ------------------------------------------------------------------------------------------- ends

    def _write(self, reason: str) -> str:
        """Why there is no flight record; '' if there is."""
        try:
            flight.write(self._recorder, self.rank, reason)
        except Exception as error:  # whatever it is, the job must end
            return f"{type(error).__name__}: {error}"
        return ""

    def _end(self, text: str) -> NoReturn:
        self._last_words.put(text)
        time.sleep(ABORT)
        os._exit(EXIT)

    def _speak(self) -> None:
        say(self._last_words.get())
        if self._abort:
            time.sleep(LOOK)  # a launcher may lose what it has not read yet
            self._abort(EXIT)
        else:
            os._exit(EXIT)

    def _wait_for_the_end(self) -> NoReturn:
        """Another rank ends the job; if it does not come to that, this one goes alone."""
        time.sleep(TRUST)
        os._exit(EXIT)


def say(text: str) -> None:
    """One write, past the locks of ``sys.stderr``, which a thread may hold that is stuck."""
    left = text.encode(errors="backslashreplace")
    with contextlib.suppress(OSError, ValueError):
        while left:  # a pipe that nobody waits for takes a part
            left = left[os.write(2, left) :]
