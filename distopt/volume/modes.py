"""What a step may send, by a name that fits on a command line: ``dense``, ``topk=0.01``, ``dgc=0.001+packed:int8``."""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from distopt.compress import (
    Compressor,
    DeepGradientCompression,
    Dense,
    ErrorFeedback,
    Half,
    OneBit,
    Packed,
    Threshold,
    TopK,
    TwoBit,
)
from distopt.compress.sparse import Sparse
from distopt.names import unknown

DEFAULT = "dense", "half", "2bit", "topk=0.01", "dgc=0.001", "dgc=0.001+packed"
PLAIN: dict[str, Callable[[], Compressor]] = {
    "dense": Dense,
    "half": Half,
    "bfloat16": lambda: Half("bfloat16"),
    "1bit": lambda: ErrorFeedback(OneBit()),
}
NUMBERED = {"2bit": 0.5, "topk": 0.01, "threshold": 0.05, "dgc": 0.001}  # and what the number is, if it is not given
OPTIONS = {"topk": ("packed", "per-tensor"), "threshold": ("packed",), "dgc": ("packed", "1d")}
SPARSE = "topk", "dgc"  # whose number is a density


class Mode(NamedTuple):
    """A compressor, and what it is called."""

    name: str
    compressor: Compressor

    @property
    def kind(self) -> str:
        """The name, but for a density."""
        head, plus, options = self.name.partition("+")
        return self.name if self.density is None else f"{head.partition('=')[0]}{plus}{options}"

    @property
    def density(self) -> float | None:
        """The fraction of entries that is sent, if the mode is one of that."""
        kind, _, number = self.name.partition("+")[0].partition("=")
        return (float(number) if number else NUMBERED[kind]) if kind in SPARSE else None

    def at_density(self, density: float) -> "Mode":
        """The same mode, with another fraction."""
        head, plus, options = self.kind.partition("+")
        return mode(f"{head}={density!r}{plus}{options}")

    @property
    def hides(self) -> bool:
        """May buckets travel while the backward pass goes on?  Not if a refused step would have changed a memory."""
        return not self.compressor.stateful


def mode(text: str) -> Mode:
    """The mode of a text: ``kind[=number][+option]...``.

    * ``dense``, ``half`` (float16), ``bfloat16``, ``1bit``: no number.
    * ``2bit[=threshold]``, ``topk[=density]``, ``threshold[=magnitude]``, ``dgc[=density]``.
    * options: ``packed``, ``packed:bfloat16`` or ``packed:int8`` for the last three, ``per-tensor`` for topk (as dgc
      always is), ``1d`` for dgc: tensors of one dimension are compressed too.

    But for dense, half and bfloat16, all have error feedback; dgc has the momentum that the optimizer must not have.

    Raises ValueError with the closest name for what there is not, and what the compressor raises for its number.
    """
    if not isinstance(text, str):
        raise TypeError(f"a mode must be a text, got {text!r}")
    head, *options = text.strip().split("+")
    kind, equals, number = head.partition("=")
    if kind not in (*PLAIN, *NUMBERED):
        raise ValueError(unknown("mode", kind, (*PLAIN, *NUMBERED)))
    packed = _checked(kind, options, text)
    if kind in PLAIN:
        if equals:
            raise ValueError(f"mode {kind} has no number, got {text!r}")
        return Mode(text.strip(), PLAIN[kind]())
    value = _number(kind, number, text) if equals else NUMBERED[kind]
    try:
        return Mode(text.strip(), _numbered(kind, value, options, packed))
    except (ValueError, TypeError) as error:
        raise type(error)(f"mode {text}: {error}") from None


def modes(texts: str | Sequence[str]) -> list[Mode]:
    """The modes of a text with commas between them, or of a sequence of texts; ValueError for none, or one twice."""
    found = [mode(text) for text in (texts.split(",") if isinstance(texts, str) else texts)]
    same = [(m.kind, m.density) for m in found]
    twice = next((m.name for m in found if same.count((m.kind, m.density)) > 1), None)
    if twice or not found:
        raise ValueError(f"mode {twice} is given twice" if twice else "modes must be one at least")
    return found


def _checked(kind: str, options: Sequence[str], text: str) -> str | None:
    """In which numbers it is packed, if it is; ValueError for an option that the kind has not."""
    packed = None
    for option in options:
        name, colon, value = option.partition(":")
        if name not in OPTIONS.get(kind, ()) or (colon and name != "packed"):
            raise ValueError(unknown(f"option of {kind}", option, OPTIONS.get(kind, ())))
        if name == "packed":
            packed = value if colon else "float16"
    if len({option.partition(":")[0] for option in options}) < len(options):
        raise ValueError(f"mode {text} has an option twice")
    return packed


def _number(kind: str, text: str, whole: str) -> float:
    if not re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", text, re.IGNORECASE):
        raise ValueError(f"mode {kind} wants a number, as {kind}={NUMBERED[kind]}, got {whole!r}")
    return float(text)


def _numbered(kind: str, value: float, options: Sequence[str], packed: str | None) -> Compressor:
    if kind == "2bit":
        return ErrorFeedback(TwoBit(value))
    selector: Sparse = Threshold(value) if kind == "threshold" else TopK(value, per_tensor="per-tensor" in options)
    if packed is not None:
        selector = Packed(selector, value=packed)
    if kind == "dgc":
        return DeepGradientCompression(selector, exclude_1d="1d" not in options)
    return ErrorFeedback(selector)
