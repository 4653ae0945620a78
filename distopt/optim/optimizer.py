"""What every optimizer of distopt is made of: its hyper-parameters, its state by parameter name, and two ways in."""

import abc
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from distopt import device
from distopt.optim.schedules import Number, hyper
from distopt.tables import Members, Numbers

State = dict[str, Any]


class Optimizer(abc.ABC):
    """SINGA's protocol, and the fused path: ``apply`` updates one parameter, ``update_bucket`` all of a bucket.

    Both run the same kernel, so they agree to the bit.  Every rule starts from
    ``d = clip(rescale_grad * mean, +-clip_gradient) + weight_decay * w``; ``lr_mult`` and ``wd_mult``, keyed by
    parameter name, multiply the learning rate and the weight decay of single parameters.  ``clip_gradient`` None or
    <= 0 clips nothing.

    A subclass names its state arrays in ``slots``, each of the parameter's size and zero at first, gives the numbers of
    its kernel's ``struct`` in ``_own``, and calls the kernel in ``_update``; ``hypers`` are its hyper-parameters and
    their ranges; each may be assigned a number or a schedule at any time.
    """

    slots: tuple[str, ...] = ()
    struct = "Update"  # of the kernel's text
    _scheduled: frozenset[str] = frozenset()  # hyper-parameters that are schedules
    hypers: ClassVar[dict[str, tuple[float, float]]] = {"lr": (0.0, math.inf), "weight_decay": (0.0, math.inf)}

    def __init__(
        self,
        lr: Number,
        weight_decay: Number = 0.0,
        *,
        rescale_grad: float = 1.0,
        clip_gradient: float | None = None,
        lr_mult: Mapping[str, float] | None = None,
        wd_mult: Mapping[str, float] | None = None,
    ):
        self.lr, self.weight_decay = lr, weight_decay
        self.rescale_grad = hyper("rescale_grad", rescale_grad, least=-math.inf)(0)
        clip = hyper("clip_gradient", clip_gradient or 0.0, least=-math.inf)(0)
        self.clip_gradient = clip if clip > 0 else math.inf
        self.lr_mult = {n: hyper(f"lr_mult of {n}", m)(0) for n, m in (lr_mult or {}).items()}
        self.wd_mult = {n: hyper(f"wd_mult of {n}", m)(0) for n, m in (wd_mult or {}).items()}
        self.step_counter = 0
        self._state: dict[str, dict[str, np.ndarray]] = {slot: {} for slot in self.slots}
        self._flats: dict[object, tuple[Members, dict[str, np.ndarray]]] = {}  # for each table a flat array per slot
        self._tables: dict[str, Members] = {}
        self._now = Numbers(self.struct)
        self.version = 0  # grows when states move to other memory

    def __setattr__(self, name: str, value: Any) -> None:
        """A hyper-parameter becomes a schedule whose values are checked."""
        super().__setattr__(name, hyper(name, value, *self.hypers[name]) if name in self.hypers else value)
        if name in self.hypers:
            self._scheduled = self._scheduled - {name} | ({name} if callable(value) else set())

    def at(self, name: str) -> float:
        """A hyper-parameter's value for the next update."""
        return float(getattr(self, name)(self.step_counter))

    def is_scheduled(self, name: str) -> bool:
        """Is a hyper-parameter a schedule, not a number?"""
        return name in self._scheduled

    @property
    def lr_value(self) -> float:
        """The learning rate of the next update."""
        return self.at("lr")

    def apply(self, name: str, value: np.ndarray, grad: np.ndarray) -> None:
        """Update one parameter in place; ``grad`` has its shape and dtype, and may be changed.

        Raises ValueError for a gradient of another shape or dtype, or a parameter that cannot be written.
        """
        if (grad.shape, grad.dtype) != (value.shape, value.dtype) or not device.writable(value):
            wanted = f"a gradient like the parameter, {value.shape} {value.dtype}"
            flaw = "" if device.writable(value) else "; the parameter is read-only"
            raise ValueError(f"{name}: wants {wanted}, got {grad.shape} {grad.dtype}{flaw}")
        if name not in self._tables or self._tables[name].shapes != (value.shape,):
            self._tables[name] = Members([name], [value.shape], [0], value.dtype)
        flat = grad.reshape(-1)
        self.prepare(1.0)
        self.update_bucket(self._tables[name].point_to([value]), flat)

    def prepare(self, scale: float, gpu: int | None = None) -> None:
        """Write down the numbers of the next update, of ``scale`` times the gradients, for the host or a GPU."""
        lr, decay = self.at("lr"), self.at("weight_decay")
        self._now.write(scale=scale * self.rescale_grad, limit=self.clip_gradient, lr=lr, decay=decay, **self._own())
        self._now.address(gpu)

    def update_bucket(self, members: Members, grad: np.ndarray, refused: np.ndarray | None = None) -> None:
        """Update the parameters that ``members`` points to by the flat ``grad``, in one kernel call, after ``prepare``.

        Nothing happens if the number ``refused`` is not 0 when the kernel runs.
        """
        state = self._flat_state(members, grad)
        members.rows["lr"] = [self.lr_mult.get(n, 1.0) for n in members.names] if self.lr_mult else 1.0
        members.rows["decay"] = [self.wd_mult.get(n, 1.0) for n in members.names] if self.wd_mult else 1.0
        self._update(members, grad, state, self._now, refused)

    @abc.abstractmethod
    def _own(self) -> dict[str, float]:
        """The numbers that this rule has beside scale, limit, lr and decay, as its ``struct`` names them."""

    @abc.abstractmethod
    def _update(self, members: Members, grad: np.ndarray, state: dict[str, np.ndarray], *rest: Any) -> None:
        """Call the kernel; ``state`` has a flat array per slot, ``rest`` is what every such kernel takes last."""

    def step(self) -> None:
        """Every parameter has been updated: the next update is number ``step_counter + 1``."""
        self.step_counter += 1

    def __call__(self, pairs: Iterable[tuple[Any, np.ndarray]]) -> None:
        """``apply`` for every pair of (parameter with ``name`` and ``data``, gradient), then one ``step``."""
        for param, grad in pairs:
            self.apply(param.name, param.data, grad)
        self.step()

    def __repr__(self) -> str:
        """The rule and its hyper-parameters as they are now: ranks compare it."""
        now = [f"{name}={self.at(name)}" for name in self.hypers]
        fixed = [f"{name}={getattr(self, name)}" for name in ("rescale_grad", "clip_gradient", "lr_mult", "wd_mult")]
        return f"{type(self).__name__}({', '.join(now + fixed)})"

    def get_states(self, whole: Callable[[Members, np.ndarray], np.ndarray] = lambda members, flat: flat) -> State:
        """Everything that changes between steps: ``step_counter``, and per slot a dict of arrays by parameter name.

        ``rule`` says whose states these are.

        Where ranks update a share each, ``whole`` makes of a table's flat array one that has all of them.
        """
        found: State = {
            slot: {name: device.host_copy(a) for name, a in arrays.items()} for slot, arrays in self._state.items()
        }
        for members, flats in self._flats.values():
            for slot, flat in flats.items():
                complete = whole(members, flat)
                if complete is not flat:
                    found[slot].update({n: members.view(complete, row) for row, n in enumerate(members.names)})
        return {"rule": type(self).__name__, "step_counter": self.step_counter} | found

    def set_states(self, states: State) -> None:
        """Go on from what ``get_states`` returned.

        Raises ValueError if these are not the states of this kind of optimizer.
        """
        rule = type(self).__name__
        if states.get("rule", rule) != rule:
            raise ValueError(f"these are the states of {states['rule']}, and the optimizer is {rule}")
        if set(states) != {"rule", "step_counter", *self.slots}:
            raise ValueError(f"{rule} has the states rule, step_counter {self.slots}, got {sorted(states)}")
        self.step_counter = int(states["step_counter"])
        self._state = {slot: {n: np.array(a) for n, a in states[slot].items()} for slot in self.slots}
        self._flats.clear()
        self.version += 1

    state_dict, load_state_dict = get_states, set_states

    def numbers(self) -> tuple[float, ...]:
        """All hyper-parameters for the next update: what ranks must agree on.  ValueError for one out of range."""
        return (*map(self.at, self.hypers), self.rescale_grad, self.clip_gradient, float(self.step_counter))

    def reserve(self, members: Members, like: np.ndarray) -> None:
        """Make the state of a bucket's parameters, where ``like`` is; MemoryError if there is no room."""
        self._flat_state(members, like)

    def check(self, members: Members) -> None:
        """ValueError if a state that this optimizer has is not of its parameter's shape."""
        for slot, arrays in self._state.items():
            for name, shape in zip(members.names, members.shapes, strict=True):
                if name in arrays and arrays[name].shape != shape:
                    raise ValueError(f"state {slot} of {name} has shape {arrays[name].shape}, the parameter {shape}")

    def _flat_state(self, members: Members, like: np.ndarray) -> dict[str, np.ndarray]:
        """The flat state of a bucket, one array per slot; what its parameters had elsewhere moves in by name."""
        if members.key not in self._flats:
            self.check(members)
            self._flats = {k: f for k, f in self._flats.items() if set(f[0].names).isdisjoint(members.names)}
            flats = {slot: device.zeros(members.extent, members.dtype, like) for slot in self.slots}
            moved = []
            for slot, flat in flats.items():
                for row, name in enumerate(members.names):
                    view = members.view(flat, row)
                    if name in self._state[slot]:
                        moved.append(self._state[slot][name])
                        device.copy(view, moved[-1])
                    self._state[slot][name] = view
            if moved:
                device.last_read(moved[-1])
            self._flats[members.key] = members, flats
            self.version += 1
        return self._flats[members.key][1]
