"""Exchange while the gradients of the next buckets are still being computed."""

import collections
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from distopt.comm.communicator import UNDER_WAY

Job = Callable[[], object]
# Work on a stream of items; what it yields does not matter.
Work = Callable[[Iterable[Any]], Iterable[object]]
Items = queue.SimpleQueue[Any]
Jobs = queue.SimpleQueue[Job | None]
Results = queue.SimpleQueue[BaseException | None]

# The end of a stream.
END = object()


class Background:
    """A thread that does one job after the other; after a job that failed it does no more until ``finish``."""

    # It starts with the first job, and ends when this object does.

    def __init__(self) -> None:
        self._jobs, self._results = Jobs(), Results()
        # Jobs that are not yet known to be done.
        self._started = 0
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._items = Items()

    def start(self, job: Job) -> None:
        """Do a job on the thread when those before it are done."""
        if self._thread is None:
            self._thread = threading.Thread(target=_run, args=(self._jobs, self._results), daemon=True)
            self._thread.start()
            # It may still have to finish then.
            weakref.finalize(self, self._jobs.put, None).atexit = False
        self._started += 1
        self._jobs.put(job)

    def stream(self, work: Work) -> None:
        """Start a job on all items that are ``put`` before ``finish``; None among them: the next is not there yet."""
        items = self._items = Items()
        self.start(lambda: _consume(work(_until_end(items))))

    def put(self, item: Any) -> None:
        """Give an item to the last stream."""
        self._items.put(item)

    def finish(self) -> None:
        """Return when all jobs are done; raise what one of them raised."""
        self._items.put(END)
        self.start(_forget_failure)
        while self._started:
            self._error = self._results.get() or self._error
            self._started -= 1
        error, self._error = self._error, None
        if error is not None:
            raise error


class Inline:
    """A worker without a thread, for jobs that only enqueue: each is done when it is started."""

    def __init__(self) -> None:
        self._error: BaseException | None = None

    def start(self, job: Job) -> None:
        """Do a job, unless one has failed."""
        if self._error is None:
            try:
                job()
            except BaseException as error:
                self._error = error

    def stream(self, work: Work) -> None:
        """Do this work on each item that is ``put`` from now on."""
        self._work = work

    def put(self, item: Any) -> None:
        """Do the stream's work on an item at once."""
        self.start(lambda: _consume(self._work([item])))

    def finish(self) -> None:
        """Raise what a job raised."""
        error, self._error = self._error, None
        if error is not None:
            raise error


def _consume(results: Iterable[object]) -> None:
    collections.deque(results, maxlen=0)


def _until_end(items: Items) -> Iterator[Any]:
    """Yield the items until the end; before one that is not there, None as often as completes what is under way."""
    while True:
        for _ in range(UNDER_WAY - 1):
            if items.empty():
                yield None
        item = items.get()
        if item is END:
            return
        yield item


def _forget_failure() -> None:
    """Mark the end of a sequence of jobs: the next one may begin, even if a job has failed."""


def _run(jobs: Jobs, results: Results) -> None:
    failed = False
    while job := jobs.get():
        error = None
        if job is _forget_failure:
            failed = False
        elif not failed:
            try:
                job()
            except BaseException as e:
                error, failed = e, True
        results.put(error)
        del job
