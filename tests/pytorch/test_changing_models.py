"""DistOpt and local steps while a PyTorch model changes: layers thawed, frozen and added; ranks are threads."""

import copy
from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is missing: pip install 'distopt[torch]'")
from test_dist_opt_torch import SEEDED, loss_of, network  # noqa: E402

import distopt  # noqa: E402
import distopt.torch as dt  # noqa: E402
from distopt import DistOpt, LocalSteps, run_ranks  # noqa: E402
from distopt.compress import ErrorFeedback, TopK  # noqa: E402

pytestmark = pytest.mark.torch

MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
ADAMW = partial(torch.optim.AdamW, lr=0.01)


def flat(model):
    return np.concatenate([p.detach().numpy().ravel() for p in model.parameters()])


def refused_on_all(size, main, match):
    """Every rank raises a ValueError, of the same text; returns what they return then."""

    def caught(comm):
        with pytest.raises(ValueError, match=match) as error:
            main(comm)
        return str(error.value)

    assert len(set(run_ranks(size, caught))) == 1


def thaw(model, optimizer, step):
    """Layer 0 is trained from step 2 on; at step 4 a new layer comes, with parameters of this rank's own."""
    if step == 0:
        model[0].requires_grad_(False)
    if step == 2:
        model[0].requires_grad_(True)
    if step == 4:
        with SEEDED:
            model.append(torch.nn.Linear(5, 5))
        if optimizer is not None:
            optimizer.add_param_group({"params": model[3].parameters(), "lr": 0.05})


def seen_by_one_process(make, size, steps, at_step=thaw, batches=1):
    """The parameters after steps of one process that sees all ranks' batches, and the layers that came with them."""
    model = network()
    at_step(model, None, 0)
    optimizer = make(model.parameters())
    for step in range(steps):
        if step:
            at_step(model, optimizer, step)
        optimizer.zero_grad()
        calls = range(step * batches, (step + 1) * batches)
        (sum(loss_of(model, rank, k) for rank in range(size) for k in calls) / size / batches).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("make", [MOMENTUM, ADAMW], ids=["SGD", "AdamW"])
def test_a_layer_that_is_thawed_is_trained_as_by_one_process(make, overlap, batches):
    def main(comm):
        model = network(comm.rank)
        model[0].requires_grad_(False)
        opt = DistOpt(make(model.parameters()), comm, overlap=overlap, num_batches=batches, threshold=100)
        for step in range(4):
            if step:
                thaw(model, opt.opt, step)
            for k in range(step * batches, (step + 1) * batches):
                opt(loss_of(model, comm.rank, k))
        return flat(model)

    first, *others = run_ranks(3, main)
    assert all(other.tobytes() == first.tobytes() for other in others)
    np.testing.assert_allclose(first, flat(seen_by_one_process(make, 3, 4, batches=batches)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("given", ["optimizer", "model", "optimizer and model"])
def test_a_layer_that_is_added_begins_with_rank_0s_values(given):
    def main(comm):
        model = network(comm.rank)
        model[0].requires_grad_(False)
        params = None if given == "optimizer" else model
        opt = distopt.optim.SGD(0.1) if given == "model" else torch.optim.SGD(model.parameters(), 0.1)
        opt = DistOpt(opt, comm, params=params)
        torchs = opt.opt if given != "model" else None
        for step in range(6):
            if step:
                thaw(model, torchs, step)
            if step == 4:
                before = model[3].weight.detach().clone()
            opt(loss_of(model, comm.rank, step))
        return flat(model), (model[3].weight - before).abs().max().item() if comm.rank == 0 else 1.0

    (first, moved), (second, _) = run_ranks(2, main)
    assert first.tobytes() == second.tobytes()
    assert 0 < moved < 1


def test_what_a_layer_has_not_sent_stays_when_another_one_is_thawed():
    """Of sums of gradients and residuals, none is lost: SGD with a rate of 1 moves by all that has arrived."""

    def main(comm):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).double()
        model[0].requires_grad_(False)
        opt = DistOpt(torch.optim.SGD(model.parameters(), 1.0), comm)
        begin = flat(model)
        opt.broadcast(list(model.parameters()))
        begin, brought = flat(model), np.zeros(40)
        g = np.random.default_rng(comm.rank)
        for step in range(6):
            model[0].requires_grad_(step >= 3)
            grads = [(p, torch.tensor(g.standard_normal(p.shape))) for p in model.parameters() if p.requires_grad]
            brought[40 - sum(x.numel() for _, x in grads) :] += np.concatenate([x.ravel() for _, x in grads])
            opt.step(grads, ErrorFeedback(TopK(0.1)))
        waits = opt.state_dict()["states"]["residual"]
        names = [f"parameter {k}" for k in range(4)]
        return begin - flat(model), brought, np.concatenate([waits[name].ravel() for name in names])

    ranks = run_ranks(2, main)
    moved = ranks[0][0]
    np.testing.assert_allclose(2 * moved, sum(brought - waits for _, brought, waits in ranks), atol=1e-12)


def test_training_is_resumed_with_a_layer_that_was_thawed(tmp_path):
    """To the bit: buckets are those of a model of which that layer was trained from the start."""

    def begun(comm, frozen):
        model = network(comm.rank)
        model[0].requires_grad_(not frozen)
        return model, DistOpt(MOMENTUM(model.parameters()), comm, threshold=100)

    def steps(comm, model, opt, numbers):
        for step in numbers:
            opt.step(loss_of(model, comm.rank, step), ErrorFeedback(TopK(0.1)))

    def main(comm):
        model, opt = begun(comm, frozen=True)
        steps(comm, model, opt, range(2))
        model[0].requires_grad_(True)
        steps(comm, model, opt, range(2, 4))
        opt.save(tmp_path, model)
        again, other = begun(comm, frozen=False)
        other.load(tmp_path, again)
        for one, its in ((model, opt), (again, other)):
            steps(comm, one, its, range(4, 6))
        return flat(model).tobytes() == flat(again).tobytes()

    assert run_ranks(2, main) == [True, True]


@pytest.mark.parametrize("change", ["thawed", "added"])
def test_ranks_that_train_other_layers_are_told_and_may_go_on(change):
    def alter(model, optimizer):
        if change == "thawed":
            model[0].requires_grad_(True)
        else:
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})

    def main(comm, mend):
        model = network()
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD(model.named_parameters() if change == "thawed" else model.parameters(), 0.1)
        opt = DistOpt(optimizer, comm, allow_missing=True)
        opt(loss_of(model, comm.rank, 0))
        if comm.rank == 1:
            alter(model, optimizer)
        if not mend:
            opt(loss_of(model, comm.rank, 1))
        with pytest.raises(ValueError, match="ranks differ"):
            opt(loss_of(model, comm.rank, 1))
        if comm.rank == 0:
            alter(model, optimizer)
        assert opt(loss_of(model, comm.rank, 2))
        return flat(model).tobytes()

    names = r"0\.bias, 0\.weight" if change == "thawed" else "parameter 4"
    refused_on_all(2, partial(main, mend=False), f"rank 1 has parameters that require a gradient from now on: {names}")
    assert len(set(run_ranks(2, partial(main, mend=True)))) == 1


def test_a_parameter_that_one_rank_takes_from_its_optimizer_is_told():
    def main(comm):
        model = network()
        opt = DistOpt(torch.optim.SGD(model.parameters(), 0.1), comm)
        opt(loss_of(model, comm.rank, 0))
        if comm.rank == 1:
            opt.opt.param_groups[0]["params"].pop()
        opt(loss_of(model, comm.rank, 1))

    refused_on_all(2, main, "rank 0 has 4 parameters in group 0, rank 1 has 3 parameters in group 0")


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        (MOMENTUM, "momentum", 0.5),
        (MOMENTUM, "weight_decay", 0.5),
        (ADAMW, "betas", (0.8, 0.9)),
        (ADAMW, "lr", 0.5),
        (ADAMW, "eps", 0.5),
    ],
)
def test_hyper_parameters_that_differ_are_told(make, name, value):
    def main(comm):
        model = network()
        opt = DistOpt(make(model.parameters()), comm)
        opt(loss_of(model, comm.rank, 0))
        opt.opt.param_groups[0][name] = value
        opt(loss_of(model, comm.rank, 0))
        if comm.rank == 1:
            opt.opt.param_groups[0][name] = make(model.parameters()).param_groups[0][name]
        opt(loss_of(model, comm.rank, 1))

    words = "learning rate" if name == "lr" else name
    refused_on_all(2, main, rf"rank 0 has {words} .* of group 0, rank 1 has {words}")


def test_layers_that_cannot_be_taken_in_are_refused_by_name():
    def shared(comm):
        model = network()
        model[0].requires_grad_(False)
        opt = DistOpt(distopt.optim.SGD(0.1), comm, params=model)
        opt.parameter_views([p for p in model.parameters() if p.requires_grad])
        model[0].requires_grad_(True)
        opt(loss_of(model, comm.rank, 0))

    def replaced(comm):
        model = network()
        opt = DistOpt(distopt.optim.SGD(0.1), comm, params=model)
        model[2] = torch.nn.Linear(30, 5)
        opt(loss_of(model, comm.rank, 0))

    def local(comm):
        model = network()
        model[0].requires_grad_(False)
        opt = LocalSteps(torch.optim.SGD(model.parameters(), 0.1), comm, every=2, params=model)
        opt(loss_of(model, comm.rank, 0))
        model[0].requires_grad_(True)
        opt(loss_of(model, comm.rank, 0))

    def torchs(comm):
        model = network()
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        windows = dt.local_steps(model, optimizer, every=2, group=comm)
        model[0].requires_grad_(True)
        loss_of(model, comm.rank, 0).backward()
        try:
            optimizer.step()
        finally:
            windows.close()

    refused_on_all(2, shared, r"0\.bias: a parameter must require a gradient before parameter_views")
    refused_on_all(2, replaced, r"2\.bias: a parameter must stay the tensor that it was")
    for main in (local, torchs):
        refused_on_all(2, main, r"0\.bias, 0\.weight: a parameter must require a gradient when local steps begin")


# ---------------------------------------------------------------------------------------------------- frozen layers


def freeze(model, optimizer, step):
    model[0].requires_grad_(step not in (2, 3))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("make", [MOMENTUM, ADAMW], ids=["SGD", "AdamW"])
def test_a_layer_that_no_rank_has_a_gradient_of_is_left_alone(make, overlap):
    """As by one process: no momentum, no decay."""

    def main(comm):
        model = network(comm.rank)
        opt = DistOpt(make(model.parameters()), comm, allow_missing=True, overlap=overlap)
        for step in range(6):
            freeze(model, None, step)
            before = model[0].weight.detach().clone()
            opt(loss_of(model, comm.rank, step))
            assert torch.equal(model[0].weight, before) == (step in (2, 3))
        return flat(model)

    expected = flat(seen_by_one_process(make, 2, 6, freeze))
    for found in run_ranks(2, main):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_gradient_that_a_script_has_left_after_is_not_applied():
    """Of a parameter that is frozen, or was never in the plan."""

    def main(comm):
        model = network()
        loss_of(model, comm.rank, 7).backward()  # before DistOpt is made
        model[0].requires_grad_(False)
        opt = DistOpt(torch.optim.SGD(model.parameters(), 0.1), comm)
        before = model[0].weight.detach().clone()
        opt(loss_of(model, comm.rank, 0))
        return torch.equal(model[0].weight, before)

    assert run_ranks(2, main) == [True, True]


# ---------------------------------------------------------------------------------------------------- checkpoints

FORMS = {
    "parameters": lambda model: model.parameters(),
    "named_parameters": lambda model: model.named_parameters(),
    "model": lambda model: model,
    "list": lambda model: list(model.parameters()),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["optimizer", "model", "local steps"])
def test_a_checkpoint_takes_a_models_parameters(tmp_path, form, kind):
    def made(comm, seed):
        model = network(seed)
        model[0].weight.requires_grad_(False)  # frozen ones are saved too
        if kind == "model":
            return model, DistOpt(distopt.optim.AdamW(0.1), comm, params=model)
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        return model, LocalSteps(optimizer, comm, every=2) if kind == "local steps" else DistOpt(optimizer, comm)

    def main(comm):
        model, opt = made(comm, 0)
        again, other = made(comm, 1)
        for step in range(2):
            opt(loss_of(model, comm.rank, step))
        opt.save(tmp_path, FORMS[form](model))
        other.load(tmp_path, FORMS[form](again))
        assert flat(again).tobytes() == flat(model).tobytes()
        for one, its in ((model, opt), (again, other)):
            for step in range(2, 4):
                its(loss_of(one, comm.rank, step))
        return flat(again).tobytes() == flat(model).tobytes()

    assert run_ranks(2, main) == [True, True]


def test_parameters_of_no_optimizer_are_saved_by_their_names(tmp_path):
    """The usual filter leaves frozen ones out of the optimizer; without names they are refused."""
    model, again = network(), network(1)
    for one in (model, again):
        one[0].requires_grad_(False)
    opts = [DistOpt(torch.optim.SGD((p for p in one.parameters() if p.requires_grad), 0.1)) for one in (model, again)]
    with pytest.raises(ValueError, match=r"a bare tensor must be one of the first step.*model.named_parameters\(\)"):
        opts[0].save(tmp_path, model.parameters())
    opts[0].save(tmp_path, model)
    opts[1].load(tmp_path, again)
    assert flat(again).tobytes() == flat(model).tobytes()


# ---------------------------------------------------------------------------------------------------- optimizers


class WithoutRate(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.data.sub_(p.grad, alpha=0.1)


class Like:
    """An optimizer that wraps one of torch and derives from none, as ScheduleFreeWrapper."""

    def __init__(self, base):
        self.base = base

    @property
    def param_groups(self):
        return self.base.param_groups

    def step(self, closure=None):
        self.base.step(closure)

    def zero_grad(self, set_to_none=True):
        self.base.zero_grad(set_to_none)

    def state_dict(self):
        return {"base": self.base.state_dict()}

    def load_state_dict(self, state):
        self.base.load_state_dict(state["base"])


@pytest.mark.parametrize(
    "make", [WithoutRate, lambda params: Like(torch.optim.SGD(params, 0.1))], ids=["without a rate", "of no class"]
)
def test_an_optimizer_that_is_like_torchs_is_taken(make, tmp_path):
    def main(comm):
        model = network(comm.rank)
        opt = DistOpt(make(model.parameters()), comm)
        for step in range(3):
            opt(loss_of(model, comm.rank, step))
        opt.load_state_dict(copy.deepcopy(opt.state_dict()))
        return flat(model)

    expected = flat(seen_by_one_process(partial(torch.optim.SGD, lr=0.1), 2, 3, lambda *_: None))
    for found in run_ranks(2, main):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_schedule_may_be_made_before_the_optimizer_is_wrapped():
    for wrap in (DistOpt, partial(LocalSteps, every=3)):
        model = network()
        rule = torch.optim.SGD(model.parameters(), 1.0)
        schedule = torch.optim.lr_scheduler.StepLR(rule, 1, 0.5)
        before, opt = flat(model), wrap(rule, params=model)
        for _ in range(2):
            opt(sum(p.sum() for p in model.parameters()))
            schedule.step()
        np.testing.assert_allclose(flat(model), before - 1.5, atol=1e-6)


def test_an_optimizer_that_needs_a_closure_is_refused_when_it_is_wrapped():
    for wrap in (DistOpt, partial(LocalSteps, every=2)):
        with pytest.raises(TypeError, match=r"without a closure, got LBFGS; use distopt.torch.synchronize\(model\)"):
            wrap(torch.optim.LBFGS(network().parameters()))
