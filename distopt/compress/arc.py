"""Send the rows that are largest over all ranks, which an all-reduce adds up without their indices."""

import functools

import numpy as np

from distopt import device, kernels
from distopt.checks import check_float, check_int
from distopt.compress.base import Compressor
from distopt.compress.blocks import random_key
from distopt.compress.chunks import chunk_places
from distopt.compress.context import BucketContext, ExchangeContext, decayed, layout_of, sizes_of
from distopt.compress.planes import unpack_entries
from distopt.compress.state import RESIDUAL, State, state_array
from distopt.compress.top_k import TopK
from distopt.compress.traits import Traits
from distopt.kernels.layout import BucketLayout

SIGNS = 4  # numbers that ranks add up for each row, before they choose
TOGETHER = 256  # rows that a block of a GPU sketches


class ARCTopK(Compressor):
    """Send the same rows of a bucket on all ranks: those whose sums over ranks are the largest, by a sketch of each.

    Chen et al., "An all-reduce compatible top-K compressor for communication-efficient distributed learning", 2025.  A
    row is ``of`` neighbours in a tensor.  In each step

        e = decay e + g                             on each rank; the residual
        S = sum over ranks of E V                   E: e by rows; V: ``of`` x 4 random signs, the same on all ranks
        K = the rows with the largest |S_row|^2     so many that they are ``density`` of all rows, rounded up
        G = sum over ranks of E[K]                  one all-reduce, and no index travels
        e[K] = 0

    ``|S_row|^2 / 4`` is, in the mean over V, the square of the norm of the row's sum over ranks, so ranks choose what
    is large in the sum, and not what is large on one of them.  What is sent of a row is exact, and its bytes do not
    grow with the ranks as those of a gather do.  The residual is this compressor's own: do not wrap it in
    ``ErrorFeedback``.

    Args:
        density: the fraction of rows that is sent.
        of: elements of a row; a sketch costs ``4 / of`` of dense bytes.  The last row of a tensor may be shorter, and
            travels with zeros behind it.
        decay: how much of the residual outlives a step, 0 to 1.
        seed: of V, which also depends on the step.

    Raises:
        TypeError: an argument is no number, or ``of`` or ``seed`` no integer.
        ValueError: a ``density`` outside (0, 1], a ``decay`` outside [0, 1], an ``of`` below 1, a ``seed`` below 0.

    Example:
        >>> import numpy as np
        >>> from distopt import run_ranks, DistOpt, Parameter
        >>> from distopt.optim import SGD
        >>> def main(comm):
        ...     w, opt = Parameter("w", np.zeros(8, np.float32)), DistOpt(SGD(1.0), comm)
        ...     g = [3, -3, 1, 1, 0, 0, 0, 0] if comm.rank else [-3, 3, 1, 1, 0, 0, 0, 0]
        ...     opt.step([(w, np.array(g, np.float32))], ARCTopK(0.25, of=2))
        ...     return w.data.tolist()
        >>> run_ranks(2, main)[0]  # the first row is larger on each rank, and nothing in the sum
        [0.0, 0.0, -1.0, -1.0, 0.0, 0.0, 0.0, 0.0]
    """

    traits = Traits(summable=True, stateful=True, changes_with_step=True)

    def __init__(self, density: float = 0.01, of: int = 256, decay: float = 1.0, seed: int = 0):
        self._rows = TopK(density)  # which rows are sent
        self.density, self.of = self._rows.density, check_int("of", of, least=1)
        self.decay, self.seed = check_float("decay", decay, most=1.0), check_int("seed", seed, least=0)

    def at_density(self, density: float) -> "ARCTopK":
        """Return the same with another density."""
        return ARCTopK(density, self.of, self.decay, self.seed)

    def payload_bytes(self, n: int, itemsize: int = 4, layout: BucketLayout | None = None) -> int:
        return self._rows.count(self._count(n, layout)) * self.of * itemsize

    def sketch_bytes(self, n: int, itemsize: int = 4, layout: BucketLayout | None = None) -> int:
        return SIGNS * self._count(n, layout) * itemsize

    def sketch(self, x: np.ndarray, state: State, context: ExchangeContext) -> np.ndarray:
        """Add x to the residual, and return E V, flat: ``(4 rows,)``."""
        residual = decayed(state_array(state, RESIDUAL, x), self.decay, context)
        kernels.accumulate(x, residual, context.skip_flag)
        rows = self._count(x.size, context.layout)
        sign = context.scratch("signs", SIGNS * self.of * x.itemsize).view(x.dtype)
        sketch = context.scratch("sketch", SIGNS * rows * x.itemsize).view(x.dtype)
        if rows:
            kernels.draw_signs(sign, random_key(self.seed, context.step))
            kernels.sketch_rows(residual, self._table(x, context), sign, sketch, rows, -(-rows // TOGETHER))
        return sketch

    def compress(self, x: np.ndarray, state: State, context: ExchangeContext) -> np.ndarray:
        """Move the rows that all ranks choose out of the residual."""
        chosen = self._chosen(x, context)
        payload = context.scratch("payload", chosen.size * self.of * x.itemsize).view(x.dtype)
        table, residual = self._table(x, context), state_array(state, RESIDUAL, x)
        kernels.take_rows(residual, table, chosen, payload, self.of, context.skip_flag)
        return payload

    def decompress(self, payload: np.ndarray, out: np.ndarray, context: ExchangeContext) -> None:
        device.clear(out)
        kernels.put_rows(out, self._table(out, context), self._chosen(out, context), payload, self.of)

    def _chosen(self, x: np.ndarray, context: ExchangeContext) -> np.ndarray:
        """Return the numbers of the rows with the largest sketches, ascending: ``(k,)`` of int32."""
        sketch = context.sketch
        assert sketch is not None, "the sum of sketches comes first"
        energy = context.scratch("energies", sketch.nbytes // SIGNS).view(x.dtype)
        kernels.row_energies(sketch, energy)
        memory = BucketContext(
            _one_tensor(energy.size, energy.dtype),
            scratch=lambda name, nbytes: context.scratch(f"{name} of rows", nbytes),
            constant=lambda name, make: context.constant(f"{name} of rows", make),
        )
        planes = self._rows.compress(energy, {}, context._replace(bucket=memory))
        return unpack_entries(planes, x.dtype)[0]

    def _count(self, n: int, layout: BucketLayout | None) -> int:
        return int((-(-sizes_of(n, layout) // self.of)).sum())

    def _table(self, x: np.ndarray, context: ExchangeContext) -> device.DeviceMirror:
        # struct TensorRow of rows.cu for all rows of a bucket, flat: (2 rows,) of int64
        layout = layout_of(x, context)
        return context.constant(
            f"rows of {self.of}", lambda: np.stack(chunk_places(layout, self.of), axis=1).reshape(-1)
        )


@functools.lru_cache(256)
def _one_tensor(n: int, dtype: np.dtype) -> BucketLayout:
    """Return the layout of an array of so many energies: the same at every step, as is what a GPU has of it."""
    return BucketLayout(["x"], [(n,)], [0], dtype)
