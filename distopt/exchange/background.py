"""Exchange while the gradients of the next buckets are still being computed."""

import queue
import threading
from collections.abc import Callable

Job = Callable[[], object]


class Background:
    """A thread that does one job after the other; after a job that failed it does no more until ``finish``."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._done = threading.Semaphore(0)
        self._started = 0
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self, job: Job) -> None:
        """Let the thread do a job when those before it are done."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="distopt exchange", daemon=True)
            self._thread.start()
        self._started += 1
        self._jobs.put(job)

    def finish(self) -> None:
        """Return when all jobs are done; raise what one of them raised."""
        for _ in range(self._started):
            self._done.acquire()
        self._started, error, self._error = 0, self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                if self._error is None:
                    job()
            except BaseException as error:
                self._error = error
            self._done.release()
