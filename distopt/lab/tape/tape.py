"""Recorded gradients: one file in the layout of a checkpoint, which any safetensors tool can read."""

import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from distopt import checkpoint
from distopt.checkpoint import CheckpointError, Header, Tensor
from distopt.checks import check_int, suggest
from distopt.engine.parameters import PARAMETERS, Parameter

FORMAT = "distopt tape 1"
DTYPES: dict[str, np.dtype[Any]] = {kind.name: kind for kind in PARAMETERS}

Pairs = list[tuple[Parameter, np.ndarray]]


def dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of a name, float32 or bfloat16; KeyError for one that no gradient has."""
    return DTYPES[name]


class Entry(NamedTuple):
    """A parameter on a tape.

    Attributes:
        name: its name.
        shape: its shape.
        dtype: its dtype, float32 or bfloat16.

    Example:
        >>> import numpy as np
        >>> from distopt.lab.tape import Entry
        >>> Entry("weight", (2, 3), np.dtype("f4")).shape
        (2, 3)
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class Tape:
    """The gradients of some steps on all ranks, as the losses yielded them: before they were clipped or compressed.

    A step is a call that all ranks agreed on, each of ``num_batches`` too.  Where a loss had no gradient of a parameter
    there are zeros; a ``LossScaler``'s scale is in the gradients.

    Tensors are named ``/step/rank/parameter``, as JSON pointers, steps by their number in the script from 0.  The file
    is mapped, not read.  Checksums of the data are not checked: ``distopt inspect`` does that.

    Attributes:
        ranks: the number of recorded ranks.
        steps: the numbers of the recorded steps.
        order: the parameters, in plan order.
        about: what the recorder said besides, among it 'optimizer' and 'script'.
        parameters: the parameters that come with the gradients, in plan order: zeros at first, the same objects at each
            call and for each rank, so that an optimizer changes them.  For another run, or another rank that is a
            thread, open another Tape.

    Raises:
        ValueError: the file is cut, forged, or no tape; the text names file and field.
        OSError: the file cannot be read.

    Example:
        >>> import pathlib, tempfile
        >>> import numpy as np
        >>> from distopt import Tape, checkpoint
        >>> about = {"format": "distopt tape 1", "ranks": 1, "steps": [0], "order": [["w", [2], "float32"]]}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder) / "trace.safetensors"
        ...     _ = checkpoint.write(path, {"0": {"0": {"w": np.array([0.5, -1], "f4")}}}, about)
        ...     tape = Tape(path)
        ...     [(parameter.name, gradient.tolist()) for parameter, gradient in tape.gradients(step=0, rank=0)]
        [('w', [0.5, -1.0])]
    """

    def __init__(self, path: str | os.PathLike[str]):
        header = checkpoint.header(path)
        self.about = header.about
        try:
            self.ranks, self.steps, self.order = _understood(header.about)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                path,
                "about",
                f"must be that of a {FORMAT}, got {type(error).__name__}: {error}; record one with distopt record",
            ) from None
        self._path, self._start = os.fspath(path), header.start
        self._tensors = self._checked(header)
        self._bytes = np.memmap(path, np.uint8, "c")  # copy on write: the file never changes
        self._bytes.flags.writeable = False
        self.parameters = [Parameter(name, np.zeros(shape, kind)) for name, shape, kind in self.order]

    def gradients(self, step: int, rank: int) -> Pairs:
        """Return (parameter, gradient) pairs in plan order, as a loss would yield them.

        The gradients are read-only arrays in the file's pages.

        Raises:
            ValueError: the step or the rank was not recorded.
            TypeError: one of them is no integer.
        """
        if check_int("rank", rank, least=0) >= self.ranks:
            raise ValueError(f"rank must be in 0..{self.ranks - 1}, got {rank}")
        return self._pairs(self._position(step), rank)

    def losses(self, step: int) -> Callable[[int], Pairs]:
        """Return the losses of one step for any number of virtual ranks: a function from a rank to its pairs.

        Virtual rank r has the gradients of the recorded rank r mod R, of the recorded step that is r div R steps
        further on the tape, which begins anew after its last one.  Of S recorded steps, R S virtual ranks differ; r
        and r + R S have the same.  The gradients are copies, which may be written over.  Raises as ``gradients``.
        """
        first = self._position(step)

        def loss(rank: int) -> Pairs:
            further, recorded = divmod(check_int("rank", rank, least=0), self.ranks)
            pairs = self._pairs((first + further) % len(self.steps), recorded)
            return [(param, grad.copy()) for param, grad in pairs]

        return loss

    def check(self, shapes: Mapping[str, tuple[int, ...]] | Iterable[tuple[str, tuple[int, ...]]]) -> None:
        """Raise ValueError that names the first parameter that differs between the tape and a model.

        Args:
            shapes: the names and shapes of the model's parameters.
        """
        unmatched = dict(shapes)
        names = list(unmatched)
        for name, shape, _ in self.order:
            if name not in unmatched:
                raise ValueError(
                    f"{self._path}: {name} must be in the model, got it on the tape alone{suggest(name, names)}"
                )
            if tuple(unmatched[name]) != shape:
                raise ValueError(
                    f"{self._path}: {name} must be {shape} as on the tape, got {tuple(unmatched[name])} in the model"
                )
            del unmatched[name]
        for name in unmatched:
            raise ValueError(f"{self._path}: {name} must be on the tape, got it in the model alone")

    def __repr__(self) -> str:
        size = f"{len(self.order)} parameters, {len(self.steps)} steps, {self.ranks} ranks"
        return f"Tape({self._path!r}: {size})"

    def _checked(self, header: Header) -> list[list[list[Tensor]]]:
        """Return the tensors by position of step, rank and place in plan order; CheckpointError for a missing one."""
        tree = header.tree
        _same_keys(self._path, "the tree", tree, self.steps)
        steps = []
        for step in map(str, self.steps):
            _same_keys(self._path, f"/{step}", tree[step], range(self.ranks))
            steps.append([self._of_rank(f"/{step}/{rank}", tree[step][str(rank)]) for rank in range(self.ranks)])
        return steps

    def _of_rank(self, path: str, tensors: Any) -> list[Tensor]:
        _same_keys(self._path, path, tensors, [entry.name for entry in self.order])
        for name, shape, kind in self.order:
            tensor = tensors[name]
            if type(tensor) is not Tensor or (tensor.shape, tensor.dtype) != (shape, kind):
                raise CheckpointError(
                    self._path, f"{path}/{name}", f"must be {kind} of {shape}, as the order says, got {tensor!r:.80}"
                )
        return [tensors[entry.name] for entry in self.order]

    def _position(self, step: int) -> int:
        if check_int("step", step, least=0) not in self.steps:
            near = min(self.steps, key=lambda known: abs(known - step))
            raise ValueError(
                f"step must be one of the {len(self.steps)} that were recorded, got {step}; the nearest is {near}"
            )
        return self.steps.index(step)

    def _pairs(self, position: int, rank: int) -> Pairs:
        """Return the gradients of a recorded rank."""
        found = []
        for param, tensor in zip(self.parameters, self._tensors[position][rank], strict=True):
            data = np.asarray(self._bytes[self._start + tensor.begin : self._start + tensor.end])
            found.append((param, data.view(tensor.dtype).reshape(tensor.shape)))
        return found


def _understood(about: Mapping[str, Any]) -> tuple[int, tuple[int, ...], tuple[Entry, ...]]:
    """Parse ranks, steps and order; ValueError, TypeError or KeyError for what a recorder does not say."""
    if about["format"] != FORMAT:
        raise ValueError(f"its format must be {FORMAT!r}, got {about['format']!r:.40}")
    ranks, steps = about["ranks"], tuple(about["steps"])
    if type(ranks) is not int or ranks < 1:
        raise ValueError(f"ranks must be an integer of at least 1, got {ranks!r:.40}")
    if not steps or any(type(s) is not int or s < 0 for s in steps) or sorted(set(steps)) != list(steps):
        raise ValueError(f"steps must be growing integers of at least 0, got {steps!r:.40}")
    order = tuple(Entry(name, tuple(shape), dtype(kind)) for name, shape, kind in about["order"])
    for name, shape, _ in order:
        if type(name) is not str or any(type(n) is not int or n < 0 for n in shape):
            raise ValueError(
                f"name and shape of a parameter must be a text and integers, got {name!r:.40} {shape!r:.40}"
            )
    if len({entry.name for entry in order}) < len(order):
        raise ValueError("names in the order must be unique, got one twice")
    return ranks, steps, order


def _same_keys(path: str, field: str, tree: Any, keys: Sequence[Any]) -> None:
    """Raise CheckpointError for other keys; however many a forger claims, no more are made than the tree has."""
    if type(tree) is not dict or any(a != b for a, b in itertools.zip_longest(tree, map(str, keys))):
        wanted = ", ".join(map(str, keys[:5]))
        found = list(tree)[:5] if type(tree) is dict else tree
        raise CheckpointError(path, field, f"must have what the order says: {wanted}, got {found!r:.60}")
