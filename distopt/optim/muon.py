"""The Muon optimizer."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from distopt import device, kernels
from distopt.buckets import Reduced, Shard, local_shard, unsharded
from distopt.checks import check_bool, check_int
from distopt.kernels.layout import BucketLayout
from distopt.optim.adamw import AdamW
from distopt.optim.exclude import Exclude, described, predicate
from distopt.optim.optimizer import (
    Optimizer,
    OwnedSlots,
    Part,
    Pieces,
    State,
    SumOverRanks,
    TableState,
    Unshard,
    UpdatingRanks,
)
from distopt.optim.schedules import Number

Buckets = Iterable[tuple[BucketLayout, Reduced]]
# of x, x^3 and x^5: singular values from 0.002 to 1 come near 1 in 5 steps
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
# added to the norm that is divided by
EPSILON = 1e-7
# bytes, of which a matrix in a message takes a multiple
ROOM = 64
# options that hold for all parameters, and what they are if nobody gives them
COMMON: dict[str, Any] = {
    "rescale_grad": 1.0,
    "clip_gradient": math.inf,
    "lr_mult": {},
    "wd_mult": {},
}


# what is not finite stays so, as in every kernel
@np.errstate(invalid="ignore", over="ignore")
def orthogonalized(x: np.ndarray, steps: int) -> np.ndarray:
    """Return a matrix with the singular vectors of x, and singular values between 0.5 and 1.5 where they can be."""
    # Newton and Schulz's iteration, x <- a x + b (x x^T) x + c (x x^T)^2 x, with the coefficients of Jordan et al.
    # (2024), which raise a singular value s of x / |x|_F to more than 0.5 in five steps if s is at least 0.002.  The
    # products are those of the BLAS that numpy or cupy calls.
    a, b, c = COEFFICIENTS
    tall = x.shape[0] > x.shape[1]
    x = device.contiguous(x.T) if tall else x
    for _ in range(steps):
        gram = x @ x.T
        # `gram` times its transpose, which it equals: half of the products.
        x = a * x + (b * gram + c * (gram @ gram.T)) @ x
    return device.contiguous(x.T) if tall else x


class Run(NamedTuple):
    """A matrix, or neighbours in a bucket that are none."""

    # its section of the bucket's table
    members: BucketLayout
    # of its gradients
    total: Reduced
    is_matrix: bool


class Muon(Optimizer):
    """A Muon optimizer (Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024).

    A matrix takes steps along its momentum made orthogonal: ``m = momentum m + (1 - momentum) g`` and
    ``u = momentum m + (1 - momentum) g``, or m itself without ``nesterov``; ``x = u / (|u|_F + 1e-7)``, transposed if
    it has more rows than columns; ``steps`` times ``x = a x + b (x x^T) x + c (x x^T)^2 x``; then
    ``w -= lr (max(1, rows / columns)^0.5 x + weight_decay w)``.  Filters of a convolution, O x I x k x k, are a matrix
    of O rows, with its factor, which is 1 in Jordan's code.  The singular values of x end between 0.5 and 1.5 if they
    begin at 0.002 at least, so a matrix moves as far whatever the size of its gradients.  The state is ``moments``, m.

    Names say which parameters are such matrices, since shapes cannot: embeddings and the last layer are better left
    out.  Those that ``exclude`` names, and all with fewer than two dimensions, are updated by the optimizer
    ``otherwise``, as if it were alone.

    The matrix products are those of numpy's BLAS, or of cupy's, so that other than with every other rule the last bits
    depend on the machine.  Where ranks run on machines that differ, ``sharded`` keeps them equal.  With
    ``DistOpt.parameter_views`` matrix number j, with its momentum, belongs to rank j modulo the ranks in any case.

    Args:
        lr: the learning rate, at least 0: a number, or a schedule of k, the number of updates applied so far.
        momentum: in [0, 1], a number or a schedule.
        nesterov: False for u = m.
        weight_decay: the decoupled decay of matrices, at least 0, a number or a schedule.  ``torch.optim.Muon`` has 0.1
            by default.
        steps: the number of Newton-Schulz iterations, at least 1.
        exclude: parameters that are left to ``otherwise``: a predicate on the name, or a list of suffixes.
        otherwise: one of distopt's optimizers, with learning rate, decay and schedules of its own; None for
            ``AdamW()``.  ``rescale_grad``, ``clip_gradient``, ``lr_mult`` and ``wd_mult`` are Muon's to give, and hold
            for all parameters.
        sharded: True lets rank j modulo the ranks alone orthogonalize matrix number j; the ranks gather the results,
            once in an update, and all have the same bits.  On one machine these are the bits without it.  Steps that
            update with a rank's own gradients (partial ones) gather nothing; wrappers, and steps that update some
            parameters only, are refused.
        **options: the keyword arguments that every ``Optimizer`` takes, such as ``clip_gradient``.

    Raises:
        TypeError: ``otherwise`` is no optimizer of distopt's, or another Muon, or ``steps`` is no integer.
        ValueError: a hyper-parameter is negative, not finite or out of its range, or ``otherwise`` has one of the
            options that are Muon's to give.

    Example:
        >>> import numpy as np
        >>> from distopt.optim import Muon
        >>> opt = Muon(lr=0.1, exclude=["embedding"])
        >>> w, bias = np.zeros((2, 2)), np.zeros(2)
        >>> opt.apply("w", w, np.array([[4.0, 0.0], [0.0, 1e-2]]))
        >>> opt.apply("bias", bias, np.array([4.0, 1e-2]))
        >>> opt.step()
        >>> w.round(2).tolist(), bias.round(4).tolist()
        ([[-0.07, 0.0], [0.0, -0.1]], [-0.001, -0.001])
    """

    slots, struct, whole = ("moments",), "Muon", True
    unrecorded = "cuBLAS"
    planned = ("exclude", "left_out", "otherwise")
    options = (*Optimizer.options, "nesterov", "steps", "sharded", *planned)
    hypers = Optimizer.hypers | {"momentum": (0.0, 1.0)}

    def __init__(
        self,
        lr: Number = 0.02,
        momentum: Number = 0.95,
        nesterov: bool = True,
        weight_decay: Number = 0.0,
        steps: int = 5,
        exclude: Exclude = (),
        otherwise: Optimizer | None = None,
        sharded: bool = False,
        **options: Any,
    ):
        masters = options.get("multi_precision", False)
        self.otherwise = _checked(AdamW(multi_precision=masters) if otherwise is None else otherwise, masters)
        super().__init__(lr, weight_decay, **options)
        self.momentum, self.nesterov = momentum, check_bool("nesterov", nesterov)
        self.steps, self.sharded = check_int("steps", steps, least=1), check_bool("sharded", sharded)
        self._excluded = predicate(exclude)
        self.exclude = described(self._excluded)
        # of the predicate, by name
        self._answers: dict[str, bool] = {}
        # of a bucket, by its table's key
        self._masters: dict[object, tuple[BucketLayout, np.ndarray]] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, of ``otherwise`` too if it holds for all parameters."""
        super().__setattr__(name, value)
        if name in COMMON:
            setattr(self.otherwise, name, value)

    @property
    def left_out(self) -> tuple[str, ...]:
        """The excluded names among the parameters seen so far."""
        return tuple(sorted(name for name, excluded in self._answers.items() if excluded))

    def rule_numbers(self) -> dict[str, float]:
        momentum = self.at("momentum")
        return {"momentum": momentum, "one_minus_momentum": 1.0 - momentum}

    # -- an update

    def prepare(self, scale: float, gpu: int | None = None) -> None:
        super().prepare(scale, gpu)
        self.otherwise.prepare(scale, gpu)

    def update_buckets(
        self,
        buckets: Buckets,
        skip_flag: np.ndarray | None = None,
        ranks: UpdatingRanks | None = None,
    ) -> None:
        if ranks is None or not (ranks.shared or self.sharded):
            super().update_buckets(buckets, skip_flag)
        elif ranks.shared:
            self._update_own(buckets, ranks)
        else:
            self._update_and_gather(buckets, skip_flag, ranks)

    def update_bucket(
        self,
        members: BucketLayout,
        total: Pieces,
        skip_flag: np.ndarray | None = None,
        sum_over_ranks: SumOverRanks | None = None,
    ) -> None:
        for run in self._runs([(members, [Shard(*piece) for piece in total])]):
            if run.is_matrix:
                self._move(run.members, self._orthogonal(self._direction(run, skip_flag)), skip_flag)
            else:
                self.otherwise.update_bucket(run.members, run.total, skip_flag, sum_over_ranks)

    def _update_own(self, buckets: Buckets, ranks: UpdatingRanks) -> None:
        """Update this rank's matrices, and its shard of all else, in memory that all ranks share."""
        # A matrix's momentum is kept by the rank that updates it; but all ranks have the tables of all, in one order,
        # to collect it from.
        for run, owner in self._owned_runs(buckets, ranks):
            if owner is None:
                shard = local_shard(run.total, ranks.rank, ranks.size)
                self.otherwise.update_bucket(run.members, shard, None, ranks.sum)
                continue
            self._table_state(run.members, run.total[0][2])
            if owner == ranks.rank:
                self._move(run.members, self._orthogonal(self._direction(run, None)), None)

    def _update_and_gather(self, buckets: Buckets, skip_flag: np.ndarray | None, ranks: UpdatingRanks) -> None:
        """Update all parameters, along directions of which this rank computes its own, and gathers the others."""
        # by owner
        matrices: list[list[BucketLayout]] = [[] for _ in range(ranks.size)]
        own: list[np.ndarray] = []
        for run, owner in self._owned_runs(buckets, ranks):
            if owner is None:
                self.otherwise.update_bucket(run.members, run.total, skip_flag)
                continue
            # Every rank carries on every momentum.
            direction = self._direction(run, skip_flag)
            matrices[owner].append(run.members)
            if owner == ranks.rank:
                own.append(self._orthogonal(direction))
        if any(matrices):
            gathered = ranks.gather(_packed(own, direction), [sum(map(_room, tables)) for tables in matrices])
            for tables, packed in zip(matrices, gathered, strict=True):
                for members, x in zip(tables, _unpacked(packed, tables), strict=True):
                    self._move(members, x, skip_flag)

    def _direction(self, run: Run, skip_flag: np.ndarray | None) -> np.ndarray:
        """Carry on a matrix's momentum; return its update, as a matrix of Frobenius norm 1."""
        members, like = run.members, run.total[0][2]
        moments = self._table_state(members, like).slots["moments"]
        update = device.zeros(members.extent, members.dtype, like)
        partial, square = device.zeros(members.chunks, np.float64, like), device.zeros(1, np.float64, like)
        for number, of, grad in run.total:
            part = members.shard(number, of)
            kernels.muon_average(part, grad, moments, update, self.nesterov, partial, self._now, skip_flag)
        kernels.fold_partials(members, partial, square, 1)
        with np.errstate(invalid="ignore"):
            x: np.ndarray = update.reshape(_sides(members)) / (np.sqrt(square) + EPSILON).astype(members.dtype)
        return x

    def _orthogonal(self, direction: np.ndarray) -> np.ndarray:
        return orthogonalized(direction, self.steps).reshape(-1)

    def _move(self, members: BucketLayout, x: np.ndarray, skip_flag: np.ndarray | None) -> None:
        """Update a matrix along x, flat."""
        super().update_bucket(members, unsharded(x), skip_flag)

    def update_parts(
        self,
        table_state: TableState,
        parts: Sequence[Part],
        skip_flag: np.ndarray | None,
        sum_over_ranks: SumOverRanks | None,
    ) -> None:
        for members, x in parts:
            rows, columns = _sides(members)
            kernels.muon(members, x, math.sqrt(max(1.0, rows / columns)), self._now, skip_flag)

    def step(self) -> None:
        super().step()
        self.otherwise.step()

    def take_back(self) -> None:
        super().take_back()
        self.otherwise.take_back()

    # -- who updates what

    def _runs(self, buckets: Buckets) -> Iterator[Run]:
        """Yield the matrices of some buckets one by one, and what is between them."""
        for members, total in buckets:
            self._give_masters(members, total[0][2])
            for section, is_matrix in self._sections(members):
                yield Run(section, [Shard(number, of, section.part_of(flat)) for number, of, flat in total], is_matrix)

    def _owned_runs(self, buckets: Buckets, ranks: UpdatingRanks) -> Iterator[tuple[Run, int | None]]:
        """Yield the same, each matrix with the rank that it belongs to: its number in this update modulo the ranks."""
        numbers = itertools.count()
        for run in self._runs(buckets):
            yield run, next(numbers) % ranks.size if run.is_matrix else None

    def _sections(self, members: BucketLayout) -> Iterator[tuple[BucketLayout, bool]]:
        kinds = list(map(self._is_matrix, members.names, members.shapes))
        for is_matrix, rows in itertools.groupby(range(len(kinds)), kinds.__getitem__):
            first, *others = rows
            for begin in (first, *others) if is_matrix else (first,):
                yield members.section(begin, begin + 1 if is_matrix else first + len(others) + 1), is_matrix

    def _is_matrix(self, name: str, shape: tuple[int, ...]) -> bool:
        if name not in self._answers:
            self._answers[name] = bool(self._excluded(name))
        return len(shape) > 1 and 0 not in shape and not self._answers[name]

    # -- states

    def check(self, members: BucketLayout) -> None:
        """Check that loaded states fit these parameters, and ask ``exclude`` about their names.

        Both happen before anything moves, so that ranks can agree on the answers, which are in ``left_out``.
        """
        super().check(members)
        self.otherwise.check(members)
        self._answers |= {name: bool(self._excluded(name)) for name in members.names}

    def reserve(self, members: BucketLayout, like: np.ndarray) -> None:
        self._give_masters(members, like)
        for section, is_matrix in self._sections(members):
            if is_matrix:
                super().reserve(section, like)
            else:
                self.otherwise.reserve(section, like)

    def masters(self, members: BucketLayout, like: np.ndarray) -> np.ndarray | None:
        """Return the float32 masters of a table's 16-bit parameters, flat; None if none are kept.

        A parameter that something other than the optimizer has changed is copied to its master first.
        """
        if not (self.multi_precision and members.narrow):
            return None
        self.reserve(members, like)
        _, flat = self._masters[members.key]
        members.update_in(flat, master=True)
        kernels.widen(members, flat)
        return flat

    def _give_masters(self, members: BucketLayout, like: np.ndarray) -> None:
        """Allocate the masters of a bucket in one array, whichever of the two optimizers updates by them."""
        if not (self.multi_precision and members.narrow) or members.key in self._masters:
            return
        others = {k: m for k, m in self._masters.items() if set(m[0].names).isdisjoint(members.names)}
        flat = device.zeros(members.extent, members.dtype, like)
        self._masters = others | {members.key: (members, flat)}
        for section, is_matrix in self._sections(members):
            (self if is_matrix else self.otherwise).adopt_masters(section, section.part_of(flat))

    def get_states(self, unshard: Unshard = lambda members, flat, number: flat) -> State:
        """Return all that changes between steps.

        Args:
            unshard: makes the complete flat array of a table from this rank's, where each updates a part (see
                ``Optimizer``).  Collective then.

        Returns:
            What ``Optimizer.get_states`` returns, for matrices, and as ``otherwise`` the states of that optimizer.
        """
        return super().get_states(unshard) | {"otherwise": self.otherwise.get_states(unshard)}

    def tables(self) -> Iterator[OwnedSlots]:
        yield from super().tables()
        yield from self.otherwise.tables()

    def _numbered(self) -> Iterator[tuple[TableState, int | None]]:
        # matrices, as they come
        return ((state, number) for number, state in enumerate(self._table_states.values()))

    def set_states(self, states: State) -> None:
        super().set_states(states)
        self.otherwise.set_states(states["otherwise"])
        self._masters.clear()

    def follow(self, params: Iterable[tuple[str, Any]]) -> None:
        given = list(params)
        super().follow(given)
        self.otherwise.follow(given)

    def check_loaded(self, states: State) -> None:
        if isinstance(states, dict) and "otherwise" in states:
            super().check_loaded({name: state for name, state in states.items() if name != "otherwise"})
            self.otherwise.check_loaded(states["otherwise"])
        else:
            super().check_loaded(states)
            raise ValueError(f"the states of Muon must have those of {type(self.otherwise).__name__} as 'otherwise'")

    def numbers(self) -> list[str]:
        return super().numbers() + self.otherwise.numbers()


def _checked(otherwise: Any, multi_precision: Any) -> Optimizer:
    """Return the optimizer that a Muon holds, which has nothing that is Muon's to give."""
    if not isinstance(otherwise, Optimizer) or otherwise.whole:
        raise TypeError(
            f"otherwise must be one of distopt's optimizers and no other Muon, got {device.describe(otherwise)}"
        )
    for name, value in (COMMON | {"multi_precision": multi_precision}).items():
        given = getattr(otherwise, name)
        if given != value:
            raise ValueError(
                f"{name} of otherwise must be {value}, got {given}; it is Muon's to give, and holds for all parameters"
            )
    return otherwise


def _sides(members: BucketLayout) -> tuple[int, int]:
    """Return the rows and columns of a matrix; filters O x I x k x k have O rows."""
    rows, *others = members.shapes[0]
    return rows, math.prod(others)


def _room(members: BucketLayout) -> int:
    """Return the bytes of a matrix in a message, so many that the next one is aligned."""
    return -(-members.extent * members.dtype.itemsize // ROOM) * ROOM


def _packed(arrays: Sequence[np.ndarray], like: np.ndarray) -> np.ndarray:
    """Return the bytes of some arrays as one array where ``like`` is."""
    rooms = [-(-x.nbytes // ROOM) * ROOM for x in arrays]
    message, begin = device.zeros(sum(rooms), np.uint8, like), 0
    for x, room in zip(arrays, rooms, strict=True):
        device.copy(message[begin : begin + x.nbytes], x.view(np.uint8))
        begin += room
    return message


def _unpacked(message: np.ndarray, tables: Sequence[BucketLayout]) -> Iterator[np.ndarray]:
    """Yield the flat arrays of matrices from the bytes that ``_packed`` returned on their rank."""
    begin = 0
    for members in tables:
        yield message[begin : begin + members.extent * members.dtype.itemsize].view(members.dtype)
        begin += _room(members)
