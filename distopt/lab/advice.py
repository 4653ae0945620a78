"""Compare compression modes by predicted time: which pays, on how many ranks and on which network."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from distopt.checks import check_float, check_int
from distopt.comm.ranks import housed
from distopt.formatting import NONE, counted, nbytes, printable, rate, seconds, table
from distopt.kernels.layout import BucketLayout
from distopt.lab import break_even, compute
from distopt.lab.break_even import DENSE, Bounds
from distopt.lab.compute import Compute
from distopt.lab.fit import Fit
from distopt.lab.forecast import Forecast, forecast
from distopt.lab.modes import DEFAULT, Mode, modes
from distopt.lab.network import Wire
from distopt.lab.question import Computes, Prediction, Question

DENSITIES = 1e-3, 1e-2, 1e-1, 0.5  # at which modes with a density are measured
HARDLY = 1.05  # an exchange must be faster by this factor to be worthwhile
TOO_LITTLE = 1e-3  # seconds; the overhead of a step in Python is as large
MAX_BACKWARD_SECONDS = 1e6  # of a backward pass at most
CAVEAT = "What it does to learning, only training tells."


class Choice(NamedTuple):
    """One compression mode, with its predicted cost and the limits up to which it beats dense gradients.

    Attributes:
        mode: the compression mode.
        sends: the bytes of one rank in a step.
        takes: the predicted seconds of a step's exchange.
        density: the fraction of entries sent below which the mode is faster than dense; None if it has no density.
        bandwidth: the bytes per second of a link below which the mode is faster; None where no link decides.
        ranks: the ranges of numbers of ranks in which the mode is faster; empty for dense.

    Example:
        >>> from distopt.lab import advise, buckets, network
        >>> gradients = buckets([("weight", (1000, 1000))])
        >>> advice = advise(gradients, 8, network("1GbE"), "dense,half", measure=None)
        >>> [(choice.mode.name, choice.sends.payload) for choice in advice.choices]
        [('half', 2000000), ('dense', 4000000)]
    """

    mode: Mode
    sends: Forecast
    takes: Prediction
    density: float | None
    bandwidth: float | None
    ranks: Sequence[Bounds]


class Advice(NamedTuple):
    """A comparison of compression modes, the fastest first; ``print(advice)`` shows it as a table.

    It is about time alone: how compression affects learning, only training tells.

    Attributes:
        choices: the modes by increasing time of the exchange.
        refused: (name, reason) pairs of modes that ``check`` of ``advise`` refused.
        question: the gradients, ranks and network that were asked about.
        measured: whether the time of compressing was measured; else only the adding up of payloads counts.

    Example:
        >>> from distopt.lab import advise, buckets, network
        >>> advice = advise(buckets([("weight", (1000, 1000))]), 8, network("1GbE"), "dense,half", measure=None)
        >>> advice.best.name
        'half'
        >>> f"{advice.dense.takes.wire:.4f} s"
        '0.0602 s'
        >>> advice.verdict.partition(".")[0]
        'Use half: the exchange takes 30'
    """

    choices: tuple[Choice, ...]
    refused: tuple[tuple[str, str], ...]
    question: Question
    measured: bool

    @property
    def best(self) -> Mode:
        """The fastest mode; dense if nothing is faster."""
        return self.choices[0].mode

    @property
    def dense(self) -> Choice:
        """The choice without compression."""
        return next(c for c in self.choices if c.mode.name == DENSE.name)

    @property
    def verdict(self) -> str:
        """A recommendation in one sentence, with a second one if the mode changes what is learned."""
        best, dense = self.choices[0], self.dense.takes
        if self.question.ranks == 1:
            return "Do not compress: one rank sends nothing."
        name, least = best.mode.name, best.takes.exchange
        if name == DENSE.name:
            hidden = self.question.backward + dense.wire - least
            hidden_part = f", with {seconds(hidden)} of the exchange behind the backward pass" if hidden > 0 else ""
            runner_up = [f"; {c.mode.name} takes {seconds(c.takes.exchange)}" for c in self.choices[1:2]]
            return f"Do not compress: dense takes {seconds(least)}{hidden_part}{''.join(runner_up)}."
        if dense.exchange < max(HARDLY * least, least + TOO_LITTLE):
            return f"Hardly worth it: {name} takes {seconds(least)}, and dense {seconds(dense.exchange)}."
        what = "backward pass and exchange take" if self.question.backward else "the exchange takes"
        times = f"{dense.exchange / least:.3g}" if least else "infinitely"
        return f"Use {name}: {what} {seconds(least)}, and dense {times} times as long. {CAVEAT}"

    def __str__(self) -> str:
        question = self.question
        lines = []
        for choice in self.choices:
            takes = choice.takes
            columns = {
                "mode": choice.mode.name,
                "payload": nbytes(choice.sends.payload),
                "wire": nbytes(choice.sends.sent),
                "wire time": seconds(takes.wire),
                "compute": seconds(takes.compute) if self.measured else NONE,
                "backward + exchange" if question.backward else "exchange": seconds(takes.exchange),
                "dense takes": f"{self.dense.takes.exchange / takes.exchange:.3g} x" if takes.exchange else NONE,
                "pays below density": _bound(choice.density, 1.0, lambda density: f"{density:.2g}"),
                "below link": _bound(choice.bandwidth, math.inf, rate),
                "for ranks": NONE if choice.mode.name == DENSE.name else _ranks(choice.ranks),
            }
            lines.append(columns)
        who, whose = counted(question.ranks, "rank"), "one rank"
        if question.logical:
            who, whose = housed(question.logical, question.ranks), "the first process"
        about = f"{who}, {described(question.wire, question.ranks)}"
        backward = f"; backward {seconds(question.backward)}" if question.backward else ""
        more = [
            f"  {choice.mode.name}: {counted(len(choice.sends.fallen), 'bucket')} sent as dense, which is less"
            for choice in self.choices
            if choice.sends.fallen
        ]
        more += [f"  {name}: not here. {why}" for name, why in self.refused]
        shown = table([[*lines[0]], *([*columns.values()] for columns in lines)])
        head = f"{about}{backward}; bytes of {whose} in a step"
        return "\n".join([head, *shown, *more, *notes(question.wire, self.measured), self.verdict])


def advise(
    buckets: Sequence[BucketLayout],
    ranks: int,
    wire: Wire,
    names: str | Sequence[str] | None = None,
    backward: float = 0.0,
    measure: Callable[[Mode], Compute] | None = compute.measure,
    overlap: bool = True,
    check: Callable[[Mode], None] = lambda mode: None,
    logical: int | None = None,
) -> Advice:
    """Compare modes, dense among them, by the predicted time of one exchange of gradients.

    Args:
        buckets: the gradients' buckets (``buckets``).
        ranks: the number of ranks, in [1, 65536].
        wire: the network, or a measured fit of one.
        names: the modes, in the notation of ``mode``; by default ``DEFAULT``.
        backward: the seconds of a backward pass, in [0, 1e6].
        measure: returns the compute cost of a mode; None leaves out the time of compressing.
        overlap: whether buckets travel while the backward pass goes on, unless all have their messages together.
        check: raises ValueError for a mode to be left out; the reason is kept in ``Advice.refused``.
        logical: how many ranks live in ``ranks`` processes; None for one in each.

    Raises:
        ValueError: the bytes of a mode depend on the data, or an argument is out of range.

    Example:
        >>> from distopt.lab import advise, buckets, network, shapes
        >>> gradients = buckets(shapes("resnet50")[::-1])
        >>> advice = advise(gradients, 64, network("1GbE"), "half,topk=0.01", measure=None)
        >>> [choice.mode.name for choice in advice.choices]
        ['topk=0.01', 'half', 'dense']
        >>> advise(gradients, 1, network("1GbE"), "topk=0.01", measure=None).verdict
        'Do not compress: one rank sends nothing.'
    """
    chosen, refused = [], []
    for m in modes(DEFAULT if names is None else names):
        try:
            check(m)
            chosen.append(m)
        except ValueError as error:
            refused.append((m.name, str(error)))
    if DENSE.name not in [m.name for m in chosen]:
        chosen.insert(0, DENSE)
    backward = check_float("backward", backward, most=MAX_BACKWARD_SECONDS)
    question = Question(buckets, check_int("ranks", ranks, least=1), wire, backward, overlap=overlap, logical=logical)
    for m in chosen:  # modes without a forecast are refused before anything is measured
        question.predict(m)
    question = question._replace(computes=measured(chosen, measure))
    choices = []
    for m in chosen:
        density, bandwidth, pays = None, None, []
        if m.name != DENSE.name:
            density, bandwidth = break_even.density(question, m), break_even.bandwidth(question, m)
            pays = break_even.ranks(question, m)
        sends = forecast(buckets, m, ranks, wire.per_node, logical=logical)
        choices.append(Choice(m, sends, question.predict(m), density, bandwidth, pays))
    choices.sort(key=lambda c: (c.takes.exchange, c.mode.name != DENSE.name))
    return Advice(tuple(choices), tuple(refused), question, measure is not None)


def measured(chosen: Sequence[Mode], measure: Callable[[Mode], Compute] | None) -> Computes:
    """Measure the compute cost of modes, by (kind, density); none if ``measure`` is None."""
    # a mode with a density is also measured at each of DENSITIES, for the search of its break-even
    computes: dict[tuple[str, float], Compute] = {}
    for m in chosen if measure else ():
        for density in (None,) if m.density is None else sorted({m.density, *DENSITIES}):
            key = m.kind, density or 1.0
            if measure and key not in computes:
                computes[key] = measure(m if density is None else m.at_density(density))
    return computes


def described(wire: Wire, ranks: int | None = None) -> str:
    """Describe a network in a few words; for a fit, say whether ``ranks`` differs from what was measured."""
    about = f"{printable(wire.link.name)} ({rate(wire.link.bandwidth)}, {seconds(wire.link.latency)})"
    if isinstance(wire, Fit):
        other = ", for others by formula" if ranks != wire.ranks else ""
        return f"{about}, up to {nbytes(wire.most)}{other}"
    shared = f" for the {wire.per_node} ranks of a node, {wire.inside.name} inside" if wire.per_node > 1 else ""
    return about + shared


def notes(wire: Wire, measured: bool) -> list[str]:
    """Return footnotes of a table: the sources of both kinds of seconds, and how bytes are sent."""
    compute = "measured on one thread of this machine (a GPU takes another one)" if measured else "adding up alone"
    lines = [f"wire time: predicted; compute: {compute}; the update and what else a step takes are in neither"]
    if wire.per_node > 1:
        lines.append(
            "wire bytes: each rank to all others, or by nodes where a step goes so; wire time: within nodes first"
        )
    return lines


def _bound(bound: float | None, most: float, unit: Callable[[float], str]) -> str:
    if bound is None:
        return NONE
    return unit(bound) if 0 < bound < most else "any" if bound else "none"


def _ranks(bounds: Sequence[Bounds]) -> str:
    texts = [f"from {a}" if b is None else f"{a} to {b}" if a < b else f"{a}" for a, b in bounds]
    return ", ".join(texts) or "none"
