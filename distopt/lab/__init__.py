"""Predict how many bytes a training step sends, how long its exchange takes, and which compression mode pays.

Example:
    >>> from distopt.lab import advise, buckets, network, shapes
    >>> advice = advise(buckets(shapes("resnet50")[::-1]), 64, network("1GbE"), "dense,dgc=0.001", measure=None)
    >>> advice.best.name
    'dgc=0.001'
"""

from distopt.lab.advice import Advice, Choice, advise
from distopt.lab.break_even import Bounds
from distopt.lab.compute import Compute, measure
from distopt.lab.forecast import Forecast, Sending, exchanges, forecast, observed, sendings, step_ledger, summary
from distopt.lab.modes import DEFAULT, Mode, mode, modes
from distopt.lab.network import Network, Wire, network, wire
from distopt.lab.question import Prediction, Question
from distopt.lab.shapes import buckets, shapes

__all__ = [
    "DEFAULT",
    "Advice",
    "Bounds",
    "Choice",
    "Compute",
    "Forecast",
    "Mode",
    "Network",
    "Prediction",
    "Question",
    "Sending",
    "Wire",
    "advise",
    "buckets",
    "exchanges",
    "forecast",
    "measure",
    "mode",
    "modes",
    "network",
    "observed",
    "sendings",
    "shapes",
    "step_ledger",
    "summary",
    "wire",
]
