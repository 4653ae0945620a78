"""Mistakes of a script on one rank, in real processes: the same error on all ranks, and nothing has changed."""

import json
import os

import numpy as np
import pytest

import laws
from distopt import DistOpt, Parameter
from distopt.comm import MpiCommunicator
from distopt.compress import ErrorFeedback, Threshold, TopK
from distopt.optim import SGD, Adam
from launch import run_mpi
from tiers import in_turn

pytestmark = pytest.mark.mpi


def good(params, step):
    return [(p, g) for p, g in zip(params, laws.gradients(params, step, 0), strict=True)]


def bad(params, change):
    """Gradients of which one is something else."""
    pairs = good(params, 9)
    change(pairs)
    return pairs


def replace(k, make):
    def change(pairs):
        pairs[k] = pairs[k][0], make(pairs[k][1])

    return change


def overlap(pairs):
    room = np.zeros(10_000, "f4")
    for p, _ in pairs[1:3]:
        p.data = room[: p.data.size].reshape(p.data.shape)


MISTAKES = {
    "nan": replace(1, lambda g: np.where(g == g.flat[0], np.nan, g).astype(g.dtype)),
    "infinity": replace(1, lambda g: np.where(g == g.flat[0], -np.inf, g).astype(g.dtype)),
    "another shape": replace(1, lambda g: np.zeros((2, *g.shape), g.dtype)),
    "another dtype": replace(1, lambda g: g.astype("f8")),
    "half": replace(1, lambda g: g.astype("f2")),
    "swapped bytes": replace(1, lambda g: g.astype(">f4")),
    "no array": replace(1, lambda g: g.tolist()),
    "a pair of three": lambda pairs: pairs.__setitem__(1, (*pairs[1], 0)),
    "a stranger": lambda pairs: pairs.append((Parameter("p11", np.zeros(3, "f4")), np.zeros(3, "f4"))),
    "one too few": lambda pairs: pairs.pop(1),
    "one without a gradient": replace(1, lambda g: None),
    "one twice": lambda pairs: pairs.append(pairs[1]),
    "read-only": lambda pairs: setattr(pairs[1][0], "data", np.broadcast_to(np.float32(0), pairs[1][0].data.shape)),
    "not contiguous": lambda pairs: setattr(pairs[0][0], "data", np.zeros((24,), "f4")[::2]),
    "shared memory": overlap,
    "frozen": lambda pairs: pairs.__delitem__(slice(0, 2)),
}
STEPS = {
    "dense": lambda opt, loss: opt(loss),
    "half": lambda opt, loss: opt.backward_and_update_half(loss),
    "topk": lambda opt, loss: opt.step(loss, ErrorFeedback(TopK(0.1))),
}


def mistakes(comm, mode):
    """The text of each error, and whether the run went on as if nothing had been."""
    found = {}
    for name, change in MISTAKES.items():
        params, opt = laws.train(comm, steps=1, mode="topk")
        arrays = [p.data for p in params]
        loss = bad(params, change) if comm.rank == comm.size - 1 else good(params, 9)
        try:
            STEPS[mode](opt, loss)
            error = "none"
        except (TypeError, ValueError, FloatingPointError) as e:
            error = f"{type(e).__name__}: {e}"
        for p, a in zip(params, arrays, strict=True):
            p.data = a
        laws.train(comm, steps=2, start=1, params=params, opt=opt, mode="topk")
        found[name] = error, laws.digest(params)
    expected = laws.digest(laws.train(comm, steps=3, mode="topk")[0])
    return {"found": np.array(json.dumps(found)), "expected": np.array(expected)}


@pytest.mark.parametrize(("mode", "size"), in_turn(STEPS, (2, 4)))
def test_a_mistake_on_one_rank_is_one_error_on_all_and_leaves_no_trace(mode, size, tmp_path):
    ranks = run_mpi(size, mistakes, tmp_path, mode)
    texts = [json.loads(str(r["found"])) for r in ranks]
    assert texts[0] == texts[-1] == texts[size // 2]
    for name, (error, digest) in texts[0].items():
        assert digest == str(ranks[0]["expected"]), name
        assert f"rank {size - 1}" in error, (name, error)


def options(comm):
    """Options that differ, or that nobody can have."""
    last = comm.rank == comm.size - 1
    differing = (
        lambda: DistOpt(SGD(0.2 if last else 0.1), comm),
        lambda: DistOpt(Adam(0.1, beta_2=0.99 if last else 0.999), comm),
        lambda: DistOpt(SGD(0.1), comm, threshold=10 if last else 20),
        lambda: DistOpt(SGD(0.1), comm, nonfinite="skip" if last else "raise"),
        lambda: DistOpt(SGD(0.1), comm, num_batches=2 if last else 1),
        lambda: DistOpt(SGD(0.1), comm, deterministic=last) if comm.size > 2 else DistOpt(SGD(0.1 + last), comm),
    )
    texts = []
    for make in differing:
        params = laws.parameters(rank=0)
        with pytest.raises(ValueError, match="ranks differ") as caught:
            make()(good(params, 0))
        texts.append(str(caught.value))
        assert laws.digest(params) == laws.digest(laws.parameters(rank=0))
    return {"texts": np.array(json.dumps(texts))}


def test_every_option_that_differs_is_the_same_error_on_all_processes(tmp_path):
    for size in (2, 3):
        found = [json.loads(str(r["texts"])) for r in run_mpi(size, options, tmp_path)]
        assert all(texts == found[0] for texts in found)
        assert all("rank 0 has " in text for text in found[0])


def extremes(comm):
    """Empty arrays, scalars, selections of nothing and of everything, equal values, other counts on every rank."""
    shapes = ((0,), (3, 0), (), (5,), (1000,))
    for compressor in (
        None,
        *(ErrorFeedback(Threshold(t)) for t in (0.0, 1e30)),
        *(ErrorFeedback(TopK(d)) for d in (1e-9, 0.5, 1.0)),
    ):
        params = [Parameter(f"p{k}", np.zeros(s, "f4")) for k, s in enumerate(shapes)]
        opt = DistOpt(SGD(1.0), comm, threshold=4)
        for step in range(3):
            value = 0.0 if step == 1 else 1.0 + comm.rank
            opt.step([(p, np.full(p.data.shape, value, "f4")) for p in params], compressor)
        state = opt.state_dict()["states"].get("residual", {})
        for p in params:
            mine = state.get(p.name, np.zeros(p.data.shape, "f4")).astype("f8")
            total = sum(np.frombuffer(bytes.fromhex(t)) for t in comm.control.gather(mine.tobytes().hex()))
            whole = 2 * sum(range(1, comm.size + 1)) / comm.size
            np.testing.assert_allclose(-p.data.ravel() + total / comm.size, np.full(p.data.size, whole), rtol=1e-6)
    return {}


def test_empty_scalar_and_extreme_gradients_lose_nothing_on_three_processes(tmp_path):
    run_mpi(3, extremes, tmp_path)


def transitions(comm):
    """After the end, before the beginning, in the middle of itself, and in a child."""
    params, opt = laws.train(comm, steps=1)
    if os.fork() == 0:
        try:
            opt(good(params, 1))
        except RuntimeError as error:
            os._exit(7 * (str(error) == f"this process is a child of rank {comm.rank}, which alone can come to step 2"))
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 7

    def within():
        yield from good(params, 1)[:3]
        opt(good(params, 1))

    with pytest.raises((RuntimeError, ValueError)):
        opt(within())
    opt.close()
    for use in (lambda: opt(good(params, 1)), lambda: opt.all_reduce(np.ones(3)), opt.join, lambda: opt.save("x")):
        with pytest.raises(RuntimeError, match="closed"):
            use()
    assert DistOpt(SGD(0.1), comm).plan is None
    laws.train(comm, steps=1)
    return {}


def test_steps_in_a_child_within_a_step_and_after_close_are_refused(tmp_path):
    run_mpi(2, transitions, tmp_path)


def versions(comm):
    """Ranks of two versions of the package."""
    from mpi4py import MPI

    from distopt.comm import control

    control.__version__ = "9.9" if comm.rank else "0.1.0"
    with pytest.raises(ValueError, match=r"rank 0 has distopt 0\.1\.0, rank 1 has distopt 9\.9"):
        MpiCommunicator(MPI.COMM_WORLD)
    return {}


def test_processes_of_different_versions_are_refused(tmp_path):
    run_mpi(2, versions, tmp_path)
