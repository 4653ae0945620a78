"""A process that joins goes on as the others, and all of them as a run of as many ranks from there."""

import threading
import time

import numpy as np
import pytest

from distopt import DistOpt, LocalSteps, Parameter, Trainer, device
from distopt.comm import Elastic, LocalCommunicator, run_ranks
from distopt.optim import SGD, Adam, ExponentialDecay
from laws import inputs, lost

LOST_AT, GROWN_AT, STEPS = 4, 6, 12  # calls after which a rank ends, another one has come at last, and all end


class Plain:
    """A training of ``laws.lost``.

    Args:
        mode: its name there.
        comm: the ranks.
        params: the parameters.
    """

    def __init__(self, mode, comm, params):
        self._step, self.opt, self._params = lost.MODES[mode][0], lost.made(mode, comm, params), params

        self._batches = lost.MODES[mode][2].get("num_batches", 1)

    @property
    def calls(self):
        """Calls after this training, where no window of batches is open."""
        return self.opt.step_counter * self._batches

    def rejoin(self, extra):
        return self.opt.rejoin(self._params, extra)

    def make_plan(self):
        """Make the plan that there is after the first step, if another one would be made after a load."""

    def __call__(self, grads):
        self._step(self.opt, list(zip(self._params, grads, strict=True)))


class Gluon:
    """A Trainer of these parameters, the first of which is frozen after the first step."""

    def __init__(self, comm, params, optimizer=None, **options):
        rule = optimizer or SGD(ExponentialDecay(0.1, 2, 0.5, staircase=True), momentum=0.9)
        self.opt, self._params = Trainer(params, rule, communicator=comm, threshold=60, **options), params

    @property
    def calls(self):
        return self.opt.step_counter

    def rejoin(self, extra):
        return self.opt.rejoin(extra)

    def make_plan(self):
        self.opt.gradient_views(self._params)

    def __call__(self, grads):
        self._params[0].grad_req = "null" if self.calls else "write"
        for p, grad in zip(self._params, grads, strict=True):
            p.grad = grad
        self.update()

    def update(self):
        self.opt.step(3)


class InTwoCalls(Gluon):
    """A Trainer that sums first, and updates then."""

    def update(self):
        self.opt.allreduce_grads()
        self.opt.update(3)


TOP_K = {"compression_params": {"type": "topk", "density": 0.1}}
PLAIN = (
    "dense",
    "top-K",
    "dgc of weight decay",
    "three sums",
    "three batches of top-K",
    "three batches",
    "local steps",
    "local steps of top-K",
    "local steps in flight",
)
TRAININGS = {
    mode: lambda comm, params, mode=mode: Plain(mode, comm, params)
    for mode in (*PLAIN, *(mode for mode in lost.MODES if "buddy" in mode and "reloaded" not in mode))
} | {
    "a Trainer": Gluon,
    "a Trainer of Adam in two calls": lambda comm, params: InTwoCalls(comm, params, Adam(0.01)),
    "a Trainer of top-K": lambda comm, params: Gluon(comm, params, **TOP_K),
}


def has(training, params):
    return lost.of(training.opt, params)


def alike(had):
    """What all ranks have alike of what one has; of local steps that is the global parameters."""
    values, state = had
    if "fragments" not in state:
        return values, {name: x for name, x in state.items() if name != "states"}
    outer = [(part["sent"], part["due"], part["outer"] | {"states": {}}) for part in state["fragments"]]
    return state["values"], state["step"], outer


def grown(victim, make):
    """Let one of three ranks end, and another one come.

    Returns:
        Of each rank that is there at the end: its number, the call at which the other one came and what it had then,
        how many ranks made each of its calls, and what it has at the end.
    """
    ended = threading.Event()

    def main(comm):
        member, inside = comm.rank, comm.subgroup([[0, 1, 2], [3]])
        comm = Elastic(inside if member < 3 else comm.waiting_for([0, 1, 2]))
        params = inputs.parameters(rank=member)
        training, call, came, sizes = make(comm, params), 0, [], []

        def extra():
            came.append((training.calls, has(training, params)))
            return {"calls": training.calls}

        if member == 3:
            ended.wait()
        told = training.rejoin(extra)
        assert (told is None) == (member < 3)
        if told:
            call = training.calls
            assert told == {"calls": call}
            if not training.opt.engine.store.sharded:  # else it takes all ranks to tell
                came.append((call, has(training, params)))
        while call < STEPS:
            if (member, call) == (victim, LOST_AT):
                ended.set()
                return None
            while call >= GROWN_AT and comm.size == 2 and not comm.joiner_waits():
                time.sleep(1e-3)
            grads = inputs.gradients(params, call, member)
            call += 1
            training(grads)
            sizes.append(comm.size)
        had = has(training, params)
        comm.leave()
        return member, came, sizes, had

    found = [rank for rank in run_ranks(4, main) if rank]
    return [(member, (came or found[0][1])[-1], sizes, had) for member, came, sizes, had in found]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("name", TRAININGS)
def test_all_go_on_as_ranks_that_were_as_many_from_there(name, victim):
    found = grown(victim, TRAININGS[name])
    members = [member for member, *_ in found]
    assert members == [*(m for m in range(3) if m != victim), 3]
    (_, (began, first), _, last), *others = found
    for member, (call, then), _, now in others:
        assert call == began
        lost.same(alike(then), alike(first), f"rank {member} when one came")
        lost.same(alike(now), alike(last), f"rank {member} at the end")
    for member, _, sizes, _ in found:
        assert sizes[-1] == 3
        assert set(sizes) <= ({3} if member == 3 else {2, 3})

    def main(comm):
        member, (call, (values, state)), *_ = found[comm.rank]
        params = inputs.parameters(rank=member)
        training = TRAININGS[name](comm, params)
        for p in params:
            device.copy(p.data, values[p.name])
        training.make_plan()
        training.opt.load_state_dict(state)
        for number in range(call, STEPS):
            training(inputs.gradients(params, number, member))
        return has(training, params)

    for (member, _, _, had), wanted in zip(found, run_ranks(3, main), strict=True):
        lost.same(had, wanted, f"rank {member}")


def outside(use):
    """Call ``use(comm, params)`` on a process that waits to be let in by rank 0."""

    def main(comm):
        inside = comm.subgroup([[0], [1]])
        if comm.rank == 1:
            use(Elastic(comm.waiting_for([0])), inputs.parameters())
        return inside.rank

    run_ranks(2, main)


@pytest.mark.parametrize(
    "make", [DistOpt, lambda rule, comm: LocalSteps(rule, comm, every=2)], ids=["DistOpt", "local"]
)
def test_a_process_that_waits_must_know_its_parameters_and_makes_no_step_alone(make):
    def use(comm, params):
        opt = make(SGD(0.1), comm)
        with pytest.raises(ValueError, match=r"params must be the model's parameters, got none; call rejoin\(params\)"):
            opt.rejoin()
        with pytest.raises(
            RuntimeError, match=r"must be let in before a step: call opt.rejoin\(params\) before the loop"
        ):
            opt([(p, p.data) for p in params])

    outside(use)


def test_a_trainer_of_a_process_that_waits_makes_no_step_alone():
    def use(comm, params):
        trainer = Trainer(params, "sgd", communicator=comm)
        for call in (lambda: trainer.step(1), trainer.allreduce_grads):
            with pytest.raises(RuntimeError, match="must be let in before a step"):
                call()

    outside(use)


def test_local_steps_of_a_process_that_joins_must_be_of_parameters_in_the_others_order():
    """It alone raises the error; the others go on without it."""

    def main(comm):
        member, inside = comm.rank, comm.subgroup([[0, 1], [2]])
        comm = Elastic(inside if member < 2 else comm.waiting_for([0, 1]))
        params = [Parameter(name, np.ones(3, np.float32)) for name in "vw"]
        opt = LocalSteps(SGD(0.5), comm, every=1, outer=SGD(1.0))
        if member == 2:
            with pytest.raises(ValueError, match="in the order of the other ranks' first step, v, w, "):
                opt.rejoin(params[::-1])
            return None
        opt.rejoin(params)
        sizes = []
        opt.on_resize(lambda rank, size: sizes.append(size))
        while sizes[-2:] != [3, 2]:
            opt([(p, np.ones(3, np.float32)) for p in params])
        comm.leave()
        return sizes[-1]

    assert run_ranks(3, main) == [2, 2, None]


def test_rejoin_comes_before_parameter_views():
    """Else a process that joins would have views of memory of its own."""
    params = inputs.parameters()
    opt = DistOpt(SGD(0.1), LocalCommunicator())
    opt.parameter_views(params)
    with pytest.raises(RuntimeError, match="rejoin must come before parameter_views"):
        opt.rejoin(params)


def test_one_training_lets_processes_in():
    comm, params = Elastic(LocalCommunicator()), inputs.parameters()
    DistOpt(SGD(0.1), comm).rejoin(params)
    with pytest.raises(RuntimeError, match="rejoin must be called once, as one training lets processes in"):
        DistOpt(SGD(0.1), comm).rejoin(params)


def test_nobody_is_let_in_while_fragments_of_another_training_travel():
    comm, params = Elastic(LocalCommunicator()), inputs.parameters()
    windows = LocalSteps(SGD(0.1), comm, every=2, delay=1)
    with pytest.raises(RuntimeError, match="rejoin must be that of the LocalSteps with a delay"):
        DistOpt(SGD(0.1), comm).rejoin(params)
    windows.rejoin(params)
