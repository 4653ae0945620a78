"""Deep Gradient Compression (Lin et al., 2018, arXiv:1712.01887): a thousandth of the gradients, and dense accuracy."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from distopt import device, kernels
from distopt.compress.compressor import At, Compressor, decompress_all, forecast, look, memory, table
from distopt.compress.sparse import Growth, Sparse, unpack_entries
from distopt.compress.warmup import BELOW_ONE, Sparsity, Stages, geometric
from distopt.ledger import Anatomy, Look
from distopt.numbers import flag, number, real, whole
from distopt.tables import Members

VELOCITY, DECAY = "velocity", "decay"  # states beside 'residual'; all ranks have the same decay


class Selector(Compressor, Protocol):
    """What chooses a fraction of each tensor: ``TopK``, or ``Packed(TopK)``."""

    density: float

    def with_density(self, density: float) -> "Selector":
        """The same for a fraction of each tensor."""

    def counts(self, sizes: np.ndarray) -> np.ndarray:
        """How many entries of tensors of these sizes are sent."""

    def select(self, x: np.ndarray, at: At, add: np.ndarray | Growth | None = None) -> np.ndarray:
        """The planes of the selected entries, which have left x (+ add)."""

    def encode(self, planes: np.ndarray, x: np.ndarray, at: At) -> np.ndarray:
        """The payload that carries them; what that cannot carry goes back to x."""


class DeepGradientCompression:
    """Send of each tensor the velocities that have grown largest.

    On every rank and for every tensor: ``u = momentum u + g``, ``v += u``; the selector's ``density`` of v that is
    largest in magnitude is sent and leaves v, and with ``factor_masking`` u is 0 there too, so that what is stale does
    not carry on (momentum correction and momentum factor masking, sections 3.2 and 3.3).  ``nesterov``:
    ``u = momentum (u + g)``, ``v += u + g``.  The optimizer must have no momentum of its own: ``SGD(lr)``.

    * ``clip_norm``: a tensor's local gradient, the mean of a window's, is held to an L2 norm of
      ``clip_norm / sqrt(ranks)`` first (section 3.2).
    * ``weight_decay``: with a momentum buffer of its own, the same on all ranks, which is added to the mean
      (synxlin/deep-gradient-compression), so that sparsity does not delay it.  ``decay_in_gradient`` adds it to each
      rank's gradient instead, as a loss does (PaddlePaddle, MoXing).  Multipliers are those of the optimizer
      (``wd_mult``); that of a parameter of 16 bits is computed from it as it is, not from its master.
    * ``warmup``: sparsities (1 - density), one per epoch of ``steps_per_epoch`` updates, the last one from then on, as
      MoXing's ``dgc_sparsity_strategy``; or a number of epochs before the last, over which density falls by the same
      factor each; or a schedule of k that returns sparsities, whatever the selector's density is.
    * ``exclude_1d``, ``min_numel``: tensors of one dimension or none, or of fewer elements, are summed as they are, in
      the same step and with the same momentum; so is a tensor of which all entries would be sent.

    Density 1 is dense momentum SGD.  States, by parameter: 'residual' (v, shared with ``ErrorFeedback``), 'velocity'
    (u) and 'decay'.

    Raises TypeError for a selector that has no density, ValueError for numbers out of range, for a warm-up whose last
    sparsity is not 1 - density, and for sparsities per epoch without ``steps_per_epoch``.
    """

    summable = ragged = lossless = may_overflow = False
    stateful = corrects_momentum = True

    def __init__(
        self,
        selector: Any,
        momentum: float = 0.9,
        nesterov: bool = False,
        factor_masking: bool = True,
        clip_norm: float | None = None,
        weight_decay: float = 0.0,
        warmup: Sequence[float] | int | Sparsity | None = None,
        steps_per_epoch: int | None = None,
        exclude_1d: bool = True,
        min_numel: int = 0,
        decay_in_gradient: bool = False,
    ):
        if not _has_density(selector):
            raise TypeError(f"selector must have a density, as TopK and Packed(TopK) have, got {selector!r}")
        self.selector: Selector = selector.with_density(selector.density)
        self.momentum = number("momentum", momentum, most=1.0)
        self.nesterov = flag("nesterov", nesterov)
        self.factor_masking = flag("factor_masking", factor_masking)
        self.clip_norm = math.inf if clip_norm is None else real("clip_norm", clip_norm)
        if not self.clip_norm > 0:
            raise ValueError(f"clip_norm must be above 0, got {clip_norm}")
        self.weight_decay = number("weight_decay", weight_decay)
        self.exclude_1d = flag("exclude_1d", exclude_1d)
        self.min_numel = whole("min_numel", min_numel, least=0)
        self.decay_in_gradient = flag("decay_in_gradient", decay_in_gradient)
        self.sparsity = _sparsity(warmup, self.selector.density, steps_per_epoch)
        self._stage, self._text = self, repr(self)

    def at_step(self, k: int) -> "DeepGradientCompression":
        """What update k is made with: the same, at that update's density."""
        if self.sparsity is None:
            return self
        sparsity = number(f"warmup at update {k}", self.sparsity(k), most=BELOW_ONE)
        last, stage = self.selector.density, self._stage  # threads that are ranks share this object
        density = last if math.isclose(1 - sparsity, last, rel_tol=1e-9) else 1 - sparsity
        if stage.sparsity is not None or stage.selector.density != density:
            self._stage = stage = DeepGradientCompression(self.selector.with_density(density), **self._options())
        return stage

    def _options(self) -> dict[str, Any]:
        """Of the constructor, but for selector and warm-up."""
        clip_norm = None if self.clip_norm == math.inf else self.clip_norm
        names = "momentum nesterov factor_masking weight_decay exclude_1d min_numel decay_in_gradient".split()
        return {name: getattr(self, name) for name in names} | {"clip_norm": clip_norm}

    def whole(self, bucket: Members, at: At) -> device.Mirror:
        """A number per member: 1 if it is summed as it is."""

        def found() -> np.ndarray:
            sizes = bucket.rows["size"].astype(np.int64)
            flat = np.array([len(shape) <= 1 for shape in bucket.shapes], bool)
            small = (sizes < self.min_numel) | (self.selector.counts(sizes) >= sizes)
            return (small | flat & self.exclude_1d).astype(np.int64)

        return at.constant(f"whole of {self._text}", found)

    def payload_bytes(self, n: int, itemsize: int = 4, bucket: Members | None = None) -> int | None:
        """What is selected, and the members that are summed as they are."""
        members = bucket or Members(["x"], [(n,)], [0], f"f{itemsize}")
        whole = self.whole(members, At()).host.astype(bool)
        elements = int(members.rows["size"][whole].sum())
        selected = 0 if whole.all() else self.selector.payload_bytes(n, itemsize, members.only(~whole))
        return None if selected is None else selected + itemsize * elements

    def begin(self, x: np.ndarray, state: dict[str, np.ndarray], at: At) -> None:
        """Bring the weight decay's momentum forward, before a bucket is compressed; it is the same on all ranks.

        Here, and not when it is added: until all ranks have exchanged this bucket, none has changed parameters.
        """
        if self.weight_decay and not self.decay_in_gradient:
            velocity = memory(state, DECAY, x)
            numbers = self.momentum, self.nesterov, self.weight_decay
            kernels.decay_momentum(self._parameters(at), velocity, self._added(velocity, at), *numbers, at.refused)

    def compress(self, x: np.ndarray, state: dict[str, np.ndarray], at: At) -> np.ndarray:
        """The payload of what is selected; members that are summed as they are stand in x."""
        members = table(x, at)
        whole, velocity, residual = self.whole(members, at), memory(state, VELOCITY, x), memory(state, "residual", x)
        self._clip(members, x, at)
        if self.weight_decay and self.decay_in_gradient:  # of the sum, each rank's part
            kernels.add_decay(self._parameters(at), x, self.weight_decay * at.divisor / at.size)
        alone = members.only(whole.host != 0)
        kernels.correct_momentum(alone, x, velocity, self.momentum, self.nesterov, at.refused)
        kernels.take_whole(alone, x, residual, at.refused)
        if whole.host.all():
            return at.scratch("payload", 0)
        at = self._among(members, at)
        planes = self.selector.select(residual, at, Growth(x, velocity, self.momentum, self.nesterov))
        if self.factor_masking:
            kernels.mask(velocity, unpack_entries(planes, x.dtype)[0])
        return self.selector.encode(planes, residual, at)

    def _selected(self, members: Members, at: At) -> np.ndarray:
        """Which members entries are selected from."""
        return np.asarray(self.whole(members, at).host == 0)

    def _among(self, members: Members, at: At) -> At:
        """A call for the members that entries are selected from, with constants under names of its own."""
        selected = members.only(self._selected(members, at))
        return at._replace(bucket=selected, constant=lambda name, make: at.constant(f"{name} in {self._text}", make))

    def _clip(self, members: Members, x: np.ndarray, at: At) -> None:
        if self.clip_norm == math.inf:
            return
        rows = len(members.names)
        squares = at.scratch("squares", 8 * rows).view(np.float64)
        partial = at.scratch("partials", 8 * max(rows, members.chunks)).view(np.float64)
        kernels.partial_squares(members, x, partial)
        kernels.fold_partials(members, partial, squares, 1)
        kernels.clip_norms(members, x, squares, self.clip_norm * at.batches / math.sqrt(at.size))

    def _parameters(self, at: At) -> Members:
        if at.params is None:
            raise ValueError(f"{self!r} needs the parameters' values for weight_decay: use a step")
        return at.params

    def _added(self, decay: np.ndarray, at: At) -> np.ndarray:
        """What is added of the weight decay; with Nesterov's momentum that is not what stays."""
        return at.scratch("decay", decay.nbytes).view(decay.dtype) if self.nesterov else decay

    def finish(self, total: np.ndarray, state: dict[str, np.ndarray], at: At) -> None:
        """Add the weight decay to a sum that is going to be divided by ``at.divisor``."""
        if self.weight_decay and not self.decay_in_gradient:
            kernels.add_scaled(total, self._added(state[DECAY], at), at.divisor)

    def look(self, payload: np.ndarray, x: np.ndarray, at: At) -> Look:
        """That of the selector, whose members are some of x's."""
        members = table(x, at)
        selected, seen = self._selected(members, at), look(self.selector, payload, x, self._among(members, at))

        def found() -> Anatomy:
            anatomy = seen()
            if anatomy.counts is None:
                return anatomy
            counts = np.zeros(len(members.names), np.int64)
            counts[selected] = anatomy.counts
            return anatomy._replace(counts=counts)

        return found

    def forecast(self, n: int, itemsize: int, bucket: Members) -> Anatomy:
        """That of the selector, for the members that are not summed as they are."""
        return forecast(self.selector, n, itemsize, bucket.only(self.whole(bucket, At()).host == 0))

    def decompress(self, payload: np.ndarray, out: np.ndarray, at: At) -> None:
        """As the selector."""
        self.selector.decompress(payload, out, self._among(table(out, at), at))

    def decompress_all(self, payloads: list[np.ndarray], out: np.ndarray, at: At) -> None:
        """As the selector."""
        decompress_all(self.selector, payloads, out, self._among(table(out, at), at))

    def __repr__(self) -> str:
        listed = ", ".join(f"{name}={value!r}" for name, value in self._options().items())
        warmup = "" if self.sparsity is None else f", warmup={self.sparsity!r}"
        return f"DeepGradientCompression({self.selector!r}, {listed}{warmup})"


def _has_density(selector: Any) -> bool:
    """Does it choose entries, as many of a tensor as its size says?"""
    return isinstance(selector, Sparse) and not selector.ragged and hasattr(selector, "density")


def _sparsity(warmup: Any, density: float, steps_per_epoch: int | None) -> Sparsity | None:
    """A schedule of sparsities, None for none."""
    if warmup is None or callable(warmup):
        return warmup  # type: ignore[no-any-return]
    if steps_per_epoch is None:
        raise ValueError("steps_per_epoch is missing: warmup counts epochs")
    if not isinstance(warmup, Iterable):
        return geometric(density, warmup, steps_per_epoch)
    stages = Stages(list(warmup), steps_per_epoch)
    if not math.isclose(1 - stages.sparsities[-1], density, rel_tol=1e-6):
        raise ValueError(
            f"warmup must end with the sparsity 1 - density = {1 - density:.10g}, got {stages.sparsities[-1]}"
        )
    return stages
