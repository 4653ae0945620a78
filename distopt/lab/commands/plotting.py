"""Pictures that commands draw, without a screen: matplotlib is imported when one is wanted.

Modes differ in colour and in marker, and so in grey too; curves of one mode differ in their dashes.  The first seven
colours are those of Okabe and Ito, which the colour-blind tell apart.
"""

import contextlib
import io
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

INSTALL = "pip install 'distopt[plot]'"
KINDS = ".png", ".svg", ".pdf"
SIZE = 5.6, 4.0  # inches, without a legend
MAX_LABEL_CHARACTERS = 48  # of a label
TICKS = 6  # with labels as wide as '500 kB', on an axis as wide as a picture without a legend
STYLE: dict[Any, Any] = {  # matplotlib's parameters
    "axes.grid": True,
    "figure.constrained_layout.use": True,
    "figure.figsize": SIZE,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.fontsize": "small",
    "legend.loc": "center left",
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "savefig.dpi": 130,
    "text.parse_math": False,  # names are no mathematics
}
COLOURS = (
    *("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"),
    *("#882255", "#999933", "#332288", "#8C564B", "#7F7F7F"),
)
MARKERS = "o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "*"  # one fewer than colours: 132 modes differ
DASHES: tuple[str | tuple[int, tuple[int, ...]], ...] = "-", "--", ":", "-.", (0, (6, 2, 1, 2, 1, 2)), (0, (1, 4))


def check_outputs(outputs: Mapping[str, Path | None], inputs: Iterable[str | Path | None]) -> None:
    """Check that files can be written, differ, and are none of those that are read; ``outputs``: by flag.

    Raises as ``check_writable`` and ``check_picture``, and ValueError that names the flag.
    """
    read = [Path(path) for path in inputs if path is not None]
    given = {flag: path for flag, path in outputs.items() if path}
    for flag, output in given.items():
        if output.exists() and any(path.exists() and path.samefile(output) for path in read):
            raise ValueError(f"{flag} must be another file than those that are read, got {output}; it would be lost")
    for (flag, output), (other, path) in itertools.combinations(given.items(), 2):
        if os.path.realpath(output) == os.path.realpath(path):
            raise ValueError(f"{flag} and {other} must be different files, got {output} for both")
    for flag, output in given.items():
        (check_picture if flag == "--plot" else check_writable)(output)


def check_picture(path: Path) -> None:
    """Check, before long work, that a picture can be drawn and written there.

    Raises ValueError for the end of its name, OSError, and RuntimeError if matplotlib is missing.
    """
    if path.suffix.lower() not in KINDS:
        raise ValueError(f"a picture must end in {', '.join(KINDS)}, got {path}")
    check_writable(path)
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise RuntimeError(f"matplotlib draws pictures and cannot be imported ({error}): {INSTALL}") from error


def check_writable(path: Path) -> None:
    """Raise OSError if this file cannot be written; what it holds stays, and a new one is not left behind."""
    if path.exists() and not path.is_file() and not path.is_dir():
        return  # a pipe or a device: whoever opens it twice is somebody else to it
    new = not path.exists()
    with path.open("ab"):
        pass
    if new:
        with contextlib.suppress(OSError):
            path.unlink()


@contextlib.contextmanager
def styled() -> Iterator[None]:
    """Draw in ``STYLE``: a context, or a decorator of functions that draw."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        yield


def look(mode: int, variant: int = 0) -> dict[str, Any]:
    """Return arguments for ``Axes.plot``: a colour and a marker for each mode, dashes for each of its variants."""
    return {
        "color": COLOURS[mode % len(COLOURS)],
        "marker": MARKERS[mode % len(MARKERS)],
        "linestyle": DASHES[variant % len(DASHES)],
    }


@styled()
def dashes(variants: Sequence[str]) -> "list[Line2D]":
    """Return lines for a legend that tells the variants of all modes apart."""
    from matplotlib.lines import Line2D

    grey = {"color": "#555555", "marker": ""}
    return [Line2D([], [], label=label, **look(0, k) | grey) for k, label in enumerate(variants)]


@styled()
def new(title: str, across: str, up: str) -> "tuple[Figure, Axes]":
    """Return an empty picture with a title, and the labels of both axes."""
    from matplotlib.figure import Figure

    figure = Figure()
    return figure, figure.add_subplot(title=title, xlabel=across, ylabel=up)


@styled()
def panels(title: str, down: int, across: int) -> "tuple[Figure, list[Axes]]":
    """Return an empty picture of several panels, row by row, under one title."""
    from matplotlib.figure import Figure

    figure = Figure((SIZE[0] * across * 0.85, SIZE[1] * down * 0.9))
    figure.suptitle(title)
    return figure, [figure.add_subplot(down, across, k + 1) for k in range(down * across)]


@styled()
def legend(axes: "Axes", more: "Sequence[Line2D]" = ()) -> None:
    """Draw a legend at the right of the axes: the labels of curves, and of ``more`` lines; long ones end in dots."""
    curves = [line for line in (*axes.lines, *more) if not str(line.get_label()).startswith("_child")]
    labels = [str(line.get_label()) for line in curves]
    most = MAX_LABEL_CHARACTERS
    short = [label if len(label) <= most else label[: most - 3] + "..." for label in labels]
    axes.legend(curves, short, bbox_to_anchor=(1.0, 0.5))


def log_axis(axes: "Axes", which: str, shown: Sequence[float], unit: Callable[[float], str]) -> None:
    """Make an axis logarithmic, 'x' or 'y', for numbers above 0 that ``unit`` formats."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    axes.set(**{f"{which}scale": "log"})
    axis = {"x": axes.xaxis, "y": axes.yaxis}[which]
    times = max(shown) / min(shown)
    if 1 < times < TICKS:
        axis.set_major_locator(MaxNLocator(TICKS - 1))
    else:
        steps = (1, 2, 5) if times <= 100 else (1, 3) if times <= 1000 else (1,)
        axis.set_major_locator(LogLocator(subs=steps, numticks=TICKS))
    axis.set_major_formatter(lambda n, _: unit(n).replace(".00 ", " ").replace(".0 ", " "))
    axis.set_minor_formatter(NullFormatter())


def make_room(figure: "Figure") -> None:
    """Widen a picture by its widest legend, and make it as high as the highest, so that axes keep their size."""
    extents = [shown.get_window_extent() for axes in figure.axes if (shown := axes.get_legend())]
    if extents:
        wide, high = figure.get_size_inches()
        rows = max(1, round(high / SIZE[1]))
        needed = rows * (max(box.height for box in extents) / figure.dpi + 0.6)  # a title, and the axis below
        figure.set_size_inches(wide + max(box.width for box in extents) / figure.dpi, max(high, needed))


@styled()
def save(figure: "Figure", path: Path) -> None:
    """Write a picture at once, in the format of the name's end.  Raises OSError."""
    make_room(figure)
    kind = path.suffix.lower()
    drawn = io.BytesIO()
    figure.savefig(drawn, format=kind[1:])
    if kind == ".png":  # with 96 colours, in a third of the bytes: lines and letters need no more
        from PIL import Image

        picture = Image.open(drawn).convert("RGB").quantize(96)
        drawn = io.BytesIO()
        picture.save(drawn, "PNG", optimize=True)
    path.write_bytes(drawn.getvalue())
