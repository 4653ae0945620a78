"""Tables and the picture of the records of examples/lm/study.py.

    python examples/lm/report.py [FOLDER]

Writes tables.md and frontier.png (which needs distopt[plot]) beside the folder of records.
"""

import statistics
import sys
from collections import defaultdict
from pathlib import Path

from methods import METHODS
from model import parameters

from distopt.experiment import read
from distopt.formatting import nbytes

RECORDS = Path(__file__).parents[2] / "docs" / "experiments" / "lm" / "records"
TRIED = "0.05"  # millions of parameters of a trial
DENSE = "dense"


class Trained:
    """Trainings that differ in their seed alone: losses by seed, and what rank 0 has sent in one."""

    def __init__(self):
        self.losses, self.sent, self.steps = {}, 0, 0

    def add(self, record):
        curve = record["curves"]["wire"]
        self.losses[record["seed"]] = record["results"]["loss"]
        self.sent, self.steps = curve["values"][-1], curve["steps"][-1]

    @property
    def mean(self):
        return statistics.fmean(self.losses.values())

    def above(self, other):
        """The loss in excess of another's, in percent, of each seed that both have."""
        common = sorted(self.losses.keys() & other.losses.keys())
        return [100 * (self.losses[seed] / other.losses[seed] - 1) for seed in common]


def studied(folder):
    """{(size, ranks, method): its trainings}, without the trials."""
    found = defaultdict(Trained)
    for path in sorted(folder.glob("*.json")):
        record = read(path)
        key = record["settings"]["size"], record["topology"]["ranks"], record["mode"]
        if record["seed"]:
            found[key].add(record)
    return found


def tried(folder):
    """{method: [(loss, rate, outer rate) of each trial]}, the best first."""
    found = defaultdict(list)
    for path in sorted(folder.glob("*.json")):
        record = read(path)
        if not record["seed"] and record["settings"]["size"] == TRIED:
            settings = record["settings"]
            found[record["mode"]].append((record["results"]["loss"], settings["rate"], settings["outer"]))
    return {method: sorted(found[method]) for method in METHODS if method in found}


def lines(folder):
    """All tables, as Markdown."""
    found = studied(folder)
    yield "# Tables of the language models"
    yield ""
    yield "Made by `examples/lm/report.py` from its records; [the page](../lm.md) says what they are."
    for size, ranks in sorted({key[:2] for key in found}, key=lambda key: (float(key[0]), key[1])):
        yield ""
        yield f"## {size} M parameters, {ranks} rank{'s' * (ranks > 1)}"
        yield ""
        yield "| method | seeds | held-out loss | above dense, % | bits a parameter and step | sent | fewer |"
        yield "|---|---:|---:|---:|---:|---:|---:|"
        dense = found.get((size, 4, DENSE))
        for method, of in METHODS.items():
            if (size, ranks, method) in found:
                yield row(of.title, found[size, ranks, method], dense, parameters(size))
    yield ""
    yield "## Trials: 0.05 M parameters, 4 ranks"
    yield ""
    yield "| method | trials | best rate | best outer rate | loss | worst |"
    yield "|---|---:|---:|---:|---:|---:|"
    for method, trials in tried(folder).items():
        (loss, rate, outer), (worst, *_) = trials[0], trials[-1]
        outer = f"{outer:g}" if len({trial[2] for trial in trials}) > 1 else "-"
        yield f"| {METHODS[method].title} | {len(trials)} | {rate:g} | {outer} | {loss:.3f} | {worst:.3f} |"


def row(title, of, dense, count):
    losses = list(of.losses.values())
    spread = f" ({min(losses):.4f} - {max(losses):.4f})" if len(losses) > 1 else ""
    above = of.above(dense) if dense else []
    excess = f"{statistics.fmean(above):+.2f}" if above else "-"
    fewer = f"{dense.sent / of.sent:,.3g} x" if dense and of.sent else "-"
    bits = 8 * of.sent / count / of.steps
    return f"| {title} | {len(losses)} | {of.mean:.4f}{spread} | {excess} | {bits:.3g} | {nbytes(of.sent)} | {fewer} |"


def picture(folder, path):
    """Loss above dense over bits a parameter and step, of four ranks."""
    from matplotlib.figure import Figure

    found = studied(folder)
    sizes = [size for size in ("0.1", "0.2") if (size, 4, DENSE) in found]
    if not sizes:
        return
    figure = Figure(figsize=(5.5 * len(sizes), 4.5), layout="constrained")
    for axes, size in zip(figure.subplots(1, len(sizes), squeeze=False)[0], sizes, strict=True):
        dense = found[size, 4, DENSE]
        for method, of in METHODS.items():
            trained = found.get((size, 4, method))
            if trained and trained.sent:
                x, y = 8 * trained.sent / parameters(size) / trained.steps, statistics.fmean(trained.above(dense))
                axes.plot(x, y, "o", markersize=4)
                axes.annotate(of.title, (x, y), xytext=(4, 2), textcoords="offset points", fontsize=6)
        axes.axhline(0.5, linewidth=0.6, linestyle=":")
        axes.set(
            xscale="log", title=f"{size} M parameters, 4 ranks", xlabel="bits a parameter and step, sent by a rank"
        )
        axes.set_ylabel("held-out loss above dense AdamW, %")
    figure.savefig(path, dpi=130)


def main():
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else RECORDS
    text = "\n".join(lines(folder)) + "\n"
    (folder.parent / "tables.md").write_text(text)
    print(text, end="")
    picture(folder, folder.parent / "frontier.png")


if __name__ == "__main__":
    main()
