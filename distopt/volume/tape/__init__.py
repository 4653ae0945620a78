"""Tapes: the gradients of a training, recorded as its losses yield them, to be replayed."""

from distopt.volume.tape.join import check_replaceable, join
from distopt.volume.tape.recorder import Recorder, recorder, request
from distopt.volume.tape.tape import Entry, Tape

__all__ = ["Entry", "Recorder", "Tape", "check_replaceable", "join", "recorder", "request"]
