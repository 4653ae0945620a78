"""What is done to the mean gradients before an update: the gradient hook, and clipping by the global norm."""

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from distopt import device, kernels
from distopt.buckets import BucketSet, Reduced, local_shard, unsharded
from distopt.comm import Communicator
from distopt.comm.control import agreed
from distopt.engine.bucket_store import BucketStore
from distopt.engine.spec import GradientHook

# Added to the norm that is divided by, as torch.nn.utils.clip_grad_norm_ has it.
EPSILON = 1e-6
# Raises on every rank what one rank brings.
Vote = Callable[[Exception | None], object]
# Replaces an array by its sum over ranks.
SumOverRanks = Callable[[np.ndarray], None]


class MeanGradients:
    """Apply ``gradient_hook`` and ``clip_norm`` of ``DistOpt``."""

    # The attributes that a step replaces (``Undo.keep_fields``).
    CHANGES = ("norm",)

    def __init__(self, comm: Communicator, store: BucketStore, hook: GradientHook | None, clip_norm: float | None):
        self._comm, self._store = comm, store
        # math.inf only asks for the norm, of the last update's mean gradient before it was clipped.
        self.hook, self.clip_norm = hook, clip_norm
        self.norm: float | None = None
        # The option that needs the mean gradients of all parameters before an update; '' if none does.
        self.needs_all = "gradient_hook" if hook else "" if clip_norm is None else "clip_norm"

    def apply_hook(self, sums: Iterable[Reduced], scale: float, check_finite: bool, vote: Vote) -> list[Reduced]:
        """Return ``scale`` times the sums, as the hook leaves them.  Collective."""
        # What the hook raises on one rank, `vote` raises on all.
        assert self.hook is not None
        flats: list[np.ndarray] = []
        means: dict[str, np.ndarray] = {}
        error: Exception | None = None
        try:
            for bucket, total in zip(self._store.buckets, list(sums), strict=True):
                flats.append(bucket.flat_mean(total, scale))
                means |= bucket.views(flats[-1])
            returned = self.hook([(known.param, means[name]) for name, known in self._store.collector.order.items()])
            if returned is not None:
                got = type(returned).__name__
                raise TypeError(f"gradient_hook must return None, after changing the gradients in place, got {got}")
            bad = np.zeros(1, np.int64)
            # On a GPU the host does not wait.
            for flat in flats if check_finite else ():
                if not device.on_gpu(flat):
                    kernels.count_nonfinite(flat, bad)
            if bad[0]:
                raise FloatingPointError(
                    f"gradients must be finite after gradient_hook, got {int(bad[0])} entries that are not"
                )
        except Exception as e:
            error = e
        vote(error)
        return [unsharded(flat) for flat in flats]

    def clipped_scale(
        self,
        name: str,
        sums: list[Reduced],
        scale: float,
        check_finite: bool,
        skip: Collection[str],
        sum_over_ranks: SumOverRanks,
        same: bool,
    ) -> float:
        """The factor of the sums: ``scale``, or less, so that the global norm of the means is at most ``clip_norm``."""
        # skip: parameters that are not updated, and do not count.
        # same: all ranks have the same sums, and raise the same error.
        assert self.clip_norm is not None
        comm = self._comm
        total = global_norm(self._store.buckets, sums, comm.rank, comm.size, sum_over_ranks, skip)
        self.norm = norm = total * abs(scale)
        if self.clip_norm == math.inf:
            return scale
        if norm == math.inf and check_finite:
            # Divided by it, the means would be an update by nothing.
            error = FloatingPointError(
                f"{name}: the squares of the gradients must add up to at most 1.8e308, got more, "
                "although all entries are finite: scale the loss down, or clip by value first"
            )
            raise agreed(error, comm.rank == 0) if same else error
        factor = self.clip_norm / (norm + EPSILON)
        # NaN stays NaN.
        return scale if factor >= 1 else scale * factor


def global_norm(
    buckets: BucketSet,
    sums: Sequence[Reduced],
    rank: int,
    size: int,
    sum_over_ranks: SumOverRanks,
    skip: Collection[str] = (),
) -> float:
    """Return the L2 norm of all sums as one vector, in float64.  Collective if a sum lies in pieces."""
    # Squares are added in a fixed order within each parameter, and then exactly, so that every rank and every plan has
    # the same bits.  On a GPU the host waits for the norm.  Where a sum lies in pieces each rank squares its own.
    tables = [b.gradients for b in buckets]
    # Kernels need at least one number per member.
    sizes = [max(t.chunks, len(t.names)) for t in tables]
    bounds = list(itertools.accumulate(sizes, initial=0))
    partial = device.zeros(bounds[-1], np.float64, buckets.bad)
    parts = [partial[start:end] for start, end in itertools.pairwise(bounds)]
    for table, total, part in zip(tables, sums, parts, strict=True):
        for piece in local_shard(total, rank, size) if len(total) > 1 else total:
            kernels.partial_squares(table.shard(piece.number, piece.of), piece.flat, part)
    if any(len(total) > 1 for total in sums):
        sum_over_ranks(partial)
    squares: list[float] = []
    for table, part in zip(tables, parts, strict=True):
        folded = device.zeros(len(table.names), np.float64, part)
        kernels.fold_partials(table, part, folded, 1)
        pairs = zip(table.names, device.host_copy(folded).tolist(), strict=True)
        squares += [square for name, square in pairs if name not in skip]
    try:
        return math.sqrt(math.fsum(squares))
    except OverflowError:
        return math.inf
