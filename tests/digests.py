"""Digests of what training leaves, for every mode, optimizer, option and transport: no bit of them may change.

``digests.json`` has them as they were measured when this file was written.  A change that is meant to alter results
says so in its commit and writes the file anew: ``python tests/digests.py``, or ``--check`` to compare, and ``--check
modes`` to compare every mode with one optimizer on three threads.  It has a line for a mode on a number of ranks: of
each case, in the order of ``cases``, six digits, which are enough to see a change.

A digest is of the parameters and of the state_dict of every rank after four steps.  Gradients are made of PCG64's raw
64-bit numbers by exact arithmetic, so that no change of numpy's distributions is mistaken for one of ours.
"""

import functools
import hashlib
import json
import sys
from pathlib import Path

import numpy as np

import laws
from distopt import DistOpt, LossScaler, Parameter, Trainer, device, run_ranks, simulate
from distopt.compress import Dense, ErrorFeedback, Half, Packed, TopK
from distopt.compress.state import OWED
from distopt.optim import Adam

FILE = Path(__file__).parent / "digests.json"
STEPS = 4
SIZES = (1, 2, 3)  # thread ranks


def numbers(seed, shape, dtype):
    """An array of numbers that a case may change: others ask for the same ones."""
    return known_numbers(seed, shape, np.dtype(dtype)).copy()


@functools.cache
def known_numbers(seed, shape, dtype):
    """Numbers between -2 and 2, nearer to 0 than evenly spread: the sum of four, each a multiple of 2^-20."""
    raw = np.random.PCG64(seed).random_raw(int(np.prod(shape))).astype(np.uint64)
    parts = [(raw >> np.uint64(16 * k)) & np.uint64(0xFFFF) for k in range(4)]
    return ((sum(p.astype(np.float64) for p in parts) - 2 * 65535) / 65536).reshape(shape).astype(dtype)


def model(rank, dtype="float32", shapes=laws.SHAPES):
    """Parameters that differ per rank."""
    return [Parameter(f"p{k}", numbers(1000 * rank + k, s, dtype)) for k, s in enumerate(shapes)]


def gradients(params, step, rank):
    """Gradients that differ per step and rank."""
    return [numbers(10**6 * (rank + 1) + 1000 * step + k, p.data.shape, p.data.dtype) for k, p in enumerate(params)]


def update(hashed, value):
    """Add a state, its keys in order, to a hash."""
    if isinstance(value, dict):
        for key in sorted(value):
            hashed.update(str(key).encode())
            update(hashed, value[key])
    elif device.is_array(value):
        hashed.update(f"{value.shape} {value.dtype}".encode() + device.host_copy(value).tobytes())
    elif isinstance(value, list | tuple):
        for entry in value:
            update(hashed, entry)
    else:
        hashed.update(repr(value).encode())


def digest(params, state):
    """16 hexadecimal digits."""
    hashed = hashlib.sha256()
    for p in params:
        update(hashed, p.data)
    left_out = "rooms", "borders"  # which only a GPU has; which parameters show
    update(hashed, {name: value for name, value in state.items() if name not in left_out})
    return hashed.hexdigest()[:16]


def pairs(comm, params, step):
    """What a loss yields."""
    return zip(params, laws.to_device(comm, gradients(params, step, comm.rank)), strict=True)


def train(comm, mode="dense", make=laws.sgd, dtype="float32", views=False, sharded=False, **options):
    """Four steps of one mode; the digest on this rank, which is the same where ranks cannot overlap or share memory."""
    asked = options.get("overlap", "auto")
    options["overlap"] = asked if comm.may_overlap else False
    sharded = sharded and comm.peers(comm.alloc(1, np.uint8)) is not None
    params = laws.move_to_device(comm, model(comm.rank, dtype))
    opt = DistOpt(laws.maker_for(mode, make)(), comm, **{"threshold": 60} | options)
    if sharded:
        laws.share(params, opt)
    homes = opt.gradient_views(params) if views else None
    for step in range(STEPS):
        given = list(pairs(comm, params, step))
        if homes:
            for home, (_, g) in zip(homes, given, strict=True):
                device.copy(home, g)
            given = list(zip(params, homes, strict=True))
        laws.MODES[mode](opt, given)
    state = opt.state_dict()
    if asked is True and mode in BY_BUCKET:
        state["states"].pop(OWED, None)  # by other ranks than without overlap
    found = digest(params, state)
    comm.barrier()  # others may still read what is shared
    return found


def refused(comm, policy):
    """A step whose gradient on the last rank is not finite, between two that are."""
    params = laws.move_to_device(comm, model(comm.rank))
    opt = DistOpt(Adam(0.01, epsilon=1e-3), comm, threshold=60, nonfinite=policy())
    for step in range(STEPS):
        given = list(pairs(comm, params, step))
        if step == 1 and comm.rank == comm.size - 1:
            given[1][1][...] = np.nan
        opt.step(given, ErrorFeedback(TopK(0.1)))
    return digest(params, opt.state_dict())


def joined(comm, mode="dense"):
    """Each rank has a step less than the one before it."""
    params = laws.move_to_device(comm, model(comm.rank))
    opt = DistOpt(laws.maker_for(mode, laws.sgd)(), comm, threshold=60)
    for step in range(STEPS - min(comm.rank, STEPS - 1)):
        laws.MODES[mode](opt, pairs(comm, params, step))
    opt.join()
    return digest(params, opt.state_dict())


def all_in_turn(comm):
    """Modes that follow each other, over plans that change."""
    params = laws.move_to_device(comm, model(comm.rank))
    opt = DistOpt(laws.sgd_without_momentum(), comm)
    for step, (threshold, compressor) in enumerate(
        [(60, Half()), (0, ErrorFeedback(TopK(0.1))), (10**6, ErrorFeedback(Packed(TopK(0.2)))), (60, Dense())]
    ):
        opt.threshold = threshold
        opt.step(pairs(comm, params, step), compressor)
    return digest(params, opt.state_dict())


def trained(comm, compression=None, by_hand=False, stale=False, scaler=False):
    """Gluon's methods."""
    params = laws.move_to_device(comm, model(comm.rank))
    options = {"loss_scaler": LossScaler(4.0, window=2)} if scaler else {}
    trainer = Trainer(
        params,
        "sgd",
        {"learning_rate": 0.1, "momentum": 0.9},
        communicator=comm,
        compression_params=compression,
        threshold=60,
        **options,
    )
    for step in range(STEPS):
        for k, (p, g) in enumerate(pairs(comm, params, step)):
            if not stale or (k + step + comm.rank) % 3:
                p.grad = g
        if by_hand:
            trainer.allreduce_grads(ignore_stale_grad=stale)
            trainer.update(8, ignore_stale_grad=stale)
        else:
            trainer.step(8, ignore_stale_grad=stale)
    return digest(params, trainer.state_dict())


def halve(found):
    """A gradient hook."""
    for _, mean in found:
        mean *= np.float32(0.5)


BY_BUCKET = "int8 in two phases", "int4 in two phases"  # with overlap
OPTIONS = {
    "2 batches": {"num_batches": 2},
    "2 batches, each sent": {"num_batches": 2, "sync_on_apply": False},
    "overlap": {"overlap": True, "deterministic": True},
    "deterministic": {"deterministic": True},
    "propagate": {"nonfinite": "propagate"},
    "clipped": {"clip_norm": 1.0},
    "views": {"views": True},
    "float64": {"dtype": "float64"},
}
ONCE = {
    "hooked": {"gradient_hook": halve},
    "hooked, clipped": {"gradient_hook": halve, "clip_norm": 1.0},
    "float16": {"dtype": "float16"},
    "sharded": {"sharded": True},
    "sharded, propagate": {"sharded": True, "nonfinite": "propagate"},
    "sharded, clipped": {"sharded": True, "clip_norm": 1.0},
    "checked": {"check_every": 2},
}
OTHERS = {
    "skip": functools.partial(refused, policy=lambda: "skip"),
    "loss scale": functools.partial(refused, policy=lambda: LossScaler(4.0, window=2)),
    "join": joined,
    "join, topk": functools.partial(joined, mode="topk"),
    "join, partial": functools.partial(joined, mode="partial"),
    "in turn": all_in_turn,
    "Trainer": trained,
    "Trainer, 2bit": functools.partial(trained, compression={"type": "2bit", "threshold": 0.5}),
    "Trainer, by hand": functools.partial(trained, by_hand=True),
    "Trainer, stale": functools.partial(trained, stale=True),
    "Trainer, stale, 2bit": functools.partial(trained, stale=True, compression={"type": "2bit", "threshold": 0.5}),
    "Trainer, stale, by hand": functools.partial(trained, stale=True, by_hand=True),
    "Trainer, scaled": functools.partial(trained, scaler=True),
}
ON_DOUBLES = ("dense, clipped", "topk, 2 batches", "half, overlap", "skip", "in turn", "Trainer, by hand")  # slow ones


def makers(mode):
    """Of the optimizers that a mode is tried with: a momentum of its own excludes a second one."""
    if mode in laws.WITH_MOMENTUM:
        return {"plain": laws.sgd_without_momentum}
    return {name: make for name, make in (laws.OPTIMIZERS | laws.WRAPPERS).items() if name not in laws.OF_BLAS}


def possible(mode, options):
    """Can this mode have these options?"""
    if mode in laws.APART and options.get("sharded"):
        return False
    return not (mode in laws.WITH_MOMENTUM and options.get("sync_on_apply") is False)


def cases(optimizers=True):
    """Every case by name: a function of a communicator that returns this rank's digest."""
    found = {f"{mode}, {name}": (mode, {}, make) for mode in laws.MODES for name, make in makers(mode).items()}
    if not optimizers:
        found = {name: case for name, case in found.items() if name.endswith((", sgd", ", plain"))}
    options = OPTIONS | (ONCE if optimizers else {})
    found |= {
        f"{mode}, {name}": (mode, options, laws.sgd)
        for name, options in options.items()
        for mode in (laws.MODES if name in OPTIONS else ("dense", "half", "topk", "partial"))
        if possible(mode, options)
    }
    trains = {
        name: functools.partial(train, mode=mode, make=make, **options) for name, (mode, options, make) in found.items()
    }
    return trains | OTHERS


def of(comm, names=None, **chosen):
    """The digests of these cases on this rank."""
    return {name: case(comm) for name, case in cases(**chosen).items() if names is None or name in names}


def on_threads(size, names=None, run=run_ranks):
    """Per case the digests of all ranks, joined by '/'."""
    return joined_digests(run(size, lambda comm: of(comm, names)))


def joined_digests(ranks):
    """One text per case; one digest if all ranks have the same."""
    rows = {name: [rank[name] for rank in ranks] for name in ranks[0]}
    return {name: row[0] if len(set(row)) == 1 else "/".join(row) for name, row in rows.items()}


def of_mpi(comm, names):
    """For ``launch.run_mpi``."""
    return {name: np.array(found) for name, found in of(comm, names).items()}


def of_virtual_ranks(size=3):
    """Of ``simulate``, whose parameters are those of all ranks."""
    found = {}
    for mode in (m for m in laws.MODES if m not in laws.APART):
        params = model(0)
        sim = simulate(size, laws.maker_for(mode, laws.sgd)(), threshold=60)
        for step in range(STEPS):
            laws.MODES[mode](sim, lambda r, step=step: pairs(laws.VirtualRank(r, size), params, step))  # noqa: B023
        found[mode] = digest(params, {"counter": sim.step_counter, "sent": sim.report()})
    return found


def on_doubles(size=2):
    """On doubles of GPUs, if they are installed (fixture ``arithmetic``)."""
    from doubles.ranks import on_gpus

    names = [*with_one_optimizer(), *ON_DOUBLES]
    return joined_digests(on_gpus(size, lambda comm: of(comm, names)))


def with_one_optimizer():
    """The names of the cases that are modes without options."""
    return [name for name in cases() if name.endswith((", sgd", ", plain"))]


def measured():
    """Of all that the file has; MPI ranks and doubles of GPUs are to have the digests of threads."""
    return {f"{size} threads": on_threads(size) for size in SIZES} | {"virtual ranks": of_virtual_ranks()}


def by_line(transport, names):
    """Names of cases by the line of the file that has their digests."""
    found = {}
    for name in names:
        line = transport if transport == "virtual ranks" else f"{transport}, {name.partition(', ')[0]}"
        found.setdefault(line, []).append(name)
    return found


def short(text):
    """A case's place in its line."""
    return hashlib.sha256(text.encode()).hexdigest()[:6]


def differences(transport, found):
    """The cases whose digests are others than the file's: what it has, and what there is."""
    frozen = json.loads(FILE.read_text())
    wrong = {}
    for line, names in by_line(transport, found if transport == "virtual ranks" else cases()).items():
        parts = frozen.get(line, "").split()
        if not found.keys().isdisjoint(names):
            assert len(parts) == len(names), f"{FILE.name} has {len(parts)} digests of {line}, not {len(names)}"
            wrong |= {
                name: (part, short(found[name]))
                for name, part in zip(names, parts, strict=True)
                if name in found and short(found[name]) != part
            }
    return wrong


if __name__ == "__main__":
    everything = {"3 threads": on_threads(3, with_one_optimizer())} if "modes" in sys.argv else measured()
    if "--check" in sys.argv:
        wrong = {transport: differences(transport, found) for transport, found in everything.items()}
        print(
            {transport: f"{len(found)} cases" for transport, found in everything.items()}, "differ:", json.dumps(wrong)
        )
        sys.exit(any(wrong.values()))
    texts = {
        line: " ".join(short(found[name]) for name in names)
        for transport, found in everything.items()
        for line, names in by_line(transport, found).items()
    }
    FILE.write_text(json.dumps(texts, indent=0) + "\n")
