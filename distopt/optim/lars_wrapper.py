"""Layer-wise adaptive rates around any optimizer."""

import numpy as np

from distopt import device, kernels
from distopt.numbers import number, positive
from distopt.optim.arrays import check, widened
from distopt.optim.exclude import SUFFIXES, Exclude, described, left_out, predicate
from distopt.optim.norms import Norms
from distopt.optim.protocols import AnyOptimizer
from distopt.optim.wrapper import Wrapper
from distopt.tables import Members


class LarsWrapper(Wrapper):
    """LARS (You et al., 2017) in front of an optimizer, as MoXing's wrapper 'lars'.

    The inner one gets ``q (g + weight_decay w)`` for the gradient g of w, with the trust ratio
    ``q = ratio |w| / (|g| + weight_decay |w| + epsilon)`` of each tensor; q is 1 where a norm is 0, and for names that
    ``exclude`` (a predicate, or suffixes) leaves out.  Around SGD with momentum this is LARS itself as long as the
    learning rate stays: the buffer holds the q of the day when a gradient came, while the learning rate is today's; in
    You's rule both are of that day.

    Weight decay belongs to this wrapper: the inner optimizer's must be 0.  Norms are those of the gradients that
    arrive; so ``BatchGradients`` goes around this wrapper, and what compresses gradients acts before it.  The
    gradients of 16-bit parameters are float32 for the inner one.  On a GPU the host waits once for each
    parameter that is not left out, for its two norms.

    Raises TypeError or ValueError for a ``ratio`` that is not above 0, a ``weight_decay`` or ``epsilon`` that is
    negative or not finite, an ``opt`` that is no optimizer, or one with a weight decay of its own, also when that comes
    later.
    """

    def __init__(
        self,
        opt: AnyOptimizer,
        ratio: float = 0.001,
        weight_decay: float = 1e-4,
        epsilon: float = 0.0,
        exclude: Exclude = SUFFIXES,
    ):
        super().__init__(opt)
        self.ratio = positive("ratio", ratio)
        self.weight_decay, self.epsilon = number("weight_decay", weight_decay), number("epsilon", epsilon)
        self.excludes, self._norms = predicate(exclude), Norms()
        self.left_out: tuple[str, ...] = ()  # of a DistOpt's parameters
        self._refuse_decay_inside()

    def apply(self, name: str, value: np.ndarray, grad: np.ndarray) -> None:
        """Let the inner optimizer update one parameter by its scaled gradient; ``grad`` stays as it is.

        Raises TypeError or ValueError for a gradient that is not like the parameter, or one that cannot be updated.
        """
        check(name, value, grad)
        self._refuse_decay_inside()
        w, g = widened(value), widened(grad)
        d = device.copied(w)
        kernels.scale(d, self.weight_decay)
        kernels.accumulate(g, d)
        kernels.scale(d, self.trust(name, w, g))
        self._hand_over(name, value, d.reshape(value.shape))

    def check(self, members: Members) -> None:
        """As for all; and ``exclude`` is asked, before anything moves, so that ranks can agree on what it says."""
        super().check(members)
        self.left_out = left_out(self.left_out, members.names, self.excludes)

    def trust(self, name: str, w: np.ndarray, g: np.ndarray) -> float:
        """The trust ratio q of a parameter and its gradient, both flat, float32 or float64."""
        if self.excludes(name):
            return 1.0
        w_norm, g_norm = self._norms(w, g)
        if w_norm == 0 or g_norm == 0:
            return 1.0
        return self.ratio * w_norm / (g_norm + self.weight_decay * w_norm + self.epsilon)

    def _refuse_decay_inside(self) -> None:
        opt = self.opt
        while isinstance(opt, Wrapper) and not isinstance(opt, LarsWrapper):
            opt = opt.opt
        given = getattr(opt, "weight_decay", 0.0)
        decay = given(getattr(opt, "step_counter", 0)) if callable(given) else given
        if decay:
            inner = f"weight_decay of the {type(opt).__name__} inside"
            raise ValueError(f"weight decay belongs to LarsWrapper: {inner} must be 0, got {decay}")

    def _numbers(self) -> dict[str, float]:
        self._refuse_decay_inside()
        return {"ratio": self.ratio, "weight_decay": self.weight_decay, "epsilon": self.epsilon}

    def _says(self) -> str:
        numbers = f"ratio={self.ratio}, weight_decay={self.weight_decay}, epsilon={self.epsilon}"
        return f"{numbers}, exclude={described(self.excludes)}, left_out={self.left_out}"
