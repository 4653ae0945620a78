"""distopt in JAX, outside of ``jit``: means of gradients over ranks, and local steps, of pytrees."""

from distopt.jax.local_steps import PytreeSteps, local_steps
from distopt.jax.synchronize import PytreeSynchronizer, synchronize
from distopt.jax.trees import broadcast

__all__ = ["PytreeSteps", "PytreeSynchronizer", "broadcast", "local_steps", "synchronize"]
