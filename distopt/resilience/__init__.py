"""The behaviour of a job when a rank fails: time limits with names, flight records, and the end of all ranks.

Beside it there are readers of files and JSON texts that need not be trusted, and a writer of files that are whole.
"""
