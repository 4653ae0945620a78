"""Keyword arguments of optimizers: their names, and the names that other libraries give them."""

import inspect
from collections.abc import Mapping
from typing import Any

from distopt.checks import suggest

SPELLINGS = {  # names in torch, Keras, MXNet and optax, and the names that they may have here
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
    """Return the names of all keyword arguments of some classes, such as a rule and its base class, without repeats."""
    parameters = (p for c in classes for p in inspect.signature(c).parameters.values())
    return list(dict.fromkeys(p.name for p in parameters if p.kind is not p.VAR_KEYWORD))


def complaint(rule: str, unknown: Mapping[str, Any], accepted: list[str]) -> str:
    """Return the error text for keyword arguments that an optimizer does not take, with those it takes and a remedy.

    Args:
        rule: the name of the optimizer's class.
        unknown: the arguments that it does not take, of which the first is named.
        accepted: the names of the arguments that it takes.
    """
    name, value = next(iter(unknown.items()))
    translations = {n: text for n, text in _translated(name, value).items() if n in accepted}
    written = ", ".join(f"{n}={text!r:.30}" for n, text in translations.items())
    advice = f"; write {written}" if translations else suggest(name, accepted)
    return f"{rule} takes {', '.join(accepted)}, got {name}={value!r:.60}{advice}"


def _translated(name: str, value: Any) -> dict[str, Any]:
    """Return an argument of another library by the names that it may have here; empty if none is known."""
    if name == "betas" and isinstance(value, tuple | list) and len(value) == 2:
        return {"beta_1": value[0], "beta_2": value[1]}
    return dict.fromkeys(SPELLINGS.get(name, ()), value)
