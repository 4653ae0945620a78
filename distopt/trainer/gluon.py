"""Gluon's arguments: parameters in a dict, optimizers by name, compression in a dict, names of kvstores."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from distopt import optim
from distopt.checks import check_float, suggest
from distopt.comm import Communicator
from distopt.compress import Compressor, Dense, ErrorFeedback, Half, OneBit, TopK, TwoBit
from distopt.engine.parameters import Parameter
from distopt.exchange import EXCHANGES
from distopt.optim import Optimizer
from distopt.optim.arguments import arguments

# all of them mean all ranks of the communicator
KVSTORES = ("device", "local", "dist", "dist_sync", "dist_device_sync", "horovod", "byteps")
ALIASES = {"learning_rate": "lr", "lr_scheduler": "lr", "wd": "weight_decay", "beta1": "beta_1", "beta2": "beta_2"}
# of which None is none
RATES = {"learning_rate", "lr_scheduler"}
# of MXNet's optimizers: how they call kernels
IGNORED = ("aggregate_num", "use_fused_step")


def parameters(params: Any) -> list[Parameter]:
    """Return each parameter once: of a dict in the order of its keys, of a list or tuple in its own order."""
    if isinstance(params, dict):
        nameless = [key for key in params if not isinstance(key, str)]
        if nameless:
            raise TypeError(f"keys of params must be names, got {nameless[0]!r}")
        listed = [params[key] for key in sorted(params)]
    elif isinstance(params, list | tuple):
        listed = list(params)
    else:
        raise TypeError(f"params must be a dict, list or tuple of distopt.Parameter, got {type(params).__name__}")
    strangers = [p for p in listed if not isinstance(p, Parameter)]
    if strangers:
        raise TypeError(f"params must be distopt.Parameter, got {type(strangers[0]).__name__} among them")
    # Shared parameters are given more than once.
    once = {id(p): p for p in listed}.values()
    by_name: dict[str, Parameter] = {}
    for p in once:
        if by_name.setdefault(p.name, p) is not p:
            raise ValueError(f"{p.name}: two parameters have this name; names must be unique")
    return list(once)


def communicator(kvstore: Any, explicit: Communicator | None) -> Communicator | None:
    """Return the communicator that is meant, None for ``distopt.world()``."""
    if isinstance(kvstore, Communicator):
        if explicit is not None:
            raise ValueError("communicator must be None if kvstore is one, got two communicators; give one")
        return kvstore
    if kvstore is not None and (not isinstance(kvstore, str) or kvstore not in KVSTORES):
        raise ValueError(f"kvstore must be None, a communicator, or one of {KVSTORES}, got {kvstore!r}")
    if not isinstance(explicit, Communicator | None):
        raise TypeError(f"communicator must be a distopt.comm.Communicator or None, got {type(explicit).__name__}")
    return explicit


# --------------------------------------------------------------------------------------------------- optimizers


def optimizer(choice: Any, params: Mapping[str, Any] | None) -> Any:
    """Return an optimizer: the given one, or one of distopt's by its name in lower case, made with ``params``."""
    if not isinstance(params, Mapping | None):
        raise TypeError(f"optimizer_params must be a dict or None, got {type(params).__name__}")
    params = dict(params or {})
    if not isinstance(choice, str):
        if params:
            raise ValueError(
                f"optimizer_params must be empty for an optimizer object, got {sorted(params)} and {choice!r}"
            )
        return choice
    exported = {name.lower(): getattr(optim, name) for name in optim.__all__}
    rules = {
        name: rule
        for name, rule in exported.items()
        if isinstance(rule, type) and issubclass(rule, Optimizer) and not inspect.isabstract(rule)
    }
    if choice not in rules:
        raise ValueError(f"optimizer must be one of {sorted(rules)}, got {choice!r}{suggest(choice.lower(), rules)}")
    return rules[choice](**_arguments(choice, rules[choice], params))


def _arguments(name: str, rule: type[Optimizer], params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an optimizer's class, with Gluon's names replaced by distopt's."""
    known = arguments(rule, Optimizer)
    options: dict[str, Any] = {}
    given = {alias: value for alias, value in params.items() if alias not in IGNORED}
    given = {alias: value for alias, value in given.items() if value is not None or alias not in RATES}
    if given.keys() >= RATES:
        _rebase(given["lr_scheduler"], given.pop("learning_rate"))
    for alias, value in given.items():
        key = ALIASES.get(alias, alias)
        if key not in known:
            hint = suggest(alias, [*known, *ALIASES], 3)
            raise ValueError(f"optimizer_params of {name} must be among {sorted({*known})}, got {alias!r}{hint}")
        if key in options:
            duplicates = [other for other in given if ALIASES.get(other, other) == key]
            raise ValueError(
                f"optimizer_params must be given once, got {' and '.join(duplicates)}, which both mean {key}; give one"
            )
        options[key] = value
    return options


def _rebase(schedule: Any, learning_rate: Any) -> None:
    """Give a schedule, warm-up and end included, another base, as MXNet's optimizers do."""
    if not hasattr(schedule, "base_lr"):
        raise ValueError(
            f"lr_scheduler must have a base_lr, which becomes the learning_rate, if both are given, got {schedule!r}"
        )
    least = max(getattr(schedule, "warmup_begin_lr", 0.0), getattr(schedule, "stop_lr", 0.0))
    schedule.base_lr = check_float("learning_rate", learning_rate, least=least)


# --------------------------------------------------------------------------------------------------- compression


COMPRESSORS: dict[str, Callable[..., Compressor]] = {
    "none": lambda: Dense(),
    "fp16": lambda: Half(),
    "2bit": lambda threshold=0.5: ErrorFeedback(TwoBit(threshold)),
    "1bit": lambda threshold=0.0, scale="mean": ErrorFeedback(OneBit(threshold, scale)),
    "topk": lambda density: ErrorFeedback(TopK(density)),
}


def compressor(params: Mapping[str, Any] | None) -> Compressor:
    """Return the compressor of ``{'type': '2bit', 'threshold': 0.5}``, with error feedback for lossy types but fp16."""
    if params is None:
        return Dense()
    if not isinstance(params, Mapping):
        raise TypeError(f"compression_params must be a dict or None, got {type(params).__name__}")
    options = {name: value for name, value in params.items() if name != "exchange"}
    kind = options.pop("type", None)
    if not isinstance(kind, str) or kind not in COMPRESSORS:
        raise ValueError(f"the type of compression_params must be one of {tuple(COMPRESSORS)}, got {kind!r}")
    try:
        inspect.signature(COMPRESSORS[kind]).bind(**options)
    except TypeError as error:
        raise ValueError(f"compression_params of type {kind!r}: {error}") from None
    return COMPRESSORS[kind](**options)


def exchange(params: Mapping[str, Any] | None) -> str:
    """Return how payloads are exchanged: as ``{'exchange': ...}`` says, or by gather."""
    # A gather is what MXNet's servers do: they add up all that the workers have sent.
    chosen = "gather" if params is None else params.get("exchange", "gather")
    if chosen not in EXCHANGES:
        raise ValueError(f"the exchange of compression_params must be one of {', '.join(EXCHANGES)}, got {chosen!r}")
    return str(chosen)
