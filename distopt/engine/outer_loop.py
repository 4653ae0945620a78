"""Local steps, and their outer loop: what ranks have changed since the last exchange, averaged.

A rank's *pseudo-gradient* is the global parameters minus its own.  The mean over ranks goes to an *outer* optimizer,
which moves the global parameters, and the rank goes on from these (Douillard et al., "DiLoCo: distributed
low-communication training of language models", 2023).  So an exchange is a step of an engine, whose gradients are
pseudo-gradients.

The model may be cut into fragments, each with an outer engine of its own, which are exchanged after different steps,
and whose new values may be taken some steps later, while training goes on (Douillard et al., "Streaming DiLoCo with
overlapping communication", 2025).
"""

import atexit
import contextlib
import copy
import dataclasses
import functools
import itertools
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from distopt import device, kernels
from distopt.buckets import Bucket, BucketSpec, plan
from distopt.checks import check_float, check_int
from distopt.comm import Communicator, LocalCommunicator
from distopt.comm.control import fingerprint
from distopt.comm.joiner import WAITS
from distopt.comm.local import LocalControl
from distopt.compress import Compressor, Dense
from distopt.engine.agreement import AllJoinedError
from distopt.engine.background import Background, Inline
from distopt.engine.bucket_store import check_apart
from distopt.engine.engine import Engine
from distopt.engine.hooks import StepHook
from distopt.engine.parameters import Loss, Parameter
from distopt.engine.spec import Options, StepSpec
from distopt.engine.views import gradient_views
from distopt.kernels.layout import FORMATS, BucketLayout, compute_dtype
from distopt.optim import SGD, AnyOptimizer

LOCAL_STEP = StepSpec(label="a local step")
MADE, START = "local steps that are made", "the first local step"
# Arrays by parameter name.
Arrays = Mapping[str, np.ndarray]


class Windows(NamedTuple):
    """When fragments are exchanged: a pure function of the step, the same on all ranks."""

    # Steps between two exchanges of a fragment.
    every: int
    # Their number, at most ``every``; they are sent at even distances.
    fragments: int = 1
    # Steps from sending a fragment to taking its new values, below ``every``.
    delay: int = 0

    @classmethod
    def checked(cls, every: int, fragments: int, delay: int) -> "Windows":
        """Check what a user gave."""
        check_int("every", every, least=1)
        if check_int("fragments", fragments, least=1) > every:
            raise ValueError(f"fragments must be at most every={every}, got {fragments}")
        if check_int("delay", delay, least=0) >= every:
            raise ValueError(f"delay must be below every={every}, got {delay}")
        return cls(every, fragments, delay)

    def sent_after(self, step: int) -> int | None:
        """Return the number of the fragment that is sent after a step, counted from 1; None for none."""
        place = (step - 1) % self.every + 1
        sent = -(-place * self.fragments // self.every)
        return sent - 1 if sent * self.every // self.fragments == place else None

    def describe(self) -> str:
        """Return a line on when fragments are sent and taken."""
        parts = "" if self.fragments == 1 else f", in {self.fragments} fragments"
        later = f", taken {self.delay} steps later" if self.delay else ""
        return f"every {self.every} steps{parts}{later}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalOptions:
    """When ranks that make local steps exchange how far they have come, and what they send (``LocalSteps``)."""

    every: int
    # None: DiLoCo's.
    outer: AnyOptimizer | None = None
    # None: ``Dense()``.
    compressor: Compressor | None = None
    fragments: int = 1
    delay: int = 0
    alpha: float = 0.0
    threshold: int = 2097152
    break_even: bool = True
    exchange: str = "auto"
    over: str = "ranks"

    def __post_init__(self) -> None:
        """Check what a user gave."""
        Windows.checked(self.every, self.fragments, self.delay)
        check_float("alpha", self.alpha, most=1.0)
        # Here too, as an outer engine is made after the ranks have met.
        check_int("threshold", self.threshold, least=0)

    @property
    def windows(self) -> Windows:
        """When fragments are exchanged."""
        return Windows(self.every, self.fragments, self.delay)

    @property
    def spec(self) -> StepSpec:
        """What an exchange is, as a step of an outer engine."""
        compressor = Dense() if self.compressor is None else self.compressor
        label = f"an exchange {self.windows.describe()}"
        return StepSpec(
            lambda: compressor, break_even=self.break_even, exchange=self.exchange, over=self.over, label=label
        )

    def outer_copy(self) -> AnyOptimizer:
        """Return a copy of the outer optimizer, with a state of its own."""
        return SGD(0.7, momentum=0.9, nesterov=True) if self.outer is None else copy.deepcopy(self.outer)


def cut(sizes: Sequence[int], fragments: int) -> list[list[int]]:
    """Return the indices of items in runs of about the same sum, none more than an item larger than their mean."""
    runs: list[list[int]] = [[] for _ in range(fragments)]
    before, total = 0, max(1, sum(sizes))
    for item, size in enumerate(sizes):
        runs[min((2 * before + size) * fragments // (2 * total), fragments - 1)].append(item)
        before += size
    return runs


class Fragment:
    """Parameters that are exchanged together, and their global values, which are the same on all ranks."""

    def __init__(self, engine: Engine, spec: StepSpec):
        self.engine, self._spec = engine, spec
        # By name, of float32 for those of 16 bits.
        self.values: dict[str, np.ndarray] = {}
        # The steps after which it was sent last, and after which its new values are taken: 0 if it is not in flight.
        self.sent = self.due = 0
        # The step after which they were taken last.
        self.taken = 0
        # The global parameters of each bucket, and room for pseudo-gradients of logical ranks.
        self._flats: list[np.ndarray] = []
        self._room: list[np.ndarray] = []
        self._parameters: list[Parameter] = []

    def begin(self, local: Arrays) -> None:
        """Make rank 0's local parameters the global ones.  Collective, unless there are none."""
        if not local:
            return
        sizes, dtypes = [x.size for x in local.values()], [compute_dtype(x.dtype) for x in local.values()]
        like, flats = next(iter(local.values())), dict[str, np.ndarray]()
        for spec in plan(list(local), sizes, dtypes, self.engine.threshold).buckets:
            flat = device.persistent_zeros(spec.size, spec.dtype, like)
            counts = device.persistent_zeros(len(spec.names), np.int64, like)
            for table in tables(spec, local):
                kernels.pack(table, flat, 1.0, counts, math.inf)
            self._flats.append(flat)
            for name, offset, size in zip(spec.names, spec.offsets, spec.sizes, strict=True):
                flats[name] = flat[offset : offset + size]
        self.values = {name: flats[name].reshape(x.shape) for name, x in local.items()}
        self._parameters = [Parameter(name, x) for name, x in self.values.items()]
        gradient_views(self.engine, self._parameters)

    def forget(self) -> None:
        """Forget the global parameters, so that it can begin again."""
        self._flats, self.values, self._parameters = [], {}, []
        self.engine.store.broadcast_due = self.engine.options.broadcast

    @property
    def _buckets(self) -> Sequence[Bucket]:
        return self.engine.store.buckets if self.values else ()

    def places(self) -> list[np.ndarray]:
        """Return where the outer engine has this rank's gradients, of each bucket."""
        return [bucket.gradient for bucket in self._buckets]

    def of_rank(self, local: Arrays) -> list[tuple[Parameter, np.ndarray]]:
        """Return what ``exchange`` needs of one of several ranks that live here, until the next one is asked for."""
        # Its buckets may be those of another plan, or still be to come.
        self._room = self._room or list(map(np.empty_like, self._flats))
        self.measure(local, self._room)
        return self._pairs(self._room)

    def _pairs(self, places: Sequence[np.ndarray]) -> list[tuple[Parameter, np.ndarray]]:
        """Return the outer engine's parameters, which are the global ones, with their pseudo-gradients."""
        views: dict[str, np.ndarray] = {}
        for bucket, place in zip(self._buckets, places, strict=True):
            views |= bucket.views(place)
        return [(p, views[p.name]) for p in self._parameters]

    def measure(self, local: Arrays, places: Sequence[np.ndarray]) -> None:
        """Write the pseudo-gradient, global minus local parameters, to places in the order of the buckets."""
        for bucket, flat, place in zip(self._buckets, self._flats, places, strict=True):
            found = tables(bucket.spec, local)
            for table in found:
                kernels.pack(table, place, -1.0, bucket.bad, bucket.largest)
            # Local parameters of 16 bits began as the global ones, rounded: what rounding has taken is no step of the
            # inner optimizer's, and must not come back as one.
            narrow = [table for table in found if table.stored in FORMATS]
            began = device.copied(flat) if narrow else flat
            for table in narrow:
                stored = [
                    device.empty(int(np.prod(shape)), table.stored, flat).reshape(shape) for shape in table.shapes
                ]
                kernels.unpack(table.point_to(stored), flat, 1.0)
                kernels.pack(table, began, 1.0, bucket.bad, bucket.largest)
            kernels.accumulate(began, place)

    def exchange(self, joined: bool, loss: Loss | None = None) -> None:
        """Exchange what was measured, and let the outer optimizer move the global parameters.  Collective."""
        # A rank that has joined brings nothing, and does not count in the mean.
        self.engine.agreement.joined = joined
        try:
            self.engine.step(self._pairs(self.places()) if loss is None else loss, self._spec)
        finally:
            self.engine.agreement.joined = False

    def take(self, places: Sequence[Arrays], alpha: float) -> None:
        """Move local parameters to the global ones; ``alpha`` is the share of the local value that stays."""
        for bucket, flat in zip(self._buckets, self._flats, strict=True):
            for table in itertools.chain.from_iterable(tables(bucket.spec, arrays) for arrays in places):
                kernels.lerp(table, flat, alpha, self.engine.store.skip_flag)


def begin_all(fragments: Sequence[Fragment], local: Arrays) -> None:
    """Cut a model into fragments of about as many bytes, which begin with rank 0's local parameters.  Collective."""
    names = list(local)
    for fragment, run in zip(fragments, cut([x.nbytes for x in local.values()], len(fragments)), strict=True):
        fragment.begin({names[k]: local[names[k]] for k in run})


def forget_all(fragments: Sequence[Fragment]) -> None:
    """Make the fragments as they were before ``begin_all``, which a lost rank has interrupted."""
    for fragment in fragments:
        fragment.forget()


def tables(spec: BucketSpec, arrays: Arrays) -> list[BucketLayout]:
    """Return tables that bring arrays to their places in a bucket and back: one for each dtype of its members."""
    # A bucket may have more members, and fewer.
    places = {name: at for name, at in zip(spec.names, spec.offsets, strict=True) if name in arrays}
    found = []
    for dtype in dict.fromkeys(arrays[name].dtype for name in places):
        alike = {name: arrays[name] for name in places if arrays[name].dtype == dtype}
        shapes, offsets = [x.shape for x in alike.values()], [places[name] for name in alike]
        found.append(BucketLayout(list(alike), shapes, offsets, dtype).point_to(list(alike.values())))
    return found


class OuterLoop:
    """Exchanges after steps of ranks that train alone."""

    def __init__(
        self,
        comm: Communicator,
        make_outer: Callable[[Communicator], Engine],
        spec: StepSpec,
        windows: Windows,
        alpha: float,
        places: Callable[[], Sequence[Arrays]],
        line: str = "",
    ):
        # places: returns the arrays that hold local parameters now: first masters, from which the others are rounded.
        # line: what else all ranks must have alike.
        self.comm, self.windows, self._alpha, self._places = comm, windows, alpha, places
        self._line = f"{spec.label}, alpha={alpha}, {line}"
        comm.transaction(lambda: comm.control.vote(MADE, fingerprint([self._line]), lambda: [self._line]))
        # Where nothing may overlap, an exchange ends before training goes on.
        in_flight = windows.delay > 0 and comm.may_overlap and not comm.ranks.logical
        # A communicator of this loop alone, as its thread may outlive it.
        self._own = comm.separate() if in_flight else comm
        self.fragments = [Fragment(make_outer(self._own), spec) for _ in range(windows.fragments)]
        # Steps count also where this rank had no batches left; hooks are told when new values were taken.
        self.step, self.begun, self.hooks = 0, False, list[StepHook]()
        # The step after which the parameters in the model have taken new global values.
        self.taken = 0
        # Brings a logical rank into the model; None where that has one rank alone.
        self.enter: Callable[[int], object] | None = None
        # Global parameters of a checkpoint, until there are parameters.
        self.restored: dict[str, np.ndarray] = {}
        # A process waited to be let in when new values were taken last, as all ranks know.
        self.awaited = False
        # Steps with batches, once this rank has joined.
        self._own_steps: int | None = None
        self._carrier = Background() if in_flight and comm.gpu is None else Inline()
        self._side = device.SideStream() if in_flight and comm.gpu is not None else None
        self._at_exit = functools.partial(_land_at_exit, weakref.ref(self))
        if in_flight:
            atexit.register(self._at_exit)

    @property
    def engine(self) -> Engine:
        """The first fragment's outer engine, in whose votes the ranks agree on what concerns all of them."""
        return self.fragments[0].engine

    def begin(self, local: Arrays, error: Exception | None = None) -> None:
        """Begin with these parameters; all ranks get rank 0's, unless a checkpoint was loaded.  Collective."""
        self.engine.agreement.vote_on_lines(START, [self._line], error)
        self.comm.transaction(lambda: check_apart(self.comm, local))
        self._own.transaction(lambda: begin_all(self.fragments, local), lambda: forget_all(self.fragments))
        if not self.restored:
            self.go_on_from_values()
        self.begun = True
        self.restore(self.restored)

    def restore(self, values: Arrays) -> None:
        """Go on with these global parameters of a checkpoint; those of other names stay."""
        for name, x in self.values.items() if self.begun else ():
            if name in values:
                device.copy(x, values[name])
        self.restored = {} if self.begun else dict(values)

    def go_on_from_values(self) -> None:
        """Make the parameters in the model the global ones."""
        for fragment in self.fragments:
            fragment.take(self._places(), 0.0)
        self.taken = max(fragment.taken for fragment in self.fragments)

    @property
    def values(self) -> dict[str, np.ndarray]:
        """The global parameters by name; none before ``begin``."""
        return {name: x for fragment in self.fragments for name, x in fragment.values.items()}

    def advance(self) -> None:
        """Count a step, and do what is due after it: take what comes back, then send.  Collective then."""
        if self._own.outside:
            raise RuntimeError(WAITS)
        self.step += 1
        taken = self._take_due()
        number = self.windows.sent_after(self.step)
        if number is not None and self.fragments[number].values:
            self._send(self.fragments[number])
            # Without a delay it is due at once.
            taken |= self._take_due()
        for hook in self.hooks if taken else ():
            hook.after_call(self.step, True)

    def let_in(self) -> None:
        """Admit the processes that wait, between steps: where one is ``awaited``.  Collective."""
        # What was sent since lands first.
        self.awaited = False
        self.land()
        self._own.membership.admit()

    def _take_due(self) -> bool:
        """Take the new values of fragments that are due; tell if there were any."""
        due = [fragment for fragment in self.fragments if fragment.due == self.step]
        for fragment in due:
            fragment.due, fragment.taken = 0, self.step
        if due:
            self.land()
            # Alike on all ranks, as nothing travels now.
            self.awaited = self._own.control.joiner_waits
            self.catch_up()
        return bool(due)

    def catch_up(self) -> None:
        """Take the new values of fragments that were due since the rank in the model has."""
        for fragment in self.fragments:
            if fragment.taken > self.taken:
                fragment.take(self._places(), self._alpha)
        self.taken = max(fragment.taken for fragment in self.fragments)

    def _send(self, fragment: Fragment) -> None:
        """Send a fragment, which travels while training goes on."""
        joined = self._own_steps is not None and self._own_steps <= fragment.sent
        loss: Loss | None = None
        if joined:
            for place in fragment.places():
                device.clear(place)
        elif self.enter:
            loss = functools.partial(self._of_rank, fragment)
        else:
            fragment.measure(self._local(), fragment.places())
        fragment.sent, fragment.due = self.step, self.step + self.windows.delay
        with self._side or contextlib.nullcontext():
            self._carrier.start(lambda: fragment.exchange(joined, loss))

    def _of_rank(self, fragment: Fragment, rank: int) -> Any:
        """Return the pseudo-gradient of a logical rank."""
        assert self.enter
        self.enter(rank)
        return fragment.of_rank(self._local())

    def _local(self) -> Arrays:
        """Return the parameters in the model, the masters where there are such."""
        masters, values = self._places()
        return {**values, **masters}

    def land(self) -> None:
        """Wait for what is in flight; raise what went wrong there."""
        self._carrier.finish()
        if self._side is not None:
            self._side.wait()
        if self._own.membership:
            self._own.membership.tell_resized()

    def join(self) -> None:
        """Take part in the others' exchanges until no rank has batches; all get the global values.  Collective."""
        self.engine.check_own_rank("join")
        # What this rank has changed since it sent a fragment last still counts; after that it brings nothing.
        if not self.begun:
            error = RuntimeError("join() must come after this rank's first step")
            self.engine.agreement.vote_on_lines(START, [self._line], error)
        self._own_steps = self.step
        try:
            while True:
                if self.awaited:
                    self.let_in()
                self.advance()
        except AllJoinedError:
            pass
        finally:
            self._own_steps = None
        for fragment in self.fragments:
            fragment.due, fragment.sent = 0, self.step
        self.go_on_from_values()

    def close(self) -> None:
        """Refuse everything from now on, when what is in flight has landed."""
        try:
            self.land()
        finally:
            for fragment in self.fragments:
                fragment.engine.close()
            if self._own is not self.comm:
                atexit.unregister(self._at_exit)
                self._own.close()


def _land_at_exit(loop: "weakref.ref[OuterLoop]") -> None:
    """Wait for what is in flight before the process leaves the others, whose threads are in the same exchange."""
    known = loop()
    if known is not None:
        with contextlib.suppress(Exception):
            known.land()


def outer_loop(
    comm: Communicator,
    places: Callable[[], Sequence[Arrays]],
    local: LocalOptions,
    *,
    check_every: int,
    broadcast: bool = True,
    nonfinite: str = "raise",
    deterministic: bool = False,
    line: str,
) -> OuterLoop:
    """Make an outer loop of what a user gave; ``places`` and ``line`` as of ``OuterLoop``."""
    exchanges = -(-check_int("check_every", check_every, least=0) // local.every)
    options = Options.checked(
        comm, broadcast=broadcast, nonfinite=nonfinite, check_every=exchanges, deterministic=deterministic
    )
    spec = local.spec

    def make(ranks: Communicator) -> Engine:
        outer = local.outer_copy()
        engine = Engine(outer, ranks, options, threshold=local.threshold, kind="LocalSteps", counted="exchange")
        # What forbids an exchange is raised now, and not after a window.
        engine.checked_threshold(spec)
        sent = spec.compressor()
        engine.compressor_at_this_step(sent)
        if spec.over != "ranks":
            engine.reducers.check_senders(sent, spec)
        return engine

    return OuterLoop(comm, make, spec, local.windows, local.alpha, places, line)


def alone(comm: Communicator) -> Communicator:
    """Return a communicator of this rank alone, in whose errors it has its number among all."""
    local = LocalCommunicator(f"local steps of rank {comm.rank}", comm.gpu)
    local.control = LocalControl(comm.rank)
    return local


def places(inner: Engine) -> Sequence[Arrays]:
    """Return the arrays that hold parameters: the masters that an optimizer keeps, and the parameters, by name."""
    masters: dict[str, Any] = {}
    for bucket in inner.store.buckets_if_any or ():
        flat = inner.optimizer.masters(bucket)
        masters |= {} if flat is None else bucket.views(flat)
    return masters, inner.store.values


class RankTurns(Protocol):
    """What each logical rank has of its own (``LocalRanks``)."""

    def begin(self) -> None:
        """Begin on all ranks with what the model has."""

    def turns(self) -> Iterator[int]:
        """Yield each rank, in the model."""


class LocalTraining:
    """Steps of this rank alone, and exchanges with the others after some of them."""

    def __init__(self, inner: Engine, outer: OuterLoop):
        # Calls since the last step that counted; with ``num_batches`` several are one.
        self.inner, self.outer, self.calls = inner, outer, 0
        # None where each process is one rank.
        self.ranks: RankTurns | None = None

    def run(self, loss: Loss) -> bool:
        """Make a step of this rank alone, and the exchange that is due after it; tell if the step was applied."""
        # A step that was refused, as not finite, counts in the window, so that all ranks count alike.
        self.inner.check_open()
        begun = None if self.outer.begun else self.begin(loss)
        if self.calls == 0 and self.outer.awaited:
            self.outer.let_in()
        if self.ranks is None:
            applied = self._step(loss if begun is None else begun)
        else:
            # The loss of the first rank is called again after `begin`, which may have brought it other parameters.
            losses = self.outer.engine.losses
            applied = all([self._step(losses.of(loss, rank)) for rank in self.ranks.turns()])
        if self.calls == 0:
            self.outer.advance()
        return applied

    def _step(self, loss: Loss) -> bool:
        """Make a step of the rank in the model."""
        try:
            applied = self.inner.step_alone(loss, LOCAL_STEP)
        except Exception as error:
            # No other rank has raised it.
            vars(error).pop("agreed", None)
            raise
        self.calls = (self.calls + 1) % self.inner.accumulator.num_batches
        return applied

    def begin(self, loss: Loss) -> Any:
        """Learn the parameters that a loss brings, and return its pairs.  Collective."""
        collector, error = self.inner.store.collector, None
        pairs: list[Any] = []
        losses, ranks = self.outer.engine.losses, self.outer.comm.ranks
        if self.ranks:
            self.outer.comm.transaction(losses.agree)
        try:
            pairs = collector.read(losses.of(loss, ranks.here[0]) if callable(loss) and ranks.here else loss)
            collector.enroll(param for param, _ in pairs)
        except Exception as e:
            error = e
        try:
            self.outer.begin(self.inner.store.values, error)
        except Exception:
            if not self.inner.store.started:
                collector.forget()
            raise
        if self.ranks:
            self.ranks.begin()
        return pairs

    def join(self) -> None:
        """Take part in the others' exchanges until no rank has batches left (``OuterLoop.join``).  Collective."""
        self.inner.check_open()
        self.outer.join()
