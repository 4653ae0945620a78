"""Measuring the collectives of a communicator, and predicting from that how long an exchange takes."""

from distopt.lab.fit.measure import Case, Point, case_of, elements, measure, operation, take_turns, timed
from distopt.lab.fit.pieces import Piece, least_squares, pieces, predicted
from distopt.lab.fit.result import Fit, Line, fit, read

__all__ = [
    "Case",
    "Fit",
    "Line",
    "Piece",
    "Point",
    "case_of",
    "elements",
    "fit",
    "least_squares",
    "measure",
    "operation",
    "pieces",
    "predicted",
    "read",
    "take_turns",
    "timed",
]
