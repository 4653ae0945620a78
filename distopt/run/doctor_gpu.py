"""What ``distopt doctor`` finds out about GPUs, their compiler and NCCL; none of them is required."""

import importlib.util
import itertools
import json
import os
import sys
from collections.abc import Iterator, Sequence

from distopt import device
from distopt.comm import nccl_library as nccl
from distopt.run.doctor_trial import WORK
from distopt.run.finding import Finding, missing
from distopt.run.processes import finished

INSTALL = "pip install 'distopt[cuda13]' (or [cuda12])"
WANTED = 22700  # NCCL's version in the extras
TRIAL = (sys.executable, "-m", "distopt.run.doctor_trial")
TRIAL_SECONDS = 60.0, 20.0  # for the process, and for each GPU
TORCH = (
    "import json, torch; from distopt.comm import nccl_library as nccl; cupys = nccl.nccl_version(); "
    "torchs = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else (); "
    "print(json.dumps([cupys, list(torchs), nccl.library_paths()]))"
)
WITH_TORCH = (sys.executable, "-c", TORCH)
TORCH_SECONDS = 60.0
EXCLUSIVE, PROHIBITED = (1, 3), (2,)  # compute modes


def gpu_count() -> int:
    """Return the number of GPUs that this process can use."""
    return device.gpu_count() if device.gpu_state() == "ok" else 0


def gpus() -> Iterator[Finding]:
    """Report GPUs, driver and compiler."""
    state = device.gpu_state()
    if not device.has_cupy() or state.startswith("cupy is broken"):
        yield missing("no GPU", state)
        return
    yield Finding("ok", f"cupy {device.array_module().__version__}")
    yield from _visible(state)
    numbers = range(gpu_count())
    if numbers:
        yield Finding("ok", f"CUDA driver for CUDA {_cuda(device.driver_version())}")
    for number in numbers:
        yield from _card(number)
    yield from _peers(numbers)
    try:
        version, known = device.nvrtc_version(), device.nvrtc_architectures()
    except Exception as error:  # cupy's own, of whichever library is missing
        yield Finding("warn", f"no NVRTC: {error}".splitlines()[0], INSTALL)
        return
    yield from _compiler(version, known, numbers)


def _cuda(version: int) -> str:
    """Return a version of CUDA, such as 13000, as text."""
    return f"{version // 1000}.{version % 1000 // 10}"


def _visible(state: str) -> Iterator[Finding]:
    """Report how many GPUs this process is shown, and by what."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if state != "ok":
        yield missing("no GPU", state)
        if chosen is not None:
            yield Finding(
                "warn", f"CUDA_VISIBLE_DEVICES is {chosen!r}", "unset it, or name GPUs that nvidia-smi -L lists"
            )
        return
    count = device.gpu_count()
    if chosen is not None:
        yield Finding("ok", f"CUDA_VISIBLE_DEVICES is {chosen!r}, which shows {count} of the GPUs")
    on_node, tasks = (int(os.environ.get(name) or 0) for name in ("SLURM_GPUS_ON_NODE", "SLURM_NTASKS"))
    if count == 1 and (on_node > 1 or ("SLURM_GPUS_PER_TASK" in os.environ and tasks > 1)):
        yield Finding(
            "warn",
            "Slurm shows this task one GPU: NCCL cannot use NVLink between tasks that do not see each other's",
            "--gpus-per-node=N --gpu-bind=none in place of --gpus-per-task=1",
        )


def _card(number: int) -> Iterator[Finding]:
    """Report one GPU, and what keeps ranks from it."""
    name = device.gpu_name(number)
    yield Finding("ok", f"GPU {number} is {name} at {device.bus_id(number)}")
    mode = device.compute_mode(number)
    if mode in PROHIBITED:
        yield Finding(
            "fail", f"GPU {number} is in compute mode PROHIBITED: no process may use it", f"nvidia-smi -i {number} -c 0"
        )
    if mode in EXCLUSIVE:
        yield Finding(
            "warn",
            f"GPU {number} is in compute mode EXCLUSIVE_PROCESS: one process at a time may use it",
            f"nothing for one rank on each GPU; to share it, nvidia-smi -i {number} -c 0",
        )
    if " MIG " in f"{name} ":
        yield Finding(
            "warn",
            f"GPU {number} is a MIG partition: a process sees one, and they do not reach each other's memory",
            "show each rank its own, CUDA_VISIBLE_DEVICES=MIG-... of nvidia-smi -L; two of one GPU take NCCL 2.30",
        )


def _peers(numbers: Sequence[int]) -> Iterator[Finding]:
    """Report whether GPUs reach each other's memory."""
    pairs = list(itertools.combinations(numbers, 2))
    apart = [f"{a} and {b}" for a, b in pairs if not (device.reaches(a, b) and device.reaches(b, a))]
    if apart:
        yield Finding(
            "warn",
            f"GPUs {apart[0]} do not reach each other's memory (P2P), as {len(apart)} of {len(pairs)} pairs: NCCL "
            "goes through the host's",
            "nvidia-smi topo -p2p r says why; with an IOMMU or in a virtual machine, ACS must be off",
        )
    elif pairs:
        yield Finding("ok", "all GPUs reach each other's memory (P2P)")


def _compiler(version: tuple[int, int], known: Sequence[int], numbers: Sequence[int]) -> Iterator[Finding]:
    """Report NVRTC, and whether the driver loads what it makes for these GPUs."""
    text = "NVRTC {}.{}".format(*version)
    yield Finding("ok", text)
    driver = device.driver_version() if numbers else 0
    if numbers and version[0] > driver // 1000:
        yield Finding(
            "fail",
            f"{text} is newer than the driver, for CUDA {_cuda(driver)}, which cannot load its kernels",
            f"install a driver for CUDA {version[0]}, or pip install 'distopt[cuda{driver // 1000}]'",
        )
        return
    for number in numbers:
        capability = device.capability(number)
        if min(known) > capability:
            yield Finding(
                "fail",
                f"{text} does not compile for GPU {number}, of compute capability {capability / 10}",
                "an older CUDA does: pip install 'distopt[cuda12]'",
            )
        elif capability not in known:
            older = version > (driver // 1000, driver % 1000 // 10)
            yield Finding(
                "fail" if older else "warn",
                f"{text} does not know GPU {number}, of compute capability {capability / 10}: the driver must translate"
                + " its PTX"
                + ", for which it is too old" * older,
                "install a newer driver" if older else "pip install -U nvidia-cuda-nvrtc",
            )


def nccls() -> Iterator[Finding]:
    """Report NCCL, and whether torch brings another one."""
    if not device.has_cupy() or device.gpu_state().startswith("cupy is broken"):
        return
    state = nccl.nccl_state()
    if state != "ok":
        yield missing("no NCCL", state)
        return
    version = nccl.nccl_version()
    text = f"NCCL {nccl.version_text(version)}, {', '.join(nccl.library_paths()) or 'at an unknown place'}"
    if version < WANTED:
        text += f": older than {nccl.version_text(WANTED)}, which distopt's extras bring"
    yield Finding("ok", text) if version >= WANTED else Finding("warn", text, INSTALL)
    if importlib.util.find_spec("torch"):
        yield from _beside_torch()


def _beside_torch() -> Iterator[Finding]:
    """Report the NCCL libraries of a process that uses torch and cupy."""
    code, output, _ = finished(WITH_TORCH, TORCH_SECONDS)
    lines = _lists(output)
    if code or not lines:
        yield Finding("warn", "torch and cupy's NCCL do not start in one process", f"{sys.executable} -c {TORCH!r}")
        return
    cupys, torchs, paths = json.loads(lines[-1])
    other = ".".join(map(str, torchs))
    if not torchs or (other == nccl.version_text(cupys) and len(paths) < 2):
        return
    yield Finding(
        "warn",
        f"torch has NCCL {other}, and cupy NCCL {nccl.version_text(cupys)}, in one process ({', '.join(paths)}): they "
        "do not know of each other's kernels",
        "install the NCCL wheel of torch's version, which both then load; or use one of them at a time",
    )


def trial() -> Iterator[Finding]:
    """Run a kernel and a sum over NCCL on each GPU, in a process that is ended if it hangs."""
    count = gpu_count()
    if not count:
        return
    seconds = TRIAL_SECONDS[0] + TRIAL_SECONDS[1] * count
    code, output, errors = finished(TRIAL, seconds)
    outcomes = {(gpu, work): error for gpu, work, error in map(json.loads, _lists(output))}
    last = (errors.strip().splitlines() or [f"exit code {code}"])[-1]
    end = f"no answer within {seconds:g} s" if code is None else last
    for gpu in range(count):
        failed = next((work for work in WORK if outcomes.get((gpu, work), end)), None)
        if failed is None:
            yield Finding("ok", f"GPU {gpu} ran a kernel, and a sum over NCCL of one rank, with the host's numbers")
        else:
            yield Finding("fail", f"GPU {gpu}, {failed}: {outcomes.get((gpu, failed), end)}", WORK[failed].remedy)
        if failed and (gpu, failed) not in outcomes:  # the process ended there
            break


def _lists(output: str) -> list[str]:
    """Return the lines that are lists; NCCL writes others if it is asked to."""
    return [line for line in output.splitlines() if line.startswith("[")]
