"""Transports within one process, by name: ``run(size, main)`` calls ``main(comm)`` for each rank.

A line here is what a new transport needs, to be run through all that communicators are held to.
"""

import contextlib

from distopt import run_ranks
from distopt.lab.commands.prove_socket import SocketRanks, connected


def over_sockets(size, main):
    """As ``run_ranks``, with messages through sockets alone; a rank closes its own when it ends."""

    def rank(thread):
        with contextlib.ExitStack() as stack:
            for end in filter(None, ends[thread.rank]):
                stack.enter_context(end)
            return main(SocketRanks(thread.rank, ends[thread.rank]))

    with connected(size) as ends:
        return run_ranks(size, rank)


RUN = {"threads": run_ranks, "sockets": over_sockets}
