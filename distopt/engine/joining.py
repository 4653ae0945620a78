"""The state of a training, which its ranks send to a process that joins them."""

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np

from distopt import device
from distopt.checkpoint import foreign, tree
from distopt.comm import Communicator
from distopt.comm.communicator import BFLOAT16
from distopt.engine.checkpointer import Checkpointer
from distopt.engine.training_state import TrainingState, Tree

DTYPES = {"bfloat16": BFLOAT16}  # that numpy does not know by name


class Joining:
    """Send what a training has to processes that join it; be one of them.

    The parameters, the optimizer's state, counters and schedules are those of the rank that is the first one then.
    What ranks have not sent, their residuals and windows, stays with them: a process that joins begins with none.

    Args:
        training: the training.
        checkpointer: knows the parameters.
        params: the parameters, as of ``DistOpt.save``.
        extra: what else a process that joins needs, or a callable that returns it.
    """

    def __init__(self, training: TrainingState, checkpointer: Checkpointer, params: Iterable[Any] | None, extra: Any):
        self._training, self._checkpointer = training, checkpointer
        self._params, self._extra = None if params is None else list(params), extra

    def rejoin(self) -> Any:
        """Be let in by the others and ``receive``, in a process that was started in the place of a lost rank.

        Returns:
            Their ``extra``, {} if there was none; None in a job that begins.  Either way this rank will ``send``.
        """
        comm = self._training.comm
        comes = comm.outside
        if comes:
            comm.join_others()
        comm.on_join(self.send)
        return self.receive() if comes else None

    def send(self) -> None:
        """Send what there is.  Collective."""
        values = self._checkpointer.values(self._params)
        state = self._training.state() | {"states": {}}
        extra = self._extra() if callable(self._extra) else self._extra
        parameters = {name: device.host_copy(x) for name, x in values.items()}
        send_tree(self._training.comm, {"state": state, "parameters": parameters, "extra": extra})

    def receive(self) -> Any:
        """Take what the others send, and return their ``extra``.  Collective.

        Raises:
            ValueError: it belongs to other parameters, or to another optimizer.
        """
        sent = send_tree(self._training.comm, None)
        self._checkpointer.take(self._params, sent["state"], sent["parameters"])
        return {} if sent["extra"] is None else sent["extra"]


def send_tree(comm: Communicator, values: Tree | None) -> Any:
    """Return the tree of the first rank on all ranks.  Collective.

    Args:
        comm: the ranks.
        values: the tree; None on ranks that have none.

    Raises:
        RuntimeError: the first rank has none: all that had one have ended.
    """
    arrays: dict[str, np.ndarray] = {}
    plain = None if values is None else tree.take_apart(values, arrays)
    layout = [[name, x.dtype.name, list(x.shape)] for name, x in arrays.items()]
    head = comm.broadcast_object([plain, layout])
    if head[0] is None:
        raise RuntimeError("all ranks that could have sent the training's state have ended")
    received = {name: np.empty(shape, DTYPES.get(dtype, dtype)) for name, dtype, shape in head[1]}
    for name, x in received.items():
        if name in arrays:
            x[...] = arrays[name]
        comm.broadcast(x.reshape(-1).view(np.uint8))
    return tree.put_together(head[0], functools.partial(_leaf, received))


def _leaf(arrays: dict[str, np.ndarray], word: str, name: str) -> Any:
    """Return an array of a tree, as what it was."""
    array = arrays[name]
    return array[()] if word == "scalar" else foreign.tensor(array) if word == "tensor" else array
