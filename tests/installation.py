"""Which distopt the tests would try: checked before any of them is collected."""

import os
import sys
import warnings
from importlib.machinery import PathFinder
from pathlib import Path


def flaw():
    """The cause and the remedy if there is no distopt to test, or another one for the processes that tests start."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of what is not built, which is said below
            import distopt
            from distopt.kernels.signatures import library
        library()
    except (ImportError, OSError) as error:
        return f"there is no distopt to test: {error}"
    tested = Path(distopt.__file__).parent
    here = None if sys.flags.safe_path else PathFinder.find_spec("distopt", [os.getcwd()])
    if here is None or Path(here.origin).parent == tested:
        return None
    other = Path(here.origin).parent
    return (
        f"the tests would try {tested}, but the processes that they start here would import {other}: "
        "set PYTHONSAFEPATH=1 to test the first, or pip install -e . to test the second"
    )
