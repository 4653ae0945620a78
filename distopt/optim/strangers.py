"""Optimizers of others: how they are called, and what to write around those that cannot be called."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from distopt.device import describe

WAYS = {"apply": ("name", "value", "grad"), "update": ("param", "grad")}  # the methods and their arguments
WANTED = "opt must have apply(name, value, grad) or update(param, grad)"
WRAP_TORCH = """
    class Torch:
        def __init__(self, opt, model):
            self.opt, self.params = opt, dict(model.named_parameters())
        def apply(self, name, value, grad):  # value is params[name].detach().numpy(), in the memory of the model
            self.params[name].grad = torch.from_numpy(grad)
        def step(self):
            self.opt.step()
"""
WRAP_OPTAX = """
    class Optax:
        def __init__(self, transformation):
            self.transformation, self.states = transformation, {}
        def apply(self, name, value, grad):
            if name not in self.states:
                self.states[name] = self.transformation.init(value)
            change, self.states[name] = self.transformation.update(grad, self.states[name], value)
            value += np.asarray(change)
"""


def way(opt: Any) -> str:
    """The method by which an optimizer takes a gradient: 'apply' or 'update'.

    Raises TypeError for what has neither, or none that can be called with these arguments; it says what to write.
    """
    if isinstance(opt, type):
        raise TypeError(f"{WANTED}, got the class {opt.__name__}: make an instance of it")
    if isinstance(opt, Mapping):
        raise TypeError(f"{WANTED}, got a dict: its entries are arguments, as in SGD(**options)")
    if any(c.__module__.startswith("torch.optim") for c in type(opt).__mro__):
        raise TypeError(f"{WANTED}, got torch.optim.{type(opt).__name__}: wrap it in{WRAP_TORCH}")
    if isinstance(opt, tuple) and {"init", "update"} <= set(getattr(opt, "_fields", ())):
        raise TypeError(f"{WANTED}, got the optax transformation {type(opt).__name__}: wrap it in{WRAP_OPTAX}")
    methods = {name: getattr(opt, name) for name in WAYS if callable(getattr(opt, name, None))}
    for name, method in methods.items():
        if _takes(method, len(WAYS[name])):
            return name
    flaws = "".join(f", whose {name} is {name}{inspect.signature(method)}" for name, method in methods.items())
    raise TypeError(f"{WANTED}, got {describe(opt)}{flaws}")


def _takes(method: Callable[..., Any], count: int) -> bool:
    """Can it be called with so many arguments?"""
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):  # of something built in, which does not say
        return True
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True
