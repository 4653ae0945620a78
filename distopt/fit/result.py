"""A fit: what each verb takes on the ranks that were measured, and one link for other numbers of them; as a file."""

import json
import math
import platform
import socket
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from distopt import cost, plain
from distopt.comm import Communicator
from distopt.cost import Link
from distopt.cost.links import checked
from distopt.fit.measure import Clock, Point, measure
from distopt.fit.one_link import one_link
from distopt.fit.pieces import Piece, pieces, predicted
from distopt.numbers import number, positive, whole
from distopt.version import __version__

FORMAT = "distopt fit 2"


class Line(NamedTuple):
    """A verb: the root mean square of relative errors, lines by number of bytes, and what they go through."""

    residual: float
    pieces: tuple[Piece, ...]
    points: tuple[tuple[int, float], ...]  # bytes, seconds


class Fit(NamedTuple):
    """What was measured: ``lines`` by verb for the ranks that were there, ``link`` for others, and where it was."""

    link: Link
    lines: dict[str, Line]
    about: dict[str, Any]

    @property
    def ranks(self) -> int:
        """How many were there."""
        return int(self.about["ranks"])

    @property
    def per_node(self) -> int:
        """What was measured between nodes and within them is one thing here, as if each had one rank."""
        return 1

    @property
    def most(self) -> int:
        """The bytes up to which every verb was measured."""
        return min(max(nbytes for nbytes, _ in line.points) for line in self.lines.values())

    def seconds(self, verb: str, nbytes: float, size: int) -> float:
        """What a verb takes that is given so many bytes (as in ``cost.time``) on ``size`` ranks.

        For other numbers of ranks than were measured it is what the formulas say of ``link``.  Raises ValueError for
        another verb, ``nbytes`` below 0, and fewer than 1 rank.
        """
        if size != self.ranks:
            return cost.seconds(verb, nbytes, size, self.link)
        cost.algorithms(verb)
        return predicted(self.lines[verb].pieces, number("nbytes", nbytes))

    def write(self, path: str | Path) -> None:
        """As JSON, for ``read``; one rank is enough, since all have the same."""
        lines = {
            verb: line._asdict() | {"pieces": [p._asdict() for p in line.pieces]} for verb, line in self.lines.items()
        }
        found = {"format": FORMAT, **self.about, "link": self.link._asdict(), "verbs": lines}
        Path(path).write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")


def fit(comm: Communicator, seconds: float = 20.0, clock: Clock = time.perf_counter) -> Fit:
    """Measure for so many seconds, and fit latency and bandwidth per verb.  Collective; the same result on all ranks.

    Raises ValueError for a communicator of one rank, for ``seconds`` that are not above 0, and where they are too few
    to tell a bandwidth.
    """
    seconds = positive("seconds", seconds)
    if comm.size < 2:
        raise ValueError("comm must have at least 2 ranks, got 1: start them with distopt run -n N")
    points = measure(comm, seconds, clock)
    hosts = len(set(comm.control.gather(socket.gethostname())))
    about = {
        "distopt": __version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "communicator": f"{type(comm).__name__}: {comm.control.gather(comm.why)[0]}",
        "hosts": hosts,
        "ranks": comm.size,
        "seconds": seconds,
    }
    return of_points(points, about)


def of_points(points: list[Point], about: dict[str, Any]) -> Fit:
    """The fit of what has been measured on ``about['ranks']`` ranks; ValueError if times do not grow with the bytes."""
    link = one_link(points, about["ranks"])._replace(name=f"measured on {about['ranks']} ranks")
    if math.isinf(link.bandwidth):
        most = max(p.nbytes for p in points)
        raise ValueError(f"seconds={about['seconds']:g} are too few: up to {most} bytes take no longer than none")
    return Fit(link, {verb: _line([p for p in points if p.verb == verb]) for verb in cost.ALGORITHMS}, about)


def _line(points: list[Point]) -> Line:
    """What points of one verb say."""
    timed = tuple((p.nbytes, p.seconds) for p in sorted(points))
    nbytes, seconds = np.array(timed, float).T
    found = pieces(nbytes, seconds)
    wrong = np.array([predicted(found, n) for n in nbytes]) / seconds - 1
    return Line(float(np.sqrt(np.mean(wrong**2))), tuple(found), timed)


def read(path: str | Path) -> Fit:
    """What ``Fit.write`` has written; ValueError, with the path, for another file, OSError if there is none."""
    try:
        found = plain.read(path)
        if found.pop("format", None) != FORMAT:
            raise ValueError(f"its format is not {FORMAT!r}")
        name, *figures = (found["link"][field] for field in Link._fields)
        link = checked(Link(str(name), *figures))
        lines = {verb: _line_of(verb, given) for verb, given in found["verbs"].items()}
        whole("ranks", found["ranks"], 2)
        if set(lines) != set(cost.ALGORITHMS):
            raise ValueError(f"its verbs are not {', '.join(cost.ALGORITHMS)}")
    except KeyError as error:
        raise ValueError(f"{path} is no fit: {error} is missing") from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is no fit: {error}") from error
    return Fit(link, lines, {name: value for name, value in found.items() if name not in ("link", "verbs")})


def _line_of(verb: str, given: dict[str, Any]) -> Line:
    """A verb's part of a file; ValueError, TypeError or KeyError if it is none."""
    found = tuple(Piece(*(number(name, piece[name]) for name in Piece._fields)) for piece in given["pieces"])
    begins = [piece.least for piece in found]
    if begins[:1] != [0] or begins != sorted(set(begins)):
        raise ValueError(f"the first piece of {verb} must begin at 0 bytes, and each where the one before ends")
    if not given["points"]:
        raise ValueError(f"{verb} has no points")
    points = tuple((whole("bytes", n, 1), positive("seconds", s)) for n, s in given["points"])
    return Line(number("residual", given["residual"]), found, points)
