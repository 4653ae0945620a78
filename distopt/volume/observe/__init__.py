"""Observe how good what a step sends is: energy, residual, age, density and cosine."""

from distopt.volume.observe.hook import QualityHook, observe
from distopt.volume.observe.observer import Callback, Observer
from distopt.volume.observe.quality import Quality

__all__ = ["Callback", "Observer", "Quality", "QualityHook", "observe"]
