"""A fit of measured times: lines per verb for the ranks that were measured, and one link for other numbers of ranks."""

import json
import math
import platform
import socket
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from distopt.checks import check_float, check_int, check_positive
from distopt.comm import Communicator
from distopt.io import strict_json
from distopt.lab import cost
from distopt.lab.cost import Link
from distopt.lab.cost.links import checked
from distopt.lab.fit.measure import Clock, Point, measure
from distopt.lab.fit.one_link import one_link
from distopt.lab.fit.pieces import Segment, pieces, predicted
from distopt.version import __version__

FORMAT = "distopt fit 2"
REMEDY = "measure one with distopt bench --fit"


class Line(NamedTuple):
    """The fit of one verb.

    Attributes:
        residual: the root mean square of relative errors.
        pieces: lines of time over bytes.
        points: the measured (bytes, seconds).

    Example:
        >>> from distopt.fit import Line, Segment
        >>> Line(0.0, (Segment(0.0, 1e-5, 1e-9),), ((8, 1e-5),)).residual
        0.0
    """

    residual: float
    pieces: tuple[Segment, ...]
    points: tuple[tuple[int, float], ...]


class Fit(NamedTuple):
    """A measured network, which ``distopt.lab`` takes wherever it takes a network.

    Attributes:
        link: the link that describes all verbs, for other numbers of ranks.
        lines: the fit of each verb for the ranks that were measured.
        about: where and how it was measured; among it ``ranks``.

    Example:
        >>> from distopt import cost
        >>> from distopt.fit import Fit, Line, Segment
        >>> line = Line(0.0, (Segment(0.0, 1e-5, 1e-9),), ((8, 1e-5),))
        >>> measured = Fit(cost.link("10GbE"), dict.fromkeys(cost.ALGORITHMS, line), {"ranks": 2})
        >>> round(measured.seconds("all_reduce", 1e6, size=2), 6)
        0.00101
    """

    link: Link
    lines: dict[str, Line]
    about: dict[str, Any]

    @property
    def ranks(self) -> int:
        """The number of ranks that were measured."""
        return int(self.about["ranks"])

    @property
    def per_node(self) -> int:
        """Always 1: links between nodes and within them were measured together, as if each node had one rank."""
        return 1

    @property
    def most(self) -> int:
        """The bytes up to which every verb was measured."""
        return min(max(nbytes for nbytes, _ in line.points) for line in self.lines.values())

    def seconds(self, verb: str, nbytes: float, size: int) -> float:
        """Return the seconds of a verb on ``size`` ranks; for other numbers than were measured, by formula on ``link``.

        Args:
            verb: the communicator's verb.
            nbytes: the bytes of one rank; of all ranks together for an all-gather.
            size: the number of ranks.

        Raises:
            ValueError: for another verb, ``nbytes`` below 0, or fewer than 1 rank.
        """
        if size != self.ranks:
            return cost.seconds(verb, nbytes, size, self.link)
        cost.algorithms(verb)
        return predicted(self.lines[verb].pieces, check_float("nbytes", nbytes))

    def write(self, path: str | Path) -> None:
        """Write the fit as JSON, for ``read``; one rank is enough, since all have the same."""
        lines = {
            verb: line._asdict() | {"pieces": [p._asdict() for p in line.pieces]} for verb, line in self.lines.items()
        }
        content = {"format": FORMAT, **self.about, "link": self.link._asdict(), "verbs": lines}
        Path(path).write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")


def fit(comm: Communicator, seconds: float = 20.0, clock: Clock = time.perf_counter) -> Fit:
    """Measure for so many seconds, and fit latency and bandwidth per verb; the same on all ranks.  Collective.

    Args:
        comm: the communicator.
        seconds: the time that the measurement may take.
        clock: returns seconds.

    Raises:
        ValueError: the communicator has one rank, or ``seconds`` is not above 0 or too little to tell a bandwidth.

    Example:
        >>> from distopt.comm import LocalCommunicator
        >>> from distopt.fit import fit
        >>> fit(LocalCommunicator(), seconds=1.0)
        Traceback (most recent call last):
            ...
        ValueError: comm must have at least 2 ranks, got 1: start them with distopt run -n N
    """
    seconds = check_positive("seconds", seconds)
    if comm.size < 2:
        raise ValueError("comm must have at least 2 ranks, got 1: start them with distopt run -n N")
    points = measure(comm, seconds, clock)
    hosts = len(set(comm.control.gather(socket.gethostname())))
    about = {
        "distopt": __version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "communicator": f"{type(comm).__name__}: {comm.control.gather(comm.reason)[0]}",
        "hosts": hosts,
        "ranks": comm.size,
        "seconds": seconds,
    }
    return of_points(points, about)


def of_points(points: list[Point], about: dict[str, Any]) -> Fit:
    """Fit points measured on ``about['ranks']`` ranks; ValueError if times do not grow with the bytes."""
    link = one_link(points, about["ranks"])._replace(name=f"measured on {about['ranks']} ranks")
    if math.isinf(link.bandwidth):
        most = max(p.nbytes for p in points)
        raise ValueError(
            f"seconds must be more, got {about['seconds']:g}, in which up to {most} bytes take no longer than none"
        )
    return Fit(link, {verb: _line([p for p in points if p.verb == verb]) for verb in cost.ALGORITHMS}, about)


def _line(points: list[Point]) -> Line:
    """Fit the points of one verb."""
    timed = tuple((p.nbytes, p.seconds) for p in sorted(points))
    nbytes, seconds = np.array(timed, float).T
    lines = pieces(nbytes, seconds)
    errors = np.array([predicted(lines, n) for n in nbytes]) / seconds - 1
    return Line(float(np.sqrt(np.mean(errors**2))), tuple(lines), timed)


def read(path: str | Path) -> Fit:
    """Read a fit that ``Fit.write`` has written.

    Raises:
        ValueError: the file is no fit; the text names the path.
        OSError: the file cannot be read.

    Example:
        >>> import pathlib, tempfile
        >>> from distopt import cost
        >>> from distopt.fit import Fit, Line, Segment, read
        >>> line = Line(0.0, (Segment(0.0, 1e-5, 1e-9),), ((8, 1e-5),))
        >>> measured = Fit(cost.link("10GbE"), dict.fromkeys(cost.ALGORITHMS, line), {"ranks": 2})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     measured.write(pathlib.Path(folder) / "fit.json")
        ...     read(pathlib.Path(folder) / "fit.json") == measured
        True
    """
    try:
        content = strict_json.read(path)
        if content.pop("format", None) != FORMAT:
            raise ValueError(f"its format must be {FORMAT!r}, got {content.get('format')!r:.60}")
        name, *figures = (content["link"][field] for field in Link._fields)
        link = checked(Link(str(name), *figures))
        lines = {verb: _line_of(verb, entry) for verb, entry in content["verbs"].items()}
        check_int("ranks", content["ranks"], 2)
        if set(lines) != set(cost.ALGORITHMS):
            raise ValueError(f"its verbs must be {', '.join(cost.ALGORITHMS)}, got {', '.join(lines)}")
    except KeyError as error:
        raise ValueError(f"{path} must be a fit, got one without {error}; {REMEDY}") from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} must be a fit, got another file: {error}; {REMEDY}") from error
    return Fit(link, lines, {name: value for name, value in content.items() if name not in ("link", "verbs")})


def _line_of(verb: str, entry: dict[str, Any]) -> Line:
    """Parse a verb's part of a file; ValueError, TypeError or KeyError if it is malformed."""
    lines = tuple(Segment(*(check_float(name, piece[name]) for name in Segment._fields)) for piece in entry["pieces"])
    begins = [piece.least for piece in lines]
    if begins[:1] != [0] or begins != sorted(set(begins)):
        raise ValueError(f"the first piece of {verb} must begin at 0 bytes, and each where the one before ends")
    if not entry["points"]:
        raise ValueError(f"points of {verb} must be at least one, got none")
    points = tuple((check_int("bytes", n, 1), check_positive("seconds", s)) for n, s in entry["points"])
    return Line(check_float("residual", entry["residual"]), lines, points)
