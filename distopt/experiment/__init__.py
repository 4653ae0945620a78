"""One JSON file per run: what was trained, on what, how it went, and the bytes that this took."""

from distopt.experiment.record import read
from distopt.experiment.run import Experiment

__all__ = ["Experiment", "read"]
