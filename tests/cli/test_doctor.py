"""What doctor says of GPUs and NCCL, on doubles: several cards, partitions, cards that fail or hang."""

import json
import sys
import time

import pytest

pytest.importorskip("cupy", reason="cupy is missing: pip install 'distopt[cuda13]'")
import cupy

from distopt.run import doctor, doctor_gpu
from distopt.run.finding import Finding
from doubles import gpu, nccl, shim
from launch import TESTS

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("doubles")]
RUNTIME = cupy.cuda.runtime
# What is before the trial in its process: doubles of cupy's runtime and of NCCL.
DOUBLED = f"import sys; sys.path.insert(0, {str(TESTS)!r}); import launch; launch.extend_path(); import nccl_checks; "
DOUBLED += "nccl_checks.install(processes=True); "
RUN = "from distopt.run import doctor_trial; doctor_trial.main()"


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    """No variable that a machine of CI may have, and no torch."""
    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_GPUS_ON_NODE", "SLURM_NTASKS", "SLURM_GPUS_PER_TASK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(doctor_gpu.importlib.util, "find_spec", lambda name: None)


def patch(monkeypatch, **functions):
    for name, function in functions.items():
        monkeypatch.setattr(RUNTIME, name, function)


def properties(monkeypatch, **changed):
    """Every GPU's, with something else."""
    patch(monkeypatch, getDeviceProperties=lambda number: gpu.properties(number) | changed)


def of(check, status):
    """(text, fix) of the findings with a status."""
    return [(f.text, f.fix) for f in check() if f.status == status]


def only(check, status):
    """The one finding with a status."""
    (found,) = of(check, status)
    return found


def test_several_cards_without_a_flaw_are_listed(monkeypatch):
    findings = list(doctor_gpu.gpus())
    assert {f.status for f in findings} == {"ok"}
    texts = [f.text for f in findings]
    assert texts == [
        f"cupy {cupy.__version__}",
        "CUDA driver for CUDA 13.0",
        *(f"GPU {k} is a double at 0000:0{k}:00.0" for k in range(4)),
        "all GPUs reach each other's memory (P2P)",
        "NVRTC 13.0",
    ]


CAUSES = {
    35: ("no GPU: no CUDA driver, or one too old for this cupy (cudaErrorInsufficientDriver)", "it takes a machine"),
    100: ("no GPU: the CUDA driver sees no GPU (cudaErrorNoDevice)", "check CUDA_VISIBLE_DEVICES"),
    802: ("no GPU: the GPUs are not ready (cudaErrorSystemNotReady)", "start nvidia-fabricmanager"),
}


@pytest.mark.parametrize("status", CAUSES)
def test_no_gpu_is_a_warning_with_its_cause_and_remedy(status, monkeypatch):
    def count():
        raise RUNTIME.CUDARuntimeError(status)

    patch(monkeypatch, getDeviceCount=count)
    text, fix = only(doctor_gpu.gpus, "warn")
    assert text == CAUSES[status][0]
    assert fix.startswith(CAUSES[status][1])
    assert list(doctor_gpu.trial()) == []


def test_cuda_visible_devices_that_hides_all_is_named(monkeypatch):
    def count():
        raise RUNTIME.CUDARuntimeError(100)

    patch(monkeypatch, getDeviceCount=count)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert ("CUDA_VISIBLE_DEVICES is '-1'", "unset it, or name GPUs that nvidia-smi -L lists") in of(
        doctor_gpu.gpus, "warn"
    )


def test_cuda_visible_devices_is_told(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,5")
    assert ("CUDA_VISIBLE_DEVICES is '0,1,2,5', which shows 4 of the GPUs", "") in of(doctor_gpu.gpus, "ok")


@pytest.mark.parametrize(
    ("count", "environment", "isolated"),
    [
        (1, {"SLURM_GPUS_ON_NODE": "4"}, True),
        (1, {"SLURM_GPUS_PER_TASK": "1", "SLURM_NTASKS": "2"}, True),
        (1, {"SLURM_GPUS_PER_TASK": "1", "SLURM_NTASKS": "1"}, False),
        (1, {"SLURM_GPUS_ON_NODE": "1"}, False),
        (4, {"SLURM_GPUS_ON_NODE": "4", "SLURM_NTASKS": "4"}, False),
        (1, {}, False),
    ],
)
def test_gpus_that_slurm_isolates_are_told(count, environment, isolated, monkeypatch):
    patch(monkeypatch, getDeviceCount=lambda: count)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    advice = [fix for text, fix in of(doctor_gpu.gpus, "warn") if text.startswith("Slurm shows this task one GPU")]
    assert advice == ["--gpus-per-node=N --gpu-bind=none in place of --gpus-per-task=1"] * isolated


@pytest.mark.parametrize(("mode", "status", "name"), [(3, "warn", "EXCLUSIVE_PROCESS"), (2, "fail", "PROHIBITED")])
def test_a_compute_mode_that_keeps_ranks_out_is_told(mode, status, name, monkeypatch):
    patch(monkeypatch, getDeviceCount=lambda: 1)
    properties(monkeypatch, computeMode=mode)
    text, fix = only(doctor_gpu.gpus, status)
    assert text.startswith(f"GPU 0 is in compute mode {name}")
    assert fix.endswith("nvidia-smi -i 0 -c 0")


def test_a_mig_partition_is_told(monkeypatch):
    patch(monkeypatch, getDeviceCount=lambda: 1)
    properties(monkeypatch, name=b"NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    text, fix = only(doctor_gpu.gpus, "warn")
    assert text.startswith("GPU 0 is a MIG partition")
    assert "CUDA_VISIBLE_DEVICES=MIG-" in fix


def test_gpus_that_do_not_reach_each_other_are_told(monkeypatch):
    patch(monkeypatch, deviceCanAccessPeer=lambda a, b: int({a, b} != {1, 3}))
    text, fix = only(doctor_gpu.gpus, "warn")
    assert text.startswith("GPUs 1 and 3 do not reach each other's memory (P2P), as 1 of 6 pairs")
    assert "nvidia-smi topo -p2p r" in fix


@pytest.mark.parametrize(
    ("nvrtc", "driver", "known", "status", "text"),
    [
        ((13, 0), 12080, (90,), "fail", "NVRTC 13.0 is newer than the driver, for CUDA 12.8, which cannot load"),
        ((12, 9), 13000, (80, 90), None, ""),
        ((13, 5), 13000, (80, 90), None, ""),  # the same major version: machine code is loaded
        (
            (12, 9),
            13000,
            (70, 80),
            "warn",
            "NVRTC 12.9 does not know GPU 0, of compute capability 9.0: the driver must",
        ),
        ((13, 5), 13000, (70, 80), "fail", "its PTX, for which it is too old"),
        ((13, 0), 13000, (100, 120), "fail", "NVRTC 13.0 does not compile for GPU 0, of compute capability 9.0"),
    ],
)
def test_a_compiler_that_does_not_suit_driver_or_gpu_is_told(nvrtc, driver, known, status, text, monkeypatch):
    class Nvrtc(gpu.Nvrtc):
        def getVersion(self):
            return nvrtc

        def getSupportedArchs(self):
            return known

    monkeypatch.setattr(cupy.cuda, "nvrtc", Nvrtc())
    patch(monkeypatch, getDeviceCount=lambda: 1, driverGetVersion=lambda: driver)
    flaws = [f for f in doctor_gpu.gpus() if f.status != "ok"]
    assert [f.status for f in flaws] == ([] if status is None else [status])
    assert all(text in f.text and f.fix for f in flaws)


def test_nccl_is_told_with_its_file_and_an_old_one_is_a_warning(monkeypatch):
    assert [f.status for f in doctor_gpu.nccls()] == ["ok"]
    nccl.faults.version = 22602
    text, fix = only(doctor_gpu.nccls, "warn")
    assert text.startswith("NCCL 2.26.2, ")
    assert text.endswith("older than 2.27.0, which distopt's extras bring")
    assert fix.startswith("pip install")
    nccl.faults.version = 20304
    assert only(doctor_gpu.nccls, "warn")[0] == "no NCCL: NCCL 2.3.4 is too old, 2.18.1 is wanted"


@pytest.mark.parametrize(
    ("torchs", "paths", "two"),
    [
        ([2, 28, 9], ["/a/libnccl.so.2"], False),
        ([2, 27, 3], ["/a/libnccl.so.2"], True),  # torch has its own inside
        ([2, 28, 9], ["/a/libnccl.so.2", "/b/libnccl.so.2"], True),
        ([], ["/a/libnccl.so.2"], False),  # a torch for the host
    ],
)
def test_two_nccls_in_one_process_are_told(torchs, paths, two, monkeypatch):
    answer = f"print('a line of NCCL'); print({json.dumps(json.dumps([22809, torchs, paths]))})"
    monkeypatch.setattr(doctor_gpu.importlib.util, "find_spec", lambda name: name == "torch" or None)
    monkeypatch.setattr(doctor_gpu, "WITH_TORCH", (sys.executable, "-c", answer))
    told = [text for text, _ in of(doctor_gpu.nccls, "warn")]
    version = ".".join(map(str, torchs))
    assert [t.startswith(f"torch has NCCL {version}, and cupy NCCL 2.28.9, in one process") for t in told] == [
        True
    ] * two


def test_a_torch_that_does_not_start_is_told(monkeypatch):
    monkeypatch.setattr(doctor_gpu.importlib.util, "find_spec", lambda name: name == "torch" or None)
    monkeypatch.setattr(doctor_gpu, "WITH_TORCH", (sys.executable, "-c", "raise SystemExit(1)"))
    assert only(doctor_gpu.nccls, "warn")[0] == "torch and cupy's NCCL do not start in one process"


# ----------------------------------------------------------------------------------------------------- the trial


def run_trial(monkeypatch, code, seconds=(60.0, 0.0)):
    """The findings of a trial, whose process runs this code."""
    shim.library("float")
    monkeypatch.setattr(doctor_gpu, "TRIAL", (sys.executable, "-c", code))
    monkeypatch.setattr(doctor_gpu, "TRIAL_SECONDS", seconds)
    return list(doctor_gpu.trial())


def test_every_gpu_runs_a_kernel_and_a_sum_over_nccl(monkeypatch):
    assert run_trial(monkeypatch, DOUBLED + RUN) == [
        Finding("ok", f"GPU {k} ran a kernel, and a sum over NCCL of one rank, with the host's numbers")
        for k in range(4)
    ]


def test_a_kernel_with_wrong_numbers_is_found(monkeypatch):
    code = DOUBLED + "from distopt import kernels; kernels.accumulate = lambda x, y: None; " + RUN
    found = run_trial(monkeypatch, code)
    assert [f.status for f in found] == ["fail"] * 4
    assert found[2].text == "GPU 2, a kernel: 100002 of 100003 numbers are wrong"
    assert "Xid" in found[2].fix


def test_an_nccl_that_fails_is_found_on_the_gpu_where_it_does(monkeypatch):
    code = DOUBLED + (
        "from doubles import gpu, nccl; whole = nccl.NcclCommunicator.allReduce\n"
        "def refuse(self, *rest):\n"
        "    nccl.faults.refuses = 0 if self.device_id() == 1 else None\n"
        "    whole(self, *rest)\n"
        "from cupy.cuda import nccl as real; real.NcclCommunicator.allReduce = refuse\n" + RUN
    )
    found = run_trial(monkeypatch, code)
    assert [f.status for f in found] == ["ok", "fail", "ok", "ok"]
    assert found[1].text.startswith("GPU 1, a sum over NCCL: NcclFailure: rank 0: NCCL failed on GPU 1 in all_reduce")
    assert found[1].fix.startswith("NCCL_DEBUG=INFO")


def test_a_gpu_that_hangs_ends_the_trial_in_time(monkeypatch):
    code = "import json, time; print(json.dumps([0, 'a kernel', '']), flush=True); time.sleep(60)"
    started = time.monotonic()
    (found,) = run_trial(monkeypatch, code, seconds=(1.0, 0.0))
    assert time.monotonic() - started < 30
    assert (found.status, found.text) == ("fail", "GPU 0, a sum over NCCL: no answer within 1 s")


def test_a_trial_that_crashes_is_told_with_its_last_words(monkeypatch):
    (found,) = run_trial(monkeypatch, "import sys; sys.exit('driver: gone')")
    assert (found.status, found.text) == ("fail", "GPU 0, a kernel: driver: gone")


@pytest.mark.parametrize(("free", "status"), [(100 << 20, "warn"), (105 << 20, "ok")])
def test_nccl_wants_shared_memory_for_each_gpu(free, status, monkeypatch):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: type("Usage", (), {"free": free}))
    (found,) = [f for f in doctor.machine() if "/dev/shm has" in f.text]
    assert found.status == status
    assert ("109 MB are wanted" in found.fix) == (status == "warn")
