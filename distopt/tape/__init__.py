"""Gradients of a training, recorded as its losses yield them, to be replayed."""

from distopt.tape.join import join
from distopt.tape.recorder import Recorder, recorder, request
from distopt.tape.tape import Entry, Tape

__all__ = ["Entry", "Recorder", "Tape", "join", "recorder", "request"]
