"""SINGA's protocol."""

from typing import Any

import numpy as np

from distopt.adapters.adapter import Adapter
from distopt.buckets import Buffer, Buffers
from distopt.optim import Wrapper


class ByName(Adapter):
    """``apply(name, value, grad)`` for every parameter, then ``step()``."""

    def _apply(self, name: str, param: Any, value: np.ndarray, mean: np.ndarray) -> Any:
        """Update one parameter."""
        return self.opt.apply(name, value, mean)

    def check(self, buffers: Buffers) -> None:
        """Does what a wrapper of ours has fit?"""
        for buffer in buffers if isinstance(self.opt, Wrapper) else ():
            self.opt.check(buffer.parameters)

    def masters(self, buffer: Buffer) -> np.ndarray | None:
        """Those of what a wrapper of ours wraps."""
        return self.opt.masters(buffer.parameters, buffer.gradient) if isinstance(self.opt, Wrapper) else None

    def numbers(self) -> list[str]:
        """As a wrapper of ours says, and what it wraps; a stranger is not asked."""
        return self.opt.numbers() if isinstance(self.opt, Wrapper) else []

    def __repr__(self) -> str:
        return f"optimizer {self.opt!r}" if isinstance(self.opt, Wrapper) else super().__repr__()
