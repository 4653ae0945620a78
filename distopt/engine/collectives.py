"""The collectives that a step is made of, for loops written by hand: SINGA's names, each with its vote."""

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from numbers import Integral, Real
from typing import Any, overload

import numpy as np

from distopt import device
from distopt.buckets import Staging
from distopt.comm import Communicator, objects
from distopt.comm.communicator import as_flat
from distopt.comm.control import fingerprint
from distopt.compress import BucketContext, ErrorFeedback, ExchangeContext, Half, Threshold, TopK
from distopt.compress.state import RESIDUAL
from distopt.engine.parameters import FLOATS
from distopt.exchange.all_gather import gather
from distopt.exchange.all_reduce import reduce


class ManualCollectives:
    """Sums and broadcasts over a communicator that all ranks agree on before anything moves."""

    # Ranks that are in different verbs, or bring other shapes or dtypes, all raise the same ValueError.

    def __init__(self, comm: Communicator, capacity: int, check_open: Callable[[], None]):
        # capacity: elements of a message; check_open: raises what forbids a call.
        self._comm, self._check_open = comm, check_open
        self._staging = Staging(capacity)

    @overload
    def all_reduce(self, x: int) -> int: ...
    @overload
    def all_reduce(self, x: float) -> float: ...
    @overload
    def all_reduce(self, x: np.ndarray) -> None: ...
    def all_reduce(self, x: Any) -> Any:
        """Replace an array, in place, by its sum over ranks, or return the sum of numbers.  Collective."""
        # Integers have an exact sum, an int; floats are added in rank order, as float64.
        is_number = isinstance(x, Real) and not isinstance(x, bool | np.bool_)
        if not is_number:
            for array in self._agree_on_arrays("all_reduce", [x]):
                self._comm.all_reduce(array)
            return None
        self._check_open()
        kind, convert = ("an int", int) if isinstance(x, Integral) else ("a float", float)
        lines = ["all_reduce", f"all_reduce of {kind}"]
        texts = self._comm.transaction(
            lambda: self._comm.control.gather_texts(lines, lambda: objects.encode(convert(x)))
        )
        numbers: Iterator[int | float] = map(objects.decode, texts)
        # sum() compensates for rounding from Python 3.12 on.
        return functools.reduce(operator.add, numbers)

    def fused_all_reduce(self, xs: Iterable[np.ndarray], send: bool = True) -> None:
        """Replace arrays, in place, by their sums over ranks, in messages of ``buffSize`` elements.  Collective."""
        # `send=False` only copies them into the staging memory.  `send=True` fills as well if nothing was filled since
        # the last send; otherwise `xs` must be what was filled, in order, or ValueError is raised and what was filled
        # is dropped.
        self._fused("fused_all_reduce", xs, send, self._comm.all_reduce)

    def all_reduce_half(self, x: np.ndarray) -> None:
        """``all_reduce`` of a float32 or float64 array with float16 on the wire (``compress.Half``)."""
        for array in self._agree_on_arrays("all_reduce_half", [x]):
            self._reduce_half(array.reshape(-1))

    def fused_all_reduce_half(self, xs: Iterable[np.ndarray], send: bool = True) -> None:
        """``fused_all_reduce`` with float16 on the wire."""
        self._fused("fused_all_reduce_half", xs, send, self._reduce_half)

    def sparsification(self, x: np.ndarray, accumulation: np.ndarray | None, spars: float, topK: bool) -> None:
        """Replace an array, in place, by the sum over ranks of its largest entries.  Collective."""
        # `topK=True`: the `spars` fraction; otherwise what is at least `spars` in magnitude.  `accumulation`, flat and
        # of x's size and dtype, is the residual that is added first and keeps the rest; None drops the rest.
        self.fused_sparsification([x], accumulation, spars, topK)

    def fused_sparsification(
        self, xs: Iterable[np.ndarray], accumulation: np.ndarray | None, spars: float, topK: bool
    ) -> None:
        """``sparsification`` of several arrays of one dtype, taken as one."""
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
        gather(flat, compressor, self._comm, state, self._context(flat))
        self._comm.wait()
        for a, part in zip(arrays, parts, strict=True):
            device.copy(a, part)

    def _reduce_half(self, flat: np.ndarray) -> None:
        reduce(flat, Half(), self._comm, {}, self._context(flat))

    def _context(self, flat: np.ndarray) -> ExchangeContext:
        """A call outside of a step, with fresh memory."""
        bucket = BucketContext(scratch=lambda name, nbytes: device.zeros(nbytes, np.uint8, flat))
        return ExchangeContext(0, self._comm.rank, self._comm.size, bucket=bucket)

    def _fused(self, verb: str, xs: Iterable[np.ndarray], send: bool, collective: Callable[[np.ndarray], None]) -> None:
        if not send:
            self._check_open()
            arrays = list(map(device.array_of, xs))
            for x in arrays:
                as_flat(x, gpu=self._comm.gpu)
            self._staging.fill(arrays)
            return

        def waited(piece: np.ndarray) -> None:
            # Copies of the piece come after it.
            collective(piece)
            self._comm.wait()

        staging = self._staging
        try:
            check = staging.fill if staging.empty else staging.check
            arrays = self._agree_on_arrays(f"{verb} with buffSize={staging.capacity}", xs, check)
            staging.send(arrays, waited)
        finally:
            staging.clear()

    def wait(self) -> None:
        """Results of the verbs are visible to the caller's current stream; nothing to do without a GPU."""
        self._comm.wait()

    def broadcast(self, params: Iterable[Any]) -> None:
        """Rank 0's parameters (or plain arrays) to all ranks, in place."""
        values = (p if device.is_array(p) or device.is_tensor(p) else getattr(p, "data", p) for p in params)
        for value in self._agree_on_arrays("broadcast", values):
            self._comm.broadcast(value)

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Rank ``root``'s plain value, on every rank, as ``Communicator.broadcast_object``."""
        self._check_open()
        return self._comm.broadcast_object(value, root)

    def _agree_on_arrays(
        self, verb: str, xs: Iterable[np.ndarray], check: Callable[[list[np.ndarray]], None] | None = None
    ) -> list[np.ndarray]:
        """The arrays, once all ranks are in the same verb with arrays of the same shapes and dtypes."""
        self._check_open()
        error, lines = None, [verb]
        arrays: list[np.ndarray] = []
        try:
            for k, x in enumerate(map(device.array_of, xs)):
                as_flat(x, gpu=self._comm.gpu)
                arrays.append(x)
                lines.append(f"{verb} of array {k} = {x.shape} {x.dtype}")
            if check:
                check(arrays)
        except Exception as e:
            error = e
        self._comm.transaction(lambda: self._comm.control.vote(verb, fingerprint(lines), lambda: lines, error))
        return arrays


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
