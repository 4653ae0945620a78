"""Compressors are values without state: ``compress`` moves mass out of an array, ``decompress`` puts it into another.

The law, for every compressor and every x:  before == after + decompress(compress(before))          (conservation)
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from distopt import device
from distopt.device import Mirror
from distopt.ledger import Anatomy, Look, Purpose
from distopt.tables import Members

Make = Callable[[], np.ndarray]


def fresh(name: str, nbytes: int) -> np.ndarray:
    """Memory of the host that nobody keeps."""
    return np.empty(nbytes, np.uint8)


def made(name: str, make: Make) -> Mirror:
    """Numbers that nobody keeps."""
    return Mirror(make())


class At(NamedTuple):
    """Where a call stands: updates applied so far, this rank among how many, and the bucket.

    ``params`` points to the values of its parameters; ``batches`` is of how many gradients x is the sum, and
    ``divisor`` makes a mean of the sum over ranks: all gradients in it, of which a rank that has joined brings none.

    ``bucket`` says where the members of a flat array lie: at multiples of 64 bytes; gaps between them are always zero.
    ``scratch(name, nbytes)`` is memory of so many bytes for this call and its payload, the same at every step:
    fresh memory costs a page fault for every 4 KiB, which is more than it takes to fill them.  ``constant(name, make)``
    are a few numbers that are made once, for kernels on either side.

    On a GPU, where the host does not see what kernels find: ``refused`` is None, or a number: if it is not 0 when a
    kernel runs, that leaves everything that outlives the step as it is.  A payload whose length depends on the data
    has ``room`` entries on every rank, and the kernel tells in ``found[0]`` how many it would have liked to send.

    ``purpose`` is what a ledger calls it.
    """

    step: int = 0
    rank: int = 0
    size: int = 1
    bucket: Members | None = None
    scratch: Callable[[str, int], np.ndarray] = fresh
    constant: Callable[[str, Make], Mirror] = made
    refused: np.ndarray | None = None
    room: int | None = None
    found: np.ndarray | None = None
    params: Members | None = None
    divisor: float = 1.0
    batches: int = 1
    purpose: Purpose = Purpose()


class Compressor(Protocol):
    """What a compressor is; ``exchange`` derives the collective from its properties.

    Some have more (dgc.py has all of it):

    * ``decompress_all(payloads, out, at)``: the sum of payloads in one pass;
    * ``copy(x, state, at)``: the payload of an x that is about to be overwritten, and so need not be changed;
    * ``at_step(k)``: the compressor that update k is made with, if it changes;
    * ``whole(members, at)``: a number per member, 1 for those that are left in x to be summed as they are;
    * ``finish(total, state, at)``: what is added to a sum over ranks before it is divided by ``at.divisor``;
    * ``corrects_momentum``: does it have the momentum, so that the optimizer must have none?
    * ``look(payload, x, at)``: what a payload of x consists of, for who counts (``ledger.Look``);
    * ``forecast(n, itemsize, bucket)``: the same as far as it depends on no data, for who counts before there are any.
    """

    @property
    def summable(self) -> bool:
        """May payloads of different ranks be added on the wire?"""

    @property
    def ragged(self) -> bool:
        """Do the lengths of payloads depend on the data, so that they may differ from rank to rank?"""

    @property
    def lossless(self) -> bool:
        """Is nothing ever left behind?"""

    @property
    def stateful(self) -> bool:
        """Does ``compress`` change what outlives the step?"""

    @property
    def may_overflow(self) -> bool:
        """May the sum of finite payloads be infinite?"""

    def payload_bytes(self, n: int, itemsize: int = 4, bucket: Members | None = None) -> int | None:
        """Bytes of the payload of a flat array of n elements of ``itemsize`` bytes; None if that depends on the data.

        ``bucket`` says where its members lie, if it has several; gaps between them count in n.
        """

    def compress(self, x: np.ndarray, state: dict[str, np.ndarray], at: At) -> np.ndarray:
        """Move the part of the flat array x that is worth sending out of it; leave the rest in x.

        The payload may be x itself.  ``state`` holds arrays of x's size ('residual', 'velocity') that belong to
        DistOpt, which makes, saves and moves them.
        """

    def decompress(self, payload: np.ndarray, out: np.ndarray, at: At) -> None:
        """Put a payload into ``out``: overwrite if summable, add if not."""


class Lossy(Compressor, Protocol):
    """What leaves something behind, and so can have a memory (``ErrorFeedback``): x is the memory then."""

    def compress(
        self, x: np.ndarray, state: dict[str, np.ndarray], at: At, add: np.ndarray | None = None
    ) -> np.ndarray:
        """Add the new gradient ``add`` to x first: both meet in the pass that selects."""


def decompress_all(compressor: Compressor, payloads: list[np.ndarray], out: np.ndarray, at: At) -> None:
    """Overwrite ``out`` by the sum of payloads that are not summable on the wire, added in their order.

    A compressor that can do this in one pass has a method of this name.
    """
    in_one_pass = getattr(compressor, "decompress_all", None)
    if in_one_pass:
        in_one_pass(payloads, out, at)
        return
    device.clear(out)
    for payload in payloads:
        compressor.decompress(payload, out, at)


def look(compressor: Compressor, payload: np.ndarray, x: np.ndarray, at: At) -> Look:
    """What a payload of x consists of; of nothing but values, if the compressor does not say."""
    found, nbytes = getattr(compressor, "look", None), payload.nbytes
    return found(payload, x, at) if found else lambda: Anatomy(nbytes)


def forecast(compressor: Compressor, n: int, itemsize: int, bucket: Members) -> Anatomy:
    """What a payload of n elements is going to consist of; of nothing but values, if the compressor does not say."""
    look = getattr(compressor, "forecast", None)
    return look(n, itemsize, bucket) if look else Anatomy(compressor.payload_bytes(n, itemsize, bucket) or 0)


def table(x: np.ndarray, at: At) -> Members:
    """Where the members of x are; x is the only one if it is no bucket's."""
    return at.bucket or Members(["x"], [x.shape], [0], x.dtype)


def sizes_of(n: int, bucket: Members | None) -> np.ndarray:
    """The sizes of the members of a flat array of n elements, which is the only one if it is no bucket's."""
    return np.array([n], np.int64) if bucket is None else bucket.rows["size"].astype(np.int64)


def column(name: str, numbers: list[int], at: At) -> Mirror:
    """Numbers for a kernel, one for each payload; they seldom change."""
    found = at.constant(f"{name} of {len(numbers)}", functools.partial(np.zeros, len(numbers), np.int64))
    found.host[:] = numbers
    return found


def check_fits(x: np.ndarray, add: np.ndarray) -> None:
    """ValueError for a gradient that is not of its memory's size."""
    if add.size != x.size:
        raise ValueError(f"a gradient of {add.size} elements does not fit a memory of {x.size}")


def memory(state: dict[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    """The array ``name`` of ``state``, of x's size, zeros at first."""
    if name not in state:
        state[name] = device.lasting_zeros(x.size, x.dtype, x)
    return state[name]
