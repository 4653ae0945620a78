"""The entry point of ``python -m distopt.cli``."""

import sys

from distopt.cli import main

sys.exit(main())
