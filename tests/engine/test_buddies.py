"""Ranks go on without one that alone had a share of the optimizer's state: beside the law of ``test_lost_ranks``."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distopt import DistOpt, Parameter, run_ranks
from distopt.comm import Elastic, Metered
from distopt.engine.buddies import Division, _elements
from distopt.kernels.layout import CHUNK, BucketLayout
from distopt.optim import SGD, Adam, Muon
from distopt.optim.optimizer import OwnedSlots

CHUNKS = 10
SIZE = CHUNKS * CHUNK
LR, MOMENTUM = 0.5, 0.5


class Gone(BaseException):
    """The end of a rank."""


def started(comm, opt=None, **options):
    """A parameter in memory that all ranks share, its optimizer, and what that talks by."""
    comm, p = Elastic(comm), Parameter("w", np.zeros(SIZE, np.float32))
    opt = DistOpt(opt or SGD(LR, momentum=MOMENTUM), comm, buddy=True, **options)
    (p.data,) = opt.parameter_views([p])
    return comm, p, opt


def end_in_update(opt, p):
    """Let rank 1 of 3 end in its next update, and leave its share of the parameters half written."""

    def update(*arguments):
        p.data[3 * CHUNK : 6 * CHUNK] = np.nan
        raise Gone

    opt.engine.update = update


def step(opt, p, number, member):
    opt([(p, gradient(number, member))])


def gradient(number, member):
    return np.random.default_rng([number, member]).standard_normal(SIZE).astype(np.float32)


def expected(members_by_step, changed=None):
    """What gradient descent with momentum makes of zeros, in float64; ``changed`` is subtracted before a step."""
    w = v = np.zeros(SIZE)
    for number, members in enumerate(members_by_step):
        w = w - 1 if number == changed else w
        v = MOMENTUM * v + np.mean([gradient(number, m).astype(np.float64) for m in members], axis=0)
        w = w - LR * v
    return w


@pytest.mark.parametrize("change", [None, 2])
def test_a_share_that_was_left_half_written_is_put_back_with_what_a_script_has_changed(change):
    def main(comm):
        member = comm.rank
        comm, p, opt = started(comm)
        for number in range(4):
            if number == change:
                comm.barrier()
                if comm.rank == 0:
                    p.data[...] -= 1
                comm.barrier()
            if (member, number) == (1, 2):
                end_in_update(opt, p)
            try:
                step(opt, p, number, member)
            except Gone:
                return None
        comm.leave()
        return p.data.copy()

    first, _, last = run_ranks(3, main)
    np.testing.assert_allclose(first, expected([(0, 1, 2)] * 2 + [(0, 2)] * 2, change), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(first, last)


def test_a_rank_that_is_lost_after_a_load_leaves_what_was_loaded():
    def main(comm):
        member = comm.rank
        comm, p, opt = started(comm)
        step(opt, p, 0, member)
        state, value = opt.state_dict(), p.data.copy()
        step(opt, p, 1, member)
        p.data[...] = value
        opt.load_state_dict(state)
        comm.barrier()
        if member == 1:
            end_in_update(opt, p)
        try:
            for number in (1, 2):
                step(opt, p, number, member)
        except Gone:
            return None
        comm.leave()
        return p.data.copy()

    first, _, last = run_ranks(3, main)
    np.testing.assert_allclose(first, expected([(0, 1, 2), (0, 2), (0, 2)]), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(first, last)


def test_neighbours_that_are_lost_at_once_are_named_and_a_checkpoint_helps():
    def main(comm):
        member = comm.rank
        comm, p, opt = started(comm)
        for number in range(2):
            step(opt, p, number, member)
            if number == 0:
                state, value = opt.state_dict(), p.data.copy()
        if member in (0, 3):
            return None
        text = "alone had its share of the optimizer's state, and with it the next one, which had the copy: rank 3 with"
        for _ in range(2):
            with pytest.raises(RuntimeError, match=f"{text} 0 of 4; load a checkpoint to go on"):
                step(opt, p, 2, member)
        p.data[...] = value
        opt.load_state_dict(state)
        for number in (1, 2):
            step(opt, p, number, member)
        comm.leave()
        return p.data.copy()

    _, first, last, _ = run_ranks(4, main)
    np.testing.assert_allclose(first, expected([range(4), (1, 2), (1, 2)]), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(first, last)


def sent(make, ranks=4, steps=3, buddy=True, **options):
    """Bytes of copies by (step, verb), of each rank."""

    def main(comm):
        comm, p = Metered(Elastic(comm)), Parameter("w", np.zeros((CHUNKS, CHUNK), np.float32))
        opt = DistOpt(make(), comm, buddy=buddy, **options)
        if not opt.engine.optimizer.shares_work:
            (p.data,) = opt.parameter_views([p])
        for _ in range(steps):
            opt([(p, np.ones_like(p.data))])
        rows = [row for row in comm.ledger.by("step", "phase", "verb") if row["phase"] == "buddy"]
        return {(row["step"], row["verb"]): row["sent"] for row in rows}

    return run_ranks(ranks, main)


def test_a_ledger_counts_one_share_per_update():
    shares = [2, 3, 2, 3]  # chunks of ten
    for slots, make in ((1, lambda: SGD(0.1, momentum=0.9)), (2, Adam)):
        expected = [{(k, "all_to_all"): share * CHUNK * 4 * slots for k in (1, 2, 3)} for share in shares]
        assert sent(make) == expected
    every_other = [{(1, "all_to_all"): share * CHUNK * 8} for share in shares]
    assert sent(Adam, num_batches=2) == every_other, "calls that update nothing send nothing"


def test_nothing_is_sent_where_there_is_no_state_or_all_ranks_have_it_or_nobody_asks():
    assert sent(lambda: SGD(0.1)) == [{}] * 4
    assert sent(lambda: Muon(sharded=True)) == [{}] * 4
    assert sent(Adam, buddy=False) == [{}] * 4
    assert sent(Adam, ranks=1) == [{}]


@given(
    st.lists(st.integers(0, 4 * CHUNK), min_size=1, max_size=5),
    st.sampled_from([None, *range(5)]),
    st.integers(1, 5),
    st.integers(1, 5),
)
def test_each_element_is_in_one_share_and_in_one_part_of_it_that_moves(sizes, number, before, after):
    offsets = np.cumsum([0, *(-(-n // 16) * 16 for n in sizes)])[:-1].tolist()
    members = BucketLayout([str(k) for k in range(len(sizes))], [(n,) for n in sizes], offsets, np.float32)
    table, counts = OwnedSlots(members, [], number), np.zeros((2, members.extent), int)
    for r in range(before):
        mine = Division(r, before).chunks(table)
        counts[0, _elements(members, [mine])] += 1
        for s in range(after):
            counts[1, _elements(members, [mine, Division(s, after).chunks(table)])] += 1
    for row, count in itertools.product(range(len(sizes)), counts):
        assert (members.view(count, row) == 1).all()


def test_the_option_is_checked_and_ranks_that_differ_in_it_say_so():
    with pytest.raises(TypeError, match="buddy must be True or False, got 1"):
        DistOpt(buddy=1)

    def main(comm):
        p, opt = Parameter("w", np.zeros(3, np.float32)), DistOpt(SGD(), comm, buddy=comm.rank == 1)
        with pytest.raises(ValueError, match="rank 0 has buddy=False, rank 1 has buddy=True"):
            opt([(p, np.ones(3, np.float32))])
        return repr(opt)

    assert ["buddy" in text for text in run_ranks(2, main)] == [False, True]
