"""Collectives before which the ranks vote, and which may be begun now and awaited later."""

import functools
import queue
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from distopt import device
from distopt.comm.communicator import Communicator, Ragged, Wrapper, as_flat, check_operation, check_root
from distopt.comm.control import fingerprint

VERBS = ("all_reduce", "all_gather", "all_to_all", "broadcast", "broadcast_object", "reduce_scatter", "barrier")


def by(verb: str, op: str) -> str:
    """Return the name of a reduction, which is that of the verb for sums.

    Example:
        >>> by("all_reduce", "max")
        'all_reduce by max'
    """
    return verb if op == "sum" else f"{verb} by {op}"


def reducible(op: str) -> Callable[[list[np.ndarray]], None]:
    """Return a check that arrays can be reduced so."""

    def check(arrays: list[np.ndarray]) -> None:
        for x in arrays:
            check_operation(op, x.dtype)

    return check


def agree_on_arrays(
    comm: Communicator,
    verb: str,
    xs: Iterable[Any],
    check: Callable[[list[np.ndarray]], object] = lambda arrays: None,
    ragged: bool = False,
    writable: bool = True,
) -> list[np.ndarray]:
    """Return the arrays, once all ranks are in the same verb with arrays of the same shapes and dtypes.  Collective."""
    # check: raises what forbids it on this rank, which all ranks raise.
    # ragged: the first dimension of their shapes may differ.
    error, lines, arrays = None, [verb], list[np.ndarray]()
    try:
        for k, x in enumerate(map(device.array_of, xs)):
            as_flat(x, writable, gpu=comm.gpu)
            arrays.append(x)
            shape = f"(*, {', '.join(map(str, x.shape[1:]))})" if ragged else x.shape
            lines.append(f"{verb} of array {k} = {shape} {x.dtype}")
        check(arrays)
    except Exception as e:
        error = e
    comm.transaction(lambda: comm.control.vote(verb, fingerprint(lines), lambda: lines, error))
    return arrays


class CollectiveHandle:
    """A collective that ``Voted.begin`` has begun.

    Example:
        >>> import numpy as np
        >>> from distopt.comm import LocalCommunicator, Voted
        >>> x = np.ones(2)
        >>> handle = Voted(LocalCommunicator()).begin("all_reduce", x, op="mean")
        >>> handle.wait()
        >>> handle.poll()
        True
    """

    def __init__(self, result: "Future[Any]", comm: Communicator):
        self._result, self._comm, self._enqueued = result, comm, device.StreamEvent() if comm.gpu is not None else None
        if self._enqueued is not None:
            with comm.on_comm_stream():
                self._enqueued.record()

    def poll(self) -> bool:
        """Tell, without waiting, if it is complete on this rank."""
        return self._result.done() and (self._enqueued is None or self._enqueued.done)

    def wait(self) -> Any:
        """Wait until it is complete, and return what the collective returns, or raise what it raises on every rank.

        On a GPU it is the current stream that waits.
        """
        result = self._result.result()
        self._comm.wait()
        return result


class Voted(Wrapper):
    """Communicator whose collectives begin with a vote, and take tensors of PyTorch as well as arrays.

    Ranks that are in different collectives, or bring other shapes, dtypes, reductions or roots, all raise the same
    ValueError, which names the first difference, and what one rank alone finds wrong all raise too: nothing has moved
    then.  A vote is a small message between all ranks.  What comes back is flat, as of any communicator, and tensors
    if tensors were given; of a ragged collective, all dimensions but the first must be the same on all ranks.

    ``begin`` does a collective while the script goes on.

    Args:
        comm: the communicator, as ``distopt.world()``.

    Example:
        >>> import numpy as np
        >>> from distopt.comm import Voted, run_ranks
        >>> def main(comm):
        ...     comm, x = Voted(comm), np.full(2, comm.rank, np.int8)
        ...     comm.all_reduce(x, op="max")
        ...     handle = comm.begin("all_gather", x[: comm.rank], ragged=True)
        ...     return x.tolist(), [part.tolist() for part in handle.wait()]
        >>> run_ranks(2, main)[0]
        ([1, 1], [[], [1]])
        >>> run_ranks(2, lambda comm: Voted(comm).all_gather(np.zeros(2 + comm.rank)))
        Traceback (most recent call last):
        ValueError: ranks differ: rank 0 has all_gather of array 0 = (2,) float64, rank 1 has all_gather of array 0 = (3,) float64
    """  # noqa: E501  an example's output

    def __init__(self, comm: Communicator):
        super().__init__(comm)
        # of what is begun: a communicator, whether a thread has it, and its jobs
        self._apart: Voted | None = None
        self._threaded = False
        self._jobs = queue.SimpleQueue[Callable[[], object] | None]()

    def all_reduce(self, x: Any, op: str = "sum") -> None:
        (array,) = agree_on_arrays(self.comm, by("all_reduce", op), [x], reducible(op))
        self.comm.all_reduce(array, op)

    def all_gather(self, x: Any, ragged: Ragged = False, into: Any = None) -> list[Any]:
        verb = "ragged all_gather" if ragged else "all_gather"
        (array,) = agree_on_arrays(self.comm, verb, [x], ragged=bool(ragged), writable=False)
        return tensors_like(self.comm.all_gather(array, ragged, device.array_of(into)), x)

    def all_to_all(self, parts: Sequence[Any], ragged: Ragged = False) -> list[Any]:
        def check(arrays: list[np.ndarray]) -> None:
            if len(arrays) != self.size:
                raise ValueError(f"parts must be {self.size} arrays, one per rank, got {len(arrays)}")

        verb = "ragged all_to_all" if ragged else "all_to_all"
        arrays = agree_on_arrays(self.comm, verb, parts, check, bool(ragged), writable=False)
        return tensors_like(self.comm.all_to_all(arrays, ragged), parts[0])

    def reduce_scatter(self, x: Any, op: str = "sum") -> Any:
        (array,) = agree_on_arrays(self.comm, by("reduce_scatter", op), [x], reducible(op), writable=False)
        return tensors_like([self.comm.reduce_scatter(array, op)], x)[0]

    def broadcast(self, x: Any, root: int = 0) -> None:
        (array,) = agree_on_arrays(self.comm, f"broadcast from rank {root}", [x], lambda _: check_root(root, self.size))
        self.comm.broadcast(array, root)

    def barrier(self) -> None:
        agree_on_arrays(self.comm, "barrier", [])

    def begin(self, verb: str, *arguments: Any, **options: Any) -> CollectiveHandle:
        """Begin a collective, and return a handle of it; its arguments must stay as they are until it is complete.

        What was begun is done in this order, which must be the same on all ranks, in a thread and on a communicator of
        its own (``separate``); others may be called meanwhile.  Where one thread alone may exchange (``may_overlap``),
        it is done at once, and on a GPU it is enqueued.  Errors are raised by the handle's ``wait``.  Wait for all
        handles before the script ends.  An elastic job lets nobody in that has not begun the same.

        Args:
            verb: the collective's name, as 'all_reduce'.
            *arguments: its arguments.
            **options: its arguments by name.

        Raises:
            ValueError: ``verb`` is no collective.

        Example:
            >>> import numpy as np
            >>> from distopt.comm import LocalCommunicator, Voted
            >>> handle = Voted(LocalCommunicator()).begin("all_gather", np.ones(2))
            >>> handle.wait()
            [array([1., 1.])]
        """
        if verb not in VERBS:
            raise ValueError(f"verb must be one of {', '.join(VERBS)}, got {verb!r}")
        if self._apart is None:
            self._apart = Voted(self.comm.separate())
            self._threaded = self.may_overlap and self._apart.comm is not self.comm
            if self._threaded:
                device.in_thread(functools.partial(_work, self._jobs), self.gpu, "distopt's collectives")
                weakref.finalize(self, self._jobs.put, None).atexit = False
        result, collective = Future[Any](), getattr(self._apart, verb)
        job = functools.partial(_do, result, functools.partial(collective, *arguments, **options))
        if self._threaded:
            self._jobs.put(job)
        else:
            job()
        return CollectiveHandle(result, self._apart)

    def moved_to(self, comm: Communicator) -> Communicator:
        return Voted(comm)

    def close(self) -> None:
        self._jobs.put(None)
        if self._threaded and self._apart is not None:
            self._apart.close()
        self.comm.close()


def tensors_like(arrays: Sequence[np.ndarray], x: Any) -> list[Any]:
    """Return flat arrays as tensors, if x is one."""
    if not device.is_tensor(x):
        return list(arrays)
    return [device.as_kind(a if device.writable(a) else a.copy(), x.reshape(-1)) for a in arrays]


def _do(result: "Future[Any]", collective: Callable[[], Any]) -> None:
    try:
        result.set_result(collective())
    except BaseException as error:
        result.set_exception(error)


def _work(jobs: "queue.SimpleQueue[Callable[[], object] | None]") -> None:
    while job := jobs.get():
        job()
        # it has the arguments and the result
        del job
