"""A runner for ranks of ``distopt run``: ``python rank.py SCRIPT ...`` is ``python SCRIPT ...`` that leaves marks.

It is run by its path and needs only the standard library, so that the first mark stands before the script, this package
or MPI can fail, and no module of the current folder is taken for one of this package's.
"""

import contextlib
import importlib.util
import os
import runpy
import signal
import socket
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType, TracebackType
from typing import NoReturn


def _load(name: str) -> ModuleType:
    """Return ``distopt.resilience.name``, loaded without the rest of the package; later imports get the same module."""
    spec = importlib.util.spec_from_file_location(f"distopt.resilience.{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec
    assert spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


environment, job = _load("environment"), _load("job")
ELASTIC = os.environ.get(environment.WANTED) == "1"  # the others go on without this rank


def main() -> None:
    """Enter the job, then run the script; an exit code other than 0 ends all ranks that cannot continue without."""
    if not sys.flags.safe_path:
        del sys.path[0]  # this folder
    if environment.WARM in os.environ:
        line = socket.socket(fileno=int(os.environ.pop(environment.WARM)))
        job.end_with_parent()
        (own,) = _load("forks").serve(line, ["numpy", "torch", "distopt"])
        os.environ[environment.LINE] = str(own)
    # a shell's, of its background jobs; distopt run passes it on
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    job.end_with_parent()
    # processes that the script starts are no ranks
    job.enter(environment.number_in_job(), Path(os.environ.pop(job.FOLDER)))
    _drop_preload(job.LOOPBACK)
    _mark_exits()
    job.write_whole_lines()
    sys.meta_path.insert(0, _MpiIsWanted())
    if environment.SPAWNED in os.environ:
        setattr(job, "starter", _start_mpi())  # noqa: B010  a module loaded by its path has no known names
        job.mark(job.STARTED)
    try:
        _run(sys.argv[1:])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code:
            _fail(code)
        raise
    except BaseException as error:
        error.__traceback__ = _of_the_script(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
        _fail(code)
        if ELASTIC:
            _end_alone(code)
        sys.exit(code)


def _drop_preload(suffix: str) -> None:
    """Remove the launcher's library from ``LD_PRELOAD``, so that processes which the script starts do not load it."""
    preloaded = os.environ.pop("LD_PRELOAD", "").split(":")
    others = [path for path in preloaded if path and not path.endswith(f"{suffix}.so")]
    if others:
        os.environ["LD_PRELOAD"] = ":".join(others)


def _start_mpi() -> object:
    """Start MPI at once: the rank that has started this process waits for it, and the others for that rank."""
    # Returns an MPI communicator of that rank and this one, on which either learns of the other's end.
    import mpi4py

    mpi4py.rc.finalize = False  # MPI's end would wait for ranks that go on
    from mpi4py import MPI

    starter = MPI.Comm.Get_parent().Merge(high=True)
    starter.Set_errhandler(MPI.ERRORS_RETURN)
    return starter


def _run(command: Sequence[str]) -> None:
    """Run a script, module or text as Python itself would with these arguments."""
    script, *arguments = command
    if script == "-m":
        sys.argv[:] = arguments
        if not sys.flags.safe_path:
            sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif script == "-c":
        code, sys.argv[:] = arguments[0], ["-c", *arguments[1:]]
        if not sys.flags.safe_path:
            sys.path.insert(0, "")
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), main.__dict__)
    else:
        sys.argv[:] = command
        if not sys.flags.safe_path:
            sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
        runpy.run_path(script, run_name="__main__")


def _fail(code: int) -> None:
    """Mark the code with which this rank ends; MPI, if it runs, ends the others at the very end of this process."""
    job.mark(job.EXIT, code)
    if job.is_rank() and "mpi4py.MPI" in sys.modules and not ELASTIC:  # and no forked child
        sys.modules["mpi4py.MPI"]._set_abort_status(code)


def _end_alone(code: int) -> None:
    """End this rank where it is: in MPI's end it would wait for the others, which train on."""
    if job.is_rank():
        job.mark(job.SPOKEN, code)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # closed, or none
                stream.flush()
        os._exit(code)


def _mark_exits() -> None:
    """From now on ``os._exit`` leaves a mark; C's ``exit`` leaves none."""
    # Open MPI's launcher tells the remaining ranks of one that ends by a signal, or with code 0 but not in MPI's end;
    # if the code is another one, they would wait for ever.  `distopt run` has it from the mark.
    leave = os._exit

    def marked(status: int) -> NoReturn:
        job.mark(job.OS_EXIT, status)
        if not (status or ELASTIC):
            job.leave_together()
        leave(0 if ELASTIC and environment.MEMBER not in os.environ and job.is_rank() else status)

    os._exit = marked


class _MpiIsWanted(MetaPathFinder):
    """Finds no module, but marks the moment when MPI is about to start, where ranks wait for others."""

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name == "mpi4py.MPI":
            job.mark(job.MPI)


def _of_the_script(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of this file and of runpy."""
    while trace and trace.tb_next and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    main()
