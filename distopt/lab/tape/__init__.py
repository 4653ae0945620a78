"""Tapes: the gradients of a training, recorded as its losses yield them, to be replayed."""

from distopt.lab.tape.join import check_replaceable, join
from distopt.lab.tape.recorder import Recorder, recorder, request
from distopt.lab.tape.tape import Entry, Tape

__all__ = ["Entry", "Recorder", "Tape", "check_replaceable", "join", "recorder", "request"]
