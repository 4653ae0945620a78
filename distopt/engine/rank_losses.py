"""The losses of logical ranks, and the random numbers of each."""

import contextvars
import hashlib
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from distopt.comm import Communicator
from distopt.device import describe
from distopt.engine.parameters import iterable
from distopt.engine.progress import Progress

# The number of the call whose loss is being computed, in a training of logical ranks.
present_call = contextvars.ContextVar[int]("the present call of a training of logical ranks")


class RankLosses:
    """Call the loss of each rank that lives here, with random numbers that do not depend on who else does."""

    # In every call the generators of Python, numpy and torch begin with a seed of the rank and the call, so that nobody
    # has to keep their states, and a rank that moves takes nothing with it.  Those of the process go on afterwards as
    # if there had been no loss.

    def __init__(self, comm: Communicator, progress: Progress):
        self._comm, self._logical = comm, comm.ranks.logical
        # Returns the number of the present call, from 0.
        self.calls: Callable[[], int] = lambda: progress.calls
        # Of each library, what all seeds of its generators are made of; [] until all processes have agreed.
        self.seeds: list[int] = []
        # Of the ranks here whose gradients of the present call lie in their buckets, the parameters without one.
        self.packed: dict[int, int] = {}

    def agree(self) -> None:
        """Take the seeds of process 0, which are those of its generators before the first loss.  Collective then."""
        if self._logical and not self.seeds:
            self.seeds = self._comm.broadcast_object(list(map(_digest, _states())))

    def of(self, loss: Any, rank: int) -> Any:
        """Return the loss of one rank."""
        if not self._logical:
            return loss
        if not callable(loss):
            raise TypeError(
                "loss must be a callable of the rank, as opt.step(lambda rank: pairs), with logical ranks, got "
                f"{describe(loss)}"
            )

        def pairs() -> Iterable[Any]:
            turn = self.turn(rank)
            with turn:
                found = iterable(lambda: loss(rank))
            return found if isinstance(found, list | tuple) else _read_in(turn, found)

        return pairs

    def turn(self, rank: int) -> "RankTurn":
        """Return the context of a rank's loss in the present call."""
        call = self.calls()
        return RankTurn(call, [(seed, rank, call) for seed in self.seeds])


class RankTurn(AbstractContextManager[None]):
    """A context in which a rank's loss is called: the generators of Python, numpy and torch are the rank's.

    Args:
        call: the number of the call, which is ``present_call`` then.
        seeds: of each generator.
    """

    # Threads of a process, as of ``run_ranks``, share the generators.
    _one_at_a_time = threading.Lock()

    def __init__(self, call: int, seeds: Sequence[Sequence[int]]):
        self._call, self._seeds = call, seeds
        self._states: list[Any] = []

    def __enter__(self) -> None:
        self._one_at_a_time.acquire()
        self._token, self._outside = present_call.set(self._call), _states()
        if self._states:
            _restore(self._states)
            return
        python, numpy, torchs = (np.random.SeedSequence(seed).generate_state(4) for seed in self._seeds)
        random.seed(python.tobytes())
        np.random.seed(numpy)  # noqa: NPY002  scripts use these
        if torch := sys.modules.get("torch"):
            torch.manual_seed(int(torchs[0]) << 31 | int(torchs[1]) >> 1)

    def __exit__(self, *error: object) -> None:
        self._states = _states()
        _restore(self._outside)
        present_call.reset(self._token)
        self._one_at_a_time.release()


def _read_in(turn: RankTurn, pairs: Iterable[Any]) -> Iterator[Any]:
    with turn:
        yield from pairs


def _states() -> list[Any]:
    """Return the states of the generators of Python, numpy and torch; None for one that is not imported."""
    torch = sys.modules.get("torch")
    return [random.getstate(), np.random.get_state(), torch.get_rng_state() if torch else None]  # noqa: NPY002


def _restore(states: Sequence[Any]) -> None:
    python, numpy, torchs = states
    random.setstate(python)
    np.random.set_state(numpy)  # noqa: NPY002
    if torchs is not None:
        sys.modules["torch"].set_rng_state(torchs)


def _digest(state: Any) -> int:
    """Return a number below 2^48 for the state of a generator, 0 for none."""
    if state is None:
        return 0
    parts = state if isinstance(state, tuple) else (state.numpy(),)
    digest = hashlib.blake2b(digest_size=6)
    for part in parts:
        digest.update(part.tobytes() if isinstance(part, np.ndarray) else repr(part).encode())
    return int.from_bytes(digest.digest(), "little")
