"""Optimizers of torch and of packages for it, each tried on three ranks in every way that one can be used here.

``python tests/pytorch/any_optimizer.py`` tries all that are installed, and writes docs/guides/optimizers_table.md.
"""

import hashlib
import importlib
import inspect
import io
import json
import re
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import distopt.torch as dt
from distopt import DistOpt
from distopt.compress import ErrorFeedback, Int8, TopK

STEPS, STOP = 6, 4  # and where it is saved; inside of a window of local steps
ALIKE = 1e-3  # of the way that a parameter goes: the rounding of means in float32, which LBFGS makes larger
PACKAGES = "torch", "pytorch_optimizer", "schedulefree", "lion_pytorch", "prodigyopt", "bitsandbytes"
OF_MODELS = {"adalomo", "adammini", "lomo"}  # they take a model in the place of its parameters
WITH_GROUPS = {"adago", "adamuon", "distributedmuon", "muon", "muonclip", "normuon"}  # matrices are in one of their own
OPTIONS = {"bsam": {"num_data": 24}, "ranger21": {"num_iterations": 100}}
OPTIONS |= {
    name: {"momentum": 0.9} for name in ("LARS", "LARS32bit", "LARS8bit", "PytorchLARS", "SGD", "SGD32bit", "SGD8bit")
}
NO_OPTIMIZERS = "Optimizer", "AdamWLegacy"
OTHER_BITS = "goes on to other bits"


TABLE = Path(__file__).parents[2] / "docs" / "guides" / "optimizers_table.md"
KEPT = "its state has {}, which no checkpoint of ours holds (`save` says so); `torch.save` does".format
CLOSURE = "`DistOpt` refuses a `step()` that needs a closure, by name; `dt.synchronize` gives it means, of the loss too"
GRAPH = "it needs `backward(create_graph=True)`, refused by `dt.synchronize`: second derivatives are a rank's own"
EIGEN = "means are the same to rounding; a gradient that differs in its last bit takes one process as far away"
REASONS = {
    "LBFGS": CLOSURE,
    "lbfgs": CLOSURE,
    "AdamWScheduleFreeClosure": CLOSURE,
    "RAdamScheduleFreeClosure": CLOSURE,
    "SGDScheduleFreeClosure": CLOSURE,
    "alig": "its `step()` needs a closure; `dt.synchronize` gives it means, of the loss too",
    "SparseAdam": "for sparse gradients alone, which are not exchanged (`sparse=False` of an embedding)",
    "ScheduleFreeWrapper": "no `torch.optim.Optimizer`, whose steps could be counted",
    "ScheduleFreeWrapperReference": "no `torch.optim.Optimizer`, whose steps could be counted",
    "adahessian": GRAPH,
    "sophiah": GRAPH,
    "adalomo": "it updates inside of the backward pass, each rank by its own gradient; refused by name",
    "lomo": "it updates inside of the backward pass, each rank by its own gradient; refused by name",
    "alice": EIGEN,
    "soap": EIGEN,
    "splus": EIGEN,
    "adashift": KEPT("a deque"),
    "aggmo": KEPT("floats as keys"),
    "conda": KEPT("an object of its own"),
    "kron": KEPT("a `torch.dtype`"),
    "magma": KEPT("tuples as keys"),
    "rose": KEPT("a `torch.dtype`"),
    "scalableshampoo": KEPT("an object of its own"),
    "scion": KEPT("an object of its own"),
    "scionlight": KEPT("an object of its own"),
    "lorarite": "goes on to other last bits: transposed matrices of its state are loaded in the order of rows",
    "AdEMAMix32bit": "its own step fails on a vector",
    "PagedAdEMAMix32bit": "its own step fails on a vector",
    "bsam": "its own step fails on a model with more than one parameter",
    "demo": "needs einops, and exchanges by itself",
    "distributedmuon": "exchanges by itself, matrices of one shape",
}
PAGE = """# Any optimizer: the table

Each optimizer trains a small network on three processes in five ways: behind `dt.synchronize` dense, with the largest
quarter of the gradients and with int8, both with error feedback; with `dt.local_steps`; and in `DistOpt(optimizer)`.
In each way all ranks must end with the same bits; dense, in `DistOpt` too, must be one process with the whole batch,
to a thousandth of the way that a parameter goes; and what is saved after four of six steps (model, optimizer and our
state by `torch.save`, a `DistOpt` by its `save`) must go on to the same bits.

torch 2.13.0, pytorch_optimizer 4.1.0, schedulefree 1.4.1, lion-pytorch 0.2.5, prodigyopt 1.1.2, bitsandbytes 0.50.2 on
the CPU. `python tests/pytorch/any_optimizer.py` writes this page; `tests/pytorch/test_any_optimizer.py` tries torch's
in the tier `torch`, and those of the packages in the tier `thorough`.

## In all five ways

| package | optimizers | those |
|---|---|---|
{good}

*A closure*, *matrices*: it was given a closure, or a network without biases, as it asks for.

## Exceptions

| package | optimizer | not | why |
|---|---|---|---|
{rest}
"""


def optimizers(package):
    """Functions that make a package's optimizers for parameters, by name; none if it is missing."""
    try:
        module = importlib.import_module(package)
    except ImportError:
        return {}
    if package == "pytorch_optimizer":
        classes = {name: module.load_optimizer(name) for name in module.get_supported_optimizers()}
    else:
        place = module.optim if package in ("torch", "bitsandbytes") else module
        classes = {name: c for name, c in vars(place).items() if isinstance(c, type)}
        classes = {n: c for n, c in classes.items() if hasattr(c, "step") and n not in NO_OPTIMIZERS}
    return {name: maker(name, c) for name, c in sorted(classes.items(), key=lambda item: item[0].lower())}


def maker(name, kind):
    """A function of a model that makes an optimizer of this class."""

    def make(model):
        params, options = list(model.parameters()), dict(OPTIONS.get(name, {}))
        if "lr" in inspect.signature(kind).parameters:
            options["lr"] = 1e-3
        if name.startswith("ScheduleFreeWrapper"):
            return kind(torch.optim.SGD(params, lr=1e-2), momentum=0.9)
        if name in OF_MODELS:
            return kind(model, **options)
        if name in WITH_GROUPS:
            matrices = [p for p in params if p.ndim == 2]
            rest = [p for p in params if p.ndim < 2]
            groups = [{"params": p, "use_muon": p is matrices} for p in (matrices, rest) if p]
            return kind(groups, **options)
        return kind(params, **options)

    return make


class Training:
    """A model, its optimizer, and its steps."""

    def __init__(self, make, matrices, closure):
        torch.manual_seed(0)
        bias = not matrices
        self.model = nn.Sequential(nn.Linear(8, 16, bias=bias), nn.Tanh(), nn.Linear(16, 4, bias=bias))
        self.optimizer = make(self.model)
        self.closure, self.parts = closure, [self.model, self.optimizer]
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()

    def loss(self, rank, step):
        g = torch.Generator().manual_seed(100 * step + rank)
        x, y = torch.randn(8, 8, generator=g), torch.randn(8, 4, generator=g)
        return nn.functional.mse_loss(self.model(x), y)

    def step(self, step, passes):
        """One of the optimizer, with the gradients and the loss of ``passes``."""
        torch.default_generator.manual_seed(step)  # some roll dice, on all ranks alike

        def closure():
            self.optimizer.zero_grad()
            with torch.enable_grad():
                return passes()

        if self.closure:
            self.optimizer.step(closure)
        else:
            closure()
            self.optimizer.step()

    def train(self, steps, passes):
        for step in steps:
            self.step(step, lambda step=step: passes(self, step))
        return self

    def saved(self):
        file = io.BytesIO()
        torch.save([part.state_dict() for part in self.parts], file)
        file.seek(0)
        return file

    def load(self, file):
        for part, state in zip(self.parts, torch.load(file, weights_only=False), strict=True):
            part.load_state_dict(state)
        return self

    def values(self):
        return [p.detach().clone() for p in self.model.parameters()]


def of_this_rank(training, step):
    loss = training.loss(dist.get_rank(), step)
    loss.backward()
    return loss.detach()


def of_all(training, step):
    """Gradients of the whole batch, by one process: the mean of the ranks' in float64, rounded once."""
    params, size = list(training.model.parameters()), dist.get_world_size()
    losses = [training.loss(rank, step) for rank in range(size)]
    parts = [torch.autograd.grad(loss, params) for loss in losses]
    for p, grads in zip(params, zip(*parts, strict=True), strict=True):
        p.grad = (sum(g.double() for g in grads) / size).to(p.dtype)
    return sum(loss.detach() for loss in losses) / size


def wrapped(training, step):
    """A step of DistOpt is the whole step."""
    training.dist_opt(training.loss(dist.get_rank(), step))


def digest(values):
    return hashlib.sha256(b"".join(x.numpy().tobytes() for x in values)).hexdigest()


def everywhere(value):
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every


def far(found, expected, first):
    """The largest distance of parameters, relative to how far the farthest one has gone."""
    way = max(float((x - y).abs().max()) for x, y in zip(expected, first, strict=True))
    return max(float((x - y).abs().max()) for x, y in zip(found, expected, strict=True)) / max(way, 1e-12)


def synchronized(compressor):
    def begin(training):
        training.parts.append(dt.synchronize(training.model, compressor()))
        return training

    return begin


def local(training):
    training.parts.append(dt.local_steps(training.model, training.optimizer, every=3))
    return training


WAYS = {
    "dense": synchronized(lambda: None),
    "top-K": synchronized(lambda: ErrorFeedback(TopK(0.25))),
    "int8": synchronized(lambda: ErrorFeedback(Int8())),
    "local steps": local,
}


def outcome(whole, again, first, expected):
    """What is wrong with a training that went on from a file, or with the whole one."""
    if digest(again.values()) != digest(whole.values()):
        return OTHER_BITS
    return f"{distance:.0e} from one process" if (distance := far(whole.values(), expected, first)) > ALIKE else ""


def tried(way, make, alone):
    """What is wrong with an optimizer that is used in this way; '' if nothing is."""
    begin, whole = WAYS[way], make()
    first = whole.values()
    file = begin(whole).train(range(STOP), of_this_rank).saved()
    whole.train(range(STOP, STEPS), of_this_rank)
    if len(set(everywhere(digest(whole.values())))) > 1:
        return "ranks differ"
    again = begin(make()).load(file).train(range(STOP, STEPS), of_this_rank)
    return outcome(whole, again, first, alone if way == "dense" else whole.values())


def tried_in_dist_opt(make, alone, folder):
    """As ``tried``, in a ``DistOpt``, whose checkpoint is a file."""

    def begun():
        training = make()
        training.dist_opt = DistOpt(training.optimizer)
        return training

    def train(training, steps):
        for step in steps:
            torch.default_generator.manual_seed(step)
            wrapped(training, step)

    whole, again = begun(), begun()
    first = whole.values()
    train(whole, range(STOP))
    whole.dist_opt.save(folder, list(whole.model.parameters()))
    train(whole, range(STOP, STEPS))
    if len(set(everywhere(digest(whole.values())))) > 1:
        return "ranks differ"
    again.dist_opt.load(folder, list(again.model.parameters()))
    train(again, range(STOP, STEPS))
    return outcome(whole, again, first, alone)


def told(function, *arguments):
    """What a function returns, or the error that it raises, in a line."""
    try:
        return function(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]


def by_one(function):
    """What a function returns on rank 0, or its error: the others need not do the same."""
    found = [told(function) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return found[0]


def again_of_one(make):
    """Where one process comes to that went on from a file."""
    file = make().train(range(STOP), of_all).saved()
    return make().load(file).train(range(STOP, STEPS), of_all).values()


def examine(make_optimizer, folder):
    """Each way, and what is wrong with it: '' for nothing."""
    for matrices, closure in ((False, False), (True, False), (False, True)):
        make = lambda m=matrices, c=closure: Training(make_optimizer, m, c)  # noqa: E731
        alone = by_one(lambda make=make: make().train(range(STEPS), of_all).values())
        if not isinstance(alone, str):
            break
    else:
        return {"alone": alone}
    row = {"needs": "a closure" * closure + "matrices" * matrices}
    again = by_one(lambda: again_of_one(make))
    row["alone"] = again if isinstance(again, str) else "" if digest(again) == digest(alone) else OTHER_BITS
    for way in WAYS:
        row[way] = told(tried, way, make, alone)
    row["DistOpt"] = told(tried_in_dist_opt, make, alone, folder)
    return row


def report(comm, package, names=None):
    """What ``examine`` says of a package's optimizers, as JSON."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = {}
    with tempfile.TemporaryDirectory() as own:
        folder = Path(everywhere(own)[0])
        for name, make in optimizers(package).items():
            if names is None or name in names:
                if dist.get_rank() == 0:
                    print("at", name, flush=True)
                found[name] = examine(make, folder / name)
        dist.barrier()
    return {name: np.array(json.dumps(row)) for name, row in found.items()}


def rows_of(package, names, folder):
    """What the ranks say of a package's optimizers, by name: of each way the first that finds something wrong."""
    from gloo_launch import run_torch

    ranks = run_torch(3, report, Path(folder), package, names, timeout=1500)
    for name in ranks[0]:
        rows = [json.loads(str(rank[name])) for rank in ranks]
        yield name, {way: next((row[way] for row in rows if row.get(way)), "") for row in rows for way in row}


def lines_of(package, rows):
    """The lines of the page about a package: one of all with which nothing is wrong, and one for each of the others."""
    wrong = {name: [way for way, text in row.items() if text and way != "needs"] for name, row in rows.items()}
    needs = {name: f" ({row['needs']})" if row.get("needs") else "" for name, row in rows.items()}
    good = [f"`{name}`{needs[name]}" for name, ways in wrong.items() if not ways]
    yield f"| {package} | {len(good)} of {len(rows)} | {', '.join(good)} |"
    for name, ways in wrong.items():
        if ways:
            none = "it does not train here by itself" if "alone" in ways else ", ".join(ways)
            yield f"| {package} | `{name}` | {none} | {REASONS.get(name, '; '.join(rows[name][w] for w in ways))} |"


def page(found):
    """The text of the page, of the rows of each package."""
    lines = [line for package, rows in found.items() for line in lines_of(package, rows)]
    good = [line for line in lines if re.match(r"\| \w+ \| \d", line)]
    rest = [line for line in lines if line not in good]
    return PAGE.format(good="\n".join(good), rest="\n".join(rest))


def main():
    found = {package: {} for package in PACKAGES if optimizers(package)}
    for package, rows in found.items():
        with tempfile.TemporaryDirectory() as folder:
            for name, row in rows_of(package, None, folder):
                rows[name] = row
                print(package, name, row, flush=True)
    TABLE.write_text(page(found))


if __name__ == "__main__":
    import any_optimizer

    any_optimizer.main()
