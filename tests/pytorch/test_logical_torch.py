"""Logical ranks of PyTorch models: one model in a process, several ranks' passes, the same bits wherever they live."""

import copy
import functools
import threading
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is missing: pip install 'distopt[torch]'")
from torch import nn  # noqa: E402

import distopt.torch as dt  # noqa: E402
from distopt import DistOpt, LocalSteps, run_ranks  # noqa: E402
from distopt.comm import LocalCommunicator, Logical, Ordered  # noqa: E402
from distopt.compress import DeepGradientCompression, Dense, ErrorFeedback, Half, Int8, Packed, TopK  # noqa: E402
from distopt.data import GlobalBatches  # noqa: E402

pytestmark = pytest.mark.torch

V, STEPS = 6, 5
MODES = {
    "dense": (Dense(), "auto"),
    "half": (Half(), "auto"),
    "int8 in two phases": (ErrorFeedback(Int8()), "two_phase"),
    "top-K gathered": (ErrorFeedback(TopK(0.1)), "gather"),
    "packed top-K in two phases": (ErrorFeedback(Packed(TopK(0.1))), "two_phase"),
    "dgc": (DeepGradientCompression(TopK(0.1)), "gather"),
}
SEEDED = threading.Lock()
X = torch.from_numpy(np.random.default_rng(0).standard_normal((96, 8)).astype(np.float32))
Y = torch.arange(96) % 4


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def network():
    with SEEDED:  # threads have one generator
        torch.manual_seed(0)
        layers = nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4)
        return nn.Sequential(*layers)


def rule(model, mode):
    return torch.optim.SGD(model.parameters(), 0.1) if mode == "dgc" else torch.optim.AdamW(model.parameters(), 0.01)


class Training:
    """A model, and steps of it with ``synchronize`` or with ``DistOpt``."""

    def __init__(self, comm, mode, synchronized, ranks=V):
        self.model, self.data = network(), GlobalBatches(96, batch=48, seed=0, ranks=ranks)
        self.rule, (compressor, exchange), comm = rule(self.model, mode), MODES[mode], Logical(comm, ranks)
        self.kept = (
            dt.synchronize(self.model, compressor, optimizer=self.rule, group=comm, exchange=exchange)
            if synchronized
            else DistOpt(self.rule, comm, params=self.model)
        )
        self.step = self.synchronized if synchronized else lambda: self.kept.step(self.loss, compressor, True, exchange)

    def loss(self, rank):
        ids = self.data.ids(rank)
        return nn.functional.cross_entropy(self.model(X[ids]), Y[ids])

    def synchronized(self):
        for rank in self.kept.logical:
            with self.kept.of(rank):
                self.loss(rank).backward()
        self.rule.step()

    def learned(self):
        return {name: x.numpy().tobytes() for name, x in self.model.state_dict().items()}


def trained(comm, mode, synchronized, steps=STEPS):
    training = Training(comm, mode, synchronized)
    for _ in range(steps):
        training.step()
    return training.learned()


@pytest.mark.parametrize("mode", MODES)
def test_any_number_of_processes_learns_the_same_with_dropout_and_batch_normalization(mode):
    synchronized = (True, True, True, False, False)
    found = [
        learned
        for processes, way in zip((1, 4, V, 1, 3), synchronized, strict=True)
        for learned in run_ranks(processes, lambda comm, way=way: trained(comm, mode, way))
    ]
    assert all(each == found[0] for each in found)
    begun = {name: x.numpy().tobytes() for name, x in network().state_dict().items()}
    assert all(found[0][name] != begun[name] for name in ("4.weight", "1.running_mean", "1.num_batches_tracked"))


def test_running_means_are_those_of_rank_0():
    learned, _ = run_ranks(2, lambda comm: trained(comm, "dense", True, steps=1))
    first = network()
    first(X[GlobalBatches(96, batch=48, seed=0, ranks=V).ids(0, 0)])
    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        assert learned[name] == first.state_dict()[name].numpy().tobytes()


def weighted(comm, factors):
    """The means of gradients ``factors[rank] * x`` of each rank, of a layer; None brings none."""
    layer, other = nn.Linear(3, 1, bias=False), nn.Linear(3, 1, bias=False)
    model = nn.ModuleList([layer, other])
    sync = dt.synchronize(model, group=Logical(comm, len(factors)))
    for rank in sync.logical:
        with sync.of(rank):
            for factor in factors[rank]:
                (factor * layer(torch.arange(3.0))).sum().backward()
    return [None if p.grad is None else p.grad.numpy().copy() for p in model.parameters()]


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_gradients_are_means_over_ranks(processes):
    factors = [(1.5, 2.0), (-4.0,), (), (0.25,), (3.0, 1.0, 1.0)]  # some passes add up, one rank has none
    for mean, absent in run_ranks(processes, lambda comm: weighted(comm, factors)):
        expected = sum(map(sum, factors)) / 5 * np.arange(3.0)
        np.testing.assert_allclose(mean, [expected], rtol=1e-6)
        assert absent is None  # no rank has a gradient of that layer


def test_what_is_not_finite_on_one_rank_is_infinite_on_all():
    for mean, _ in run_ranks(2, lambda comm: weighted(comm, [(1.0,), (2.0,), (float("nan"),), (1.0,)])):
        assert np.isinf(mean).all()


@pytest.mark.parametrize("synchronized", [True, False])
def test_a_checkpoint_goes_on_with_another_number_of_processes(tmp_path, synchronized):
    mode = "packed top-K in two phases"

    def first(comm):
        training = Training(comm, mode, synchronized)
        for _ in range(3):
            training.step()
        training.kept.save(tmp_path)
        return training.model.state_dict(), training.rule.state_dict()

    saved, of_rule = run_ranks(2, first)[0]

    def second(comm):
        training = Training(comm, mode, synchronized)
        training.model.load_state_dict(saved)
        training.rule.load_state_dict(copy.deepcopy(of_rule))
        training.kept.load(tmp_path)
        for _ in range(STEPS - 3):
            training.step()
        return training.learned()

    whole = run_ranks(1, lambda comm: trained(comm, mode, synchronized))[0]
    assert run_ranks(3, second) == [whole] * 3


def test_an_error_in_the_pass_of_one_rank_is_that_of_all():
    def main(comm):
        training = Training(comm, "dense", True)
        loss = training.loss
        training.loss = lambda rank: loss(rank) if rank != 4 else {}[7]
        with pytest.raises((KeyError, RuntimeError)) as found:
            training.step()
        training.loss = loss
        training.step()
        return str(found.value), training.learned()

    (first, learned), (second, same) = run_ranks(2, main)
    assert (first, second) == ("rank 1: KeyError: 7", "7")
    assert learned == same


def leave(sync, model):
    for _ in sync.logical:
        break


def twist(sync, model):
    for rank in sync.logical:
        with sync.of(rank + 1):
            pass


def forget(sync, model):
    for _ in sync.logical:
        pass


def graph(sync, model):
    for rank in sync.logical:
        with sync.of(rank):
            with warnings.catch_warnings(action="ignore"):
                model(torch.ones(1, 3)).sum().square().backward(create_graph=True)


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (lambda sync, model: model(torch.ones(1, 3)).sum().backward(), r"must be in `with sync.of\(rank\):`"),
        (lambda sync, model: sync.of(0).__enter__(), "rank must be a rank that sync.logical yields, got 0"),
        (lambda sync, model: sync.exchange(), "exchange must be of processes that are one rank each"),
        (lambda sync, model: sync.state_dict(), "state_dict must be of processes that are one rank each"),
        (lambda sync, model: sync.full_state_dict(), "full_state_dict must be of processes that are one rank each"),
        (lambda sync, model: sync.load_state_dict({}), "load_state_dict must be of processes that are one rank each"),
        (twist, "rank must be 0, whose turn it is, got 1"),
        (forget, r"the passes of rank 0 must be in `with sync.of\(0\):`"),
        (graph, "a gradient must be without a graph"),
    ],
)
def test_what_is_wrong_is_told_and_the_next_step_goes_on(use, text):
    model = nn.Linear(3, 2)
    sync = dt.synchronize(model, group=Logical(LocalCommunicator(), 3))
    with pytest.raises((ValueError, RuntimeError), match=text):
        use(sync, model)
    model.zero_grad()
    for rank in sync.logical:
        with sync.of(rank):
            (rank * model(torch.ones(1, 3))).sum().backward()
    assert torch.equal(model.weight.grad, torch.ones(2, 3))


def test_others_hear_of_a_loop_that_was_left():
    def main(comm):
        training = Training(comm, "dense", True)
        if comm.rank == 1:
            return leave(training.kept, training.model)
        with pytest.raises(RuntimeError, match=r"the loop over sync\.logical was left in the turn of logical rank 3"):
            training.step()

    run_ranks(2, main)


def test_a_loss_that_is_a_tensor_is_refused():
    model = nn.Linear(3, 2)
    for wrap in (DistOpt, functools.partial(LocalSteps, every=2)):
        opt = wrap(torch.optim.SGD(model.parameters(), 0.1), Logical(LocalCommunicator(), 2), params=model)
        with pytest.raises(TypeError, match=r"loss must be a callable of the rank, .* got a tensor"):
            opt(model(torch.ones(1, 3)).sum())


def test_a_closure_is_refused():
    model = nn.Linear(3, 2)
    rule = torch.optim.LBFGS(model.parameters(), max_iter=2)
    sync = dt.synchronize(model, group=Logical(LocalCommunicator(), 2))

    def closure():
        for rank in sync.logical:
            with sync.of(rank):
                model(torch.ones(1, 3)).sum().backward()
        return torch.tensor(1.0)

    with pytest.raises(ValueError, match="a closure of an optimizer must be of processes that are one rank each"):
        rule.step(closure)


def test_ranks_must_be_logical():
    sync = dt.synchronize(nn.Linear(3, 2))
    with pytest.raises(ValueError, match="ranks must be logical, as with distopt run --logical V"):
        sync.logical  # noqa: B018
    with pytest.raises(ValueError, match="ranks must be logical"):
        sync.of(0)


WINDOWS = {
    "dense": {},
    "fragments, later": {"fragments": 2, "delay": 1, "alpha": 0.25},
    "packed top-K in two phases": {"compressor": ErrorFeedback(Packed(TopK(0.1))), "exchange": "two_phase"},
}


def locally(comm, name, wrapped, ranks=V):
    """Nine local steps with a schedule: the global parameters, and the running means of each rank here."""
    model, data, means = network(), GlobalBatches(96, batch=48, seed=0, ranks=V), {}
    adam, options = rule(model, ""), {"every": 3, **WINDOWS[name]}
    schedule, comm = torch.optim.lr_scheduler.StepLR(adam, 2, 0.5), Logical(comm, ranks) if ranks else comm

    def loss(rank):
        means[rank] = model[1].running_mean.sum().item()
        ids = data.ids(rank, training.step_counter)
        return nn.functional.cross_entropy(model(X[ids]), Y[ids])

    def step(rank):
        adam.zero_grad()
        loss(rank).backward()
        adam.step()

    if wrapped:
        training = LocalSteps(adam, comm, params=model, deterministic=True, **options)
    else:
        training = dt.local_steps(model, adam, group=comm, **options)
    for _ in range(9):
        if wrapped:
            training(loss if ranks else lambda: loss(comm.rank))
        elif ranks:
            for rank in training.logical:
                with training.of(rank):
                    step(rank)
        else:
            step(comm.rank)
        schedule.step()
    return tuple(np.asarray(x).tobytes() for x in training.global_parameters.values()), means


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("name", WINDOWS)
def test_local_steps_of_any_number_of_processes_learn_the_same(name, wrapped):
    found = []
    for processes in (1, 2, 4, V):
        learned, means = zip(*run_ranks(processes, lambda comm: locally(comm, name, wrapped)), strict=True)
        assert len(set(learned)) == 1
        found.append((learned[0], {rank: mean for of in means for rank, mean in of.items()}))
    assert found.count(found[0]) == 4
    assert len(set(found[0][1].values())) == V  # each rank has its own


@pytest.mark.parametrize("wrapped", [False, True])
def test_local_steps_without_random_numbers_are_those_of_a_process_for_each_rank(monkeypatch, wrapped):
    monkeypatch.setattr(nn.functional, "dropout", lambda x, *_: x)
    (logical,) = {learned for learned, _ in run_ranks(2, lambda comm: locally(comm, "dense", wrapped))}
    (each,) = {learned for learned, _ in run_ranks(V, lambda comm: locally(Ordered(comm), "dense", wrapped, None))}
    assert logical == each


def test_local_steps_are_made_in_turn():
    model = network()
    rule = torch.optim.SGD(model.parameters(), 0.1)
    windows = dt.local_steps(model, rule, every=3, group=Logical(LocalCommunicator(), 2))
    model(torch.ones(2, 8)).sum().backward()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match=r"a step of the optimizer must be in `with windows\.of"):
        rule.step()
    for _ in windows.logical:
        with pytest.raises(RuntimeError, match=r"a step of the optimizer must be in `with windows\.of"):
            rule.step()
        break
    assert all(torch.equal(p, x) for p, x in zip(model.parameters(), before, strict=True))
    with pytest.raises(RuntimeError, match=r"rank 0 must make a step of the optimizer in `with windows\.of"):
        list(windows.logical)
    for rank in windows.logical:
        with pytest.raises(ValueError, match=f"rank must be {rank}, whose turn it is, got 5"), windows.of(5):
            pass
        with windows.of(rank):
            rule.step()
            with pytest.raises(RuntimeError, match="one of each logical rank"):
                rule.step()
    assert windows.step_counter == 1
    with pytest.raises(ValueError, match="rank must be a rank that logical yields, got 0"), windows.of(0):
        pass
    for verb in (windows.state_dict, lambda: windows.load_state_dict({}), windows.join):
        with pytest.raises(ValueError, match="must be of processes that are one rank each"):
            verb()


def test_a_rank_that_has_made_its_step_makes_it_once_where_the_loop_was_left():
    model = nn.Linear(3, 2)
    rule = torch.optim.SGD(model.parameters(), 0.1)
    windows = dt.local_steps(model, rule, every=3, group=Logical(LocalCommunicator(), 3))

    def step(until):
        made = []
        for rank in windows.logical:
            with windows.of(rank):
                rule.zero_grad()
                model(torch.ones(1, 3)).sum().backward()
                rule.step()
            made.append(rank)
            if rank == until:
                raise KeyError
        return made

    with pytest.raises(KeyError) as loop:  # which holds the generator
        step(1)
    assert step(None) == [2]
    assert (windows.step_counter, loop.type) == (1, KeyError)
    assert step(None) == [0, 1, 2]


def test_each_rank_has_its_own_scale():
    def main(comm):
        model = nn.Linear(3, 2, bias=False)
        with torch.no_grad():
            model.weight.fill_(1)
        rule = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", 16.0)
        windows = dt.local_steps(model, rule, every=3, group=Logical(comm, 4), scaler=scaler)
        scales = {}
        for step in range(2):
            for rank in windows.logical:
                with windows.of(rank):
                    scales[step, rank] = scaler.get_scale()
                    rule.zero_grad()
                    scaler.scale(
                        model(torch.full((1, 3), torch.inf if (step, rank) == (0, 1) else 1.0)).sum()
                    ).backward()
                    scaler.step(rule)
                    with pytest.raises(RuntimeError, match="one of each logical rank"):
                        scaler.step(rule)
                    scaler.update()
        return scales

    for processes in (1, 2, 4):
        scales = {k: x for of in run_ranks(processes, main) for k, x in of.items()}
        assert [scales[1, rank] for rank in range(4)] == [16, 8, 16, 16]


def test_buffers_are_each_ranks_own_or_refused():
    class Counts(nn.Module):
        def __init__(self, x):
            super().__init__()
            self.w = nn.Parameter(torch.ones(1))
            self.register_buffer("n", x)

        def forward(self):
            self.n = self.n + 1  # another tensor
            return self.w.sum()

    comm, model = Logical(LocalCommunicator(), 2), Counts(torch.zeros(1))
    opt, seen = LocalSteps(torch.optim.SGD(model.parameters(), 0.1), comm, every=3, params=model), []
    for _ in range(2):
        opt(lambda rank: (model(), seen.append((rank, model.n.item())))[0])
    assert seen == [(0, 1), (1, 1), (0, 2), (1, 2)]
    gaps = Counts(torch.zeros(4, 4)[:, ::2])
    with pytest.raises(TypeError, match="n: a buffer must have no gaps with logical ranks, got strides"):
        dt.local_steps(gaps, torch.optim.SGD(gaps.parameters(), 0.1), every=3, group=comm)


def test_local_steps_without_logical_ranks_have_none():
    model = network()
    windows = dt.local_steps(model, torch.optim.SGD(model.parameters(), 0.1), every=3)
    with pytest.raises(ValueError, match="ranks must be logical"):
        windows.logical  # noqa: B018
