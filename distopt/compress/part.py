"""What the laws, benchmarks, mode strings and documentation need to know of a compressor.

Numbers of laws and bugs are explained in docs/concepts/laws.md.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from distopt.compress.base import Compressor

NOTHING: Mapping[str, Any] = MappingProxyType({})


class Word(NamedTuple):
    """A word of mode strings, as ``topk`` in ``topk=0.01+packed`` (``distopt.lab.mode``).

    Args:
        make: returns the compressor; its arguments are the numbers, and a dict of the options, with what follows a
            colon or None.
        numbers: those of the word alone; a mode string may have others, with a slash in between.
        options: what may follow after a plus.
        sparse: numbers are a density, or how many entries of how many elements are sent.
    """

    make: Callable[..., Compressor]
    numbers: tuple[float, ...] = ()
    options: tuple[str, ...] = ()
    sparse: bool = False


class Try(NamedTuple):
    """A step that the laws are tried with: ``opt.step(loss, compressor, break_even, exchange)``.

    Args:
        compressor: what is sent.
        exchange: how.
        break_even: whether a bucket is sent as dense where that is less.
        any_buckets: buckets do not change its bits.
    """

    compressor: Compressor
    exchange: str = "auto"
    break_even: bool = True
    any_buckets: bool = False


class Timed(NamedTuple):
    """A compressor that benchmarks time.

    Args:
        make: returns the compressor, given the magnitude that the fraction ``density`` of the entries reaches.
        density: the fraction of entries that is sent, or that is sent as something else than 0.
        moved: bytes that are read and written for an element of float32, beside the payload: a step reads the gradient
            and the residual, and writes the residual.
        sent: bytes of the payload for an element, if they count.
    """

    make: Callable[[float], Compressor]
    density: float = 0.5
    moved: int = 12
    sent: float = 0.0


class Part(NamedTuple):
    """All that the rest of the library is to know of a compressor; an entry of ``distopt.compress.ALL``.

    Args:
        words: of mode strings, by name.
        laws: the steps that all laws are tried with, by name (``distopt.lab.laws``; ``both``).
        exact: of which kept and sent parts add up to the bit.
        rounded: of which they do within one unit in the last place.
        captured: of which a whole step can be a CUDA graph.
        timed: what benchmarks time, by the name of the row.
    """

    words: Mapping[str, Word] = NOTHING
    laws: Mapping[str, Try] = NOTHING
    exact: tuple[Compressor, ...] = ()
    rounded: tuple[Compressor, ...] = ()
    captured: tuple[Compressor, ...] = ()
    timed: Mapping[str, Timed] = NOTHING


def both(name: str, compressor: Compressor, **options: Any) -> dict[str, Try]:
    """Return steps of both exchanges by name: of the usual one, and of one in two phases."""
    return {name: Try(compressor, **options), f"{name} in two phases": Try(compressor, "two_phase")}
