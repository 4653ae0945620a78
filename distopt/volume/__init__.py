"""Predict how many bytes a training step sends, how long its exchange takes, and which compression mode pays.

Example:
    >>> from distopt.volume import advise, buckets, network, shapes
    >>> advice = advise(buckets(shapes("resnet50")[::-1]), 64, network("1GbE"), "dense,dgc=0.001", measure=None)
    >>> advice.best.name
    'dgc=0.001'
"""

from distopt.volume.advice import Advice, Choice, advise
from distopt.volume.break_even import Bounds
from distopt.volume.compute import Compute, measure
from distopt.volume.forecast import Forecast, Sending, exchanges, forecast, observed, sendings, step_ledger, summary
from distopt.volume.modes import DEFAULT, Mode, mode, modes
from distopt.volume.network import Network, Wire, network, wire
from distopt.volume.question import Prediction, Question
from distopt.volume.shapes import buckets, shapes

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
