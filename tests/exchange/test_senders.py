"""Means over the ranks that have sent an entry."""

import numpy as np
import pytest

import laws
from distopt import DistOpt, Parameter, run_ranks, simulate
from distopt.compress import Chunks, DeepGradientCompression, Dense, ErrorFeedback, Packed, Threshold, TopK, TwoBit
from distopt.optim import SGD

SHAPE = (3, 100)


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
