"""Foreign optimizers, of other libraries: how they are called."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from distopt.device import describe

# the methods and their arguments
PROTOCOLS = {"apply": ("name", "value", "grad"), "update": ("param", "grad")}
WANTED = "opt must be an object with apply(name, value, grad) or update(param, grad)"


# what every optimizer of torch has
TORCHS = "param_groups", "step", "zero_grad", "state_dict", "load_state_dict"


def is_torchs(opt: Any) -> bool:
    """Tell if an optimizer is one of ``torch.optim``, derives from one, or wraps one and is used as it is."""
    return any(c.__module__.startswith("torch.optim") for c in type(opt).__mro__) or (
        not isinstance(opt, type) and all(hasattr(opt, name) for name in TORCHS)
    )


def is_transformation(opt: Any) -> bool:
    """Tell if an optimizer is a transformation of optax, which has ``init`` and ``update(grads, state, params)``."""
    init, update = (getattr(opt, name, None) for name in ("init", "update"))
    return callable(init) and callable(update) and _takes(init, 1) and _takes(update, 3)


def refuse_closure(opt: Any) -> None:
    """Raise TypeError for an optimizer of torch whose ``step`` needs a closure."""
    # A scheduler that was made before has replaced the optimizer's own by a function with the signature of the class's.
    of_class = getattr(type(opt), "step", None)
    if not (_takes(opt.step, 0) or (of_class and _takes(of_class, 1))):
        raise TypeError(
            f"opt must be an optimizer whose step() can be called without a closure, got {type(opt).__name__}; use "
            "distopt.torch.synchronize(model), and give its step() a closure that returns the mean loss over ranks"
        )


def call_style(opt: Any) -> str:
    """Return the name of the method by which an optimizer takes a gradient: 'apply' or 'update'."""
    if isinstance(opt, type):
        raise TypeError(f"{WANTED}, got the class {opt.__name__}; make an instance of it")
    if isinstance(opt, Mapping):
        raise TypeError(f"{WANTED}, got a dict; its entries are arguments, as in SGD(**options)")
    if is_transformation(opt):
        raise TypeError(f"{WANTED}, got the optax transformation {type(opt).__name__}; give it to DistOpt itself")
    methods = {name: getattr(opt, name) for name in PROTOCOLS if callable(getattr(opt, name, None))}
    for name, method in methods.items():
        if _takes(method, len(PROTOCOLS[name])):
            return name
    flaws = "".join(f", whose {name} is {name}{inspect.signature(method)}" for name, method in methods.items())
    raise TypeError(f"{WANTED}, got {describe(opt)}{flaws}")


class StateMethods(NamedTuple):
    """The methods by which an optimizer returns its states and loads them, under PyTorch's names or SINGA's."""

    save: Callable[[], Any] | None
    load: Callable[[Any], Any] | None


def state_methods(opt: Any) -> StateMethods:
    """Return the methods of an optimizer's states; where it has both names, those of PyTorch."""
    return StateMethods(
        getattr(opt, "state_dict", getattr(opt, "get_states", None)),
        getattr(opt, "load_state_dict", getattr(opt, "set_states", None)),
    )


def _takes(method: Callable[..., Any], count: int) -> bool:
    """Tell if a method can be called with so many positional arguments."""
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):
        # a built-in has no signature
        return True
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True
