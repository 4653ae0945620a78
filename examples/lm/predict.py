"""Predict the loss at 1 M parameters from that at 0.05 to 0.4 M, before anything is trained there.

    python examples/lm/predict.py [FOLDER]

Reads the records of the part ``sizes`` of examples/lm/study.py, and writes predictions.json beside their folder: of
dense and of DiLoCo with 1, 2 and 4 ranks the loss L = A N^b, a line through the logarithms of all seeds' losses (as
Charles et al., "Communication-efficient language model training scales reliably and robustly: scaling laws for
DiLoCo", 2025, have it), and the interval in which the mean of three seeds lies in 19 of 20 cases if that is the law.
It refuses to write once a training at 1 M parameters is recorded.
"""

import json
import math
import sys
from pathlib import Path

import numpy as np
from model import parameters
from report import RECORDS, studied

from distopt.version import __version__

AIM, SEEDS = "1", 3
# Student's t of 95 % of both sides, by degrees of freedom
T95 = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228}


def predicted(losses):
    """What follows of ``{parameters: losses}`` for AIM: the loss, its interval, and the law's A and b."""
    x = np.log([n for n, of in losses.items() for _ in of])
    y = np.log([loss for of in losses.values() for loss in of])
    b, log_a = np.polyfit(x, y, 1)
    free = len(x) - 2
    spread = math.sqrt(float(np.sum((y - b * x - log_a) ** 2)) / free)
    at = math.log(parameters(AIM))
    off = (at - x.mean()) ** 2 / float(np.sum((x - x.mean()) ** 2))
    half = T95[min(free, 10)] * spread * math.sqrt(1 / SEEDS + 1 / len(x) + off)
    loss, low, high = (math.exp(b * at + log_a + side * half) for side in (0, -1, 1))
    return {"loss": loss, "low": low, "high": high, "A": math.exp(log_a), "b": float(b), "trainings": len(x)}


def predictions(folder):
    """{method and ranks: what is predicted} of all that was trained at three sizes at least."""
    found = studied(folder)
    if any(size == AIM for size, _, _ in found):
        raise ValueError(f"{folder} has trainings at {AIM} M parameters: a prediction comes before them")
    of_methods = {}
    for (size, ranks, method), trained in found.items():
        sizes = of_methods.setdefault(f"{method}, {ranks} ranks", {})
        sizes[parameters(size)] = list(trained.losses.values())
    return {name: predicted(sizes) for name, sizes in sorted(of_methods.items()) if len(sizes) > 2}


def main():
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else RECORDS
    found = {"aim": parameters(AIM), "distopt": __version__, "predictions": predictions(folder)}
    text = json.dumps(found, indent=1)
    (folder.parent / "predictions.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
