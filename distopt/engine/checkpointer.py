"""Checkpoints: a run that is killed at any instant goes on from the last one, to the same bits."""

import contextlib
import json
import logging
import os
import signal
import uuid
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from distopt import device
from distopt.checkpoint import CheckpointError, Pending, file, folder, lock
from distopt.checks import check_int
from distopt.comm.control import agreed
from distopt.device import is_array
from distopt.engine.hooks import StepHook
from distopt.engine.resharding import SavedRanks
from distopt.engine.training_state import TrainingState, Tree
from distopt.resilience import job, signals

LoadState = Callable[[Tree], None]

LOG = logging.getLogger("distopt")
# Locks that one DistOpt holds: each is an open file.
MOST_LOCKS = 8


class Checkpointer:
    """Save and load what of a training outlives the process."""

    def __init__(self, training: TrainingState, known: Callable[[Any], Iterable[Any]] | None = None):
        # known: makes parameters of a PyTorch model, or of its tensors; None if there is no model.
        self.training, self._comm = training, training.comm
        self.known: Callable[[Any], Iterable[Any]] = known or iter
        # Locks of the last folders, on rank 0.
        self._locks: tuple[lock.Held, ...] = ()
        # Folders in which there are no locks.
        self._unlocked: tuple[Path, ...] = ()

    def save(self, path: str | Path, params: Iterable[Any] | None = None, extra: Any = None, keep: int = 2) -> Path:
        """``DistOpt.save``.  Collective."""
        self.training.check_open()
        self.training.land()
        return self._comm.transaction(lambda: self._save(path, params, extra, keep))

    def _save(self, path: str | Path, params: Iterable[Any] | None, extra: Any, keep: int) -> Path:
        self.training.settle()
        self._on_all_ranks("saving", self._prepared_folder, path, keep)
        names = self._on_all_ranks("saving", self._next_checkpoint, Path(path))
        name, save = json.loads(names[0])
        place: Path = Path(path) / name
        about: dict[str, Any] = {"save": save}
        pending: list[Pending] = []

        def commit() -> None:
            for p in pending:
                p.commit()

        try:
            state = self.training.state() if self.training.collective else None
            self._on_all_ranks("writing", self._write, place, state, params, extra, about, pending)
            self._on_all_ranks("renaming", commit)
            self._on_all_ranks("completing", self._on_rank_0, folder.complete, place, about)
        except BaseException:
            for p in pending:
                with contextlib.suppress(OSError):
                    p.discard()
            if self._comm.rank == 0:
                folder.discard(place)
            raise
        # Only now: until all have agreed, the new one may be taken back.
        self._on_all_ranks("keeping", self._on_rank_0, folder.keep, place, keep)
        return place

    def _prepared_folder(self, path: str | Path, keep: int) -> None:
        """A folder for what can be saved, which is this job's alone to save in."""
        check_int("keep", keep, least=1)
        self.training.check()
        place = Path(path)
        place.mkdir(parents=True, exist_ok=True)
        if self._comm.rank or self._comm.outside:  # of a job that it joins later, another one has the lock
            return
        held = lock.hold(place)
        if held:
            self._locks = (*(other for other in self._locks if other is not held), held)[-MOST_LOCKS:]
        elif place not in self._unlocked:
            self._unlocked += (place,)
            self.note(f"{place}: no locks in this file system: nothing keeps two jobs from saving there at once")

    def close(self) -> None:
        """Unlock folders: other jobs may save where this one did."""
        self._locks = ()

    def _next_checkpoint(self, path: Path) -> str:
        """Rank 0 says what the checkpoint is called, and what only its files have in common."""
        if self._comm.rank:
            return ""
        name = folder.next_name(path, self.training.step)
        (path / name).mkdir(mode=0o700)
        return json.dumps([name, uuid.uuid4().hex])

    def _write(
        self,
        place: Path,
        state: Tree | None,
        params: Iterable[Any] | None,
        extra: Any,
        about: Tree,
        pending: list[Pending],
    ) -> None:
        """This rank's files, not yet under their names; ``about`` is completed."""
        about.update(self.training.facts())
        state = self.training.state() if state is None else state
        values = None if params is None else self._arrays_by_name(params)
        parameters = values and {n: device.host_copy(v) for n, v in values.items()}
        of_all, of_ranks = self.training.divide(state, parameters)
        own = {"extra": extra() if callable(extra) else extra}
        for rank, of_rank in of_ranks.items():
            pending.append(file.prepare(folder.file_of(place, rank), of_rank | own, about | {"rank": rank}))
        if self._comm.rank == 0:
            pending.append(file.prepare(folder.file_of(place, None), of_all, about))

    def _on_rank_0(self, do: Callable[..., None], *arguments: Any) -> None:
        """Call ``do`` on rank 0 alone."""
        if self._comm.rank == 0:
            do(*arguments)

    # ------------------------------------------------------------------------------------------------- stop

    def save_when_stopped(
        self, path: str | Path, params: Iterable[Any] | None = None, extra: Any = None, keep: int = 2
    ) -> None:
        """``DistOpt.save_when_stopped``.  Collective."""
        self.training.check_open()
        self.training.land()

        def prepare() -> None:
            self._on_all_ranks("preparing to save", self._prepared_folder, path, keep)
            self._on_all_ranks("listening for signals, to save", signals.listen)

        self._comm.transaction(prepare)
        job.mark(job.STOPS)
        hooks = self.training.hooks
        hooks[:] = [hook for hook in hooks if not isinstance(hook, StopOnSignal)]
        hooks.append(StopOnSignal(self, path, None if params is None else list(self.known(params)), extra, keep))

    # ------------------------------------------------------------------------------------------------- load

    def load(self, path: str | Path, params: Iterable[Any] | None, load_state: LoadState) -> Any:
        """``DistOpt.load``.  Collective.  ``load_state`` takes the state that was read."""
        self.training.check_open()
        self.training.abandon()
        return self._comm.transaction(lambda: self._load(path, params, load_state))

    def _load(self, path: str | Path, params: Iterable[Any] | None, load_state: LoadState) -> Any:
        place = Path(path)
        names = json.loads(
            self._on_all_ranks("loading", lambda: json.dumps([] if self._comm.rank else folder.names(place)))[0]
        )
        for name in names:
            shards: list[Any] = []
            bad = self._on_all_ranks(f"loading {name}", self._read, place / name, shards)
            if not any(map(json.loads, bad)):
                break
            if self._comm.rank == 0:
                first = next(f"rank {r}: {text}" for r, text in enumerate(map(json.loads, bad)) if text)
                warnings.warn(f"passed over the checkpoint {place / name}: {first}", RuntimeWarning, stacklevel=2)
        else:
            if names:
                raise agreed(CheckpointError(place, "checkpoints", "none is good"), self._comm.rank == 0)
            self.note(f"there is no checkpoint in {place}: nothing was loaded")
            return None
        # In a folder that others may write to, a checkpoint may be anybody's.
        with contextlib.suppress(OSError):
            owner = (place / name).stat().st_uid
            if owner != os.geteuid():
                self.note(f"loads {place / name}, which another user has written, of uid {owner}")
        state, parameters, extra = shards[0]
        values: dict[str, np.ndarray] = {}
        # All ranks find that they can, before one of them changes anything.
        self._on_all_ranks("loading", lambda: values.update(self._checked(params, state, parameters)))
        self._on_all_ranks("going on", self._write_loaded, load_state, state, values, parameters)
        return {} if extra is None else extra

    def _read(self, place: Path, into: list[Any]) -> str:
        """Take in all that this rank needs of a checkpoint; return what is wrong with it, in JSON."""
        ranks = self._comm.ranks

        def read(number: int | None) -> Any:
            path = folder.file_of(place, number)
            tree, said = file.read(path)
            folder.compare(path, said, about)
            return tree

        try:
            about = folder.manifest(place)
            saved = about["world_size"]
            if saved != ranks.size:
                self.note(f"{place}: {saved} ranks saved it, {ranks.size} go on; the pending mean stays as it was")
            of_all = read(None)
            of_ranks = {r: SavedRanks(saved, r, ranks.size, read(r % saved), read) for r in ranks.here}
            state, parameters = self.training.unite(place, about, of_all, of_ranks)
            into.append((state, parameters, of_ranks[ranks.here[0]].mine["extra"]))
        except (CheckpointError, OSError) as error:
            return json.dumps(str(error))
        except (KeyError, TypeError, AttributeError) as error:
            return json.dumps(f"{place}: has another structure: {type(error).__name__}: {error}")
        return json.dumps("")

    def _checked(self, params: Iterable[Any] | None, state: Tree, parameters: Any) -> dict[str, np.ndarray]:
        """Return the arrays that saved parameters go to; ValueError if these are others, or for another state."""
        if parameters is None and params is not None:
            raise ValueError("params must be None, as the checkpoint was saved without parameters")
        values = {} if parameters is None else self.values(params)
        if parameters is not None and params is None and not values:
            raise ValueError(
                "params must be the model's, as the checkpoint has parameters, got None; call load(path, params)"
            )
        saved = parameters or {}
        for name in saved.keys() | values.keys():
            a, b = (f"{x[name].shape} {x[name].dtype}" if name in x else "nothing" for x in (saved, values))
            if a != b:
                raise ValueError(f"{name}: the checkpoint has {a}, the model has {b}")
            if not device.writable(values[name]):
                raise ValueError(f"{name}: its array must be writable, got a read-only one")
        self.training.check_state(state)
        return values

    def _write_loaded(self, load_state: LoadState, state: Tree, values: dict[str, np.ndarray], parameters: Any) -> None:
        # First, since an optimizer may refuse it.
        load_state(state)
        with self.training.writing_parameters():
            for name, value in values.items():
                device.copy(value, parameters[name])

    # ------------------------------------------------------------------------------------------------- without a file

    def values(self, params: Iterable[Any] | None) -> dict[str, np.ndarray]:
        """Return the arrays of parameters by name; None for those that a step has brought."""
        if params is not None:
            return self._arrays_by_name(params)
        return {name: known.value for name, known in self.training.collector.order.items()}

    def take(self, params: Iterable[Any] | None, state: Tree, parameters: Any) -> None:
        """Go on, on this rank alone, from a state and parameters that another one has; raises what ``load`` raises."""
        values = self._checked(params, state, parameters)
        self._write_loaded(self.training.load, state, values, parameters)

    def _arrays_by_name(self, params: Iterable[Any]) -> dict[str, np.ndarray]:
        """Return arrays by parameter name; ValueError for two of one name, or a bare array that has none yet."""
        values: dict[str, np.ndarray] = {}
        for param in self.known(params):
            if is_array(param) and not self.training.collector.order:
                raise ValueError(
                    "a parameter must be named before the first step, got a bare array; use distopt.Parameter"
                )
            name, value = self.training.collector.identify(param)
            if name in values:
                raise ValueError(f"{name}: given twice; names must be unique")
            values[name] = value
        return values

    # ------------------------------------------------------------------------------------------------- together

    def _on_all_ranks(self, what: str, do: Callable[..., Any], *arguments: Any) -> list[str]:
        """Call ``do`` on every rank (``Agreement.run_on_all``).  Collective."""
        agreement, step = self.training.agreement, self.training.step
        return agreement.run_on_all(f"{what} a checkpoint, DistOpt {agreement.number}, step {step}", do, *arguments)

    def note(self, text: str) -> None:
        """Log a text on rank 0."""
        if self._comm.rank == 0:
            LOG.warning("distopt: %s", text)


class StopOnSignal(StepHook):
    """Save a checkpoint and end all ranks, once a signal has asked one of them to end."""

    def __init__(self, checkpointer: Checkpointer, path: str | Path, params: list[Any] | None, extra: Any, keep: int):
        self._checkpointer, self._arguments = checkpointer, (path, params, extra, keep)
        self._done = False

    def after_call(self, step: int, applied: bool) -> None:
        """Raise SystemExit after a checkpoint, if the last vote has brought a signal.  Collective."""
        # A signal's number, as of the last vote; 0 for none.
        number = self._checkpointer.training.comm.control.stop
        if number and not self._done:
            self._done = True
            place = self._checkpointer.save(*self._arguments)
            self._checkpointer.note(f"ended by {signal.Signals(number).name} after step {step}; saved {place}")
            raise SystemExit(128 + number)
