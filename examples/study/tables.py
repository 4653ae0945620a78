"""The tables of the study, as Markdown."""

import statistics

import trainings
from hosts import ALONE
from results import spoken

from distopt import formatting

GOOD = 0.97
NEAR = 0.15  # of a prediction


def lines(study, rates):
    """All tables: accuracy, steps at each rate, and the grid."""
    yield "# Tables of the study"
    yield ""
    yield "Made by `examples/study/study.py` from its records; `docs/experiments/study.md` says what they are."
    yield ""
    yield from accuracy(study, rates)
    for rate in study.steps.rates:
        yield from steps(study, rate)
    if study.grid.rates:
        yield from grid(study)
    if loads := study.steps.loads + study.grid.loads:
        rounds = formatting.counted(len(study.steps.loads) // len(study.steps.rates), "round")
        yield f"Steps of {rounds}; after these the machine's load average was {min(loads):.1f} to {max(loads):.1f}."


def markdown(head, rows):
    yield "| " + " | ".join(head) + " |"
    yield "|---" + "|---:" * (len(head) - 1) + "|"
    yield from ("| " + " | ".join(row) + " |" for row in rows)
    yield ""


def accuracy(study, rates):
    yield f"## Accuracy against bytes and seconds, {trainings.RANKS} ranks: mean (range over seeds)"
    yield ""
    good, (reference, *_) = f"to {100 * GOOD:g} %", study.trainings.values()
    head = ["mode", "test accuracy, %", "from dense, points", "bytes a step", "fewer", f"bytes {good}"]
    rows = [accuracy_of(study, mode, reference, rates) for mode in study.trainings]
    yield from markdown([*head, *(f"seconds {good}, {spoken(rate)}" for rate in rates)], rows)


def accuracy_of(study, mode, reference, rates):
    """A row; it is compared with the trainings of a reference, seed by seed."""
    records = study.trainings[mode]
    final, others = ([100 * record["results"]["accuracy"] for record in of] for of in (records, reference))
    sent = [record["curves"]["wire"]["values"] for record in records]
    along = [[study.seconds(record, rate) for record in records] for rate in rates]
    return [
        trainings.MODES[mode],
        ranged(final, "{:.2f}".format),
        ranged([a - b for a, b in zip(final, others, strict=True)], "{:+.2f}".format),
        formatting.nbytes(wire_of(records)),
        times(wire_of(reference) / wire_of(records)),
        ranged(list(map(until_good, records, sent)), formatting.nbytes),
        *(ranged(list(map(until_good, records, spent)), "{:.2f}".format) for spent in along),
    ]


def times(ratio):
    return f"{ratio:,.0f} x" if ratio >= 1000 else f"{ratio:.3g} x"


def wire_of(records):
    """The bytes of a mean step."""
    return statistics.fmean(record["curves"]["wire"]["values"][-1] / record["steps"] for record in records)


def until_good(record, spent):
    """What had been spent at the first epoch of good accuracy; None without one."""
    values = record["curves"]["accuracy"]["values"]
    return next((x for x, value in zip(spent, values, strict=True) if value >= GOOD), None)


def ranged(values, unit):
    """Mean and range; how many there are, if some seeds have none."""
    if None in values:
        return f"{sum(x is not None for x in values)} of {len(values)} seeds"
    return f"{unit(statistics.fmean(values))} ({unit(min(values))} - {unit(max(values))})"


def steps(study, rate):
    yield f"## A step at {spoken(rate)}: measured, and predicted by `distopt advise`"
    yield ""
    rows = []
    for mode in study.steps.modes:
        predicted = study.predicted(study.steps, rate, mode)
        ratio = study.steps.median(rate, mode) / predicted
        rows.append([trainings.MODES[mode], middle(study.steps, rate, mode), f"{1e3 * predicted:.1f}", f"{ratio:.2f}"])
    yield from markdown(["mode", "measured, ms: median (quartiles)", "predicted, ms", "measured / predicted"], rows)
    yield f"A step of one rank alone, which both have in them: {middle(study.steps, rate, ALONE)} ms."
    yield ""


def middle(steps, rate, mode):
    low, median, high = (f"{1e3 * x:.1f}" for x in steps.quartiles(rate, mode))
    return f"{median} ({low} - {high})"


def grid(study):
    rates, modes = study.grid.rates, study.grid.modes
    measured = [[study.grid.median(rate, mode) for rate in rates] for mode in modes]
    predicted = [[study.predicted(study.grid, rate, mode) for rate in rates] for mode in modes]
    alone = [study.grid.median(rate, ALONE) for rate in rates]

    def rows(cell):
        """By H; ``cell`` makes a text of seconds alone, measured and predicted."""
        for mode, *seconds in zip(modes, measured, predicted, strict=True):
            yield [str(trainings.every(mode)), *map(cell, alone, *seconds)]

    head = ["H", *map(spoken, rates)]
    yield "## Local steps and bandwidth: share of the time that is computing, %, measured (predicted)"
    yield ""
    yield from markdown(head, rows(lambda a, m, p: f"{100 * a / m:.0f} ({100 * a / p:.0f})"))
    yield "## The same: seconds of a step, measured / predicted"
    yield ""
    yield from markdown(head, rows(lambda a, m, p: f"{m / p:.2f}"))
    ratios = [m / p for pair in zip(measured, predicted, strict=True) for m, p in zip(*pair, strict=True)]
    near = f"{sum(abs(r - 1) <= NEAR for r in ratios)} of {len(ratios)} are within {100 * NEAR:.0f} %"
    yield f"{near}, and all between {min(ratios):.2f} and {max(ratios):.2f}."
    yield ""
