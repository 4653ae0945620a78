"""Buckets and parameters in memory that all ranks of a machine share."""

import itertools
import os
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
from test_half_in_shared_memory import Apart, Counting

import laws
from distopt import DistOpt, Parameter, run_ranks
from distopt.comm import Logical, Metered, shared_memory
from distopt.optim import SGD, Adam
from launch import TESTS, finish, needs_mpi, run_mpi

RANKS = [1, 2, 3, 4, 8]


class Late(SGD):
    """On one rank every update starts late: the others have long gone on, if nothing holds them."""

    def __init__(self, rank, **options):
        super().__init__(0.1, momentum=0.9, **options)
        self.late = rank

    def update_bucket(self, *given):
        time.sleep(0.03 * self.late)
        super().update_bucket(*given)


def fast_and_slow(comm):
    """A rank that writes its next gradients as soon as a step returns harms nobody who still reads the last ones."""
    found = []
    for late in (False, True):
        params = laws.parameters()
        opt = DistOpt(Late(late and comm.rank == comm.size - 1), comm, threshold=60)
        views = opt.gradient_views(params)
        for step in range(3):
            for view, g in zip(views, laws.gradients(params, step, comm.rank), strict=True):
                view[...] = g
            opt(zip(params, views, strict=True))
            for view in views:
                view.fill(np.nan)
        found.append(laws.digest(params))
    assert found[0] == found[1]
    return {"digest": np.array(found[0])}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("size", RANKS)
def test_a_fast_rank_waits_for_ranks_that_still_read_shared_memory(size):
    assert len({r["digest"].item() for r in run_ranks(size, fast_and_slow)}) == 1


def no_elements(comm):
    """A model of nothing but empty tensors is shared like any other."""
    params = [Parameter("none", np.zeros((0, 3), np.float32))]
    opt = laws.share(params, DistOpt(SGD(0.1), comm))[1]
    assert opt([(params[0], np.zeros((0, 3), np.float32))])


def no_shared_memory_on_one_rank(comm):
    """As where a container or the kernel forbids it: plain memory for all, and one line for who asks for more."""
    if comm.rank == 0:  # in whose memory parameters would be
        del os.memfd_create
    assert comm.peers(comm.alloc(100, np.float32)) is None
    assert "one host, no memory shared: sums go through MPI" in repr(comm)
    params, opt = laws.train(comm)
    with pytest.raises(
        RuntimeError, match=r"ranks must be able to share memory for parameter_views, got .*MpiCommunicator"
    ):
        opt.parameter_views(params)
    laws.train(comm, 1, 4, params, opt)
    laws.same_on_all_ranks(comm, laws.digest(params))


def handles_of_others(comm):
    """A process number may mean another process in another container: what opens must be the very file."""
    x = comm.alloc(100, np.float32)
    x[:] = comm.rank
    handles = shared_memory._handles
    if comm.rank == 1:
        pid, _, *rest = handles[x.ctypes.data].split()
        impostor = os.memfd_create("impostor")
        handles[x.ctypes.data] = " ".join([pid, str(impostor), *rest])
    assert comm.peers(x) is None


def several_ranks_in_a_process(comm):
    """Their sums have the bits of messages, whatever number of ranks lives in each process."""
    for deterministic, ranks in itertools.product((True, "exact"), (comm.size, 2 * comm.size, 5)):
        found, counted = [], Counting(comm)
        for processes in (counted, Apart(comm)):
            params = laws.parameters()
            opt = DistOpt(SGD(0.1), Logical(processes, ranks), threshold=60, deterministic=deterministic)
            for step in range(3):
                opt(lambda rank, step=step, params=params: zip(params, laws.gradients(params, step, rank), strict=True))
            found.append(laws.digest(params))
        assert found[0] == found[1]
        assert counted.count == 3 * len(opt.plan.buckets) * len(opt.communicator.ranks.here)
    assert "one host, memory shared" in repr(comm)


CASES = [fast_and_slow, no_elements, no_shared_memory_on_one_rank, handles_of_others, several_ranks_in_a_process]


@needs_mpi
@pytest.mark.parametrize("case", CASES, ids=lambda f: f.__name__)
def test_shared_memory_cases_hold_on_mpi(case, tmp_path):
    for size in (2, 3):
        run_mpi(size, case, tmp_path)


def big_buckets(comm):
    """64 MB of gradients: more than /dev/shm has."""
    room = shutil.disk_usage("/dev/shm").total
    assert room <= 24 << 20, room
    params = [Parameter(f"p{k}", np.zeros(2**21, np.float32)) for k in range(8)]
    opt = DistOpt(SGD(1.0), comm)
    for p, view in zip(params, opt.parameter_views(params), strict=True):
        p.data = view
    for view in opt.gradient_views(params):
        view.fill(comm.rank + 1)
    opt(zip(params, opt.gradient_views(params), strict=True))
    assert all((p.data == -(comm.size + 1) / 2).all() for p in params)


def may_mount():
    """May this process make a mount namespace?"""
    return (
        os.geteuid() == 0 and not subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode
    )


@needs_mpi
@pytest.mark.skipif(not may_mount(), reason="needs root and unshare -m, to mount a small /dev/shm")
def test_large_buckets_train_with_a_small_dev_shm(tmp_path):
    code = f"import pathlib, sys; sys.path.insert(0, {str(TESTS)!r}); import launch; launch.extend_path(); "
    code += (
        f"import test_shared_memory; launch.run_mpi(2, test_shared_memory.big_buckets, pathlib.Path({str(tmp_path)!r}))"
    )
    small = 'mount -t tmpfs -o size=24m none /dev/shm && exec "$@"'
    done, output = finish(["unshare", "-m", "sh", "-c", small, "sh", sys.executable, "-c", code], 60)
    assert done == 0, output


@pytest.mark.parametrize("size", [1, 2, 3])
def test_shared_parameters_refuse_partial_steps_updates_by_hand_and_other_thresholds(size):
    class ForeignOptimizer:
        def update(self, param, grad):
            param.data -= grad

    def main(comm):
        params = laws.parameters()
        loss = lambda: zip(params, laws.gradients(params, 0, comm.rank), strict=True)  # noqa: E731
        with pytest.raises(
            TypeError, match=r"the optimizer must be one of distopt.optim for parameter_views, got .*ForeignOptimizer"
        ):
            DistOpt(ForeignOptimizer(), comm).parameter_views(params)
        opt = DistOpt(Adam(0.1), comm, threshold=60)
        opt(loss())
        with pytest.raises(ValueError, match="params must be all parameters of the model, got none of p2, p3"):
            opt.parameter_views(params[:2])
        views = opt.parameter_views(params)
        for p, view in list(zip(params, views, strict=True))[1:]:
            p.data = view
        with pytest.raises(ValueError, match="p0: data must be the array that parameter_views returned for it"):
            opt(loss())
        params[0].data = views[0]
        with pytest.raises(ValueError, match="threshold must stay 60 once parameters are shared, got 7"):
            opt.backward_and_update(loss(), threshold=7)
        with pytest.raises(ValueError, match="parameters must not be shared in a partial step"):
            opt.backward_and_partial_update(loss())
        with pytest.raises(ValueError, match="parameters must not be shared for update"):
            opt.update(params[0], np.zeros_like(views[0]))
        assert opt(loss())
        laws.same_on_all_ranks(comm, laws.digest(params))
        comm.barrier()

    run_ranks(size, main)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_step_is_made_after_sharing_at_another_threshold(size):
    def main(comm):
        params = laws.parameters()
        opt = DistOpt(SGD(0.1), comm, threshold=60)
        opt.backward_and_update(zip(params, laws.gradients(params, 0, comm.rank), strict=True), threshold=5)
        laws.share(params, opt)
        assert opt(zip(params, laws.gradients(params, 1, comm.rank), strict=True))
        assert opt.plan.threshold == 5
        comm.barrier()

    run_ranks(size, main)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_rank_touches_its_share_of_the_state_only(size):
    """ZeRO: what others update costs this rank no memory."""

    def main(comm):
        params, opt = [Parameter("w", np.zeros(100_000, np.float32))], DistOpt(Adam(0.1), comm)
        laws.share(params, opt)
        opt([(params[0], np.ones(100_000, np.float32))])
        touched = np.flatnonzero(opt.opt._state["m"]["w"])
        comm.barrier()
        return touched

    touched = np.concatenate(run_ranks(size, main))
    assert touched.tolist() == list(range(100_000))


@pytest.mark.parametrize("size", RANKS)
def test_what_is_not_finite_is_named_by_rank_and_parameter(size):
    """Found while shares are added, in views that nobody packs; the next step is as if this one had not been."""

    def main(comm):
        params = laws.parameters()
        opt = DistOpt(laws.sgd(), comm, threshold=60)
        views = opt.gradient_views(params)

        def step(spoil):
            for view in views:
                view.fill(1)
            if comm.rank == size - 1:
                spoil()
            return opt(zip(params, views, strict=True))

        step(lambda: None)
        before = laws.digest(params)

        def spoil():
            views[1][[3, 40]] = np.nan, np.inf
            views[5][199] = -np.inf

        with pytest.raises(FloatingPointError) as raised:
            step(spoil)
        assert str(raised.value) == (
            f"gradients of step 2 are not finite: rank {size - 1}: p1 (2 of 50 entries), p5 (1 of 200 entries)"
        )
        assert laws.digest(params) == before
        assert step(lambda: None)
        for view in views:
            view.fill(3e38)
        if size > 1:
            with pytest.raises(FloatingPointError, match=r"the sum over ranks: p0 \(12 of 12 entries\), p1"):
                opt(zip(params, views, strict=True))

    run_ranks(size, main)


@pytest.mark.parametrize("size", RANKS)
def test_a_custom_optimizer_gets_the_mean_over_ranks(size):
    class ForeignOptimizer:
        def update(self, param, grad):
            param.data -= grad

    def main(comm):
        params = laws.parameters()
        opt = DistOpt(ForeignOptimizer(), comm, threshold=60)
        before = [p.data.copy() for p in params]
        opt(zip(params, laws.gradients(params, 0, comm.rank), strict=True))
        for k, (p, b) in enumerate(zip(params, before, strict=True)):
            mean = np.mean([laws.gradients(params, 0, r)[k].astype(np.float64) for r in range(size)], axis=0)
            np.testing.assert_allclose(b - p.data, mean, rtol=0, atol=1e-6)
        laws.same_on_all_ranks(comm, laws.digest(params))

    run_ranks(size, main)


def test_sums_in_shared_memory_are_metered():
    def main(comm):
        metered = Metered(comm)
        laws.train(metered, steps=1, broadcast=False)
        return metered.report()["all_reduce"]

    found = run_ranks(2, main)
    assert found[0] == found[1]
    assert found[0]["calls"] > 1
    assert found[0]["payload"] == found[0]["wire"] >= 4 * sum(int(np.prod(s)) for s in laws.SHAPES)
