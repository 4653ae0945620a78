"""Virtual ranks: P ranks that train one model, one after the other, in one process."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import numpy as np

from distopt.buckets import Buffer, Sum, in_one_piece
from distopt.comm import LocalCommunicator, objects
from distopt.comm.communicator import checked_root
from distopt.comm.local import LocalControl
from distopt.comm.meter import Meter
from distopt.compress import Compressor
from distopt.conditions import Kind
from distopt.dist_opt import DistOpt
from distopt.exchange.walk import Turns
from distopt.guard import by_rank
from distopt.ledger import KEEP, Ledger, Purpose
from distopt.loop import Packed
from distopt.memory import GradientHook
from distopt.numbers import whole
from distopt.optim import AnyOptimizer

Losses = Callable[[int], Any]


class VirtualControl(LocalControl):
    """Votes of ranks that all say the same, but for the one whose turn it is."""

    def __init__(self, size: int):
        self.size = self.live = size

    def _gather(self, text: str) -> list[str]:
        """Nothing of those before it."""
        return [""] * self.rank + [text]


class VirtualRanks(LocalCommunicator):
    """Where the ranks would be that take their turns; the ledger is that of rank 0."""

    may_overlap = False  # a bucket is sent when the last rank has brought its own

    def __init__(self, size: int, hosts: Sequence[int], keep: int):
        super().__init__(why="virtual ranks")
        self.size, self._hosts, self.control = size, hosts, VirtualControl(size)
        self.ledger = Ledger(keep)
        self.meter = Meter(0, size, self.hosts, self.algorithm, self.ledger)

    def take(self, rank: int) -> None:
        """It is this rank's turn."""
        self.rank = self.control.rank = rank

    def on_behalf_of(self, purpose: Purpose) -> AbstractContextManager[None]:
        """For the ledger."""
        return self.meter.on_behalf_of(purpose)

    def broadcast(self, x: np.ndarray, root: int = 0) -> None:
        """All have the one copy; the ledger has what it takes to send it."""
        super().broadcast(x, root)
        self.meter.broadcast(x.size, x.itemsize, root)

    def all_reduce(self, x: np.ndarray) -> None:
        """NotImplementedError: the others are not there."""
        raise NotImplementedError("virtual ranks take their turns in the steps of a simulation; they have no verbs")

    def all_gather(self, x: np.ndarray, ragged: bool = False, into: np.ndarray | None = None) -> list[np.ndarray]:
        """NotImplementedError."""
        self.all_reduce(x)
        return []

    def all_to_all(self, parts: Sequence[np.ndarray], ragged: bool = False) -> list[np.ndarray]:
        """NotImplementedError."""
        self.all_reduce(parts[0])
        return []

    def gather_texts(self, lines: Sequence[str], make: Callable[[], str]) -> list[str]:
        """NotImplementedError."""
        raise NotImplementedError("virtual ranks take their turns in the steps of a simulation; they have no verbs")

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """All have the one copy."""
        checked_root(root, self.size)
        return objects.decode(objects.encode(value))

    def peers(self, x: np.ndarray) -> None:  # type: ignore[override]
        """None of the others."""


class Simulation(DistOpt):
    """A ``DistOpt`` for P ranks without P processes: a loss is a function of the rank.

    ``sim.step(losses, compressor)``, or any other step but a partial one, where ``losses(r)`` is what rank r would give
    to its own, with the same parameters for all.  The ranks are walked one after the other through the same pack,
    compress and decompress, bucket by bucket; there is one copy of the parameters, of the optimizer's state, of
    gradients and of their sum, and only what a compressor keeps is there P times.  Parameters have the bits that P
    ranks get with ``deterministic=True``.

    ``ledger`` has the messages that rank 0 would exchange with the others, by direct exchange, ``hosts`` being where
    each rank sits (numbers, equal for one machine).  How long they would take is not measured but predicted
    (``distopt.cost``).

    What a compressor keeps is in no ``state_dict``, so the plan is fixed by the first step, and there are no
    checkpoints, and no tape is recorded.  A loss that raises or is not finite raises what it does on P ranks, and ends
    the simulation if it is not the first rank's: those before it have gone on.  A sum over ranks that is not finite is
    refused, and ends it too where something was left behind.
    """

    _remedy = "start anew"
    _in_loss = False  # is one asked for its gradients?

    def __init__(
        self,
        size: int,
        opt: AnyOptimizer | None = None,
        *,
        threshold: int = 2097152,
        nonfinite: str = "raise",
        allow_missing: bool = False,
        clip_norm: float | None = None,
        gradient_hook: GradientHook | None = None,
        hosts: Sequence[int] = (),
        keep: int = KEEP,
    ):
        if nonfinite not in ("raise", "propagate"):
            raise ValueError(f"nonfinite must be 'raise' or 'propagate' for virtual ranks, got {nonfinite!r}")
        wire = VirtualRanks(whole("size", size, least=1), _checked_hosts(hosts, size), keep)
        super().__init__(
            opt,
            wire,
            threshold=threshold,
            nonfinite=nonfinite,
            allow_missing=allow_missing,
            clip_norm=clip_norm,
            gradient_hook=gradient_hook,
        )
        self.ledger = wire.ledger
        self._recorder = None  # a tape is of what real ranks do
        self._turn = wire
        self._kept: list[list[dict[str, np.ndarray]]] = []  # by a compressor, of each rank and bucket

    def report(self) -> dict[str, dict[str, int]]:
        """Bytes that rank 0 would have exchanged since the start, with the lines of ``Metered.report()``."""
        return self.ledger.report()

    def _step(self, loss: Any, kind: Kind) -> bool:
        """One step of all ranks; ``loss`` is a callable of the rank."""
        if not callable(loss):
            raise TypeError(f"the losses of virtual ranks are a callable of the rank, got {type(loss).__name__}")
        return super()._step(loss, kind)

    def _packed(self, loss: Any, kind: Kind) -> Packed:
        """The first rank's gradients are packed before the vote, the others' when their turn comes."""
        self._makes_plan = not self._collector.order
        error, exchange = super()._packed(lambda: self._pairs(loss, 0), kind)
        if error is None:
            compressor = self._compressor
            exchange = lambda arrays: self._walk(loss, kind, compressor)  # noqa: E731
        return error, exchange

    def _pairs(self, losses: Losses, rank: int) -> list[Any]:
        """What the loss of a rank yields."""
        self._in_loss = True
        try:
            return self._collector.read(losses(rank))
        finally:
            self._in_loss = False

    def _check_open(self) -> None:
        if self._in_loss:
            raise RuntimeError("a loss of virtual ranks is asked for in the middle of a step: it cannot make another")
        super()._check_open()

    def _walk(self, losses: Losses, kind: Kind, compressor: Compressor) -> Iterator[Sum]:
        """Bring one rank after the other, and take from each of its buckets what it sends."""
        buffers = list(self._memory)
        self._kept = self._kept or [[{} for _ in buffers] for _ in range(self.world_size)]
        turns = [self._observer.turns(compressor, buffer.scratch) for buffer in buffers]
        if begin := getattr(compressor, "begin", None):
            for buffer, state in zip(buffers, self._kept[0], strict=True):
                begin(buffer.gradient, state, self._at_bucket(buffer, self._turn))
        try:
            for rank, kept in enumerate(self._kept):
                self._turn.take(rank)
                if rank:
                    self._bring(losses, kind, compressor)
                for buffer, turn, state in zip(buffers, turns, kept, strict=True):
                    turn.add(buffer.gradient, state, self._at_bucket(buffer, self._turn))
        except BaseException as error:
            self._failure = f"the ranks before rank {rank} have done step {self.step_counter + 1}, where that failed"
            self._failure += f" with {type(error).__name__}: {error}; {self._remedy}"
            raise
        finally:
            self._turn.take(0)
        return map(self._given, buffers, turns, self._kept[0], [kind.break_even] * len(buffers))

    def _bring(self, losses: Losses, kind: Kind, compressor: Compressor) -> None:
        """The gradients of the rank whose turn it is come to their places, or raise what they raise on P ranks."""
        error, bad = None, ""
        self._memory.bad[:] = 0
        try:
            self._collect(self._pairs(losses, self._turn.rank))
            self._pack(compressor, self._packer(compressor, kind), 0)
            bad = self._refusal.in_gradients()
        except Exception as e:
            error = e
        if error or bad:
            self._nonfinite.judge(self._name, by_rank(self._vote(self._name, self._calls, error, bad)))

    def _collect(self, pairs: list[Any]) -> None:
        """Take in gradients of the parameters that the first rank has; in the step that makes the plan, in its order.

        ValueError for a parameter that lies elsewhere than the first rank's, or comes elsewhere in that order.
        """
        first = self._collector.values.addresses
        self._collector.collect(pairs)
        order = list(self._collector.order.items())
        for k in np.flatnonzero(self._collector.values.addresses != first):
            name, known = order[k]
            if known.value.nbytes:
                raise ValueError(
                    f"{name} is another array than rank 0's: virtual ranks have one model, whose parameters all their "
                    "losses give"
                )
        if self._makes_plan:
            self._check_order([self._collector.identify(param)[0] for param, _ in pairs])

    def _check_order(self, given: list[str]) -> None:
        pairs = itertools.zip_longest(self._collector.order, given, fillvalue="nothing")
        for k, (first, own) in enumerate(pairs):
            if own != first:
                raise ValueError(f"ranks differ: rank 0 has parameter {k} = {first}, this one has {own}")

    def _given(self, buffer: Buffer, turn: Turns, state: dict[str, np.ndarray], break_even: bool) -> Sum:
        """The sum over ranks of a bucket."""
        x, at = buffer.gradient, self._at_bucket(buffer, self._turn)
        turn.give(x, at)
        turn.write(self._turn.meter, x, at, break_even)
        finish = getattr(self._compressor, "finish", None)
        if finish:
            finish(x, state, at)
        return in_one_piece(x)

    def _finite_sums(self, exchanged: Iterable[Sum]) -> list[Sum] | None:
        """The sums of all buckets; here, where a pass over them is little, each is looked at."""
        sums = list(exchanged)
        bad = self._refusal.in_sums(sums, True)
        if bad and self._compressor.stateful:
            self._failure = f"what the ranks sent in step {self.step_counter + 1} is lost: {bad}; {self._remedy}"
        self._nonfinite.judge(self._name, bad)
        return sums

    def _checked_threshold(self, kind: Kind) -> int:
        """As of any step; ValueError for another one than that of the first."""
        threshold = super()._checked_threshold(kind)
        if self._kept and threshold != self._threshold:
            raise ValueError(f"threshold must stay {self._threshold} with virtual ranks, got {threshold}")
        return threshold

    def _own_parameters(self) -> Compressor:
        """ValueError: there are none."""
        raise ValueError("a partial step changes each rank's own parameters, of which virtual ranks have but one copy")

    def _not_saved(self, *given: Any, **named: Any) -> NoReturn:
        """NotImplementedError."""
        raise NotImplementedError("a simulation is not saved: what compressors keep of all ranks is in no state")

    state_dict = load_state_dict = save = load = save_when_stopped = _not_saved

    def join(self) -> None:
        """NotImplementedError."""
        raise NotImplementedError("virtual ranks have equally many batches: there is none that joins")


def _checked_hosts(hosts: Sequence[int], size: int) -> list[int]:
    found = hosts.tolist() if isinstance(hosts, np.ndarray) else hosts
    if not isinstance(found, Sequence) or isinstance(found, str | bytes):
        raise TypeError(f"hosts must be a sequence of numbers, one per rank, got {hosts!r:.60}")
    if len(found) not in (0, size):
        raise ValueError(f"hosts must be one number per rank, {size} of them, got {len(found)}")
    return [whole(f"hosts[{rank}]", host, least=0) for rank, host in enumerate(found)]


def simulate(size: int, opt: AnyOptimizer | None = None, **options: Any) -> Simulation:
    """Virtual ranks, ``size`` of them, that train with one optimizer (default ``SGD()``): see ``Simulation``.

    Raises ValueError for less than one rank, ValueError or TypeError for ``hosts`` that are not one number per rank.
    """
    return Simulation(size, opt, **options)
