"""Checkpoints: a run that is killed at any instant goes on from the last one, to the same bits."""

import contextlib
import json
import signal
import sys
import uuid
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from distopt import device, job, signals
from distopt.checkpoint import CheckpointError, Pending, file, folder, lock, ranks
from distopt.compress.dgc import DECAY
from distopt.device import is_array
from distopt.guard import agreed, fingerprint
from distopt.memory import HALF_LOADED
from distopt.numbers import whole
from distopt.uneven import Uneven

LONGEST = 2000  # characters of an optimizer's text
MOST_LOCKS = 8  # that one DistOpt holds: each is an open file
WINDOW = "window"  # of gradients, which are sums over ranks if each batch was exchanged


class Saving(Uneven):
    """What outlives the process."""

    _last_wish: tuple[str | Path, list[Any] | None, Any, int] | None = None  # what to save when a signal comes
    _locks: tuple[lock.Held, ...] = ()  # on rank 0, of the last folders
    _unlocked: tuple[Path, ...] = ()  # folders in which there are no locks

    def save(self, path: str | Path, params: Iterable[Any] | None = None, extra: Any = None, keep: int = 2) -> Path:
        """Save everything that changes between steps in a new checkpoint in the folder ``path``; collective.

        The optimizer's state, counters and schedules by parameter name, each rank's residuals and accumulation window,
        and the parameters if they are given (once; per rank if partial steps let them differ).  ``extra`` is this
        rank's own: dicts, lists, numbers, texts and arrays, or a callable that returns them; a random generator's
        state, an epoch.

        A checkpoint is a folder of files in safetensors' layout, each with checksums, of which one is written per rank
        and one for all.  It is one when its manifest appears, after all files have reached the disk; until then the
        older ones are what ``load`` finds, of which the newest ``keep`` - 1 stay.  Hosts must share the folder, and
        other jobs must not save there before this one has ended, or ``close`` was called: rank 0 holds a lock in it.
        Returns the checkpoint's folder, which ``load`` takes too.

        Raises, on every rank alike, and leaves no new checkpoint: TypeError for what cannot be saved, ValueError for a
        bare array as a parameter before the first step, RuntimeError with the OSError of a rank that cannot write,
        where another job saves in this folder, and after an update that failed halfway.
        """
        self._check_open()
        self._settle()
        self._together("saving", self._prepared_folder, path, keep)
        names = self._together("saving", self._next_checkpoint, Path(path))
        name, save = json.loads(names[0])
        place: Path = Path(path) / name
        about: dict[str, Any] = {"save": save}
        pending: list[Pending] = []
        try:
            shared = self.state_dict() if self._sharded else None  # which is collective
            self._together("writing", self._write, place, shared, params, extra, about, pending)
            self._together("renaming", _commit, pending)
            self._together("completing", self._alone, folder.complete, place, about)
        except BaseException:
            for p in pending:
                with contextlib.suppress(OSError):
                    p.discard()
            if self._wire.rank == 0:
                folder.discard(place)
            raise
        # only now: until all have agreed, the new one may be taken back
        self._together("keeping", self._alone, folder.keep, place, keep)
        return place

    def _prepared_folder(self, path: str | Path, keep: int) -> None:
        """A folder for what can be saved, which is this job's alone to save in."""
        whole("keep", keep, least=1)
        if failed := self._half_applied():
            raise failed
        place = Path(path)
        place.mkdir(parents=True, exist_ok=True)
        self._alone(self._hold, place)

    def _hold(self, place: Path) -> None:
        held = lock.hold(place)
        if held:
            self._locks = (*(other for other in self._locks if other is not held), held)[-MOST_LOCKS:]
        elif place not in self._unlocked:
            self._unlocked += (place,)
            self._note(f"{place}: no locks in this file system: nothing keeps two jobs from saving there at once")

    def close(self) -> None:
        """As DistOpt's; other jobs may save where this one did."""
        self._locks = ()
        super().close()

    def _next_checkpoint(self, path: Path) -> str:
        """Rank 0 says what the checkpoint is called, and what only its files have in common."""
        if self._wire.rank:
            return ""
        name = folder.next_name(path, self.step_counter)
        (path / name).mkdir(mode=0o700)
        return json.dumps([name, uuid.uuid4().hex])

    def _about(self) -> dict[str, Any]:
        """What a reader of a checkpoint wants to know first."""
        window = self._window
        own_calls = window.batches > 0 and window.sent is False  # of a first partial step, whose gradients are its own
        return {
            "world_size": self._wire.size,
            "step": self.step_counter,
            "options": [*self._options, f"threshold={self.threshold}"],
            "optimizer": repr(self._optimizer.opt)[:LONGEST],
            "ranks_differ": self._partial > 0 or own_calls,
            "window_of_sums": not window.sync_on_apply and (window.sent is True or not (self._partial or own_calls)),
        }

    def _write(
        self,
        place: Path,
        shared: dict[str, Any] | None,
        params: Iterable[Any] | None,
        extra: Any,
        about: dict[str, Any],
        pending: list[Pending],
    ) -> None:
        """This rank's files, not yet under their names; ``about`` is completed."""
        about.update(self._about())
        state = self.state_dict() if shared is None else shared
        mine = {"states": state.pop("states"), "extra": extra() if callable(extra) else extra}
        values = None if params is None else self._named(params)
        model = {
            "optimizer": state.pop("optimizer"),
            "parameters": values and {n: device.host_copy(v) for n, v in values.items()},
        }
        ours = dict(state)
        if about["ranks_differ"]:
            mine |= model
        else:
            ours |= model
        rank = self._wire.rank
        pending.append(file.prepare(folder.file_of(place, rank), mine, about | {"rank": rank}))
        if rank == 0:
            pending.append(file.prepare(folder.file_of(place, None), ours, about))

    def _alone(self, do: Callable[..., None], *arguments: Any) -> None:
        """What one rank does for all."""
        if self._wire.rank == 0:
            do(*arguments)

    # ------------------------------------------------------------------------------------------------- stop

    def save_when_stopped(
        self, path: str | Path, params: Iterable[Any] | None = None, extra: Any = None, keep: int = 2
    ) -> None:
        """From now on SIGTERM or Ctrl-C on any rank ends all, after the same step, with a checkpoint; collective.

        The arguments are those of ``save``; ``extra`` is best a callable, which is called then.  The ranks' next vote
        makes the signal known, the step is finished, and SystemExit with 128 + the signal's number is raised behind it.
        A second signal does at once what the first one would have done.  Of several DistOpts in a process that which
        makes the next step saves, and none after it.

        ``distopt run`` passes signals on to the ranks, and so does MPICH's mpiexec.  Open MPI's mpirun kills its ranks
        half a second later, and only what was saved before is left.

        Raises, on every rank alike, ValueError where one is not the main thread of its process, and RuntimeError where
        ``save`` would, since it is too late then.
        """
        self._check_open()
        self._together("preparing to save", self._prepared_folder, path, keep)
        self._together("listening for signals, to save", signals.listen)
        job.mark(job.STOPS)
        self._last_wish = path, None if params is None else list(params), extra, keep

    def _ended(self, applied: bool) -> None:
        super()._ended(applied)
        number, wish = self._wire.control.stop, self._last_wish
        if number and wish is not None:
            self._last_wish = None
            place = self.save(*wish)
            self._note(f"ended by {signal.Signals(number).name} after step {self.step_counter}; saved {place}")
            raise SystemExit(128 + number)

    # ------------------------------------------------------------------------------------------------- load

    def load(self, path: str | Path, params: Iterable[Any] | None = None) -> Any:
        """Go on from the newest good checkpoint in the folder ``path``, or from the one that it is; collective.

        Writes the saved parameters, by name, into ``params`` (those that this DistOpt knows already, if there are any,
        need not be given), and returns this rank's ``extra``, {} if there was none; None, and nothing is changed, if
        there is no checkpoint, which rank 0 says on stderr.  A checkpoint that a rank cannot read is passed over, on
        all ranks, with a warning.

        Other ranks than N may go on, with M of them: the pending mean over ranks stays, each rank's residual and window
        being the sum of those of every M-th saved rank, times M / N; what partial steps let differ is averaged; extra
        is that of a rank modulo N.

        Raises, on every rank alike, CheckpointError if there are checkpoints and none is good, RuntimeError with the
        OSError of rank 0 if it cannot look into the folder, and ValueError, before anything changes, for a file, and
        for one of other parameters, of parameters that were not given, of another kind of optimizer,
        or of a window that is open with another ``num_batches`` or ``sync_on_apply``.
        """
        self._check_open()
        self._learn()
        given = Path(path)
        found = json.loads(self._together("loading", self._checkpoints, given)[0])
        for name in found:
            shards: list[Any] = []
            bad = self._together(f"loading {name}", self._read, given / name, shards)
            if not any(map(json.loads, bad)):
                return self._go_on(params, *shards[0])
            self._warn(f"passed over the checkpoint {given / name}: {_first(bad)}")
        if found:
            raise agreed(CheckpointError(given, "checkpoints", "none is good"), self._wire.rank == 0)
        self._note(f"there is no checkpoint in {given}: nothing was loaded")
        return None

    def _checkpoints(self, path: Path) -> str:
        return json.dumps(folder.names(path) if self._wire.rank == 0 else [])

    def _read(self, place: Path, into: list[Any]) -> str:
        """All that this rank needs of a checkpoint; what is wrong with it, in JSON."""
        try:
            into.append(self._assembled(place))
        except (CheckpointError, OSError) as error:
            return json.dumps(str(error))
        except (KeyError, TypeError, AttributeError) as error:
            return json.dumps(f"{place}: has another structure: {type(error).__name__}: {error}")
        return json.dumps("")

    def _assembled(self, place: Path) -> tuple[dict[str, Any], dict[str, Any], Any]:
        """A state for ``load_state_dict``, parameters by name, and extra."""
        about = folder.manifest(place)
        saved, rank, size = about["world_size"], self._wire.rank, self._wire.size

        def read(number: int | None) -> Any:
            path = folder.file_of(place, number)
            tree, said = file.read(path)
            folder.compare(path, said, about)
            return tree

        ours, mine = read(None), read(rank % saved)
        if about["ranks_differ"]:
            ours |= _model(mine) if saved == size else ranks.mean(saved, lambda r: _model(read(r)))
        other = about["window_of_sums"] == self._window.sync_on_apply and not about["ranks_differ"]
        if ours["batches"] and other:
            kind = f"sync_on_apply={not about['window_of_sums']}"
            raise ValueError(f"{place} was saved in the middle of a window with {kind}")
        sums = [WINDOW] if about["window_of_sums"] else []
        states = mine["states"]
        if saved != size:
            states = ranks.pending(rank, size, saved, lambda r: read(r)["states"], sums, [DECAY])
            self._note(f"{place}: {saved} ranks saved it, {size} go on; the pending mean stays as it was")
        parameters = ours.pop("parameters")
        return ours | {"states": states}, parameters, mine["extra"]

    def _go_on(self, params: Iterable[Any] | None, state: dict[str, Any], parameters: Any, extra: Any) -> Any:
        """Apply what was read, once all ranks find that they can."""
        values: dict[str, np.ndarray] = {}

        def check() -> None:
            values.update(self._matching(params, parameters))
            self._checked_state(state)

        def apply() -> None:
            self.load_state_dict(state)  # first, since an optimizer may refuse it
            self._failure = HALF_LOADED
            for name, value in values.items():
                device.copy(value, parameters[name])
            self._failure = ""
            self._hand_over()

        self._together("loading", check)
        self._together("going on", apply)
        return {} if extra is None else extra

    def _matching(self, params: Iterable[Any] | None, saved: dict[str, np.ndarray] | None) -> dict[str, np.ndarray]:
        """The arrays that saved parameters go to; ValueError if they are others."""
        if saved is None:
            if params is not None:
                raise ValueError("params are given, but the checkpoint was saved without parameters")
            return {}
        if params is None:
            values = {name: known.value for name, known in self._collector.order.items()}
            if not values:
                raise ValueError("the checkpoint has parameters: load(path, params) needs the model's")
        else:
            values = self._named(params)
        for name in saved.keys() | values.keys():
            a, b = (f"{x[name].shape} {x[name].dtype}" if name in x else "nothing" for x in (saved, values))
            if a != b:
                raise ValueError(f"{name}: the checkpoint has {a}, the model has {b}")
            if not device.writable(values[name]):
                raise ValueError(f"{name}: its array is read-only")
        return values

    def _named(self, params: Iterable[Any]) -> dict[str, np.ndarray]:
        """Arrays by parameter name; ValueError for two of one name, or a bare array that has none yet."""
        values: dict[str, np.ndarray] = {}
        for param in params:
            if is_array(param) and not self._collector.order:
                raise ValueError("a bare array has no name before the first step: use distopt.Parameter")
            name, value = self._collector.identify(param)
            if name in values:
                raise ValueError(f"{name}: given twice")
            values[name] = value
        return values

    # ------------------------------------------------------------------------------------------------- together

    def _together(self, what: str, do: Callable[..., Any], *arguments: Any) -> list[str]:
        """Call ``do`` on every rank: what it returned on each, if that is a text, if none has an error.

        An error on one of them is raised by all.
        """
        report, error = "", None
        try:
            found = do(*arguments)
            report = found if isinstance(found, str) else ""
        except Exception as e:
            error = e
        line = f"{what} a checkpoint, DistOpt {self._number}, step {self.step_counter}"
        control = self._wire.control
        return control.vote(line, fingerprint([line]), lambda: [line], error, report) or [""] * self._wire.size

    def _warn(self, text: str) -> None:
        if self._wire.rank == 0:
            warnings.warn(text, RuntimeWarning, stacklevel=3)

    def _note(self, text: str) -> None:
        if self._wire.rank == 0:
            print(f"distopt: {text}", file=sys.stderr, flush=True)


def _model(tree: dict[str, Any]) -> dict[str, Any]:
    """What partial steps let differ between ranks."""
    return {name: tree[name] for name in ("optimizer", "parameters")}


def _first(reports: Sequence[str]) -> str:
    return next(f"rank {r}: {text}" for r, text in enumerate(map(json.loads, reports)) if text)


def _commit(pending: Sequence[Pending]) -> None:
    for file_ in pending:
        file_.commit()
