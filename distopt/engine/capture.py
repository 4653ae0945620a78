"""A step as a CUDA graph: recorded once, then done again with one call."""

from collections.abc import Callable, Iterator
from typing import Any

from distopt import device
from distopt.comm.control import fingerprint
from distopt.compress import Compressor
from distopt.engine.engine import Engine
from distopt.engine.parameters import iterable
from distopt.engine.spec import StepSpec

UNRECORDED = (
    "a captured loss can only enqueue kernels: no matrix product, no random numbers and no wait are recorded ({}); let "
    "forward and backward pass go before, into opt.gradient_views(params), and capture the rest: "
    "step = opt.capture(lambda: pairs)"
)


def check_capture(engine: Engine, compressor: Compressor) -> None:
    """Raise ValueError for a step that cannot be captured."""
    comm, optimizer, accumulator, policy = engine.comm, engine.optimizer, engine.accumulator, engine.nonfinite.policy
    engine.check_own_rank("a captured step")
    for hook in engine.hooks:
        if hook.host_only:
            raise ValueError(hook.host_only)
    if engine.means.needs_all:
        raise ValueError(
            f"{engine.means.needs_all} must be None in a captured step, which cannot wait for the host to work on means"
        )
    if comm.gpu is None:
        raise ValueError(f"the communicator of a captured step must be on a GPU, got {comm!r}")
    if comm.membership:
        raise ValueError(
            "ranks of a captured step must be those that recorded it, and some of these may be lost: start without "
            "--elastic"
        )
    if comm.rank_ordered and comm.size > 1:
        raise ValueError(
            "deterministic must be False in a captured step, which cannot allocate memory for sums in rank order"
        )
    if compressor.traits.ragged:
        raise ValueError(
            f"the payload of a captured step must be of a fixed size, got {compressor!r}; use one that is summable"
        )
    if compressor.traits.changes_with_step:
        raise ValueError(
            f"the compressor of a captured step must be the same at every step, got {compressor!r}; use no warmup, and "
            "no stochastic rounding"
        )
    if accumulator.num_batches > 1:
        raise ValueError(f"num_batches must be 1 in a captured step, got {accumulator.num_batches}")
    if policy.adapts:
        raise ValueError(f"nonfinite must not be a LossScaler in a captured step, got {policy!r}; use 'skip'")
    if optimizer.unrecorded:
        raise ValueError(
            f"the optimizer of a captured step must only enqueue kernels, got {optimizer!r}, which calls "
            f"{optimizer.unrecorded}"
        )
    if not optimizer.same_each_step:
        raise ValueError(f"the optimizer of a captured step must do the same at every call, got {optimizer!r}")
    if not optimizer.reads_skip_flag:
        raise ValueError(f"the optimizer of a captured step must be one of distopt.optim, got {optimizer!r}")


class CapturedStep:
    """A step of which the GPU has all commands already: a call is the next step, for some microseconds of the host."""

    # Everything that changes from step to step is read from memory: the numbers of the update, which are written there
    # before each replay, and the skip flag.  The ranks vote before each replay as before any step.  Any other step, a
    # checkpoint that is loaded, or another captured step ends its life: it raises RuntimeError from then on.

    def __init__(self, engine: Engine, loss: Callable[[], Any], spec: StepSpec):
        """Make one ordinary step, which counts, and record another one.  Collective."""
        self._engine, self._graph, self._order = engine, device.Graph(), device.StreamEvent()
        # The null stream cannot be captured.
        self._stream = device.new_stream()
        caller = device.current_stream()
        self._order(caller, self._stream)
        try:
            with self._stream:
                # The ordinary step makes and compiles all that the captured one needs.
                engine.step(loss, spec)
                engine.resolve_last_step()
                self._write_numbers()
                engine.store.upload_tables(engine.step_context.travelling(engine.compressor))
                with self._graph.capture():
                    engine.step(_recorded(loss), spec)
                engine.nonfinite.roll_back()
        finally:
            # Also if the capture failed: the ordinary step was made.
            self._order(self._stream, caller)
        self._version, self._lines = self._current_version, ["a captured step", *engine.agreement.lines]
        self._fingerprint = fingerprint(self._lines)

    def __call__(self) -> bool:
        """Make the next step; True, which the next call takes back if a gradient was not finite.  Collective."""
        engine, caller = self._engine, device.current_stream()
        if self._graph.dropped:
            raise RuntimeError("the communicator of this captured step was closed")
        self._agree()
        self._order(caller, self._stream)
        with self._stream:
            with engine.progress.halfway:
                self._write_numbers()
                self._graph.replay()
                engine.store.check.expect()
                engine.count_update()
            engine.end_call(applied=True)
        self._order(self._stream, caller)
        return True

    @property
    def _current_version(self) -> object:
        """The version of everything whose addresses the graph has; another one than at its capture ends its life."""
        engine = self._engine
        return engine.progress.version, id(engine.store.buckets_if_any), engine.optimizer.version

    def _agree(self) -> None:
        """Check and vote, as before any step."""
        engine, progress = self._engine, self._engine.progress
        engine.check_open()
        engine.resolve_last_step()
        error: Exception | None = None
        try:
            progress.check()
            if self._version != self._current_version:
                raise RuntimeError(
                    "DistOpt must do nothing else between calls of a captured step, but it did; capture the step again"
                )
            for name, known in engine.store.collector.order.items():
                if known.param is not known.value and known.param.data is not known.value:
                    raise RuntimeError(f"{name}: data must be the array of when the step was captured, got another one")
            engine.compressor_at_this_step(engine.compressor)
            engine.agreement.declare_numbers([*engine.nonfinite.lines(), *engine.optimizer.numbers()])
        except Exception as e:
            error = e
        engine.agreement.declare(self._lines, self._fingerprint)
        engine.agree(progress.name, progress.calls, error)
        progress.snapshot()

    def _write_numbers(self) -> None:
        """Write the numbers of the next update to where the graph reads them."""
        comm = self._engine.comm
        self._engine.optimizer.prepare(1.0 / comm.size, comm.gpu)


def _recorded(loss: Callable[[], Any]) -> Iterator[Any]:
    """Yield the pairs of a loss that is being captured.  RuntimeError for what cannot be recorded."""
    try:
        yield from iterable(loss)
    except Exception as error:
        if not device.is_capture_error(error):
            raise
        raise RuntimeError(UNRECORDED.format(error)) from error
