"""Which mode pays, on how many ranks, on which network; or that none does."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from distopt.checkpoint.error import printable
from distopt.fit import Fit
from distopt.numbers import number, whole
from distopt.tables import Members
from distopt.units import NONE, counted, nbytes, rate, seconds, table
from distopt.volume import break_even, compute
from distopt.volume.break_even import DENSE, Bounds
from distopt.volume.compute import Compute
from distopt.volume.forecast import Forecast, forecast
from distopt.volume.modes import DEFAULT, Mode, modes
from distopt.volume.network import Wire
from distopt.volume.question import Computes, Prediction, Question

HEAD = "mode", "payload", "wire", "wire time", "compute"
PAYS = "pays below density", "below link", "for ranks"
DENSITIES = 1e-3, 1e-2, 1e-1, 0.5  # at which compression is measured
HARDLY = 1.05  # what an exchange is faster by, to be worth the trouble
TOO_LITTLE = 1e-3  # seconds, of which a step of Python takes as many
LONGEST = 1e6  # seconds of a backward pass
CAVEAT = "What it does to learning, only training tells."


class Choice(NamedTuple):
    """A mode: what it sends, how long its exchange takes, and where that is faster than dense (``break_even``)."""

    mode: Mode
    sends: Forecast
    takes: Prediction
    density: float | None
    bandwidth: float | None
    ranks: Sequence[Bounds]


class Advice(NamedTuple):
    """All modes, the fastest first; ``print(advice)`` shows them.  ``refused`` are names, and why they cannot be.

    It is about time alone: what compressing does to learning, only training tells.
    """

    choices: tuple[Choice, ...]
    refused: tuple[tuple[str, str], ...]
    question: Question
    measured: bool  # is compute in it?

    @property
    def best(self) -> Mode:
        """The fastest; dense if nothing is faster."""
        return self.choices[0].mode

    @property
    def dense(self) -> Choice:
        """Without compression."""
        return next(c for c in self.choices if c.mode.name == DENSE.name)

    @property
    def verdict(self) -> str:
        """One sentence, and another one if it is about a mode that changes what is learned."""
        best, dense = self.choices[0], self.dense.takes
        if self.question.ranks == 1:
            return "Do not compress: one rank sends nothing."
        name, least = best.mode.name, best.takes.exchange
        if name == DENSE.name:
            hidden = self.question.backward + dense.wire - least
            behind = f", with {seconds(hidden)} of the exchange behind the backward pass" if hidden > 0 else ""
            others = [f"; {c.mode.name} takes {seconds(c.takes.exchange)}" for c in self.choices[1:2]]
            return f"Do not compress: dense takes {seconds(least)}{behind}{''.join(others)}."
        if dense.exchange < max(HARDLY * least, least + TOO_LITTLE):
            return f"Hardly worth it: {name} takes {seconds(least)}, and dense {seconds(dense.exchange)}."
        what = "backward pass and exchange take" if self.question.backward else "the exchange takes"
        times = f"{dense.exchange / least:.3g}" if least else "infinitely"
        return f"Use {name}: {what} {seconds(least)}, and dense {times} times as long. {CAVEAT}"

    def __str__(self) -> str:
        rows = [(*self._head(), *PAYS), *(self._cells(choice) for choice in self.choices)]
        about = f"{counted(self.question.ranks, 'rank')}, {described(self.question.wire, self.question.ranks)}"
        backward = f"; backward {seconds(self.question.backward)}" if self.question.backward else ""
        more = [line for c in self.choices for line in sent_dense(c.mode, c.sends)]
        more += [f"  {name}: not here. {why}" for name, why in self.refused]
        head = f"{about}{backward}; bytes of one rank in a step"
        return "\n".join([head, *table(rows), *more, *notes(self.question.wire, self.measured), self.verdict])

    def _head(self) -> tuple[str, ...]:
        return (*HEAD, "backward + exchange" if self.question.backward else "exchange", "dense takes")

    def _cells(self, choice: Choice) -> list[str]:
        mode, sends, takes = choice.mode, choice.sends, choice.takes
        compressed = mode.name != DENSE.name
        return [
            mode.name,
            nbytes(sends.payload),
            nbytes(sends.sent),
            seconds(takes.wire),
            seconds(takes.compute) if self.measured else NONE,
            seconds(takes.exchange),
            f"{self.dense.takes.exchange / takes.exchange:.3g} x" if takes.exchange else NONE,
            _bound(choice.density, 1.0, lambda density: f"{density:.2g}"),
            _bound(choice.bandwidth, math.inf, rate),
            _ranks(choice.ranks) if compressed else NONE,
        ]


def advise(
    buckets: Sequence[Members],
    ranks: int,
    wire: Wire,
    names: str | Sequence[str] | None = None,
    backward: float = 0.0,
    measure: Callable[[Mode], Compute] | None = compute.measure,
    overlap: bool = True,
    check: Callable[[Mode], None] = lambda mode: None,
) -> Advice:
    """Compare modes, dense among them, by the predicted time of an exchange of so many ranks.

    ``names`` are modes as ``mode`` reads them, by default ``DEFAULT``; those for which ``check`` raises ValueError are
    left out.  ``backward`` is how many seconds a backward pass takes: with ``overlap``, buckets of modes without a
    memory travel behind it.  ``measure=None`` leaves out compressing.

    Raises ValueError for a mode whose bytes depend on the data, for ranks outside of [1, 65536], and for ``backward``
    outside of [0, 1e6].
    """
    chosen, refused = _allowed(modes(DEFAULT if names is None else names), check)
    if DENSE.name not in [m.name for m in chosen]:
        chosen.insert(0, DENSE)
    backward = number("backward", backward, most=LONGEST)
    question = Question(buckets, whole("ranks", ranks, least=1), wire, backward, overlap=overlap)
    for m in chosen:  # what cannot be told is refused before anything is measured
        question.predict(m)
    question = question._replace(computes=measured(chosen, measure))
    found = [_choice(question, m) for m in chosen]
    found.sort(key=lambda c: (c.takes.exchange, c.mode.name != DENSE.name))
    return Advice(tuple(found), tuple(refused), question, measure is not None)


def _allowed(chosen: list[Mode], check: Callable[[Mode], None]) -> tuple[list[Mode], list[tuple[str, str]]]:
    """Those that pass, and the names of the others with what was raised."""
    found, refused = [], []
    for m in chosen:
        try:
            check(m)
            found.append(m)
        except ValueError as error:
            refused.append((m.name, str(error)))
    return found, refused


def measured(chosen: Sequence[Mode], measure: Callable[[Mode], Compute] | None) -> Computes:
    """What each mode computes, those with a density at some others too; nothing if nothing is measured."""
    found: dict[tuple[str, float], Compute] = {}
    for m in chosen if measure else ():
        for density in (None,) if m.density is None else sorted({m.density, *DENSITIES}):
            key = m.kind, density or 1.0
            if measure and key not in found:
                found[key] = measure(m if density is None else m.at_density(density))
    return found


def _choice(question: Question, mode: Mode) -> Choice:
    sends = forecast(question.buckets, mode, question.ranks, question.wire.per_node)
    density, bandwidth, pays = None, None, []
    if mode.name != DENSE.name:
        density, bandwidth = break_even.density(question, mode), break_even.bandwidth(question, mode)
        pays = break_even.ranks(question, mode)
    return Choice(mode, sends, question.predict(mode), density, bandwidth, pays)


def described(wire: Wire, ranks: int | None = None) -> str:
    """A network in a few words; and, of a fit, whether it is for other ranks than were measured."""
    about = f"{printable(wire.link.name)} ({rate(wire.link.bandwidth)}, {seconds(wire.link.latency)})"
    if isinstance(wire, Fit):
        other = ", for others by formula" if ranks != wire.ranks else ""
        return f"{about}, up to {nbytes(wire.most)}{other}"
    shared = f" for the {wire.per_node} ranks of a node, {wire.inside.name} inside" if wire.per_node > 1 else ""
    return about + shared


def notes(wire: Wire, measured: bool) -> list[str]:
    """Where the two kinds of seconds come from, and what is in neither; how the bytes are sent."""
    compute = "measured on one thread of this machine (a GPU takes another one)" if measured else "adding up alone"
    found = [f"wire time: predicted; compute: {compute}; the update and what else a step takes are in neither"]
    if wire.per_node > 1:
        found.append("wire bytes: each rank to all others; wire time: within nodes first, as MPI and NCCL do it")
    return found


def sent_dense(mode: Mode, sends: Forecast) -> list[str]:
    """A line about the buckets of a mode that break-even makes dense, if there are any."""
    fallen = counted(len(sends.fallen), "bucket")
    return [f"  {mode.name}: {fallen} sent as dense, which is less"] if sends.fallen else []


def _bound(found: float | None, most: float, unit: Callable[[float], str]) -> str:
    if found is None:
        return NONE
    return unit(found) if 0 < found < most else "any" if found else "none"


def _ranks(found: Sequence[Bounds]) -> str:
    texts = [f"from {a}" if b is None else f"{a} to {b}" if a < b else f"{a}" for a, b in found]
    return ", ".join(texts) or "none"
