"""What the records of the study say."""

import statistics
from collections import defaultdict

import trainings
from hosts import ALONE

from benchmarks.namespaces import bits_per_second
from distopt.lab.cost.links import ETHERNET


class Steps:
    """Steps that were measured between two hosts.

    Attributes:
        seconds: {rate: {mode: seconds of a step, of all windows and rounds}}
        loads: the machine's load averages.
    """

    def __init__(self, records):
        self.seconds, self.loads = {}, [record["results"]["load_average"] for record in records]
        for record in records:
            of_rate = self.seconds.setdefault(record["settings"]["rate"], defaultdict(list))
            for mode, curve in record["curves"].items():
                of_rate[mode] += curve["values"]

    @property
    def rates(self):
        return sorted(self.seconds, key=bits_per_second, reverse=True)

    @property
    def modes(self):
        return [mode for mode in next(iter(self.seconds.values())) if mode != ALONE]

    def quartiles(self, rate, mode):
        return statistics.quantiles(self.seconds[rate][mode], n=4, method="inclusive")

    def median(self, rate, mode):
        return statistics.median(self.seconds[rate][mode])


class Study:
    """All records.

    Attributes:
        trainings: {mode: its records, by seed}
        steps: ``Steps`` in the modes of the trainings.
        grid: ``Steps`` with local steps, at more rates.
    """

    def __init__(self, records):
        kinds = defaultdict(list)
        for record in records:
            kinds[record["mode"]].append(record)
        self.trainings = {mode: kinds[mode] for mode in trainings.MODES if mode in kinds}
        self.steps, self.grid = Steps(kinds["steps"]), Steps(kinds["grid"])
        (self._advice,) = (record["results"] for record in kinds["advise"])

    def predicted(self, steps, rate, mode):
        """Seconds of a step: advise's exchange, and one rank's own part, which is measured beside the steps."""
        alone = steps.median(rate, ALONE) if rate in steps.rates else self._advice["alone"]
        return alone + self._advice[f"{rate} {mode}"]

    def step(self, rate, mode):
        """Seconds of a step: measured between hosts, else predicted."""
        return self.steps.median(rate, mode) if rate in self.steps.rates else self.predicted(self.steps, rate, mode)

    def seconds(self, record, rate):
        """Seconds of a training up to each of its epochs.

        They are those of so many steps; what DGC's warm-up sends in excess of other steps takes its time on the line.
        """
        curve, mode = record["curves"]["wire"], record["mode"]
        step, usual, line = self.step(rate, mode), self._advice[f"wire {mode}"], ETHERNET * bits_per_second(rate) / 8
        excess = [wire - count * usual for count, wire in zip(curve["steps"], curve["values"], strict=True)]
        return [count * step + more / line for count, more in zip(curve["steps"], excess, strict=True)]


def spoken(rate):
    """A rate of tc(8) in the words of a title."""
    bits = bits_per_second(rate)
    return f"{bits / 1e9:g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:g} Mbit/s"
