"""Measuring the collectives of a communicator, and predicting from that how long an exchange takes."""

from distopt.lab.fit.pieces import Segment
from distopt.lab.fit.result import Fit, Line, fit, read

__all__ = ["Fit", "Line", "Piece", "Segment", "fit", "read"]

Piece = Segment  # its name in 0.1
