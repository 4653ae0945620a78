"""Tapes: the gradients of a training, recorded as its losses yield them, to be replayed."""

from distopt.lab.tape.tape import Entry, Tape

__all__ = ["Entry", "Tape"]
