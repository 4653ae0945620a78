"""The base class of adapters, with all that ``DistOpt`` asks of an optimizer."""

import abc
import itertools
from collections.abc import Collection, Iterable, Mapping
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from distopt.buckets import Bucket, BucketSet, Reduced
from distopt.checkpoint.foreign import has_named, typed
from distopt.optim import OptimizerWrapper
from distopt.optim.adapters.first_update import FirstUpdate
from distopt.optim.foreign import state_methods
from distopt.optim.optimizer import Optimizer, OwnedSlots, Unshard, UpdatingRanks

# attributes that hold it
MOMENTUM = "momentum", "beta_1", "beta1"


class Known(NamedTuple):
    """A parameter as it was last seen."""

    # the caller's object
    param: Any
    # its array
    value: np.ndarray


class OptimizerAdapter(abc.ABC):
    """A base class of adapters, which hand means of gradients to an optimizer, by default one after the other."""

    # whether the optimizer can update a shard of a bucket, which cuts through parameters
    updates_shards = False
    # whether its kernels read the flag that refuses an update
    reads_skip_flag = False
    # a number that grows when its states move to other memory
    version = 0
    # whether every update calls the same kernels
    same_each_step = True
    # what an update calls that no CUDA graph can record; "" if there is nothing
    unrecorded = ""
    # whether a rank updates whole parameters where ranks share them, and so reads other ranks' shards of sums
    whole = False

    def __init__(self, opt: Any):
        self.opt = opt
        self._first = None if isinstance(opt, Optimizer | OptimizerWrapper) else FirstUpdate(opt)
        innermost = self._innermost
        # whether each rank computes a part of an update, and the others get it
        self.shares_work = isinstance(innermost, Optimizer) and innermost.sharded

    def apply(self, name: str, param: Any, value: np.ndarray, mean: np.ndarray) -> None:
        """Update one parameter by the mean of its gradients."""
        if self._first is None:
            self.update_one(name, param, value, mean)
        else:
            self._first.look(param, value, mean)
            self._first.check_returned(name, value, self.update_one(name, param, value, mean))

    @abc.abstractmethod
    def update_one(self, name: str, param: Any, value: np.ndarray, mean: np.ndarray) -> Any:
        """Update one parameter by the optimizer, and return what its method returned."""

    def check(self, buckets: BucketSet) -> None:  # noqa: B027  other libraries' optimizers have no such check
        """Raise an error now that would otherwise come in the middle of an update with these buckets."""

    def check_step(self, some: bool) -> None:
        """Raise ValueError if ranks that share the work of an update would have to share one that comes one by one."""
        opt = self._innermost
        if some or opt is not self.opt:
            where = "where a step updates some parameters only" if some else "inside of a wrapper"
            raise ValueError(f"sharded of {type(opt).__name__} must be False {where}, got True")

    def reserve(self, buckets: BucketSet) -> None:  # noqa: B027  other libraries' optimizers allocate by themselves
        """Allocate the memory that updates with these buckets need; MemoryError if there is not enough."""

    def tables(self) -> Iterable[OwnedSlots]:
        """Return what the optimizer keeps of the parameters, for distopt's optimizers."""
        return ()

    def masters(self, bucket: Bucket) -> np.ndarray | None:
        """Return the float32 values of a bucket's 16-bit parameters, flat and up to date; None if none are kept."""
        return None

    def numbers(self) -> list[str]:
        """Return a text for each number that all ranks must have alike for the next update."""
        return []

    def update(
        self,
        buckets: BucketSet,
        order: Mapping[str, Known],
        sums: Iterable[Reduced],
        scale: float,
        skip_flag: np.ndarray | None = None,
        ranks: UpdatingRanks | None = None,
    ) -> None:
        """Update all parameters, in backward order."""
        self.one_by_one(buckets, order, sums, scale)

    def one_by_one(self, buckets: BucketSet, order: Mapping[str, Known], sums: Iterable[Reduced], scale: float) -> None:
        """Update the parameters in ``order``, one after the other, and no others."""
        means: dict[str, np.ndarray] = {}
        for bucket, total in zip(buckets, sums, strict=True):
            means |= bucket.mean(total, scale)
        for name, parameter in order.items():
            self.apply(name, parameter.param, parameter.value, means[name])

    def skips(self, only: Collection[str] | None) -> bool:
        """Tell if an update that is refused changes nothing, although the host makes it."""
        return self.reads_skip_flag and only is None

    def momentum(self) -> str:
        """Return a text for the momentum that the optimizer applies at its next update; '' if there is none."""
        innermost = self._innermost
        for opt, name in itertools.product((innermost, getattr(innermost, "otherwise", None)), MOMENTUM):
            setting = getattr(opt, name, None)
            value = setting(opt.step_counter) if isinstance(opt, Optimizer) and callable(setting) else setting
            if isinstance(value, Real) and value:
                return f"{type(opt).__name__}'s {name}={value}"
        return ""

    def follow(self, order: Mapping[str, Known]) -> None:
        """Take the multipliers that parameters have themselves for the next update (``Optimizer.follow``)."""
        if isinstance(self._innermost, Optimizer):
            self._innermost.follow([(name, known.param) for name, known in order.items()])

    def multiply(self, buckets: BucketSet) -> None:
        """Write each parameter's factors for the next update into the tables, for compressors with weight decay."""
        opt = self._innermost
        for bucket in buckets if isinstance(opt, Optimizer) else ():
            opt.multiply(bucket.parameters)

    @property
    def _innermost(self) -> Any:
        """The optimizer inside all wrappers."""
        opt = self.opt
        while isinstance(opt, OptimizerWrapper):
            opt = opt.opt
        return opt

    def step(self) -> None:
        """Complete an update, after all parameters have been updated."""
        if hasattr(self.opt, "step"):
            self.opt.step()
        if self._first and self._first.finish():
            self._first = None

    def prepare(self, scale: float, gpu: int | None) -> None:  # noqa: B027  only kernels that look read these numbers
        """Write the numbers of the next update where kernels read them."""

    def take_back(self) -> None:  # noqa: B027  others are stepped only after the decision
        """Undo the last ``step``, whose update was refused on the GPU."""

    def state_dict(self, unshard: Unshard | None = None) -> Any:
        """Return the optimizer's states, None if it has no ``state_dict`` or ``get_states``."""
        save = state_methods(self.opt).save
        return save() if save else None

    @property
    def has_state(self) -> bool:
        """Whether the optimizer has ``state_dict`` or ``get_states``."""
        return state_methods(self.opt).save is not None

    def load_state_dict(self, state: Any) -> None:
        """Hand states back to the optimizer; without effect if it cannot load any, or if they are None."""
        load = state_methods(self.opt).load
        if load and state is not None:
            # Named tuples become the optimizer's own classes, where it has states already.
            load(typed(state, self.state_dict()) if has_named(state) else state)

    def __repr__(self) -> str:
        return f"optimizer {type(self.opt).__name__}"


class ApplyAdapter(OptimizerAdapter):
    """A base class of adapters for optimizers with ``apply(name, value, grad)``."""

    def update_one(self, name: str, param: Any, value: np.ndarray, mean: np.ndarray) -> Any:
        return self.opt.apply(name, value, mean)
