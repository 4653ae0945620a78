"""What is printed: units, and aligned columns."""

from collections.abc import Sequence

from distopt.checkpoint.error import printable

FORMULA = "=", "+", "-", "@", "\t", "\r"
NONE = "-"  # in the place of a number that is not known


def nbytes(n: float) -> str:
    """Bytes in three digits, with the decimal units of networks: 1 kB is 1000 B."""
    return _scaled(n, ("B", "kB", "MB", "GB", "TB", "PB"))


def seconds(t: float) -> str:
    """Seconds in three digits, down to ns."""
    return _scaled(t * 1e9, ("ns", "us", "ms", "s"))


def rate(bandwidth: float) -> str:
    """Bytes per second as bits, as networks are named."""
    return _scaled(bandwidth * 8, ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"))


def number(x: float) -> str:
    """A number in four digits, a whole one exactly."""
    return f"{x:,}" if isinstance(x, int) else f"{x:.4g}"


def counted(n: int, what: str) -> str:
    """So many of them: 1 rank, 2 ranks."""
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def table(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Lines of columns as wide as they need to be; the first ``left`` columns begin at the left, numbers end right."""
    shown = [tuple(map(printable, cells)) for cells in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    signs = ["<" if k < left else ">" for k in range(len(widths))]
    return [
        "  " + "  ".join(f"{c:{s}{w}}" for c, s, w in zip(cells, signs, widths, strict=True)).rstrip()
        for cells in shown
    ]


def cell(value: object) -> object:
    """What a spreadsheet shows as it is: a text that it would take for a formula begins with an apostrophe."""
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value


def _scaled(x: float, units: tuple[str, ...]) -> str:
    unit = 0
    while x >= 999.5 and unit < len(units) - 1:
        x, unit = x / 1000, unit + 1
    digits = 0 if x >= 99.95 or (unit == 0 and x % 1 == 0) else 1 if x >= 9.995 else 2
    return f"{x:.{digits}f} {units[unit]}"
