"""How many bytes a model sends in a step, how long that takes, and which mode pays."""

from distopt.volume.advice import Advice, Choice, advise
from distopt.volume.break_even import Bounds
from distopt.volume.compute import Compute, measure
from distopt.volume.forecast import Forecast, Sending, forecast, observed, sendings, summary, written
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
    "forecast",
    "measure",
    "mode",
    "modes",
    "network",
    "observed",
    "sendings",
    "shapes",
    "summary",
    "wire",
    "written",
]
