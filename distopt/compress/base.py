"""The interface of compressors.

Law 1, for every compressor and every x: before == after + decompress(compress(before))          (conservation)

Numbers of laws and bugs are explained in docs/concepts/laws.md.
"""

import abc
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from distopt import device
from distopt.checks import check_int
from distopt.compress.context import ExchangeContext, layout_of
from distopt.compress.shards import ShardCodec
from distopt.compress.state import State
from distopt.compress.traits import TraitsAsAttributes
from distopt.device import DeviceMirror
from distopt.kernels.breakdown import LazyBreakdown, PayloadBreakdown
from distopt.kernels.layout import BucketLayout


class Compressor(TraitsAsAttributes, abc.ABC):
    """A rule of what to send of a gradient; ``distopt.exchange`` derives the collective from its ``traits``.

    A subclass defines ``payload_bytes``, ``compress`` and ``decompress``, and says in ``traits`` what it is;
    ``distopt.compress.check`` tries it.  Compressors have no state of their own, since threads that are ranks
    may share one; all ranks use equal ones, which their ``repr`` tells.

    Arrays are those of a bucket, flat, float32 or float64, and may be empty.  Members of it, the gradients of
    parameters, lie where ``context.layout`` says; gaps between them are zero, and must stay so, or the next step has
    what was written there.  On the host a NaN or infinity is refused or skipped before ``compress`` sees it, unless
    ``nonfinite='propagate'``: it should arrive, and must not stay in x.

    Attributes:
        traits: what it is, by which the exchange is chosen; all are False by default.

    Example:
        >>> import numpy as np
        >>> from distopt.compress import ErrorFeedback, Traits, check
        >>> class Whole(Compressor):
        ...     traits = Traits(summable=True)  # numbers of ranks are added on the wire
        ...
        ...     def payload_bytes(self, n, itemsize=4, layout=None):
        ...         return itemsize * n
        ...
        ...     def compress(self, x, state, context, add=None):
        ...         if add is not None:  # with ErrorFeedback, the gradient; x is what was left behind before
        ...             x += add
        ...         payload = np.trunc(x)
        ...         x[...] = np.where(np.isfinite(x), x - payload, 0)  # what is sent is taken out, a NaN too
        ...         return payload
        ...
        ...     def decompress(self, payload, out, context):
        ...         out[...] = payload  # a sum overwrites
        >>> x = np.array([3.5, -2.25, 0], np.float32)
        >>> Whole().compress(x, {}, ExchangeContext()), x
        (array([ 3., -2.,  0.], dtype=float32), array([ 0.5 , -0.25,  0.  ], dtype=float32))
        >>> check(ErrorFeedback(Whole()))
    """

    @abc.abstractmethod
    def payload_bytes(self, n: int, itemsize: int = 4, layout: BucketLayout | None = None) -> int | None:
        """Return the bytes of the payload of a flat array, an int; None if they depend on the data, so ``ragged``.

        A payload of another length is refused before it is sent.

        Args:
            n: elements of the array; gaps between its members count.
            itemsize: bytes of an element.
            layout: where its members lie, if it has several.

        Raises:
            ValueError: the array is too large.
        """

    def sketch_bytes(self, n: int, itemsize: int = 4, layout: BucketLayout | None = None) -> int:
        """Return the bytes of what ``sketch`` returns; arguments are those of ``payload_bytes``."""
        return 0

    def sketch(self, x: np.ndarray, state: State, context: ExchangeContext) -> np.ndarray | None:
        """Return what ranks add up before they compress, so that they compress alike; by default None, nothing.

        The sum is ``context.sketch`` of ``compress`` and ``decompress``.  What is needed of x after it must be in a
        state by then: ranks may share the memory of x.

        Args:
            x: as of ``compress``.
            state: as of ``compress``.
            context: as of ``compress``.

        Returns:
            Numbers of a dtype that is summed on the wire, flat, in memory of ``context.scratch``; the compressor is
            ``summable``.
        """
        return None

    @abc.abstractmethod
    def compress(self, x: np.ndarray, state: State, context: ExchangeContext) -> np.ndarray:
        """Move the part that is worth sending out of x, and leave the rest in x.

        ``ErrorFeedback`` gives one more argument, ``add``, of x's shape: x is the residual then, and the compressor
        must first add ``add`` to it (``Lossy``).

        Args:
            x: the gradients of a bucket, ``(n,)``, float32 or float64.
            state: what this rank keeps of the bucket, empty at first: arrays of x's size and dtype by name, as
                'residual' and 'velocity'.  DistOpt saves them, and moves them by parameter when buckets change.
            context: the updates so far (``step``), ``rank`` and ``size``, the bucket's ``layout`` and its memory
                (``scratch``).

        Returns:
            The payload, flat and contiguous, of any dtype; if ``summable`` of a dtype that is summed on the wire
            (float16, bfloat16, float32, float64, int32, int64 or uint8), or x itself.  It may be memory of
            ``context.scratch``.
        """

    @abc.abstractmethod
    def decompress(self, payload: np.ndarray, out: np.ndarray, context: ExchangeContext) -> None:
        """Write a payload to ``out``: overwrite it if ``summable``, add to it if not.

        Args:
            payload: what ``compress`` returned on any rank, or the sum over ranks of that if ``summable``, of the same
                dtype.
            out: ``(n,)``, of x's dtype: what ``compress`` has left in x if ``summable``, and the sum so far if not.
            context: as of ``compress``, on this rank.
        """

    def decompress_all(self, payloads: Sequence[np.ndarray], out: np.ndarray, context: ExchangeContext) -> None:
        """Overwrite ``out`` by the sum of payloads that are not ``summable``, added in their order.

        Args:
            payloads: what ``compress`` returned, in the order of ranks.
            out: ``(n,)``, float32 or float64.
            context: as of ``compress``.
        """
        device.clear(out)
        for payload in payloads:
            self.decompress(payload, out, context)

    def breakdown(self, payload: np.ndarray | None, x: np.ndarray, context: ExchangeContext) -> LazyBreakdown:
        """Read now what is needed of a payload to say later what it consists of: by default of values alone.

        The payload may be overwritten in between, and no ledger may hold on to it.

        Args:
            payload: what ``compress`` returned; None for what is known of a payload before there is one.
            x: the flat array that it was made of, ``(n,)``, for its size, dtype and device.
            context: as of ``compress``.

        Example:
            >>> import numpy as np
            >>> from distopt.compress import ExchangeContext, TopK
            >>> x = np.array([1, -5, 2, 4], np.float32)
            >>> payload = TopK(0.5).compress(x, {}, ExchangeContext())
            >>> TopK(0.5).breakdown(payload, x, ExchangeContext())()
            PayloadBreakdown(values=8, indices=8, ideal=67, counts=array([2]))
        """
        known = self.payload_bytes(x.size, x.itemsize, layout_of(x, context)) if payload is None else payload.nbytes
        return lambda: PayloadBreakdown(known or 0)

    def sharded(self) -> ShardCodec | None:
        """Return how it takes part in a two-phase exchange (``shards``); None: its payloads are gathered."""
        return None

    def at_step(self, k: int) -> "Compressor":
        """Return the compressor that update k is made with; k is 0 for the first."""
        return self

    def begin(self, x: np.ndarray, state: State, context: ExchangeContext) -> None:
        """Prepare a bucket before it is compressed.

        Args:
            x: as of ``compress``.
            state: as of ``compress``.
            context: as of ``compress``.
        """

    def finish(self, total: np.ndarray, state: State, context: ExchangeContext) -> None:
        """Add to the sum over ranks, before it is divided by ``context.divisor``.

        Args:
            total: the sum, ``(n,)``, float32 or float64, which may be changed.
            state: as of ``compress``.
            context: as of ``compress``.
        """

    def uncompressed(self, layout: BucketLayout, context: ExchangeContext) -> DeviceMirror | None:
        """Return which members stay in x, to be summed as they are: a number each, 1 for those; None: no member does.

        All ranks must return the same.
        """
        return None

    def __repr__(self) -> str:
        """Return the class and its public attributes, as a text that is the same on all ranks, which compare it.

        A subclass whose attributes do not tell all that it does, or have no such text, defines its own.

        Example:
            >>> from distopt.compress import Dense
            >>> class Scaled(Dense):
            ...     __repr__ = Compressor.__repr__
            ...
            ...     def __init__(self, factor):
            ...         self.factor = factor
            >>> Scaled(0.5)
            Scaled(factor=0.5)
        """
        shown = (
            f"{name}={value!r}" for name, value in vars(self).items() if not (name.startswith("_") or name == "traits")
        )
        return f"{type(self).__name__}({', '.join(shown)})"


class Lossy(Compressor):
    """A compressor that leaves something behind, and so can have a memory (``ErrorFeedback``)."""

    @abc.abstractmethod
    def compress(
        self, x: np.ndarray, state: State, context: ExchangeContext, add: np.ndarray | None = None
    ) -> np.ndarray:
        """Move what is worth sending out of x + ``add``, the memory and a new gradient; leave the rest in x."""


def threshold_of_sum(threshold: float, ranks: int, most: float = sys.float_info.max) -> float:
    """Return a threshold for sums over so many ranks: so many times as large, or the largest number that there is."""
    return max(-most, min(threshold * ranks, most))


def of_sum(compressor: Compressor, ranks: int) -> Compressor:
    """Return the same for sums over so many ranks, of whose means it takes what this one takes of gradients.

    That is its method ``of_sum(ranks)``, if it has one: a threshold grows with the ranks, a density does not.
    """
    found: Compressor = getattr(compressor, "of_sum", lambda ranks: compressor)(ranks)
    return found


def interchangeable(one: Compressor, other: Compressor) -> bool:
    """Tell if two compressors do the same, as far as they are of this library: others may keep what no repr tells.

    Example:
        >>> from distopt.compress import ErrorFeedback, TopK
        >>> [interchangeable(ErrorFeedback(TopK(k)), ErrorFeedback(TopK(0.1))) for k in (0.1, 0.2)]
        [True, False]
    """
    return type(one) is type(other) and _is_ours(one) and _is_ours(other) and repr(one) == repr(other)


def _is_ours(compressor: Compressor) -> bool:
    within = [value for name, value in vars(compressor).items() if name[0] != "_" and isinstance(value, Compressor)]
    return type(compressor).__module__.startswith("distopt.compress.") and all(map(_is_ours, within))


def at_density(compressor: Compressor, density: float) -> Compressor:
    """Return the same with another density, by its method ``at_density(density)``; TypeError if it has none."""
    if not hasattr(compressor, "at_density"):
        raise TypeError(f"a compressor must have a density, got {compressor!r}")
    found: Compressor = compressor.at_density(density)
    return found


def count_selected(compressor: Compressor, x: np.ndarray, counts: np.ndarray) -> None:
    """Add to ``counts[0]``, an int64, for how many entries of x there must be room on a GPU: by default for all.

    A ``bounded`` compressor has a method ``count_selected(x, counts)`` if it knows better.
    """
    if hasattr(compressor, "count_selected"):
        compressor.count_selected(x, counts)
    else:
        counts += x.size


def sketched(compressor: Compressor, x: np.ndarray, state: State, context: ExchangeContext) -> ExchangeContext:
    """Return the call of ``compress`` by one rank alone, whose sketch is the sum."""
    return context._replace(sketch=compressor.sketch(x, state, context))


def compressed_members(compressor: Compressor, layout: BucketLayout, context: ExchangeContext) -> BucketLayout:
    """Return the members of a bucket that are compressed; the others are summed as they are."""
    uncompressed = compressor.uncompressed(layout, context)
    return layout if uncompressed is None else layout.select(uncompressed.host == 0)


def payload_nbytes(compressor: Compressor, n: int, itemsize: int = 4, layout: BucketLayout | None = None) -> int | None:
    """Return the bytes of a payload without members that are summed as they are; None if they depend on the data."""
    nbytes = compressor.payload_bytes(n, itemsize, layout)
    if nbytes is None and compressor.traits.ragged:
        return None
    if nbytes is None:
        raise ValueError(f"{compressor!r}.payload_bytes({n}, {itemsize}) must be an integer unless ragged, got None")
    if type(nbytes) is not int or nbytes < 0:  # each bucket asks at each step, and a repr takes longer than the answer
        nbytes = check_int(f"{compressor!r}.payload_bytes({n}, {itemsize})", nbytes, least=0)
    layout = layout or BucketLayout(["x"], [(n,)], [0], f"f{itemsize}")
    mask = compressor.uncompressed(layout, ExchangeContext())
    return nbytes if mask is None else nbytes - itemsize * int(layout.records["size"][mask.host != 0].sum())


def check_compressor(compressor: Any) -> None:
    """Raise TypeError for an object that is no ``Compressor``."""
    if Compressor not in type(compressor).__mro__:
        raise TypeError(f"compressor must derive from distopt.compress.Compressor, got {compressor!r:.60}")
