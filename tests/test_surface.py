"""What an interactive user sees of an optimizer: its text, its attributes, its types."""

import dataclasses
import inspect
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest

from distopt import DistOpt, LocalSteps, LossScaler, Parameter, Trainer, run_ranks, simulate, simulate_local
from distopt.engine.outer_loop import LocalOptions
from distopt.engine.parameters import Loss
from distopt.engine.spec import Options
from distopt.optim import SGD, Adam, BatchGradients, Cosine, LarsWrapper, SupportsApply, SupportsUpdate


def params():
    return [Parameter("w", np.ones(3)), Parameter("b", np.ones(2))]


def pairs(given):
    return [(p, np.ones_like(p.data)) for p in given]


def test_repr_says_in_one_line_what_trains_where_and_how_far():
    def main(comm):
        opt, given = DistOpt(SGD(lambda k: 0.5 / (k + 1), momentum=0.9), comm, num_batches=2, check_every=7), params()
        for _ in range(2):
            opt(pairs(given))
        return repr(opt)

    for rank, text in enumerate(run_ranks(2, main)):
        assert "\n" not in text
        assert text.startswith("DistOpt(SGD(lr=0.25, weight_decay=0.0, momentum=0.9, ")
        assert text.endswith(f"), rank {rank} of 2, 1 steps, check_every=7, num_batches=2)")


def test_repr_has_only_the_options_that_were_chosen():
    assert repr(DistOpt(Stranger())) == "DistOpt(Stranger, rank 0 of 1, 0 steps)"
    assert repr(DistOpt(Stranger(), deterministic=True, threshold=5)).endswith(
        " steps, threshold=5, deterministic=True)"
    )
    assert repr(simulate(4, Stranger())) == "Simulation(Stranger, rank 0 of 4, 0 steps)"
    assert repr(Trainer(params(), Stranger())) == "Trainer(Stranger, rank 0 of 1, 0 steps)"
    scaled = Trainer(params(), Stranger(), loss_scaler=LossScaler(4.0))
    assert "loss_scaler=LossScaler(init_scale=4.0, " in repr(scaled)
    opt = DistOpt(BatchGradients(Stranger(), 2))
    opt.close()
    assert repr(opt) == "DistOpt(BatchGradients(Stranger, num_batches=2), rank 0 of 1, 0 steps, closed)"


class Stranger:
    def apply(self, name, value, grad):
        value -= grad


def test_a_hyper_parameter_reads_as_the_number_or_schedule_that_it_is():
    opt = Adam(lr=0.1, beta_1=Cosine(0.5, 10))
    assert repr(opt.lr) == "constant 0.1"
    assert repr(opt.beta_1) == repr(Cosine(0.5, 10))
    opt.lr = np.float64(0.25)
    assert repr(opt.lr) == "constant 0.25"
    assert (opt.lr_value, opt.lr(3)) == (0.25, 0.25)


def test_the_plan_is_none_until_there_is_one_and_every_attribute_can_be_asked_for():
    for opt in (DistOpt(), Trainer(params(), "sgd"), Trainer(params(), Stranger()), simulate(2)):
        assert hasattr(opt, "plan")
        assert opt.plan is None
        assert "plan" in dict(inspect.getmembers(opt))
    opt = DistOpt()
    with pytest.raises(RuntimeError, match="the plan of buckets is not made yet; make a step or call gradient_views"):
        opt.advise("10GbE")
    opt(pairs(params()))
    assert opt.plan.buckets[0].names == ("w", "b")


@pytest.mark.parametrize(
    ("makes", "text"),
    [
        ([lambda: SGD(0.1), lambda: SGD(0.2)], "rank 0 has SGD's lr=0.1, rank 1 has SGD's lr=0.2"),
        ([lambda: SGD(0.1), lambda: Adam(0.1)], "rank 0 has SGD's lr=0.1, rank 1 has Adam's lr=0.1"),
        (
            [lambda: SGD(0.1, 0.9), lambda: SGD(0.1, 0.9, nesterov=True)],
            "rank 0 has SGD's nesterov=False, rank 1 has SGD's nesterov=True",
        ),
        (
            [lambda: LarsWrapper(SGD(0.1)), lambda: LarsWrapper(SGD(0.2))],
            "rank 0 has SGD's lr=0.1, rank 1 has SGD's lr=0.2",
        ),
        (
            [lambda: BatchGradients(SGD(0.1), 2), lambda: BatchGradients(SGD(0.1), 3)],
            "rank 0 has BatchGradients's num_batches=2, rank 1 has BatchGradients's num_batches=3",
        ),
        (
            [lambda: BatchGradients(Stranger(), 2), lambda: BatchGradients(SGD(), 2)],
            r"rank 0 has optimizer BatchGradients\(Stranger, num_batches=2\), rank 1 has SGD's lr=0.1",
        ),
    ],
)
def test_ranks_whose_optimizers_differ_get_an_error_that_names_the_field(makes, text):
    def main(comm):
        given = params()
        with pytest.raises(ValueError, match=f"^ranks differ: {text}$"):
            DistOpt(makes[comm.rank](), comm)(pairs(given))
        return given[0].data.tolist()

    assert run_ranks(2, main) == [[1.0] * 3] * 2


@pytest.mark.parametrize("kind", [DistOpt, Trainer])
def test_public_attributes_are_declared_with_their_types(kind):
    declared = {
        name: get_type_hints(getattr(kind, name).fget)["return"] for name in ("step_counter", "threshold", "opt")
    }
    assert declared == {"step_counter": int, "threshold": int, "opt": Any}


@pytest.mark.parametrize(
    ("function", "parameter", "allowed"),
    [
        (DistOpt.__init__, "opt", {SupportsApply, SupportsUpdate, type(None)}),
        (type(simulate(1)).__init__, "opt", {SupportsApply, SupportsUpdate, type(None)}),
        (Trainer.__init__, "optimizer", {SupportsApply, SupportsUpdate, str}),
        (BatchGradients.__init__, "opt", {SupportsApply, SupportsUpdate}),
        (LarsWrapper.__init__, "opt", {SupportsApply, SupportsUpdate}),
        (DistOpt.__call__, "loss", set(get_args(Loss))),
        (DistOpt.step, "loss", {*get_args(Loss), type(None)}),
    ],
)
def test_type_checkers_know_what_is_an_optimizer_and_what_a_loss(function, parameter, allowed):
    assert set(get_args(get_type_hints(function)[parameter])) == allowed


def test_a_function_that_hands_options_on_shows_them():
    shown = inspect.signature(simulate_local).parameters
    assert list(shown)[:2] == ["size", "opt"]
    assert {"every", "outer", "compressor", "over", "clip_norm", "hosts"} < set(shown)
    assert "options" not in shown
    assert shown["every"].default is inspect.Parameter.empty
    with pytest.raises(TypeError, match="unexpected keyword argument 'evry'"):
        simulate_local(2, every=1, evry=3)
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'every'"):
        simulate_local(2)


@pytest.mark.torch
def test_torchs_functions_show_what_they_take():
    dt = pytest.importorskip("distopt.torch")
    assert {"group", "scaler", "overlap", "break_even"} < set(inspect.signature(dt.synchronize).parameters)
    assert {"every", "fragments", "scaler", "check_every"} < set(inspect.signature(dt.local_steps).parameters)
    assert {"group", "overlap"} < set(inspect.signature(dt.compress).parameters)


def test_local_steps_takes_every_option_of_its_record():
    taken = inspect.signature(LocalSteps).parameters
    assert {f.name: f.default for f in dataclasses.fields(LocalOptions) if f.default is not dataclasses.MISSING} == {
        f.name: taken[f.name].default for f in dataclasses.fields(LocalOptions) if f.name != "every"
    }
    assert {name: taken[name].default for name in Options._fields if name in taken} == {
        name: default for name, default in Options._field_defaults.items() if name in taken
    }
