"""Average gradients over ranks, then update by the wrapped optimizer."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from distopt.buckets import Staging
from distopt.checks import check_int
from distopt.comm import Communicator, NcclCommunicator
from distopt.compress import Compressor, Dense
from distopt.engine.capture import CapturedStep, check_capture
from distopt.engine.engine import Engine
from distopt.engine.facade import Checkpointed, ranks, record_if_asked, torch_model, watch_first_gradients
from distopt.engine.joining import Joining
from distopt.engine.nonfinite import Policy
from distopt.engine.parameters import Loss
from distopt.engine.partial import Averaged, PartialSteps
from distopt.engine.spec import GradientHook, Options, StepSpec, among
from distopt.engine.views import parameter_views
from distopt.optim import AnyOptimizer
from distopt.singa import SingaModes, SingaVerbs, with_compressor

if TYPE_CHECKING:
    pass


def _from_id(
    communicator: Communicator | None, nccl_id: bytes | None, local_rank: int | None, world_size: int | None
) -> Communicator | None:
    """Return a communicator for SINGA's three arguments; None if none of them is given."""
    three = {"nccl_id": nccl_id, "local_rank": local_rank, "world_size": world_size}
    missing = [name for name, value in three.items() if value is None]
    if len(missing) == len(three):
        return None
    if communicator is not None or nccl_id is None or local_rank is None or world_size is None:
        flaw = f"{', '.join(missing)} missing" if missing else "and a communicator"
        raise ValueError(
            f"nccl_id, local_rank and world_size must be given together, without a communicator, got {flaw}"
        )
    return NcclCommunicator.from_id(nccl_id, local_rank, world_size)


class DistOpt(SingaModes, SingaVerbs, Checkpointed):
    """Wrap any optimizer so that all ranks of a communicator train one model.

    A step collects the gradients, checks them, votes, reduces them bucket by bucket, and updates; what goes wrong on
    one rank before the vote raises the same error on every rank, and nothing is applied anywhere.

    The order of the first step is the plan; ranks that differ in it, or in these options, all raise a ValueError that
    names the first difference.  Later gradients may arrive in any order.  What a loss yields must stay as it is until
    the step returns: a generator that writes two gradients into one array is refused.  After a step the contents of the
    gradients are undefined.

    Args:
        opt: None (a new ``SGD()``), any object with ``apply(name, value, grad)`` and ``step()``, or with
            ``update(param, grad)``; an optimizer of ``torch.optim``, or one with the same methods and ``param_groups``;
            or a transformation of optax, with ``init`` and ``update``.  distopt's own optimizers take the sum of a
            whole bucket in one kernel call.
        communicator: the ranks; None for ``distopt.world()``, in ``run_ranks`` that of the thread.
        params: a PyTorch model, or an iterable of tensors or (name, tensor) pairs, which are updated where they are; by
            default those of an optimizer of ``torch.optim``.  Rank 0's are sent to all ranks at once, which is
            collective.  A loss may then be a tensor, whose ``backward()`` a step calls after clearing ``grad``.  Each
            step asks which of them require a gradient: those of layers that were thawed, and of groups that were added
            to the optimizer, join the plan, on all ranks alike, in the order of the model.
        threshold: elements that fill a bucket (``buckets.plan``).
        deterministic: add sums in rank order on every transport; 'exact': round dense gradients to a grid, common to
            all ranks, on which doubles add them up in any order (``comm.Exact``): the sum is that of the numbers to
            2^-49 of the largest one near them, and logical ranks of a process are added up before they are sent.
        overlap: reduce buckets, in a thread, while the loss still yields the gradients of the next ones; the same bits.
            'auto': if ranks sit on several machines; in shared memory it would only take cores away.
        broadcast: send rank 0's parameters to all ranks at the first step.
        nonfinite: what to do when a gradient of any rank, or a sum, has an infinity or NaN: 'raise' FloatingPointError
            on every rank, 'skip' the step on every rank (10 in a row raise), 'propagate', or a ``LossScaler``, which
            skips too, and by whose scale the gradients are divided.
        allow_missing: count a parameter without a gradient as zeros on a rank, if another one has one.  A parameter
            that no rank has a gradient of is left alone: no momentum, no decay, and its residual stays.  In a partial
            step each rank leaves alone what it has no gradient of.  Where ranks share the work of an update
            (``parameter_views``, ``Muon(sharded=True)``) such a step is refused.
        check_every: after so many steps the ranks compare the checksums of their parameters, and raise RuntimeError if
            they have diverged; 0: never.  Partial steps, which let them differ, end the comparing.
        num_batches: this many calls are one step: their gradients are averaged.
        sync_on_apply: reduce the average once, at the last of these calls; False: each call's gradients, before they
            are added.
        buffSize: elements of the staging memory of the fused collectives.
        clip_norm: multiply the mean gradient by ``min(1, clip_norm / (norm + 1e-6))``, norm being its L2 norm over all
            parameters in float64, as ``torch.nn.utils.clip_grad_norm_`` does; in a partial step that of this rank's own
            gradients.  It is a factor that the optimizer's kernel takes, before ``rescale_grad`` and ``clip_gradient``.
            ``gradient_norm`` is the last norm before clipping; ``math.inf`` only measures it.  A norm beyond float64
            raises FloatingPointError.  Costs one more pass over the sums; on a GPU the host waits for the norm.
        gradient_hook: is called before each update, and before clipping, with a list of (param, mean gradient) in the
            plan's order; it may change the means in place, on all ranks alike (``check_every`` finds out), and returns
            None.  16-bit parameters have float32 means.  What it raises on one rank, or leaves not finite, all ranks
            raise, and no parameter has changed; what a compressor has sent in that step is lost.  On a GPU it is called
            for a step that turns out to be refused too, and what it leaves is not checked.  Costs one more pass over
            the means and one more vote; a hook that changes nothing changes no bit, but for the rounding of a mean
            where norms are taken (clipping, LARS, LANS) or a ``rescale_grad`` is given.
        buddy: give the next rank a copy of what this rank alone has, so that the others can continue without it: with
            ``parameter_views`` its share of the optimizer's state, one message per update.  With ``Muon(sharded=True)``
            ranks keep copies of their own, so that an update whose results not all have gathered is made again.  Only
            under ``distopt run --elastic``, where ranks may be lost; without shares it does nothing.  If a rank and
            the next one are lost at once, all others raise RuntimeError, and continue from a checkpoint.
        nccl_id: with ``local_rank`` and ``world_size``, in the place of ``communicator``: SINGA's form for processes of
            one machine without MPI, each with a GPU of its own (``NcclCommunicator.from_id``); ``close()`` closes it.
        local_rank: this process's number among those of the machine.
        world_size: their number.

    Raises:
        TypeError: an option has the wrong type; the text names it.
        ValueError: an option is out of range, or ranks differ in it.
        RuntimeError: there is no communicator where one is needed; the text says what to install or to start.

    Example:
        >>> import numpy as np
        >>> from distopt import DistOpt, Parameter
        >>> from distopt.optim import SGD
        >>> p, opt = Parameter("w", np.ones(2, np.float32)), DistOpt(SGD(0.5))
        >>> opt([(p, np.ones(2, np.float32))])
        True
        >>> p.data
        array([0.5, 0.5], dtype=float32)
    """

    def __init__(
        self,
        opt: AnyOptimizer | None = None,
        communicator: Communicator | None = None,
        *,
        params: Any = None,
        threshold: int = 2097152,
        deterministic: bool | str = False,
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
        buddy: bool = False,
        nccl_id: bytes | None = None,
        local_rank: int | None = None,
        world_size: int | None = None,
    ):
        asked = among(("threshold", "buffSize", *Options._fields), locals())
        made = _from_id(communicator, nccl_id, local_rank, world_size)
        self.communicator, comm = ranks(made or communicator, deterministic)
        self._made = made
        self._staging = Staging(check_int("buffSize", buffSize, least=1))
        options = Options.checked(comm, **among(Options._fields, asked))
        self._model = torch_model(opt, params)
        engine = Engine(opt, comm, options, threshold=threshold)
        super().__init__(engine, asked)
        self._partial = PartialSteps(engine)
        # what the last step was
        self._last: StepSpec | Averaged | None = None
        if self._model is not None:
            self._model.enroll(engine)
            if options.overlap:
                self._model.overlap()
        record_if_asked(engine)
        watch_first_gradients(engine)

    def close(self) -> None:
        """Refuse everything from now on.  A communicator stays open, unless it was made from ``nccl_id``: collective.

        Raises:
            FloatingPointError: on every rank alike, if the last step on a GPU was not finite, which no later step told.

        Example:
            >>> from distopt import DistOpt
            >>> opt = DistOpt()
            >>> opt.close()
            >>> opt([])
            Traceback (most recent call last):
            RuntimeError: this DistOpt is closed; make a new one
        """
        try:
            super().close()
        finally:
            if self._made:
                self._made.close()

    # -- steps

    def run(self, loss: Any, spec: StepSpec) -> bool:
        self._last = spec
        self.engine.let_in()
        if self._model is None:
            return self.engine.step(loss, spec)
        with self._model.stream():
            self._model.take_in(self.engine)
            return self.engine.step(self._model.gradients(loss), spec)

    def backward_and_partial_update(
        self, loss: Loss, threshold: int | None = None, share: float | None = None, seed: int = 0
    ) -> bool:
        """Update with this rank's own gradients; then average some of the *parameters*.  Collective.

        Without a ``share``, those of one bucket, round-robin: each parameter is averaged once in as many steps as there
        are buckets.  With one, a share of the entries of every parameter (SPARTA: Beton et al., "Improving the
        efficiency of distributed training using sparse parameter averaging", 2025): each tensor is cut into blocks of
        ``M = round(1 / share)`` neighbours, of each block one entry is averaged, and in M steps each of them once.
        Which one follows from the seed and the number of partial steps so far, so that no index is sent, and the bytes
        are spread evenly over the steps.  Optimizer state stays local.

        Args:
            loss: as for ``backward_and_update``.
            threshold: elements that fill a bucket; None for that of the constructor.
            share: of the entries that are averaged in each step, in (0, 1], at least 1e-9; None for one bucket.
            seed: chooses the entries of a share, at least 0.

        Returns:
            True if an update was applied.

        Raises:
            TypeError, ValueError: on every rank alike, for a share or a seed out of range on one of them, or if ranks
                differ in them.

        Example:
            >>> import numpy as np
            >>> from distopt import DistOpt, Parameter
            >>> from distopt.optim import SGD
            >>> p, opt = Parameter("w", np.ones(2, np.float32)), DistOpt(SGD(0.5))
            >>> opt.backward_and_partial_update([(p, np.ones(2, np.float32))])
            True
            >>> p.data
            array([0.5, 0.5], dtype=float32)
            >>> from distopt import run_ranks
            >>> def main(comm):
            ...     p = Parameter("w", np.full(6, 2.0 * comm.rank, np.float32))
            ...     opt = DistOpt(SGD(1.0), comm, broadcast=False)
            ...     for step in range(3):
            ...         opt.backward_and_partial_update([(p, np.zeros(6, np.float32))], share=1 / 3)
            ...         print("averaged", (p.data == 1).sum()) if comm.rank == 0 else None
            >>> _ = run_ranks(2, main)
            averaged 2
            averaged 4
            averaged 6
        """
        averaged = Averaged(threshold, share, seed)
        self._last = averaged
        if self._model is None:
            return self._partial.step(loss, averaged)
        with self._model.stream():
            self._model.take_in(self.engine)
            return self._partial.step(self._model.gradients(loss), averaged)

    def step(
        self,
        loss: Loss | None = None,
        compressor: Compressor | None = None,
        break_even: bool = True,
        exchange: str = "auto",
        over: str = "ranks",
    ) -> bool:
        """Make one step with any compressor; without a loss, end a step made of ``all_reduce`` and ``update``.

        Collective.

        Args:
            loss: as for ``backward_and_update``; None to end a step made by hand.
            compressor: what is sent of a bucket; None for ``Dense()``.
            break_even: all-reduce a bucket whose payloads would be more bytes than dense as a dense array of the same
                entries.
            exchange: of payloads that cannot be added on the wire: 'gather', by which sums are exact, and bytes grow
                with the ranks; 'two_phase', by which owners of shards compress the sums again; or 'auto' for a gather
                with two ranks and of less than 64 kB (``exchange.two_phases``).  'nodes': sums inside each node first,
                and the same between nodes, of these sums (``exchange.hierarchical``), which 'auto' chooses too where
                ranks share hosts and only the rounding differs: for 16 bits, int8 and int4.  'measure': each of these
                that trains the same, in turn, three steps each, and then the one of the shortest median step of the
                slowest rank, if it needs 5 % less than that of 'auto'; checkpoints keep it for the same hosts.
            over: what the sum of an entry is divided by: all 'ranks', which is the mean of what was sent; or its
                'senders', as Templar does, by which an update is up to as many times larger as there are ranks.  Of a
                window of batches it is the mean over those of the senders; zeros of a rank that has joined do not
                count.  In two phases the owner of a shard counts, before it chooses; no bucket is all-reduced as dense
                then.

        Returns:
            True if an update was applied.

        Raises:
            RuntimeError: there is no loss, and nothing was updated by hand since the last step.

        Example:
            >>> import numpy as np
            >>> from distopt import DistOpt, Parameter
            >>> from distopt.optim import SGD
            >>> p, opt = Parameter("w", np.ones(2, np.float32)), DistOpt(SGD(0.5))
            >>> from distopt.compress import Half
            >>> opt.step([(p, np.ones(2, np.float32))], Half())
            True
            >>> p.data
            array([0.5, 0.5], dtype=float32)
        """
        if loss is not None:
            return self.run(loss, with_compressor(compressor, break_even, exchange, over))
        engine = self.engine
        engine.check_open()
        if not self._updated:
            raise RuntimeError(
                "step() without a loss ends a step made by hand, but nothing was updated since the last one: "
                "opt(loss) or opt.step(loss) is a whole step; by hand, all_reduce and update come before step()"
            )
        self._updated = False
        engine.resolve_last_step()
        by_hand = StepSpec(reduced=False)
        for hook in engine.hooks:
            hook.begin(engine.progress.updates + 1, by_hand, 1)
        engine.count_update()
        engine.end_call(applied=True)
        return True

    def join(self) -> None:
        """Take part in the others' steps, without batches of its own, until no rank has any.  Collective in the end.

        This rank's gradients are zeros, and the mean is over those ranks that bring gradients; in partial steps it only
        receives averages.  With error feedback its residual is still sent: what any rank had left of means over all
        ranks is divided by all of them, however many are left when it arrives.  All ranks have the same parameters and
        counters afterwards, and may continue together.

        Raises:
            ValueError: on every rank alike, if the others' steps are not of the kind of this rank's last one, in mode,
                compressor and threshold, or if they do something else together, as ``save``, before all have joined.
            RuntimeError: on every rank alike, if this rank has made no step yet.

        Example:
            >>> import numpy as np
            >>> from distopt import DistOpt, Parameter
            >>> from distopt.optim import SGD
            >>> p, opt = Parameter("w", np.ones(2, np.float32)), DistOpt(SGD(0.5))
            >>> opt([(p, np.ones(2, np.float32))])
            True
            >>> opt.join()  # returns when all ranks have joined
        """
        self.engine.join(self._shadow_step)

    def _shadow_step(self) -> None:
        """Make the last step again without gradients.  Collective."""
        engine = self.engine
        if self._last is None:
            error = RuntimeError("join() must come after this rank's first step, which it repeats; make a step first")
            engine.agree(engine.progress.name, engine.progress.calls, error)
        pairs = [(known.param, None) for known in engine.store.collector.order.values()]
        if isinstance(self._last, Averaged):
            self._partial.step(pairs, self._last)
        elif self._last:
            engine.let_in()
            engine.step(pairs, self._last)

    def capture(
        self, loss: Callable[[], Iterable[Sequence[Any]]], compressor: Compressor | None = None, break_even: bool = True
    ) -> CapturedStep:
        """Capture a step as a CUDA graph: a call of it is the next ``step(loss, compressor)``.  Collective.

        For most models the loss returns views, which forward and backward pass have written anew, outside of the graph,
        before each step::

            views = opt.gradient_views(params)
            pairs = list(zip(params, views))
            ...  # the first batch's gradients go into the views
            step = opt.capture(lambda: pairs)

        A loss may also enqueue its own work on the current stream, as far as cupy records it: elementwise functions and
        kernels, but no matrix product (cuBLAS), no solver and no random numbers, and nothing may wait.  Its temporary
        arrays are the graph's own.  The loss is called twice here: for an ordinary step, which counts, and for the
        capture.

        Payloads are gathered, since the host takes part in two phases.  Not captured are ``Threshold``, whose payloads
        are as long as the data want, a warm-up, whose density changes, a partial step, which averages another bucket
        each time, ``clip_norm`` and ``gradient_hook``; and the optimizer is one of distopt's own.  A ``Metered``
        communicator does not see what a replay sends.  Each rank needs a process of its own: NCCL may deadlock when one
        process launches the graphs of several.

        Args:
            loss: a callable that returns (param, grad) pairs, always with the same arrays.
            compressor: what is sent of a bucket; None for ``Dense()``.
            break_even: as for ``step``.

        Returns:
            The captured step, which takes no arguments.

        Raises:
            ValueError: the step cannot be captured.
            RuntimeError: on every rank alike, for a loss that calls what cupy does not record.
        """
        self.engine.check_open()
        chosen = Dense() if compressor is None else compressor
        check_capture(self.engine, chosen)
        spec = StepSpec(lambda: chosen, break_even=break_even, exchange="gather")
        return CapturedStep(self.engine, loss, spec)

    def rejoin(self, params: Iterable[Any] | None = None, extra: Any = None) -> Any:
        """In a process that was started in the place of a lost one: wait until the others admit it, and do as they do.

        It gets the parameters, the optimizer's state, counters and schedules of the others, and begins with a residual
        of zero.  They admit it before a step; until then its rank is 0 of 1.  In a job that begins it returns at once.
        A script that grows calls it on all ranks, before its loop, and starts the loop at ``step_counter``::

            opt.rejoin(params)
            for step in range(opt.step_counter, steps):
                opt(loss)

        With ``parameter_views`` it comes before these, which are no collective then in a process that joins.
        ``distopt run --elastic --restarts K`` starts processes in the place of lost ones (``docs/guides/elastic.md``).

        Args:
            params: the parameters, which are written to by name; None for those of this DistOpt.
            extra: what else a process that joins needs: dicts, lists, numbers, texts and arrays, or a callable that
                returns them, of the lowest of the others.

        Returns:
            Their ``extra``, {} if there was none; None, and nothing is changed, in a job that begins.

        Raises:
            ValueError: it has other parameters, or in another order, or another kind of optimizer.
            RuntimeError: the others have ended before they have admitted it, or ``parameter_views`` came before.

        Example:
            >>> import numpy as np
            >>> from distopt import DistOpt, Parameter
            >>> p, opt = Parameter("w", np.ones(2, np.float32)), DistOpt()
            >>> opt.rejoin([p])
            >>> opt.step_counter
            0
        """
        others = {} if self._model is None else self._model.others

        def state() -> dict[str, Any]:
            return {"others": others, "extra": extra() if callable(extra) else extra}

        sent = Joining(self._state, self._checkpointer, params, state).rejoin()
        if sent is None:
            return None
        if self._model is not None:
            self._model.take_others(sent["others"])
        return {} if sent["extra"] is None else sent["extra"]

    # -- parameters that all ranks share

    def parameter_views(self, params: Any) -> list[Any]:
        """Return arrays, one per parameter, in memory that all ranks share, to be assigned as the parameters' data.

        They hold rank 0's values.  From now on there is one copy of the model on this machine, and each rank updates
        its share of it, and touches only that share of the optimizer's state (ZeRO stage 1, Rajbhandari et al., 2020,
        in shared memory); the results are the same, to the bit.  Collective; where parameters are shared already, on
        this rank alone, the same arrays are returned.  ``state_dict`` is collective from then on, and complete, as the
        optimizer's own ``get_states`` is not; the threshold is fixed, there are no partial steps and no ``update`` by
        hand, and what a script does to a parameter itself, one rank has to do for all.  Parameters of a PyTorch model
        are moved there, and returned.

        Args:
            params: all parameters of the model, or a PyTorch model.

        Raises:
            TypeError: on every rank alike, for an optimizer that is not distopt's own, or a parameter of 16 bits.
            ValueError: on every rank alike, if parameters are missing.
            RuntimeError: on every rank alike, where the ranks share no memory.

        Example:
            >>> import numpy as np
            >>> from distopt import DistOpt, Parameter, run_ranks
            >>> def main(comm):
            ...     p = Parameter("w", np.full(2, comm.rank, np.float32))
            ...     (p.data,) = DistOpt(communicator=comm).parameter_views([p])
            ...     return p.data.tolist()
            >>> run_ranks(2, main)
            [[0.0, 0.0], [0.0, 0.0]]
        """
        if self._model is None:
            return parameter_views(self.engine, params)
        known = self._model.known(params)
        tensors: list[Any] = self._model.move(known, parameter_views(self.engine, known))
        return tensors
