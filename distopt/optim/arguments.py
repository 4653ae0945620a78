"""The arguments of an optimizer, and what other libraries call them."""

import inspect
from collections.abc import Mapping
from typing import Any

from distopt.names import nearest

SPELLINGS = {  # of torch, Keras, MXNet and optax, and what they may be here
    "alpha": ("rho",),
    "b1": ("beta_1",),
    "b2": ("beta_2",),
    "beta1": ("beta_1",),
    "beta2": ("beta_2",),
    "decay": ("rho", "weight_decay"),
    "eps": ("epsilon",),
    "learning_rate": ("lr",),
    "lr_scheduler": ("lr",),
    "wd": ("weight_decay",),
}


def arguments(*classes: type) -> list[str]:
    """The names of all arguments that one of these classes takes, a rule and what it is made of."""
    parameters = (p for c in classes for p in inspect.signature(c).parameters.values())
    return list(dict.fromkeys(p.name for p in parameters if p.kind is not p.VAR_KEYWORD))


def complaint(rule: str, given: Mapping[str, Any], known: list[str]) -> str:
    """The text for arguments that a rule does not take: those that it does, and what to write."""
    name, value = next(iter(given.items()))
    own = {n: v for n, v in _translated(name, value).items() if n in known}
    written = ", ".join(f"{n}={v!r:.30}" for n, v in own.items())
    advice = f"; write {written}" if own else nearest(name, known)
    return f"{rule} takes {', '.join(known)}, got {name}={value!r:.60}{advice}"


def _translated(name: str, value: Any) -> dict[str, Any]:
    """An argument of another library, by the names that it may have here."""
    if name == "betas" and isinstance(value, tuple | list) and len(value) == 2:
        return {"beta_1": value[0], "beta_2": value[1]}
    return dict.fromkeys(SPELLINGS.get(name, ()), value)
