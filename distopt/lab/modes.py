"""Compression modes by names that fit on a command line: ``dense``, ``topk=0.01``, ``chunks=64/4096+packed:2bit``."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from distopt.checks import unknown_name
from distopt.compress import ALL, Chunks, Compressor
from distopt.compress.part import Word
from distopt.engine.outer_loop import Windows

DEFAULT = "dense", "half", "int8", "2bit", "topk=0.01", "dgc=0.001", "dgc=0.001+packed"


# The kinds of modes by name.  A part makes compressors to say what it is, and advice asks thousands of times.
WORDS: dict[str, Word] = {name: word for about in ALL.values() for name, word in about().words.items()}


class Mode(NamedTuple):
    """A compressor and its name.

    Attributes:
        name: the text from which ``mode`` made it.
        compressor: the compressor that ``step(loss, compressor)`` takes, or ``LocalSteps``.
        windows: when there are exchanges: after every step, or every so many local steps.

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
        _, plus, options = name.partition("+")
        kind, numbers = self._sparse
        if not numbers:
            return self.name
        return f"{local}{kind}{''.join(f'/{number}' for number in numbers[1:])}{plus}{options}"

    @property
    def density(self) -> float | None:
        """The fraction of entries that is sent, in (0, 1]; None for modes that are not chosen by density."""
        _, numbers = self._sparse
        return numbers[0] / (numbers[1] if len(numbers) > 1 else 1) if numbers else None

    def at_density(self, density: float) -> "Mode":
        """Return the same mode with another density; chunks send as many entries as make it, rounded up."""
        local, name = _apart(self.name)
        _, plus, options = name.partition("+")
        kind, (_, *of) = self._sparse
        text = f"{Chunks(1, of[0]).at_density(density).k}/{of[0]}" if of else repr(density)
        return mode(f"{local}{kind}={text}{plus}{options}")

    @property
    def _sparse(self) -> tuple[str, tuple[Any, ...]]:
        """The word, and its numbers if they are a density: that, or how many entries of how many elements."""
        kind, equals, text = _apart(self.name)[1].partition("+")[0].partition("=")
        word = WORDS[kind or "dense"]
        return kind, _numbers(kind, word, text, self.name) if word.sparse and equals else word.numbers * word.sparse


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
            raise ValueError(f"mode local must be with another mode after it, got {text!r}")
        return mode(rest or "dense")._replace(name=text.strip(), windows=_windows_of(local, text))
    head, *options = text.strip().split("+")
    kind, equals, number = head.partition("=")
    if kind not in WORDS:
        raise ValueError(unknown_name("mode", kind, (*WORDS, "local")))
    word = WORDS[kind]
    given = _options(kind, word, options, text)
    if equals and not word.numbers:
        raise ValueError(f"mode {kind} must be without a number, got {text!r}")
    try:
        numbers = _numbers(kind, word, number, text) if equals else word.numbers
        return Mode(text.strip(), word.make(*numbers, given))
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


def _options(kind: str, word: Word, options: Sequence[str], text: str) -> dict[str, str | None]:
    """Return the options of a mode, and what they have after a colon, None without one.

    Raises ValueError for an option that the kind does not have, or has twice.
    """
    given: dict[str, str | None] = {}
    for option in options:
        name, colon, value = option.partition(":")
        if name not in word.options or (colon and name != "packed"):
            raise ValueError(unknown_name(f"option of {kind}", option, word.options))
        given[name] = value if colon else None
    if len(given) < len(options):
        raise ValueError(f"options of a mode must be different, got {text!r}")
    return given


def _numbers(kind: str, word: Word, text: str, full_text: str) -> tuple[float, ...]:
    """Return the numbers of a mode; ValueError if the text has others than its kind."""
    if len(word.numbers) == 1:
        if not re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", text, re.IGNORECASE):
            raise ValueError(f"mode {kind} must be with a number, as {kind}={word.numbers[0]}, got {full_text!r}")
        return (float(text),)
    if not re.fullmatch(r"\d{1,9}/\d{1,9}", text):
        usual = "/".join(map(str, word.numbers))
        raise ValueError(f"mode {kind} must be with two numbers, as {kind}={usual}, got {full_text!r}")
    k, of = map(int, text.split("/"))
    return k, of
