"""A step as a CUDA graph: recorded once, then done again with one call."""

from collections.abc import Callable, Iterator
from typing import Any

from distopt import device
from distopt.conditions import Kind
from distopt.gradients import iterable
from distopt.guard import fingerprint
from distopt.loop import Loop

UNRECORDED = (
    "a captured loss can only enqueue kernels, and cupy records no matrix product and no random number ({}): let "
    "forward and backward pass go before, into opt.gradient_views(params), and capture the rest: "
    "step = opt.capture(lambda: pairs)"
)


def _recorded(loss: Callable[[], Any]) -> Iterator[Any]:
    """The pairs of a loss that is being captured.  RuntimeError where cupy refuses to record what it calls."""
    try:
        yield from iterable(loss)
    except NotImplementedError as error:
        raise RuntimeError(UNRECORDED.format(error)) from error


class Captured:
    """A step of which the GPU has all commands already: a call is the next step, for some microseconds of the host.

    Everything that changes from step to step is read from memory: the numbers of the update, which are written there
    before each replay, and what is refused.  The ranks vote before each replay as before any step.  Any other step, a
    checkpoint that is loaded, or another captured step ends its life: it raises RuntimeError from then on.
    """

    def __init__(self, opt: Loop, loss: Callable[[], Any], kind: Kind):
        self._opt, self._graph, self._order = opt, device.Graph(), device.Order()
        self._stream = device.new_stream()  # the null stream cannot be captured
        caller = device.current_stream()
        self._order(caller, self._stream)
        with self._stream:
            opt._step(loss, kind)  # makes and compiles all that it needs
            opt._settle()
            opt._write_numbers()
            with self._graph.capture():
                opt._step(_recorded(loss), kind)
            opt._take_back()
            self._changes, self._lines = opt._all_changes, ["a captured step", *opt._lines]
            self._mark = fingerprint(self._lines)
        self._order(self._stream, caller)

    def __call__(self) -> bool:
        """The next step; True, which the next call takes back if a gradient was not finite."""
        opt, caller = self._opt, device.current_stream()
        if self._graph.dropped:
            raise RuntimeError("the communicator of this captured step was closed")
        opt._prepare_replay(self._changes, self._lines, self._mark)
        self._order(caller, self._stream)
        with self._stream:
            opt._replay(self._graph)
        self._order(self._stream, caller)
        return True
