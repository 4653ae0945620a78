"""Measure the wire, and predict what an exchange takes on it."""

from distopt.fit.measure import Case, Point, case_of, elements, measure, operation, take_turns, timed
from distopt.fit.pieces import Piece, least_squares, pieces, predicted
from distopt.fit.result import Fit, Line, fit, read

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
