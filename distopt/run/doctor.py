"""``distopt doctor``: a check of this installation, with a remedy for each thing that is missing."""

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import Any

import distopt
from distopt.comm.launchers import Process, transport
from distopt.kernels import signatures
from distopt.resilience import job
from distopt.resilience.environment import MPI_OF_SRUN
from distopt.run import segments
from distopt.run.doctor_gpu import gpu_count, gpus, nccls, trial
from distopt.run.finding import Finding
from distopt.run.launcher import INSTALL, OPEN_MPI_TCP, Launcher, check_brands, find_launcher
from distopt.run.processes import finished

SELF_TEST = "import numpy, distopt; x = numpy.ones(9); w = distopt.world(); w.all_reduce(x); assert x[0] == w.size == 2"
TRIAL_SECONDS = 60.0  # for two ranks
LOOK = "see the text above; try the other MPI brand"
SHARED_MEMORY = 64 << 20  # bytes; MPICH crashes with much less
NCCL_SHARED_MEMORY = 10 << 20  # bytes for each GPU, where NCCL goes through the host


def add_to(commands: Any) -> None:
    parser = commands.add_parser("doctor", help="check this installation", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    """Print all findings; return 1 if one of them is a failure."""
    findings = [finding for check in CHECKS for finding in check()]
    if args.json:
        print(json.dumps([f._asdict() for f in findings], indent=2))
    else:
        for f in findings:
            print(f"{f.status:4}  {f.text}" + f"\n      fix: {f.fix}" * bool(f.fix))
    return int(any(f.status == "fail" for f in findings))


def versions() -> Iterator[Finding]:
    """Report the versions of Python, this package and its dependencies."""
    yield Finding("ok", f"distopt {distopt.__version__}, Python {platform.python_version()}, {platform.platform()}")
    for package in ("numpy", "ml_dtypes"):
        yield Finding("ok", f"{package} {importlib.metadata.version(package)}")


def host_library() -> Iterator[Finding]:
    """Report whether the host library is built, and from the texts in native/."""
    rebuild = "pip install -e . in the project's folder"
    try:
        library = signatures.library()
    except (ImportError, OSError) as error:
        yield Finding("fail", f"host library: {error}", rebuild)
        return
    if library.source_hash().decode() != signatures.source_hash():
        yield Finding("fail", f"{library._name} was built from other texts than native/ holds now", rebuild)
    else:
        yield Finding("ok", f"host library {library._name}, runs at {signatures.simd_level()}")


def launch() -> Iterator[Finding]:
    """Report how this process was started, and over what ``distopt.world()`` meets others that were started so."""
    over, reason = transport(os.environ, Process.now())
    ranks = f"ranks meet over {over}" if over else "one rank alone"
    yield Finding("ok", f"distopt.world() here: {ranks} ({reason})")


def mpi() -> Iterator[Finding]:
    """Report the MPI library and the launcher, and test two ranks that add an array."""
    try:
        launcher = find_launcher()
        check_brands(launcher)
    except RuntimeError as error:
        missing = "pip install" in str(error) and "alone" not in str(error)
        yield Finding("warn" if missing else "fail", f"MPI: {error}", "" if missing else INSTALL)
        return
    yield Finding("ok", f"mpi4py {importlib.metadata.version('mpi4py')} on {launcher.brand}, launcher {launcher.path}")
    if "SLURM_JOB_ID" in os.environ:
        start = f"srun --mpi={MPI_OF_SRUN[launcher.brand]} -n N python script.py"
        yield Finding(
            "ok", f"a Slurm job: start ranks with {start} (--mpi=none with torch), or, on one host, distopt run"
        )
    wrong = _wrong_sum(launcher)
    # beside much other work a start may fail that does not fail twice
    again = wrong and _wrong_sum(launcher)
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    busy = f"; {load:.0f} processes want {cores} cores, so try it when they do not" if load > 2 * cores else ""
    if not wrong:
        yield Finding("ok", "two ranks added an array")
    elif not again:
        yield Finding("warn", f"two ranks added an array at the second try; at the first: {wrong}", f"{LOOK}{busy}")
    else:
        yield Finding("warn" if busy else "fail", f"two ranks could not add an array: {again}", f"{LOOK}{busy}")
    unset = [f"{name}={value}" for name, value in OPEN_MPI_TCP.items() if name not in os.environ]
    if launcher.brand == "Open MPI" and unset:
        yield Finding(
            "warn",
            "a bare mpirun runs a TCP network in one direction at a time (distopt run does not)",
            f"export {' '.join(unset)}",
        )


def _wrong_sum(launcher: Launcher) -> str:
    """Have two ranks add an array; return what was wrong, or ''."""
    env = launcher.environment(2)
    env.pop("DISTOPT_TIMEOUT", None)  # a script's limit may be too short for a start
    code, output, errors = finished([*launcher.command(2), sys.executable, "-c", SELF_TEST], TRIAL_SECONDS, env)
    if code is None:
        return f"no answer within {TRIAL_SECONDS:g} s"
    return (output + errors).strip() or f"exit code {code}" if code else ""


def machine() -> Iterator[Finding]:
    """Report cores, BLAS threads, and shared memory."""
    mine, cores = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    yield Finding(
        "ok" if mine == cores else "warn",
        f"{mine} of {cores} cores may be used",
        "" if mine == cores else "taskset or the container limits this process; fewer ranks fit",
    )
    threads = os.environ.get("OMP_NUM_THREADS")
    yield Finding("ok", f"OMP_NUM_THREADS is {threads or 'not set: distopt run sets it to cores / ranks'}")
    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
    wanted = SHARED_MEMORY + NCCL_SHARED_MEMORY * gpu_count()
    enough = free >= wanted
    fix = "" if enough else f"{wanted / 1e6:.0f} MB are wanted; give the container more: docker run --shm-size=1g"
    yield Finding("ok" if enough else "warn", f"/dev/shm has {free / 1e6:.0f} MB free", fix)
    left = segments.left()
    if left:
        size = sum(segment.nbytes for segment in left) / 1e6
        text = f"{len(left)} segments of jobs that failed are left in {segments.FOLDER}: {size:.1f} MB"
        names = " ".join(f"{segments.FOLDER}/{prefix}*" for prefix in job.SEGMENTS)
        yield Finding("warn", text, f"when no job of yours runs or is about to start: rm {names}")


def torch() -> Iterator[Finding]:
    """Report the version of PyTorch, without importing it."""
    try:
        yield Finding("ok", f"torch {importlib.metadata.version('torch')}; under torchrun ranks need no MPI")
    except importlib.metadata.PackageNotFoundError:
        yield Finding("ok", "torch is not installed; distopt.torch alone needs it")


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    *(versions, host_library, launch, mpi, torch, gpus, nccls, trial, machine),
)
