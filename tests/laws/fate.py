"""Ranks that are threads, and end at any instant at which they meet the others."""

import collections

import numpy as np

from distopt.comm import threads
from distopt.comm.control import PeerLeft
from laws.lost import Killed, run


class Fate:
    """Each victim ends at its ``at``-th meeting with the others: before these meet, or after it.

    After it some of the others, by ``seed``, do not hear what came of the meeting, and what they had brought is torn.
    """

    def __init__(self, seed=0, **victims):
        """Make one; ``victims``: (at, after) by 'rank0', 'rank1' and so on."""
        self.victims = {int(name.removeprefix("rank")): when for name, when in victims.items()}
        self.count, self.verbs, self.seed = collections.Counter(), collections.defaultdict(list), seed
        self.hit = set()  # meetings after which a rank ends, and which one of each
        self.ended = []  # in this order

    def meet(self, meet, meeting, rank, verb, offer, action):
        member, number = meeting.ranks[rank], meeting._rounds
        if member in self.ended:  # on its way out
            raise Killed
        self.count[member] += 1
        self.verbs[member].append(verb)
        at, after = self.victims.get(member, (0, False))
        if self.count[member] == at:
            if after:
                self.hit.add((meeting, number))
                meet(meeting, rank, verb, offer, action)
            self.ended.append(member)
            raise Killed
        result = meet(meeting, rank, verb, offer, action)
        if (meeting, number) in self.hit and np.random.default_rng([self.seed, member]).random() < 0.5:
            for x in offer if isinstance(offer, list) else [offer]:
                if isinstance(x, np.ndarray) and verb.startswith(("all_reduce", "broadcast")):
                    x.reshape(-1).view(np.uint8)[:] = 0xFF  # NaN
            raise PeerLeft(f"rank {rank} did not hear of {verb}")
        return result


def present_fates(monkeypatch):
    """Return a function that makes a fate the present one, and takes the arguments of ``Fate``."""
    present = []
    meet = threads.ThreadRendezvous.meet

    def fated(self, *arguments):
        return present[-1].meet(meet, self, *arguments)

    monkeypatch.setattr(threads.ThreadRendezvous, "meet", fated)

    def begin(*arguments, **options):
        present.append(Fate(*arguments, **options))
        return present[-1]

    return begin


def instants(mode, fate, ranks):
    """How often each rank meets the others in a run that no rank ends in."""
    counting = fate()
    run(mode, ranks)
    return dict(counting.count)
