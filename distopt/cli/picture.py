"""Pictures that commands draw, without a screen: matplotlib is imported when one is wanted.

Modes differ in colour and in marker, and so in grey; curves of one mode in their dashes.  The first seven colours are
those of Okabe and Ito, which the colour-blind tell apart.
"""

import contextlib
import io
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

INSTALL = "pip install 'distopt[plot]'"
KINDS = ".png", ".svg", ".pdf"
SIZE = 5.6, 4.0  # inches, without a legend
DOTS = 130  # per inch
LONGEST = 48  # letters of a label
COLOURS = (
    *("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"),
    *("#882255", "#999933", "#332288", "#8C564B", "#7F7F7F"),
)
MARKERS = "o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "*"  # one fewer than colours: 132 modes differ
DASHES: tuple[str | tuple[int, tuple[int, ...]], ...] = "-", "--", ":", "-.", (0, (6, 2, 1, 2, 1, 2)), (0, (1, 4))
TICKS = 6  # with labels as wide as '500 kB', on an axis as wide as a picture without a legend


def check_picture(path: Path) -> None:
    """Check, before long work, that a picture can be drawn and written there.

    Raises ValueError for another kind than .png, .svg and .pdf, OSError for a place that cannot be written,
    RuntimeError that says what to install if matplotlib is missing.
    """
    if path.suffix.lower() not in KINDS:
        raise ValueError(f"{path}: a picture must end in {', '.join(KINDS)}")
    check_place(path)
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise RuntimeError(f"matplotlib draws pictures and cannot be imported ({error}): {INSTALL}") from error


def check_outputs(json: Path | None, plot: Path | None, inputs: Iterable[str | Path | None]) -> None:
    """Check that both can be written, are not the same, and are none of the files that are read.

    Raises as ``check_place`` and ``check_picture``, and ValueError that names the flag.
    """
    read = [Path(path) for path in inputs if path is not None]
    for flag, place in (("--json", json), ("--plot", plot)):
        if place and place.exists() and any(path.exists() and path.samefile(place) for path in read):
            raise ValueError(f"{flag} {place} is a file that is read: it would be lost")
    if json and plot and os.path.realpath(json) == os.path.realpath(plot):
        raise ValueError(f"--json and --plot are both {json}")
    if json:
        check_place(json)
    if plot:
        check_picture(plot)


def check_place(path: Path) -> None:
    """Raise OSError if this file cannot be written; what it holds stays, and a new one is not left behind."""
    if path.exists() and not path.is_file() and not path.is_dir():
        return  # a pipe or a device: whoever opens it twice is somebody else to it
    new = not path.exists()
    with path.open("ab"):
        pass
    if new:
        with contextlib.suppress(OSError):
            path.unlink()


def style(mode: int, variant: int = 0) -> dict[str, Any]:
    """Arguments for ``Axes.plot``: a colour and a marker for each mode, dashes for each of its variants."""
    return {
        "color": COLOURS[mode % len(COLOURS)],
        "marker": MARKERS[mode % len(MARKERS)],
        "linestyle": DASHES[variant % len(DASHES)],
        "markersize": 4,
        "linewidth": 1.4,
    }


def dashes(variants: Sequence[str]) -> "list[Line2D]":
    """Lines for a legend that tells the variants of all modes apart."""
    from matplotlib.lines import Line2D

    grey = {"color": "#555555", "marker": ""}
    return [Line2D([], [], label=label, **style(0, k) | grey) for k, label in enumerate(variants)]


def new(title: str, across: str, up: str) -> "tuple[Figure, Axes]":
    """An empty picture with a title, and the labels of both axes."""
    from matplotlib.figure import Figure

    figure = Figure(SIZE, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, parse_math=False)
    axes.set(xlabel=across, ylabel=up)
    axes.grid(True, color="#dddddd", linewidth=0.6)
    return figure, axes


def panels(title: str, down: int, across: int) -> "tuple[Figure, list[Axes]]":
    """An empty picture of several, row by row, under one title."""
    from matplotlib.figure import Figure

    figure = Figure((SIZE[0] * across * 0.85, SIZE[1] * down * 0.9), layout="constrained")
    figure.suptitle(title, parse_math=False)
    found = [figure.add_subplot(down, across, k + 1) for k in range(down * across)]
    for axes in found:
        axes.grid(True, color="#dddddd", linewidth=0.6)
    return figure, found


def legend(axes: "Axes", more: "Sequence[Line2D]" = ()) -> None:
    """The labels of curves, and of ``more`` lines, as they are, at the right of the axes; long ones end in dots."""
    curves = [line for line in (*axes.lines, *more) if not str(line.get_label()).startswith("_child")]
    labels = [str(line.get_label()) for line in curves]
    short = [label if len(label) <= LONGEST else label[: LONGEST - 3] + "..." for label in labels]
    found = axes.legend(curves, short, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    for text in found.get_texts():
        text.set_parse_math(False)


def log_axis(axes: "Axes", which: str, shown: Sequence[float], unit: Callable[[float], str]) -> None:
    """Make the axis ``which``, 'x' or 'y', logarithmic for these numbers, all above 0; ``unit`` as in ``units``."""
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
    """Make a picture wider by its widest legend, and as high as the highest, so that axes keep their size."""
    found = [shown.get_window_extent() for axes in figure.axes if (shown := axes.get_legend())]
    if found:
        wide, high = figure.get_size_inches()
        rows = max(1, round(high / SIZE[1]))
        needed = rows * (max(box.height for box in found) / figure.dpi + 0.6)  # a title, and the axis below
        figure.set_size_inches(wide + max(box.width for box in found) / figure.dpi, max(high, needed))


def save(figure: "Figure", path: Path) -> None:
    """Write a picture, all at once; the name's end says in which format.  Raises OSError."""
    make_room(figure)
    kind = path.suffix.lower()
    drawn = io.BytesIO()
    figure.savefig(drawn, format=kind[1:], dpi=DOTS)
    path.write_bytes(_few_colours(drawn) if kind == ".png" else drawn.getvalue())


def _few_colours(drawn: io.BytesIO) -> bytes:
    """A PNG in a third of the bytes: lines and letters need no more."""
    from PIL import Image

    small = io.BytesIO()
    Image.open(drawn).convert("RGB").quantize(96).save(small, "PNG", optimize=True)
    return small.getvalue()
