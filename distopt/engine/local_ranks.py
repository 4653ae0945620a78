"""What logical ranks have of their own between the exchanges of local steps."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from distopt import device
from distopt.buckets.shared_state import SharedState
from distopt.comm.message import ALIGNED, message_starts
from distopt.comm.objects import described, empty_arrays, rebuilt
from distopt.engine.outer_loop import OuterLoop
from distopt.engine.rank_losses import present_call
from distopt.engine.training_state import Tree
from distopt.engine.undo import Undo

LOG = logging.getLogger("distopt")
HEAD = 4096  # bytes that the text before a rank's arrays takes, or a multiple


class LocalRanks:
    """Parameters and optimizer's states of each rank that lives here; the model has those of one at a time.

    Where processes may be lost, what a rank has lies in memory of its machine, from which another process goes on.
    """

    # A rank's tree has, beside its `own`, how many calls it has `made`, and after which step it has `taken` the global
    # parameters' new values.  So a process that adopts a rank knows what it has not done yet, and does that.

    def __init__(self, outer: OuterLoop, save: Callable[[], Tree], load: Callable[[Tree | None, int], object]):
        # save: returns copies of what the rank in the model has; load: writes such copies, of a rank that has made so
        # many calls; None for one whose own are lost, which goes on from the global parameters.
        self._outer, self._comm, self._save, self._load = outer, outer.comm, save, load
        # The present call, from 1, in which each rank makes a step; and the rank in the model, and whether it has made
        # steps since it was kept.
        self._call, self._present, self._stepped = 1, -1, False
        # Of each rank that lives here, what it has, by its bytes, and the calls that it has made.
        self._kept: dict[int, dict[str, np.ndarray]] = {}
        self._made: dict[int, int] = {}
        # Of the ranks, in which these are those that live here.
        self._epoch = self._comm.epoch
        self._undo = Undo()
        outer.enter, outer.engine.losses.calls = self.enter, lambda: self._call - 1

    def begin(self) -> None:
        """Give each rank here what the model has, but for those of a checkpoint."""
        for rank in self._comm.ranks.here:
            if self._claimed(rank) == 0:
                self._present = rank
                self._keep()

    def turns(self) -> Iterator[int]:
        """Yield each rank that lives here, in the model; then those that were adopted meanwhile.  Collective then."""
        self._call, more = min(map(self._claimed, self._comm.ranks.here)) + 1, True
        while more:
            for rank in self._comm.ranks.here:
                self.enter(rank)
                if self._made[rank] < self._call:
                    yield rank
                    self.step_made()
            self._keep()
            # What a lost rank has left is found as it was before this transaction until that ends.
            more = bool(self._comm.membership) and self._comm.transaction(self._adopted)

    def step_made(self) -> None:
        """Count the step of the present call of the rank in the model."""
        self._made[self._present], self._stepped = self._call, True

    def _adopted(self) -> bool:
        """Tell if some rank, of any process, is still to make the present call.  Collective."""
        behind = min(map(self._claimed, self._comm.ranks.here)) < self._call
        return any(self._comm.control.gather("behind" * behind))

    def enter(self, rank: int) -> None:
        """Bring a rank into the model, with the new global values that it has not taken yet."""
        self._claimed(rank)
        if rank != self._present:
            self._keep()
            self._present, tree = -1, self._tree(rank)
            if tree:
                self._load(tree["own"], tree["made"])
                self._outer.taken = tree["taken"]
            else:
                LOG.warning("distopt: logical rank %d goes on from the global parameters: its own are lost", rank)
                self._load(None, self._made[rank])
                self._outer.go_on_from_values()
            self._present = rank
        self._outer.catch_up()

    def trees(self) -> dict[str, Tree]:
        """Return what each rank here has, by its number, with the new global values."""
        if present_call.get(None) is not None:
            raise RuntimeError("the state must be asked for between steps, got a call in the loss of a logical rank")
        found = {}
        for rank in self._comm.ranks.here:
            made = self._claimed(rank)
            if self._outer.begun:
                self.enter(rank)
                own = self._save()
            else:
                tree = self._tree(rank)
                own = tree["own"] if tree else self._save()
            found[str(rank)] = own | {"made": made}
        return found

    def load_trees(self, trees: Mapping[int, Tree], calls: int, step: int) -> None:
        """Go on from what ``trees`` has returned after so many calls and steps; the model has the last one's."""
        for rank, own in trees.items():
            # One that processes of one rank each have saved has no number of calls.
            made = calls if own.get("made") is None else own["made"]
            self._load(own, made)
            self._present, self._stepped, self._outer.taken = rank, False, step
            if rank in self._comm.ranks.here:
                self._claimed(rank)
                self._made[rank] = made
                self._keep(own)
        self._call = calls + 1

    def _claimed(self, rank: int) -> int:
        """Return the calls that a rank has made which lives here, maybe in another process until now."""
        here = self._comm.ranks.here
        if self._epoch != self._comm.epoch:
            # One that has left may come back, after calls in another process.
            self._made = {rank: made for rank, made in self._made.items() if rank in here}
            self._epoch, self._present = self._comm.epoch, self._present if self._present in here else -1
        if rank not in self._made:
            folder = self._outer.engine.store.state_folder
            self._kept[rank] = SharedState(folder, f"local-{rank}") if folder else {}
            tree = self._tree(rank)
            self._made[rank] = tree["made"] if tree else self._call - 1
        return self._made[rank]

    def _tree(self, rank: int) -> Tree | None:
        """Return what a rank here had when it was kept last; None if that is lost."""
        return next(map(from_bytes, self._kept[rank].values()), None)

    def _keep(self, own: Tree | None = None) -> None:
        """Remember what the rank in the model has where that has changed, and another one may have its turn."""
        first = self._present in self._made and not self._kept[self._present]
        alone = not self._comm.membership and len(self._comm.ranks.here) == 1
        if own is None and (self._present < 0 or alone or not (self._stepped or first)):
            return
        self._stepped = False
        flat = to_bytes({"own": own or self._save(), "made": self._made[self._present], "taken": self._outer.taken})
        kept = self._kept[self._present]
        self._undo.forget()
        if isinstance(kept, SharedState):
            self._undo.keep_state(kept)
        for other in kept.keys() - {str(flat.size)}:
            del kept[other]
        kept[str(flat.size)] = flat


def to_bytes(tree: Tree) -> np.ndarray:
    """Return a tree as one array of bytes, of as many for trees that differ in numbers alone."""
    head, arrays = described(tree)
    text = json.dumps(head).encode()
    room = (len(text) // HEAD + 1) * HEAD
    parts = [np.frombuffer(text.ljust(room), np.uint8), *(x.reshape(-1).view(np.uint8) for x in arrays.values())]
    return device.concatenated([np.array([room]).view(np.uint8), *parts], ALIGNED)


def from_bytes(flat: np.ndarray) -> Tree:
    """Return the tree of ``to_bytes``, with arrays of its own."""
    room = int(flat[:8].view(np.int64)[0])
    start = message_starts([8, room])[1]
    head = json.loads(bytes(flat[start : start + room]))
    arrays = empty_arrays(head)
    lengths = [8, room, *(x.nbytes for x in arrays.values())]
    for x, at in zip(arrays.values(), message_starts(lengths)[2:], strict=False):
        x.reshape(-1).view(np.uint8)[:] = flat[at : at + x.nbytes]
    tree: Tree = rebuilt(head, arrays)
    return tree
