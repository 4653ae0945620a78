"""What Python costs in a step, by cause: python -m benchmarks.overhead [--save]

One rank, tensors of 16 elements, so that next to nothing else is left; a loss is a list of pairs that is there.  Every
cause is timed on its own, in turns with whole steps; kernels are the bare foreign calls.
"""

import argparse
import itertools
import os
import statistics

import numpy as np

import distopt
from benchmarks.measure import interleaved, report, versions
from benchmarks.models import MODELS
from distopt.comm import LocalCommunicator

BUDGETS = {"all gradients new": 200, "nothing changed": 100}  # nanoseconds per parameter
TINY = 3.0  # milliseconds of kernels and Python


def cases_of(count):
    """Whole steps, and what they are made of."""
    params = [distopt.Parameter(f"p{k}", np.zeros(16, np.float32)) for k in range(count)]
    sets = itertools.cycle([[(p, np.ones(16, np.float32)) for p in params] for _ in range(3)])
    same = next(sets)
    opt = distopt.DistOpt(distopt.optim.SGD(1e-3, momentum=0.9), LocalCommunicator())
    opt(same)
    memory, collector, control = opt.engine.store.buckets, opt.engine.store.collector, opt.communicator.control
    versions_seen = itertools.count(10**6)
    foreign = list(foreign_calls(opt))

    def update():
        for buffer in memory:
            opt.opt.update_bucket(buffer.parameters, [(0, 1, buffer.gradient)])

    def point():
        memory.point_to_gradients(collector.grads.arrays, collector.grads.addresses, next(versions_seen))

    def pack():
        for buffer in memory:
            buffer.pack(True)

    return {
        "all gradients new": lambda: opt(next(sets)),
        "nothing changed": lambda: opt(same),
        "kernels alone": lambda: [call() for call in foreign],
        "  recognise the pairs, gradients new": lambda: collector.collect(next(sets)),
        "  recognise the pairs, nothing changed": lambda: collector.collect(same),
        "  point the tables to new gradients": point,
        "  pack, kernel included": pack,
        "  vote": lambda: control.vote("a vote", 1, list),
        "  update, kernel included": update,
    }


def tiny():
    """Steps with the model 'tiny', where kernels and Python take about as long."""
    shapes = [shape for _, shape in reversed(MODELS["tiny"]())]
    params = [distopt.Parameter(f"p{k}", np.zeros(shape, np.float32)) for k, shape in enumerate(shapes)]
    sets = [[(p, np.ones(p.data.shape, np.float32)) for p in params] for _ in range(3)]
    steps = {}
    for name, losses in (("all gradients new", itertools.cycle(sets)), ("nothing changed", itertools.cycle(sets[:1]))):
        opt = distopt.DistOpt(distopt.optim.SGD(1e-3, momentum=0.9), LocalCommunicator())
        steps[name] = lambda opt=opt, losses=losses: opt(next(losses))
        opt(next(losses))
    calls = list(foreign_calls(opt))
    return steps | {"kernels alone": lambda: [call() for call in calls]}


def foreign_calls(opt):
    """The calls of a step into C, with their arguments made."""
    from distopt import kernels

    pack, momentum = (k._function(np.dtype(np.float32), None) for k in (kernels.pack, kernels.sgd_momentum))
    now = opt.opt._now.address(None)
    for buffer in opt.engine.store.buckets:
        grad, table = buffer.gradient.ctypes.data, buffer.parameters.table(None)
        moments = opt.opt._table_states[buffer.parameters.key].slots["moments"].ctypes.data
        bad, gradients = buffer.bad.ctypes.data, buffer.gradients.table(None)
        yield lambda t=gradients, g=grad, b=bad: pack(t, g, 1.0, b, 1e30)
        yield lambda t=table, g=grad, m=moments: momentum(t, g, m, now, None)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="keep the table in benchmarks/results")
    args = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    lines = [versions("numpy")]
    for count in (161, 2000, 10000):
        times = interleaved(cases_of(count), rounds=9, calls=max(3, 40_000 // count))
        kernels = statistics.median(times["kernels alone"])
        lines += ["", f"{count} parameters{'us a step':>41} {'ns a parameter':>15} {'less kernels':>13}  [min - max]"]
        for name, seconds in times.items():
            middle = statistics.median(seconds)
            line = f"  {name:42} {middle * 1e6:8.1f} {middle / count * 1e9:15.0f}"
            if name in BUDGETS:
                net = [(t - kernels) / count * 1e9 for t in seconds]
                verdict = "met" if statistics.median(net) <= BUDGETS[name] else "MISSED"
                line += f" {statistics.median(net):13.0f}  [{min(net):.0f} - {max(net):.0f}]"
                line += f"  budget {BUDGETS[name]}: {verdict}" if count == 2000 else ""
            lines.append(line)
    lines += ["", f"tiny, one rank: {len(MODELS['tiny']())} tensors of 512 to 4096 elements{'ms a step':>24}"]
    for name, seconds in interleaved(tiny(), rounds=9, calls=10).items():
        middle = statistics.median(seconds) * 1e3
        verdict = f"{'':33}  budget {TINY:g}: {'met' if middle <= TINY else 'MISSED'}" * (name != "kernels alone")
        lines.append(f"  {name:42} {middle:8.2f}{verdict}")
    report("overhead", "\n".join(lines), args.save)


if __name__ == "__main__":
    main()
