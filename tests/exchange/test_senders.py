"""Means over the ranks that have sent an entry."""

import numpy as np
import pytest

import laws
from distopt import DistOpt, LocalSteps, Parameter, run_ranks, simulate
from distopt.compress import Chunks, DeepGradientCompression, Dense, ErrorFeedback, Packed, Threshold, TopK, TwoBit
from distopt.optim import SGD

SHAPE = (3, 100)
OVER = ("ranks", "senders")


def gradient(step, rank):
    return np.random.default_rng([step, rank]).standard_normal(SHAPE).astype(np.float32)


def run(comm, compressor, steps=1, **options):
    """Train one tensor by SGD of rate 1."""
    w, opt = Parameter("w", np.zeros(SHAPE, np.float32)), DistOpt(SGD(1.0), comm)
    for step in range(steps):
        opt.step([(w, gradient(step, comm.rank))], compressor, **options)
    return w.data


def sent_by(rank, k=8, of=64):
    """What Chunks(k, of) sends, by numpy."""
    x, out = gradient(0, rank).ravel().astype(np.float64), np.zeros(300)
    for begin in range(0, 300, of):
        part = abs(x[begin : begin + of])
        index = begin + np.argsort(-part, kind="stable")[: -(-k * part.size // of)]
        out[index] = x[index]
    return out


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("exchange", ["gather", "two_phase"])
def test_each_entry_is_divided_by_the_ranks_that_have_sent_it(exchange, size):
    found = run_ranks(size, lambda c: run(c, Chunks(8, 64, reselect=False), exchange=exchange, over="senders"))
    sent = np.array([sent_by(rank) for rank in range(size)])
    expected = -sent.sum(0) / np.maximum(1, (sent != 0).sum(0))
    np.testing.assert_allclose(found[0].ravel(), expected, rtol=3e-7)
    assert all(w.tobytes() == found[0].tobytes() for w in found)


def test_an_owner_counts_before_it_chooses_again():
    """Of 2 ranks, one has sent 3, and both have sent 2: 3 is the larger mean over senders, and 4 the larger sum."""

    def main(comm):
        x = np.zeros(64, np.float32)
        x[5 if comm.rank else 6], x[7] = 3, 2
        found = []
        for over in ("ranks", "senders"):
            w, opt = Parameter("w", np.zeros(64, np.float32)), DistOpt(SGD(1.0), comm)
            opt.step([(w, x.copy())], Packed(Chunks(2, 64)), False, "two_phase", over)
            found.append({k: float(-w.data[k]) for k in np.flatnonzero(w.data).tolist()})
        return found

    ranks, senders = run_ranks(2, main)[0]
    assert ranks == {5: 1.5, 7: 2.0}
    assert senders == {5: 3.0, 6: 3.0}


@pytest.mark.parametrize("compressor", [TopK(1.0), Threshold(0.0), ErrorFeedback(TopK(1.0))], ids=repr)
@pytest.mark.parametrize("exchange", ["gather", "two_phase"])
def test_where_all_ranks_send_it_is_the_mean_over_ranks_to_the_bit(compressor, exchange):
    def main(comm):
        return [
            run(comm, compressor, 2, break_even=False, exchange=exchange, over=over) for over in ("ranks", "senders")
        ]

    for ranks, senders in run_ranks(3, main):
        assert ranks.tobytes() == senders.tobytes()


def test_no_bucket_becomes_dense_whose_senders_are_counted():
    def main(comm):
        return [run(comm, TopK(0.9), break_even=even, exchange="gather", over="senders") for even in (True, False)]

    for even, uneven in run_ranks(3, main):
        assert even.tobytes() == uneven.tobytes()


@pytest.mark.parametrize(
    ("compressor", "options", "text"),
    [
        (Dense(), {}, "sends no entries"),
        (ErrorFeedback(TwoBit()), {}, "sends no entries"),
        (DeepGradientCompression(TopK(0.1)), {}, "sends no entries"),
        (TopK(0.1), {"exchange": "nodes"}, "nodes"),
        (TopK(0.1), {"over": "all"}, "one of ranks, senders"),
    ],
)
def test_what_nobody_can_count_is_refused(compressor, options, text):
    def main(comm):
        with pytest.raises(ValueError, match=text):
            run(comm, compressor, **{"over": "senders"} | options)

    run_ranks(2, main)


@pytest.mark.parametrize("exchange", ["gather", "two_phase"])
@pytest.mark.parametrize("compressor", [TopK(0.1), ErrorFeedback(Packed(Chunks(8, 64), value="2bit"))], ids=repr)
def test_virtual_ranks_count_them_too(compressor, exchange):
    expected = run_ranks(3, lambda comm: run(comm, compressor, 3, exchange=exchange, over="senders"))
    w, sim = Parameter("w", np.zeros(SHAPE, np.float32)), simulate(3, SGD(1.0))
    for step in range(3):
        sim.step(lambda rank, step=step: [(w, gradient(step, rank))], compressor, exchange=exchange, over="senders")
    assert w.data.tobytes() == expected[0].tobytes()


def test_ranks_that_differ_in_it_are_told():
    def main(comm):
        with pytest.raises(ValueError, match="over senders"):
            run(comm, TopK(0.1), over="senders" if comm.rank else "ranks")

    run_ranks(2, main)


def test_ranks_stay_the_same_over_many_steps():
    """Ranks have the same parameters after many steps, too."""
    compressor = ErrorFeedback(Packed(Chunks(8, 64), value="2bit"), decay=0.95)
    ends = run_ranks(
        3, lambda comm: laws.digest([Parameter("w", run(comm, compressor, 5, exchange="two_phase", over="senders"))])
    )
    assert len(set(ends)) == 1


def ones(comm, compressor, over, batches=1, sync=True, calls=None, **options):
    """What zeros become by SGD of rate 1, where all gradients are 1, and ranks may bring different numbers of them."""
    w = Parameter("w", np.zeros(4))
    opt = DistOpt(SGD(1.0), comm, num_batches=batches, sync_on_apply=sync)
    for _ in range(calls[comm.rank] if calls else batches):
        opt.step([(w, np.ones(4))], compressor, over=over, break_even=False, **options)
    if calls:
        opt.join()
    return w.data.tolist()


@pytest.mark.parametrize("batches", [2, 4])
@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("exchange", ["gather", "two_phase"])
@pytest.mark.parametrize("compressor", [TopK(1.0), ErrorFeedback(Packed(Chunks(64, 64))), Threshold(0.5)], ids=repr)
def test_a_mean_over_senders_is_one_over_their_batches_too(compressor, exchange, sync, batches):
    found = run_ranks(3, lambda comm: ones(comm, compressor, "senders", batches, sync, exchange=exchange))
    assert found == [[-1.0] * 4] * 3


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("exchange", ["gather", "two_phase"])
def test_an_entry_that_one_rank_has_sent_is_its_mean_over_batches(exchange, sync):
    """Of 3 ranks each sends another entry, in both batches."""

    def main(comm):
        w, opt = Parameter("w", np.zeros(64)), DistOpt(SGD(1.0), comm, num_batches=2, sync_on_apply=sync)
        for value in (2.0, 4.0):
            x = np.zeros(64)
            x[comm.rank] = value
            opt.step([(w, x)], Threshold(1.0), False, exchange, "senders")
        return w.data[:4].tolist()

    assert run_ranks(3, main) == [[-3.0, -3.0, -3.0, 0.0]] * 3


@pytest.mark.parametrize("exchange", ["gather", "two_phase"])
@pytest.mark.parametrize("compressor", [TopK(1.0), ErrorFeedback(Packed(Chunks(64, 64)))], ids=repr)
@pytest.mark.parametrize("options", [{}, {"batches": 2}, {"batches": 2, "sync": False}], ids=str)
def test_zeros_of_a_rank_that_has_joined_are_no_senders(compressor, exchange, options):
    """Where all send all they have, over senders is over ranks, also in windows to which a rank brings one batch."""

    def main(comm):
        return [ones(comm, compressor, over, calls=(4, 3, 8), exchange=exchange, **options) for over in OVER]

    for ranks, senders in run_ranks(3, main):
        assert senders == ranks == [-8.0 / options.get("batches", 1)] * 4


@pytest.mark.parametrize("exchange", ["gather", "two_phase"])
def test_what_a_rank_that_has_joined_sends_of_its_residual_counts(exchange):
    """Rank 0 brings 8 and 4 once, rank 1 brings 2 at the first place and then at the second."""

    def main(comm):
        w, opt = Parameter("w", np.zeros(64)), DistOpt(SGD(1.0), comm)
        for step in range(1 if comm.rank == 0 else 2):
            x = np.zeros(64)
            x[:2] = (8, 4) if comm.rank == 0 else np.roll([2, 0], step)
            opt.step([(w, x)], ErrorFeedback(TopK(1 / 64)), False, exchange, "senders")
        opt.join()
        return w.data[:2].tolist()

    assert run_ranks(2, main) == [[-(8 + 2) / 2, -(4 + 2) / 2]] * 2


def test_local_steps_count_no_zeros_of_ranks_that_have_joined_either():
    def main(comm):
        w = Parameter("w", np.zeros(4))
        options = {"every": 1, "outer": SGD(1.0), "break_even": False, "over": "senders"}
        opt = LocalSteps(SGD(1.0), comm, compressor=TopK(1.0), **options)
        for _ in range(1 + comm.rank):
            opt([(w, np.ones(4))])
        opt.join()
        return w.data.tolist()

    assert run_ranks(2, main) == [[-2.0] * 4] * 2


@pytest.mark.parametrize("calls", [(3, 3, 3), (1, 2, 4)], ids=str)
def test_buckets_that_leave_early_are_divided_by_their_senders_too(calls):
    def main(comm, overlap):
        weights = [Parameter(str(k), np.zeros(SHAPE, np.float32)) for k in range(3)]
        opt = DistOpt(SGD(1.0), comm, overlap=overlap, threshold=300)
        for step in range(calls[comm.rank]):
            pairs = [(w, gradient(3 * step + k, comm.rank)) for k, w in enumerate(weights)]
            opt.step(pairs, TopK(0.5), False, "gather", "senders")
        opt.join()
        return laws.digest(weights)

    expected = run_ranks(3, lambda comm: main(comm, False))
    assert run_ranks(3, lambda comm: main(comm, True)) == expected
