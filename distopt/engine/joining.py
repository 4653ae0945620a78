"""The state of a training, which its ranks send to a process that joins them."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from distopt import device
from distopt.checkpoint import foreign, tree
from distopt.comm import Communicator
from distopt.comm.communicator import BFLOAT16
from distopt.engine.checkpointer import Checkpointer
from distopt.engine.training_state import TrainingState, Tree

# Dtypes that numpy does not know by name.
DTYPES = {"bfloat16": BFLOAT16}


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
    told, arrays = ([None, []], {}) if values is None else described(values)

    def send() -> tuple[Any, dict[str, np.ndarray]]:
        head = comm.broadcast_object(told)
        received = empty_arrays(head)
        for name, x in received.items():
            if name in arrays:
                x[...] = arrays[name]
            comm.broadcast(x.reshape(-1).view(np.uint8))
        return head, received

    sent, received = comm.transaction(send)
    if sent[0] is None:
        raise RuntimeError("all ranks that could have sent the training's state have ended")
    return rebuilt(sent, received)


def described(values: Tree) -> tuple[list[Any], dict[str, np.ndarray]]:
    """Return a tree as JSON, with the dtypes and shapes of its arrays; and these."""
    arrays: dict[str, np.ndarray] = {}
    plain = tree.take_apart(values, arrays)
    return [plain, [[name, x.dtype.name, list(x.shape)] for name, x in arrays.items()]], arrays


def empty_arrays(head: list[Any]) -> dict[str, np.ndarray]:
    """Return arrays for those of the tree that ``described`` has described."""
    return {name: np.empty(shape, DTYPES.get(dtype, dtype)) for name, dtype, shape in head[1]}


def rebuilt(head: list[Any], received: Mapping[str, np.ndarray]) -> Any:
    """Return the tree that ``described`` has described, with these arrays."""

    def leaf(word: str, name: str) -> Any:
        array = received[name]
        return array[()] if word == "scalar" else foreign.tensor(array) if word == "tensor" else array

    return tree.put_together(head[0], leaf)
