"""The ledger of a communicator: for every message what it was for, what it was made of, and what went over the wire."""

from distopt.ledger.entry import Anatomy, Entry, Look, Purpose, share_out
from distopt.ledger.ledger import KEEP, REST, Ledger, of_steps

__all__ = ["KEEP", "REST", "Anatomy", "Entry", "Ledger", "Look", "Purpose", "of_steps", "share_out"]
