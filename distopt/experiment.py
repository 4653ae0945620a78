"""The public name of ``distopt.lab.experiment``."""

from distopt.lab.experiment import *  # noqa: F403  all of it, by its public name
from distopt.lab.experiment import __all__ as __all__
