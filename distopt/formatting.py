"""Text for people: units, and aligned columns."""

from collections.abc import Sequence

FORMULA = "=", "+", "-", "@", "\t", "\r"
NONE = "-"  # stands for an unknown number


def printable(text: str) -> str:
    """Return a text in one line without control characters, which does nothing to a terminal, whoever wrote it."""
    return text if text.isprintable() else ascii(text)[1:-1]


def nbytes(n: float) -> str:
    """Format bytes in three digits, with the decimal units of networks: 1 kB is 1000 B."""
    return _scaled(n, ("B", "kB", "MB", "GB", "TB", "PB"))


def seconds(t: float) -> str:
    """Format seconds in three digits, down to ns."""
    return _scaled(t * 1e9, ("ns", "us", "ms", "s"))


def rate(bandwidth: float) -> str:
    """Format bytes per second as bits per second, as networks are named."""
    return _scaled(bandwidth * 8, ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"))


def number(x: float) -> str:
    """Format a number in four digits, an integer exactly."""
    return f"{x:,}" if isinstance(x, int) else f"{x:.4g}"


def counted(n: int, what: str) -> str:
    """Format a count with its noun: 1 rank, 2 ranks."""
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def times(ratio: float | None) -> str:
    """Format how many times one number is another one."""
    return NONE if ratio is None else f"{ratio:.3g} x" if ratio < 1000 else f"{ratio:,.0f} x"


def table(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Return the lines of a table; the first ``left`` columns are aligned to the left, the others to the right."""
    shown = [tuple(map(printable, cells)) for cells in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    signs = ["<" if k < left else ">" for k in range(len(widths))]
    return [
        "  " + "  ".join(f"{c:{s}{w}}" for c, s, w in zip(cells, signs, widths, strict=True)).rstrip()
        for cells in shown
    ]


def cell(value: object) -> object:
    """Return a spreadsheet's cell: a text that it would take for a formula begins with an apostrophe."""
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value


def _scaled(x: float, units: tuple[str, ...]) -> str:
    unit = 0
    while x >= 999.5 and unit < len(units) - 1:
        x, unit = x / 1000, unit + 1
    digits = 0 if x >= 99.95 or (unit == 0 and x % 1 == 0) else 1 if x >= 9.995 else 2
    return f"{x:.{digits}f} {units[unit]}"
