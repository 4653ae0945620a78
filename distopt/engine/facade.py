"""The public methods that DistOpt, Trainer and simulations have in common."""

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from distopt.buckets import Plan
from distopt.checks import check_int
from distopt.comm import Communicator, world
from distopt.comm.exact import as_deterministic
from distopt.comm.ranks import housed
from distopt.engine.checkpointer import Checkpointer
from distopt.engine.engine import Engine
from distopt.engine.hooks import RECORD, FirstGradients
from distopt.engine.state import EngineState
from distopt.engine.training_state import TrainingState
from distopt.engine.views import gradient_views
from distopt.optim.foreign import is_torchs


def ranks(communicator: Any, deterministic: bool | str) -> tuple[Communicator, Communicator]:
    """Return the communicator that a user means, None for ``world()``, and the one that adds up as it was asked to."""
    if not isinstance(communicator, Communicator | None):
        kind = type(communicator).__name__
        raise TypeError(f"communicator must be a distopt.comm.Communicator or None, got {kind}")
    meant = world() if communicator is None else communicator
    return meant, as_deterministic(meant, deterministic)


def record_if_asked(engine: Engine) -> None:
    """Record the gradients of an engine's steps if ``distopt record`` has started this process."""
    if os.environ.get(RECORD):
        # No other training loads it.
        from distopt.lab.tape.hook import record

        record(engine)


def watch_first_gradients(engine: Engine) -> None:
    """Warn if all ranks bring an engine the same gradients."""
    if engine.comm.ranks.size > 1 and engine.comm.gpu is None and not engine.comm.membership:
        engine.hooks.append(FirstGradients(engine.hooks, engine.comm))


def torch_model(opt: Any, params: Any) -> Any:
    """Return the parameters of a PyTorch model as a ``TorchModel``; None if there is none."""
    of_torch = is_torchs(opt)
    if params is None and not of_torch:
        return None
    # Torch is there.
    from distopt.torch.model import TorchModel

    return TorchModel(params, opt if of_torch else None)


def plan_of(engine: Engine) -> Plan | None:
    """Return the plan of an engine, with what its last step's compressor sends, and how; None if there is none."""
    exchange, ranks = engine.reducers.describe(engine.compressor, engine.spec), engine.comm.ranks
    lives = f"payloads are of one of {housed(ranks.size, engine.comm.size)}" if ranks.logical else ""
    return engine.store.plan(engine.compressor, "; ".join(filter(None, (exchange, lives))))


class Facade:
    """Hold an engine, and what was given to make it: the options by name, as the user gave them."""

    # The ``TorchModel``, if there is one.
    _model: Any = None

    def __init__(self, engine: Engine, arguments: dict[str, Any], ranks: Communicator | None = None):
        self.engine, self._arguments, self._ranks = engine, arguments, ranks or engine.comm

    @property
    def opt(self) -> Any:
        """The wrapped optimizer."""
        return self.engine.optimizer.opt

    @property
    def threshold(self) -> int:
        """Elements that fill a bucket, from the next step on; all ranks must assign the same."""
        return self.engine.threshold

    @threshold.setter
    def threshold(self, threshold: int) -> None:
        self.engine.threshold = threshold

    @property
    def step_counter(self) -> int:
        """Updates applied so far."""
        return self.engine.progress.updates

    @property
    def skipped(self) -> int:
        """Calls dropped so far under ``nonfinite='skip'``, or by a LossScaler."""
        return self.engine.nonfinite.policy.skipped

    @property
    def clip_norm(self) -> float | None:
        """The bound of the global norm of an update's gradients; None if there is none."""
        return self.engine.means.clip_norm

    @property
    def gradient_norm(self) -> float | None:
        """The global norm of the last update's mean gradient before it was clipped; None without ``clip_norm``."""
        return self.engine.means.norm

    @property
    def plan(self) -> Plan | None:
        """Which parameters share a bucket; printable.  None before the first step or ``gradient_views``."""
        return plan_of(self.engine)

    def __repr__(self) -> str:
        """One line: the optimizer with its numbers as they are now, the rank, the steps so far, the chosen options."""
        engine, comm, ranks = self.engine, self._ranks, self._ranks.ranks
        who = f"rank {comm.rank} of {comm.size}"
        if ranks.logical:
            who = f"ranks {', '.join(map(str, ranks.here))} of {ranks.size}, process {comm.rank} of {comm.size}"
        state = [who, f"{self.step_counter} steps"]
        usual = inspect.signature(type(self)).parameters
        chosen = [f"{n}={v!r}" for n, v in self._arguments.items() if n in usual and v != usual[n].default]
        optimizer = str(engine.optimizer).removeprefix("optimizer ")
        return f"{type(self).__name__}({', '.join([optimizer, *state, *chosen])}{', closed' * engine.closed})"

    def gradient_views(self, params: Iterable[Any]) -> list[np.ndarray]:
        """Return arrays, one per parameter, in which gradients lie where they are reduced and are never packed.

        Makes the plan, in the order given, if there is none; collective, like the first step.  A later step with
        another ``threshold`` turns the views into ordinary arrays.  A ``LossScaler`` divides gradients in their views:
        after a call that raised they must be written anew.

        Raises:
            TypeError: on every rank alike, for parameters of 16 bits, whose gradients are added up in float32.

        Example:
            >>> import numpy as np
            >>> from distopt import DistOpt, Parameter
            >>> from distopt.optim import SGD
            >>> p, opt = Parameter("w", np.ones(2, np.float32)), DistOpt(SGD(0.5))
            >>> (view,) = opt.gradient_views([p])
            >>> view[:] = 1
            >>> opt([(p, view)])
            True
            >>> p.data
            array([0.5, 0.5], dtype=float32)
        """
        return gradient_views(self.engine, params)

    def observe(self, callback: Callable[[int, Mapping[str, float]], object] | None = None, every: int = 100) -> None:
        """Call ``callback(step, numbers)`` after every ``every``-th step, with how good what it sent is.

        A second call takes the place of the first.  Step numbers count updates; partial steps, and those that are made
        of ``all_reduce`` and ``update``, are left out.

        The numbers are ``energy``, ``residual``, ``residual_ratio``, ``age`` and ``density``, of this rank or the mean
        over virtual ones, and ``cosine``, of all ranks (``lab.observe.Quality`` says what they are); and with a
        ``Metered`` communicator ``payload`` and ``wire``, bytes since the start, as an ``Experiment`` wants them.  The
        training gets the same bits as without.  A step that is measured has one dense all-reduce more, each of its
        calls with ``sync_on_apply=False``, which is the phase 'quality' of a ledger, but none of those bytes.

        What a callback raises is raised after the step, which is done.

        Args:
            callback: any of ``distopt.monitor``, for example; None on ranks that need not know.
            every: steps between two measurements, the same on all ranks; 0 ends them.

        Raises:
            TypeError: for what cannot be called, or for ``every`` that is no integer.
            ValueError: for ``every`` below 0, and on a GPU, where nothing is measured.

        Example:
            >>> import numpy as np
            >>> from distopt import DistOpt, Parameter
            >>> from distopt.compress import TopK
            >>> p, opt = Parameter("w", np.ones(2, np.float32)), DistOpt()
            >>> opt.observe(lambda step, numbers: print(step, numbers["density"]), every=1)
            >>> opt.step([(p, np.array([1, 3], np.float32))], TopK(0.5))
            1 0.5
            True
        """
        self.engine.check_own_rank("observe")
        # Most trainings never ask.
        from distopt.lab.observe import observe

        observe(self.engine, callback, every)

    def on_resize(self, callback: Callable[[int, int], object]) -> None:
        """Call ``callback(rank, size)`` when a rank was lost, and this one has another number among fewer.

        For a sampler that shares the data out anew; without it every rank keeps its share, and that of the lost one is
        left out.  Ranks are lost, and the others go on, under ``distopt run --elastic``.  It is called on every rank
        that is left, after the call in which the loss was found.

        Args:
            callback: is given this rank's number and how many there are.

        Raises:
            TypeError: it cannot be called.

        Example:
            >>> from distopt import DistOpt
            >>> opt, batches = DistOpt(), list(range(12))
            >>> def share(rank, size):
            ...     global mine
            ...     mine = batches[rank::size]
            >>> share(opt.global_rank, opt.world_size)
            >>> opt.on_resize(share)
        """
        if not callable(callback):
            raise TypeError(f"callback must be callable with (rank, size), got {callback!r:.60}")
        if self._ranks.membership:
            self._ranks.membership.on_resize(callback)

    def resize(self, processes: int) -> None:
        """Go on with so many processes, under ``distopt run --elastic``.  Collective.

        Where there are more, those of the highest ranks end their scripts, with exit code 0.  Where there are fewer,
        the launcher starts others, over torch, which the next steps let in when they come (``rejoin``).  What the job
        learns stays the same with logical ranks; else the mean is one over more or fewer ranks, and what those that
        leave have not sent yet is lost.

        Args:
            processes: their number, at least 1, and at most that of logical ranks.

        Raises:
            TypeError: it is no integer.
            ValueError: it is out of range, or another one on another rank.
            RuntimeError: the job is not elastic, or nobody can start processes.
            SystemExit: in the processes that leave.

        Example:
            A script that is to have four processes from the hundredth step on::

                opt.rejoin(params)
                while opt.step_counter < steps:
                    if opt.step_counter == 100 and opt.communicator.size != 4:
                        opt.resize(4)
                    opt.step(loss)
        """
        ranks, n = self._ranks.ranks, check_int("processes", processes, least=1)
        if ranks.logical and n > ranks.size:
            raise ValueError(f"processes must be at most {ranks.size}, the number of logical ranks, got {n}")
        if self._ranks.membership is None:
            raise RuntimeError(f"resize must be in a job of distopt run --elastic, got {self._ranks!r}")
        self._ranks.membership.resize(n)

    def close(self) -> None:
        """Refuse everything from now on; the communicator stays open.

        Raises:
            FloatingPointError: on every rank alike, if the last step on a GPU was not finite, which no later step told.

        Example:
            >>> from distopt import DistOpt
            >>> opt = DistOpt()
            >>> opt.close()
            >>> opt.wait()
            >>> opt([])
            Traceback (most recent call last):
            RuntimeError: this DistOpt is closed; make a new one
        """
        self.engine.close()


class Checkpointed(Facade):
    """Facade whose state outlives the process, in checkpoints."""

    def __init__(self, engine: Engine, arguments: dict[str, Any], training: TrainingState | None = None):
        self._state = training or EngineState(engine, engine.options.lines(engine.comm))
        super().__init__(engine, arguments, self._state.comm)
        self._checkpointer = Checkpointer(self._state, self._model.known if self._model else None)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._ranks.ranks.size

    @property
    def global_rank(self) -> int:
        """This process among all."""
        return self._ranks.rank

    @property
    def local_rank(self) -> int:
        """This process among those of its node."""
        return self._ranks.local_rank

    def close(self) -> None:
        """Refuse everything from now on; other jobs may then save to the same folder.

        Raises:
            FloatingPointError: on every rank alike, if the last step on a GPU was not finite, which no later step told.
        """
        self._checkpointer.close()
        super().close()

    def state_dict(self) -> dict[str, Any]:
        """Return copies of everything that changes between steps: plain numbers, and numpy arrays by parameter name.

        The wrapped optimizer's own ``state_dict()`` or ``get_states()`` is in it, parameters are not.  Collective if
        parameters are shared (``parameter_views``), since each rank has its share of the optimizer's state then, and of
        logical ranks in an elastic job, which may have come to live in another process since the last step.

        Raises:
            RuntimeError: an update failed halfway, and no checkpoint has been loaded since.

        Example:
            >>> import numpy as np
            >>> from distopt import DistOpt, Parameter
            >>> from distopt.optim import SGD
            >>> p, opt = Parameter("w", np.ones(2, np.float32)), DistOpt(SGD(0.5))
            >>> opt([(p, np.ones(2, np.float32))])
            True
            >>> opt.state_dict()["step_counter"]
            1
        """
        if self._ranks.ranks.logical and self._ranks.membership:
            self._ranks.transaction(self._state.settle)
        return self._state.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` returned, with parameters that the caller has loaded on every rank.

        Args:
            state: the dict.

        Raises:
            ValueError: before anything changes, for what is no such dict or belongs to other parameters, and for one
                that was saved in the middle of a window of another ``num_batches``.

        Example:
            >>> import numpy as np
            >>> from distopt import DistOpt, Parameter
            >>> from distopt.optim import SGD
            >>> p, opt = Parameter("w", np.ones(2, np.float32)), DistOpt(SGD(0.5))
            >>> opt([(p, np.ones(2, np.float32))])
            True
            >>> again = DistOpt(SGD(0.5))
            >>> again.load_state_dict(opt.state_dict())
            >>> again.step_counter
            1
        """
        self._state.load(state)

    def save(self, path: str | Path, params: Iterable[Any] | None = None, extra: Any = None, keep: int = 2) -> Path:
        """Save everything that changes between steps in a new checkpoint in a folder.  Collective.

        That is the optimizer's state, counters and schedules by parameter name, each rank's residuals and accumulation
        window, and the parameters if they are given (once; per rank if partial steps let them differ).

        A checkpoint is a folder of files in safetensors' layout, each with checksums, of which one is written per rank
        and one for all.  It is one when its manifest appears, after all files have reached the disk; until then the
        older ones are what ``load`` finds, of which the newest ``keep`` - 1 stay.  Hosts must share the folder, and
        other jobs must not save there before this one has ended, or ``close`` was called: rank 0 holds a lock in it.

        Args:
            path: the folder of checkpoints.
            params: the parameters; None if they are saved elsewhere.
            extra: this rank's own dicts, lists, numbers, texts and arrays, as a random generator's state or an epoch;
                or a callable that returns them.
            keep: the number of checkpoints that stay in the folder.

        Returns:
            The checkpoint's folder, which ``load`` takes too.

        Raises:
            TypeError: on every rank alike, for what cannot be saved; no new checkpoint is left, as for the others.
            ValueError: on every rank alike, for a bare array as a parameter before the first step.
            RuntimeError: on every rank alike, with the OSError of a rank that cannot write, where another job saves in
                this folder, and after an update that failed halfway.

        Example:
            >>> import numpy as np
            >>> from distopt import DistOpt, Parameter
            >>> from distopt.optim import SGD
            >>> p, opt = Parameter("w", np.ones(2, np.float32)), DistOpt(SGD(0.5))
            >>> opt([(p, np.ones(2, np.float32))])
            True
            >>> opt.save("run", [p], extra={"epoch": 3}).name
            '000001-step-1'
        """
        return self._checkpointer.save(path, params, extra, keep)

    def load(self, path: str | Path, params: Iterable[Any] | None = None) -> Any:
        """Go on from the newest good checkpoint in a folder.  Collective.

        A checkpoint that a rank cannot read is passed over, on all ranks, with a warning.

        Other ranks than N may go on, with M of them: the pending mean over ranks stays, each rank's residual and window
        being the sum of those of every M-th saved rank, times M / N; what partial steps let differ is averaged; extra
        is that of a rank modulo N.

        Args:
            path: the folder of checkpoints, or a checkpoint.
            params: the parameters, into which the saved ones are written, by name; those that a step has brought
                already need not be given.

        Returns:
            This rank's ``extra``, {} if there was none; None, and nothing is changed, if there is no checkpoint, which
            rank 0 logs.

        Raises:
            CheckpointError: on every rank alike, if there are checkpoints and none is good.
            RuntimeError: on every rank alike, with the OSError of rank 0 if it cannot read the folder.
            ValueError: on every rank alike, before anything changes, for a file, for a checkpoint of other parameters,
                of parameters that were not given, of another kind of optimizer, or of a window that is open with
                another ``num_batches`` or ``sync_on_apply``.

        Example:
            >>> import numpy as np
            >>> from distopt import DistOpt, Parameter
            >>> from distopt.optim import SGD
            >>> p, opt = Parameter("w", np.ones(2, np.float32)), DistOpt(SGD(0.5))
            >>> opt([(p, np.ones(2, np.float32))])
            True
            >>> _ = opt.save("kept", [p], extra={"epoch": 3})
            >>> DistOpt(SGD(0.5)).load("kept", [p])
            {'epoch': 3}
        """
        return self._checkpointer.load(path, params, self.load_state_dict)

    def save_when_stopped(
        self, path: str | Path, params: Iterable[Any] | None = None, extra: Any = None, keep: int = 2
    ) -> None:
        """Make SIGTERM or Ctrl-C on any rank end all ranks, after the same step, with a checkpoint.  Collective.

        The ranks' next vote makes the signal known, the step is finished, and SystemExit with 128 + the signal's number
        is raised after it.  A second signal, but no SIGTERM within two seconds of another, does at once what the first
        one would have done.  Of several DistOpts in a process that which makes the next step saves, and none after it.

        ``distopt run`` passes signals on to the ranks, and so does MPICH's mpiexec.  Open MPI's mpirun kills its ranks
        half a second later, and only what was saved before is left.

        Args:
            path: as for ``save``.
            params: as for ``save``.
            extra: as for ``save``; best a callable, which is called when the signal has come.
            keep: as for ``save``.

        Raises:
            ValueError: on every rank alike, where one is not the main thread of its process.
            RuntimeError: on every rank alike, where ``save`` would raise it: later it is too late.

        Example:
            >>> import numpy as np
            >>> from distopt import DistOpt, Parameter
            >>> from distopt.optim import SGD
            >>> p, opt = Parameter("w", np.ones(2, np.float32)), DistOpt(SGD(0.5))
            >>> opt.save_when_stopped("run", [p])  # doctest: +SKIP
        """
        self._checkpointer.save_when_stopped(path, params, extra, keep)
