"""Trainings of which some ranks end on the way, and what the others must have then."""

from types import SimpleNamespace

import numpy as np

from distopt import DistOpt, LocalSteps, LossScaler, device
from distopt.comm import Elastic, run_ranks
from distopt.compress import Chunks, DeepGradientCompression, ErrorFeedback, Half, Int8, OneBit, Packed, TopK
from distopt.optim import LANS, SGD, Adam, Muon
from laws import inputs

STEPS = 4  # of a short training


def sgd():
    return SGD(0.1, momentum=0.9, weight_decay=1e-3)


def stepper(compressor=None, exchange="auto"):
    return lambda opt, loss: opt.step(loss, compressor, exchange=exchange)


def in_views(opt, loss):
    """A step whose gradients lie in the views of the first call, for as long as that is."""
    pairs = list(loss)
    if not hasattr(opt, "views_of_first_call"):
        opt.views_of_first_call = opt.gradient_views([p for p, _ in pairs])
    for view, (_, grad) in zip(opt.views_of_first_call, pairs, strict=True):
        device.copy(view, grad)
    opt(zip((p for p, _ in pairs), opt.views_of_first_call, strict=True))


def in_shared_parameters(opt, loss):
    """A step with parameters that all ranks share, from the first call on."""
    pairs = list(loss)
    if not hasattr(opt, "parameters_of_first_call"):
        opt.parameters_of_first_call = opt.parameter_views([p for p, _ in pairs])
        for (p, _), view in zip(pairs, opt.parameters_of_first_call, strict=True):
            p.data = view
    opt(pairs)


def reloaded(opt, loss):
    """The same, after a load of what is there already."""
    opt.load_state_dict(opt.state_dict())
    in_shared_parameters(opt, loss)


def synchronized(opt, loss):
    """A step of a ``Synced``."""
    opt(loss)


FEEDBACK = ErrorFeedback(TopK(0.1))
SMALL = {"threshold": 60}
# by name: what makes a step of it, the optimizer, the options of DistOpt, and whether ranks share memory
MODES = {
    "dense": (stepper(), sgd, SMALL, True),
    "dense in messages": (stepper(), lambda: Adam(0.01, epsilon=1e-3), SMALL, False),
    "overlap": (stepper(), sgd, {**SMALL, "overlap": True}, False),
    "half": (stepper(Half()), sgd, SMALL, True),
    "clipped": (stepper(), sgd, {**SMALL, "clip_norm": 0.5}, True),
    "hooked": (stepper(), sgd, {**SMALL, "gradient_hook": lambda pairs: None}, False),
    "top-K": (stepper(FEEDBACK), sgd, SMALL, True),
    "top-K in two phases": (stepper(ErrorFeedback(Packed(TopK(0.1))), "two_phase"), sgd, SMALL, True),
    "chunks": (stepper(ErrorFeedback(Chunks(4, of=64), decay=0.9), "two_phase"), sgd, SMALL, True),
    "dgc": (stepper(DeepGradientCompression(TopK(0.1))), lambda: SGD(0.1), SMALL, True),
    "dgc of weight decay": (
        *(stepper(DeepGradientCompression(TopK(0.1), weight_decay=0.1)), lambda: SGD(0.1)),
        *(SMALL, True),
    ),
    "one bit in two phases": (stepper(OneBit(), "two_phase"), sgd, SMALL, True),
    "int8": (stepper(ErrorFeedback(Int8())), sgd, SMALL, True),
    "three batches": (stepper(), sgd, {**SMALL, "num_batches": 3}, True),
    "three batches of top-K": (stepper(FEEDBACK), sgd, {**SMALL, "num_batches": 3}, True),
    "three sums": (stepper(), sgd, {**SMALL, "num_batches": 3, "sync_on_apply": False}, False),
    "checked": (stepper(), sgd, {**SMALL, "check_every": 2}, True),
    "views": (in_views, sgd, SMALL, True),
    "views in messages": (in_views, sgd, SMALL, False),
    "partial": (lambda opt, loss: opt.backward_and_partial_update(loss), sgd, SMALL, True),
    "partial in messages": (lambda opt, loss: opt.backward_and_partial_update(loss), sgd, SMALL, False),
    "share": (lambda opt, loss: opt.backward_and_partial_update(loss, share=0.2), sgd, SMALL, True),
    "local steps": (LocalSteps.__call__, sgd, {**SMALL, "every": 2, "outer": SGD(0.7, momentum=0.9)}, True),
    "local steps of top-K": (LocalSteps.__call__, sgd, {**SMALL, "every": 2, "compressor": FEEDBACK}, False),
    "local steps in flight": (LocalSteps.__call__, sgd, {**SMALL, "every": 2, "fragments": 2, "delay": 1}, True),
    "shared parameters with a buddy": (in_shared_parameters, sgd, {"buddy": True}, True),
    "shared parameters of Adam with a buddy": (
        *(in_shared_parameters, lambda: Adam(0.01, epsilon=1e-3)),
        *({**SMALL, "buddy": True, "num_batches": 2}, True),
    ),
    "shared parameters of LANS with a buddy": (in_shared_parameters, lambda: LANS(0.01), {"buddy": True}, True),
    "shared parameters of Muon with a buddy": (
        *(in_shared_parameters, lambda: Muon(0.01, exclude=["p6"])),
        *({**SMALL, "buddy": True, "clip_norm": 0.5}, True),
    ),
    "shared parameters with a buddy, reloaded": (reloaded, sgd, {**SMALL, "buddy": True}, True),
    "sharded Muon with a buddy": (stepper(), lambda: Muon(0.01, sharded=True), {**SMALL, "buddy": True}, True),
    "loss scaler": (stepper(), sgd, {**SMALL, "nonfinite": 4.0}, True),
}
# the same of ``distopt.torch.synchronize``, with options of ``laws.synced.Synced``
SYNCHRONIZED = {
    "synchronized": (synchronized, "SGD", SMALL, True),
    "synchronized in messages": (synchronized, "AdamW", SMALL, False),
    "synchronized, overlap": (synchronized, "SGD", {**SMALL, "overlap": True}, False),
    "synchronized, half in overlap": (synchronized, "AdamW", {**SMALL, "overlap": True, "compressor": Half()}, False),
    "synchronized, top-K": (synchronized, "SGD", {**SMALL, "compressor": FEEDBACK}, True),
    "synchronized, two phases": (
        *(synchronized, "SGD"),
        *({**SMALL, "compressor": ErrorFeedback(Packed(TopK(0.1))), "exchange": "two_phase"}, True),
    ),
    "synchronized, dgc": (synchronized, "plain SGD", {**SMALL, "compressor": DeepGradientCompression(TopK(0.1))}, True),
    "synchronized, three passes": (synchronized, "SGD", {**SMALL, "passes": 3}, True),
    "synchronized, three passes of top-K": (
        *(synchronized, "SGD"),
        *({**SMALL, "passes": 3, "compressor": FEEDBACK}, False),
    ),
    "synchronized, loss scaler": (synchronized, "SGD", {**SMALL, "scale": 4.0, "compressor": FEEDBACK}, True),
}
EVERY = MODES | SYNCHRONIZED


def made(mode, comm, params, **more):
    """What trains these parameters in a mode, with more options of a DistOpt."""
    _, make, options, _ = EVERY[mode]
    if mode in SYNCHRONIZED:
        from laws.synced import Synced  # needs torch

        return Synced(params, comm, make, **options)
    if "nonfinite" in options:
        options = options | {"nonfinite": LossScaler(init_scale=options["nonfinite"], window=3)}
    return (LocalSteps if "every" in options else DistOpt)(make(), comm, **options, **more)


def calls(mode):
    """How many batches there are."""
    return range(STEPS * EVERY[mode][2].get("num_batches", 1))


def noted(engine, epochs):
    """Let an engine note the epoch of the ranks that have made each step; after it there may be another one."""
    step = engine.step

    def note(*arguments):
        applied = step(*arguments)
        epochs.append(engine.store._memory.epoch)
        return applied

    engine.step = note


def train(mode, opt, params, numbers, member):
    """Train with the batches of these numbers; return a list for the epoch of the ranks that exchange each of them.

    In batch 2 of a loss scaler a gradient is not finite, and the step is skipped.
    """
    step, epochs = EVERY[mode][0], []
    local = isinstance(opt, LocalSteps)
    for engine in [fragment.engine for fragment in opt._training.outer.fragments] if local else [opt.engine]:
        noted(engine, epochs)
    for k in numbers:
        grads = inputs.gradients(params, k, member)
        if mode.endswith("loss scaler") and k == 2:
            grads[0] = np.full_like(grads[0], np.inf)
        grads = inputs.to_device(SimpleNamespace(gpu=device.gpu_of(params[0].data)), grads)
        step(opt, ((p, g) for p, g in zip(params, grads, strict=True)))
    return epochs


def of(opt, params):
    """All that a rank has."""
    return {p.name: device.host_copy(p.data) for p in params}, opt.state_dict()


def reference(mode, exchanged, ended, ranks, start=None, run=run_ranks):
    """The same of runs of fewer and fewer ranks, each of which goes on from what those before had then.

    ``exchanged``: how many ranks there are at each batch; ``ended``: who is not there any more, in this order;
    ``start``: the rank whose parameters all had before the first batch; ``run``: starts ranks.
    """
    has = None
    for size in sorted(set(exchanged), reverse=True):
        members = [r for r in range(ranks) if r not in ended[: ranks - size]]
        batches = [k for k, n in enumerate(exchanged) if n == size]

        def main(comm, members=members, batches=batches, has=has):
            member = members[comm.rank]
            params = inputs.move_to_device(comm, inputs.parameters(rank=member if start is None else start))
            opt = made(mode, comm, params)
            if has:
                values, state = has[member]
                for p in params:
                    device.copy(p.data, values[p.name])
                if not EVERY[mode][2].get("sync_on_apply", True):  # the sums of a window have the gradients of all
                    state = state | {"contributions": state["contributions"] * len(has) / comm.size}
                opt.load_state_dict(state)
            train(mode, opt, params, batches, member)
            return of(opt, params)

        has = dict(zip(members, run(size, main), strict=True))
    return {member: had for member, had in has.items() if member not in ended}


def same(a, b, path=""):
    """Assert that two trees have the same bits."""
    assert type(a) is type(b) or {type(a), type(b)} <= {int, float, np.float64}, path
    if isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            same(a[key], b[key], f"{path}/{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), path
        for k, (x, y) in enumerate(zip(a, b, strict=True)):
            same(x, y, f"{path}/{k}")
    elif isinstance(a, np.ndarray):
        np.testing.assert_array_equal(a, b, err_msg=path)
    else:
        assert a == b, path


class Killed(BaseException):
    """The end of a rank, at which nothing of it runs any more."""


class Counted(Elastic):
    """Notes how many ranks there are in each epoch."""

    def __init__(self, comm):
        super().__init__(comm)
        self.sizes = {0: comm.size}

    def _take_next(self):
        super()._take_next()
        self.sizes[self.epoch] = self.size


def run(mode, ranks, over=lambda comm: comm):
    """How many ranks exchanged each batch of a training, and what each survivor has, by its first number.

    ``over`` makes the communicator that loses ranks.
    """

    def main(comm):
        member = comm.rank
        try:
            elastic = Counted(over(comm))
            params = inputs.move_to_device(elastic, inputs.parameters(rank=member))
            opt = made(mode, elastic, params)
            epochs = train(mode, opt, params, calls(mode), member)
            has = of(opt, params)
            elastic.leave()
        except Killed:
            return None
        return epochs, elastic.sizes, has

    found = {member: had for member, had in enumerate(run_ranks(ranks, main)) if had}
    sizes = {epoch: size for _, sizes, _ in found.values() for epoch, size in sizes.items()}
    (exchanged,) = {tuple(sizes[epoch] for epoch in epochs) for epochs, _, _ in found.values()}
    batches = len(calls(mode)) // len(exchanged)  # of each exchange
    return tuple(n for n in exchanged for _ in range(batches)), {member: has for member, (_, _, has) in found.items()}


class Judge:
    """Compares what survivors have with what ranks have that were fewer by themselves.

    ``fate`` makes who ends the present one, and gives it; ``run(mode, ranks)`` tells how many ranks exchanged each
    batch, and what each survivor has; ``launch`` starts the others.

    Rank 0's parameters are sent before the first batch is exchanged, and local steps exchange none of the first window:
    so a rank that is lost meanwhile may have been there for the parameters alone.
    """

    def __init__(self, mode, fate, run, ranks=3, launch=run_ranks):
        self.mode, self.fate, self.run, self.ranks, self.launch, self.known = mode, fate, run, ranks, launch, {}

    def judge(self, **victims):
        fate = self.fate(**victims)
        exchanged, has = self.run(self.mode, self.ranks)
        # a thread may end in the last meeting, in which it leaves a communicator, when its main thread has left already
        has = {member: had for member, had in has.items() if member not in fate.ended}
        assert len(has) == self.ranks - len(fate.ended)
        every, member = EVERY[self.mode][2].get("every", 1), min(has)
        fewer = min(exchanged[: every + 1])  # once those of the first window have met
        likely = [(exchanged, None)]
        if fewer < self.ranks:
            late = tuple(min(n, fewer) for n in exchanged)
            likely += [(ranks, first) for ranks in (exchanged, late) for first in (None, 0, 1)]
        for case in likely:
            wanted = self.reference(*case, tuple(fate.ended))
            if has[member][0]["p0"].tobytes() == wanted[member][0]["p0"].tobytes():
                break
        else:
            wanted = self.reference(*likely[0], tuple(fate.ended))
        same(has, wanted, f"{self.mode}, {victims}: {exchanged}")

    def reference(self, exchanged, start, ended):
        if (exchanged, start, ended) not in self.known:
            self.fate()
            self.known[exchanged, start, ended] = reference(self.mode, exchanged, ended, self.ranks, start, self.launch)
        return self.known[exchanged, start, ended]
