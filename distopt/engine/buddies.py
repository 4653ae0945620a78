"""Copies of what one rank alone has, on the next rank: its share of the optimizer's state."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from distopt.comm import Communicator
from distopt.comm.control import agreed
from distopt.comm.message import MessageTag
from distopt.engine.bucket_store import BucketStore
from distopt.engine.progress import Progress
from distopt.engine.spec import Outcome
from distopt.engine.undo import Undo
from distopt.kernels.layout import CHUNK, BucketLayout
from distopt.optim.adapters import OptimizerAdapter
from distopt.optim.optimizer import OwnedSlots

NOTHING = np.empty(0, np.uint8)


class Division(NamedTuple):
    """What a rank updates, where each of ``size`` ranks updates its share."""

    rank: int
    size: int

    @property
    def buddy(self) -> int:
        """The rank that has a copy of this one's share."""
        return (self.rank + 1) % self.size

    @property
    def guarded(self) -> int:
        """The rank of whose share this one has a copy."""
        return (self.rank - 1) % self.size

    def of(self, rank: int) -> "Division":
        """Return the same division, as another rank sees it."""
        return self._replace(rank=rank)

    def chunks(self, table: OwnedSlots) -> tuple[int, int]:
        """Return the first chunk of a table that this rank updates, and the one after the last."""
        if table.number is None:
            return table.members.shard(self.rank, self.size).span
        return 0, table.members.chunks if table.number % self.size == self.rank else 0


class Buddies:
    """What ranks need to go on without one that alone had a share of the optimizer's state."""

    # With `parameter_views` each rank updates a share of the parameters, which lie in memory that all ranks have, and
    # it alone has the optimizer's state of them.  So after every update it sends this state to the next rank, its
    # *buddy*: copies in a neighbour's memory, as Zheng et al. have them ("FTC-Charm++: an in-memory checkpoint-based
    # fault tolerant runtime for Charm++ and MPI", 2004), but those of the last update, so that no other step is lost.
    #
    # The update and this message belong to the step's transaction, in which a rank keeps two things of what was before:
    # * its own share of the state, with the rest that a step changes;
    # * its own share of the parameters, and that of the rank before it.  Both are read where they lie, as long as
    #   nobody updates, which is before the vote; so what a script has changed there counts.
    #
    # If a rank is lost before all have the outcome, the others put these back, and share out the state anew: the buddy
    # of the lost rank takes its place, and each rank sends every other one what this is to have from now on.  Then they
    # make the step again.  If all have the outcome, nothing is put back, and the next step begins with sharing out.
    #
    # Shares are those of the last update, of the ranks that made it.  Until the next one has ended, a rank's own share
    # stays as it was, whatever comes in beside it; so if another rank is lost, all this is done again from the start.
    # Copies and division change at the end of a transaction alone: only there do all ranks agree on how many they are.
    # Before the first update, and after a load, all ranks have all the state, and none is sent.
    #
    # With `Muon(sharded=True)` ranks share the work of an update, and gather the results.  Each has all the state then;
    # but for an update to be made again, each must keep all that it changes, as if it were the only rank.

    def __init__(
        self,
        comm: Communicator,
        store: BucketStore,
        optimizer: OptimizerAdapter,
        progress: Progress,
        undo: Undo,
    ):
        self._comm, self._store, self._optimizer, self._progress, self._undo = comm, store, optimizer, progress, undo
        # The division of the last update, or the one that sharing began with; None before.
        self._division: Division | None = None
        # A copy of the guarded rank's state; None while all ranks have all the state.
        self._copy: np.ndarray | None = None
        # Division and copy as the present step leaves them, if it updates.
        self._next: tuple[Division, np.ndarray] | None = None
        # Parameters of this rank's share and the guarded one's, in all tries of a step.
        self._parameters = Undo()
        # The last message; its memory is used again.
        self._message = NOTHING
        store.recover = self._recover

    def step(
        self,
        run: Callable[[Callable[[], tuple[Outcome | None, bool]]], tuple[Outcome | None, bool]],
        exchange: Callable[[], Outcome | None],
        update: Callable[[Outcome], bool],
    ) -> tuple[Outcome | None, bool]:
        """Make a step, its update inside of the transaction; return its outcome, and if it was applied.  Collective."""
        # run: makes a transaction (`ElasticSteps.run`).
        # exchange: all of the step but its update, which is called with the outcome, and tells if it was applied.
        self._keep_parameters()

        def operation() -> tuple[Outcome | None, bool]:
            self._next = None
            self._undo.on_undo(self._parameters.undo)
            outcome = exchange()
            # What else this rank is about to update, which no other one can read.
            if self._store.sharded:
                self._undo.keep(*self._pieces(Division(self._comm.rank, self._comm.size)))
            else:
                self._optimizer.reserve(self._store.buckets)
                self._undo.keep(*self._store.values.values(), *self._pieces(Division(0, 1)))
            updated = outcome is not None and update(outcome)
            if updated:
                self._undo.on_undo(self._optimizer.take_back)
                if self._store.sharded:
                    self._send()
            return outcome, updated

        made = run(operation)
        if self._next:
            self._division, self._copy = self._next
        return made

    def divide(self) -> None:
        """Note that these ranks share the parameters from now on, inside of a transaction."""
        self._division, self._copy = Division(self._comm.rank, self._comm.size), None

    def forget(self) -> None:
        """Note that every rank has all of the optimizer's state now: it was loaded."""
        self._copy = None

    # -- what is kept

    def _keep_parameters(self) -> None:
        """Copy the parameters before any rank can have voted, and so before any updates them."""
        self._parameters.forget()
        if not self._store.sharded:
            return
        assert self._division is not None
        if self._copy is None:
            # States that were loaded have no tables yet.
            self._optimizer.reserve(self._store.buckets)
        for rank in {self._division.rank, self._division.guarded}:
            division = self._division.of(rank)
            for table in self._optimizer.tables():
                flat = self._store.buckets.flat_parameters(table.members)
                self._parameters.keep(flat[_elements(table.members, [division.chunks(table)])])

    def _send(self) -> None:
        """Send this rank's state to its buddy, and receive that of the rank before it.  Collective."""
        comm = self._comm
        division = Division(comm.rank, comm.size)
        guarded, copy = list(self._pieces(division.of(division.guarded))), NOTHING
        if comm.size > 1 and any(table.slots for table in self._optimizer.tables()):
            parts, lengths = [NOTHING] * comm.size, [0] * comm.size
            parts[division.buddy] = self._message = _packed(list(self._pieces(division)), self._message)
            lengths[division.guarded] = sum(x.nbytes for x in guarded)
            with comm.tagged(MessageTag("buddy", self._progress.updates)):
                copy = comm.all_to_all(parts, ragged=lengths)[division.guarded]
        self._next = division, copy

    # -- a rank is lost

    def _recover(self) -> None:
        """Share out the state anew, once the plan of the ranks that are left is made.  Collective."""
        if not self._store.sharded:
            return
        then = self._division
        assert then is not None
        with self._comm.tagged(MessageTag("buddy", self._progress.updates)):
            left = self._comm.lengths(then.rank)
            lost = [rank for rank in range(then.size) if rank not in left]
            gone = [f"{rank} with {then.of(rank).buddy}" for rank in lost if then.of(rank).buddy in lost]
            if gone:
                text = (
                    "a rank was lost that alone had its share of the optimizer's state, and with it the next one, "
                    f"which had the copy: rank {', rank '.join(gone)} of {then.size}; load a checkpoint to go on"
                )
                # Until a load every further step raises it too.
                self._progress.fail(text)
                raise agreed(RuntimeError(text), self._comm.rank == 0)
            if self._copy is not None:
                self._redistribute(left, then, self._copy)

    def _redistribute(self, left: Sequence[int], then: Division, copy: np.ndarray) -> None:
        """Send every rank what it is to have from now on, and did not.  Collective."""
        # left: the ranks that are left, as they were numbered, by their present numbers.
        # copy: the last one of the guarded rank's state.
        comm = self._comm
        had = [[rank] + [then.of(rank).guarded] * (then.of(rank).guarded not in left) for rank in left]
        if then.guarded not in left:
            _unpack(copy, list(self._pieces(then.of(then.guarded))))

        def moved(source: int, target: int) -> list[np.ndarray]:
            """The pieces that a rank takes over from another one, by their present numbers."""
            now = Division(target, comm.size)
            shares = [then.of(rank) for rank in had[source]] if source != target else []
            return [piece for share in shares for piece in self._pieces(share, now)]

        ranks = range(comm.size)
        lengths = [sum(x.nbytes for x in moved(rank, comm.rank)) for rank in ranks]
        parts = [_packed(moved(comm.rank, rank)) for rank in ranks]
        for rank, part in enumerate(comm.all_to_all(parts, ragged=lengths)):
            _unpack(part, moved(rank, comm.rank))

    # -- shares

    def _pieces(self, *divisions: Division) -> Iterator[np.ndarray]:
        """Yield the pieces of the state in the shares of all these divisions: one of each slot of each table."""
        for table in self._optimizer.tables():
            part = _elements(table.members, [division.chunks(table) for division in divisions])
            yield from (flat[part] for flat in table.slots)


def _elements(members: BucketLayout, spans: Sequence[tuple[int, int]]) -> slice:
    """Return where the chunks that all of some spans have lie in a table's flat arrays; gaps may be among them."""
    begin, end = max(begin for begin, _ in spans), min(end for _, end in spans)
    if begin >= end:
        return slice(0, 0)
    records = members.records
    ends = records["first"] + -(-records["size"] // CHUNK)
    first, last = (int(np.searchsorted(ends, chunk, side="right")) for chunk in (begin, end - 1))
    start = records["offset"][first] + (begin - records["first"][first]) * CHUNK
    stop = records["offset"][last] + min((end - records["first"][last]) * CHUNK, records["size"][last])
    return slice(int(start), int(stop))


def _packed(pieces: Sequence[np.ndarray], memory: np.ndarray | None = None) -> np.ndarray:
    """Return the bytes of some arrays in one, in ``memory`` if it is of their size."""
    nbytes = sum(piece.nbytes for piece in pieces)
    out = np.empty(nbytes, np.uint8) if memory is None or memory.size != nbytes else memory
    return np.concatenate([NOTHING, *(piece.view(np.uint8) for piece in pieces)], out=out)


def _unpack(message: np.ndarray, pieces: Sequence[np.ndarray]) -> None:
    """Write bytes that ``_packed`` has returned to arrays of the same sizes."""
    end = 0
    for piece in pieces:
        begin, end = end, end + piece.nbytes
        piece.view(np.uint8)[...] = message[begin:end]
