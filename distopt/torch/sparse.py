"""Sparse gradients, as ``Embedding(sparse=True)`` has them, whose means over ranks are sparse too."""

import json
import weakref
from collections.abc import Iterator

import numpy as np
import torch

from distopt.comm import Communicator
from distopt.comm.message import MessageTag
from distopt.comm.voted import tensors_like
from distopt.kernels.breakdown import LazyBreakdown, PayloadBreakdown
from distopt.torch.tensors import as_array


def sparse_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters of a model whose gradients are sparse, by name."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse:
            yield f"{name}.weight".removeprefix("."), module.weight


class SparseGradients:
    """Exchange of sparse gradients: every rank gathers the rows that any rank has, and adds them up in rank order."""

    def __init__(self, comm: Communicator, parameters: dict[str, torch.Tensor]):
        # Hooks of these hold what holds this.
        self._comm, self._find = comm, {name: weakref.ref(p) for name, p in parameters.items()}

    def exchange(self, arrived: set[str], step: int) -> None:
        """Give the model the means over ranks, where any rank has a new gradient.  Collective."""
        # arrived: the parameters of which a gradient has come on this rank.
        comm, sums = self._comm, dict[str, torch.Tensor]()
        mine = {
            name: p.grad.coalesce()
            for name, find in self._find.items()
            if (p := find()) is not None and p.grad is not None
        }

        def gather() -> None:
            sums.clear()
            here = {
                name: [mine[name]._nnz() if name in mine else 0, name in mine and name in arrived]
                for name in self._find
            }
            everywhere = [json.loads(text) for text in comm.control.gather(json.dumps(here))]
            for name, find in self._find.items():
                if (p := find()) is not None and any(there[name][1] for there in everywhere):
                    counts = [there[name][0] for there in everywhere]
                    sums[name] = sum_of_rows(
                        comm,
                        mine.get(name, _of_rows(p.new_zeros(0).long(), p.new_zeros(0, *p.shape[1:]), p)),
                        counts,
                        step,
                    )

        comm.transaction(gather)
        for name, total in sums.items():
            if (p := self._find[name]()) is not None:
                p.grad = total / comm.size


def sum_of_rows(comm: Communicator, gradient: torch.Tensor, counts: list[int], step: int) -> torch.Tensor:
    """Return the sum of coalesced gradients of so many rows, by rank, coalesced.  Collective."""
    rows, values = gradient.indices()[0].contiguous(), gradient.values()
    rows = rows if len(gradient) >= 1 << 31 else rows.int()
    width = values[:1].numel() or gradient.shape[1:].numel()
    with comm.tagged(MessageTag("gradients", step, breakdown=_as_indices)):
        all_rows = comm.all_gather(as_array(rows), ragged=counts)
    with comm.tagged(MessageTag("gradients", step)):
        all_values = comm.all_gather(as_array(values), ragged=[width * n for n in counts])
    comm.wait()
    added = torch.cat(tensors_like(all_values, values)).reshape(-1, *gradient.shape[1:])
    return _of_rows(torch.cat(tensors_like(all_rows, rows)).long(), added, gradient)


def _of_rows(rows: torch.Tensor, values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a sparse tensor of these rows, of which those that are there several times are added up."""
    return torch.sparse_coo_tensor(rows[None], values, like.shape, check_invariants=False).coalesce()


def _as_indices(payload: np.ndarray) -> LazyBreakdown:
    nbytes = payload.nbytes
    return lambda: PayloadBreakdown(0, nbytes)
