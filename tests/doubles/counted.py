"""A transport of point-to-point messages that counts every byte of them, for the ledger to be held against."""

import itertools
import queue

import numpy as np

from distopt.comm import run_ranks
from distopt.comm.byte_counts import DIRECT, RING
from distopt.comm.communicator import Wrapper, reduce_in_rank_order, slices


class Postman(Wrapper):
    """Rank r puts bytes into a queue that rank s takes them from; ``sent[s]`` and ``received[s]`` are how many."""

    def __init__(self, comm, boxes):
        super().__init__(comm)
        self._boxes, self.algorithm = boxes, type(self).algorithm
        self.sent, self.received = [0] * comm.size, [0] * comm.size

    def send(self, to, x):
        assert to != self.rank
        data = np.ascontiguousarray(x).tobytes()
        self.sent[to] += len(data)
        self._boxes[self.rank, to].put((data, x.dtype))

    def get(self, source):
        data, dtype = self._boxes[source, self.rank].get(timeout=30)
        self.received[source] += len(data)
        return np.frombuffer(data, dtype)

    def others(self):
        return [r for r in range(self.size) if r != self.rank]

    def broadcast(self, x, root=0):
        flat, following = x.reshape(-1), (self.rank + 1) % self.size
        if self.rank != root:
            flat[:] = self.get((self.rank - 1) % self.size)
        if following != root:
            self.send(following, flat)

    def all_to_all(self, parts, ragged=False):
        for r in self.others():
            self.send(r, parts[r].reshape(-1))
        return [parts[r].reshape(-1).copy() if r == self.rank else self.get(r) for r in range(self.size)]

    def reduce_scatter(self, x, op="sum"):
        return reduce_in_rank_order(self.all_to_all([x.reshape(-1)[s] for s in slices(x.size, self.size)]), op)

    def lengths(self, n):
        return [int(a[0]) for a in self.all_gather(np.array([n]))]

    def peers(self, x):
        return None  # nothing but messages

    def all_reduce(self, x, op="sum"):
        own = self.reduce_scatter(x, op)
        x.reshape(-1)[:] = np.concatenate(self.all_gather(own, ragged=True))


class Everyone(Postman):
    """Every rank talks to all others."""

    algorithm = DIRECT

    def all_gather(self, x, ragged=False, into=None):
        flat = x.reshape(-1)
        for r in self.others():
            self.send(r, flat)
        return [flat.copy() if r == self.rank else self.get(r) for r in range(self.size)]


class Around(Postman):
    """Every rank sends to the next one."""

    algorithm = RING

    def all_gather(self, x, ragged=False, into=None):
        return self._pass_on({self.rank: x.reshape(-1).copy()}, self.rank)

    def all_reduce(self, x, op="sum"):
        flat = x.reshape(-1)
        parts = {r: flat[s].copy() for r, s in enumerate(slices(x.size, self.size))}
        for step in range(self.size - 1):
            self.send((self.rank + 1) % self.size, parts[(self.rank - step) % self.size])
            came = (self.rank - step - 1) % self.size
            parts[came] = parts[came] + self.get((self.rank - 1) % self.size)
        whole = (self.rank + 1) % self.size
        flat[:] = np.concatenate(self._pass_on({whole: parts[whole]}, whole))

    def _pass_on(self, parts, first):
        for step in range(self.size - 1):
            self.send((self.rank + 1) % self.size, parts[(first - step) % self.size])
            parts[(first - step - 1) % self.size] = self.get((self.rank - 1) % self.size)
        return [parts[r] for r in range(self.size)]


def run_counted(size, kind, main):
    """As ``run_ranks``, over messages that are counted."""
    boxes = {pair: queue.Queue() for pair in itertools.product(range(size), repeat=2)}

    def wrapped(comm):
        return main(kind(comm, boxes))

    return run_ranks(size, wrapped)
