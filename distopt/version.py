"""The version of this package, as files that it writes say it too."""

__version__ = "0.2.0"
