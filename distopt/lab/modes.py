"""Compression modes by names that fit on a command line: ``dense``, ``topk=0.01``, ``chunks=64/4096+packed:2bit``."""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from distopt.checks import unknown_name
from distopt.compress import (
    Chunks,
    Compressor,
    DeepGradientCompression,
    Dense,
    ErrorFeedback,
    Half,
    Int4,
    Int8,
    OneBit,
    Packed,
    Threshold,
    TopK,
    TwoBit,
)
from distopt.compress.top_k import Sparse
from distopt.engine.outer_loop import Windows

DEFAULT = "dense", "half", "int8", "2bit", "topk=0.01", "dgc=0.001", "dgc=0.001+packed"
PLAIN: dict[str, Callable[[], Compressor]] = {
    "dense": Dense,
    "half": Half,
    "bfloat16": lambda: Half("bfloat16"),
    "int8": lambda: ErrorFeedback(Int8()),
    "int4": lambda: ErrorFeedback(Int4()),
    "1bit": lambda: ErrorFeedback(OneBit()),
}
NUMBERED = {"2bit": 0.5, "topk": 0.01, "threshold": 0.05, "dgc": 0.001}  # kinds with a number, and its default
CHUNKS = 64, 4096  # how many entries of how many elements
OPTIONS = {
    "topk": ("packed", "per-tensor"),
    "chunks": ("packed",),
    "threshold": ("packed",),
    "dgc": ("packed", "1d"),
}
SPARSE = "topk", "dgc"  # kinds whose number is a density


class Mode(NamedTuple):
    """A compressor and its name.

    Attributes:
        name: the text from which ``mode`` made it.
        compressor: the compressor that ``step(loss, compressor)`` takes, or ``LocalSteps``.
        windows: when there are exchanges: behind every step, or every so many local steps.

    Example:
        >>> from distopt.lab import mode
        >>> mode("topk=0.01").compressor
        ErrorFeedback(TopK(0.01, per_tensor=False))
        >>> mode("topk=0.01+packed").at_density(0.1).name
        'topk=0.1+packed'
        >>> mode("chunks=64/4096+packed:2bit").at_density(0.001).name
        'chunks=5/4096+packed:2bit'
        >>> mode("local=50+topk=0.01").windows.every
        50
    """

    name: str
    compressor: Compressor
    windows: Windows = Windows(1)

    @property
    def kind(self) -> str:
        """The name without its density, as ``topk+packed``; the full name if the mode has no density.

        Of chunks it says how many elements they have, as ``chunks/4096+packed``.
        """
        local, name = _apart(self.name)
        head, plus, options = name.partition("+")
        if chunk := self._chunk:
            return f"{local}chunks/{chunk[1]}{plus}{options}"
        return self.name if self.density is None else f"{local}{head.partition('=')[0]}{plus}{options}"

    @property
    def density(self) -> float | None:
        """The fraction of entries that is sent, in (0, 1]; None for modes that are not chosen by density."""
        if chunk := self._chunk:
            return chunk[0] / chunk[1]
        kind, _, number = _apart(self.name)[1].partition("+")[0].partition("=")
        return (float(number) if number else NUMBERED[kind]) if kind in SPARSE else None

    def at_density(self, density: float) -> "Mode":
        """Return the same mode with another density; chunks send as many entries as make it, rounded up."""
        local, kind = _apart(self.kind)
        head, plus, options = kind.partition("+")
        if chunk := self._chunk:
            return mode(f"{local}chunks={Chunks(*chunk).at_density(density).k}/{chunk[1]}{plus}{options}")
        return mode(f"{local}{head}={density!r}{plus}{options}")

    @property
    def _chunk(self) -> tuple[int, int] | None:
        """How many entries of how many elements are sent; None if the mode has no chunks."""
        kind, equals, number = _apart(self.name)[1].partition("+")[0].partition("=")
        return _chunk_of(number if equals else None, self.name) if kind == "chunks" else None

    @property
    def overlaps_backward(self) -> bool:
        """Whether buckets may travel during the backward pass.

        Stateful compressors may not: a step that is refused would already have changed their state.
        """
        return not self.compressor.stateful and self.windows.every == 1


def mode(text: str) -> Mode:
    """Parse a compression mode: ``kind[=number][+option]...``.

    * ``dense``, ``half`` (float16), ``bfloat16``, ``int8``, ``int4``, ``1bit``: no number.
    * ``2bit[=threshold]``, ``topk[=density]``, ``threshold[=magnitude]``, ``dgc[=density]``.
    * ``chunks[=k/of]``: k entries of each chunk of so many elements, 64 of 4096.
    * options: ``packed``, ``packed:bfloat16``, ``packed:int8`` or ``packed:2bit`` for the last four, ``per-tensor``
      for topk (dgc always selects per tensor), ``1d`` for dgc: tensors of one dimension are compressed too.
    * ``local=H`` or ``local=H+`` before any of these: an exchange every H local steps (``LocalSteps``); ``local=H/F``:
      in F fragments.

    All but dense, half and bfloat16 have error feedback.  Dgc (deep gradient compression) applies momentum itself, so
    the optimizer must have none.

    Raises:
        TypeError: ``text`` is no text.
        ValueError: the kind or an option is unknown (the text names the closest one), or the number is out of range.

    Example:
        >>> from distopt.lab import mode
        >>> mode("2bit=0.5").compressor
        ErrorFeedback(TwoBit(0.5))
        >>> mode("topk=0.01").density
        0.01
    """
    if not isinstance(text, str):
        raise TypeError(f"a mode must be a text, got {text!r}")
    local, rest = _apart(text.strip())
    if local:
        if rest.startswith("local"):
            raise ValueError(f"mode local must be with another mode behind it, got {text!r}")
        return mode(rest or "dense")._replace(name=text.strip(), windows=_windows_of(local, text))
    head, *options = text.strip().split("+")
    kind, equals, number = head.partition("=")
    kinds = (*PLAIN, *NUMBERED, "chunks", "local")
    if kind not in kinds or kind == "local":
        raise ValueError(unknown_name("mode", kind, kinds))
    packed = _checked(kind, options, text)
    if kind in PLAIN:
        if equals:
            raise ValueError(f"mode {kind} must be without a number, got {text!r}")
        return Mode(text.strip(), PLAIN[kind]())
    try:
        if kind == "chunks":
            chunks = Chunks(*_chunk_of(number if equals else None, text))
            return Mode(text.strip(), ErrorFeedback(Packed(chunks, value=packed) if packed else chunks))
        value = _number(kind, number, text) if equals else NUMBERED[kind]
        return Mode(text.strip(), _numbered(kind, value, options, packed))
    except (ValueError, TypeError) as error:
        raise type(error)(f"mode {text}: {error}") from None


def _apart(name: str) -> tuple[str, str]:
    """Return the part of a name that is about local steps, with its plus, and the rest; the first is '' without one."""
    head, plus, rest = name.partition("+")
    return (head + plus, rest) if head.startswith("local=") else ("", name)


def _windows_of(local: str, full_text: str) -> Windows:
    """Return the windows of a text like 'local=50' or 'local=50/5+'."""
    found = re.fullmatch(r"local=(\d{1,9})(?:/(\d{1,9}))?\+?", local)
    if not found:
        raise ValueError(f"mode local must be with a number of steps, as local=50 or local=50/5, got {full_text!r}")
    try:
        return Windows.checked(int(found[1]), int(found[2] or 1), 0)
    except ValueError as error:
        raise ValueError(f"mode {full_text}: {error}") from None


def modes(texts: str | Sequence[str]) -> list[Mode]:
    """Parse several modes, from one text with commas between them or from a sequence of texts.

    Raises:
        ValueError: there is none, or one is given twice; otherwise as ``mode``.

    Example:
        >>> from distopt.lab import modes
        >>> [m.name for m in modes("dense,topk=0.01")]
        ['dense', 'topk=0.01']
    """
    chosen = [mode(text) for text in (texts.split(",") if isinstance(texts, str) else texts)]
    kinds = [(m.kind, m.density) for m in chosen]
    twice = next((m.name for m in chosen if kinds.count((m.kind, m.density)) > 1), None)
    if twice or not chosen:
        raise ValueError(
            f"modes must be different, got {twice} twice" if twice else "modes must be at least one, got none"
        )
    return chosen


def _checked(kind: str, options: Sequence[str], text: str) -> str | None:
    """Return the number format in which a sparse mode's values are packed, None if it is not packed.

    Raises ValueError for an option that the kind does not have, or has twice.
    """
    packed = None
    for option in options:
        name, colon, value = option.partition(":")
        if name not in OPTIONS.get(kind, ()) or (colon and name != "packed"):
            raise ValueError(unknown_name(f"option of {kind}", option, OPTIONS.get(kind, ())))
        if name == "packed":
            packed = value if colon else "float16"
    if len({option.partition(":")[0] for option in options}) < len(options):
        raise ValueError(f"options of a mode must be different, got {text!r}")
    return packed


def _number(kind: str, text: str, full_text: str) -> float:
    if not re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", text, re.IGNORECASE):
        raise ValueError(f"mode {kind} must be with a number, as {kind}={NUMBERED[kind]}, got {full_text!r}")
    return float(text)


def _chunk_of(number: str | None, full_text: str) -> tuple[int, int]:
    """Return how many entries of how many elements a text like '64/4096' asks for; the usual ones for None."""
    if number is None:
        return CHUNKS
    if not re.fullmatch(r"\d{1,9}/\d{1,9}", number):
        raise ValueError(f"mode chunks must be with two numbers, as chunks=64/4096, got {full_text!r}")
    k, of = map(int, number.split("/"))
    return k, of


def _numbered(kind: str, value: float, options: Sequence[str], packed: str | None) -> Compressor:
    if kind == "2bit":
        return ErrorFeedback(TwoBit(value))
    selector: Sparse = Threshold(value) if kind == "threshold" else TopK(value, per_tensor="per-tensor" in options)
    if packed is not None:
        selector = Packed(selector, value=packed)
    if kind == "dgc":
        return DeepGradientCompression(selector, exclude_1d="1d" not in options)
    return ErrorFeedback(selector)
