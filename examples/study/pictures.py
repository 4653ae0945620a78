"""The pictures of the study."""

import statistics

import trainings
from hosts import ALONE
from results import spoken

from benchmarks.namespaces import bits_per_second
from distopt import formatting
from distopt.lab.commands import plotting

MARKED = (0, 1, 3, 7, 15, 31)  # epochs with a marker and a bar; the last one has them too


@plotting.styled()
def accuracy(study, rates, path):
    """Mean accuracy over bytes, and over seconds at each rate; bars are ranges over seeds."""
    from matplotlib.figure import Figure

    figure = Figure((11, 4.4))
    panels = figure.subplots(1, 1 + len(rates), sharey=True)
    sent = lambda record: record["curves"]["wire"]["values"]  # noqa: E731
    panel(panels[0], study, sent, formatting.nbytes, "bytes sent by a rank (log)")
    for axes, rate in zip(panels[1:], rates, strict=True):
        how = "measured" if rate in study.steps.rates else "predicted"
        spent = lambda record, rate=rate: study.seconds(record, rate)  # noqa: E731
        panel(axes, study, spent, formatting.seconds, f"time at {spoken(rate)}, steps {how} (log)")
    panels[0].set(ylabel="test accuracy, %", ylim=(85, 100))
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    plotting.save(figure, path)


def panel(axes, study, spent, unit, label):
    """The curves of all modes over what they have spent, from where they have spent something."""
    shown = []
    for k, (mode, records) in enumerate(study.trainings.items()):
        across = [statistics.fmean(x) for x in zip(*map(spent, records), strict=True)]
        values = [record["curves"]["accuracy"]["values"] for record in records]
        ranges = [
            (x, 100 * statistics.fmean(y), 100 * (statistics.fmean(y) - min(y)), 100 * (max(y) - statistics.fmean(y)))
            for x, y in zip(across, zip(*values, strict=True), strict=True)
            if x > 0  # local steps send nothing at first
        ]
        marked = sorted({epoch for epoch in MARKED if epoch < len(ranges)} | {len(ranges) - 1})
        look = plotting.look(k)
        axes.plot(*list(zip(*ranges, strict=True))[:2], label=trainings.MODES[mode], markevery=marked, **look)
        bars(axes, [ranges[epoch] for epoch in marked], color=look["color"], fmt="none")
        shown += [x for x, *_ in ranges]
    plotting.log_axis(axes, "x", shown, unit)
    axes.set_xlabel(label)


def bars(axes, ranges, **look):
    """Bars for (x, y, below, above)."""
    across, up, below, above = zip(*ranges, strict=True)
    axes.errorbar(across, up, (below, above), elinewidth=0.8, capsize=1.5, **look)


@plotting.styled()
def grid(study, path):
    """The share of computing over bandwidth for each H: lines are predicted, markers measured."""
    title = f"{trainings.RANKS} ranks on two hosts: predicted (lines), measured (markers)"
    figure, axes = plotting.new(title, "bandwidth (log)", "share of the time that is computing, %")
    across = [bits_per_second(rate) / 8 for rate in study.grid.rates]
    alone = [100 * study.grid.median(rate, ALONE) for rate in study.grid.rates]
    for k, mode in enumerate(study.grid.modes):
        look = plotting.look(k)
        predicted = [study.predicted(study.grid, rate, mode) for rate in study.grid.rates]
        axes.plot(across, [a / p for a, p in zip(alone, predicted, strict=True)], color=look["color"])
        ranges = []
        for x, a, rate in zip(across, alone, study.grid.rates, strict=True):
            high, middle, low = (a / seconds for seconds in study.grid.quartiles(rate, mode))
            ranges.append((x, middle, middle - low, high - middle))
        every = f"H = {trainings.every(mode)}"
        bars(axes, ranges, color=look["color"], fmt=look["marker"], label=every)
    axes.set_xscale("log")
    axes.set_xticks(across, list(map(spoken, study.grid.rates)))
    axes.minorticks_off()
    axes.legend(bbox_to_anchor=(1.0, 0.5))
    plotting.save(figure, path)
