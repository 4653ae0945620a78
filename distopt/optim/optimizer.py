"""The base class of distopt's optimizers: hyper-parameters, state by parameter name, and updates of one or many."""

import abc
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from distopt import device, kernels
from distopt.buckets import Reduced, local_shard, unsharded
from distopt.checks import check_bool, check_float, check_int, check_multipliers, clip_limit
from distopt.kernels.layout import BucketLayout, KernelStruct
from distopt.optim.arguments import arguments, complaint
from distopt.optim.arrays import check, check_states, widened
from distopt.optim.schedules import Hyper, Number

State = dict[str, Any]
# a shard of a table, and the flat array of its gradients
Part = tuple[BucketLayout, np.ndarray]
# a flat sum as (number, of, array): shard ``number`` of ``of``
Pieces = Sequence[tuple[int, int, np.ndarray]]
# adds up float64 numbers over ranks, in place
SumOverRanks = Callable[[np.ndarray], None]
# every rank's array, given their lengths
Gather = Callable[[np.ndarray, Sequence[int]], list[np.ndarray]]
Unshard = Callable[[BucketLayout, np.ndarray, int | None], np.ndarray]
MASTER = "master"
# options that are dicts by parameter name
MULTIPLIERS = ("lr_mult", "wd_mult")
# for options that may be assigned
CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "rescale_grad": functools.partial(check_float, least=-math.inf),
    "clip_gradient": clip_limit,
    "lr_mult": check_multipliers,
    "wd_mult": check_multipliers,
}


class UpdatingRanks(NamedTuple):
    """The ranks that make an update together, from the same sums."""

    rank: int
    size: int
    # the parameters are in memory that all ranks share, of which each updates a part
    shared: bool
    sum: SumOverRanks
    gather: Gather


class TableState(NamedTuple):
    """The memory that an optimizer keeps for the parameters of one table, in flat arrays of the table's size."""

    members: BucketLayout
    # float32 or float64, which updates carry on
    slots: dict[str, np.ndarray]
    # what no update leaves to the next
    scratch: dict[str, np.ndarray]


class OwnedSlots(NamedTuple):
    """What an optimizer keeps of the parameters of a table, and who updates these where ranks share them."""

    members: BucketLayout
    # in an order that all ranks have
    slots: Sequence[np.ndarray]
    # the rank of this number, modulo the ranks, updates all; None if each updates its shard
    number: int | None


class Optimizer(abc.ABC):
    """A base class of optimizers, which update one parameter (``apply``) or a whole bucket (``update_bucket``).

    Both run the same kernel, so they agree to the bit.  ``apply(name, value, grad)`` for each parameter and then
    ``step()`` is SINGA's protocol.  Every rule starts from
    ``d = clip(rescale_grad * mean, +-clip_gradient) + weight_decay * w``, unless its own documentation says otherwise.

    Parameters of float16 and bfloat16 are updated in float32, by gradients summed in float32, and rounded once.
    Float64 parameters are float64 throughout.

    Args:
        lr: the learning rate, at least 0: a number, or a schedule of k, the number of updates applied so far.  Like
            every hyper-parameter it may be assigned a number or a schedule at any time.
        weight_decay: at least 0, a number or a schedule.
        rescale_grad: a factor of every gradient.  Like the next four it is keyword-only.
        clip_gradient: elements of the rescaled gradient are clipped to [-clip_gradient, clip_gradient]; None or <= 0
            clips nothing.
        multi_precision: True keeps the float32 values of 16-bit parameters as the state ``master``, so that small
            updates add up (Micikevicius et al., "Mixed precision training", 2018).  A parameter that something other
            than the optimizer has changed since becomes the master.
        lr_mult: factors of the learning rate, by parameter name; 1 for all others.  A parameter that has an attribute
            of this name itself, other than 1, is multiplied by that instead.
        wd_mult: factors of the weight decay, in the same way.

    Attributes:
        slots: the names of the state arrays, each of the parameter's size and zero at first.
        counters: the names of the counters among the states.
        struct: the kernel's struct of numbers, which ``rule_numbers`` fills.
        hypers: the hyper-parameters' ranges, as ``{name: (least, most)}``.
        options: the names of the other settings, which ranks compare.
        planned: those of the options that change only with a new plan of buckets.
        same_each_step: whether every update calls the same kernels.
        unrecorded: what an update calls that no CUDA graph can record; '' if it can be recorded.
        sharded: whether ranks share the work of an update and gather the results, which takes all parameters at once.
        whole: whether a rank updates whole parameters where ranks share them, not its shard of all.
        step_counter: the number of updates applied so far.
        version: a number that grows when states move to other memory.

    A subclass sets ``slots``, ``struct`` and ``hypers``, returns its kernel's numbers from ``rule_numbers``, and calls
    kernels in ``update_parts``; ``ElementwiseOptimizer`` is for rules with one kernel.

    Raises:
        TypeError: an argument is unknown, or no number or schedule.
        ValueError: a number is out of its range or not finite.  A schedule's values are checked at each update.

    Example:
        >>> import numpy as np
        >>> from distopt.optim import SGD, Optimizer
        >>> opt = SGD(lr=lambda k: 0.1 / (k + 1), clip_gradient=1.0, lr_mult={"head": 10.0})
        >>> isinstance(opt, Optimizer)
        True
        >>> body, head = np.zeros(1), np.zeros(1)
        >>> for _ in range(2):
        ...     opt.apply("body", body, np.array([4.0]))
        ...     opt.apply("head", head, np.array([0.5]))
        ...     opt.step()
        >>> body.round(4).tolist(), head.round(4).tolist(), opt.step_counter
        ([-0.15], [-0.75], 2)
    """

    slots: tuple[str, ...] = ()
    counters: tuple[str, ...] = ("step_counter",)
    struct = "Update"
    same_each_step = True
    unrecorded = ""
    sharded = False
    whole = False
    options: tuple[str, ...] = ("rescale_grad", "clip_gradient", "multi_precision", *MULTIPLIERS)
    planned: tuple[str, ...] = ()
    # a number; infinity for none
    clip_gradient: Any
    # dicts
    lr_mult: Any
    wd_mult: Any
    # hyper-parameters that are schedules
    _scheduled: frozenset[str] = frozenset()
    # the texts of constants and options in ``numbers``, until one is assigned
    _settings: Sequence[str] = ()
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
        self.multi_precision = check_bool("multi_precision", multi_precision)
        self.slots = (*self.slots, MASTER) if multi_precision else self.slots
        self.step_counter = 0
        self._state: dict[str, dict[str, np.ndarray]] = {slot: {} for slot in self.slots}
        # by a table's key
        self._table_states: dict[object, TableState] = {}
        # memory for masters, by the key of a table without states
        self._adopted: dict[object, np.ndarray] = {}
        # float32 values of 16-bit parameters without masters, in an update
        self._wide: np.ndarray | None = None
        self._tables: dict[str, BucketLayout] = {}
        self._now = KernelStruct(self.struct)
        longer = (*MULTIPLIERS, *self.planned)
        # options that are one number or text
        self._single = [n for n in self.options if n not in longer]
        # multipliers that parameters have themselves, by name
        self._own_mult: list[dict[str, float]] = [{}, {}]
        # multipliers, and their ``numbers``
        self._multiplied: tuple[list[dict[str, float]], list[str]] = [], []
        self.version = 0

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a number is checked at once, a schedule becomes one whose values are checked."""
        checked = CHECKS[name](name, value) if name in CHECKS else value
        super().__setattr__(name, Hyper(name, value, *self.hypers[name]) if name in self.hypers else checked)
        if name in self.hypers:
            self._scheduled = self._scheduled - {name} | ({name} if callable(value) else set())
        if name in self.hypers or name in self.options:
            self._settings = ()

    def at(self, name: str) -> float:
        """Return a hyper-parameter's value for the next update."""
        hyper: Hyper = getattr(self, name)
        return hyper(self.step_counter) if hyper.constant is None else hyper.constant

    def is_scheduled(self, name: str) -> bool:
        """Tell if a hyper-parameter is a schedule, not a number."""
        return name in self._scheduled

    @property
    def lr_value(self) -> float:
        """The learning rate of the next update."""
        return self.at("lr")

    def apply(self, name: str, value: np.ndarray, grad: np.ndarray, skip_flag: np.ndarray | None = None) -> None:
        """Update one parameter in place.

        Args:
            name: the parameter's name, under which its state is kept.
            value: its array, of float16, bfloat16, float32 or float64, on the host or a GPU.
            grad: an array of the same shape and dtype, or float32 for a 16-bit ``value``.
            skip_flag: a number on the parameter's GPU; nothing happens if it is not 0 when the kernel runs; or None.

        Raises:
            TypeError: value or gradient is no array of floats, or they are not on the same host or GPU.
            ValueError: the gradient has another shape or dtype than the parameter, the parameter is read-only, or a
                schedule's value is out of range.
        """
        check(name, value, grad)
        table = self._tables.get(name)
        if table is None or table.shapes != (value.shape,) or table.stored != value.dtype:
            table = self._tables[name] = BucketLayout([name], [value.shape], [0], value.dtype)
        self.prepare(1.0)
        self.update_bucket(table.point_to([value]), unsharded(widened(grad)), skip_flag)

    def prepare(self, scale: float, gpu: int | None = None) -> None:
        """Write the numbers of the next update where kernels read them.

        Args:
            scale: the factor by which gradients are multiplied, such as 1 / ranks for a sum over ranks.
            gpu: the GPU on which the kernels run; None for the host.
        """
        self._now.write(**self.kernel_numbers(scale))
        self._now.address(gpu)

    def update_buckets(
        self,
        buckets: Iterable[tuple[BucketLayout, Reduced]],
        skip_flag: np.ndarray | None = None,
        ranks: UpdatingRanks | None = None,
    ) -> None:
        """Update the parameters of all buckets, after ``prepare``.

        Args:
            buckets: each bucket's table, which points to the parameters, and the flat sum of its gradients, in pieces
                (``update_bucket``), which is the same on all ranks.
            skip_flag: a number on the buckets' GPU; nothing happens if it is not 0 when a kernel runs; or None.
            ranks: the ranks that make this update; None if this one makes it alone, or from gradients of its own.
        """
        for members, total in buckets:
            if ranks and ranks.shared:
                self.update_bucket(members, local_shard(total, ranks.rank, ranks.size), skip_flag, ranks.sum)
            else:
                self.update_bucket(members, total, skip_flag)

    def update_bucket(
        self,
        members: BucketLayout,
        total: Pieces,
        skip_flag: np.ndarray | None = None,
        sum_over_ranks: SumOverRanks | None = None,
    ) -> None:
        """Update the parameters of a bucket, after ``prepare``.

        Args:
            members: the bucket's table, which points to the parameters.
            total: the flat sum of gradients in pieces ``(number, of, array)``: shard ``number`` of ``of`` equal shards.
            skip_flag: a number on the bucket's GPU; nothing happens if it is not 0 when a kernel runs; or None.
            sum_over_ranks: adds up float64 numbers over ranks, in place; given if other ranks have the other pieces.
        """
        table_state = self._table_state(members, total[0][2])
        self.multiply(members)
        if members.narrow:
            view = table_state.slots[MASTER] if self.multi_precision else self._wide
            assert view is not None
            members.update_in(view, master=self.multi_precision)
        self.update_parts(
            table_state, [(members.shard(number, of), flat) for number, of, flat in total], skip_flag, sum_over_ranks
        )

    def follow(self, params: Iterable[tuple[str, Any]]) -> None:
        """Take the multipliers from the attributes of parameters, as Gluon's have them, for the next update.

        Args:
            params: the names and the caller's objects of all parameters.

        Raises:
            TypeError: an attribute ``lr_mult`` or ``wd_mult`` is no number.
            ValueError: one is negative or not finite.
        """
        # One pass, which is what a step pays for each parameter; a loop of statements takes twice as long.
        given = [
            (name, lr, decay)
            for name, param in params
            if ((lr := getattr(param, "lr_mult", 1.0)) != 1.0) | ((decay := getattr(param, "wd_mult", 1.0)) != 1.0)
        ]
        if given or self._own_mult != [{}, {}]:
            for k, field in enumerate(MULTIPLIERS):
                found = {name: own[k] for name, *own in given if own[k] != 1.0}
                if found != self._own_mult[k]:
                    self._own_mult[k] = check_multipliers(field, found)

    def multiply(self, members: BucketLayout) -> None:
        """Write each parameter's factors of learning rate and weight decay into its record of the table."""
        lr, decay = self.lr_mult | self._own_mult[0], self.wd_mult | self._own_mult[1]
        members.records["lr"] = [lr.get(n, 1.0) for n in members.names] if lr else 1.0
        members.records["decay"] = [decay.get(n, 1.0) for n in members.names] if decay else 1.0

    def kernel_numbers(self, scale: float) -> dict[str, float]:
        """Return the numbers of the kernel's ``struct`` for the next update."""
        common = {"scale": scale * self.rescale_grad, "limit": self.clip_gradient}
        return common | {"lr": self.at("lr"), "decay": self.at("weight_decay")} | self.rule_numbers()

    @abc.abstractmethod
    def rule_numbers(self) -> dict[str, float]:
        """Return the rule's own numbers by their names in ``struct``, without scale, limit, lr and decay."""

    @abc.abstractmethod
    def update_parts(
        self,
        table_state: TableState,
        parts: Sequence[Part],
        skip_flag: np.ndarray | None,
        sum_over_ranks: SumOverRanks | None,
    ) -> None:
        """Update a table's parameters, after ``prepare``.

        Args:
            table_state: the table's slots and scratch.
            parts: shards of the table, each with the flat array of its gradients.
            skip_flag: a number on the table's GPU; nothing happens if it is not 0 when a kernel runs; or None.
            sum_over_ranks: adds up float64 numbers over ranks, in place; given if other ranks have the other parts.
        """

    def step(self) -> None:
        """Complete an update, after every parameter has been updated: ``step_counter`` grows by 1."""
        # It needs none of the checks of __setattr__.
        vars(self)["step_counter"] += 1

    def take_back(self) -> None:
        """Undo the last ``step``, whose update was refused."""
        self.step_counter -= 1

    def update(self, param: Any, grad: np.ndarray) -> None:
        """Update one parameter with ``name`` and ``data`` in place: SINGA's older name for ``apply``."""
        self.follow([(param.name, param)])
        self.apply(param.name, param.data, grad)

    def __call__(self, pairs: Iterable[tuple[Any, np.ndarray]]) -> None:
        """Apply pairs of (parameter with ``name`` and ``data``, gradient), then make one ``step``."""
        given = list(pairs)
        self.follow([(param.name, param) for param, _ in given])
        for param, grad in given:
            self.apply(param.name, param.data, grad)
        self.step()

    def __repr__(self) -> str:
        """Return the rule, its hyper-parameters as they are now, and its options; ranks compare this text."""
        settings = {name: self.at(name) for name in self.hypers} | {n: getattr(self, n) for n in self.options}
        settings |= {n: dict(sorted(settings[n].items())) for n in MULTIPLIERS}
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in settings.items())})"

    def get_states(self, unshard: Unshard = lambda members, flat, number: flat) -> State:
        """Return all that changes between steps.

        Args:
            unshard: makes the complete flat array of a table from this rank's, where ranks update a shard each, or the
                table of a number the rank of that number, modulo their number.  Collective then.

        Returns:
            The class's name as ``rule``, the ``counters``, and for each slot a dict of arrays (copies, on the host) by
            parameter name.
        """
        states: State = {
            slot: {name: device.host_copy(a) for name, a in arrays.items()} for slot, arrays in self._state.items()
        }
        for (members, slots, _), number in self._numbered():
            for slot, flat in slots.items():
                complete = unshard(members, flat, number)
                if complete is not flat:
                    states[slot].update({n: members.view(complete, i) for i, n in enumerate(members.names)})
        return {"rule": type(self).__name__} | {name: getattr(self, name) for name in self.counters} | states

    def tables(self) -> Iterator[OwnedSlots]:
        """Yield the tables of all parameters for which there is memory, in the order in which it was reserved."""
        for (members, slots, _), number in self._numbered():
            yield OwnedSlots(members, list(slots.values()), number)

    def _numbered(self) -> Iterator[tuple[TableState, int | None]]:
        """Yield the memory of each table, with the number of one of which a rank updates all."""
        return ((state, None) for state in self._table_states.values())

    def set_states(self, states: State) -> None:
        """Load states that ``get_states`` returned.

        A dict without ``rule``, as SINGA's are, may leave out all but ``step_counter``: the rest stays as it is.

        Raises:
            TypeError: these are no dict, or a counter is no integer; nothing has changed then.
            ValueError: these are the states of another kind of optimizer, or an array does not have the shape of its
                parameter, where that is known; nothing has changed then.
        """
        self.check_loaded(states)
        for name in self.counters:
            setattr(self, name, int(states.get(name, getattr(self, name))))
        self._state = {
            slot: {n: np.array(a) for n, a in states[slot].items()} if slot in states else self._state[slot]
            for slot in self.slots
        }
        self._table_states.clear()
        self.version += 1

    def check_loaded(self, states: State) -> None:
        """Check, before anything changes, that ``set_states`` can load these states; it lists the errors."""
        rule, expected = type(self).__name__, ("rule", *self.counters, *self.slots)
        if not isinstance(states, dict):
            raise TypeError(
                f"the states of {rule} must be a dict of {', '.join(expected)}, got {type(states).__name__}"
            )
        if states.get("rule", rule) != rule:
            raise ValueError(f"the states must be those of {rule}, got those of {states['rule']}")
        needed = expected if "rule" in states else ("step_counter",)
        if not set(needed) <= set(states) <= set(expected):
            raise ValueError(f"the states of {rule} must be {', '.join(expected)}, got {sorted(states)}")
        for name in states.keys() & set(self.counters):
            check_int(name, states[name], least=0)
        for slot in states.keys() & set(self.slots):
            check_states(slot, states[slot])
            for table_state in self._table_states.values():
                _check_shapes(slot, states[slot], table_state.members)

    def state_dict(self) -> State:
        """Return ``get_states()``, under the name that PyTorch uses."""
        return self.get_states()

    def load_state_dict(self, states: State) -> None:
        """Load states by ``set_states(states)``, under the name that PyTorch uses."""
        self.set_states(states)

    def numbers(self) -> list[str]:
        """Return a text for each number that ranks must have alike for the next update.

        They are the hyper-parameters, the options and the counters.

        Raises:
            ValueError: a hyper-parameter is out of its range.
        """
        whose = f"{type(self).__name__}'s"
        if not self._settings or self._scheduled:
            settings = [f"{whose} {name}={self.at(name)!r}" for name in self.hypers]
            self._settings = settings + [f"{whose} {name}={getattr(self, name)!r}" for name in self._single]
        counters = [f"{whose} {name}={getattr(self, name)!r}" for name in self.counters]
        multipliers = [self.lr_mult | self._own_mult[0], self.wd_mult | self._own_mult[1]]
        # their texts are kept, since they hardly ever change
        if self._multiplied[0] != multipliers:
            fields = zip(MULTIPLIERS, multipliers, strict=True)
            texts = [f"{whose} {field} of {n}={by_name[n]!r}" for field, by_name in fields for n in sorted(by_name)]
            self._multiplied = multipliers, texts
        return [*self._settings, *counters, *self._multiplied[1]]

    def reserve(self, members: BucketLayout, like: np.ndarray) -> None:
        """Allocate the state of a bucket's parameters.

        Args:
            members: the bucket's table.
            like: an array in the memory, host or GPU, where the state is to be.

        Raises:
            MemoryError: there is not enough memory.
        """
        self._table_state(members, like)
        self.multiply(members)

    def check(self, members: BucketLayout) -> None:
        """Check that loaded states of these parameters have the parameters' shapes.

        Raises:
            ValueError: one of them does not.
        """
        for slot, arrays in self._state.items():
            _check_shapes(slot, arrays, members)

    def masters(self, members: BucketLayout, like: np.ndarray) -> np.ndarray | None:
        """Return the float32 masters of a table's 16-bit parameters, flat; None if none are kept.

        A parameter that something other than the optimizer has changed is copied to its master first.
        """
        if not (self.multi_precision and members.narrow):
            return None
        flat = self._table_state(members, like).slots[MASTER]
        members.update_in(flat, master=True)
        kernels.widen(members, flat)
        return flat

    def _table_state(self, members: BucketLayout, like: np.ndarray) -> TableState:
        """Return the memory kept for a table; states that the parameters had elsewhere are moved into it, by name."""
        if members.key not in self._table_states:
            self.check(members)
            self._table_states = {
                k: f for k, f in self._table_states.items() if set(f.members.names).isdisjoint(members.names)
            }
            slots = [slot for slot in self.slots if slot != MASTER or members.narrow]
            # moved: all stay alive until the last one has been copied
            adopted, moved = self._adopted.pop(members.key, None), list[np.ndarray]()
            state = {
                slot: device.zeros(members.extent, members.dtype, like)
                if slot != MASTER or adopted is None
                else adopted
                for slot in slots
            }
            for slot, flat in state.items():
                for i, name in enumerate(members.names):
                    view = members.view(flat, i)
                    if name in self._state[slot]:
                        moved.append(self._state[slot][name])
                        device.copy(view, moved[-1])
                    self._state[slot][name] = view
            if moved:
                device.wait_for_last_use(moved[-1])
            self._table_states[members.key] = TableState(members, state, self.allocate_scratch(members, like))
            self.version += 1
        return self._table_states[members.key]

    def adopt_masters(self, members: BucketLayout, flat: np.ndarray) -> None:
        """Keep the masters of a table without states, once it has some, in this memory of zeros."""
        self._adopted[members.key] = flat

    def allocate_scratch(self, members: BucketLayout, like: np.ndarray) -> dict[str, np.ndarray]:
        """Allocate the memory, other than the state, that updates of a new table need; by name."""
        wide = self._wide
        fits = wide is not None and wide.size >= members.extent and device.gpu_of(wide) == device.gpu_of(like)
        if members.narrow and not self.multi_precision and not fits:
            self._wide = device.persistent_zeros(members.extent, members.dtype, like)
        return {}


class ElementwiseOptimizer(Optimizer):
    """A base class of optimizers whose rule updates every entry by itself, with one kernel call for each part."""

    def update_parts(
        self,
        table_state: TableState,
        parts: Sequence[Part],
        skip_flag: np.ndarray | None,
        sum_over_ranks: SumOverRanks | None,
    ) -> None:
        for members, grad in parts:
            self.run_kernel(members, grad, table_state.slots, self._now, skip_flag)

    @abc.abstractmethod
    def run_kernel(self, members: BucketLayout, grad: np.ndarray, slots: dict[str, np.ndarray], *rest: Any) -> None:
        """Call the rule's kernel for one part of a table."""


def _check_shapes(slot: str, arrays: Mapping[str, np.ndarray], members: BucketLayout) -> None:
    for name, shape in zip(members.names, members.shapes, strict=True):
        if name in arrays and arrays[name].shape != shape:
            raise ValueError(
                f"state {slot} of {name} must be shaped {shape}, as the parameter, got {arrays[name].shape}"
            )
