"""Pytrees of jax as arrays of numpy by name, and back."""

import zlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from distopt.comm import Communicator
from distopt.engine.agreement import Agreement
from distopt.engine.facade import ranks


class Pytree:
    """The structure of a pytree: names of its leaves, as ``jax.tree_util.keystr`` has them, in its order."""

    def __init__(self, tree: Any, what: str):
        # what: the argument that it is, for errors.
        pairs, structure = jax.tree_util.tree_flatten_with_path(tree)
        self._structure: Any = structure
        self._what, self.names = what, [jax.tree_util.keystr(path) or what for path, _ in pairs]
        if not pairs:
            raise ValueError(f"{what} must have a leaf, got none in {structure}")

    def arrays(self, tree: Any) -> dict[str, np.ndarray]:
        """Return the leaves by name as arrays, on the CPU their own memory; raise for a tree that is not like this."""
        leaves, structure = jax.tree_util.tree_flatten(tree)
        if self._structure != structure:
            raise ValueError(f"the pytree must be {self._structure}, as {self._what}, got {structure}")
        for name, leaf in zip(self.names, leaves, strict=True):
            if isinstance(leaf, jax.core.Tracer):
                raise TypeError(f"{name}: must be an array, got a tracer of jit or grad; call distopt outside of those")
        # What is on a GPU comes all at once, and not one after the other.
        return dict(zip(self.names, map(np.asarray, jax.device_get(leaves)), strict=True))

    def like(self, tree: Any, arrays: Mapping[str, np.ndarray]) -> Any:
        """Return a tree of arrays that nobody will write to, on the devices on which this tree has its leaves."""
        pairs = zip(jax.tree_util.tree_leaves(tree), map(arrays.__getitem__, self.names), strict=True)
        return self._structure.unflatten([_placed(array, leaf) for leaf, array in pairs])

    def check_alike(self, tree: Any, agreement: Agreement) -> None:
        """Raise ValueError on every rank if ranks differ in a leaf, of which any bit counts.  Collective."""
        sums = {name: zlib.crc32(as_bytes(x).data) for name, x in self.arrays(tree).items()}
        remedy = f"distopt.jax.broadcast({self._what}) returns rank 0's"
        lines = [f"{name} with the checksum {crc:08x} ({remedy})" for name, crc in sums.items()]
        agreement.vote_on_lines(f"jax's {self._what}", lines)


def _placed(array: np.ndarray, leaf: Any) -> Any:
    """Return an array as what a leaf is: of jax, on its devices, or of numpy."""
    of_jax = isinstance(leaf, jax.Array)
    return jax.device_put(array, leaf.sharding if leaf.committed else None) if of_jax else array


def as_bytes(x: np.ndarray) -> np.ndarray:
    """Return an array as bytes, in its memory where that has no gaps."""
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def broadcast(tree: Any, communicator: Communicator | None = None) -> Any:
    """Return rank 0's leaves on all ranks, where each rank has its own: parameters, or whatever it has loaded.

    Collective.

    Args:
        tree: a pytree of arrays of any dtypes, of the same structure, shapes and dtypes on all ranks.
        communicator: the ranks; None for ``distopt.world()``.

    Returns:
        The same pytree, on the same devices.

    Raises:
        TypeError: the tree is that of a function in ``jit``.
        ValueError: on every rank alike, if ranks differ in names, shapes or dtypes.

    Example:
        >>> import distopt.jax
        >>> import jax.numpy as jnp
        >>> distopt.jax.broadcast({"w": jnp.zeros(2)})
        {'w': Array([0., 0.], dtype=float32)}
    """
    comm, _ = ranks(communicator, False)
    known = Pytree(tree, "tree")
    arrays = known.arrays(tree)
    lines = [f"{name} {x.shape} {x.dtype}" for name, x in arrays.items()]
    Agreement(comm, "broadcast").vote_on_lines("leaves to broadcast", lines)
    for name, x in arrays.items():
        arrays[name] = np.array(x, order="C")
        comm.broadcast(as_bytes(arrays[name]))
    comm.wait()
    return known.like(tree, arrays)
