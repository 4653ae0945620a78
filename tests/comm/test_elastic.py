"""Collectives outside of a step are done again by the ranks that are left, with what each had brought."""

import threading
import time

import numpy as np
import pytest

from distopt import DistOpt, Parameter
from distopt.comm import Elastic, LocalCommunicator, Metered, Ordered, run_ranks
from distopt.comm.control import PeerLeft
from distopt.compress import TopK
from distopt.optim import SGD, ExponentialDecay
from laws import inputs


class Gone(Exception):
    """The end of a rank."""


VERBS = {  # what each rank of ``size`` gets where rank r brings r + 1
    "all_reduce": (lambda comm, x: comm.all_reduce(x) or x, lambda ranks: [float(sum(ranks))] * 3),
    "ordered": (lambda comm, x: Ordered(comm).all_reduce(x) or x, lambda ranks: [float(sum(ranks))] * 3),
    "metered": (lambda comm, x: Metered(comm).all_reduce(x) or x, lambda ranks: [float(sum(ranks))] * 3),
    "all_gather": (lambda comm, x: np.concatenate(comm.all_gather(x)), lambda ranks: np.repeat(ranks, 3).tolist()),
    "broadcast": (lambda comm, x: comm.broadcast(x) or x, lambda ranks: [float(ranks[0])] * 3),
    "reduce_scatter": (
        lambda comm, x: np.concatenate(comm.all_gather(comm.reduce_scatter(x), ragged=True)),
        lambda ranks: [float(sum(ranks))] * 3,
    ),
    "lengths": (lambda comm, x: comm.lengths(int(x[0])), list),
    "broadcast_object": (lambda comm, x: comm.broadcast_object({"of": float(x[0])}), lambda ranks: {"of": ranks[0]}),
    "barrier": (lambda comm, x: comm.barrier(), lambda ranks: None),
}


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("verb", VERBS)
def test_a_collective_is_done_by_those_that_are_left(verb, victim):
    call, wanted = VERBS[verb]

    def main(comm):
        comm, member = Elastic(comm), comm.rank
        call(comm, np.full(3, member + 1.0))
        if member == victim:
            return None
        got = call(comm, np.full(3, member + 1.0))
        comm.leave()
        return got if got is None or isinstance(got, dict | list) else got.tolist()

    left = [member + 1 for member in range(4) if member != victim]
    found = run_ranks(4, main)
    assert [found[member - 1] for member in left] == [wanted(left)] * 3


def test_numbers_and_callbacks_follow():
    def main(comm):
        comm, member, told = Elastic(comm), comm.rank, []
        p, opt = Parameter("w", np.zeros(3, np.float32)), DistOpt(SGD(1.0), Ordered(Metered(comm)))
        opt.on_resize(lambda *ranks: told.append(ranks))
        for step in range(4):
            if (member, step) in [(1, 1), (3, 2)]:
                return None
            opt([(p, np.full(3, member, np.float32))])
        comm.leave()
        return told, repr(opt).split(",")[-2:], p.data[0], opt.communicator.size

    first, _, last, _ = run_ranks(4, main)
    mean = -(6 / 4 + 5 / 3 + 1 + 1)
    assert first[0] == [(0, 3), (0, 2)]
    assert last[0] == [(1, 3), (1, 2)]
    assert first[3] == last[3] == 2
    np.testing.assert_allclose([first[2], last[2]], mean, rtol=1e-6)


@pytest.mark.parametrize("wrapper", [Ordered, Metered])
def test_a_wrapper_has_another_duplicate_and_other_subgroups_after_a_loss(wrapper):
    """As a rank that comes makes new ones, and the others with it."""

    def main(comm):
        comm, member = Elastic(comm), comm.rank
        outer = wrapper(comm)
        before = outer.duplicate(), outer.subgroup([[0], [1], [2]])
        assert (outer.duplicate(), outer.subgroup([[0], [1], [2]])) == before
        if member == 1:
            return None
        comm.barrier()
        after = outer.duplicate(), outer.subgroup([[0, 1]])
        comm.leave()
        return after[0] is before[0], [made.size for made in (*before, *after)]

    first, _, last = run_ranks(3, main)
    assert first == last == (False, [3, 1, 2, 2])


def test_what_all_ranks_raise_alike_stays_an_error():
    def main(comm):
        comm, p = Elastic(comm), Parameter("w", np.zeros(3, np.float32))
        opt, bad = DistOpt(SGD(1.0), comm), np.full(3, np.nan if comm.rank == 1 else 0, np.float32)
        with pytest.raises(FloatingPointError, match="rank 1: w"):
            opt([(p, bad)])
        opt([(p, np.ones(3, np.float32))])
        comm.leave()
        return p.data.tolist()

    assert run_ranks(3, main) == [[-1, -1, -1]] * 3


def test_an_error_of_one_rank_ends_only_that_rank():
    def main(comm):
        comm, member = Elastic(comm), comm.rank
        p, opt = Parameter("w", np.zeros(3, np.float32)), DistOpt(SGD(1.0), comm)
        for step in range(3):
            if (member, step) == (1, 1):
                try:
                    raise Gone
                except Gone:
                    return "gone"
            opt([(p, np.full(3, member, np.float32))])
        comm.leave()
        return p.data.tolist()

    assert run_ranks(3, main) == [[-3, -3, -3], "gone", [-3, -3, -3]]


def test_shared_parameters_say_what_is_gone():
    def main(comm):
        comm, member = Elastic(comm), comm.rank
        params = [Parameter("w", np.zeros(300, np.float32))]
        opt = DistOpt(SGD(1.0, momentum=0.9), comm)
        params[0].data = opt.parameter_views(params)[0]
        for step in range(3):
            if (member, step) == (1, 1):
                return "gone"
            opt([(params[0], np.ones(300, np.float32))])

    with pytest.raises(RuntimeError, match="a rank was lost that alone had its share of the optimizer's state"):
        run_ranks(3, main)


def test_a_communicator_that_loses_no_rank_says_so():
    with pytest.raises(ValueError, match="needs a communicator that defines next_epoch, got a LocalCommunicator"):
        LocalCommunicator().next_epoch("")


def test_without_it_a_lost_rank_ends_the_others():
    def main(comm):
        if comm.rank:
            comm.barrier()

    with pytest.raises(PeerLeft):
        run_ranks(2, main)


@pytest.mark.parametrize("meeting", range(0, 40, 3))
def test_a_checkpoint_is_whole_or_absent_if_a_rank_ends_while_it_is_saved(meeting, tmp_path, monkeypatch):
    from distopt.comm import threads

    meet, count = threads.ThreadRendezvous.meet, [None]

    def counted(self, rank, *arguments):
        if self.ranks[rank] == 0 and count[0] is not None:
            count[0] += 1
            if count[0] == meeting:
                raise Gone
        return meet(self, rank, *arguments)

    monkeypatch.setattr(threads.ThreadRendezvous, "meet", counted)

    def train(comm, steps, folder):
        params = [Parameter("w", np.zeros(30, np.float32))]
        opt = DistOpt(SGD(0.1, momentum=0.9), comm)
        opt.load(folder, params)
        for _ in range(opt.step_counter, steps):
            opt([(params[0], np.ones(30, np.float32))])
        return opt, params

    def main(comm):
        comm, member = Elastic(comm), comm.rank
        try:
            opt, params = train(comm, 2, tmp_path)
            comm.barrier()
            count[0] = 0
            opt.save(tmp_path, params)
            opt([(params[0], np.ones(30, np.float32))])
            comm.leave()
        except Gone:
            return None
        return member, opt.step_counter

    found = [had for had in run_ranks(3, main) if had]
    assert {steps for _, steps in found} == {3}
    count[0] = None
    opt, params = run_ranks(1, lambda comm: train(comm, 2, tmp_path))[0]
    assert opt.step_counter == 2
    np.testing.assert_allclose(params[0].data, -0.1 * (1 + 1.9), rtol=1e-6)
    assert not [path for path in tmp_path.rglob("*") if "tmp" in path.name]


def grown(victim, make, steps=6, lost_at=2, **options):
    """Three ranks train, of which one ends; a fourth takes its place.  What all have at the end."""
    ended = threading.Event()

    def main(comm):
        member, inside = comm.rank, comm.subgroup([[0, 1, 2], [3]])
        comm = Elastic(inside if member < 3 else comm.waiting_for([0, 1, 2]))
        params = inputs.parameters(rank=member)
        opt = DistOpt(make(), comm, threshold=60, **options)
        if member == 3:
            ended.wait()
        extra = opt.rejoin(params, extra=lambda: {"by": comm.rank, "at": opt.step_counter})
        assert (extra is None) == (member < 3)
        began, sizes = opt.step_counter, []
        while opt.step_counter < steps:
            if (member, opt.step_counter) == (victim, lost_at):
                ended.set()
                return None
            if member < 3 and opt.step_counter == lost_at + 1:
                while not comm.joiner_waits() and comm.size == 2:
                    time.sleep(1e-3)
            opt(list(inputs.pairs(inputs.VirtualRank(member, 4), params, opt.step_counter)))
            sizes.append(comm.size)
        comm.leave()
        return [p.data for p in params], opt.state_dict(), (began, extra, sizes)

    return run_ranks(4, main)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.5}, {"check_every": 1}], ids=str)
def test_a_process_that_joins_goes_on_as_the_others(victim, options):
    def make():
        return SGD(ExponentialDecay(0.1, 2, 0.5, staircase=True), momentum=0.9, weight_decay=1e-3)

    found = [had for had in grown(victim, make, **options) if had]
    assert len(found) == 3
    (first, state, (_, _, sizes)), (_, its, (began, extra, all_there)) = found[0], found[-1]
    assert sizes[0] == 3
    assert 2 in sizes
    assert sizes[-1] == 3
    assert set(all_there) == {3}
    assert began == extra["at"] == 6 - len(all_there)
    assert extra["by"] == 0
    for values, _, _ in found:
        for a, b in zip(values, first, strict=True):
            np.testing.assert_array_equal(a, b)
    assert its["optimizer"].keys() == state["optimizer"].keys()
    assert its["step_counter"] == state["step_counter"] == 6


@pytest.mark.parametrize("more", ["views", "barrier", "other step"])
def test_a_process_that_does_more_than_the_others_ends_alone(more):
    """After rejoin, where the others make a step."""
    ended = threading.Event()
    does = {
        "views": lambda opt, p: opt.gradient_views([p]),
        "barrier": lambda opt, p: opt.communicator.barrier(),
        "other step": lambda opt, p: opt.step([(p, np.ones(3))], TopK(0.5)),
    }[more]

    def main(comm):
        member, inside = comm.rank, comm.subgroup([[0, 1, 2], [3]])
        comm = Elastic(inside if member < 3 else comm.waiting_for([0, 1, 2]))
        p = Parameter("w", np.zeros(3))
        opt = DistOpt(SGD(1.0), comm)
        if member == 3:
            ended.wait()
        opt.rejoin([p])
        if member == 3:
            with pytest.raises(ValueError, match=r"ranks differ: rank 0 has .*, rank 2 has .*; it ends alone"):
                does(opt, p)
            return "alone"
        sizes = []
        while opt.step_counter < 4:
            if (member, opt.step_counter) == (1, 1):
                ended.set()
                return "lost"
            opt([(p, np.ones(3))])
            sizes.append(comm.size)
            while opt.step_counter == 2 and not comm.joiner_waits():
                time.sleep(1e-3)
        comm.leave()
        return p.data[0], sizes

    assert run_ranks(4, main) == [(-4, [3, 2, 2, 2]), "lost", (-4, [3, 2, 2, 2]), "alone"]


def test_a_process_that_waits_is_alone():
    def main(comm):
        member, inside = comm.rank, comm.subgroup([[0], [1]])
        comm = Elastic(inside if member == 0 else comm.waiting_for([0]))
        if member == 1:
            return comm.rank, comm.size, comm.outside, comm.lengths(3)
        with pytest.raises(RuntimeError, match="one of the ranks already"):
            comm.membership.join_others()

    assert run_ranks(2, main)[1] == (0, 1, True, [3])
