"""The public name of ``distopt.lab.cost``."""

from distopt.lab.cost import *  # noqa: F403  all of it, by its public name
from distopt.lab.cost import __all__ as __all__
