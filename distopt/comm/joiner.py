"""Communicator of a process that waits until the ranks of a job admit it."""

from collections.abc import Callable, Sequence

from distopt.comm.communicator import Communicator
from distopt.comm.local import LocalCommunicator

WAITS = (
    "this process was started in the place of a lost rank, and must be let in before a step: call opt.rejoin(params) "
    "before the loop, on all ranks, and begin the loop at opt.step_counter"
)


class Joiner(LocalCommunicator):
    """Communicator of a process that is alone until the others admit it (``Elastic.join_others``)."""

    outside = True

    def __init__(
        self,
        enter: Callable[[str], tuple[Communicator, list[str]]],
        rank_ordered: bool,
        reason: str = "",
        hosts: Sequence[int] = (),
    ):
        super().__init__(reason)
        # enter: is given a text for the others; waits until they admit this process, and returns a communicator of all,
        # and a text of each
        # rank_ordered: whether that one adds in rank order, which a script may ask before it is let in
        # hosts: two, where the others sit on several machines: what a step does by itself depends on that
        self._enter, self.rank_ordered, self._hosts = enter, rank_ordered, hosts

    def make_duplicate(self) -> Communicator:
        return Joiner(self._enter, self.rank_ordered, self.reason)

    def next_epoch(self, text: str, admit: bool = False) -> tuple[Communicator, list[str]]:
        """Return a communicator of all ranks, this one among them, and a text of each.  Collective of them."""
        return self._enter(text)
