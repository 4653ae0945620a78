"""``distopt.jax`` beside flax and optax: threads for the algebra, processes of MPI for a training."""

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="jax is missing: pip install jax")

import jax.numpy as jnp  # noqa: E402

import distopt  # noqa: E402
import distopt.jax as dj  # noqa: E402
from distopt import run_ranks  # noqa: E402
from distopt.compress import (  # noqa: E402
    DeepGradientCompression,
    Dense,
    ErrorFeedback,
    Half,
    Int8,
    Packed,
    TopK,
    TwoBit,
)
from launch import distopt_run, needs_mpi, run_mpi  # noqa: E402

pytestmark = pytest.mark.torch
COMPRESSORS = {
    "dense": Dense(),
    "half": Half(),
    "int8": ErrorFeedback(Int8()),
    "packed top-K": ErrorFeedback(Packed(TopK(0.05))),
    "two bits": ErrorFeedback(TwoBit(0.5)),
    "DGC": DeepGradientCompression(TopK(0.05)),
}
SHAPES = {"kernel": (30, 7), "bias": (7,), "scale": ()}


def gradients(rank, step, dtype=np.float32):
    rng = np.random.default_rng((rank, step))
    return {"layer": {n: np.asarray(rng.standard_normal(s), dtype) for n, s in SHAPES.items()}}


def in_jax(tree):
    return jax.tree_util.tree_map(jnp.asarray, tree)


class Sees:
    """An optimizer that keeps the means that it is given."""

    def __init__(self):
        self.means = {}

    def update(self, param, grad):
        self.means[param.name] = grad.copy()
        param.data -= grad  # an update that changes nothing would be told


@pytest.mark.parametrize("name", COMPRESSORS)
def test_means_are_those_of_dist_opt(name):
    """To the bit, of each compressor, over steps whose residuals count in the next."""

    def main(comm):
        sync = dj.synchronize(in_jax(gradients(0, 0)), COMPRESSORS[name], communicator=comm)
        params = {n: distopt.Parameter(n, np.zeros(s, np.float32)) for n, s in SHAPES.items()}
        opt = distopt.DistOpt(sees := Sees(), comm, broadcast=False)
        for step in range(4):
            mine = gradients(comm.rank, step)
            means = sync(in_jax(mine))["layer"]
            ordered = sorted(SHAPES)  # as jax has the keys of a dict
            opt.step([(params[n], mine["layer"][n]) for n in ordered], COMPRESSORS[name])
            for n in SHAPES:
                np.testing.assert_array_equal(means[n], sees.means[n])
                assert isinstance(means[n], jax.Array)

    run_ranks(3, main)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_leaves_keep_structure_dtype_and_device(dtype):
    def main(comm):
        mine = jax.tree_util.tree_map(lambda x: jnp.full(x.shape, comm.rank, dtype), gradients(0, 0))
        mine = {"tuple": (mine, [None, mine["layer"]["bias"]])}
        sync = dj.synchronize(jax.tree_util.tree_map(jnp.zeros_like, mine), communicator=comm)
        kept = [sync(mine) for _ in range(2)]  # a later exchange changes nothing of an earlier one's
        assert jax.tree_util.tree_structure(kept[0]) == jax.tree_util.tree_structure(mine)
        for mean, leaf in zip(*map(jax.tree_util.tree_leaves, (kept[0], mine)), strict=True):
            assert (mean.dtype, mean.sharding, mean.committed) == (dtype, leaf.sharding, leaf.committed)
            assert (np.asarray(mean, np.float32) == 1.0).all()

    run_ranks(3, main)


def test_means_stay_when_others_are_made():
    sync = dj.synchronize(jnp.zeros(100_000))
    first = sync(jnp.ones(100_000))
    sync(jnp.zeros(100_000))
    assert (first == 1.0).all()


def wrong(comm, number):
    """What a rank does, of which one does it wrong."""
    bad, tree = comm.rank == 1, {"w": jnp.zeros(3), "b": jnp.zeros(2)}
    if number == 0:
        dj.synchronize({"w": jnp.full(3, float(bad))}, communicator=comm)
    if number == 1:
        dj.synchronize(tree | {"b": jnp.zeros(2, jnp.int32 if bad else jnp.float32)}, communicator=comm)
    sync = dj.synchronize(tree, communicator=comm)
    if number == 2:
        sync({"w": tree["w"]} if bad else tree)
    if number == 3:
        sync(tree | {"w": jnp.zeros(4 if bad else 3)})
    if number == 4:
        sync(tree | {"w": jnp.zeros(3, jnp.bfloat16 if bad else jnp.float32)})
    if number == 5:
        sync(tree | {"w": jnp.full(3, jnp.nan if bad else 0.0)})
    if number == 6:
        jax.jit(sync)(tree)
    if number == 7:
        dj.broadcast({"w": jnp.zeros(4 if bad else 3)}, comm)


WRONG = [
    (ValueError, r"distopt.jax.broadcast\(params\) returns rank 0's"),
    (TypeError, r"\['b'\]: a parameter must be an array of float32"),
    (ValueError, "the pytree must be PyTreeDef"),
    (ValueError, r"\['w'\]: the gradient must be of the parameter's shape"),
    (TypeError, r"\['w'\]: the gradient must be of the parameter's dtype"),
    (FloatingPointError, r"not finite: .*\['w'\]"),
    (TypeError, "got a tracer"),
    (ValueError, r"\['w'\] \(3,\) float32, rank 1 has"),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_what_is_wrong_on_a_rank_is_raised_on_all(number):
    error, text = WRONG[number]

    def main(comm):
        with pytest.raises(error, match=text):
            wrong(comm, number)

    run_ranks(2, main)


def test_skipped_gradients_are_infinite_and_leave_residuals_as_they_were():
    def main(comm):
        compressor = ErrorFeedback(TopK(0.25))
        sync = dj.synchronize(jnp.zeros(4), compressor, communicator=comm, nonfinite="skip")
        sync(jnp.array([1.0, 2.0, 3.0, 4.0]))
        before = sync.state_dict()["states"]
        means = sync(jnp.array([jnp.nan if comm.rank else 1.0, 0, 0, 0]))
        assert jnp.isinf(means).all()
        assert sync.skipped == 1
        jax.tree_util.tree_map(np.testing.assert_array_equal, sync.state_dict()["states"], before)

    run_ranks(2, main)


def test_local_steps_are_the_mean_of_how_far_ranks_have_come():
    """Windows of two steps, in numpy: the outer optimizer is SGD without momentum."""

    def main(comm):
        params = start = {"w": jnp.arange(6.0), "b": jnp.ones(2, jnp.bfloat16)}
        windows = dj.local_steps(params, every=2, outer=distopt.optim.SGD(0.5), communicator=comm)
        expected = {n: np.asarray(x, np.float64) for n, x in start.items()}
        for window in range(3):
            for _ in range(2):
                assert windows.step_counter % 2 or (params["w"] == expected["w"].astype(np.float32)).all()
                params = windows({n: x + (comm.rank + 1) * (window + 1) for n, x in params.items()})
            expected = {n: x + 0.5 * 2 * 1.5 * (window + 1) for n, x in expected.items()}
        for n, x in params.items():
            assert x.dtype == start[n].dtype
            np.testing.assert_array_equal(np.asarray(x, np.float64), expected[n])
            np.testing.assert_array_equal(windows.global_parameters(params)[n], x)
        if comm.rank == 0:
            params = windows({n: x + 3 for n, x in params.items()})
        params = windows.join(params)  # the other rank brings nothing
        np.testing.assert_array_equal(params["w"], expected["w"] + 0.5 * 3)

    run_ranks(2, main)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    pytest.importorskip("flax", reason="flax is missing: pip install flax optax")
    pytest.importorskip("optax", reason="optax is missing: pip install flax optax")
    import jax_ranks

    return run_mpi(2, jax_ranks.everything, tmp_path_factory.mktemp("ranks"), str(tmp_path_factory.mktemp("saved")))


@needs_mpi
class TestFlaxAndOptax:
    def test_ranks_have_the_same_bits(self, ranks):
        for name in ("begun", "dense", "int8", "whole", "global"):
            np.testing.assert_array_equal(ranks[0][name], ranks[1][name], name)

    def test_dense_is_one_process_on_the_whole_batch(self, ranks):
        np.testing.assert_allclose(ranks[0]["dense"], ranks[0]["one"], rtol=1e-4, atol=1e-5)
        assert np.abs(ranks[0]["one"] - ranks[0]["begun"]).max() > 0.01

    def test_int8_with_error_feedback_trains(self, ranks):
        for rank in ranks:
            assert rank["losses"][-20:].mean() < 0.2 * rank["losses"][:5].mean()

    @pytest.mark.parametrize(
        ("whole", "resumed"), [("whole", "resumed"), ("whole", "loaded"), ("windows", "windows resumed")]
    )
    def test_a_resumed_training_has_the_bits_of_one_that_went_on(self, ranks, whole, resumed):
        for rank in ranks:
            np.testing.assert_array_equal(rank[whole], rank[resumed])

    def test_a_killed_rank_is_named_by_the_other(self):
        import jax_ranks

        code, output = distopt_run(2, jax_ranks.__file__, timeout=60)
        assert code != 0, output
        assert "rank 1" in output, output
        assert "the script has ended" not in output
