"""Collect, check, vote, exchange, update: one step, whatever is sent in it."""

import contextlib
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np

from distopt import device, kernels
from distopt.buckets import Buffer, Sum, global_norm, in_one_piece, own
from distopt.comm import Communicator
from distopt.compress import At, Compressor, Dense, Half
from distopt.conditions import Conditions, Kind
from distopt.device import Graph
from distopt.exchange import (
    Callback,
    Observer,
    Overlap,
    Rooms,
    add_halves,
    add_shares,
    choose,
    reduce_each,
    refuse_divergence,
)
from distopt.exchange.shares import describe, nonfinite
from distopt.gradients import Watch
from distopt.guard import PeerLeft, agreed, by_rank
from distopt.ledger import Purpose
from distopt.memory import GradientHook
from distopt.watch import recorder

One = Callable[[Buffer, np.ndarray], Sum]  # bucket's exchange
Each = Callable[[Iterable[tuple[Buffer, np.ndarray] | None]], Iterator[Sum]]  # bucket's in turn
Exchange = Callable[[list[np.ndarray]], Iterator[Sum]]  # that of all
Packed = tuple[Exception | None, Exchange]  # what went wrong meanwhile; how the buckets are exchanged
EPSILON = 1e-6  # beside a norm, by which is divided: as torch.nn.utils.clip_grad_norm_ has it
T = TypeVar("T")


def as_they_are(arrays: list[np.ndarray]) -> Iterator[Sum]:
    """What needs no exchange, or has had it."""
    return map(in_one_piece, arrays)


def _in_words(kind: Kind, compressor: Compressor) -> str:
    """What all ranks must do alike."""
    clipped = f", clipped at {kind.clip}" * (kind.clip is not None)
    gathered = not (kind.break_even or compressor.summable)
    return f"{kind.what} with {compressor!r}{clipped}" + ", break_even=False" * gathered


class Loop(Conditions):
    """The steps of one model."""

    _remedy = "load a checkpoint to go on"  # after an update that failed halfway

    def observe(self, callback: Callback | None = None, every: int = 100) -> None:
        """From now on ``callback(step, numbers)`` learns, behind every ``every``-th step, how good what it sent is.

        ``every`` must be the same on all ranks, as the next step finds out; a callback is for those that want to know,
        and may be any of ``distopt.monitor``.  A second call takes the place of the first; ``every=0`` ends it.  Step
        numbers count updates; partial steps, and those that are made of ``all_reduce`` and ``update``, are left out.

        The numbers are ``energy``, ``residual``, ``residual_ratio``, ``age`` and ``density``, of this rank or the mean
        over virtual ones, and ``cosine``, of all ranks (``distopt.exchange.Quality`` says what they are); and with a
        ``Metered`` communicator ``payload`` and ``wire``, bytes since the start, as an ``Experiment`` wants them.  The
        training gets the same bits as without.  A step that is looked at has one dense all-reduce more, each of its
        calls with ``sync_on_apply=False``, which is the phase 'quality' of a ledger, but none of those bytes.

        What a callback raises is raised behind the step, which is done.  Raises TypeError for what cannot be called,
        TypeError or ValueError for ``every``, and ValueError on a GPU, where nobody looks.
        """
        if self._wire.gpu is not None:
            raise ValueError(f"observe: what is sent is looked at on the host; {self._wire!r} has it on a GPU")
        self._observer, self._lines = Observer(callback, every), []

    def _step(self, loss: Any, kind: Kind) -> bool:
        """One step with the mean over ranks of what a compressor sends; True if an update was applied."""
        exchange = self._begun(lambda: self._ready(lambda: self._packed(loss, kind)))
        if exchange is None:
            return False
        with self._indivisible():
            applied = self._exchange_and_apply(exchange)
        self._ended(applied)
        return applied

    @contextlib.contextmanager
    def _indivisible(self) -> Iterator[None]:
        """The part of a step, behind its vote, that must be done as a whole.

        Whatever ends it early, Ctrl-C too, leaves residuals, counters or parameters that only a checkpoint makes right;
        but for what all ranks refuse alike, before anything is applied: a sum that is not finite, a hook's error.
        """
        step = self.step_counter + 1
        try:
            yield
        except BaseException as error:
            refused = hasattr(error, "agreed") and not isinstance(error, PeerLeft)
            if not refused and not self._failure:
                what = f"{type(error).__name__}: {error}".removesuffix(": ")
                self._failure = f"the update of step {step} failed halfway with {what}; {self._remedy}"
            raise

    def _exchange_and_apply(self, exchange: Exchange) -> bool:
        self._window.contributions += self._live
        self._window.sent = True
        if self._window.exchanges > 1:
            called = list(exchange([b.gradient for b in self._memory]))
            self._wire.wait()
            bad = self._refusal.in_sums(called, self._compressor.may_overflow)
            if bad:  # the window stays as it was before this call
                self._window.contributions -= self._live
            if not self._nonfinite.accepts(self._name, bad):
                return False
            exchange = as_they_are
        exchanged = self._window.add(self._memory, exchange, self._refusal.number)
        if exchanged is None:
            self._decided()
            return False
        in_shares = self._in_shares(self._compressor)
        if self._sharded and in_shares and not self._nonfinite.looks and not self._gradient_hook:
            self._apply(exchanged, self._divisor)  # bucket by bucket: each rank needs but its own share
            return True
        sums = self._finite_sums(exchanged)
        if sums is None or not self._decided():
            return False
        self._apply(sums, self._divisor, others_read=any(len(total) > 1 for total in sums))
        return True

    def _partial_step(self, loss: Any, threshold: int | None) -> bool:
        """One step with this rank's own gradients, after which the parameters of one bucket are averaged."""
        kind = Kind(self._own_parameters, threshold, what="a partial step", sent=False)
        exchange = self._begun(lambda: self._ready(lambda: self._packed(loss, kind)))
        if exchange is None:
            return False
        with self._indivisible():
            applied = self._apply_and_average(exchange)
        self._ended(applied)
        return applied

    def _apply_and_average(self, exchange: Exchange) -> bool:
        self._window.contributions += self._live
        self._window.sent = False
        sums = self._window.add(self._memory, exchange, self._refusal.number)
        if not self._decided() or sums is None:
            return False
        if self._joined:  # its own parameters stay, but for what others average
            if self._gradient_hook:
                self._agree_on_hook(None)
            self._window.start(self._memory, self._refusal.number)
            self._finish()
        else:
            self._apply(sums, self._window.num_batches)
        buffers = list(self._memory)
        if buffers:
            self._average_parameters(buffers[self._partial % len(buffers)])
        self._partial += 1
        return True

    def _own_parameters(self) -> Compressor:
        """Nothing is sent of gradients; ValueError if the parameters are not this rank's own."""
        if self._sharded:
            raise ValueError("a partial step changes each rank's own parameters, but all ranks share them")
        return Dense()

    def _ended(self, applied: bool) -> None:
        """All of a step has been enqueued."""
        if applied and self._check_every and self.step_counter % self._check_every == 0 and not self._partial:
            values = {name: known.value for name, known in self._collector.order.items()}
            refuse_divergence(self._wire.control, values, f"after step {self.step_counter}")
        self._hand_over()
        if applied:
            self._observer.tell(self.step_counter, self._wire)

    def _begun(self, ready: Callable[[], T]) -> T:
        """What is enqueued after a step that fails comes behind what that has enqueued."""
        try:
            return ready()
        except BaseException:
            self._wire.wait()
            self._hand_over()
            raise

    def _ready(self, packed: Callable[[], Packed]) -> Exchange | None:
        """Collect, check, vote: how buckets are exchanged, if all ranks go on with theirs packed; None if all skip."""
        self._check_open()
        self._settle()
        self._changes += 1
        if self._buffers is not None:
            device.clear(self._buffers.bad)
        error, exchange = packed()
        bad = "" if error else self._refusal.in_gradients()
        reports = self._vote(self._name, self._calls, error, bad, doubts=self._refusal.doubts)
        doubted = self._wire.control.doubted
        if not self._nonfinite.accepts(self._name, by_rank(reports)):
            return None
        self._refuse_shared_values()
        self._record()
        self._send_parameters()
        self._before = self._counts
        self._refusal.agree(doubted, self._compressor.stateful)
        return exchange

    def _record(self) -> None:
        """What this step has collected goes onto the tape, if there is one."""
        if self._recorder:
            self._recorder.keep(self._collector, self.opt)
            if self._recorder.over:
                self._recorder = None

    def _packed(self, loss: Any, kind: Kind) -> Packed:
        """Collect and check gradients and bring them to their places, or what went wrong; how they are exchanged."""
        error: Exception | None = None
        overlap: Overlap | None = None
        exchange: Exchange = as_they_are
        if not self._window.batches:
            self._observer.begin(self.step_counter + 1, kind.sent, self._window.exchanges)
        try:
            threshold = self._checked_threshold(kind)
            compressor = self._at_this_step(kind.make())
            early = kind.sent and self._may_overlap(compressor, threshold)
            each = self._in_turn(compressor, self._exchanger(compressor, kind.break_even, early), early)
            pack = self._packer(compressor, kind)
            what = _in_words(kind, compressor)
            self._take_numbers(compressor)
            watches: list[Watch] = []
            if self._recorder:
                watches.append(self._recorder.watch)  # before packing or sending may write over what a loss yields
            if early:
                self._describe(what)
                overlap = self._overlap(pack, each)
                watches.append(overlap.watch)
            elif kind.sent:
                exchange = self._all(compressor, each)
            self._collector.collect(loss, *watches)
            self._follow_plan(threshold)
            if self._describe(what):
                self._check_sizes(compressor)
            self._pack(compressor, pack, overlap.sent if overlap else 0)
            self._compressor = compressor
        except Exception as e:
            error = e
        except BaseException:  # an exit; the buckets that others wait for still travel
            if overlap:
                self._complete(overlap, failed=True)
            raise
        if overlap:
            self._complete(overlap, failed=error is not None)
        return error, exchange

    def _take_numbers(self, compressor: Compressor) -> None:
        """On which all ranks must agree."""
        rooms = self._rooms_for(compressor)
        places = [f"room for {n} entries of bucket {k}" for k, n in enumerate(rooms.state())] if rooms else []
        self._agree_on(self._optimizer.numbers() + places)

    def _pack(self, compressor: Compressor, pack: Callable[[Buffer], None], sent: int) -> None:
        """All gradients are known: pack them, but for so many buckets that were sent already."""
        memory, values, grads = self._memory, self._collector.values, self._collector.grads
        memory.point_to_parameters(values.addresses, values.version)
        if hasattr(compressor, "finish"):  # which adds a weight decay of its own
            self._optimizer.multiply(memory)
        memory.point_to_gradients(grads.arrays, grads.addresses, grads.version, sent)
        for buffer in list(memory)[sent:]:
            pack(buffer)

    def _packer(self, compressor: Compressor, kind: Kind) -> Callable[[Buffer], None]:
        """How a bucket's gradients come to their places."""

        def pack(buffer: Buffer) -> None:
            seen_later = kind.sent and self._in_shares(compressor)
            headroom = 1.0 if seen_later else self._refusal.headroom
            buffer.pack(self._nonfinite.looks and not seen_later, 1.0 / self._nonfinite.divisor, headroom)
            if kind.clip is not None:
                kernels.clip(buffer.gradient, kind.clip)

        return pack

    def _may_overlap(self, compressor: Compressor, threshold: int) -> bool:
        """May buckets be sent before the vote on this step?  Then they are the last step's, and nothing outlives it."""
        same_plan = self._started and threshold == self._threshold
        stays = compressor.stateful or self._rooms_for(compressor) is not None
        return self._overlaps and same_plan and self._window.num_batches == 1 and not stays

    def _overlap(self, pack: Callable[[Buffer], None], each: Each) -> Overlap:
        """Begin to send buckets as their gradients come."""
        self._in_backward = True
        return Overlap(
            self._background,
            self._wire,
            self._memory,
            self._collector,
            agree=lambda: self._vote(f"the start of {self._name}", self._calls + (1 << 30)),
            pack=pack,
            exchange=lambda buffers: each((b, b.gradient) if b else None for b in buffers),
        )

    def _complete(self, overlap: Overlap, failed: bool) -> None:
        self._in_backward = False
        overlap.complete(failed)

    # ------------------------------------------------------------------------------------------------- sums

    @property
    def _divisor(self) -> float:
        """What makes a mean of the sums of this step."""
        return self._window.contributions

    def _finite_sums(self, exchanged: Iterable[Sum]) -> list[Sum] | None:
        """The sums of all buckets, when they are there; None if they must not be applied."""
        sums = list(exchanged)
        self._wire.wait()
        return sums if self._finite(sums, self._compressor) else None

    def _decided(self) -> bool:
        """Go on?  On a GPU the host learns later what is not finite, unless the optimizer cannot look for itself."""
        if not self._refusal.later:
            self._nonfinite.passed()
            return True
        self._refusal.send()
        if self._update_looks:
            return True
        self._learn()
        refused = self._refused > 0
        self._settle()
        return not refused

    @property
    def _update_looks(self) -> bool:
        """Does the update look for itself whether the step is refused?"""
        return self._optimizer.looks

    def _in_shares(self, compressor: Compressor) -> bool:
        """Are gradients added up in shared memory?  Then what is not finite is found there, and nothing is lost."""
        dense = isinstance(compressor, Dense) and self._window.num_batches == 1
        return dense and not self._overlaps and self._memory.shared

    def _all(self, compressor: Compressor, each: Each) -> Exchange:
        """How all buckets are exchanged."""

        def exchange_all(arrays: list[np.ndarray]) -> Iterator[Sum]:
            rooms = self._rooms_for(compressor)
            if rooms and not compressor.stateful:
                rooms.count(arrays, compressor.count)  # type: ignore[attr-defined]
            yield from self._halves_in_shares(compressor) or each(zip(self._memory, arrays, strict=True))
            if rooms and compressor.stateful:
                rooms.send()

        return exchange_all

    def _halves_in_shares(self, compressor: Compressor) -> list[Sum] | None:
        """Sums of halves in shared memory, where nobody looks at them or at what is sent; None elsewhere."""
        if not isinstance(compressor, Half) or compressor.may_overflow or self._refusal.doubted or self._observer.looks:
            return None
        if self._window.num_batches > 1 or self._overlaps or not self._memory.shared:
            return None
        return add_halves(self._memory, compressor, self._wire, lambda buffer: self._at_bucket(buffer, self._wire))

    def _rooms_for(self, compressor: Compressor) -> Rooms | None:
        """On a GPU, what a compressor has room for whose payloads depend on the data."""
        return self._rooms if getattr(compressor, "capped", False) else None

    def _exchanger(self, compressor: Compressor, break_even: bool, early: bool) -> One:
        """How a bucket's flat array becomes the sum over ranks of what the compressor takes from it.

        What goes ``early`` may have a wire of its own: a backward pass uses this one too, as batch normalization does.
        """
        algorithm, wire = choose(compressor, break_even), self._wire.beside if early else self._wire
        algorithm = self._observer.around(algorithm, compressor)
        begin, finish = getattr(compressor, "begin", None), getattr(compressor, "finish", None)

        def exchange(buffer: Buffer, x: np.ndarray) -> Sum:
            if self._in_shares(compressor):
                with wire.on_behalf_of(self._purpose(buffer)):
                    return add_shares(buffer, wire)
            at = self._at_bucket(buffer, wire, self._rooms_for(compressor))
            with wire.on_behalf_of(at.purpose):
                if begin:
                    with wire.aside():
                        begin(x, buffer.state, at)
                algorithm(x, compressor, wire, buffer.state, at)
                if finish:
                    with wire.aside():
                        finish(x, buffer.state, at)
            return in_one_piece(x)

        return exchange

    def _in_turn(self, compressor: Compressor, one: One, early: bool) -> Each:
        """How several buckets are: on the host one may be compressed while another one travels."""
        wire = self._wire.beside if early else self._wire
        hooks = hasattr(compressor, "begin") or hasattr(compressor, "finish")
        alone = hooks or not (wire.travels_meanwhile and compressor.summable)

        def each(buckets: Iterable[tuple[Buffer, np.ndarray] | None]) -> Iterator[Sum]:
            if alone or self._observer.looks:
                return (one(*bucket) for bucket in buckets if bucket)
            given = (bucket and (bucket[1], bucket[0].state, self._at_bucket(bucket[0], wire)) for bucket in buckets)
            return map(in_one_piece, reduce_each(given, compressor, wire))

        return each

    def _at_bucket(self, buffer: Buffer, wire: Communicator, rooms: Rooms | None = None) -> At:
        """Where a call of a compressor stands in this step."""
        number = buffer.number
        room, found = (rooms[number], rooms.found(number)) if rooms else (None, None)
        here = (buffer.gradients, buffer.scratch, buffer.constant)
        now = self.step_counter, wire.rank, wire.size
        counts = self._divisor, self._window.num_batches if self._window.sync_on_apply else 1
        return At(*now, *here, self._refusal.number, room, found, buffer.parameters, *counts, self._purpose(buffer))

    def _purpose(self, buffer: Buffer) -> Purpose:
        """What a ledger calls the exchange of a bucket."""
        return Purpose("gradients", self.step_counter + 1, buffer.number, buffer.gradients)

    def _finite(self, sums: list[Sum], compressor: Compressor) -> bool:
        """Are the sums to be applied?  In shared memory all ranks have added up theirs when this returns."""
        if self._in_shares(compressor):
            found = nonfinite(self._memory) if self._nonfinite.looks else ""
            reports = self._vote(self._name, ~self._calls, report=found, part=", its sums")
            bad = describe(reports, self._collector.order)
        else:
            bad = self._refusal.in_sums(sums, compressor.may_overflow)
        if bad:
            self._window.start(self._memory)
        else:
            self._refusal.passed()
        return self._nonfinite.accepts(self._name, bad)

    def _apply(self, sums: Iterable[Sum], divisor: float, others_read: bool = False) -> None:
        """Divide the sums and hand the mean to the optimizer; ``others_read`` these sums."""
        scale = 1.0 / divisor
        if self._gradient_hook:
            sums, scale = self._hooked(self._gradient_hook, list(sums), scale), 1.0
        if self._clip_norm is not None:
            sums = list(sums)
            scale = self._clipped(sums, scale, self._clip_norm)
        if self._sharded:
            sums = (own(total, self._wire.rank, self._wire.size) for total in sums)
        try:
            self._update_with(sums, scale)
        finally:
            if others_read or self._sharded:
                self._wire.barrier()  # until here others may read this rank's sums, and write what all read
        self._window.start(self._memory, self._refusal.number)
        self._finish()

    @property
    def _untouched(self) -> Collection[str]:
        """Parameters that the present step leaves alone."""
        return ()

    def _hooked(self, hook: GradientHook, sums: list[Sum], scale: float) -> list[Sum]:
        """``scale`` times the sums, as the hook leaves them; raises on every rank what it raises on one."""
        flats: list[np.ndarray] = []
        error: Exception | None = None
        try:
            flats = [buffer.flat_mean(total, scale) for buffer, total in zip(self._memory, sums, strict=True)]
            self._run_hook(hook, flats)
        except Exception as e:
            error = e
        self._agree_on_hook(error)
        return [in_one_piece(flat) for flat in flats]

    def _run_hook(self, hook: GradientHook, flats: list[np.ndarray]) -> None:
        """Let the hook change the means; raises what it raises, and TypeError or FloatingPointError for what it did."""
        means: dict[str, np.ndarray] = {}
        for buffer, flat in zip(self._memory, flats, strict=True):
            means |= buffer.views(flat)
        returned = hook([(known.param, means[name]) for name, known in self._collector.order.items()])
        if returned is not None:
            got = type(returned).__name__
            raise TypeError(f"gradient_hook must change the gradients in place and return None, got {got}")
        if self._nonfinite.looks and (bad := _count_nonfinite(flats)):
            raise FloatingPointError(f"gradient_hook left {bad} entries that are not finite")

    def _agree_on_hook(self, error: Exception | None) -> None:
        """Has the hook of no rank raised?  Else nothing has been updated anywhere, and the window begins anew."""
        try:
            self._vote(self._name, ~self._calls, error, part=", its gradient hook")
        except Exception:
            self._window.start(self._memory, self._refusal.number)
            raise

    def _clipped(self, sums: list[Sum], scale: float, most: float) -> float:
        """What to multiply the sums by: ``scale``, or less, so that the norm is at most ``most``."""
        wire = self._wire
        norm = global_norm(self._memory, sums, wire.rank, wire.size, self._add_norms, self._untouched) * abs(scale)
        self._gradient_norm = norm
        if most == math.inf:
            return scale
        if norm == math.inf and self._nonfinite.looks:  # dividing by it would be an update by nothing
            self._window.start(self._memory)
            error = FloatingPointError(
                f"{self._name}: the squares of the gradients must add up to at most 1.8e308, got more, "
                "although all entries are finite: scale the loss down, or clip by value first"
            )
            raise agreed(error, wire.rank == 0) if self._window.sent else error
        share = most / (norm + EPSILON)
        return scale if share >= 1 else scale * share  # NaN stays NaN

    def _update_with(self, sums: Iterable[Sum], scale: float) -> None:
        """Update all parameters by ``scale`` times their sums."""
        together = self._add_norms if self._sharded else None
        self._optimizer.update(self._memory, self._collector.order, sums, scale, self._refusal.number, together)

    def _add_norms(self, partial: np.ndarray) -> None:
        """Sum squares of pieces over ranks: layer-wise optimizers and clipping want those of whole parameters."""
        with self._wire.on_behalf_of(Purpose("update", self.step_counter + 1)):
            self._wire.all_reduce(partial)

    def _average_parameters(self, buffer: Buffer) -> None:
        """Of one bucket, behind the update, which has been counted."""
        tables, masters = [buffer.parameters], self._optimizer.masters(buffer)
        if masters is not None:  # from which the parameters follow
            tables.insert(0, buffer.means.point_to(list(buffer.views(masters).values())))
        kernels.pack(tables[0], buffer.gradient, 1.0, buffer.bad, buffer.largest)
        if self._joined:
            device.clear(buffer.gradient)
        with self._wire.on_behalf_of(Purpose("parameters", self.step_counter, buffer.number, buffer.parameters)):
            if buffer.peers is None:
                self._wire.all_reduce(buffer.gradient)
                self._wire.wait()
                total = in_one_piece(buffer.gradient)
            else:
                self._wire.barrier()
                total = add_shares(buffer, self._wire)
                self._wire.barrier()
        for piece, table in itertools.product(total, tables):
            members = table.share(piece.number, piece.of)
            kernels.unpack(members, piece.flat, 1.0 / self._live, self._refusal.number)
        if buffer.peers is not None:
            self._wire.barrier()

    def _prepare_replay(self, changes: object, lines: list[str], mark: int) -> None:
        """The host's part of a captured step, before it: as of any other; ``lines`` say what it is, ``mark`` is theirs.

        A graph has the addresses of what was there when it was captured, so nothing else may have changed since.
        """
        self._check_open()
        self._settle()
        error: Exception | None = None
        try:
            self._checked_threshold(Kind())
            if changes != self._all_changes:
                raise RuntimeError("this DistOpt did something else since the step was captured: capture it again")
            for name, known in self._collector.order.items():
                if known.param is not known.value and known.param.data is not known.value:
                    raise RuntimeError(f"{name}: its data is another array than when the step was captured")
            self._at_this_step(self._compressor)
            self._agree_on(self._optimizer.numbers())
        except Exception as e:
            error = e
        self._lines, self._mark = lines, mark
        self._vote(self._name, self._calls, error)
        self._before = self._counts

    def _write_numbers(self) -> None:
        """Those of the next update, where a captured step finds them."""
        self._optimizer.prepare(1.0 / self._wire.size, self._wire.gpu)

    def _replay(self, graph: Graph) -> None:
        """Enqueue a captured step, with the numbers of this one."""
        with self._indivisible():
            self._write_numbers()
            graph.replay()
            self._refusal.expect()
            self._finish()
        self._ended(applied=True)

    def _finish(self) -> None:
        self.step_counter += 1
        recorder.first = False
        self._optimizer.step()


def _count_nonfinite(flats: Iterable[np.ndarray]) -> int:
    """On a GPU 0: the host does not wait."""
    count = np.zeros(1, np.int64)
    for flat in flats:
        if not device.on_gpu(flat):
            kernels.count_nonfinite(flat, count)
    return int(count[0])
