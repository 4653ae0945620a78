"""Observe how good what a step sends is: energy, residual, age, density and cosine."""

from distopt.lab.observe.hook import observe
from distopt.lab.observe.observer import Callback
from distopt.lab.observe.quality import Quality

__all__ = ["Callback", "Quality", "observe"]
