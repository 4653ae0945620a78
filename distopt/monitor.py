"""The public name of ``distopt.lab.experiment.callbacks``."""

from distopt.lab.experiment.callbacks import *  # noqa: F403  all of it, by its public name
from distopt.lab.experiment.callbacks import __all__ as __all__
