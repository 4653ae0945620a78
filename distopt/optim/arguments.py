"""Keyword arguments of optimizers: their names, and the names that other libraries give them."""

import inspect
from collections.abc import Mapping
from typing import Any

from distopt.checks import suggest

# names in torch, Keras, MXNet and optax, and the names that they may have here
SPELLINGS = {
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
    """Return the error text for keyword arguments that an optimizer does not take, with those it takes and a remedy."""
    name, value = next(iter(unknown.items()))
    if name == "betas" and isinstance(value, tuple | list) and len(value) == 2:
        translations = {"beta_1": value[0], "beta_2": value[1]}
    else:
        translations = dict.fromkeys(SPELLINGS.get(name, ()), value)
    translations = {n: text for n, text in translations.items() if n in accepted}
    written = ", ".join(f"{n}={text!r:.30}" for n, text in translations.items())
    advice = f"; write {written}" if translations else suggest(name, accepted)
    return f"{rule} takes {', '.join(accepted)}, got {name}={value!r:.60}{advice}"
