"""Recorded gradients: one file in the layout of a checkpoint, which any safetensors tool can read."""

import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from distopt import checkpoint
from distopt.checkpoint import CheckpointError, Header, Tensor
from distopt.gradients import PARAMETERS, Parameter
from distopt.names import nearest
from distopt.numbers import whole

FORMAT = "distopt tape 1"
DTYPES: dict[str, np.dtype[Any]] = {kind.name: kind for kind in PARAMETERS}

Pairs = list[tuple[Parameter, np.ndarray]]


def dtype(name: str) -> np.dtype[Any]:
    """That of a name, float32 or bfloat16; KeyError for what no gradient has."""
    return DTYPES[name]


class Entry(NamedTuple):
    """A parameter on a tape."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class Tape:
    """The gradients of some steps on all ranks, as the losses yielded them: before they were clipped or compressed.

    A step is a call that all ranks agreed on, each of ``num_batches`` too.  Where a loss had no gradient of a parameter
    there are zeros; a ``LossScaler``'s scale is in the gradients.

    Tensors are named ``/step/rank/parameter``, as JSON pointers, steps by their number in the script from 0.  The file
    is mapped, not read.  ``ranks``: how many; ``steps``: their numbers; ``order``: what the parameters are, in plan
    order; ``about``: what the recorder said besides, among it 'optimizer' and 'script'.

    ``parameters`` come with the gradients, in plan order: zeros at first, the same objects at each call and for each
    rank, so that an optimizer changes them.  For another run, or another rank that is a thread, open another Tape.

    Raises ValueError, which names file and field, for a file that is cut, forged, or no tape; OSError for one that
    cannot be read.  Checksums of the data are not looked at: ``distopt inspect`` does that.
    """

    def __init__(self, path: str | os.PathLike[str]):
        found = checkpoint.header(path)
        self.about = found.about
        try:
            self.ranks, self.steps, self.order = _understood(found.about)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(path, "about", f"is not that of a {FORMAT}: {error}") from None
        self._path, self._start = os.fspath(path), found.start
        self._tensors = self._checked(found)
        self._bytes = np.memmap(path, np.uint8, "c")  # whatever writes there changes no file
        self._bytes.flags.writeable = False
        self.parameters = [Parameter(name, np.zeros(shape, kind)) for name, shape, kind in self.order]

    def gradients(self, step: int, rank: int) -> Pairs:
        """(parameter, gradient) pairs in plan order, as a loss would yield them.

        The gradients are read-only arrays in the file's pages.  Raises ValueError for a step or a rank that was not
        recorded, TypeError for what is no integer.
        """
        if whole("rank", rank, least=0) >= self.ranks:
            raise ValueError(f"rank must be in 0..{self.ranks - 1}, got {rank}")
        return self._pairs(self._position(step), rank)

    def losses(self, step: int) -> Callable[[int], Pairs]:
        """The losses of one step for any number of virtual ranks: a callable of a rank, which returns its pairs.

        Virtual rank r has the gradients of the recorded rank r mod R, of the recorded step that is r div R steps
        further on the tape, which begins anew behind its last one.  Of S recorded steps, R S virtual ranks differ; r
        and r + R S have the same.  The gradients are copies, which may be written over.  Raises as ``gradients``.
        """
        first = self._position(step)

        def loss(rank: int) -> Pairs:
            further, recorded = divmod(whole("rank", rank, least=0), self.ranks)
            pairs = self._pairs((first + further) % len(self.steps), recorded)
            return [(param, grad.copy()) for param, grad in pairs]

        return loss

    def check(self, shapes: Mapping[str, tuple[int, ...]] | Iterable[tuple[str, tuple[int, ...]]]) -> None:
        """ValueError that names the first parameter by which a model, given as names and shapes, is another one."""
        left = dict(shapes)
        names = list(left)
        for name, shape, _ in self.order:
            if name not in left:
                raise ValueError(f"{self._path}: {name} is on the tape, and not in the model{nearest(name, names)}")
            if tuple(left[name]) != shape:
                raise ValueError(f"{self._path}: {name} is {shape} on the tape, and {tuple(left[name])} in the model")
            del left[name]
        for name in left:
            raise ValueError(f"{self._path}: {name} is in the model, and not on the tape")

    def __repr__(self) -> str:
        size = f"{len(self.order)} parameters, {len(self.steps)} steps, {self.ranks} ranks"
        return f"Tape({self._path!r}: {size})"

    def _checked(self, found: Header) -> list[list[list[Tensor]]]:
        """The tensors by position of step, rank and place in plan order; CheckpointError for one that is not there."""
        tree = found.tree
        _same_keys(self._path, "the tree", tree, self.steps)
        steps = []
        for step in map(str, self.steps):
            _same_keys(self._path, f"/{step}", tree[step], range(self.ranks))
            steps.append([self._of_rank(f"/{step}/{rank}", tree[step][str(rank)]) for rank in range(self.ranks)])
        return steps

    def _of_rank(self, at: str, tensors: Any) -> list[Tensor]:
        _same_keys(self._path, at, tensors, [entry.name for entry in self.order])
        for name, shape, kind in self.order:
            tensor = tensors[name]
            if type(tensor) is not Tensor or (tensor.shape, tensor.dtype) != (shape, kind):
                raise CheckpointError(self._path, f"{at}/{name}", f"is not the {kind} of {shape} that the order says")
        return [tensors[entry.name] for entry in self.order]

    def _position(self, step: int) -> int:
        if whole("step", step, least=0) not in self.steps:
            near = min(self.steps, key=lambda known: abs(known - step))
            raise ValueError(f"step {step} was not recorded: {len(self.steps)} were, the nearest is {near}")
        return self.steps.index(step)

    def _pairs(self, position: int, rank: int) -> Pairs:
        """The gradients of a recorded rank."""
        return list(zip(self.parameters, map(self._view, self._tensors[position][rank]), strict=True))

    def _view(self, tensor: Tensor) -> np.ndarray:
        data = self._bytes[self._start + tensor.begin : self._start + tensor.end]
        return np.asarray(data).view(tensor.dtype).reshape(tensor.shape)


def _understood(about: Mapping[str, Any]) -> tuple[int, tuple[int, ...], tuple[Entry, ...]]:
    """Ranks, steps and order; ValueError, TypeError or KeyError for what a recorder does not say."""
    if about["format"] != FORMAT:
        raise ValueError(f"its format is {about['format']!r:.40}")
    ranks, steps = about["ranks"], tuple(about["steps"])
    if type(ranks) is not int or ranks < 1:
        raise ValueError(f"ranks must be an integer of at least 1, got {ranks!r:.40}")
    if not steps or any(type(s) is not int or s < 0 for s in steps) or sorted(set(steps)) != list(steps):
        raise ValueError(f"steps must be growing integers of at least 0, got {steps!r:.40}")
    order = tuple(Entry(name, tuple(shape), dtype(kind)) for name, shape, kind in about["order"])
    for name, shape, _ in order:
        if type(name) is not str or any(type(n) is not int or n < 0 for n in shape):
            raise ValueError(
                f"a parameter must have a text and integers as name and shape, got {name!r:.40} {shape!r:.40}"
            )
    if len({entry.name for entry in order}) < len(order):
        raise ValueError("a name is twice in the order")
    return ranks, steps, order


def _same_keys(path: str, field: str, tree: Any, keys: Sequence[Any]) -> None:
    """CheckpointError for another tree; of keys, however many a forger claims, no more are made than it has."""
    if type(tree) is not dict or any(a != b for a, b in itertools.zip_longest(tree, map(str, keys))):
        wanted = ", ".join(map(str, keys[:5]))
        raise CheckpointError(path, field, f"has not what the order says: {wanted}")
