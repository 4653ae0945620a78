"""The state of a training, which its ranks send to a process that joins them."""

from collections.abc import Callable, Iterable
from typing import Any

from distopt import device
from distopt.comm import Communicator
from distopt.engine.checkpointer import Checkpointer
from distopt.engine.training_state import TrainingState, Tree


class Joining:
    """Send what a training has to processes that join it; be one of them."""

    # The parameters, the optimizer's state, counters and schedules are those of the rank that is the first one
    # then.  What ranks have not sent, their residuals and windows, stays with them: a process that joins begins with
    # none.

    def __init__(self, training: TrainingState, checkpointer: Checkpointer, params: Iterable[Any] | None, extra: Any):
        self._training, self._checkpointer = training, checkpointer
        self._params, self._extra = None if params is None else list(checkpointer.known(params)), extra

    def rejoin(self) -> Any:
        """Be let in, and return the others' ``extra``; None in a process that is one of the ranks.  Collective."""
        # From then on this rank sends what there is to those that come.
        comm = self._training.comm
        if self._training.collective:
            raise RuntimeError("rejoin must come before parameter_views, which then finds what the others share")
        comes = comm.outside
        if comes and not self._checkpointer.values(self._params):
            raise ValueError("params must be the model's parameters, got none; call rejoin(params)")
        if comm.membership:
            if comes:
                comm.membership.join_others()
            comm.membership.on_join(self.prepare)
        return self.receive() if comes else None

    def prepare(self) -> Callable[[], None]:
        """Return a function that sends what there is now to those that have come.  Collective, as is the function."""
        # Where each rank has a share of the state, all have all of it from now on, and share it out anew.
        training, values = self._training, self._checkpointer.values(self._params)
        state, shares = training.state(), training.collective
        sent = {
            "order": list(training.collector.order),
            "shares": shares,
            "state": training.for_joiner(state),
            "parameters": {name: device.host_copy(x) for name, x in values.items()},
            "extra": self._extra() if callable(self._extra) else self._extra,
        }

        def send() -> None:
            send_tree(training.comm, sent)
            if shares:
                training.load(state)
                training.share_with_newcomers()

        return send

    def receive(self) -> Any:
        """Take what the others send, and return their ``extra``.  Collective."""
        sent = send_tree(self._training.comm, None)
        self._checkpointer.take(self._params, sent["state"], sent["parameters"])
        collector, order = self._training.collector, sent["order"]
        if not collector.order:
            by_name = {collector.identify(param)[0]: param for param in self._params or ()}
            collector.enroll(by_name[name] for name in order)
        elif order and list(collector.order) != order:
            raise ValueError(
                f"params must be in the order of the other ranks' first step, {', '.join(order[:5])}, ..., got "
                f"{', '.join(list(collector.order)[:5])}, ..."
            )
        self._training.begin_as_newcomer()
        if sent["shares"]:
            self._training.share_with_newcomers()
        return {} if sent["extra"] is None else sent["extra"]


def send_tree(comm: Communicator, values: Tree | None) -> Any:
    """Return the tree of the first rank on all ranks; None on ranks that have none.  Collective."""
    sent = comm.broadcast_object(values)
    if sent is None:
        raise RuntimeError("all ranks that could have sent the training's state have ended")
    return sent
