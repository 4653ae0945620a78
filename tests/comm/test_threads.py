"""Ranks that are threads: they train together, and each has a model of its own."""

import numpy as np
import pytest

import distopt
from distopt import DistOpt, Parameter, Trainer, run_ranks, simulate
from distopt.comm import LocalCommunicator, Metered
from distopt.optim import SGD


def two():
    return [Parameter(n, np.zeros(4, np.float32)) for n in "ab"]


def pairs(params, value=1.0):
    return [(p, np.full(p.data.shape, value, p.data.dtype)) for p in params]


def test_an_optimizer_made_without_a_communicator_trains_with_the_other_threads():
    def main(comm):
        params, opt = two(), DistOpt(SGD(1.0))
        assert opt.communicator is comm is distopt.world() is distopt.world("cpu")
        opt(pairs(params, float(comm.rank)))
        return float(params[0].data[0])

    assert run_ranks(4, main) == [-1.5] * 4
    assert distopt.world().size == 1


def test_a_trainer_made_without_a_communicator_trains_with_the_other_threads():
    def main(comm):
        params = two()
        trainer = Trainer(params, "sgd", {"lr": 1.0})
        for p in params:
            p.grad = np.full(4, comm.rank, np.float32)
        trainer.step(2)
        return float(params[0].data[0])

    assert run_ranks(2, main) == [-0.5] * 2


def test_threads_within_threads_are_ranks_of_their_own():
    def outer(comm):
        inner = run_ranks(2, lambda comm: distopt.world() is comm)
        return inner, distopt.world() is comm

    assert run_ranks(2, outer) == [([True, True], True)] * 2


def test_another_communicator_may_be_given():
    def main(comm):
        params, opt = two(), DistOpt(SGD(1.0), LocalCommunicator())
        opt(pairs(params, float(comm.rank)))
        return float(params[0].data[0])

    assert run_ranks(2, main) == [0.0, -1.0]


def test_a_thread_of_run_ranks_has_no_gpu():
    def main(comm):
        with pytest.raises(ValueError, match=r"device must be 'auto' or 'cpu' in run_ranks, .*, got 'cuda'"):
            distopt.world("cuda")

    run_ranks(2, main)


# ---------------------------------------------------------------------------------------------------- shared memory

SHARED = "of rank 0 and a of rank 1 are in one memory: each rank must make parameters of its own"


@pytest.mark.parametrize("around", [lambda comm: comm, Metered])
def test_parameters_that_threads_share_are_refused_on_every_rank(around):
    shared = two()

    def main(comm):
        opt = DistOpt(SGD(1.0), around(comm))
        for _ in range(2):
            with pytest.raises(ValueError, match=f"a {SHARED}"):
                opt(pairs(shared))
        own = two()
        assert opt(pairs(own))
        return float(own[0].data[0]), opt.step_counter

    assert run_ranks(3, main) == [(-1.0, 1)] * 3
    assert all((p.data == 0).all() for p in shared)


def test_one_array_within_another_threads_is_shared():
    flat = np.zeros(6, np.float32)

    def main(comm):
        with pytest.raises(ValueError, match=f"a {SHARED}"):
            DistOpt(SGD(1.0))([(Parameter("a", flat[comm.rank : comm.rank + 4]), np.ones(4, np.float32))])

    run_ranks(2, main)
    assert (flat == 0).all()


def test_a_trainers_parameters_shared_by_threads_are_refused():
    shared = two()

    def main(comm):
        for p in shared:
            p.grad = np.ones(4, np.float32)
        with pytest.raises(ValueError, match=f"a {SHARED}"):
            Trainer(shared, "sgd").step(1)

    run_ranks(2, main)


def test_neighbouring_parts_of_one_array_are_each_ranks_own():
    flat = np.zeros(8, np.float32)

    def main(comm):
        part = Parameter("a", flat[4 * comm.rank : 4 * comm.rank + 4])
        empty = Parameter("b", flat[:0])
        opt = DistOpt(SGD(1.0))
        for _ in range(2):
            opt([(part, np.ones(4, np.float32)), (empty, np.ones(0, np.float32))])

    run_ranks(2, main)
    assert (flat == -2).all()


def test_views_that_ranks_are_meant_to_share_are_shared():
    def main(comm):
        params, opt = two(), DistOpt(SGD(1.0))
        for p, view in zip(params, opt.parameter_views(params), strict=True):
            p.data = view
        for _ in range(2):
            opt(pairs(params, comm.rank + 1.0))
        return float(params[0].data[0])

    assert run_ranks(2, main) == [-3.0] * 2


def test_virtual_ranks_have_one_model():
    params, sim = two(), simulate(3, SGD(1.0))
    sim(lambda rank: pairs(params, float(rank)))
    assert params[0].data[0] == -1
