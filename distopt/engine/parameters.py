"""From a "loss" to gradients by parameter name, in the order of their arrival."""

import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from distopt import device
from distopt.checks import suggest
from distopt.device import describe, is_array, is_tensor, remedy
from distopt.kernels.layout import FORMATS, ArrayMatcher
from distopt.kernels.pairs import PairMatcher
from distopt.optim.adapters.base import Known

FLOATS = (np.dtype(np.float32), np.dtype(np.float64))
PARAMETERS = (*FLOATS, *FORMATS)
NAMED_TENSORS = "give it with a name, as model.named_parameters() does"
# Passes on the pairs of a loss, as they come.
Watch = Callable[[Iterable[Any]], Iterable[Any]]
LOSSES = (
    "loss must be an iterable of (param, grad) pairs (a generator too), a callable that returns one, "
    "or an object whose backward() yields one"
)


class SupportsBackward(Protocol):
    """A loss that has its gradients itself."""

    def backward(self) -> Iterable[Sequence[Any]]:
        """(param, grad) pairs, in the order in which they come."""


Loss = Iterable[Sequence[Any]] | Callable[..., Any] | SupportsBackward


class Parameter:
    """A named parameter: ``data`` is what the optimizer changes in place.

    ``grad`` is *fresh* from when it is assigned, or ``touch()`` says that it was written to, until a ``Trainer`` has
    used it.  ``grad_req``: what the backward pass does with it: 'write', 'add' (who zeroes it is the user), or 'null'
    (there is none; a Trainer leaves the parameter out).  ``lr_mult`` and ``wd_mult`` multiply the learning rate and the
    weight decay of distopt's optimizers from the next step on, the same on all ranks; one that is not 1 takes the place
    of the optimizer's own ``lr_mult`` or ``wd_mult`` by name.

    Raises ValueError for any other ``grad_req``.

    Example:
        >>> import numpy as np
        >>> Parameter("w", np.zeros((2, 3)))
        Parameter('w', an array (2, 3) float64)
    """

    REQUESTS = ("write", "add", "null")

    def __init__(
        self,
        name: str,
        data: np.ndarray,
        grad: np.ndarray | None = None,
        grad_req: str = "write",
        lr_mult: float = 1.0,
        wd_mult: float = 1.0,
    ):
        if grad_req not in self.REQUESTS:
            raise ValueError(f"{name}: grad_req must be one of {self.REQUESTS}, got {grad_req!r}")
        self.name, self.data, self.grad, self.grad_req = name, data, grad, grad_req
        self.lr_mult, self.wd_mult = lr_mult, wd_mult

    @property
    def grad(self) -> np.ndarray | None:
        """The gradient of the loss: an array like ``data``, None before there is one."""
        return self._grad

    @grad.setter
    def grad(self, grad: np.ndarray | None) -> None:
        self._grad, self.fresh = grad, grad is not None

    def touch(self) -> None:
        """Note that the array ``grad`` has been written to; ValueError if there is none."""
        if self._grad is None:
            raise ValueError(f"{self.name}: grad must be an array to be touched, got None; assign the gradient")
        self.fresh = True

    def __repr__(self) -> str:
        return f"Parameter({self.name!r}, {describe(self.data)})"


class Gradient(NamedTuple):
    """One parameter's gradient, checked."""

    param: Any
    value: np.ndarray
    grad: np.ndarray | None


def iterable(loss: Any) -> Iterable[Any]:
    """Return the (param, grad) pairs of a loss; raise TypeError, before its backward(), for what is no loss."""
    if callable(getattr(loss, "backward", None)) and not remedy(loss):
        loss = loss.backward()
    elif callable(loss):
        loss = loss()
    if isinstance(loss, list | tuple | Iterator):
        return loss
    if not isinstance(loss, Iterable) or is_array(loss) or remedy(loss):
        raise TypeError(f"{LOSSES}, got {describe(loss)}")
    return loss


class LazyPairs(list[Any]):
    """The pairs of a loss that computes one after the other, as a generator does: it may write over what it yielded."""


class Arrays:
    """A list of arrays in plan order; ``version`` grows when one of them becomes another object."""

    def __init__(self) -> None:
        self.arrays: list[np.ndarray | None] = []
        # An array's address, 0 for None.
        self.addresses = np.empty(0, np.uintp)
        self.version = 0

    def replace(self, arrays: list[np.ndarray | None], addresses: np.ndarray | None = None) -> None:
        """Replace the list."""
        if addresses is None:
            addresses = np.array([0 if a is None else device.address(a) for a in arrays], np.uintp)
        self.arrays, self.addresses, self.version = arrays, addresses, self.version + 1


class GradientCollector:
    """Who is who: all gradients of a loss by parameter name, the same names at every step."""

    # A name is `param.name`; a bare array gets its position on the first step as a name, and is recognised by identity
    # afterwards. A step that brings the parameters of the last one in the same order costs a tenth of a microsecond for
    # each; any other is looked at by name.

    def __init__(self, allow_missing: bool = False, gpu: int | None = None):
        self.allow_missing, self.gpu = allow_missing, gpu
        # The first step's parameters, in its order, as they were last seen, and their arrays and gradients.
        self.order: dict[str, Known] = {}
        self.values, self.grads = Arrays(), Arrays()
        # Holds the arrays and tensors, so that an id is not used again.
        self._bare: dict[int, tuple[str, Any]] = {}
        # The last step's parameters and their arrays, and their gradients as they arrived.
        self._last = PairMatcher([], [])
        self._arrived: list[Any] = []
        # Valid as long as these live.
        self._arrived_ids = b""
        # Where each of the plan is among those that arrive, None if in order.
        self._places: list[int] | None = None
        self._layout = ArrayMatcher([])
        # The version of ``grads`` of which no two are in one place.
        self._apart = -1

    def identify(self, param: Any) -> tuple[str, np.ndarray]:
        """Return the name and the array of a parameter; raise TypeError for what is none."""
        if is_array(param) or is_tensor(param):
            if id(param) not in self._bare:
                if self.order:
                    what, remedy_ = ("array", "use distopt.Parameter") if is_array(param) else ("tensor", NAMED_TENSORS)
                    raise ValueError(f"a bare {what} must be one of the first step, got another one; {remedy_}")
                self._bare[id(param)] = f"parameter {len(self._bare)}", param
            name, array = self._bare[id(param)]
            return name, device.array_of(array)
        if remedy(param) or not hasattr(param, "name") or not hasattr(param, "data"):
            raise TypeError(
                f"a parameter must be an array, or have name and data as a distopt.Parameter, got {describe(param)}"
            )
        if not isinstance(param.name, str):
            raise TypeError(f"a parameter's name must be a string, got {param.name!r}")
        return param.name, device.array_of(param.data)

    def collect(self, loss: Any, *watches: Watch) -> None:
        """Take in the gradients of a loss, whose pairs pass ``watches`` on their way; raise for the first wrong one."""
        arrived = self.read(loss, *watches)
        recognised = self._recognise(arrived)
        if not recognised:
            by_name = self._read(arrived, self.order)
            if isinstance(arrived, LazyPairs):
                _refuse_overwritten(list(by_name), [grad for _, grad in arrived])
            self._take(by_name)
        changed = self._layout.changed()
        if changed is not None:
            # An array is the object that it was, but another one in place, as read-only.
            name, known = list(self.order.items())[changed]
            _checked_value(name, known.value, self.gpu)
            raise ValueError(
                f"{name}: the parameter's array must keep its dtype and shape, got {describe(known.value)} in place; "
                "assign another array instead"
            )
        if recognised and isinstance(arrived, LazyPairs):
            self._refuse_reused()

    def collect_again(self, loss: Any, *watches: Watch) -> None:
        """Take in the gradients of the same parameters that another rank has; raise for the first wrong one."""
        first = self.values.addresses
        self.collect(loss, *watches)
        for k in np.flatnonzero(self.values.addresses != first):
            name, known = list(self.order.items())[k]
            if known.value.nbytes:
                raise ValueError(
                    f"{name} must be the first rank's array, got another one; the ranks of a process have one model, "
                    "whose parameters all their losses give"
                )

    def read(self, loss: Any, *watches: Watch) -> list[Any]:
        """Return the pairs of a loss; of one that yields without end, no more than show that one is given twice."""
        pairs = iterable(loss)
        complete = isinstance(pairs, list | tuple) and not isinstance(pairs, LazyPairs)
        for watch in watches:
            pairs = watch(pairs)
        if complete:
            return list(pairs)
        return LazyPairs(itertools.islice(pairs, len(self.order) + 1) if self.order else _until_repeated(pairs))

    def enroll(self, params: Iterable[Any]) -> list[str]:
        """Register parameters, which come without gradients, and return their names; raises what ``collect`` raises."""
        return self._register(params, self.order)

    def admit(self, params: Iterable[Any]) -> list[str]:
        """Register all parameters in another order, also such that were not in the first step."""
        names = self._register(params, ())
        for name in names:
            self.order[name] = self.order.pop(name)
        self._learn({})
        return names

    def _register(self, params: Iterable[Any], known: Collection[str]) -> list[str]:
        by_name = self._read(((param, None) for param in params), known)
        self._refuse_new_overlap(by_name)
        self._learn(by_name)
        # The arrays that were there then may be others now.
        self._last = PairMatcher([], [])
        self._places = None
        return list(by_name)

    @property
    def missing(self) -> int:
        """The parameters without a gradient in this step, as the bits of a number: the first one's is the lowest."""
        return sum(1 << k for k, grad in enumerate(self.grads.arrays) if grad is None) if self.allow_missing else 0

    def last_arrival(self, places: Sequence[int]) -> int:
        """Return the position in the last step's loss of the last of these, by their places in the plan."""
        return max(places if self._places is None else [self._places[k] for k in places], default=-1)

    def gradients_if_unchanged(self, pairs_so_far: Sequence[Any], places: Sequence[int]) -> list[Any] | None:
        """Return the gradients at these places, if they came with the last step's parameters and arrays; else None."""
        arrived = [self._places[k] if self._places else k for k in places]
        try:
            pairs = [(*pairs_so_far[k], self._last.params[k], self._last.values[k]) for k in arrived]
            same = all(p is last and (value is last or p.data is value) for p, _, last, value in pairs)
        except (TypeError, ValueError, IndexError):
            # A loss gave no pairs.
            return None
        return [grad for _, grad, _, _ in pairs] if same else None

    def _recognise(self, pairs: list[Any]) -> bool:
        """Take in gradients that come with the parameters of the last step, in its order; False if they do not."""
        ids = self._last.gradient_ids(pairs)
        if ids is None:
            return False
        arrived_ids = ids.tobytes()
        if arrived_ids == self._arrived_ids:
            return True
        arrived = [pair[1] for pair in pairs]
        grads = arrived
        if self._places is not None:
            grads, ids = [arrived[k] for k in self._places], ids[self._places]
        addresses = self._layout.addresses(grads, ids)
        if addresses is None:
            return False
        self._arrived, self._arrived_ids = arrived, arrived_ids
        self.grads.replace(grads, addresses)
        return True

    def _refuse_reused(self) -> None:
        """ValueError for two gradients at one address, of a loss that may have written over the first."""
        if self._apart == self.grads.version:
            return
        repeated = self._layout.repeated(self.grads.addresses)
        if repeated:
            raise _one_memory(*(list(self.order)[k] for k in repeated))
        self._apart = self.grads.version

    def _take(self, by_name: dict[str, Gradient]) -> None:
        """Take in gradients by name."""
        missing = [n for n in self.order or by_name if n not in by_name or by_name[n].grad is None]
        if missing and not self.allow_missing:
            raise ValueError(f"no gradient for {', '.join(missing[:5])}; allow_missing=True would take zeros")
        absent = {n: self.order[n].param for n in missing if n not in by_name}
        arrived = list(by_name)
        by_name |= {n: self._checked(n, param, self.identify(param)[1], None) for n, param in absent.items()}
        self._refuse_new_overlap(by_name)
        self._learn(by_name)
        self.grads.replace([by_name[n].grad for n in self.order])
        known = [] if missing else list(by_name.values())
        self._last = PairMatcher([g.param for g in known], [g.value for g in known])
        self._arrived, self._arrived_ids = [], b""
        place = {name: k for k, name in enumerate(arrived)}
        self._places = None if missing or arrived == list(self.order) else [place[n] for n in self.order]

    def _learn(self, by_name: dict[str, Gradient]) -> None:
        """Make these the parameters from now on."""
        self.order.update({n: Known(g.param, g.value) for n, g in by_name.items()})
        values = [known.value for known in self.order.values()]
        if len(values) != len(self.values.arrays) or not all(map(operator.is_, values, self.values.arrays)):
            self.values.replace(list(values))
            self._layout = ArrayMatcher(values)

    def _read(self, pairs: Iterable[Any], known: Collection[str]) -> dict[str, Gradient]:
        """Gradients by name, of the parameters that are ``known``; of any if none is."""
        by_name: dict[str, Gradient] = {}
        for pair in pairs:
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise TypeError(f"{LOSSES}, got {describe(pair)} among the pairs")
            param, grad = pair
            name, value = self.identify(param)
            if known and name not in known:
                raise ValueError(f"{name}: not a parameter of the first step{suggest(name, known)}")
            if name in by_name:
                places = f"positions {list(by_name).index(name)} and {len(by_name)}"
                raise ValueError(f"{name}: given twice, at {places}; names must be unique")
            by_name[name] = self._checked(name, param, value, grad)
        return by_name

    def _refuse_new_overlap(self, by_name: dict[str, Gradient]) -> None:
        """Two parameters in one memory would be updated twice; looked at when an array is another than last time."""
        if all(n in self.order and g.value is self.order[n].value for n, g in by_name.items()):
            return
        values = {n: known.value for n, known in self.order.items()} | {n: g.value for n, g in by_name.items()}
        spans = sorted((device.address(v), v.nbytes, name) for name, v in values.items() if v.nbytes)
        for (start, nbytes, name), (other_start, _, other) in itertools.pairwise(spans):
            if other_start < start + nbytes:
                raise ValueError(
                    f"{name} and {other} share memory; give tied parameters once, with the summed gradient"
                )

    def _checked(self, name: str, param: Any, value: Any, grad: Any) -> Gradient:
        """The gradient of a parameter, whose array is looked at only if it is another object than last time."""
        last = self.order.get(name)
        if last is None or value is not last.value:
            value = _checked_value(name, value, self.gpu)
        if last is not None and (value.shape, value.dtype) != (last.value.shape, last.value.dtype):
            was, now = f"{last.value.shape} {last.value.dtype}", f"{value.shape} {value.dtype}"
            raise ValueError(f"{name}: the parameter must be {was}, as on the first step, got {now}")
        return Gradient(param, value, checked_gradient(name, value, grad))

    def forget(self, but: Collection[str] = ()) -> None:
        """Forget the parameters of a plan that failed, but for those of the one before."""
        for name in [name for name in self.order if name not in but]:
            del self.order[name]
        self._bare = {key: bare for key, bare in self._bare.items() if bare[0] in but}
        self._learn({})
        self._last, self._places = PairMatcher([], []), None


def _until_repeated(pairs: Iterable[Any]) -> Iterator[Any]:
    """Pairs, until one comes whose parameter came before, or a second thing that is no pair."""
    seen: set[object] = set()
    for pair in pairs:
        yield pair
        param = pair[0] if isinstance(pair, tuple | list) and pair else None
        name = getattr(param, "name", None)
        key = name if isinstance(name, str) else type(pair) if param is None else id(param)
        if key in seen:
            return
        seen.add(key)


def _one_memory(first: str, second: str) -> ValueError:
    return ValueError(
        f"{first} and {second} have gradients in the same memory: what a generator yields must stay as it is until the "
        "step returns; yield arrays of their own (grad.copy()), or give a list, if they are meant to be equal"
    )


def _refuse_overwritten(names: Sequence[str], grads: Sequence[Any]) -> None:
    """ValueError for gradients of a generator that overlap, of which the first may be gone."""
    # Of strided ones, which may be interleaved, the first elements count.
    arrays = [(name, g) for name, g in zip(names, grads, strict=True) if is_array(g) and g.size]
    starts = np.array([device.address(g) for _, g in arrays], np.uintp)
    lengths = np.array([g.nbytes if g.flags.c_contiguous else g.itemsize for _, g in arrays], np.uintp)
    order = np.argsort(starts, kind="stable")
    inside = np.flatnonzero(starts[order][1:] < (starts + lengths)[order][:-1])
    if inside.size:
        first, second = sorted(order[inside[0] : inside[0] + 2].tolist())
        raise _one_memory(arrays[first][0], arrays[second][0])


def _checked_value(name: str, value: Any, gpu: int | None) -> np.ndarray:
    if not is_array(value) or value.dtype not in PARAMETERS or not value.dtype.isnative:
        dtypes = ", ".join(map(str, PARAMETERS))
        raise TypeError(f"{name}: a parameter must be an array of {dtypes} in native byte order, got {describe(value)}")
    if not value.flags.c_contiguous or not device.writable(value):
        raise ValueError(f"{name}: a parameter must be C-contiguous and writable, got {describe(value)}")
    device.check_gpu(f"{name}: the parameter", value, gpu)
    return value  # type: ignore[no-any-return]


def checked_gradient(name: str, value: np.ndarray, grad: Any) -> np.ndarray | None:
    """The gradient, copied only if it is not contiguous; TypeError or ValueError if it is not like the parameter."""
    if grad is None:
        return None
    if isinstance(grad, np.generic):
        # A 0-d parameter's gradient is often a numpy scalar.
        grad = np.asarray(grad)
    grad = device.array_of(grad)
    if not is_array(grad):
        raise TypeError(f"{name}: a gradient must be an array, got {describe(grad)}")
    if grad.dtype != value.dtype or not grad.dtype.isnative:
        raise TypeError(f"{name}: the gradient must be of the parameter's dtype {value.dtype}, got {describe(grad)}")
    if grad.shape != value.shape:
        raise ValueError(f"{name}: the gradient must be of the parameter's shape {value.shape}, got {grad.shape}")
    device.check_gpu(f"{name}: the gradient", grad, device.gpu_of(value))
    contiguous: np.ndarray = device.contiguous(grad)
    return contiguous
