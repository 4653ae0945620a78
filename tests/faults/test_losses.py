"""Jobs of real ranks that are killed while they train (``losses.py``): all go on, to the bits of fewer ranks."""

import importlib.util

import losses
import pytest

from benchmarks.namespaces import missing
from distopt.run.launcher import find_launcher

MODES = ["dense", "top-K", "dgc", "local steps", "overlap", "three batches"]
SHARED = "shared parameters of Adam with a buddy"
IN_FLIGHT = "local steps in flight"
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")


def tried(*modes, full):
    """Modes, those last that the tier ``full`` tries: no mode is left to that alone."""
    return [*modes, *(pytest.param(mode, marks=pytest.mark.full) for mode in full)]


def lacks_open_mpi():
    """Why there is no MPI here that can lose a rank; '' if there is one."""
    try:
        brand = find_launcher().brand
    except RuntimeError as error:
        return str(error)
    return "" if brand == "Open MPI" else f"{brand} waits for the dead"


@pytest.mark.torch
@needs_torch
@pytest.mark.parametrize("mode", tried("top-K", "overlap", full=["dense", "dgc", "local steps", "three batches"]))
def test_killed_ranks_are_done_without_over_torch(mode, tmp_path):
    assert len(losses.one(mode, "torch", 4, 2, 1, tmp_path)) == 2


@pytest.mark.torch
@needs_torch
def test_local_steps_in_flight_go_on_over_torch(tmp_path):
    assert len(losses.one(IN_FLIGHT, "torch", 3, 2, 1, tmp_path)) == 2


@pytest.mark.torch
@needs_torch
@pytest.mark.parametrize("mode", tried("local steps", SHARED, full=["dense", "top-K", IN_FLIGHT]))
def test_other_processes_take_the_place_of_killed_ranks_over_torch(mode, tmp_path):
    assert len(losses.one(mode, "torch", 3, 2, 1, tmp_path, grow=True)) == 2


@pytest.mark.torch
@needs_torch
@pytest.mark.parametrize("mode", tried("top-K", full=["dense"]))
def test_a_host_that_vanishes_is_done_without_over_torch(mode, tmp_path):
    """The other host's ranks go on, to the bits of fewer ranks, and no rank that cannot reach them does."""
    if lack := missing():
        pytest.skip(lack)
    assert losses.vanish(mode, 4, 1, tmp_path)[0] == 4


@pytest.mark.faults
@pytest.mark.parametrize(
    "mode", tried("dense", "dgc", "three batches", full=["top-K", "local steps", "overlap", IN_FLIGHT])
)
def test_killed_ranks_are_done_without_over_mpi(mode, tmp_path):
    if lack := lacks_open_mpi():
        pytest.skip(lack)
    assert len(losses.one(mode, "mpi", 4, 2, 1, tmp_path)) == 2


@pytest.mark.faults
@pytest.mark.parametrize("mode", tried("top-K", IN_FLIGHT, full=["dense", SHARED]))
def test_other_processes_take_the_place_of_killed_ranks_over_mpi(mode, tmp_path):
    if lack := lacks_open_mpi():
        pytest.skip(lack)
    assert len(losses.one(mode, "mpi", 3, 2, 1, tmp_path, grow=True)) == 2
