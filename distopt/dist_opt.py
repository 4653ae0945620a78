"""Average gradients over ranks, then let the wrapped optimizer use them."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from distopt import device, kernels
from distopt.capture import Captured
from distopt.comm import Communicator, NcclCommunicator, in_rank_order, world
from distopt.compress import Compressor, Dense, ErrorFeedback, Half, Threshold, TopK
from distopt.conditions import Kind
from distopt.cost import Link
from distopt.gradients import Loss, checked_gradient
from distopt.memory import GradientHook
from distopt.nonfinite import Policy
from distopt.numbers import flag
from distopt.optim import SGD, AnyOptimizer
from distopt.saving import Saving

if TYPE_CHECKING:
    from distopt import volume
    from distopt.volume import Advice, Wire


def _from_id(
    communicator: Communicator | None, nccl_id: bytes | None, local_rank: int | None, world_size: int | None
) -> Communicator | None:
    """A communicator for SINGA's three arguments, None without them; ValueError if they are not all that is given."""
    three = {"nccl_id": nccl_id, "local_rank": local_rank, "world_size": world_size}
    missing = [name for name, value in three.items() if value is None]
    if len(missing) == len(three):
        return None
    if communicator is not None or nccl_id is None or local_rank is None or world_size is None:
        flaw = f"{', '.join(missing)} missing" if missing else "and a communicator"
        raise ValueError(f"nccl_id, local_rank and world_size belong together, and exclude a communicator: got {flaw}")
    return NcclCommunicator.from_id(nccl_id, local_rank, world_size)


class DistOpt(Saving):
    """Wrap any optimizer so that all ranks of a communicator train one model.

    A step collects the gradients, checks them, votes, exchanges them bucket by bucket, and updates; what goes wrong on
    one rank before the vote raises the same error on every rank, and nothing is applied anywhere.

    * ``opt``: None (a new ``SGD()``), or any object with ``apply(name, value, grad)`` and ``step()``, or with
      ``update(param, grad)``.  distopt's own optimizers take the sum of a whole bucket in one kernel call.
    * ``communicator``: None is ``distopt.world()``, in ``run_ranks`` that of the thread.
    * ``threshold``: elements that fill a bucket (``buckets.plan``).
    * ``deterministic``: sums are added in rank order on every transport.
    * ``overlap``: buckets are exchanged, by a thread, while the loss still yields the gradients of the next ones; the
      same bits.  'auto': if ranks sit on several machines; in shared memory it would only take cores away.
    * ``broadcast``: rank 0's parameters go to all ranks at the first step.
    * ``nonfinite``: what to do when a gradient of any rank has an infinity or NaN: 'raise' FloatingPointError on every
      rank, 'skip' the step on every rank (10 in a row raise), 'propagate', or a ``LossScaler``, which skips too, and by
      whose scale the gradients are divided.
    * ``allow_missing``: a parameter without a gradient counts as zeros on that rank instead of an error.
    * ``check_every``: after every so many steps the ranks compare the checksums of their parameters, and raise
      RuntimeError if they have diverged; 0: never.  Partial steps, which let them differ, end the comparing.
    * ``num_batches``: this many calls are one step: their gradients are averaged, and exchanged once at the last call
      (``sync_on_apply=False``: exchanged at every call, before they are added).
    * ``buffSize``: elements of the staging memory of the fused verbs.
    * ``clip_norm``: the mean gradient is multiplied by ``min(1, clip_norm / (norm + 1e-6))``, norm being its L2 norm
      over all parameters in float64, as ``torch.nn.utils.clip_grad_norm_`` does; in a partial step that of this rank's
      own gradients.  It is a factor that the optimizer's kernel takes, before ``rescale_grad`` and ``clip_gradient``.
      ``gradient_norm`` is the last norm before clipping; ``math.inf`` only measures it.  A norm beyond
      float64 raises FloatingPointError.  Costs one more look at the sums; on a GPU the host waits for the norm.
    * ``gradient_hook``: called before each update, and before clipping, with a list of (param, mean gradient) in the
      plan's order; it may change the means in place, on all ranks alike (``check_every`` finds out), and returns None.
      16-bit parameters have float32 means.  What it raises on one rank, or leaves not finite, all ranks raise, and no
      parameter has changed; what a compressor has sent in that step is lost.  On a GPU it is called for a step that
      turns out to be refused too, and what it leaves is not looked at.  Costs one more pass over the means and one more
      vote; one that changes nothing changes no bit, but for the rounding of a mean where norms are taken (clipping,
      LARS, LANS) or a ``rescale_grad`` is given.
    * ``nccl_id``, ``local_rank``, ``world_size``, in the place of ``communicator``: SINGA's form for processes of one
      machine without MPI, each with a GPU of its own (``NcclCommunicator.from_id``); ``close()`` closes what it made.

    The order of the first step is the plan; ranks that differ in it, or in these options, all raise a ValueError that
    names the first difference.  Later gradients may arrive in any order.  What a loss yields must stay as it is until
    the step returns: a generator that writes two gradients into one array is refused.  After a step the contents of the
    gradients are undefined.
    """

    _updated = False  # a parameter, by hand, since the last step?

    def __init__(
        self,
        opt: AnyOptimizer | None = None,
        communicator: Communicator | None = None,
        *,
        threshold: int = 2097152,
        deterministic: bool = False,
        overlap: str | bool = "auto",
        broadcast: bool = True,
        nonfinite: str | Policy = "raise",
        allow_missing: bool = False,
        check_every: int = 0,
        num_batches: int = 1,
        sync_on_apply: bool = True,
        buffSize: int = 4194304,
        clip_norm: float | None = None,
        gradient_hook: GradientHook | None = None,
        nccl_id: bytes | None = None,
        local_rank: int | None = None,
        world_size: int | None = None,
    ):
        made = _from_id(communicator, nccl_id, local_rank, world_size)
        self.communicator, self._made = made or communicator or world(), made
        super().__init__(
            SGD() if opt is None else opt,
            in_rank_order(self.communicator) if deterministic else self.communicator,
            threshold=threshold,
            overlap=overlap,
            broadcast=broadcast,
            nonfinite=nonfinite,
            allow_missing=allow_missing,
            check_every=check_every,
            num_batches=num_batches,
            sync_on_apply=sync_on_apply,
            buffSize=buffSize,
            clip_norm=clip_norm,
            gradient_hook=gradient_hook,
        )
        self._options_given["deterministic"] = deterministic

    def close(self) -> None:
        """Refuse everything from now on; a communicator stays open, unless it was made from ``nccl_id``: collective.

        Raises FloatingPointError, on every rank alike, if the last step on a GPU was not finite, which no later step
        told.
        """
        try:
            super().close()
        finally:
            if self._made:
                self._made.close()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.communicator.size

    @property
    def global_rank(self) -> int:
        """This process among all."""
        return self.communicator.rank

    @property
    def local_rank(self) -> int:
        """This process among those of its node."""
        return self.communicator.local_rank

    def __call__(self, loss: Loss) -> bool:
        """``backward_and_update(loss)``."""
        return self.backward_and_update(loss)

    def backward_and_update(self, loss: Loss, threshold: int | None = None) -> bool:
        """One step with the mean of all ranks' gradients; True if an update was applied.

        ``loss`` is an iterable of (param, grad) pairs (a generator too), a callable that returns one, or an object
        whose ``backward()`` yields one.
        """
        return self._step(loss, Kind(Dense, threshold))

    def backward_and_update_half(
        self, loss: Loss, threshold: int | None = None, clipping: bool = False, clip_Value: float = 100
    ) -> bool:
        """The same with float16 on the wire (``compress.Half``): half the bytes.

        ``clipping`` holds every element of this rank's gradients between -clip_Value and clip_Value first.
        """
        return self._step(loss, Kind(Half, threshold, float(clip_Value) if clipping else None))

    def backward_and_partial_update(self, loss: Loss, threshold: int | None = None) -> bool:
        """Update with this rank's own gradients; then average the *parameters* of one bucket, round-robin.

        So each parameter is averaged once in as many steps as there are buckets.  Optimizer state stays local.
        """
        return self._partial_step(loss, threshold)

    def backward_and_sparse_update(
        self, loss: Loss, threshold: int | None = None, spars: float = 0.05, topK: bool = False, corr: bool = True
    ) -> bool:
        """Send only what is large.

        ``topK=True``: the ``spars`` fraction of each bucket (``compress.TopK``), otherwise what is at least ``spars``
        in magnitude (``compress.Threshold``).  ``corr`` keeps the rest and adds it to the next gradient
        (``compress.ErrorFeedback``); without it the rest is lost.
        """

        def make() -> Compressor:
            selector = TopK(spars) if topK else Threshold(spars)
            return ErrorFeedback(selector) if corr else selector

        return self._step(loss, Kind(make, threshold))

    def step(self, loss: Loss | None = None, compressor: Compressor | None = None, break_even: bool = True) -> bool:
        """One step with any compressor (default ``Dense()``); True if an update was applied.

        ``break_even``: a bucket whose payloads would be more wire bytes than dense is all-reduced as a dense array of
        the same entries.  Without a loss it ends a step that was made of ``all_reduce`` and ``update``.
        """
        if loss is not None:
            kind = Kind(lambda: Dense() if compressor is None else compressor, break_even=break_even)
            return self._step(loss, kind)
        self._check_open()
        if not self._updated:
            raise RuntimeError(
                "step() without a loss ends a step made by hand, but nothing was updated since the last one: "
                "opt(loss) or opt.step(loss) is a whole step; by hand, all_reduce and update come before step()"
            )
        self._updated = False
        self._settle()
        self._observer.begin(self.step_counter + 1, sent=False)
        self._finish()
        self._ended(applied=True)
        return True

    def advise(
        self,
        link: "str | Link | Wire",
        ranks: int | None = None,
        modes: str | Sequence[str] | None = None,
        backward: float = 0.0,
        measure: bool = True,
    ) -> "Advice":
        """Which mode makes the exchange of this plan the fastest, and where it begins to pay; printable (``volume``).

        ``link``: a name or a rate (``cost.link``), a ``Link``, a ``volume.Network``, or a ``fit.Fit``.  ``ranks``: by
        default those of the communicator.  ``modes``: as 'half,topk=0.01' (``volume.mode``); left out is what this
        optimizer could not be given.  ``backward``: seconds of a backward pass, behind which buckets of modes without a
        memory travel, unless this was made with ``overlap=False`` or accumulates batches.  ``measure``: time
        compression on this host; a GPU is faster.  Not collective.

        Raises RuntimeError before there is a plan, ValueError for a name that there is not, or for a link that cannot
        be, TypeError for what is none.
        """
        from distopt import volume  # most trainings never ask

        network, timed = volume.wire(link), volume.compute.measure if flag("measure", measure) else None
        buckets = [buffer.gradients for buffer in self._memory]
        asked = self.world_size if ranks is None else ranks
        overlap = self._wants_overlap and self._window.num_batches == 1

        def check(mode: "volume.Mode") -> None:
            self._at_this_step(mode.compressor)

        return volume.advise(buckets, asked, network, modes, backward, timed, overlap, check)

    def capture(
        self, loss: Callable[[], Iterable[Sequence[Any]]], compressor: Compressor | None = None, break_even: bool = True
    ) -> Captured:
        """A step as a CUDA graph: calling what this returns is the next ``step(loss, compressor)``.

        ``loss`` is a callable that returns (param, grad) pairs, always with the same arrays.  For most models they are
        views, which forward and backward pass have written anew, outside of the graph, before each step::

            views = opt.gradient_views(params)
            pairs = list(zip(params, views))
            ...  # the first batch's gradients go into the views
            step = opt.capture(lambda: pairs)

        A loss may also enqueue its own work on the current stream, as far as cupy records it: elementwise functions and
        kernels, but no matrix product (cuBLAS), no solver and no random numbers, and nothing may wait.  Its temporary
        arrays are the graph's own.  The loss is called twice here: for an ordinary step, which counts, and for the
        capture.  Collective.

        Not captured are ``Threshold``, whose payloads are as long as the data want, a warm-up, whose density changes,
        a partial step, which averages another bucket each time, ``clip_norm`` and ``gradient_hook``; and the optimizer
        is one of distopt's own.  A ``Metered`` communicator does not see what a replay sends.  Each rank needs a
        process of its own: NCCL may deadlock when one process launches the graphs of several.

        Raises ValueError for a step that cannot be captured, and RuntimeError on every rank for a loss that calls what
        cupy does not record.
        """
        self._check_open()
        chosen = Dense() if compressor is None else compressor
        self._check_capture(chosen)
        return Captured(self, loss, Kind(lambda: chosen, break_even=break_even))

    def update(self, param: Any, grad: np.ndarray) -> None:
        """Take the mean of a summed gradient, in place, and apply it to one parameter.

        Raises ValueError with a ``LossScaler``, ``clip_norm``, ``gradient_hook`` or shared parameters, which need whole
        steps.
        """
        self._check_open()
        self._settle()
        if self._nonfinite.adapts:
            raise ValueError("update by hand knows nothing of a loss scale: use a step")
        if self._needs_all_means:
            option = self._needs_all_means
            raise ValueError(f"update by hand is of one parameter, but {option} needs the gradients of all: use a step")
        if self._sharded:
            raise ValueError("update changes a parameter on every rank, but all ranks share it: use a step")
        name, value = self._collector.identify(param)
        checked = checked_gradient(name, value, grad)
        if checked is None:
            raise TypeError(f"{name}: update needs a gradient")
        grad = checked
        if device.on_gpu(grad):
            kernels.scale(grad.reshape(-1), 1.0 / self.world_size)
        else:
            grad /= self.world_size
        self._optimizer.apply(name, param, value, grad)
        self._updated = True
