"""Layer-wise adaptive rates in front of any optimizer."""

import numpy as np

from distopt import device, kernels
from distopt.checks import check_float, check_positive
from distopt.kernels.layout import BucketLayout
from distopt.optim.arrays import check, widened
from distopt.optim.exclude import SUFFIXES, Exclude, described, left_out, predicate
from distopt.optim.norms import Norms
from distopt.optim.protocols import AnyOptimizer
from distopt.optim.wrapper import OptimizerWrapper


class LarsWrapper(OptimizerWrapper):
    """A wrapper that scales gradients by LARS's trust ratio (You et al., 2017), as MoXing's wrapper 'lars'.

    The inner optimizer gets ``q (g + weight_decay w)`` for the gradient g of w, with the trust ratio
    ``q = ratio |w| / (|g| + weight_decay |w| + epsilon)`` of each tensor; q is 1 where a norm is 0, and for excluded
    names.  Around SGD with momentum this is LARS itself as long as the learning rate stays constant: the momentum
    buffer holds gradients scaled by their q at the time, and the present learning rate multiplies all of them, while in
    You's rule each is multiplied by the learning rate of its own time.

    Weight decay belongs to this wrapper: the inner optimizer's must be 0.  Norms are those of the gradients that
    arrive.  So ``BatchGradients`` goes around this wrapper, and a compressor of gradients acts before it.  The inner
    optimizer gets the gradients of 16-bit parameters in float32.  On a GPU the host waits once for the two norms of
    each parameter that is not excluded.

    Args:
        opt: the inner optimizer, with ``apply(name, value, grad)`` or ``update(param, grad)``.
        ratio: the trust coefficient, above 0.
        weight_decay: at least 0.
        epsilon: at least 0.
        exclude: parameters with q = 1: a predicate on the name, or a list of suffixes; by default names that end in
            gamma, beta or bias.

    Raises:
        TypeError: ``opt`` is no optimizer, or an argument is no number.
        ValueError: a number is out of its range or not finite, or the inner optimizer has a weight decay, now or at a
            later update.

    Example:
        >>> import numpy as np
        >>> from distopt.optim import SGD, LarsWrapper
        >>> opt, w = LarsWrapper(SGD(lr=10.0), ratio=0.01, weight_decay=0.0), np.array([3.0, 4.0])
        >>> opt.apply("w", w, np.array([0.6, 0.8]))
        >>> opt.step()
        True
        >>> w.round(4).tolist()
        [2.7, 3.6]
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
        self.ratio = check_positive("ratio", ratio)
        self.weight_decay, self.epsilon = check_float("weight_decay", weight_decay), check_float("epsilon", epsilon)
        self.excludes, self._norms = predicate(exclude), Norms()
        # the excluded names among a DistOpt's parameters
        self.left_out: tuple[str, ...] = ()
        self._refuse_decay_inside()

    def apply(self, name: str, value: np.ndarray, grad: np.ndarray) -> None:
        """Update one parameter by the inner optimizer and its scaled gradient; ``grad`` stays as it is.

        Raises:
            TypeError: value or gradient is no array of floats, or they are not on the same host or GPU.
            ValueError: the gradient has another shape or dtype than the parameter, the parameter is read-only, or the
                inner optimizer has a weight decay.
        """
        check(name, value, grad)
        self._refuse_decay_inside()
        w, g = widened(value), widened(grad)
        d = device.copied(w)
        kernels.scale(d, self.weight_decay)
        kernels.accumulate(g, d)
        kernels.scale(d, self.trust(name, w, g))
        self.hand_over(name, value, d.reshape(value.shape))

    def check(self, members: BucketLayout) -> None:
        """Check that loaded states fit these parameters, and ask ``exclude`` about their names.

        Both happen before anything moves, so that ranks can agree on the answers, which are in ``left_out``.
        """
        super().check(members)
        self.left_out = left_out(self.left_out, members.names, self.excludes)

    def trust(self, name: str, w: np.ndarray, g: np.ndarray) -> float:
        """Return the trust ratio q of a parameter.

        Args:
            name: the parameter's name.
            w: its values, flat, float32 or float64.
            g: its gradient, of the same shape and dtype.
        """
        if self.excludes(name):
            return 1.0
        w_norm, g_norm = self._norms(w, g)
        if w_norm == 0 or g_norm == 0:
            return 1.0
        return self.ratio * w_norm / (g_norm + self.weight_decay * w_norm + self.epsilon)

    def _refuse_decay_inside(self) -> None:
        opt = self.opt
        while isinstance(opt, OptimizerWrapper) and not isinstance(opt, LarsWrapper):
            opt = opt.opt
        setting = getattr(opt, "weight_decay", 0.0)
        decay = setting(getattr(opt, "step_counter", 0)) if callable(setting) else setting
        if decay:
            inner = f"weight_decay of the {type(opt).__name__} inside"
            raise ValueError(f"{inner} must be 0, got {decay}; weight decay belongs to LarsWrapper")

    def own_numbers(self) -> dict[str, float]:
        self._refuse_decay_inside()
        return {"ratio": self.ratio, "weight_decay": self.weight_decay, "epsilon": self.epsilon}

    def settings_text(self) -> str:
        numbers = f"ratio={self.ratio}, weight_decay={self.weight_decay}, epsilon={self.epsilon}"
        return f"{numbers}, exclude={described(self.excludes)}, left_out={self.left_out}"
