"""overlap: buckets are sent while gradients are computed.  (That it changes no bit is a law.)"""

import threading
import time

import numpy as np
import pytest

import laws
import tiers
from distopt import DistOpt, Parameter, run_ranks
from distopt.comm import Metered
from distopt.comm.control import PeerLeft
from distopt.compress import ErrorFeedback, Int8, TopK
from distopt.optim import SGD
from launch import distopt_run, needs_mpi, run_mpi


def overlapped(comm, steps=1):
    """Parameters and an optimizer that has made some steps; from the second one on, buckets may travel early."""
    return laws.train(comm, steps, overlap=True)


def loss(params, comm, step=1):
    return zip(params, laws.gradients(params, step, comm.rank), strict=True)


def travels_early(comm):
    """The last gradient of rank 0 is computed only once a bucket has been exchanged."""
    wire = Metered(comm)
    params, opt = overlapped(wire)

    def backward():
        wire.reset()
        *first, last = loss(params, comm)
        yield from first
        end = time.monotonic() + 10
        while not wire.report() and time.monotonic() < end:
            time.sleep(1e-3)
        assert wire.report(), "no bucket travelled while gradients were computed"
        yield last

    assert len(opt.plan.buckets) > 1
    assert opt(backward())


def stumbles(comm):
    """What one rank's backward pass raises, all raise, although buckets are on their way; and the next step is fine."""
    params, opt = overlapped(comm)
    before = laws.digest(params)

    def backward():
        for k, pair in enumerate(loss(params, comm)):
            if comm.rank == comm.size - 1 and k == 6:
                raise ValueError("no more data")
            yield pair

    with pytest.raises(ValueError, match=f"rank {comm.size - 1}: no more data"):
        opt(backward())
    assert laws.digest(params) == before
    assert opt(loss(params, comm))
    laws.same_on_all_ranks(comm, laws.digest(params))


def unusual(comm):
    """Another order, arrays that must be copied, another mode, another threshold: the same bits as without overlap."""
    found = []
    for overlap in (True, False):
        params, opt = laws.train(comm, 1, overlap=overlap, deterministic=True)
        opt(list(loss(params, comm))[::-1])
        opt(list(loss(params, comm))[::-1])
        opt((p, np.array(g, order="F")) for p, g in loss(params, comm, 2))
        opt.backward_and_sparse_update(loss(params, comm, 3), spars=0.1, topK=True)
        opt.backward_and_update(loss(params, comm, 4), threshold=10)
        opt.backward_and_update(loss(params, comm, 4), threshold=10)
        views = opt.gradient_views(params)
        for view, (_, g) in zip(views, loss(params, comm, 5), strict=True):
            view[...] = g
        opt(zip(params, views, strict=True))
        found.append(laws.digest(params))
    assert found[0] == found[1]
    laws.same_on_all_ranks(comm, found[0])


def differs(comm):
    """Ranks that do different things raise the same error before data moves."""
    params, opt = overlapped(comm)
    step = opt if comm.rank else opt.backward_and_update_half
    with pytest.raises(ValueError, match=r"ranks differ: rank 0 has a step with Half.*rank 1 has a step with Dense"):
        step(loss(params, comm))
    with pytest.raises(ValueError, match="ranks differ"):
        opt.backward_and_update(loss(params, comm), threshold=None if comm.rank else 5)
    with pytest.raises(ValueError, match=r"rank 0: density must be in \(0, 1\], got 7"):
        opt.backward_and_sparse_update(loss(params, comm), spars=7 if comm.rank == 0 else 1, topK=True)
    for view in (p.data for p in params):
        assert np.isfinite(view).all()
    assert opt(loss(params, comm))


def not_finite(comm):
    """Named by rank and parameter, as without overlap."""
    params, opt = overlapped(comm)

    def backward():
        for k, (p, g) in enumerate(loss(params, comm)):
            yield p, np.where(np.arange(g.size).reshape(g.shape) == 2, np.nan, g).astype(g.dtype) if k in (1, 6) else g

    with pytest.raises(FloatingPointError, match=r"rank 0: p1 \(1 of 50 entries\), p6 \(1 of 30 entries\); rank 1: p1"):
        opt(backward())
    assert opt(loss(params, comm))


def busy(comm):
    """A backward pass that uses the same communicator itself, at its own pace on every rank, disturbs nothing."""
    found = []
    for overlap in (True, False):
        params, opt = laws.train(comm, 1, overlap=overlap, deterministic=True)

        def backward(params=params):
            for p, g in loss(params, comm):
                time.sleep(1e-3 * comm.rank)
                total = np.full(5, comm.rank + 1.0)
                comm.all_reduce(total)
                assert total.tolist() == [comm.size * (comm.size + 1) / 2] * 5
                yield p, g

        opt(backward())
        opt(backward())
        found.append(laws.digest(params))
    assert found[0] == found[1]


def verb_in_a_loss(comm):
    """DistOpt's own verbs vote, and a vote is under way already."""
    params, opt = overlapped(comm)

    def backward():
        for p, g in loss(params, comm):
            opt.all_reduce(g)
            yield p, g

    with pytest.raises(
        RuntimeError, match=r"rank 0: collectives must be those of opt\.communicator in a loss, with overlap"
    ):
        opt(backward())
    assert opt(loss(params, comm))
    opt.all_reduce(np.ones(3))


def no_pairs(comm):
    """What is no pair is named as without overlap."""
    params, opt = overlapped(comm)
    with pytest.raises(TypeError, match=r"loss must be an iterable of \(param, grad\) pairs"):
        opt([(*pair, 1) for pair in loss(params, comm)])
    assert opt(loss(params, comm))


def anothers_view(comm):
    """A gradient in the view of a parameter that was sent already is gone: an error, not another's sum."""
    params, opt = overlapped(comm)
    views = opt.gradient_views(params)
    grads = [g for _, g in loss(params, comm)]
    grads[-1] = views[1][:1]
    opt(loss(params, comm))
    with pytest.raises(
        ValueError,
        match="rank 0: p7: the gradient must be an array of its own, got the view of another parameter, which was sent",
    ):
        opt(zip(params, grads, strict=True))
    assert opt(loss(params, comm))


REMEMBERS = [
    "half with memory",
    "int8",
    "int8 in two phases",
    "int4 in two phases",
    "1bit",
    "2bit",
    "topk",
    "threshold",
]
REMEMBERS += ["packed", "packed 2bit", "chunks"]


def remembers(comm, mode):
    """Buckets of a compressor with a residual leave early too; what is refused afterwards has changed nothing.

    A NaN of one rank, an exception of another one, and a sum that overflows, on the way; then the bits of parameters,
    and of all that is kept, are those of no overlap.
    """

    def pairs_of(params, step, fault=None):
        for k, (p, g) in enumerate(loss(params, comm, step)):
            here = {"nan": comm.rank == 0, "raises": comm.rank == comm.size - 1}
            if k == 6 and here.get(fault):
                if fault == "raises":
                    raise ValueError("no more data")
                g = np.where(np.arange(g.size).reshape(g.shape) == 2, np.nan, g).astype(g.dtype)
            yield p, np.full_like(g, 3e38) if k == 6 and fault == "overflows" else g

    seen = []
    for overlap in (False, True):
        params, opt = laws.train(comm, 1, mode=mode, overlap=overlap, deterministic=True, nonfinite="skip")
        for step, fault in enumerate(["nan", None, "raises", None, "overflows", None]):
            early = []

            def watched(step=step, fault=fault, params=params, opt=opt, early=early):
                for pair in pairs_of(params, step, fault):
                    early.append(opt.engine.in_backward)
                    yield pair

            if fault == "raises":
                with pytest.raises(ValueError, match=f"rank {comm.size - 1}: no more data"):
                    laws.MODES[mode](opt, watched())
            else:
                laws.MODES[mode](opt, watched())
            assert any(early) == overlap
        assert opt.skipped >= 1
        seen.append((laws.digest(params), opt.state_dict()))
    (expected, kept), (found, also_kept) = seen
    assert found == expected
    if "two phases" not in mode:  # whose owners are others where each bucket has shards of its own
        laws.assert_equal_states(also_kept, kept)
    laws.same_on_all_ranks(comm, found)


@pytest.mark.parametrize("mode", REMEMBERS)
@pytest.mark.parametrize("size", tiers.one_by_default(3, of=(2, 3)))
def test_buckets_with_residuals_leave_early(mode, size):
    run_ranks(size, lambda comm: remembers(comm, mode))


def all_that_remember(comm):
    for mode in REMEMBERS:
        remembers(comm, mode)


@needs_mpi
def test_buckets_with_residuals_leave_early_on_mpi(tmp_path):
    run_mpi(3, all_that_remember, tmp_path)


def test_what_waits_for_a_parameter_without_a_gradient_stays():
    """Its bucket has left when ranks learn that nobody has one; what was folded out of its residual comes back."""

    def main(comm):
        params = [Parameter(f"p{k}", np.zeros(50, np.float32)) for k in range(4)]
        opt = DistOpt(SGD(1.0), comm, threshold=60, overlap=True, allow_missing=True)
        top, total = ErrorFeedback(TopK(0.1)), np.zeros((4, 50))
        for step in range(6):
            grads = [comm.rank + 1 + np.arange(50, dtype=np.float32) % (k + step + 2) for k in range(4)]
            used = [k for k in range(4) if step % 2 == 0 or k != 2]
            for k in used:
                total[k] += sum(rank + 1 + np.arange(50) % (k + step + 2) for rank in range(comm.size))
            waits = {name: x.copy() for name, x in opt.state_dict()["states"].get("residual", {}).items()}
            before = params[2].data.copy()
            opt.step(((params[k], grads[k]) for k in used), top)
            if step % 2:
                assert (params[2].data == before).all()
                np.testing.assert_array_equal(opt.state_dict()["states"]["residual"]["p2"], waits["p2"])
        kept = opt.state_dict()["states"]["residual"]
        return [p.data for p in params], kept, total

    ranks = run_ranks(3, main)
    for k in range(4):
        waiting = sum(kept[f"p{k}"].astype(float) for _, kept, _ in ranks)
        np.testing.assert_allclose(waiting - 3.0 * ranks[0][0][k], ranks[0][2][k], atol=1e-3)


def test_the_plan_says_that_buckets_have_shards_of_their_own():
    def main(comm):
        found = []
        for overlap in (False, True):
            _, opt = laws.train(comm, 2, mode="int8 in two phases", overlap=overlap)
            found.append(str(opt.plan).splitlines()[-1])
        return found

    together, apart = run_ranks(3, main)[0]
    assert together.startswith("exchange: two-phase, 3 shards of "), together
    assert apart.startswith("exchange: two-phase, 3 shards of each bucket of "), apart


def test_what_waits_is_weighed_where_a_rank_has_joined():
    """Its residual is a part of means over all ranks still, whether buckets leave early or not."""

    def main(comm):
        seen = []
        for overlap in (False, True):
            params, opt = laws.train(comm, 0, overlap=overlap, deterministic=True)
            for step in range(2 + comm.rank):
                opt.step(loss(params, comm, step), ErrorFeedback(Int8()))
            opt.join()
            seen.append((laws.digest(params), opt.state_dict()))
        assert seen[0][0] == seen[1][0]
        laws.assert_equal_states(seen[1][1], seen[0][1])

    run_ranks(3, main)


CASES = [busy, verb_in_a_loss, no_pairs, anothers_view, travels_early, stumbles, unusual, differs, not_finite]


@pytest.mark.parametrize("case", CASES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("size", tiers.one_by_default(3, of=(2, 3)))
def test_overlap_cases_hold_on_threads(case, size):
    run_ranks(size, case)


def all_cases(comm):
    for case in CASES:
        case(comm)


@needs_mpi
@pytest.mark.parametrize("size", [2, 3])
def test_overlap_cases_hold_on_mpi(size, tmp_path):
    run_mpi(size, all_cases, tmp_path)


LEAVING = """
import sys, time
import numpy as np
import distopt

opt = distopt.DistOpt(overlap=True, threshold=0)
params = [distopt.Parameter(f"p{k}", np.zeros(1000)) for k in range(4)]

def loss(step):
    for k, p in enumerate(params):
        if (opt.global_rank, step, k) == (1, 2, 2):
            time.sleep(0.3)
            sys.exit(3)
        yield p, np.ones(1000)

for step in range(4):
    try:
        opt(loss(step))
    except RuntimeError as error:
        print(f"{type(error).__name__}: {error}")
        raise
"""


@needs_mpi
def test_a_rank_that_exits_in_its_backward_pass_ends_the_others(tmp_path):
    """Buckets are on their way, and the other rank waits for them."""
    script = tmp_path / "leaving.py"
    script.write_text(LEAVING)
    code, output = distopt_run(2, script, timeout=20)
    assert code == 3 or "PeerLeft: rank 1 left after the start of step 3, before step 3" in output, output
    assert code != 0


def test_a_rank_that_left_before_an_overlapped_step_is_named():
    def main(comm):
        params, opt = overlapped(comm)
        if comm.rank == 0:
            return
        opt(loss(params, comm))

    with pytest.raises(PeerLeft, match="rank 0 left"):
        run_ranks(3, main)


@pytest.mark.parametrize("overlap", ["yes", None, 2])
def test_an_overlap_that_is_not_auto_true_or_false_is_refused(overlap):
    def main(comm):
        DistOpt(SGD(0.1), comm, overlap=overlap)

    with pytest.raises(ValueError, match="overlap must be 'auto', True or False, got"):
        run_ranks(2, main)


def test_overlap_needs_threads_in_mpi():
    def main(comm):
        comm.may_overlap = False
        assert DistOpt(SGD(0.1), comm)
        DistOpt(SGD(0.1), comm, overlap=True)

    with pytest.raises(ValueError, match=r"overlap must be .* or False with this MPI"):
        run_ranks(2, main)


def test_the_thread_ends_with_its_optimizer():
    before = set(threading.enumerate())
    found = []

    def main(comm):
        params, opt = overlapped(comm)
        opt(loss(params, comm))
        comm.barrier()
        found.extend(t for t in threading.enumerate() if t.daemon and t not in before)
        del opt

    run_ranks(2, main)
    assert len(set(found)) == 2
    for thread in found:
        thread.join(10)
        assert not thread.is_alive()
