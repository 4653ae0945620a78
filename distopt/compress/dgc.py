"""Deep Gradient Compression (Lin et al., 2018, arXiv:1712.01887): a thousandth of the gradients, and dense accuracy."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from distopt import device, kernels
from distopt.checks import as_float, check_bool, check_float, check_int
from distopt.compress.base import Compressor, at_density, compressed_members
from distopt.compress.context import BucketContext, ExchangeContext, layout_of
from distopt.compress.elias_fano import Packed
from distopt.compress.entry_shards import EntryShards
from distopt.compress.planes import unpack_entries
from distopt.compress.shards import ShardCodec, remembering
from distopt.compress.state import DECAY, RESIDUAL, VELOCITY, State, state_array
from distopt.compress.top_k import Increment, Sparse, TopK
from distopt.compress.traits import Traits
from distopt.compress.warmup import BELOW_ONE, Sparsity, Stages, geometric
from distopt.kernels.breakdown import LazyBreakdown, PayloadBreakdown
from distopt.kernels.layout import BucketLayout


class DeepGradientCompression(Compressor):
    """Send of each tensor the velocities that have grown largest.

    On every rank and for every tensor: ``u = momentum u + g``, ``v += u``; the selector's ``density`` of v that is
    largest in magnitude is sent and leaves v, and with ``factor_masking`` u is 0 there too, so that what is stale does
    not carry on (momentum correction and momentum factor masking, sections 3.2 and 3.3).  ``nesterov``:
    ``u = momentum (u + g)``, ``v += u + g``.  The optimizer must have no momentum of its own: ``SGD(lr)``.

    Density 1 is dense momentum SGD.  States, by parameter: 'residual' (v, shared with ``ErrorFeedback``), 'velocity'
    (u) and 'decay'.

    Args:
        selector: ``TopK`` or ``Packed(TopK)``, which chooses a fraction of each tensor.
        momentum: by how much of itself u outlives a step.
        nesterov: Nesterov's momentum.
        factor_masking: set u to 0 where v is sent.
        clip_norm: hold a tensor's local gradient, the mean of a window's, to an L2 norm of ``clip_norm / sqrt(ranks)``
            first (section 3.2).
        weight_decay: with a momentum buffer of its own, the same on all ranks, which is added to the mean
            (synxlin/deep-gradient-compression), so that sparsity does not delay it.  Multipliers are those of the
            optimizer (``wd_mult``); that of a parameter of 16 bits is computed from it as it is, not from its master.
        warmup: sparsities (1 - density), one per epoch of ``steps_per_epoch`` updates, the last one from then on, as
            MoXing's ``dgc_sparsity_strategy``; or a number of epochs before the last, over which density falls by the
            same factor each; or a schedule of k that returns sparsities, whatever the selector's density is.
        steps_per_epoch: updates in an epoch of ``warmup``.
        exclude_1d: sum tensors of one dimension or none as they are, in the same step and with the same momentum; so is
            a tensor of which all entries would be sent.
        min_numel: and tensors of fewer elements.
        decay_in_gradient: add the weight decay to each rank's gradient instead, as a loss does (PaddlePaddle, MoXing).

    Raises:
        TypeError: for a selector that has no density.
        ValueError: for numbers out of range, for a warm-up whose last sparsity is not 1 - density, and for sparsities
            per epoch without ``steps_per_epoch``.

    Example:
        >>> import numpy as np
        >>> from distopt.compress import ExchangeContext, TopK
        >>> dgc, state = DeepGradientCompression(TopK(0.25), momentum=0.5, exclude_1d=False), {}
        >>> payload = dgc.compress(np.array([1, -4, 2, 3], np.float32), state, ExchangeContext())
        >>> payload[:4].view(np.float32), payload[4:].view(np.int32)
        (array([-4.], dtype=float32), array([1], dtype=int32))
        >>> state["velocity"]
        array([1., 0., 2., 3.], dtype=float32)
    """

    traits = Traits(stateful=True, corrects_momentum=True, recordable=True)

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
            raise TypeError(f"selector must be one with a density, as TopK or Packed(TopK), got {selector!r}")
        self._density: float | None = selector.density
        self.selector: TopK | Packed = selector
        if self._density is not None:
            self.selector = selector.with_density(self._density)
        elif warmup is not None:
            raise ValueError(f"warmup must be None with bytes, which may be a schedule instead, got {warmup!r}")
        self.momentum = check_float("momentum", momentum, most=1.0)
        self.nesterov = check_bool("nesterov", nesterov)
        self.factor_masking = check_bool("factor_masking", factor_masking)
        self.clip_norm = math.inf if clip_norm is None else as_float("clip_norm", clip_norm)
        if not self.clip_norm > 0:
            raise ValueError(f"clip_norm must be above 0, got {clip_norm}")
        self.weight_decay = check_float("weight_decay", weight_decay)
        self.exclude_1d = check_bool("exclude_1d", exclude_1d)
        self.min_numel = check_int("min_numel", min_numel, least=0)
        self.decay_in_gradient = check_bool("decay_in_gradient", decay_in_gradient)
        self.sparsity = None if self._density is None else _sparsity(warmup, self._density, steps_per_epoch)
        self.traits = replace(
            self.traits,
            has_hooks=self.weight_decay > 0,
            changes_with_step=self.sparsity is not None,
            budget=selector.traits.budget,
        )
        self._stage, self._text = self, repr(self)

    def at_step(self, k: int) -> "DeepGradientCompression":
        """Return the same at the density of update k."""
        if self.sparsity is None:
            return self
        sparsity = check_float(f"warmup at update {k}", self.sparsity(k), most=BELOW_ONE)
        last, stage = self._density or 1.0, self._stage  # threads that are ranks share this object
        density = last if math.isclose(1 - sparsity, last, rel_tol=1e-9) else 1 - sparsity
        if stage.sparsity is not None or stage.selector.density != density:
            self._stage = stage = DeepGradientCompression(self.selector.with_density(density), **self._options())
        return stage

    def at_density(self, density: float) -> "DeepGradientCompression":
        """Return the same with another density."""
        return DeepGradientCompression(at_density(self.selector, density), **self._options())

    def _options(self) -> dict[str, Any]:
        """Arguments of the constructor, but for selector and warm-up."""
        clip_norm = None if self.clip_norm == math.inf else self.clip_norm
        names = "momentum nesterov factor_masking weight_decay exclude_1d min_numel decay_in_gradient".split()
        return {name: getattr(self, name) for name in names} | {"clip_norm": clip_norm}

    def uncompressed(self, layout: BucketLayout, context: ExchangeContext) -> device.DeviceMirror:
        def make() -> np.ndarray:
            sizes = layout.records["size"].astype(np.int64)
            flat = np.array([len(shape) <= 1 for shape in layout.shapes], bool)
            small = (sizes < self.min_numel) | (self.selector.counts(sizes) >= sizes)
            return (small | flat & self.exclude_1d).astype(np.int64)

        return context.constant(f"whole of {self._text}", make)

    def payload_bytes(self, n: int, itemsize: int = 4, layout: BucketLayout | None = None) -> int | None:
        """Return the bytes of what is selected, and of the members that are summed as they are."""
        layout = layout or BucketLayout(["x"], [(n,)], [0], f"f{itemsize}")
        summed = self.uncompressed(layout, ExchangeContext()).host.astype(bool)
        elements = int(layout.records["size"][summed].sum())
        selected = 0 if summed.all() else self.selector.payload_bytes(n, itemsize, layout.select(~summed))
        return None if selected is None else selected + itemsize * elements

    def breakdown(self, payload: np.ndarray | None, x: np.ndarray, context: ExchangeContext) -> LazyBreakdown:
        layout = layout_of(x, context)
        selected = self.selected(layout, context)
        of_selected = self.selector.breakdown(payload, x, self.selection(layout, context))

        def breakdown() -> PayloadBreakdown:
            inner = of_selected()
            if inner.counts is None:
                return inner
            counts = np.zeros(len(layout.names), np.int64)
            counts[selected] = inner.counts
            return inner._replace(counts=counts)

        return breakdown

    def begin(self, x: np.ndarray, state: State, context: ExchangeContext) -> None:
        """Bring the momentum of the weight decay forward, which is the same on all ranks.

        Here, and not when it is added: until all ranks have exchanged this bucket, none has changed parameters.
        """
        if self.weight_decay and not self.decay_in_gradient:
            velocity = state_array(state, DECAY, x)
            numbers = self.momentum, self.nesterov, self.weight_decay
            kernels.decay_momentum(
                self._parameters(context), velocity, self._added(velocity, context), *numbers, context.skip_flag
            )

    def compress(self, x: np.ndarray, state: State, context: ExchangeContext) -> np.ndarray:
        """Return the payload of what is selected; members that are summed as they are stand in x."""
        planes, residual, selection = self._select(x, state, context)
        return self.selector.encode(planes, residual, selection) if selection else planes

    def _select(
        self, x: np.ndarray, state: State, context: ExchangeContext
    ) -> tuple[np.ndarray, np.ndarray, ExchangeContext | None]:
        """Bring momentum into the residual, and move what is selected out of that.

        Return the planes, the residual, and the call for the members that are selected from; None if there are none.
        """
        layout = layout_of(x, context)
        summed = self.uncompressed(layout, context)
        velocity, residual = state_array(state, VELOCITY, x), state_array(state, RESIDUAL, x)
        self._clip(layout, x, context)
        if self.weight_decay and self.decay_in_gradient:  # of the sum, each rank's part
            kernels.add_decay(self._parameters(context), x, self.weight_decay * context.divisor / context.size)
        uncompressed = layout.select(summed.host != 0)
        kernels.correct_momentum(uncompressed, x, velocity, self.momentum, self.nesterov, context.skip_flag)
        kernels.encode_whole(uncompressed, x, residual, context.skip_flag)
        if summed.host.all():
            return context.scratch("payload", 0), residual, None
        context = self.selection(layout, context)
        planes = self.selector.select(residual, context, Increment(x, velocity, self.momentum, self.nesterov))
        if self.factor_masking:
            kernels.mask(velocity, unpack_entries(planes, x.dtype)[0])
        return planes, residual, context

    def sharded(self) -> ShardCodec:
        def choose(x: np.ndarray, state: State, context: ExchangeContext) -> tuple[np.ndarray, np.ndarray]:
            planes, residual, _ = self._select(x, state, context)
            return planes, residual

        return remembering(EntryShards(self.selector, self.selector.value, choose))

    def selected(self, layout: BucketLayout, context: ExchangeContext) -> np.ndarray:
        """Return which members entries are selected from, a bool each."""
        return np.asarray(self.uncompressed(layout, context).host == 0)

    def selection(self, layout: BucketLayout, context: ExchangeContext) -> ExchangeContext:
        """Return a call for the members that entries are selected from, with constants under names of its own."""
        selected = compressed_members(self, layout, context)
        bucket = BucketContext(
            selected,
            context.bucket.parameters,
            context.bucket.scratch,
            lambda name, make: context.constant(f"{name} in {self._text}", make),
        )
        return context._replace(bucket=bucket)

    def _clip(self, layout: BucketLayout, x: np.ndarray, context: ExchangeContext) -> None:
        if self.clip_norm == math.inf:
            return
        rows = len(layout.names)
        squares = context.scratch("squares", 8 * rows).view(np.float64)
        partial = context.scratch("partials", 8 * max(rows, layout.chunks)).view(np.float64)
        kernels.partial_squares(layout, x, partial)
        kernels.fold_partials(layout, partial, squares, 1)
        kernels.clip_norms(layout, x, squares, self.clip_norm * context.num_gradients / math.sqrt(context.size))

    def _parameters(self, context: ExchangeContext) -> BucketLayout:
        if context.parameters is None:
            raise ValueError(
                f"weight_decay must be 0 outside of a step, where parameters have no values, got {self!r}; use a step"
            )
        return context.parameters

    def _added(self, decay: np.ndarray, context: ExchangeContext) -> np.ndarray:
        """Memory for what is added of the weight decay; with Nesterov's momentum that is not what stays."""
        return context.scratch("decay", decay.nbytes).view(decay.dtype) if self.nesterov else decay

    def finish(self, total: np.ndarray, state: State, context: ExchangeContext) -> None:
        """Add the weight decay to a sum that is going to be divided by ``context.divisor``."""
        if self.weight_decay and not self.decay_in_gradient:
            kernels.add_scaled(total, self._added(state[DECAY], context), context.divisor)

    def decompress(self, payload: np.ndarray, out: np.ndarray, context: ExchangeContext) -> None:
        self.selector.decompress(payload, out, self.selection(layout_of(out, context), context))

    def decompress_all(self, payloads: Sequence[np.ndarray], out: np.ndarray, context: ExchangeContext) -> None:
        self.selector.decompress_all(payloads, out, self.selection(layout_of(out, context), context))

    def __repr__(self) -> str:
        listed = ", ".join(f"{name}={value!r}" for name, value in self._options().items())
        warmup = "" if self.sparsity is None else f", warmup={self.sparsity!r}"
        return f"DeepGradientCompression({self.selector!r}, {listed}{warmup})"


def _has_density(selector: Any) -> bool:
    """Tell if it chooses entries, as many of a tensor as its size says."""
    known = isinstance(selector, Sparse) and not selector.traits.ragged
    return known and (selector.density is not None or selector.traits.budget is not None)


def _sparsity(warmup: Any, density: float, steps_per_epoch: int | None) -> Sparsity | None:
    """Make a schedule of sparsities, None for none."""
    if warmup is None or callable(warmup):
        return warmup  # type: ignore[no-any-return]
    if steps_per_epoch is None:
        raise ValueError("steps_per_epoch must be an integer with this warmup, which counts epochs, got None")
    if not isinstance(warmup, Iterable):
        return geometric(density, warmup, steps_per_epoch)
    stages = Stages(list(warmup), steps_per_epoch)
    if not math.isclose(1 - stages.sparsities[-1], density, rel_tol=1e-6):
        raise ValueError(
            f"the last sparsity of warmup must be 1 - density = {1 - density:.10g}, got {stages.sparsities[-1]}"
        )
    return stages
