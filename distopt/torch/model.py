"""The parameters of a PyTorch model, and the gradients that a loss leaves in them, as a step wants both."""

import contextlib
import functools
import itertools
import queue
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from distopt.comm import Communicator
from distopt.comm.message import MessageTag
from distopt.device import in_thread
from distopt.engine.agreement import Agreement
from distopt.engine.engine import Engine
from distopt.engine.parameters import Parameter
from distopt.engine.views import admit, enroll
from distopt.torch.rank_buffers import RankBuffers
from distopt.torch.tensors import (
    as_array,
    as_array_like,
    as_bytes,
    as_tensor,
    current_torch_stream,
    gpu_number,
    hand_over,
    is_dense,
    is_dtensor,
    on_gpu,
    torchs_stream,
)

TWICE = (
    "a gradient must come once in a backward pass where buckets leave early, got it twice (activations that are "
    "checkpointed with use_reentrant=True may do that); take overlap=False"
)
PARAMS = "params must be a torch.nn.Module, or an iterable of tensors or of (name, tensor) pairs"


class TensorParameter(Parameter):
    """A parameter in the memory of a tensor, which it does not keep alive: hooks of the tensor hold what holds this."""

    def __init__(self, name: str, original: torch.Tensor):
        shard = _of_this_rank(name, original)
        if shard.is_meta:
            raise TypeError(
                f"{name}: a parameter must have memory, got one on the meta device; use to_empty() and load it"
            )
        try:
            array = as_array(shard)
        except TypeError as error:
            raise TypeError(f"{name}: {error}") from None
        super().__init__(name, array)
        self.find, self._shard = weakref.ref(original), None if shard is original else shard
        # `like` has the shape, dtype and strides of `tensor`, and no memory.
        self._address, self.like = shard.data_ptr(), torch.empty_like(shard, device="meta", requires_grad=False)

    @property
    def original(self) -> torch.Tensor:
        """The model's tensor."""
        original = self.find()
        if original is None:
            raise RuntimeError(f"{self.name}: the model's parameter must live as long as it is trained, and is gone")
        return original

    @property
    def tensor(self) -> torch.Tensor:
        """The model's tensor, or of a ``DTensor`` this rank's shard."""
        return self.original if self._shard is None else self._shard

    def follow(self) -> None:
        """Follow the tensor to other memory, to which the script may have moved it."""
        if self.tensor.data_ptr() != self._address:
            self.data, self._address = as_array(self.tensor), self.tensor.data_ptr()


class TorchModel:
    """The parameters of a model that require a gradient, the last ones first, as their gradients come."""

    def __init__(self, params: Any, optimizer: Any = None, ignored: Collection[str] = (), sparse: Collection[str] = ()):
        # params: a module, or an iterable of tensors or of (name, tensor) pairs; None for those of the optimizer, which
        # is one of torch's.
        module = isinstance(params, torch.nn.Module)
        if isinstance(params, torch.Tensor) or not (module or params is None or isinstance(params, Iterable)):
            raise TypeError(f"{PARAMS}, got {type(params).__name__}")
        self._given = params if module else list(params or ())
        # sparse: names of those that have sparse gradients, and no place in the plan.
        self._optimizer, self._ignored, self._sparse = optimizer, ignored, sparse
        # Names of all tensors so far, frozen ones too, by id.
        self._names: dict[int, tuple[str, torch.Tensor]] = {}
        self._by_tensor: dict[int, TensorParameter] = {}
        self._yields = False
        # The parameters whose gradients have come.
        self._arrived: queue.SimpleQueue[Any] | None = None
        # The stream of torch's in which those are read.
        self._stream: Any = None
        trained = self._untrained()
        if not trained and not sparse:
            raise ValueError("params must have a tensor that requires a gradient, got none")
        self._learn(self._with(trained))
        frozen = {n: t for n, t in self._names.values() if not t.requires_grad or n in sparse}
        self._buffers = {n: t for n, t in params.named_buffers() if n not in ignored} if module else {}
        # A module's buffers, and parameters that are frozen or have sparse gradients, by name.
        self.others = {n: t.detach() for n, t in (self._buffers | frozen).items()}
        # None where a process is one rank, whose buffers are its own.
        self.rank_buffers: RankBuffers | None = None

    def _tensors(self) -> Iterator[tuple[str | None, torch.Tensor]]:
        """Yield the tensors that the model and the optimizer have now, with the names that these know."""
        given = self._given.named_parameters() if isinstance(self._given, torch.nn.Module) else self._given
        for pair in given:
            name, tensor = pair if isinstance(pair, tuple) else (None, pair)
            if name not in self._ignored:
                yield name, tensor
        for group in () if self._optimizer is None else self._optimizer.param_groups:
            yield from zip(group.get("param_names") or itertools.repeat(None), group["params"], strict=False)

    def _untrained(self) -> list[TensorParameter]:
        """Return the parameters that require a gradient and are none of ``parameters``: thawed ones, and new ones."""
        found = {}
        for name, tensor in self._tensors():
            key = id(tensor)
            if key not in self._names:
                if not isinstance(tensor, torch.Tensor):
                    raise TypeError(f"{PARAMS}, got one of {type(tensor).__name__}")
                self._names[key] = name or f"parameter {len(self._names)}", tensor
            if tensor.requires_grad and key not in self._by_tensor and self._names[key][0] not in self._sparse:
                found[key] = TensorParameter(*self._names[key])
        # A shard may be empty.
        return [p for p in reversed(found.values()) if p.data.size]

    def _with(self, more: Sequence[TensorParameter]) -> list[TensorParameter]:
        """Return the parameters and more, in the order of the model: as if all of them had been there at first."""
        known = self._by_tensor | {id(p.original): p for p in more}
        return [known[key] for key in reversed(self._names) if key in known]

    def _learn(self, parameters: list[TensorParameter]) -> None:
        self.parameters = parameters
        self._by_tensor |= {id(t): p for p in parameters for t in (p.tensor, p.original)}

    def let_go(self) -> None:
        """Hold the model's tensors no more: their hooks hold this."""
        self._given, self._optimizer, self._names = [], None, {}

    def enroll(self, engine: Engine, check: Callable[[], object] = lambda: None) -> None:
        """Make the plan of the parameters, and send all that rank 0 has, before a loss is made of them.  Collective."""
        # `check` raises what forbids it on this rank, which all ranks raise.
        with self.stream():
            enroll(engine, self.parameters, "torch's parameters", lambda names: check())
            if engine.store.broadcast_due:
                self.agree_on_others(engine.agreement)
                engine.transaction(lambda: self._broadcast(engine))
        if engine.comm.ranks.logical and self._buffers:
            self.rank_buffers = RankBuffers(engine.comm, self._buffers)
            engine.hooks.append(self.rank_buffers)

    def take_in(self, engine: Engine) -> None:
        """Take in the parameters that require a gradient from now on, with rank 0's values.  Collective then."""
        if not (new := self._untrained()):
            return
        names = [p.name for p in new]

        def check() -> None:
            if taken := [name for name in names if name in engine.store.collector.order]:
                raise ValueError(
                    f"{taken[0]}: a parameter must stay the tensor that it was, got another one; make a new "
                    f"{engine.kind} after a layer was replaced"
                )
            if engine.store.sharded:
                raise ValueError(
                    f"{names[0]}: a parameter must require a gradient before parameter_views, got one that does since"
                )

        all_of_them = self._with(new)
        admit(engine, all_of_them, f"parameters that require a gradient from now on: {', '.join(names)}", check)
        if engine.options.broadcast:
            engine.transaction(lambda: self._broadcast_values(engine, new))
        self._learn(all_of_them)
        for p in new if self._yields else ():
            self._tell_of(p)

    def refuse_new(self) -> None:
        """Raise ValueError for a parameter that requires a gradient now and did not when the exchanges began."""
        if new := self._untrained():
            raise ValueError(
                f"{', '.join(p.name for p in new[:5])}: a parameter must require a gradient when local steps begin, "
                "got one that does since; make local steps anew after a layer was thawed, replaced or added"
            )

    def _broadcast_values(self, engine: Engine, parameters: Sequence[TensorParameter]) -> None:
        values = [p.data for p in parameters]
        if engine.undo:
            engine.undo.keep(*values)
        with engine.comm.tagged(MessageTag("start", engine.progress.updates)):
            for value in values:
                engine.comm.broadcast(value)
        engine.comm.wait()

    def _broadcast(self, engine: Engine) -> None:
        """Send all that rank 0 has, and nothing of any other rank if that is lost on the way.  Collective."""
        others = self._dense_others()
        if engine.undo:
            engine.undo.keep(*(as_bytes(dense) for _, dense in others))
        self._send_others(engine.comm, others)
        engine.store.broadcast_parameters(engine.progress.updates)
        self._take_others(others)

    def broadcast_others(self, comm: Communicator, agreement: Agreement) -> None:
        """Send rank 0's buffers and frozen parameters to all ranks, if they agree on them.  Collective."""
        self.agree_on_others(agreement)
        others = self._dense_others()
        self._send_others(comm, others)
        self._take_others(others)

    def agree_on_others(self, agreement: Agreement) -> None:
        """Raise an error on every rank alike if buffers or frozen parameters differ, or cannot be sent.  Collective."""
        error = None
        try:
            self._dense_others()
        except (TypeError, ValueError) as e:
            error = e
        lines = []
        for name, x in self.others.items():
            strides = "" if x.layout is not torch.strided or x.is_contiguous() else f", strides {x.stride()}"
            lines.append(f"buffer or frozen parameter {name} of {tuple(x.shape)}, {x.dtype}{strides}")
        agreement.vote_on_lines("torch's buffers", lines, error)

    def _dense_others(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the place of each buffer and frozen parameter, and it again, or a copy of it if it has gaps."""
        places = []
        for name, x in self.others.items():
            if x.layout is not torch.strided or x.is_meta or x.is_quantized:
                got = "the meta device" if x.is_meta else x.layout if x.layout is not torch.strided else x.dtype
                raise TypeError(f"{name}: a buffer or frozen parameter must be dense and have memory, got {got}")
            shard = _of_this_rank(name, x)
            # One element of each that is expanded.
            places.append(shard[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in shard.stride())])
        return [(x, x if is_dense(x) else x.contiguous()) for x in places]

    def _send_others(self, comm: Communicator, others: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for _, dense in others:
            comm.broadcast(as_bytes(dense))

    def _take_others(self, others: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for place, dense in others:
            if dense is not place:
                place.copy_(dense)

    def buffer_bytes(self) -> list[np.ndarray]:
        """Return a module's buffers as bytes, in their memory."""
        found = dict(self._given.named_buffers()) if isinstance(self._given, torch.nn.Module) else {}
        for name in self._buffers:
            if not is_dense(found[name]):
                strides = tuple(found[name].stride())
                raise TypeError(f"{name}: a buffer must have no gaps with logical ranks, got strides {strides}")
        return [as_bytes(found[name]) for name in self._buffers]

    def take_others(self, sent: Mapping[str, torch.Tensor]) -> None:
        """Take another process's ``others``."""
        with torch.no_grad():
            for name, x in self.others.items():
                x.copy_(sent[name])

    def stream(self) -> AbstractContextManager[Any]:
        """Return a context in which a step enqueues where torch does, on a GPU (``tensors.torchs_stream``)."""
        return torchs_stream(self._there())

    def current_stream(self) -> Any:
        """Return torch's current stream, on a GPU (``tensors.current_torch_stream``)."""
        return current_torch_stream(self._there())

    def _there(self) -> torch.Tensor:
        """Return a parameter that is not gone."""
        here = (p.tensor for p in self.parameters if p.find() is not None)
        return next(here) if self.parameters else next(iter(self.others.values()))

    def overlap(self) -> None:
        """Make ``gradients`` of a tensor yield pairs while its backward pass goes on in a thread of its own."""
        for p in self.parameters:
            self._tell_of(p)
        self._yields = True

    def _tell_of(self, p: TensorParameter) -> None:
        # Torch's method has no types.
        leaf: Any = p.original
        leaf.register_post_accumulate_grad_hook(functools.partial(_tell, weakref.ref(self), p))

    def known(self, params: Any) -> Any:
        """Return the parameters that tensors, pairs of names and tensors, or those of a module are."""
        # A tensor of another model is a parameter if it comes with a name; what is none of these is returned as it is.
        if isinstance(params, torch.nn.Module):
            params = params.named_parameters()
        if not isinstance(params, Iterable):
            return params
        found: list[Any] = []
        for param in params:
            name, tensor = param if isinstance(param, tuple) and len(param) == 2 else (None, param)
            parameter = self._by_tensor.get(id(tensor))
            name = self._names[id(tensor)][0] if id(tensor) in self._names else name
            if parameter is not None:
                parameter.follow()
            elif isinstance(tensor, torch.Tensor) and name:
                parameter = TensorParameter(name, tensor)
            found.append(param if parameter is None else parameter)
        return found

    def move(self, params: Iterable[Any], views: Iterable[np.ndarray]) -> list[torch.Tensor]:
        """Move parameters to the memory of these arrays, and return them as tensors."""
        for p, view in zip(params, views, strict=True):
            p.tensor.data = as_tensor(view, like=p.like)
            p.follow()
        return [p.tensor for p in params]

    def gradients(self, loss: Any) -> Any:
        """Return a loss as (parameter, gradient) pairs want it."""

        # A tensor's `backward()` is called, and finds no gradients of an earlier one; a callable, of a logical rank if
        # there are such, returns a tensor or pairs.
        def pairs(*rank: int) -> Any:
            if rank and isinstance(loss, torch.Tensor):
                raise TypeError("loss must be a callable of the rank, as opt.step(lambda rank: loss), got a tensor")
            with self.rank_buffers.of(*rank) if self.rank_buffers else contextlib.nullcontext():
                found = loss if isinstance(loss, torch.Tensor) else loss(*rank)
                if isinstance(found, torch.Tensor):
                    return self._backward(found)
                # What it still computes is the rank's too.
                return list(self._of_pairs(found)) if rank else self._of_pairs(found)

        return pairs if isinstance(loss, torch.Tensor) or callable(loss) else self._of_pairs(loss)

    def _backward(self, loss: torch.Tensor) -> Iterable[tuple[Parameter, Any]]:
        for p in self.parameters:
            p.tensor.grad = None
            p.follow()
        if self._yields:
            return self._while_backward(loss)
        loss.backward()  # type: ignore[no-untyped-call]
        return [(p, self._array(p, p.tensor.grad)) for p in self.parameters]

    def _while_backward(self, loss: torch.Tensor) -> Iterator[tuple[Parameter, Any]]:
        """Yield the gradients as they come, and those that have not come at the end."""
        there, arrived = self._there(), queue.SimpleQueue[Any]()
        waiting = {id(p): p for p in self.parameters}
        self._arrived, self._stream = arrived, self.current_stream()
        backward: Callable[[], None] = loss.backward
        done = in_thread(backward, gpu_number(there) if on_gpu(there) else None)
        done.add_done_callback(arrived.put)
        try:
            while isinstance(p := arrived.get(), TensorParameter):
                if waiting.pop(id(p), None) is None:
                    raise ValueError(f"{p.name}: {TWICE}")
                yield p, self._array(p, p.tensor.grad)
            done.result()
            yield from ((p, None) for p in waiting.values())
        finally:
            self._arrived = None
            # Ask how it ended, once it has.
            done.exception()

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
            raise TypeError(
                f"{parameter.name}: a gradient must be dense, got {gradient.layout}; "
                "use sparse=False, or sparse_as_dense=True"
            )
        if gradient.stride() != parameter.like.stride():
            gradient = torch.empty_like(parameter.like, device=gradient.device).copy_(gradient)
        alike = (gradient.dtype, gradient.shape) == (parameter.like.dtype, parameter.like.shape)
        return as_array_like(gradient, parameter.data) if alike else as_array(gradient)


def _tell(model: "weakref.ref[TorchModel]", p: TensorParameter, _: torch.Tensor) -> None:
    """Tell a model that a gradient came, in a backward pass which yields them."""
    if (there := model()) is not None and there._arrived:
        hand_over(p.tensor.grad, there._stream)
        there._arrived.put(p)


def _of_this_rank(name: str, t: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or of a ``DTensor`` the shard that this rank has."""
    if not is_dtensor(t):
        return t
    sharded: Any = t
    sizes, placements = tuple(sharded.device_mesh.shape), sharded.placements
    replicas = [n for n, placement in zip(sizes, placements, strict=True) if not placement.is_shard()]
    if max(replicas, default=1) > 1:
        raise ValueError(
            f"{name}: a DTensor must be sharded over all of its mesh, got {placements} on a mesh of {sizes}, "
            "whose replicas are added up before; give fully_shard the dimension of "
            "shards alone, mesh=mesh['shard'], and distopt group=mesh.get_group('replicate')"
        )
    shard: torch.Tensor = sharded.to_local().detach()
    return shard
