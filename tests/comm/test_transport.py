"""How a process was started, by its environment, and over what its ranks meet."""

import sys
import types

import pytest

from distopt.comm.launchers import Process, SlurmStep, first_host, meeting, transport
from distopt.resilience.environment import launched

ELASTIC = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
TORCHRUN = ELASTIC | {"TORCHELASTIC_RUN_ID": "none"}
MPICH = {"PMI_SIZE": "2", "PMI_RANK": "1", "PMI_FD": "5"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1"}
JOB = {"SLURM_JOB_ID": "71", "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_JOB_NODELIST": "gpu[07-08]"}
NONE = JOB | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_STEP_ID": "3", "SLURM_STEP_NODELIST": "gpu07"}
PMIX, PMI2 = NONE | {"PMIX_RANK": "1"}, NONE | MPICH
ONE_TASK = NONE | {"SLURM_STEP_NUM_TASKS": "1"}

BOTH, NEITHER = Process(), Process(mpi4py=False, torch=False)
ONLY_MPI, ONLY_TORCH = Process(torch=False), Process(mpi4py=False)
IMPORTED, GROUP = Process(mpi_imported=True), Process(group_made=True)

BY_ELASTIC = "distopt run --elastic started this rank"
BY_TORCHRUN = "torchrun set RANK=1, WORLD_SIZE=2"
BY_SOMEBODY = "the environment has RANK=1, WORLD_SIZE=2"
BY_MPICH, BY_OPEN_MPI = "an MPICH-like mpiexec set PMI_SIZE=2", "an Open MPI mpirun set OMPI_COMM_WORLD_SIZE=2"
BY_NONE = "srun without PMI set SLURM_STEP_NUM_TASKS=2"
BY_PMIX, BY_PMI2 = "srun with PMI set SLURM_STEP_NUM_TASKS=2", "srun with PMI set PMI_SIZE=2"
IN_A_JOB = "no launcher, as srun has not started this one of 2 tasks"

STARTS = {
    "alone": ({}, BOTH, "", "no launcher"),
    "alone, with MPI": ({}, IMPORTED, "MPI", "mpi4py.MPI was imported"),
    "alone, with a group": ({}, GROUP, "gloo", "the process group was initialized"),
    "torchrun": (TORCHRUN, BOTH, "gloo", BY_TORCHRUN),
    "torchrun, with MPI": (TORCHRUN, IMPORTED, "gloo", BY_TORCHRUN),
    "torchrun, with a group": (TORCHRUN, GROUP, "gloo", BY_TORCHRUN),
    "torchrun of one process": (TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"}, BOTH, "", "torchrun started one process"),
    "distopt run --elastic": (MPICH | TORCHRUN | {"DISTOPT_LINE": "5"}, BOTH, "gloo", BY_ELASTIC),
    "distopt run --elastic, asked again": (NONE, BOTH._replace(has_line=True), "gloo", BY_ELASTIC),
    "torchrun in mpiexec": (MPICH | TORCHRUN, BOTH, "gloo", BY_TORCHRUN),
    "torchrun in Open MPI": (OPEN_MPI | TORCHRUN, BOTH, "gloo", BY_TORCHRUN),
    "torchrun in srun": (NONE | TORCHRUN, BOTH, "gloo", BY_TORCHRUN),
    "torchrun in srun with PMI": (PMI2 | TORCHRUN, BOTH, "gloo", BY_TORCHRUN),
    "torchrun of one in mpiexec": (MPICH | TORCHRUN | {"WORLD_SIZE": "1"}, BOTH, "", "torchrun started one process"),
    "a launcher as torchrun": (ELASTIC, BOTH, "gloo", BY_SOMEBODY),
    "Ray": (ELASTIC | {"RAY_JOB_ID": "01000000"}, GROUP, "gloo", "Ray set RANK=1, WORLD_SIZE=2"),
    "of one process": (ELASTIC | {"WORLD_SIZE": "1"}, BOTH, "", "no launcher"),
    "a batch system's WORLD_SIZE": ({"WORLD_SIZE": "8", "RANK": ""}, BOTH, "", "no launcher"),
    "WORLD_SIZE and RANK, and nobody to ask": ({"WORLD_SIZE": "8", "RANK": "1"}, BOTH, "", "no launcher"),
    "mpiexec": (MPICH, BOTH, "MPI", BY_MPICH),
    "mpiexec -n 1": (MPICH | {"PMI_SIZE": "1"}, BOTH, "MPI", "an MPICH-like mpiexec set PMI_SIZE=1"),
    "mpiexec -n 1, no mpi4py": (
        *(MPICH | {"PMI_SIZE": "1"}, ONLY_TORCH, ""),
        "an MPICH-like mpiexec set PMI_SIZE=1",
    ),
    "mpiexec, no mpi4py": (MPICH, ONLY_TORCH, "MPI", BY_MPICH),  # an error, which says what to install
    "mpiexec, no mpi4py, with a group": (MPICH, ONLY_TORCH._replace(group_made=True), "gloo", BY_MPICH),
    "mpiexec, with a group": (MPICH, GROUP, "MPI", BY_MPICH),
    "mpiexec, and a script that names ranks for torch": (MPICH | ELASTIC, BOTH, "MPI", BY_MPICH),
    "Open MPI": (OPEN_MPI, BOTH, "MPI", BY_OPEN_MPI),
    "Open MPI in a step": (PMIX | OPEN_MPI, BOTH, "MPI", BY_OPEN_MPI),
    "distopt run in a step": (ONE_TASK | MPICH, BOTH, "MPI", BY_MPICH),
    "srun --mpi=none": (NONE, BOTH, "gloo", BY_NONE),
    "srun --mpi=none, no torch": (NONE, ONLY_MPI, "MPI", BY_NONE),  # an error, unless this MPI knows Slurm
    "srun --mpi=none, neither": (NONE, NEITHER, "MPI", BY_NONE),  # an error, which says what to install
    "srun --mpi=none, with MPI": (NONE, IMPORTED, "MPI", BY_NONE),
    "srun --mpi=none, with a group": (NONE, GROUP, "gloo", BY_NONE),
    "srun --mpi=none, and a script that names ranks": (NONE | ELASTIC, BOTH, "gloo", BY_NONE),
    "srun --mpi=pmix": (PMIX, BOTH, "MPI", BY_PMIX),
    "srun --mpi=pmix, no mpi4py": (PMIX, ONLY_TORCH, "gloo", BY_PMIX),
    "srun --mpi=pmi2": (PMI2, BOTH, "MPI", BY_PMI2),
    "srun --mpi=pmi2, with a group": (PMI2, GROUP, "MPI", BY_PMI2),
    "Intel MPI's way": (NONE | {"I_MPI_PMI_LIBRARY": "libpmi.so"}, BOTH, "MPI", BY_PMIX),
    "srun -n 1": (ONE_TASK, BOTH, "", "srun without PMI set SLURM_STEP_NUM_TASKS=1"),
    "srun -n 1, ranks for torch": (ONE_TASK | ELASTIC, BOTH, "gloo", BY_SOMEBODY),
    "sbatch": (JOB, BOTH, "", IN_A_JOB),
    "sbatch, as a step": (NONE | {"SLURM_STEP_ID": "4294967291"}, BOTH, "", IN_A_JOB),
    "salloc": (NONE | {"SLURM_STEP_ID": "4294967290"}, BOTH, "", IN_A_JOB),
    "sbatch of one task": (JOB | {"SLURM_NTASKS": "1"}, BOTH, "", "no launcher"),
}


@pytest.mark.parametrize("name", STARTS)
def test_over_what_ranks_meet(name):
    environ, process, over, reason = STARTS[name]
    assert transport(environ, process) == (over, reason)


def test_ranks_are_known_by_the_variables_of_their_launchers():
    assert launched({}) is None
    for environ, by in ((MPICH, "an MPICH-like mpiexec"), (OPEN_MPI, "an Open MPI mpirun"), (NONE, "srun")):
        launch = launched(environ)
        assert (launch.by, launch.size, launch.rank) == (by, 2, 1)
    assert [launched(environ).pmi for environ in (MPICH, OPEN_MPI, PMIX, PMI2, NONE)] == [True] * 4 + [False]
    assert launched(PMI2).by == "srun"


def test_what_the_script_has_imported_counts(monkeypatch):
    for module in ("mpi4py.MPI", "torch.distributed"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    assert not Process.now().mpi_imported
    assert not Process.now().group_made
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", object())
    there = types.SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True)
    monkeypatch.setitem(sys.modules, "torch.distributed", there)
    assert Process.now().mpi_imported
    assert Process.now().group_made
    monkeypatch.setitem(sys.modules, "torch", None)  # as if it were not installed
    assert not Process.now().torch


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, SlurmStep(1, 2, "127.0.0.1", 20571, "71.3")),
        ({"SLURM_STEP_NODELIST": "gpu[07-08]"}, SlurmStep(1, 2, "gpu07", 20571, "71.3")),
        ({"SLURM_STEP_NODELIST": "a1,a2", "SLURM_STEP_NUM_NODES": "1"}, SlurmStep(1, 2, "127.0.0.1", 20571, "71.3")),
        ({"SLURM_STEP_NODELIST": ""}, SlurmStep(1, 2, "gpu07", 20571, "71.3")),  # the job's
        ({"MASTER_ADDR": "a", "MASTER_PORT": "29500"}, SlurmStep(1, 2, "a", 29500, "71.3")),
        ({"SLURM_JOB_ID": "12345678"}, SlurmStep(1, 2, "127.0.0.1", 25427, "12345678.3")),
        (ELASTIC, None),  # torch knows
    ],
)
def test_ranks_of_a_step_meet_where_all_of_them_expect_it(more, expected):
    assert meeting(NONE | more) == expected


def test_a_step_that_tells_no_host_is_refused():
    with pytest.raises(RuntimeError, match="neither SLURM_STEP_NODELIST nor MASTER_ADDR tells where rank 0 is"):
        meeting({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"})
    assert meeting({}) is None


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[3-4]", "n3"),
        ("n[003,7-9],m", "n003"),
        ("r[1-2]n[05-06]-ib", "r1n05-ib"),
        ("cloud-a.local,b", "cloud-a.local"),
    ],
)
def test_the_first_of_several_hosts(nodes, host):
    assert first_host(nodes) == host
