"""``LocalSteps``: ranks that train alone for a while, and then exchange how far they have come."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from distopt.buckets import Plan
from distopt.checks import check_bool
from distopt.comm import Communicator
from distopt.compress import Compressor
from distopt.engine.engine import Engine
from distopt.engine.facade import Checkpointed, plan_of, ranks, record_if_asked, torch_model
from distopt.engine.joining import Joining
from distopt.engine.local_state import EngineInnerState, LocalState, RanksInnerState
from distopt.engine.nonfinite import Policy
from distopt.engine.outer_loop import LocalOptions, LocalTraining, alone, outer_loop, places
from distopt.engine.parameters import Loss
from distopt.engine.spec import GradientHook, Options, among
from distopt.optim import AnyOptimizer

if TYPE_CHECKING:
    from distopt.lab import Advice, Wire
    from distopt.lab.cost import Link


LOCAL = [field.name for field in dataclasses.fields(LocalOptions)]


class LocalSteps(Checkpointed):
    """Wrap any optimizer so that each rank makes local steps, and ranks average how far they have come now and then.

    DiLoCo (Douillard et al., 2023): the ranks begin with the same parameters.  Each makes ``every`` steps with
    gradients of its own, which sends nothing.  Then its *pseudo-gradient* is the global parameters, which are those of
    the last exchange, minus its own.  The mean over ranks is the gradient of a step of the ``outer`` optimizer, which
    moves the global parameters; and all ranks continue from these.  So ``every`` steps send what one step of a
    ``DistOpt`` does.  The inner optimizer's state stays local, and so do clipping and a loss scale.

    Making one is collective: ranks that differ in windows, or in what is sent, all raise the same error.

    It is called as a ``DistOpt``, and counts by itself.  A window ends after every ``every``-th step of a rank; all
    ranks must make as many, or ``join``.  A step that was refused as not finite counts.  Parameters differ between
    ranks inside of a window; a model's buffers, as the means of a batch normalization, are never exchanged.

    Args:
        opt: the inner optimizer, as of ``DistOpt``: None for ``SGD()``.
        communicator: the ranks; None for ``distopt.world()``.
        every: steps of a window.
        outer: an optimizer for pseudo-gradients, of which each fragment gets a copy; None for
            ``SGD(0.7, momentum=0.9, nesterov=True)``.  Its momentum makes the outer rate ten times as large in the
            long run: with fewer than 20 windows in all ``SGD(1.0)``, the mean of parameters, is the safer choice.
        compressor: what is sent of a pseudo-gradient; None for ``Dense()``.
        fragments: cut the model into so many parts of about as many bytes, which are sent at even distances, each once
            in a window (streaming DiLoCo; Douillard et al., 2025).
        delay: take a fragment's new values so many steps after it was sent, while it travels; below ``every``.
        alpha: the share of the local value that stays then.
        params: as of ``DistOpt``: a PyTorch model, or its tensors.  Those that require a gradient later are refused.
        threshold: elements that fill a bucket.
        deterministic: add sums in rank order on every transport.
        broadcast: begin with rank 0's parameters.
        nonfinite: what becomes of this rank's gradients that are not finite, as of ``DistOpt``.
        allow_missing: leave a parameter alone in a local step without a gradient of it, as of ``DistOpt``.
        check_every: compare the global parameters of all ranks by checksum, at the first exchange after so many steps.
        num_batches: this many calls are one step.
        clip_norm: bound of the norm of this rank's gradient.
        gradient_hook: is called with this rank's gradients, before each of its steps.
        break_even: as of ``DistOpt.step``, of pseudo-gradients.
        exchange: as of ``DistOpt.step``, of pseudo-gradients.
        over: as of ``DistOpt.step``: SparseLoCo's code divides each entry by the ranks that have sent it, 'senders'.

    Raises:
        TypeError: an argument has the wrong type; the text names it.
        ValueError: one is out of range, or ranks differ in it.

    Example:
        >>> import numpy as np
        >>> from distopt import LocalSteps, Parameter, run_ranks
        >>> from distopt.optim import SGD
        >>> def main(comm):
        ...     p = Parameter("w", np.zeros(1, np.float32))
        ...     opt = LocalSteps(SGD(1.0), comm, every=2, outer=SGD(1.0))
        ...     for _ in range(4):  # towards this rank's own number
        ...         opt([(p, (p.data - comm.rank) / 2)])
        ...     return p.data.item()
        >>> run_ranks(2, main)
        [0.46875, 0.46875]
    """

    def __init__(
        self,
        opt: AnyOptimizer | None = None,
        communicator: Communicator | None = None,
        *,
        every: int,
        outer: AnyOptimizer | None = None,
        compressor: Compressor | None = None,
        fragments: int = 1,
        delay: int = 0,
        alpha: float = 0.0,
        params: Any = None,
        threshold: int = 2097152,
        deterministic: bool = False,
        broadcast: bool = True,
        nonfinite: str | Policy = "raise",
        allow_missing: bool = False,
        check_every: int = 0,
        num_batches: int = 1,
        clip_norm: float | None = None,
        gradient_hook: GradientHook | None = None,
        break_even: bool = True,
        exchange: str = "auto",
        over: str = "ranks",
    ):
        asked = among((*LOCAL, *Options._fields), locals())
        local = LocalOptions(**among(LOCAL, asked))
        self.communicator, comm = ranks(communicator, deterministic)
        own = alone(comm)
        options = Options.checked(own, **among(Options._fields, asked | {"broadcast": False, "check_every": 0}))
        inner = Engine(opt, own, options, threshold=threshold, kind="LocalSteps")
        loop = outer_loop(
            comm,
            lambda: places(inner),
            local,
            check_every=check_every,
            broadcast=broadcast,
            nonfinite="propagate" if nonfinite == "propagate" else "raise",
            deterministic=deterministic,
            line=f"num_batches={num_batches}",
        )
        self._training = LocalTraining(inner, loop)
        self._model = torch_model(opt, params)
        inner_state = EngineInnerState(self._training)
        if comm.ranks.logical:
            inner_state = RanksInnerState(self._training, self._model.buffer_bytes if self._model else tuple)
        lines = [*options.lines(own), f"outer={loop.engine.optimizer!r}"]
        super().__init__(inner, asked, LocalState(loop, inner_state, lines))
        if self._model is not None:
            with self._model.stream():
                self._training.begin([(p, None) for p in self._model.parameters])
                if broadcast:
                    self._model.broadcast_others(comm, loop.engine.agreement)
        for fragment in loop.fragments:
            record_if_asked(fragment.engine)

    def __call__(self, loss: Loss) -> bool:
        """Make one local step; at the end of a window exchange.  Collective at the first call and at exchanges.

        Args:
            loss: as of ``DistOpt.backward_and_update``.

        Returns:
            True if the local step was applied.
        """
        if self._model is None:
            return self._training.run(loss)
        self._model.refuse_new()
        with self._model.stream():
            return self._training.run(self._model.gradients(loss))

    @property
    def step_counter(self) -> int:
        """Steps so far, as all ranks count them: also those that were refused, and those of a rank that has joined."""
        return self._training.outer.step

    @property
    def global_parameters(self) -> dict[str, np.ndarray]:
        """The global parameters by name, which all ranks have alike; {} before the first call."""
        self._training.outer.land()
        return self._training.outer.values

    @property
    def outer(self) -> Any:
        """The outer optimizer, of the first fragment."""
        return self._training.outer.engine.optimizer.opt

    @property
    def plan(self) -> Plan | None:
        """The buckets of an exchange, of all fragments; printable.  None before the first call."""
        plans = [found for part in self._training.outer.fragments if (found := plan_of(part.engine)) is not None]
        if not plans:
            return None
        exchange = "; ".join(filter(None, (self._training.outer.windows.describe(), plans[0].exchange)))
        buckets, payload = (sum((getattr(p, field) for p in plans), ()) for field in ("buckets", "payload"))
        return replace(plans[0], buckets=buckets, payload=payload, exchange=exchange)

    def observe(self, callback: Callable[[int, Mapping[str, float]], object] | None = None, every: int = 100) -> None:
        """Call ``callback(exchange, numbers)`` after every ``every``-th exchange, as ``DistOpt.observe`` at steps.

        The numbers are of pseudo-gradients; exchanges are counted for each fragment.  With a ``delay`` the callback is
        called in the thread in which fragments travel.

        Args:
            callback: any of ``distopt.monitor``, for example; None on ranks that need not know.
            every: exchanges between two measurements, the same on all ranks; 0 ends them.

        Raises:
            TypeError: for what cannot be called, or for ``every`` that is no integer.
            ValueError: for ``every`` below 0, and on a GPU, where nothing is measured.
        """
        from distopt.lab.observe import observe

        for fragment in self._training.outer.fragments:
            observe(fragment.engine, callback, every)

    def advise(
        self,
        link: "str | Link | Wire",
        ranks: int | None = None,
        modes: str | Sequence[str] | None = None,
        measure: bool = True,
    ) -> "Advice":
        """Find what makes the exchange of these windows the fastest, beside dense ones at each step (``distopt.lab``).

        Args:
            link: as of ``DistOpt.advise``.
            ranks: number of ranks; None for that of the communicator.
            modes: as 'local=50+half,local=50+chunks+packed:2bit' (``lab.mode``); None for the usual ones in these
                windows.
            measure: time compression on this host.

        Returns:
            The advice, which can be printed; bytes and seconds are those of the mean step.

        Raises:
            RuntimeError: there is no plan yet; make a step first.
            ValueError: a name does not exist, or a link is out of range.
            TypeError: an argument has the wrong type.

        Example:
            >>> import numpy as np
            >>> from distopt import LocalSteps, Parameter
            >>> p, opt = Parameter("w", np.ones(1000, np.float32)), LocalSteps(every=10)
            >>> opt([(p, np.ones(1000, np.float32))])
            True
            >>> print(opt.advise("1Gbit", ranks=8, modes="local=10+half", measure=False).best)  # doctest: +SKIP
        """
        from distopt import lab

        outer = self._training.outer
        buckets = [bucket.gradients for part in outer.fragments for bucket in part.engine.store.buckets]
        local = f"local={outer.windows.every}/{outer.windows.fragments}"
        chosen = [f"{local}+{name}" for name in lab.DEFAULT] if modes is None else modes
        timed = lab.compute.measure if check_bool("measure", measure) else None
        asked = self.world_size if ranks is None else ranks
        return lab.advise(buckets, asked, lab.wire(link), chosen, 0.0, timed)

    def join(self) -> None:
        """Take part in the others' exchanges, without batches, until no rank has any.  Collective in the end.

        What this rank has changed since its last exchange counts in the next one; after that it brings nothing, and
        the mean is over those that do.  All ranks have the global parameters afterwards, and the same count of steps.

        Example:
            >>> import numpy as np
            >>> from distopt import LocalSteps, Parameter, run_ranks
            >>> from distopt.optim import SGD
            >>> def main(comm):
            ...     p = Parameter("w", np.zeros(1, np.float32))
            ...     opt = LocalSteps(SGD(1.0), comm, every=10, outer=SGD(1.0))
            ...     for _ in range(1 + comm.rank):
            ...         opt([(p, np.ones(1, np.float32))])
            ...     opt.join()
            ...     return p.data.item()
            >>> run_ranks(2, main)  # one has made one step, the other two
            [-1.5, -1.5]
        """
        self._training.join()

    def rejoin(self, params: Iterable[Any] | None = None, extra: Any = None) -> Any:
        """In a process that was started in the place of a lost one: wait until the others admit it, and do as they do.

        They admit it before a step that follows an exchange.  It begins with the global parameters, the outer
        optimizer's state, counters and schedules, a residual of zero, and a copy of the first rank's inner optimizer's
        state; and it counts in the mean of the next exchange of each fragment.  Fragments that travel land before, so
        that the ranks wait for them once.  A script that grows calls it on all ranks, before its loop, and starts the
        loop at ``step_counter``, as for ``DistOpt.rejoin``.

        Args:
            params: the parameters, in the order of the loss; None for a model that was given as ``params``.
            extra: what else a process that joins needs, or a callable that returns it.

        Returns:
            The others' ``extra``, {} if there was none; None, and nothing is changed, in a job that begins.

        Raises:
            ValueError: it has other parameters, or in another order, or another kind of optimizer.
            RuntimeError: the others have ended before they have admitted it.

        Example:
            >>> import numpy as np
            >>> from distopt import LocalSteps, Parameter
            >>> p, opt = Parameter("w", np.ones(2, np.float32)), LocalSteps(every=10)
            >>> opt.rejoin([p])
            >>> opt.step_counter
            0
        """
        known = None if params is None else list(params)
        if self._ranks.outside and not self._training.outer.begun:
            self._training.begin([(param, None) for param in known or ()])
        return Joining(self._state, self._checkpointer, known, extra).rejoin()

    def close(self) -> None:
        """Refuse everything from now on; the communicator stays open."""
        try:
            super().close()
        finally:
            self._training.outer.close()
