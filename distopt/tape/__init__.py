"""Gradients of a training, recorded as its losses yield them, to be replayed."""

from distopt.tape.join import check_place, join
from distopt.tape.recorder import Recorder, recorder, request
from distopt.tape.tape import Entry, Tape

__all__ = ["Entry", "Recorder", "Tape", "check_place", "join", "recorder", "request"]
