"""Time limits with names: what each rank does, and the end of a job in which one waits for too long."""

from distopt.watch.limits import Limits, limits
from distopt.watch.recorder import Log, Recorder, recorder, silent
from distopt.watch.watchman import EXIT, Mail, Watchman

__all__ = ["EXIT", "Limits", "Log", "Mail", "Recorder", "Watchman", "limits", "recorder", "silent"]
