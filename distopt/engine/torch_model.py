"""The parameters of a PyTorch model, and the gradients that a loss leaves in them, as a step wants both."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from distopt.device.tensors import as_array
from distopt.engine.engine import Engine
from distopt.engine.parameters import Parameter
from distopt.engine.views import enroll

PARAMS = "params must be a torch.nn.Module, or an iterable of tensors or of (name, tensor) pairs"


class TensorParameter(Parameter):
    """A parameter in the memory of a tensor.

    Args:
        name: its name.
        tensor: the tensor; it stays where it is.
    """

    def __init__(self, name: str, tensor: torch.Tensor):
        super().__init__(name, as_array(tensor))
        self.tensor = tensor


class TorchModel:
    """The parameters of a model that require a gradient, the last ones first, as their gradients come.

    Args:
        params: a module, or an iterable of tensors or of (name, tensor) pairs.

    Raises:
        TypeError: ``params`` is none of these; or a tensor is sparse, not on the CPU, or has gaps in memory.
        ValueError: there are none.
    """

    def __init__(self, params: Any):
        named = params.named_parameters() if isinstance(params, torch.nn.Module) else params
        if isinstance(named, torch.Tensor) or not isinstance(named, Iterable):
            raise TypeError(f"{PARAMS}, got {type(params).__name__}")
        pairs = [pair if isinstance(pair, tuple) else (f"parameter {k}", pair) for k, pair in enumerate(named)]
        wrong = next((p for _, p in pairs if not isinstance(p, torch.Tensor)), None)
        if wrong is not None:
            raise TypeError(f"{PARAMS}, got one of {type(wrong).__name__}")
        self.parameters = [TensorParameter(name, p) for name, p in reversed(pairs) if p.requires_grad]
        if not self.parameters:
            raise ValueError("params must have a tensor that requires a gradient, got none")
        self._by_tensor = {id(p.tensor): p for p in self.parameters}
        self._others = [*params.buffers(), *_frozen(params)] if isinstance(params, torch.nn.Module) else []

    @classmethod
    def of_optimizer(cls, optimizer: torch.optim.Optimizer) -> "TorchModel":
        """Return the parameters of an optimizer, with the names that it knows, or numbers."""
        groups = optimizer.param_groups
        tensors = itertools.chain.from_iterable(group["params"] for group in groups)
        names = itertools.chain.from_iterable(group.get("param_names", ()) for group in groups)
        return cls([(name or f"parameter {k}", p) for k, (p, name) in enumerate(itertools.zip_longest(tensors, names))])

    def enroll(self, engine: Engine) -> None:
        """Make the plan of the parameters, and send rank 0's to all ranks, before a loss is made of them.  Collective.

        A module's buffers and frozen parameters are sent too.
        """
        enroll(engine, self.parameters, "torch's parameters", lambda names: None)
        if engine.store.broadcast_due:
            for x in self._others:
                engine.comm.broadcast(as_array(x).reshape(-1).view(np.uint8))
        engine.store.broadcast_parameters(engine.progress.updates)

    def gradients(self, loss: Any) -> Any:
        """Return a loss as (parameter, gradient) pairs want it.

        Args:
            loss: a tensor, whose ``backward()`` is called, and which finds no gradients of an earlier one; a callable
                that returns one; or pairs, of this model's tensors.
        """
        if isinstance(loss, torch.Tensor):
            return lambda: self._backward(loss)
        if callable(loss):
            return lambda: self._of_callable(loss)
        return self._of_pairs(loss)

    def _backward(self, loss: torch.Tensor) -> list[tuple[Parameter, Any]]:
        for p in self.parameters:
            p.tensor.grad = None
        loss.backward()  # type: ignore[no-untyped-call]
        return [(p, self._array(p, p.tensor.grad)) for p in self.parameters]

    def _of_callable(self, loss: Callable[[], Any]) -> Any:
        found = loss()
        return self._backward(found) if isinstance(found, torch.Tensor) else self._of_pairs(found)

    def _of_pairs(self, pairs: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """Yield the pairs as they come, with arrays in the place of tensors."""
        for param, gradient in pairs:
            known = self._by_tensor.get(id(param), param)
            yield known, self._array(known, gradient) if isinstance(gradient, torch.Tensor) else gradient

    def _array(self, parameter: Any, gradient: torch.Tensor | None) -> Any:
        """Return a gradient as an array that lies in memory as its parameter does."""
        if gradient is None:
            return None
        if gradient.layout is not torch.strided:
            raise TypeError(f"{parameter.name}: a gradient must be dense, got {gradient.layout}; use sparse=False")
        like = parameter.tensor
        if gradient.stride() != like.stride():
            gradient = torch.empty_like(like).copy_(gradient)
        return as_array(gradient)


def _frozen(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p for p in model.parameters() if not p.requires_grad]
