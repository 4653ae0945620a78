"""Observe how good what a step sends is: energy, residual, age, density and cosine."""

from distopt.lab.observe.hook import QualityHook, observe
from distopt.lab.observe.observer import Callback, Observer
from distopt.lab.observe.quality import Quality

__all__ = ["Callback", "Observer", "Quality", "QualityHook", "observe"]
