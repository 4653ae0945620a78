"""Gluon's words for things: parameters in a dict, optimizers by name, compression in a dict, names of kvstores."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from distopt import optim
from distopt.comm import Communicator
from distopt.compress import Compressor, Dense, ErrorFeedback, Half, OneBit, TopK, TwoBit
from distopt.gradients import Parameter
from distopt.names import nearest
from distopt.optim import Optimizer
from distopt.optim.arguments import arguments

KVSTORES = ("device", "local", "dist_sync")  # all of them are the ranks that there are
ALIASES = {"learning_rate": "lr", "lr_scheduler": "lr", "wd": "weight_decay", "beta1": "beta_1", "beta2": "beta_2"}


def parameters(given: Any) -> list[Parameter]:
    """Each parameter once: of a dict in the order of its keys, of a list or tuple in its own.

    Raises TypeError for anything else, and ValueError for two parameters of one name.
    """
    if isinstance(given, dict):
        if not all(isinstance(key, str) for key in given):
            raise TypeError(f"params must have names as keys, got {next(k for k in given if not isinstance(k, str))!r}")
        found = [given[key] for key in sorted(given)]
    elif isinstance(given, list | tuple):
        found = list(given)
    else:
        raise TypeError(f"params must be a dict, list or tuple of distopt.Parameter, got {type(given).__name__}")
    strangers = [p for p in found if not isinstance(p, Parameter)]
    if strangers:
        raise TypeError(f"params must be distopt.Parameter, among them is {type(strangers[0]).__name__}")
    once = {id(p): p for p in found}.values()  # shared parameters are given more than once
    by_name: dict[str, Parameter] = {}
    for p in once:
        if by_name.setdefault(p.name, p) is not p:
            raise ValueError(f"{p.name}: two parameters have this name; names must be unique")
    return list(once)


def communicator(kvstore: Any, given: Communicator | None) -> Communicator | None:
    """The communicator that is meant, None for ``distopt.world()``; ValueError for what there is not."""
    if isinstance(kvstore, Communicator):
        if given is not None:
            raise ValueError("kvstore and communicator are two communicators: give one")
        return kvstore
    if kvstore is not None and (not isinstance(kvstore, str) or kvstore not in KVSTORES):
        raise ValueError(f"kvstore must be None, a communicator, or one of {KVSTORES}, got {kvstore!r}")
    if not isinstance(given, Communicator | None):
        raise TypeError(f"communicator must be a distopt.comm.Communicator or None, got {type(given).__name__}")
    return given


# --------------------------------------------------------------------------------------------------- optimizers


def optimizer(given: Any, params: Mapping[str, Any] | None) -> Any:
    """An optimizer object, or one of distopt's by its name in lower case, made with ``params``.

    Raises ValueError for a name or an argument that there is not, for an argument under two names, and for arguments of
    an object that is there already; TypeError for ``params`` that are no dict.
    """
    if not isinstance(params, Mapping | None):
        raise TypeError(f"optimizer_params must be a dict or None, got {type(params).__name__}")
    params = dict(params or {})
    if not isinstance(given, str):
        if params:
            raise ValueError(f"optimizer_params {sorted(params)} are for an optimizer by name, got {given!r}")
        return given
    rules = {name.lower(): rule for name in optim.__all__ if _is_rule(rule := getattr(optim, name))}
    if given not in rules:
        raise ValueError(f"optimizer must be one of {sorted(rules)}, got {given!r}{nearest(given.lower(), rules)}")
    return rules[given](**_arguments(given, rules[given], params))


def _is_rule(thing: Any) -> bool:
    return isinstance(thing, type) and issubclass(thing, Optimizer) and not inspect.isabstract(thing)


def _arguments(name: str, rule: type[Optimizer], params: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a rule, by distopt's names."""
    known = arguments(rule, Optimizer)
    found: dict[str, Any] = {}
    for given, value in params.items():
        own = ALIASES.get(given, given)
        if own not in known:
            near = nearest(given, [*known, *ALIASES], 3)
            raise ValueError(f"{name} has the optimizer_params {sorted({*known})}, got {given!r}{near}")
        if own in found:
            both = [other for other in params if ALIASES.get(other, other) == own]
            raise ValueError(f"optimizer_params: {' and '.join(both)} are one thing, {own}: give one of them")
        found[own] = value
    return found


# --------------------------------------------------------------------------------------------------- compression


def _two_bit(threshold: float = 0.5) -> Compressor:
    return ErrorFeedback(TwoBit(threshold))


def _one_bit(threshold: float = 0.0, scale: str = "mean") -> Compressor:
    return ErrorFeedback(OneBit(threshold, scale))


def _top_k(density: float) -> Compressor:
    return ErrorFeedback(TopK(density))


COMPRESSORS: dict[str, Callable[..., Compressor]] = {
    "none": lambda: Dense(),
    "fp16": lambda: Half(),
    "2bit": _two_bit,
    "1bit": _one_bit,
    "topk": _top_k,
}


def compressor(params: Mapping[str, Any] | None) -> Compressor:
    """The compressor that ``{'type': '2bit', 'threshold': 0.5}`` means, with a memory where something is left behind.

    Raises TypeError for what is no dict, ValueError for an unknown type, and for an argument that it does not have.
    """
    if params is None:
        return Dense()
    if not isinstance(params, Mapping):
        raise TypeError(f"compression_params must be a dict or None, got {type(params).__name__}")
    options = dict(params)
    kind = options.pop("type", None)
    if not isinstance(kind, str) or kind not in COMPRESSORS:
        raise ValueError(f"compression_params must have a type, one of {tuple(COMPRESSORS)}, got {kind!r}")
    try:
        inspect.signature(COMPRESSORS[kind]).bind(**options)
    except TypeError as error:
        raise ValueError(f"compression_params of type {kind!r}: {error}") from None
    return COMPRESSORS[kind](**options)
