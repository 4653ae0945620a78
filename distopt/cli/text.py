"""What commands print."""

from distopt.units import NONE, nbytes, number, seconds, table, unknown

__all__ = ["NONE", "nbytes", "number", "seconds", "table", "unknown"]
