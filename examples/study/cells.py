"""The parts of the study, recorded one by one, so that a run that was killed goes on where it was."""

import os
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import trainings
import volume

from benchmarks.measure import interleaved
from benchmarks.namespaces import bits_per_second, measured
from distopt.comm import LocalCommunicator
from distopt.experiment import Experiment, read
from distopt.lab import advise, buckets, measure, network
from distopt.lab.cost.links import ETHERNET

HOSTS = Path(__file__).with_name("hosts.py")
LIMIT = 600  # seconds of a round
TRAINED = {"network": trainings.NETWORK, "batch": volume.BATCH, "lr": volume.RATE}


class Cell(NamedTuple):
    """A part of the study.

    Attributes:
        name: its record's, without '.json'.
        mode: as of ``Experiment``.
        seed: the number of the repetition.
        settings: all that its numbers depend on.
        measure: makes it: logs curves, and returns the ledger's totals or None, and results by name.
        hosts: how many real ones it needs; None if ranks are virtual.
    """

    name: str
    mode: str
    seed: int | None
    settings: dict
    measure: Callable
    hosts: int | None = None

    def record(self, folder):
        """Its record; None before it was measured, and if that was interrupted.

        Raises:
            ValueError: the file is no record, or one of other settings.
        """
        path = folder / f"{self.name}.json"
        if not path.exists():
            return None
        found = read(path)
        for field in ("mode", "seed", "settings"):
            if found[field] != getattr(self, field):
                wanted = f"{field} must be {getattr(self, field)!r}, got {found[field]!r}"
                raise ValueError(f"{path}: {wanted}; name another folder, or remove the file to measure again")
        return None if found["raised"] else found

    def run(self, folder):
        """Measure it, and write its record, whole or not at all."""
        ranks, path = trainings.RANKS, folder / f"{self.name}.json"
        with Experiment(path, self.mode, self.seed, ranks=ranks, hosts=self.hosts, **self.settings) as experiment:
            totals, results = self.measure(experiment)
            experiment.finish(totals, load_average=os.getloadavg()[0], **results)


def training(name, seed, epochs):
    """A training on virtual ranks, whose ledger counts what real ones would send."""
    run = volume.Run(name, trainings.RANKS, seed, epochs)

    def train(experiment):
        ranks, step, common = trainings.virtual(run)
        for epoch in volume.train(run, trainings.network(seed), step, ranks.ledger, common):
            rounded = {"accuracy": round(epoch.accuracy, 5), "loss": round(epoch.loss, 5)}
            experiment(epoch.step, rounded | {"wire": epoch.wire})
        return ranks.report(), {"accuracy": rounded["accuracy"]}

    stem = re.sub(r"[^\w.]+", "-", name)
    return Cell(f"training-{stem}-seed-{seed}", name, seed, TRAINED | {"epochs": epochs}, train)


def link_of(rate):
    """What a user tells ``distopt advise --link`` of a card of this rate: the share of it that is payload."""
    return f"{ETHERNET * bits_per_second(rate) / 1e6:g}Mbit/s"


def advice(rates, names):
    """What ``distopt advise`` predicts of an exchange, and what a step of one rank alone takes on this machine."""

    def predict(experiment):
        window = trainings.window_of("dense", LocalCommunicator())
        (alone,) = interleaved({"": window}, rounds=30, calls=1, uncounted=10).values()
        results, computes = {"alone": round(statistics.median(alone), 6)}, {}

        def measured_once(mode):
            if mode.name not in computes:
                computes[mode.name] = measure(mode)
            return computes[mode.name]

        for rate in rates:
            link, layers = network(link_of(rate)), buckets(trainings.shapes())
            for choice in advise(layers, trainings.RANKS, link, names, measure=measured_once).choices:
                name = choice.mode.name
                results |= {f"wire {name}": choice.sends.sent, f"{rate} {name}": round(choice.takes.exchange, 7)}
        return None, results

    return Cell("advise", "advise", None, TRAINED | {"rates": rates, "modes": names}, predict)


def steps(kind, rate, names, windows, number):
    """A round of steps between two hosts, in all modes in turn."""

    def take_turns(experiment):
        found = measured([str(HOSTS), rate, str(windows), *names], [trainings.RANKS // 2] * 2, LIMIT)
        for k in range(windows):
            experiment(k + 1, {name: round(seconds[k], 6) for name, seconds in found["seconds"].items()})
        return None, {}

    settings = TRAINED | {"rate": rate, "modes": names, "windows": windows}
    return Cell(f"{kind}-{rate}-round-{number}", kind, number, settings, take_turns, hosts=trainings.RANKS)
