"""The public name of ``distopt.lab.fit``."""

from distopt.lab.fit import *  # noqa: F403  all of it, by its public name
from distopt.lab.fit import __all__ as __all__
