"""Which mode pays, on how many ranks, on which network; or that none does."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from distopt.numbers import number, whole
from distopt.tables import Members
from distopt.units import NONE, nbytes, rate, seconds, table
from distopt.volume import break_even, compute
from distopt.volume.break_even import DENSE, MOST, Bounds
from distopt.volume.compute import Compute
from distopt.volume.forecast import Forecast, forecast
from distopt.volume.modes import DEFAULT, Mode, modes
from distopt.volume.network import Network, Wire
from distopt.volume.question import Computes, Prediction, Question

HEAD = "mode", "payload", "wire", "wire time", "compute", "step", "dense takes"
PAYS = "pays below density", "below link", "for ranks"
DENSITIES = 1e-3, 1e-2, 1e-1  # at which compression is measured
HARDLY = 1.05  # what a step is faster by, to be worth the trouble


class Choice(NamedTuple):
    """A mode: what it sends, how long a step takes, and where it is faster than dense (``break_even``)."""

    mode: Mode
    sends: Forecast
    takes: Prediction
    density: float | None
    bandwidth: float | None
    ranks: Bounds | None


class Advice(NamedTuple):
    """All modes, the fastest first; ``print(advice)`` shows them.

    It is about time alone: what compressing does to learning, only training tells.
    """

    choices: tuple[Choice, ...]
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
        """One sentence."""
        best, dense = self.choices[0], self.dense.takes
        if self.question.ranks == 1:
            return "Do not compress: one rank sends nothing."
        name, step = best.mode.name, best.takes.step
        if name == DENSE.name:
            hidden = self.question.backward + dense.wire - step
            behind = f", with {seconds(hidden)} of the exchange behind the backward pass" if hidden > 0 else ""
            others = [f"; {c.mode.name} takes {seconds(c.takes.step)}" for c in self.choices[1:2]]
            return f"Do not compress: dense takes {seconds(step)}{behind}{''.join(others)}."
        if dense.step < HARDLY * step:
            return f"Hardly worth it: {name} takes {seconds(step)}, and dense {seconds(dense.step)}."
        return f"Use {name}: a step takes {seconds(step)}, and dense {dense.step / step:.3g} times as long."

    def __str__(self) -> str:
        rows = [(*HEAD, *PAYS), *(self._cells(choice) for choice in self.choices)]
        about = f"{self.question.ranks} ranks, {described(self.question.wire)}"
        backward = f"; backward {seconds(self.question.backward)}" if self.question.backward else ""
        dense = [line for c in self.choices for line in sent_dense(c.mode, c.sends)]
        head = f"{about}{backward}; bytes of one rank in a step"
        return "\n".join([head, *table(rows), *dense, note(self.measured), self.verdict])

    def _cells(self, choice: Choice) -> list[str]:
        mode, sends, takes = choice.mode, choice.sends, choice.takes
        compressed = mode.name != DENSE.name
        return [
            mode.name,
            nbytes(sends.payload),
            nbytes(sends.sent),
            seconds(takes.wire),
            seconds(takes.compute) if self.measured else NONE,
            seconds(takes.step),
            f"{self.dense.takes.step / takes.step:.3g} x" if takes.step else NONE,
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
) -> Advice:
    """Compare modes, dense among them, by the predicted time of a step of so many ranks.

    ``names`` are modes as ``mode`` reads them, by default ``DEFAULT``.  ``backward`` is how many seconds a backward
    pass takes: buckets of modes without a memory travel behind it.  ``measure=None`` leaves out compressing.

    Raises ValueError for a mode whose bytes depend on the data, for ranks below 1 and a negative ``backward``.
    """
    chosen = modes(DEFAULT if names is None else names)
    if DENSE.name not in [m.name for m in chosen]:
        chosen.insert(0, DENSE)
    question = Question(buckets, whole("ranks", ranks, least=1), wire, number("backward", backward))
    for m in chosen:  # what cannot be told is refused before anything is measured
        question.predict(m)
    question = question._replace(computes=measured(chosen, measure))
    found = [_choice(question, m) for m in chosen]
    found.sort(key=lambda c: (c.takes.step, c.mode.name != DENSE.name))
    return Advice(tuple(found), question, measure is not None)


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
    sends = forecast(question.buckets, mode, question.ranks, getattr(question.wire, "per_node", 1))
    where = break_even.density, break_even.bandwidth, break_even.ranks
    found = [None] * 3 if mode.name == DENSE.name else [look(question, mode) for look in where]
    return Choice(mode, sends, question.predict(mode), *found)


def described(wire: Wire) -> str:
    """A network in a few words."""
    shared = ""
    if isinstance(wire, Network) and wire.per_node > 1:
        shared = f" for the {wire.per_node} ranks of a node, {wire.inside.name} inside"
    return f"{wire.link.name} ({rate(wire.link.bandwidth)}, {seconds(wire.link.latency)}){shared}"


def note(measured: bool) -> str:
    """Where the two kinds of seconds come from."""
    compute = "measured on one thread of this machine (a GPU takes another one)" if measured else "left out"
    return f"wire time: predicted; compute: {compute}"


def sent_dense(mode: Mode, sends: Forecast) -> list[str]:
    """A line about the buckets of a mode that break-even makes dense, if there are any."""
    return [f"  {mode.name}: {len(sends.fallen)} buckets are sent as dense ones, which is less"] if sends.fallen else []


def _bound(found: float | None, most: float, unit: Callable[[float], str]) -> str:
    if found is None:
        return NONE
    return unit(found) if 0 < found < most else "any" if found else "none"


def _ranks(found: Bounds | None) -> str:
    if found is None:
        return "none"
    return f"{found.first} to {found.last}" if found.last < MOST // 2 else f"from {found.first}"
