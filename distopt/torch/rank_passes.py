"""Backward passes of logical ranks, one after the other, and the exchange after the last one."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import torch

from distopt.torch.exchange import GradientExchange


class Slot(Protocol):
    """The place where a model has the gradient of a parameter."""

    def gradient(self) -> torch.Tensor | None:
        """Return it."""

    def store(self, view: torch.Tensor) -> None:
        """Give the model a mean."""

    def clear(self) -> None:
        """Take the gradient away."""


class RankPasses:
    """The passes of a step: gradients of each rank go to its buckets when its turn ends, the means to the model."""

    def __init__(
        self,
        exchange: GradientExchange,
        slots: Mapping[str, Slot],
        wrong: Callable[[Mapping[str, torch.Tensor]], Exception | None],
    ):
        # wrong: tells what forbids to exchange gradients.
        self._exchange, self._engine, self._slots, self._wrong = exchange, exchange.engine, slots, wrong
        # Of the ranks whose passes of this step are done, their gradients.  They lie in the buckets, but for those of a
        # rank that has come to this process since the last step.
        self._done: dict[int, dict[str, torch.Tensor]] = {}
        # Whose turn it is: None outside of a step, and after a failure that all processes have been told of.
        self._turn: int | None = None
        # What the passes of a turn have added to; None where no turn is.
        self._arrived: set[str] | None = None

    def turns(self) -> Iterator[int]:
        """Yield the ranks that live here; then exchange, and go on with those that were taken over meanwhile."""
        engine = self._engine
        engine.let_in()
        engine.transaction(engine.losses.agree)
        self._done = {}
        while True:
            for rank in [rank for rank in engine.comm.ranks.here if rank not in self._done]:
                self._turn = rank
                try:
                    yield rank
                except GeneratorExit:
                    self._tell(RuntimeError(f"the loop over sync.logical was left in the turn of logical rank {rank}"))
                    raise
                if self._turn is None:
                    return
                if rank not in self._done:
                    self._exchange.fail(RuntimeError(f"the passes of rank {rank} must be in `with sync.of({rank}):`"))
            self._turn = None
            if (nowhere := self._exchange.exchange_ranks(self._done)) is not None:
                views = self._exchange.views
                for name in self._slots.keys() - nowhere:
                    self._slots[name].store(views[name])
                return

    def note(self, name: str) -> None:
        """Note that a gradient came."""
        if self._arrived is None:
            raise RuntimeError("a backward pass must be in `with sync.of(rank):` of a rank of sync.logical")
        self._arrived.add(name)

    @contextlib.contextmanager
    def of(self, rank: int) -> Iterator[None]:
        """Return a context of the forward and backward passes of a rank, whose turn it is."""
        if rank != self._turn:
            turn = "a rank that sync.logical yields" if self._turn is None else f"{self._turn}, whose turn it is"
            raise ValueError(f"rank must be {turn}, got {rank!r}")
        for slot in self._slots.values():
            slot.clear()
        arrived = self._arrived = set[str]()
        try:
            with self._engine.losses.turn(rank), self._exchange.buffers_of(rank):
                yield
        except Exception as error:
            self._tell(error)
            raise
        finally:
            self._arrived = None
        gradients = {name: g for name in arrived if (g := self._slots[name].gradient()) is not None}
        if wrong := self._wrong(gradients):
            self._turn = None
            self._exchange.fail(wrong)
        for name, view in self._exchange.views_of(rank).items() if rank in self._engine.store.of_ranks else ():
            if name in gradients:
                gradients[name] = view.copy_(gradients[name])
        for slot in self._slots.values():
            slot.clear()
        self._done[rank] = gradients

    def _tell(self, error: Exception) -> None:
        """Tell the other processes of an error, once; this one raises its own."""
        if self._turn is not None:
            self._turn = None
            with contextlib.suppress(Exception):
                self._exchange.fail(error)
