"""Bytes and seconds by formula: what a collective sends, and how long that takes on a link."""

from distopt.cost.wire import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter

__all__ = ["all_gather", "all_reduce", "all_to_all", "broadcast", "reduce_scatter"]
