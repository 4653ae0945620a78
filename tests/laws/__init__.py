"""The laws of training, as the package has them, and what tests need beside them."""

from distopt.lab.laws.arrays import *  # noqa: F403
from distopt.lab.laws.modes import *  # noqa: F403
from distopt.lab.laws.ranks import *  # noqa: F403
from distopt.lab.laws.runs import *  # noqa: F403
from laws.inputs import *  # noqa: F403
