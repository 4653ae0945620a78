"""Communicators: the same checks for all of them, and their errors."""

import re
import subprocess
import sys
import threading

import comm_checks
import numpy as np
import pytest

import tiers
from distopt import run_ranks, world
from distopt.comm import LocalCommunicator, Metered, MpiCommunicator, ThreadCommunicator
from distopt.comm.control import PeerLeft
from distopt.device import gpu_state
from launch import finish, needs_mpi, run_mpi
from transports import RUN


def test_the_local_communicator_passes_all_checks():
    comm_checks.everything(LocalCommunicator())
    comm = LocalCommunicator()
    x = np.ones(3)
    assert comm.peers(x)[0] is x


@pytest.mark.parametrize("transport", RUN)
@pytest.mark.parametrize("size", tiers.one_by_default(3, of=(1, 2, 3, 4, 8)))
def test_ranks_of_one_process_pass_all_checks(transport, size):
    RUN[transport](size, comm_checks.everything)


@needs_mpi
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_mpi_communicators_pass_all_checks(size, tmp_path):
    run_mpi(size, comm_checks.everything, tmp_path)


@needs_mpi
@pytest.mark.slow
def test_messages_of_more_elements_than_32_bits_can_count_arrive(tmp_path):
    run_mpi(2, comm_checks.beyond_32_bits, tmp_path, timeout=300)


def test_threads_share_their_memory():
    def main(comm):
        mine = np.full(3, comm.rank)
        peers = comm.peers(mine)
        assert peers[comm.rank] is mine
        comm.barrier()
        return [p[0] for p in peers]

    assert run_ranks(3, main) == [[0, 1, 2]] * 3


def test_sixty_four_threads_sum_an_array():
    def main(comm):
        x = np.full(1000, comm.rank, np.float32)
        comm.all_reduce(x)
        return x[0]

    assert run_ranks(64, main) == [sum(range(64))] * 64


def test_run_ranks_raises_the_first_error_and_nobody_waits_for_ever():
    def main(comm):
        if comm.rank == 2:
            raise ZeroDivisionError("boom")
        comm.barrier()

    before = threading.active_count()
    with pytest.raises(ZeroDivisionError, match="boom"):
        run_ranks(4, main)
    assert threading.active_count() <= before


def test_a_thread_that_ends_early_is_named():
    def main(comm):
        comm.barrier()
        if comm.rank == 0:
            x = np.ones(2)
            for _ in range(3):  # a rank that is gone does not come back
                with pytest.raises(PeerLeft, match=r"rank 1 left (while|before) rank 0 .* all_reduce of 2 float64"):
                    comm.all_reduce(x)
                assert (x == 1).all()

    run_ranks(2, main)
    with pytest.raises(ValueError, match="size must be at least 1, got 0"):
        run_ranks(0, main)


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (
            lambda c: c.all_reduce(np.zeros(3)),
            lambda c: c.all_reduce(np.zeros(4)),
            "of 3 float64, rank 1 in all_reduce of 4",
        ),
        (lambda c: c.all_reduce(np.zeros(3)), lambda c: c.broadcast(np.zeros(3)), "all_reduce .*, rank 1 in broadcast"),
        (lambda c: c.all_reduce(np.zeros(2)), lambda c: c.all_reduce(np.zeros(2, "f4")), "float64, .* float32"),
    ],
)
def test_threads_that_differ_all_get_the_same_error(first, second, text):
    errors = []

    def main(comm):
        try:
            (second if comm.rank == 1 else first)(comm)
        except ValueError as error:
            errors.append(str(error))
            raise

    with pytest.raises(ValueError, match=text):
        run_ranks(3, main)
    assert len(errors) == 3
    assert len(set(errors)) == 1


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ([1.0, 2.0], "got list"),
        (np.zeros(3, np.complex64), r"got an array \(3,\) complex64"),
        (np.zeros(3, ">f4"), r"got an array \(3,\) >f4"),
        (np.zeros(6)[::2], "not contiguous"),
        (np.broadcast_to(np.zeros(1), (1,)), "read-only"),
    ],
)
def test_arrays_that_no_communicator_carries_are_refused(wrong, text):
    for size in (1, 2):
        with pytest.raises(TypeError, match=text):
            run_ranks(size, lambda comm: comm.all_reduce(wrong))
    with pytest.raises(TypeError, match=text):
        LocalCommunicator().all_reduce(wrong)


def test_verbs_refuse_wrong_roots_and_numbers_of_parts():
    def main(comm):
        with pytest.raises(ValueError, match=f"parts must be {comm.size} arrays, one per rank, got 5"):
            comm.all_to_all([np.ones(1)] * 5)
        for root in (-1, comm.size):
            with pytest.raises(ValueError, match=f"root must be a rank from 0 to {comm.size - 1}, got {root}"):
                comm.broadcast(np.ones(1), root)
        metered = Metered(comm)
        for verb in (metered.all_reduce, metered.reduce_scatter, metered.broadcast):
            with pytest.raises(TypeError, match="got list"):
                verb([1.0])
        assert metered.report() == {}

    for size in (1, 3):
        run_ranks(size, main)
    main(LocalCommunicator())


def test_repr_names_the_transport_and_the_reason_for_it():
    def main(comm):
        return repr(comm)

    assert run_ranks(2, main)[1] == "<ThreadCommunicator, rank 1 of 2, numpy>"
    assert repr(world()).startswith("<LocalCommunicator, rank 0 of 1, numpy: no launcher; ")
    assert issubclass(ThreadCommunicator, type(world()).__mro__[1])
    assert world() is world()


def test_world_refuses_what_is_not_there():
    with pytest.raises(ValueError, match="device must be 'auto', 'cpu' or 'cuda', got 'gpu'"):
        world("gpu")
    if gpu_state() != "ok":
        with pytest.raises(RuntimeError, match=re.escape(f"device='cuda': {gpu_state()}")):
            world("cuda")
    assert "numpy" in repr(world("cpu"))
    assert world("cpu") is world()


@needs_mpi
def test_a_launcher_of_another_brand_is_refused():
    """A world of one in a process whose launcher's variables say two."""
    script = "from distopt.comm.mpi_control import check_launcher; check_launcher(1, {'PMI_SIZE': '2'})"
    code, output = finish([sys.executable, "-c", script], 30)
    assert code == 1
    assert "the launcher started 2 processes (an MPICH-like mpiexec set PMI_SIZE=2), but the MPI library" in output
    assert "sees 1" in output
    assert "distopt run -n N" in output


@pytest.mark.thorough
def test_a_launcher_without_mpi4py_says_what_to_install():
    script = "import sys; sys.modules['mpi4py'] = None; import distopt; distopt.world()"
    code, output = finish([sys.executable, "-c", script], 30, env={"PMI_SIZE": "2"})
    assert code == 1
    assert "pip install 'distopt[mpi]'" in output


@pytest.mark.thorough
def test_one_rank_needs_no_mpi():
    script = (
        "import sys; sys.modules['mpi4py'] = None; import numpy as np, distopt; p = np.ones(3);"
        "opt = distopt.DistOpt(distopt.optim.SGD(0.5)); opt([(p, np.ones(3))]); print(p)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == "[0.5 0.5 0.5]\n"


def test_a_thread_that_exits_is_one_that_left():
    def main(comm):
        if comm.rank == 1:
            sys.exit(0)
        comm.barrier()

    with pytest.raises(PeerLeft, match="rank 1 left"):
        run_ranks(2, main)


def null_communicator(comm):
    from mpi4py import MPI

    part = MPI.COMM_WORLD.Split(0 if comm.rank == 0 else MPI.UNDEFINED)
    if comm.rank == 0:
        assert MpiCommunicator(part).size == 1
    else:
        with pytest.raises(ValueError, match="COMM_NULL"):
            MpiCommunicator(part)


@needs_mpi
def test_a_rank_outside_of_a_split_gets_no_communicator(tmp_path):
    run_mpi(2, null_communicator, tmp_path)
