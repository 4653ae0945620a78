"""A fit: per verb an algorithm, and the latency and bandwidth that it has by its formula; as a file."""

import json
import math
import platform
import socket
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from distopt import cost
from distopt.comm import Communicator
from distopt.cost import Link
from distopt.cost.links import checked
from distopt.cost.time import Algorithm
from distopt.fit.measure import Clock, Point, measure
from distopt.fit.pieces import FEWEST, Piece, least_squares, pieces, predicted
from distopt.numbers import number, positive, whole
from distopt.version import __version__

FORMAT = "distopt fit 1"
IMMEASURABLE = 1e15  # bytes per second: times did not grow with the bytes
MESSAGES, BYTES = Link("", 1.0, math.inf, 0.0), Link("", 0.0, 1.0, 0.0)  # what an algorithm's formula counts


class Line(NamedTuple):
    """A verb: an algorithm of ``cost.time``, the root mean square of relative errors, and lines by size of message."""

    algorithm: str
    residual: float
    pieces: tuple[Piece, ...]
    points: tuple[tuple[int, float], ...]  # bytes, seconds


class Fit(NamedTuple):
    """What has been measured: ``link`` for advice, ``lines`` by verb for predictions, and where it was.

    What it takes to add up is part of the bandwidths here.
    """

    link: Link
    lines: dict[str, Line]
    about: dict[str, Any]

    def seconds(self, verb: str, nbytes: float, size: int) -> float:
        """What a verb takes that is given so many bytes (as in ``cost.time``) on ``size`` ranks.

        For other numbers of ranks than were measured it is the same algorithm's formula.  Raises ValueError for
        another verb, ``nbytes`` below 0, and fewer than 1 rank.
        """
        cost.algorithms(verb)
        nbytes, size = number("nbytes", nbytes), whole("size", size, 1)
        line = self.lines[verb]
        messages, passed = _counts(getattr(cost, line.algorithm), nbytes, size)
        if not messages:
            return 0.0
        return predicted(line.pieces, messages, passed)

    def write(self, path: str | Path) -> None:
        """As JSON, for ``read``; one rank is enough, since all have the same."""
        lines = {
            verb: line._asdict() | {"pieces": [p._asdict() for p in line.pieces]} for verb, line in self.lines.items()
        }
        found = {"format": FORMAT, **self.about, "link": self.link._asdict(), "verbs": lines}
        Path(path).write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")


def fit(comm: Communicator, seconds: float = 20.0, clock: Clock = time.perf_counter) -> Fit:
    """Measure for so many seconds, and fit latency and bandwidth per verb.  Collective; the same result on all ranks.

    Raises ValueError for a communicator of one rank, and for ``seconds`` that are not above 0.
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
    """The fit of what has been measured on ``about['ranks']`` ranks.

    Of one verb alone all algorithms describe the times equally well, each with a latency and a bandwidth of its own.
    An all-to-all is done in one way only; of another verb that algorithm is taken which agrees best with its link.
    """
    size, lines, rows = about["ranks"], {}, []
    by_verb = {verb: sorted(p for p in points if p.verb == verb) for verb in cost.ALGORITHMS}
    first = least_squares(_rows(cost.pairwise_all_to_all, _ends(by_verb["all_to_all"]), size))
    for verb, own in by_verb.items():
        algorithm = min(_linear(verb), key=lambda a: round(_distance(_rows(a, own, size), first), 6))
        lines[verb] = _line(algorithm, own, size)
        rows.append(_rows(algorithm, _ends(own), size))
    latency, per_byte = least_squares(np.concatenate(rows)).tolist()
    bandwidth = 1 / per_byte if per_byte else IMMEASURABLE
    return Fit(Link(f"measured on {size} ranks", latency, bandwidth, 0.0), lines, about)


def _ends(points: list[Point]) -> list[Point]:
    """The smallest and the largest: one link for all sizes is for votes and for buckets, whatever lies between."""
    return points if len(points) < 2 * FEWEST else points[:FEWEST] + points[-FEWEST:]


def _distance(rows: np.ndarray, link: np.ndarray) -> float:
    """How far times are from what a link says: the mean of |log|, for which half is as wrong as double."""
    return float(np.abs(np.log(rows @ link)).mean())


def _linear(verb: str) -> list[Algorithm]:
    """The algorithms whose seconds are linear in latency and 1 / bandwidth, as a pipeline's are not."""
    return [a for a in cost.algorithms(verb) if a is not cost.chain_broadcast]


def _counts(algorithm: Algorithm, nbytes: float, size: int) -> tuple[float, float]:
    """Messages one after the other, and bytes that pass in them."""
    return algorithm(nbytes, size, MESSAGES), algorithm(nbytes, size, BYTES)


def _rows(algorithm: Algorithm, points: list[Point], size: int) -> np.ndarray:
    """(n, 2): messages and bytes per second that they took."""
    return np.array([_counts(algorithm, p.nbytes, size) for p in points]) / [[p.seconds] for p in points]


def _line(algorithm: Algorithm, points: list[Point], size: int) -> Line:
    """What points of one verb say if that is how it is done."""
    rows = _rows(algorithm, points, size)
    found = pieces(rows[:, 1] / rows[:, 0], rows)
    wrong = [predicted(found, *_counts(algorithm, p.nbytes, size)) / p.seconds - 1 for p in points]
    residual = float(np.sqrt(np.mean(np.square(wrong))))
    return Line(algorithm.__name__, residual, tuple(found), tuple((p.nbytes, p.seconds) for p in points))


def read(path: str | Path) -> Fit:
    """What ``Fit.write`` has written; ValueError, with the path, for another file, OSError if there is none."""
    try:
        found = json.loads(Path(path).read_text())
        if found.pop("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT!r}")
        link = checked(Link(**found.pop("link")))
        lines = {verb: _line_of(verb, given) for verb, given in found.pop("verbs").items()}
        whole("ranks", found["ranks"], 2)
        if set(lines) != set(cost.ALGORITHMS):
            raise ValueError(f"its verbs are not {', '.join(cost.ALGORITHMS)}")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is no fit: {error}") from error
    return Fit(link, lines, found)


def _line_of(verb: str, given: dict[str, Any]) -> Line:
    """A verb's part of a file; ValueError, TypeError or KeyError if it is none."""
    names = [a.__name__ for a in _linear(verb)]
    if given["algorithm"] not in names:
        raise ValueError(f"algorithm of {verb} must be one of {', '.join(names)}, got {given['algorithm']!r}")
    found = tuple(Piece(*(number(name, piece[name]) for name in Piece._fields)) for piece in given["pieces"])
    begins = [piece.least for piece in found]
    if begins[:1] != [0] or begins != sorted(set(begins)):
        raise ValueError(f"the first piece of {verb} must begin at 0 bytes, and each where the one before ends")
    points = tuple((whole("bytes", n, 1), positive("seconds", s)) for n, s in given["points"])
    return Line(given["algorithm"], number("residual", given["residual"]), found, points)
