"""SINGA's methods: the modes that reduce gradients, and the verbs of which loops written by hand are made."""

import functools
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from distopt import device, kernels
from distopt.buckets import Staging
from distopt.checks import check_bool
from distopt.comm.communicator import as_flat, check_operation, reduce_in_rank_order
from distopt.comm.voted import agree_on_arrays, by, reducible
from distopt.compress import (
    BucketContext,
    Compressor,
    ErrorFeedback,
    ExchangeContext,
    Half,
    Threshold,
    TopK,
)
from distopt.compress.state import RESIDUAL
from distopt.engine.facade import Facade
from distopt.engine.parameters import FLOATS, Loss, checked_gradient
from distopt.engine.spec import StepSpec, dense
from distopt.exchange.all_gather import gather
from distopt.exchange.all_reduce import reduce
from distopt.optim.adapters.base import Known

if TYPE_CHECKING:
    from distopt import lab
    from distopt.lab import Advice, Wire
    from distopt.lab.cost import Link


def with_compressor(compressor: Compressor | None, break_even: bool, exchange: str, over: str) -> StepSpec:
    """Return the step with a compressor; None for ``Dense()``."""
    chosen = dense() if compressor is None else compressor
    return StepSpec(lambda: chosen, break_even=break_even, exchange=exchange, over=over)


class SingaModes(Facade):
    """SINGA's modes that reduce gradients, each a step of one engine."""

    def run(self, loss: Any, spec: StepSpec) -> bool:
        """Make one step; tell if an update was applied.  Collective."""
        self.engine.let_in()
        return self.engine.step(loss, spec)

    def __call__(self, loss: Loss) -> bool:
        """``backward_and_update(loss)``."""
        return self.backward_and_update(loss)

    def backward_and_update(self, loss: Loss, threshold: int | None = None) -> bool:
        """Make one step with the mean of all ranks' gradients.  Collective.

        Args:
            loss: an iterable of (param, grad) pairs (a generator too), a callable that returns one, or an object whose
                ``backward()`` yields one.
            threshold: elements that fill a bucket; None for that of the constructor.

        Returns:
            True if an update was applied.

        Raises:
            TypeError: on every rank alike, for what is no loss, parameter or gradient on one of them.
            ValueError: on every rank alike, if ranks differ, or a parameter or gradient is not that of the first step.
            FloatingPointError: on every rank alike, for what is not finite, unless ``nonfinite`` says otherwise.

        Example:
            >>> import numpy as np
            >>> from distopt import DistOpt, Parameter
            >>> from distopt.optim import SGD
            >>> p, opt = Parameter("w", np.ones(2, np.float32)), DistOpt(SGD(0.5))
            >>> opt.backward_and_update([(p, np.ones(2, np.float32))])
            True
            >>> p.data
            array([0.5, 0.5], dtype=float32)
        """
        return self.run(loss, StepSpec(dense, threshold))

    def backward_and_update_half(
        self, loss: Loss, threshold: int | None = None, clipping: bool = False, clip_Value: float = 100
    ) -> bool:
        """Make one step with float16 payloads (``compress.Half``): half the bytes.  Collective.

        Args:
            loss: as for ``backward_and_update``.
            threshold: elements that fill a bucket; None for that of the constructor.
            clipping: hold every element of this rank's gradients between ``-clip_Value`` and ``clip_Value`` first.
            clip_Value: the bound.

        Returns:
            True if an update was applied.

        Example:
            >>> import numpy as np
            >>> from distopt import DistOpt, Parameter
            >>> from distopt.optim import SGD
            >>> p, opt = Parameter("w", np.ones(2, np.float32)), DistOpt(SGD(0.5))
            >>> opt.backward_and_update_half([(p, np.ones(2, np.float32))], clipping=True, clip_Value=0.5)
            True
            >>> p.data
            array([0.75, 0.75], dtype=float32)
        """
        return self.run(loss, StepSpec(Half, threshold, float(clip_Value) if clipping else None))

    def backward_and_sparse_update(
        self,
        loss: Loss,
        threshold: int | None = None,
        spars: float = 0.05,
        topK: bool = False,
        corr: bool = True,
        exchange: str = "gather",
    ) -> bool:
        """Make one step with the largest entries of the gradients.  Collective.

        Args:
            loss: as for ``backward_and_update``.
            threshold: elements that fill a bucket; None for that of the constructor.
            spars: with ``topK`` the fraction of each bucket's entries that is sent, otherwise the least magnitude.
            topK: send a fraction (``compress.TopK``) instead of what is large enough (``compress.Threshold``).
            corr: keep the rest as a residual, which is added to the next gradient (``compress.ErrorFeedback``);
                otherwise the rest is lost.
            exchange: as for ``step``; a gather by default, so that the sum is all that the ranks have sent.

        Returns:
            True if an update was applied.

        Example:
            >>> import numpy as np
            >>> from distopt import DistOpt, Parameter
            >>> from distopt.optim import SGD
            >>> p, opt = Parameter("w", np.ones(2, np.float32)), DistOpt(SGD(0.5))
            >>> opt.backward_and_sparse_update([(p, np.array([1, 3], np.float32))], spars=0.5, topK=True)
            True
            >>> p.data  # the smaller entry waits
            array([ 1. , -0.5], dtype=float32)
        """

        def make() -> Compressor:
            selector = TopK(spars) if topK else Threshold(spars)
            return ErrorFeedback(selector) if corr else selector

        return self.run(loss, StepSpec(make, threshold, exchange=exchange))

    def step(
        self,
        loss: Any,
        compressor: Compressor | None = None,
        break_even: bool = True,
        exchange: str = "auto",
        over: str = "ranks",
    ) -> bool:
        """Make one step with any compressor (``DistOpt.step``).  Collective."""
        return self.run(loss, with_compressor(compressor, break_even, exchange, over))

    def advise(
        self,
        link: "str | Link | Wire",
        ranks: int | None = None,
        modes: str | Sequence[str] | None = None,
        backward: float = 0.0,
        measure: bool = True,
    ) -> "Advice":
        """Find the mode that makes the exchange of this plan the fastest, and where it begins to pay (``distopt.lab``).

        Args:
            link: a name or a rate (``cost.link``), a ``Link``, a ``lab.Network``, or a ``fit.Fit``.
            ranks: number of ranks, or of the processes of logical ranks; None for that of the communicator.
            modes: as 'half,topk=0.01' (``lab.mode``); None for all that this optimizer can be given.
            backward: seconds of a backward pass, during which buckets of modes without a residual travel, unless this
                was made with ``overlap=False`` or accumulates batches.
            measure: time compression on this host; a GPU is faster.

        Returns:
            The advice, which can be printed.

        Raises:
            RuntimeError: there is no plan yet; make a step first.
            ValueError: a name does not exist, or a link is out of range.
            TypeError: an argument has the wrong type.

        Example:
            >>> import numpy as np
            >>> from distopt import DistOpt, Parameter
            >>> from distopt.optim import SGD
            >>> p, opt = Parameter("w", np.ones(2, np.float32)), DistOpt(SGD(0.5))
            >>> opt([(p, np.ones(2, np.float32))])
            True
            >>> print(opt.advise("1Gbit", ranks=8, modes="half", measure=False).best)  # doctest: +SKIP
        """
        from distopt import lab

        network, timed = lab.wire(link), lab.compute.measure if check_bool("measure", measure) else None
        buckets = [bucket.gradients for bucket in self.engine.store.buckets]
        lived = self.engine.comm.ranks
        asked, logical = self.engine.comm.size if ranks is None else ranks, lived.size if lived.logical else None
        overlap = self._arguments.get("overlap", "auto") is not False and self.engine.options.num_batches == 1

        def check(mode: "lab.Mode") -> None:
            self.engine.compressor_at_this_step(mode.compressor)

        return lab.advise(buckets, asked, network, modes, backward, timed, overlap, check, logical)


class SingaVerbs(Facade):
    """SINGA's verbs, each of which all ranks agree on before anything moves."""

    # Ranks that are in different verbs, or bring other shapes or dtypes, all raise the same ValueError.

    # What ``fused_all_reduce`` and its like send.
    _staging: Staging
    # Whether a parameter has been updated by hand since the last step.
    _updated = False

    def update(self, param: Any, grad: np.ndarray) -> None:
        """Take the mean of a summed gradient, in place, and update one parameter with it.

        Args:
            param: the parameter.
            grad: the sum over ranks of its gradients, of the parameter's shape and dtype.

        Raises:
            ValueError: there is a ``LossScaler``, ``clip_norm`` or ``gradient_hook``, or parameters are shared, which
                need whole steps.

        Example:
            >>> import numpy as np
            >>> from distopt import DistOpt, Parameter
            >>> from distopt.optim import SGD
            >>> p, opt = Parameter("w", np.ones(2, np.float32)), DistOpt(SGD(0.5))
            >>> grad = np.ones(2, np.float32)
            >>> opt.all_reduce(grad)
            >>> opt.update(p, grad)
            >>> opt.step()
            True
            >>> p.data
            array([0.5, 0.5], dtype=float32)
        """
        engine = self.engine
        engine.check_open()
        engine.check_own_rank("update")
        engine.resolve_last_step()
        if engine.nonfinite.policy.adapts:
            raise ValueError(
                "nonfinite must not be a LossScaler for update, which does not divide by its scale; use a step"
            )
        if option := engine.means.needs_all:
            raise ValueError(
                f"{option} must be None for update, which has the gradient of one parameter alone; use a step"
            )
        if engine.store.sharded:
            raise ValueError("parameters must not be shared for update, which changes them on every rank; use a step")
        name, value = engine.store.collector.identify(param)
        checked = checked_gradient(name, value, grad)
        if checked is None:
            raise TypeError(f"{name}: the gradient must be an array for update, got None")
        grad = checked
        if device.on_gpu(grad):
            kernels.scale(grad.reshape(-1), 1.0 / engine.comm.size)
        else:
            grad /= engine.comm.size
        engine.optimizer.follow({name: Known(param, value)})
        engine.optimizer.apply(name, param, value, grad)
        self._updated = True

    @overload
    def all_reduce(self, x: int, op: str = ...) -> int: ...
    @overload
    def all_reduce(self, x: float, op: str = ...) -> float: ...
    @overload
    def all_reduce(self, x: np.ndarray, op: str = ...) -> None: ...
    def all_reduce(self, x: Any, op: str = "sum") -> Any:
        """Replace an array, in place, by its sum over ranks, or return the sum of numbers.  Collective.

        Args:
            x: an array or a tensor, an int, whose sum is exact, or a float, which is added in rank order, as float64.
            op: 'sum', 'mean', 'min', 'max' or 'product', as ``Communicator`` has them; the mean of ints is a float.

        Returns:
            The sum of numbers; None for an array.

        Example:
            >>> from distopt import DistOpt
            >>> opt = DistOpt()
            >>> opt.all_reduce(2), opt.all_reduce(0.5, op="max")
            (2, 0.5)
        """
        is_number = isinstance(x, Real) and not isinstance(x, bool | np.bool_)
        if not is_number:
            for array in self._agree_on_arrays(by("all_reduce", op), [x], reducible(op)):
                self.engine.comm.all_reduce(array, op)
            return None
        self.engine.check_open()
        kind, convert = ("an int", int) if isinstance(x, Integral) else ("a float", float)
        comm, lines = self.engine.comm, [by("all_reduce", op), f"all_reduce of {kind}"]

        def text() -> str:
            check_operation(op, np.dtype(float))
            return json.dumps(convert(x))

        texts = comm.transaction(lambda: comm.control.gather_texts(lines, text))
        # Integers as objects, which are Python's, of any size.
        numbers = [np.array(json.loads(text), object if convert is int else float) for text in texts]
        return reduce_in_rank_order(numbers, op).item()

    def fused_all_reduce(self, xs: Iterable[np.ndarray], send: bool = True, op: str = "sum") -> None:
        """Replace arrays, in place, by their sums over ranks, in messages of ``buffSize`` elements.  Collective.

        Args:
            xs: the arrays.
            send: False only copies them into the staging memory; True copies as well if nothing was copied since the
                last send.
            op: as for ``all_reduce``.

        Raises:
            ValueError: ``xs`` are not the arrays that were copied before, in order; what was copied is dropped.

        Example:
            >>> import numpy as np
            >>> from distopt import DistOpt
            >>> opt = DistOpt()
            >>> x, y = np.ones(2), np.ones(3)
            >>> opt.fused_all_reduce([x, y])
            >>> y
            array([1., 1., 1.])
        """
        collective = functools.partial(self.engine.comm.all_reduce, op=op)
        self._fused(by("fused_all_reduce", op), xs, send, collective, reducible(op))

    def all_reduce_half(self, x: np.ndarray) -> None:
        """Replace a float32 or float64 array, in place, by its sum, sent as float16 (``compress.Half``).  Collective.

        Example:
            >>> import numpy as np
            >>> from distopt import DistOpt
            >>> opt = DistOpt()
            >>> x = np.ones(2, np.float32)
            >>> opt.all_reduce_half(x)
            >>> x
            array([1., 1.], dtype=float32)
        """
        for array in self._agree_on_arrays("all_reduce_half", [x]):
            self._reduce_half(array.reshape(-1))

    def fused_all_reduce_half(self, xs: Iterable[np.ndarray], send: bool = True) -> None:
        """Replace arrays, in place, by their sums, sent as float16; else as ``fused_all_reduce``.  Collective.

        Example:
            >>> import numpy as np
            >>> from distopt import DistOpt
            >>> opt = DistOpt()
            >>> x = np.ones(2, np.float32)
            >>> opt.fused_all_reduce_half([x])
            >>> x
            array([1., 1.], dtype=float32)
        """
        self._fused("fused_all_reduce_half", xs, send, self._reduce_half)

    def sparsification(self, x: np.ndarray, accumulation: np.ndarray | None, spars: float, topK: bool) -> None:
        """Replace an array, in place, by the sum over ranks of its largest entries.  Collective.

        Args:
            x: the array.
            accumulation: the residual, flat and of x's size and dtype, which is added first and keeps the rest; None
                drops the rest.
            spars: with ``topK`` the fraction of entries that is sent, otherwise the least magnitude.
            topK: send a fraction instead of what is large enough.

        Example:
            >>> import numpy as np
            >>> from distopt import DistOpt
            >>> opt = DistOpt()
            >>> x, residual = np.array([1.0, 3.0]), np.zeros(2)
            >>> opt.sparsification(x, residual, spars=0.5, topK=True)
            >>> x, residual
            (array([0., 3.]), array([1., 0.]))
        """
        self.fused_sparsification([x], accumulation, spars, topK)

    def fused_sparsification(
        self, xs: Iterable[np.ndarray], accumulation: np.ndarray | None, spars: float, topK: bool
    ) -> None:
        """Replace arrays of one dtype, taken as one, as ``sparsification`` does.  Collective.

        Args:
            xs: the arrays.
            accumulation: the residual of all of them, flat, of their dtype and of their sizes' sum; None drops the
                rest.
            spars: with ``topK`` the fraction of entries that is sent, otherwise the least magnitude.
            topK: send a fraction instead of what is large enough.

        Example:
            >>> import numpy as np
            >>> from distopt import DistOpt
            >>> opt = DistOpt()
            >>> x, y = np.array([1.0, 3.0]), np.array([2.0])
            >>> opt.fused_sparsification([x, y], None, spars=2.0, topK=False)
            >>> x, y
            (array([0., 3.]), array([2.]))
        """
        arrays = self._agree_on_arrays(
            f"sparsification, {spars=}, {topK=}, corr={accumulation is not None}",
            xs,
            lambda arrays: _check_sparse(arrays, accumulation, spars, topK),
        )
        if not arrays:
            return
        sizes = [a.size for a in arrays]
        flat = device.zeros(sum(sizes), arrays[0].dtype, arrays[0])
        parts = [flat[end - n : end] for n, end in zip(sizes, itertools.accumulate(sizes), strict=True)]
        for a, part in zip(arrays, parts, strict=True):
            device.copy(part, a)
        selector = TopK(spars) if topK else Threshold(spars)
        compressor = selector if accumulation is None else ErrorFeedback(selector)
        state = {} if accumulation is None else {RESIDUAL: accumulation}
        gather(flat, compressor, self.engine.comm, state, self._context(flat))
        self.engine.comm.wait()
        for a, part in zip(arrays, parts, strict=True):
            device.copy(a, part)

    def wait(self) -> None:
        """Make results of collectives visible to the caller's current stream; nothing to do without a GPU.

        Example:
            >>> from distopt import DistOpt
            >>> opt = DistOpt()
            >>> opt.wait()
        """
        self.engine.comm.wait()

    def broadcast(self, params: Iterable[Any]) -> None:
        """Replace parameters (or plain arrays), in place, by those of rank 0.  Collective.

        Example:
            >>> import numpy as np
            >>> from distopt import DistOpt, Parameter
            >>> from distopt.optim import SGD
            >>> p, opt = Parameter("w", np.ones(2, np.float32)), DistOpt(SGD(0.5))
            >>> opt.broadcast([p])
        """
        values = (p if device.is_array(p) or device.is_tensor(p) else getattr(p, "data", p) for p in params)
        for value in self._agree_on_arrays("broadcast", values):
            self.engine.comm.broadcast(value)

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Return rank ``root``'s plain value, as ``Communicator.broadcast_object``.  Collective.

        Example:
            >>> from distopt import DistOpt
            >>> opt = DistOpt()
            >>> opt.broadcast_object({"epoch": 3})
            {'epoch': 3}
        """
        self.engine.check_open()
        return self.engine.comm.broadcast_object(value, root)

    # -- details

    def _reduce_half(self, flat: np.ndarray) -> None:
        reduce(flat, Half(), self.engine.comm, {}, self._context(flat))

    def _context(self, flat: np.ndarray) -> ExchangeContext:
        """A call outside of a step, with fresh memory."""
        bucket = BucketContext(scratch=lambda name, nbytes: device.zeros(nbytes, np.uint8, flat))
        return ExchangeContext(0, self.engine.comm.rank, self.engine.comm.size, bucket=bucket)

    def _fused(
        self,
        verb: str,
        xs: Iterable[np.ndarray],
        send: bool,
        collective: Callable[[np.ndarray], None],
        check: Callable[[list[np.ndarray]], object] = lambda arrays: None,
    ) -> None:
        if not send:
            self.engine.check_open()
            arrays = list(map(device.array_of, xs))
            for x in arrays:
                as_flat(x, gpu=self.engine.comm.gpu)
            self._staging.fill(arrays)
            return

        def waited(piece: np.ndarray) -> None:
            # Copies of the piece come after it.
            collective(piece)
            self.engine.comm.wait()

        staging = self._staging
        try:
            take = staging.fill if staging.empty else staging.check
            checks = [check, take]
            arrays = self._agree_on_arrays(
                f"{verb} with buffSize={staging.capacity}", xs, lambda arrays: [each(arrays) for each in checks]
            )
            staging.send(arrays, waited)
        finally:
            staging.clear()

    def _agree_on_arrays(
        self, verb: str, xs: Iterable[np.ndarray], check: Callable[[list[np.ndarray]], object] = lambda arrays: None
    ) -> list[np.ndarray]:
        """The arrays, once all ranks are in the same verb with arrays of the same shapes and dtypes."""
        self.engine.check_open()
        return agree_on_arrays(self.engine.comm, verb, xs, check)


def _check_sparse(arrays: Sequence[np.ndarray], accumulation: np.ndarray | None, spars: float, topK: bool) -> None:
    """Raise TypeError or ValueError for arguments that this rank alone can find wrong."""
    TopK(spars) if topK else Threshold(spars)
    dtypes = {a.dtype for a in arrays}
    if len(dtypes) > 1 or not dtypes <= set(FLOATS):
        raise TypeError(f"arrays must be of one dtype, float32 or float64, got {sorted(map(str, dtypes))}")
    size = sum(a.size for a in arrays)
    if accumulation is not None and (accumulation.shape, {accumulation.dtype}) != ((size,), dtypes):
        wanted = f"({size},) {dtypes.pop()}"
        raise ValueError(f"accumulation must be {wanted}, got {accumulation.shape} {accumulation.dtype}")
