"""Collect, check, vote, exchange, update: one step, whatever is sent in it."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from distopt import kernels
from distopt.buckets import Buffer, Sum, own
from distopt.buckets import whole as in_one_piece
from distopt.comm import Communicator
from distopt.compress import At, Compressor, Dense
from distopt.exchange import Overlap, add_shares, choose
from distopt.exchange.shares import describe, nonfinite
from distopt.guard import by_rank, whole
from distopt.memory import Memory

Make = Callable[[], Compressor]


def _as_it_is(buffer: Buffer, x: np.ndarray) -> Sum:
    """What needs no exchange, or has had it."""
    return in_one_piece(x)


class Loop(Memory):
    """The steps of one model."""

    def _step(
        self, loss: Any, make: Make, threshold: int | None, break_even: bool = False, clip: float | None = None
    ) -> bool:
        """One step with the mean over ranks of what a compressor sends; True if an update was applied."""
        compressor = self._ready(loss, make, threshold, clip, break_even)
        if compressor is None:
            return False
        self._compressor = compressor
        exchange = _as_it_is if self._travelled else self._exchanger(compressor, self._wire)
        exchanged = self._window.add(self._memory, exchange)
        if exchanged is None:
            self._nonfinite.passed()
            return False
        if self._sharded and self._in_shares(compressor) and not self._nonfinite.looks:
            self._apply(exchanged, self._wire.size)  # bucket by bucket: each rank needs but its own share of the sum
            return True
        sums = list(exchanged)
        self._wire.wait()
        if not self._finite(sums, compressor):
            self._window.start(self._memory)
            return False
        self._nonfinite.passed()
        self._apply(sums, self._wire.size, others_read=self._in_shares(compressor))
        return True

    def _partial_step(self, loss: Any, threshold: int | None) -> bool:
        """One step with this rank's own gradients, after which the parameters of one bucket are averaged."""
        if self._ready(loss, Dense, threshold, local=True) is None:
            return False
        self._nonfinite.passed()
        sums = self._window.add(self._memory, _as_it_is)
        if sums is None:
            return False
        self._apply(sums, 1)
        buffers = list(self._memory)
        if buffers:
            self._average_parameters(buffers[self._partial % len(buffers)])
        self._partial += 1
        return True

    def _ready(
        self,
        loss: Any,
        make: Make,
        threshold: int | None,
        clip: float | None = None,
        break_even: bool = False,
        local: bool = False,
    ) -> Compressor | None:
        """Collect, check, vote: the compressor, if all ranks go on with their packed gradients; None if all skip.

        ``local`` gradients are applied by this rank alone.
        """
        self._check_open()
        error, compressor, overlap = None, None, None
        try:
            if self._failure:
                raise RuntimeError(f"{self._failure}; load a checkpoint to go on")
            if local and self._sharded:
                raise ValueError("a partial step changes each rank's own parameters, but all ranks share them")
            if clip is not None and not clip >= 0:
                raise ValueError(f"clip_Value must be at least 0, got {clip}")
            compressor = make()
            self._algorithm = choose(compressor, break_even)
            self._numbers = self._optimizer.numbers()
            threshold = self.threshold if threshold is None else whole("threshold", threshold, least=0)
            what = "a partial step" if local else "a step"
            what += f" with {compressor!r}" + f", clipped at {clip}" * (clip is not None)
            pack = self._packer(compressor, clip, local)
            if not local and self._may_overlap(compressor, threshold):
                self._describe(what)
                overlap = self._overlap_step(pack, compressor)
                self._in_backward = True
                loss = overlap.watch(loss)
            self._collector.collect(loss)
            self._follow_plan(threshold)
            self._describe(what)
            self._point()
            for buffer in list(self._memory)[overlap.sent if overlap else 0 :]:
                pack(buffer)
        except Exception as e:
            error = e
        if overlap:
            self._in_backward = False
            overlap.complete(failed=error is not None)
        bad = self._memory.nonfinite() if error is None and self._nonfinite.looks else ""
        if not self._nonfinite.accepts(self._name, by_rank(self._vote(self._name, self._calls, error, bad))):
            return None
        assert compressor is not None, "or there was an error"
        self._send_parameters()
        self._travelled = overlap is not None
        return compressor

    def _point(self) -> None:
        """Let the buckets' tables point to parameters and gradients."""
        memory, collector = self._memory, self._collector
        memory.point_to_parameters(collector.values.addresses, collector.values.version)
        memory.point_to_gradients(collector.grads.arrays, collector.grads.addresses, collector.grads.version)

    def _packer(self, compressor: Compressor, clip: float | None, local: bool) -> Callable[[Buffer], None]:
        """How a bucket's gradients come to their places."""

        def pack(buffer: Buffer) -> None:
            buffer.pack(self._nonfinite.looks and (local or not self._in_shares(compressor)))
            if clip is not None:
                kernels.clip(buffer.gradient, clip)

        return pack

    def _may_overlap(self, compressor: Compressor, threshold: int) -> bool:
        """May buckets be sent before the vote on this step?  Then they are the last step's, and nothing outlives it."""
        same_plan = self._number > 0 and threshold == self._threshold
        return self._overlaps and same_plan and self._window.num_batches == 1 and not compressor.stateful

    def _overlap_step(self, pack: Callable[[Buffer], None], compressor: Compressor) -> Overlap:
        # not on this communicator itself: the backward pass may use it, as batch normalization does
        exchange = self._exchanger(compressor, self._wire.beside)
        return Overlap(
            self._background,
            self._wire,
            self._memory,
            self._collector,
            lambda: self._vote(self._name, self._calls + (1 << 30), part=", its start"),
            pack,
            lambda buffer: exchange(buffer, buffer.gradient),
        )

    @property
    def _calls(self) -> int:
        return self.step_counter * self._window.num_batches + self._window.batches

    @property
    def _name(self) -> str:
        more = self._window.num_batches > 1
        return f"step {self.step_counter + 1}" + f", batch {self._window.batches + 1}" * more

    # ------------------------------------------------------------------------------------------------- sums

    def _in_shares(self, compressor: Compressor) -> bool:
        """Are gradients added up in shared memory?  Then what is not finite is found there, and nothing is lost."""
        dense = isinstance(compressor, Dense) and self._window.num_batches == 1
        return dense and not self._overlaps and self._memory.shared

    def _exchanger(self, compressor: Compressor, wire: Communicator) -> Callable[[Buffer, np.ndarray], Sum]:
        """How a bucket's flat array becomes the sum over ranks of what the compressor takes from it."""
        if self._in_shares(compressor):
            return lambda buffer, x: add_shares(buffer, wire)
        algorithm = self._algorithm

        def exchange(buffer: Buffer, x: np.ndarray) -> Sum:
            at = At(self.step_counter, wire.rank, wire.size, buffer.bucket, buffer.scratch)
            algorithm(x, compressor, wire, buffer.state, at)
            return in_one_piece(x)

        return exchange

    def _finite(self, sums: list[Sum], compressor: Compressor) -> bool:
        """Are the sums to be applied?  In shared memory all ranks have added up theirs when this returns."""
        if self._in_shares(compressor):
            found = nonfinite(self._memory) if self._nonfinite.looks else ""
            reports = self._vote(self._name, ~self._calls, report=found, part=", its sums")
            bad = describe(reports, self._collector.order)
        elif compressor.may_overflow and self._nonfinite.looks:  # all ranks have the same bits, and decide alike
            count = np.zeros(1, np.int64)
            for total in sums:
                kernels.count_nonfinite(total[0].flat, count)
            bad = f"the sum over ranks ({int(count[0])} entries)" if count[0] else ""
        else:
            return True
        return self._nonfinite.accepts(self._name, bad)

    def _apply(self, sums: Iterable[Sum], ranks: int, others_read: bool = False) -> None:
        """Take the mean and hand it to the optimizer; ``others_read`` these sums."""
        if self._sharded:
            sums = (own(total, self._wire.rank, self._wire.size) for total in sums)
        try:
            mean = 1.0 / (ranks * self._window.num_batches)
            self._optimizer.update(self._memory, self._collector.order, sums, mean)
        except Exception as error:
            self._failure = (
                f"the update of step {self.step_counter + 1} failed halfway with {type(error).__name__}: {error}"
            )
            raise
        finally:
            if others_read or self._sharded:
                self._wire.barrier()  # until here others may read this rank's sums, and write what all read
        self._window.start(self._memory)
        self._finish()

    def _average_parameters(self, buffer: Buffer) -> None:
        kernels.pack(buffer.parameters, buffer.gradient, 1.0, buffer.bad)
        if buffer.peers is None:
            self._wire.all_reduce(buffer.gradient)
            self._wire.wait()
            total = in_one_piece(buffer.gradient)
        else:
            self._wire.barrier()
            total = add_shares(buffer, self._wire)
            self._wire.barrier()
        for piece in total:
            members = buffer.parameters.share(piece.number, piece.of)
            kernels.unpack(members, piece.flat, 1.0 / self._wire.size)
        if buffer.peers is not None:
            self._wire.barrier()

    def _finish(self) -> None:
        self.step_counter += 1
        self._optimizer.step()
