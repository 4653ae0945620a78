"""What every optimizer of distopt is made of: its hyper-parameters, its state by parameter name, and two ways in."""

import abc
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from distopt import device, kernels
from distopt.numbers import flag, limit, multipliers, number, whole
from distopt.optim.arguments import arguments, complaint
from distopt.optim.arrays import check, check_states, widened
from distopt.optim.schedules import Hyper, Number
from distopt.tables import Members, Numbers

State = dict[str, Any]
Pieces = Sequence[tuple[int, int, np.ndarray]]  # of a sum: share ``number`` of ``of``, in a flat array
Part = tuple[Members, np.ndarray]  # a share of a table, and the flat array that has its gradients
Together = Callable[[np.ndarray], None]  # what each rank has of float64 numbers becomes their sum over ranks
MASTER = "master"
MULTIPLIERS = ("lr_mult", "wd_mult")  # of options
CHECKS: dict[str, Callable[[str, Any], Any]] = {  # of options that may be assigned
    "rescale_grad": functools.partial(number, least=-math.inf),
    "clip_gradient": limit,
    "lr_mult": multipliers,
    "wd_mult": multipliers,
}


class Kept(NamedTuple):
    """What a table's parameters have beside them, in flat arrays of its size."""

    members: Members
    state: dict[str, np.ndarray]  # per slot
    scratch: dict[str, np.ndarray]  # that no update leaves to the next


class Optimizer(abc.ABC):
    """SINGA's protocol, and the fused path: ``apply`` updates one parameter, ``update_bucket`` all of a bucket.

    Both run the same kernel, so they agree to the bit.  Every rule starts from
    ``d = clip(rescale_grad * mean, +-clip_gradient) + weight_decay * w``; ``lr_mult`` and ``wd_mult``, keyed by
    parameter name, multiply the learning rate and the weight decay of single parameters.  ``clip_gradient`` None or
    <= 0 clips nothing.

    Parameters of float16 and bfloat16 are updated in float32, by gradients summed in float32, and rounded once.  With
    ``multi_precision`` the float32 values, the state 'master', are kept, so that small updates add up (Micikevicius et
    al., "Mixed precision training", 2018); a parameter that somebody else has changed since is the master from then on.
    Float64 parameters are float64 throughout.

    A subclass names its state arrays in ``slots``, each of the parameter's size and zero at first, gives the numbers of
    its kernel's ``struct`` in ``_own``, and calls the kernel in ``_update``; ``hypers`` are its hyper-parameters and
    their ranges; each may be assigned a number or a schedule at any time.  ``options`` are what else was chosen; those
    above are numbers, which may be assigned too.
    """

    slots: tuple[str, ...] = ()
    counters: tuple[str, ...] = ("step_counter",)
    struct = "Update"  # of the kernel's text
    same_each_step = True  # are the same kernels called at every update?
    options: tuple[str, ...] = ("rescale_grad", "clip_gradient", "multi_precision", *MULTIPLIERS)
    planned: tuple[str, ...] = ()  # those of the options that only another plan changes
    clip_gradient: Any  # a number; infinity for none
    lr_mult: Any  # dicts
    wd_mult: Any
    _scheduled: frozenset[str] = frozenset()  # hyper-parameters that are schedules
    _settings: Sequence[str] = ()  # what ``numbers`` says of those that are none, and of options, until one is assigned
    hypers: ClassVar[dict[str, tuple[float, float]]] = {"lr": (0.0, math.inf), "weight_decay": (0.0, math.inf)}

    def __init__(
        self,
        lr: Number,
        weight_decay: Number = 0.0,
        *,
        rescale_grad: float = 1.0,
        clip_gradient: float | None = None,
        multi_precision: bool = False,
        lr_mult: Mapping[str, float] | None = None,
        wd_mult: Mapping[str, float] | None = None,
        **unknown: Any,
    ):
        if unknown:
            raise TypeError(complaint(type(self).__name__, unknown, arguments(type(self), Optimizer)))
        self.lr, self.weight_decay = lr, weight_decay
        self.rescale_grad, self.clip_gradient = rescale_grad, clip_gradient
        self.lr_mult, self.wd_mult = lr_mult, wd_mult
        self.multi_precision = flag("multi_precision", multi_precision)
        self.slots = (*self.slots, MASTER) if multi_precision else self.slots
        self.step_counter = 0
        self._state: dict[str, dict[str, np.ndarray]] = {slot: {} for slot in self.slots}
        self._kept: dict[object, Kept] = {}  # by a table's key
        self._wide: np.ndarray | None = None  # where parameters of 16 bits are updated that have no master
        self._tables: dict[str, Members] = {}
        self._now = Numbers(self.struct)
        longer = (*MULTIPLIERS, *self.planned)
        self._single = [n for n in self.options if n not in longer]  # what is one number or text
        self._multiplied: tuple[list[dict[str, float]], list[str]] = [], []  # multipliers, and what ``numbers`` says
        self.version = 0  # grows when states move to other memory

    def __setattr__(self, name: str, value: Any) -> None:
        """A hyper-parameter becomes a schedule whose values are checked; other numbers are checked at once."""
        checked = CHECKS[name](name, value) if name in CHECKS else value
        super().__setattr__(name, Hyper(name, value, *self.hypers[name]) if name in self.hypers else checked)
        if name in self.hypers:
            self._scheduled = self._scheduled - {name} | ({name} if callable(value) else set())
        if name in self.hypers or name in self.options:
            self._settings = ()

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

    def apply(self, name: str, value: np.ndarray, grad: np.ndarray, refused: np.ndarray | None = None) -> None:
        """Update one parameter in place; ``grad`` has its shape and dtype, or is float32 for one of 16 bits.

        Raises TypeError for what is no array of floats, and ValueError for a gradient of another shape or dtype, or a
        parameter that cannot be written.
        """
        check(name, value, grad)
        table = self._tables.get(name)
        if table is None or table.shapes != (value.shape,) or table.stored != value.dtype:
            table = self._tables[name] = Members([name], [value.shape], [0], value.dtype)
        self.prepare(1.0)
        self.update_bucket(table.point_to([value]), [(0, 1, widened(grad))], refused)

    def prepare(self, scale: float, gpu: int | None = None) -> None:
        """Write down the numbers of the next update, of ``scale`` times the gradients, for the host or a GPU."""
        self._now.write(**self._numbers(scale))
        self._now.address(gpu)

    def update_bucket(
        self,
        members: Members,
        total: Pieces,
        refused: np.ndarray | None = None,
        together: Together | None = None,
    ) -> None:
        """Update the parameters that ``members`` points to, after ``prepare``, by a flat sum that is in pieces.

        Nothing happens if the number ``refused`` is not 0 when a kernel runs.  ``together`` is given if other ranks
        have the other pieces.
        """
        kept = self._keep(members, total[0][2])
        self.multiply(members)
        if members.narrow:
            home = kept.state[MASTER] if self.multi_precision else self._wide
            assert home is not None
            members.work_in(home, master=self.multi_precision)
        self._update_all(kept, [(members.share(number, of), flat) for number, of, flat in total], refused, together)

    def multiply(self, members: Members) -> None:
        """Write down the multipliers of each parameter, where kernels read them."""
        members.rows["lr"] = [self.lr_mult.get(n, 1.0) for n in members.names] if self.lr_mult else 1.0
        members.rows["decay"] = [self.wd_mult.get(n, 1.0) for n in members.names] if self.wd_mult else 1.0

    def _numbers(self, scale: float) -> dict[str, float]:
        """What the kernel's ``struct`` holds at the next update."""
        common = {"scale": scale * self.rescale_grad, "limit": self.clip_gradient}
        return common | {"lr": self.at("lr"), "decay": self.at("weight_decay")} | self._own()

    @abc.abstractmethod
    def _own(self) -> dict[str, float]:
        """The numbers that this rule has beside scale, limit, lr and decay, as its ``struct`` names them."""

    def _update_all(
        self, kept: Kept, parts: Sequence[Part], refused: np.ndarray | None, together: Together | None
    ) -> None:
        """Update a table's parameters, which are in parts: one kernel call for each, unless a rule needs more."""
        for members, grad in parts:
            self._update(members, grad, kept.state, self._now, refused)

    def _update(self, members: Members, grad: np.ndarray, state: dict[str, np.ndarray], *rest: Any) -> None:
        """Call the kernel; ``state`` has a flat array per slot, ``rest`` is what every such kernel takes last."""
        raise NotImplementedError

    def step(self) -> None:
        """Every parameter has been updated: the next update is number ``step_counter + 1``."""
        self.step_counter += 1

    def take_back(self) -> None:
        """The last ``step`` was none."""
        self.step_counter -= 1

    def __call__(self, pairs: Iterable[tuple[Any, np.ndarray]]) -> None:
        """``apply`` for every pair of (parameter with ``name`` and ``data``, gradient), then one ``step``."""
        for param, grad in pairs:
            self.apply(param.name, param.data, grad)
        self.step()

    def __repr__(self) -> str:
        """The rule, its hyper-parameters as they are now, and its options: ranks compare it."""
        all_of_them = {name: self.at(name) for name in self.hypers} | {n: getattr(self, n) for n in self.options}
        all_of_them |= {n: dict(sorted(all_of_them[n].items())) for n in MULTIPLIERS}
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in all_of_them.items())})"

    def get_states(self, whole: Callable[[Members, np.ndarray], np.ndarray] = lambda members, flat: flat) -> State:
        """Everything that changes between steps: the ``counters``, and per slot a dict of arrays by parameter name.

        ``rule`` says whose states these are.

        Where ranks update a share each, ``whole`` makes of a table's flat array one that has all of them.
        """
        found: State = {
            slot: {name: device.host_copy(a) for name, a in arrays.items()} for slot, arrays in self._state.items()
        }
        for members, flats, _ in self._kept.values():
            for slot, flat in flats.items():
                complete = whole(members, flat)
                if complete is not flat:
                    found[slot].update({n: members.view(complete, row) for row, n in enumerate(members.names)})
        return {"rule": type(self).__name__} | {name: getattr(self, name) for name in self.counters} | found

    def set_states(self, states: State) -> None:
        """Go on from what ``get_states`` returned.

        Raises ValueError or TypeError, before anything changes, if these are not the states of this kind of optimizer,
        or one of them has not the shape of its parameter, where that is known.
        """
        self._check_states(states)
        for name in self.counters:
            setattr(self, name, int(states[name]))
        self._state = {slot: {n: np.array(a) for n, a in states[slot].items()} for slot in self.slots}
        self._kept.clear()
        self.version += 1

    def _check_states(self, states: State) -> None:
        rule, wanted = type(self).__name__, ("rule", *self.counters, *self.slots)
        if not isinstance(states, dict):
            raise TypeError(f"{rule} has the states {', '.join(wanted)} in a dict, got {type(states).__name__}")
        if states.get("rule", rule) != rule:
            raise ValueError(f"these are the states of {states['rule']}, and the optimizer is {rule}")
        if set(states) != set(wanted):
            raise ValueError(f"{rule} has the states {', '.join(wanted)}, got {sorted(states)}")
        for name in self.counters:
            whole(name, states[name], least=0)
        for slot in self.slots:
            check_states(slot, states[slot])
            for kept in self._kept.values():
                _check_shapes(slot, states[slot], kept.members)

    def state_dict(self) -> State:
        """``get_states()``."""
        return self.get_states()

    def load_state_dict(self, states: State) -> None:
        """``set_states(states)``."""
        self.set_states(states)

    def numbers(self) -> list[str]:
        """What ranks must have alike for the next update, in a text for each: hyper-parameters, options and counters.

        ValueError for a hyper-parameter out of range.
        """
        whose = f"{type(self).__name__}'s"
        if not self._settings or self._scheduled:
            settings = [f"{whose} {name}={self.at(name)!r}" for name in self.hypers]
            self._settings = settings + [f"{whose} {name}={getattr(self, name)!r}" for name in self._single]
        counters = [f"{whose} {name}={getattr(self, name)!r}" for name in self.counters]
        return [*self._settings, *counters, *self._multipliers(whose)]

    def _multipliers(self, whose: str) -> list[str]:
        """The part of ``numbers`` that is as long as the model has parameters, and hardly ever changes."""
        if self._multiplied[0] != [self.lr_mult, self.wd_mult]:
            given = {field: dict(sorted(getattr(self, field).items())) for field in MULTIPLIERS}
            texts = [f"{whose} {field} of {n}={value!r}" for field in MULTIPLIERS for n, value in given[field].items()]
            self._multiplied = list(given.values()), texts
        return self._multiplied[1]

    def reserve(self, members: Members, like: np.ndarray) -> None:
        """Make the state of a bucket's parameters, where ``like`` is; MemoryError if there is no room."""
        self._keep(members, like)
        self.multiply(members)

    def check(self, members: Members) -> None:
        """ValueError if a state that this optimizer has is not of its parameter's shape."""
        for slot, arrays in self._state.items():
            _check_shapes(slot, arrays, members)

    def masters(self, members: Members, like: np.ndarray) -> np.ndarray | None:
        """The flat array of a table's masters, which follow whoever has changed parameters; None if none are kept."""
        if not (self.multi_precision and members.narrow):
            return None
        flat = self._keep(members, like).state[MASTER]
        members.work_in(flat, master=True)
        kernels.widen(members, flat)
        return flat

    def _keep(self, members: Members, like: np.ndarray) -> Kept:
        """What belongs to a table's parameters; state that they had elsewhere moves in by name."""
        if members.key not in self._kept:
            self.check(members)
            self._kept = {k: f for k, f in self._kept.items() if set(f.members.names).isdisjoint(members.names)}
            slots = [slot for slot in self.slots if slot != MASTER or members.narrow]
            state = {slot: device.zeros(members.extent, members.dtype, like) for slot in slots}
            self._move_in(members, state)
            self._kept[members.key] = Kept(members, state, self._scratch(members, like))
            self.version += 1
        return self._kept[members.key]

    def _move_in(self, members: Members, state: dict[str, np.ndarray]) -> None:
        moved = []
        for slot, flat in state.items():
            for row, name in enumerate(members.names):
                view = members.view(flat, row)
                if name in self._state[slot]:
                    moved.append(self._state[slot][name])
                    device.copy(view, moved[-1])
                self._state[slot][name] = view
        if moved:
            device.last_read(moved[-1])

    def _scratch(self, members: Members, like: np.ndarray) -> dict[str, np.ndarray]:
        """What updates of a new table need beside its state, by name."""
        wide = self._wide
        fits = wide is not None and wide.size >= members.extent and device.place(wide) == device.place(like)
        if members.narrow and not self.multi_precision and not fits:
            self._wide = device.lasting_zeros(members.extent, members.dtype, like)
        return {}


def _check_shapes(slot: str, arrays: Mapping[str, np.ndarray], members: Members) -> None:
    for name, shape in zip(members.names, members.shapes, strict=True):
        if name in arrays and arrays[name].shape != shape:
            raise ValueError(f"state {slot} of {name} has shape {arrays[name].shape}, the parameter {shape}")
