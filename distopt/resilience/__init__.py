"""The behaviour of a job when a rank fails: time limits with names, flight records, and the end of all ranks."""
