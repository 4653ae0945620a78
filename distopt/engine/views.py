"""Views: arrays of the buckets themselves, for gradients that are never packed and parameters that all ranks share."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from distopt.engine.engine import Engine
from distopt.kernels.layout import FORMATS

Check = Callable[[list[str]], object]


def enroll(engine: Engine, params: Iterable[Any], verb: str, check: Check, planned: Iterable[Any] = ()) -> list[str]:
    """Learn the names of parameters, which are the same on all ranks, and make a plan of them.  Collective."""
    # verb: what this is for, in the vote; planned: parameters that the plan, if there is none, has before these.
    # An elastic job may make the call again.
    again = list(params) if engine.comm.membership else params
    collector = engine.store.collector

    def learn() -> list[str]:
        params = again
        if planned and not collector.order:
            params, first = list(params), {id(p): p for p in planned}
            collector.enroll([*first.values(), *(p for p in params if id(p) not in first)])
        names = collector.enroll(params)
        check(names)
        return names

    return _plan(engine, learn, verb)


def admit(engine: Engine, params: Sequence[Any], verb: str, check: Callable[[], object]) -> None:
    """Add parameters to a plan, which are the same on all ranks, in its order.  Collective."""

    def learn() -> list[str]:
        check()
        return engine.store.collector.admit(params)

    _plan(engine, learn, verb)


def _plan(engine: Engine, learn: Callable[[], list[str]], verb: str) -> list[str]:
    """Make a plan of the parameters that ``learn`` learns, and return their names.  Collective."""
    engine.check_open()

    def once() -> list[str]:
        names: list[str] = []
        error = None
        engine.sync_with_last_step()
        store = engine.store
        try:
            names = learn()
            if store.propose(store.threshold):
                engine.agreement.forget()
            engine.declare(verb)
            engine.agreement.declare_numbers(engine.nonfinite.lines())
        except Exception as e:
            error = e
        engine.agree(verb, 0, error)
        store.mark_stream()
        return names

    return engine.transaction(once)


def gradient_views(
    engine: Engine, params: Iterable[Any], check: Check = lambda names: None, planned: Iterable[Any] = ()
) -> list[np.ndarray]:
    """``DistOpt.gradient_views``.  Collective."""

    def check_all(names: list[str]) -> None:
        _check_wide(engine, names)
        check(names)

    names = enroll(engine, params, "gradient_views", check_all, planned)
    if engine.store.broadcast_due:
        engine.transaction(lambda: engine.store.broadcast_parameters(engine.progress.updates))
    return [engine.store.buckets.view(name) for name in names]


def parameter_views(engine: Engine, params: Iterable[Any], planned: Iterable[Any] = ()) -> list[np.ndarray]:
    """``DistOpt.parameter_views``.  Collective, unless they are shared already."""
    comm, store = engine.comm, engine.store
    engine.check_own_rank("parameter_views")

    def check(names: list[str]) -> None:
        _check_wide(engine, names)
        if not engine.optimizer.updates_shards:
            raise TypeError(f"the optimizer must be one of distopt.optim for parameter_views, got {engine.optimizer!r}")
        missing = [n for n in store.collector.order if n not in names]
        if missing:
            raise ValueError(f"params must be all parameters of the model, got none of {', '.join(missing[:5])}")

    if store.sharded:
        known = store.collector.enroll(params)
        check(known)
        return [store.buckets.parameters[name] for name in known]
    names = enroll(engine, params, "parameter_views", check, planned)

    def share() -> dict[str, np.ndarray]:
        engine.renew_plan()
        if engine.buddies:
            engine.buddies.divide()
        shared, values = store.share_parameters(), store.values
        if comm.rank == 0:
            for name in names:
                shared[name][...] = values[name]
        comm.barrier()
        return shared

    shared = comm.transaction(share, store.unshare_parameters)
    store.broadcast_due = False
    return [shared[name] for name in names]


def share_with_newcomers(engine: Engine) -> None:
    """Share parameters with ranks that have come, where all ranks have all of the optimizer's state.  Collective."""

    def share() -> None:
        store, agreement = engine.store, engine.agreement
        if engine.buddies:
            engine.buddies.divide()
        agreement.forget()
        store.propose(store.threshold)
        engine.declare("parameter_views")
        agreement.declare_numbers(engine.nonfinite.lines())
        agreement.vote("parameter_views", 0, part=", with ranks that have come")
        store.share_parameters()
        if store.proposed:
            store.commit()

    engine.comm.transaction(share)


def _check_wide(engine: Engine, names: list[str]) -> None:
    values = engine.store.values
    narrow = [n for n in names if values[n].dtype in FORMATS]
    if narrow:
        raise TypeError(f"{narrow[0]}: views must be of float32 or float64 parameters, got {values[narrow[0]].dtype}")
