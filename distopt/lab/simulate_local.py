"""Virtual ranks that make local steps."""

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from distopt import device
from distopt.comm.ledger import KEEP
from distopt.engine.engine import Engine
from distopt.engine.outer_loop import Fragment, LocalOptions, alone, begin_all, places
from distopt.engine.spec import GradientHook, Options, StepSpec, among, shows
from distopt.lab.simulate import Losses, VirtualRanks, run_virtual, virtual_engine
from distopt.optim import AnyOptimizer


class LocalSimulation:
    """A ``LocalSteps`` for P ranks without P processes, whose losses are functions of the rank.

    The ranks go one after the other through the same steps and exchanges; parameters have the bits that P ranks get
    with ``deterministic=True``.  Each rank has parameters and an optimizer of its own.  When it is a rank's turn, its
    parameters are in the arrays that the losses give; after a call rank 0's are.

    Args:
        size: the number of ranks.
        opt: the inner optimizer, of which each rank gets a copy; None for ``SGD()``.
        nonfinite: 'raise' or 'propagate'.
        allow_missing: whether parameters may have no gradient in a step.
        clip_norm: the largest norm of a rank's gradient; None for any.
        gradient_hook: changes a rank's gradients.
        hosts: the machine of each rank, as numbers; empty for one machine.
        keep: the number of entries that the ledger keeps.
        **options: every, outer, compressor, fragments, delay, alpha, threshold, break_even, exchange and over, as of
            ``LocalSteps``; ``every`` must be given.

    Attributes:
        communicator: the ranks.
        ledger: the messages that rank 0 would exchange with the others.
        step_counter: steps so far.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: one is out of range.

    Example:
        >>> import numpy as np
        >>> from distopt import Parameter, simulate_local
        >>> from distopt.optim import SGD
        >>> p, sim = Parameter("w", np.zeros(1, np.float32)), simulate_local(3, SGD(1.0), every=2, outer=SGD(1.0))
        >>> for _ in range(2):
        ...     _ = sim(lambda rank: [(p, np.full(1, rank, np.float32))])
        >>> p.data, sim.report()["all_reduce"]["payload"]  # minus twice the mean of 0, 1 and 2
        (array([-2.], dtype=float32), 4)
    """

    @shows(LocalOptions)
    def __init__(
        self,
        size: int,
        opt: AnyOptimizer | None = None,
        *,
        nonfinite: str = "raise",
        allow_missing: bool = False,
        clip_norm: float | None = None,
        gradient_hook: GradientHook | None = None,
        hosts: Sequence[int] = (),
        keep: int = KEEP,
        **options: Any,
    ):
        asked = among(Options._fields, locals())
        local = LocalOptions(**options)
        self._windows, self._alpha, self._spec = local.windows, local.alpha, local.spec
        self.communicator = VirtualRanks(size, hosts, keep)
        self.ledger = self.communicator.ledger
        self._inner = [_inner_engine(opt, self.communicator, rank, local.threshold, asked) for rank in range(size)]
        outer = Options.checked(self.communicator, nonfinite=nonfinite)
        self._fragments = [
            Fragment(virtual_engine(local.outer_copy(), self.communicator, outer, local.threshold), self._spec)
            for _ in range(local.fragments)
        ]
        self.step_counter = 0
        self._local: list[dict[str, np.ndarray]] = []  # the parameters of each rank, but for the one whose turn it is

    def __call__(self, losses: Losses) -> bool:
        """Make one local step of each rank, and the exchange that is due after it.

        Args:
            losses: returns what a rank would give to its own ``LocalSteps``.

        Returns:
            True: the steps were applied.
        """
        first = None if self._local else self._begin(losses)
        for rank, engine in enumerate(self._inner):
            with self._turn(rank):
                engine.step(losses(rank) if rank or first is None else first, StepSpec(label="a local step"))
        self._advance()
        self._show(0)
        return True

    @property
    def world_size(self) -> int:
        """The number of virtual ranks."""
        return self.communicator.size

    @property
    def global_parameters(self) -> dict[str, np.ndarray]:
        """The global parameters by name; {} before the first call."""
        return {name: x for fragment in self._fragments for name, x in fragment.values.items()}

    def report(self) -> dict[str, dict[str, int]]:
        """Return the bytes that rank 0 would have exchanged since the start, as ``Metered.report`` does."""
        return self.ledger.report()

    def _begin(self, losses: Losses) -> Any:
        """Learn the parameters from rank 0's loss, and return its pairs."""
        pairs = self._inner[0].store.collector.read(losses(0))
        for engine in self._inner:
            engine.store.collector.enroll(param for param, _ in pairs)
        values = self._inner[0].store.values
        begin_all(self._fragments, values)
        self._local = [{name: device.copied(x) for name, x in values.items()} for _ in self._inner]
        return pairs

    def _show(self, rank: int) -> None:
        for name, x in self._inner[0].store.values.items():
            device.copy(x, self._local[rank][name])

    @contextlib.contextmanager
    def _turn(self, rank: int) -> Iterator[None]:
        """Return a context in which a rank's parameters are in the model's arrays."""
        self._show(rank)
        yield
        for name, x in self._inner[0].store.values.items():
            device.copy(self._local[rank][name], x)

    def _advance(self) -> None:
        """Do what ``OuterLoop.advance`` does, of all ranks; what is in flight is there at once."""
        self.step_counter += 1
        self._take_due()
        number = self._windows.sent_after(self.step_counter)
        if number is not None and self._fragments[number].values:
            fragment = self._fragments[number]
            run_virtual(fragment.engine, lambda rank: self._measured(fragment, rank), self._spec)
            fragment.due = self.step_counter + self._windows.delay
            self._take_due()

    def _take_due(self) -> None:
        for fragment in [fragment for fragment in self._fragments if fragment.due == self.step_counter]:
            fragment.due = 0
            for rank, engine in enumerate(self._inner):
                with self._turn(rank):
                    fragment.take(places(engine), self._alpha)

    def _measured(self, fragment: Fragment, rank: int) -> Any:
        """Return the pseudo-gradient of a rank."""
        with self._turn(rank):
            masters, values = places(self._inner[rank])
            return fragment.of_rank({**values, **masters})


def _inner_engine(
    opt: AnyOptimizer | None, ranks: VirtualRanks, rank: int, threshold: int, asked: dict[str, Any]
) -> Engine:
    """Return the engine of a rank's local steps, with an optimizer of its own."""
    own = alone(ranks)
    own.control.rank = rank
    options = Options.checked(own, broadcast=False, **asked)
    return Engine(copy.deepcopy(opt), own, options, threshold=threshold, kind="LocalSteps")


@shows(LocalSimulation)
def simulate_local(size: int, opt: AnyOptimizer | None = None, **options: Any) -> LocalSimulation:
    """Return virtual ranks that make local steps.

    Args:
        size: the number of ranks.
        opt: the inner optimizer; None for ``SGD()``.
        **options: the keyword arguments of ``LocalSimulation``.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: one is out of range.

    Example:
        >>> from distopt import simulate_local
        >>> simulate_local(4, every=10).world_size
        4
    """
    return LocalSimulation(size, opt, **options)
