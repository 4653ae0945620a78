"""The picture of ``distopt volume``: bytes and seconds of an exchange against ranks, and against density."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from distopt.cli import picture
from distopt.cli.volume_rows import Row
from distopt.units import nbytes, seconds
from distopt.volume import Mode, Question, forecast
from distopt.volume.advice import described
from distopt.volume.break_even import DENSE, density

DENSITIES = [10 ** (k / 8 - 5) for k in range(41)]  # 0.00001 to 1


NEAR = 1.4  # times a number of ranks: labels would meet


class Curve(NamedTuple):
    """Bytes on the wire and seconds of an exchange, by what lies across."""

    across: list[float]
    sent: list[float]
    exchange: list[float]


def draw(found: Sequence[Row], between: Sequence[Row], question: Question, model: str, path: Path) -> None:
    """Two panels over ranks, with more rows ``between`` those found; below them two over density, if a mode has one.

    The latter are of the middle one of the numbers of ranks, by formula, and so is dense if it is not among the modes.
    """
    ranks = sorted({row.ranks for row in found if row.ranks > 1})
    if not ranks:
        raise ValueError("nothing to draw: one rank sends nothing")
    sparse = list({row.mode.name: row.mode for row in found if row.mode.density is not None}.values())
    figure, panels = picture.panels(f"{model}, {described(question.wire)}", 2 if sparse else 1, 2)
    by_ranks = {row.mode.name: _over_ranks([*found, *between], row.mode) for row in found}
    styles = {name: picture.style(k) for k, name in enumerate(dict.fromkeys((DENSE.name, *by_ranks)))}
    _pair(panels[:2], "ranks", by_ranks, styles, str)
    for axes in panels[:2]:
        axes.set_xticks(_apart(ranks), map(str, _apart(ranks)))
        axes.minorticks_off()
    if sparse:
        there = question._replace(ranks=ranks[len(ranks) // 2])
        _densities(panels[2:], there, sparse, styles)
    picture.save(figure, path)


def _apart(ranks: Sequence[int]) -> list[int]:
    """Those that have room for a label."""
    found: list[int] = []
    for size in ranks:
        if not found or size >= NEAR * found[-1]:
            found.append(size)
    return found


def _over_ranks(found: Sequence[Row], mode: Mode) -> Curve:
    rows = sorted((row for row in found if row.mode.name == mode.name and row.ranks > 1), key=lambda row: row.ranks)
    return Curve([row.ranks for row in rows], [row.sends.sent for row in rows], [row.takes.exchange for row in rows])


def _densities(panels: Sequence[Any], there: Question, sparse: Sequence[Mode], styles: dict[str, Any]) -> None:
    """Each kind of mode once, on so many ranks; where it takes as long as dense there is a line."""
    kinds = {mode.kind: mode for mode in sparse}
    curves = {kind: _over_density(there, mode) for kind, mode in kinds.items()}
    named = {kind: styles[mode.name] for kind, mode in kinds.items()}
    _pair(panels, f"density, on {there.ranks} ranks", curves, named, lambda d: f"{d:.5f}".rstrip("0").rstrip("."))
    dense = forecast(there.buckets, DENSE, there.ranks).sent, there.predict(DENSE).exchange
    for axes, level in zip(panels, dense, strict=True):
        axes.axhline(level, color=styles[DENSE.name]["color"], linewidth=1, label=DENSE.name)
    for kind, mode in kinds.items():
        edge = density(there, mode) or 0.0
        if DENSITIES[0] < edge < 1:
            label = f"{kind} as dense: {edge:.2g}"
            panels[1].axvline(edge, color=named[kind]["color"], linewidth=1, linestyle=":", label=label)
    picture.legend(panels[-1])


def _over_density(there: Question, mode: Mode) -> Curve:
    modes = [mode.at_density(d) for d in DENSITIES]
    sent = [forecast(there.buckets, m, there.ranks).sent for m in modes]
    return Curve(DENSITIES, sent, [there.predict(m).exchange for m in modes])


def _pair(
    panels: Sequence[Any],
    across: str,
    curves: dict[str, Curve],
    styles: dict[str, Any],
    unit: Callable[[Any], str],
) -> None:
    """Bytes at the left, seconds at the right."""
    labels = ("wire bytes of one rank in a step", nbytes), ("predicted time of the exchange", seconds)
    for which, (axes, (label, shown)) in enumerate(zip(panels, labels, strict=True)):
        axes.set(xlabel=across, ylabel=label)
        for name, curve in curves.items():
            every = max(1, len(curve.across) // 8)
            axes.plot(curve.across, curve[1 + which], label=name, markevery=every, **styles[name])
        seen = [y for curve in curves.values() for y in curve[1 + which]]
        picture.log_axis(axes, "x", [x for curve in curves.values() for x in curve.across], unit)
        picture.log_axis(axes, "y", seen, shown)
    picture.legend(panels[-1])
