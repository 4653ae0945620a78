"""The fused update alone, one thread: python -m benchmarks.optimizers [--rules lamb lans] [--save]

Every optimizer on ResNet-50's and on 2000 tiny tensors.  The anchor is C over flat arrays (``floor.cpp``) that moves
the same bytes: one pass, or for rules that need norms as many passes as they need, with one norm for all tensors.
distopt's own update is called as DistOpt calls it, bucket by bucket, for parameters that lie in one flat array and for
parameters that numpy allocated one by one; torch's are its fused and its foreach form, where it has the rule.  Muon,
most of whose time is that of BLAS, is compared with AdamW, on a few matrices.
"""

import argparse
import importlib.util
import os

import numpy as np

from benchmarks import floor
from benchmarks.measure import interleaved, report, table, versions
from benchmarks.models import MODELS
from distopt import optim
from distopt.buckets import plan
from distopt.device import zeros
from distopt.kernels.layout import BucketLayout

RULES = {
    "sgd": lambda: optim.SGD(1e-6, momentum=0.9, weight_decay=1e-4),
    "adam": lambda: optim.Adam(1e-6, weight_decay=1e-4),
    "rmsprop": lambda: optim.RMSProp(1e-6, rho=0.9, weight_decay=1e-4),
    "adagrad": lambda: optim.AdaGrad(1e-6, weight_decay=1e-4),
    "signum": lambda: optim.Signum(1e-6, momentum=0.9, weight_decay=1e-4),
    "adamw": lambda: optim.AdamW(1e-6, weight_decay=1e-4),
    "lbsgd": lambda: optim.LBSGD(1e-6, momentum=0.9, weight_decay=1e-4),
    "lars": lambda: optim.LARS(1e-6, momentum=0.9, weight_decay=1e-4),
    "lamb": lambda: optim.LAMB(1e-6, weight_decay=1e-4),
    "lans": lambda: optim.LANS(1e-6, weight_decay=1e-4),
}
MATRICES = {"4 of 1024 x 1024": [(1024, 1024)] * 4, "100 of 64 x 64": [(64, 64)] * 100}
ANCHOR = "C over flat arrays"
BUDGETS = {
    "resnet50": {"distopt, flat parameters": 1.05, "distopt, separate parameters": 1.1},
    "tiny": {"distopt, flat parameters": 1.15},
}
THRESHOLD = 2097152


def buckets(shapes):
    """The buckets of these tensors, as DistOpt makes them."""
    sizes = [int(np.prod(s)) for s in shapes]
    return plan([str(k) for k in range(len(sizes))], sizes, [np.float32] * len(sizes), THRESHOLD).buckets


def ours(make, shapes, flat):
    """A step of our optimizer over all buckets."""
    opt, work, rng = make(), [], np.random.default_rng(0)
    for b in buckets(shapes):
        members = [shapes[int(n)] for n in b.names]
        table = BucketLayout(b.names, members, b.offsets, b.dtype)
        memory, grad = zeros(b.size, b.dtype), zeros(b.size, b.dtype)
        grad[:] = rng.standard_normal(b.size)
        views = [table.view(memory, row) for row in range(len(members))]
        table.point_to(views if flat else [np.zeros(s, np.float32) for s in members])
        work.append((table, grad))

    def step():
        opt.prepare(0.5)
        for table, grad in work:
            opt.update_bucket(table, [(0, 1, grad)])
        opt.step()

    return step


def by_hand(rule, shapes):
    """The anchor: a flat array for all tensors."""
    n = sum(b.size for b in buckets(shapes))
    p, g, m, v = (zeros(n, np.float32) for _ in range(4))
    g[:] = np.random.default_rng(0).standard_normal(n)
    return lambda: floor.update(rule, p, g, m, v, scale=0.5, lr=1e-6)


def torchs(rule, shapes):
    """A step of torch's optimizers of this rule, by the name of their form."""
    import torch

    torch.set_num_threads(1)
    kinds = {
        "sgd": (torch.optim.SGD, {"momentum": 0.9}, ("fused", "foreach")),
        "adam": (torch.optim.Adam, {}, ("fused", "foreach")),
        "adamw": (torch.optim.AdamW, {}, ("fused", "foreach")),
        "rmsprop": (torch.optim.RMSprop, {"alpha": 0.9}, ("foreach",)),
        "adagrad": (torch.optim.Adagrad, {}, ("fused", "foreach")),
    }
    if rule not in kinds:
        return {}
    kind, options, forms = kinds[rule]
    times = {}
    for form in forms:
        params = [torch.zeros(s, requires_grad=True) for s in shapes]
        for p in params:
            p.grad = torch.randn(p.shape)
        times[f"torch, {form}"] = kind(params, 1e-6, weight_decay=1e-4, **options, **{form: True}).step
    return times


def muon(name, rounds):
    """Muon's step beside AdamW's."""
    makes = {"AdamW": RULES["adamw"], "Muon": optim.Muon}
    times = interleaved({n: ours(make, MATRICES[name], flat=True) for n, make in makes.items()}, rounds, 1)
    return table(f"muon, {name}", times, "AdamW", {})


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rules", nargs="+", choices=[*RULES, "muon"], default=[*RULES, "muon"])
    parser.add_argument("--models", nargs="+", choices=BUDGETS, default=list(BUDGETS))
    parser.add_argument("--save", action="store_true", help="keep the tables in benchmarks/results")
    args = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    tables = []
    for model in args.models:
        budgets = BUDGETS[model]
        shapes = [shape for _, shape in reversed(MODELS[model]())]
        for rule in (r for r in args.rules if r in RULES):
            cases = {
                ANCHOR: by_hand(rule, shapes),
                "distopt, flat parameters": ours(RULES[rule], shapes, flat=True),
                "distopt, separate parameters": ours(RULES[rule], shapes, flat=False),
            }
            if importlib.util.find_spec("torch"):
                cases |= torchs(rule, shapes)
            times = interleaved(cases, args.rounds, 3 if model == "resnet50" else 10)
            tables.append(table(f"{rule}, {model}", times, ANCHOR, budgets))
    tables += [muon(name, args.rounds) for name in MATRICES if "muon" in args.rules]
    report("optimizers", "\n\n".join([versions("numpy", "torch"), *tables]), args.save)


if __name__ == "__main__":
    main()
