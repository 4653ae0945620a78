"""The name that ``distopt.lab`` had before 0.3."""

from distopt.lab import *  # noqa: F403  all of it, by its public name
from distopt.lab import __all__ as __all__
