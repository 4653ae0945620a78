"""The adapter for optimizers with ``apply(name, value, grad)``, as SINGA's and distopt's wrappers."""

import numpy as np

from distopt.buckets import Bucket, BucketSet
from distopt.optim import OptimizerWrapper
from distopt.optim.adapters.base import ApplyAdapter


class SingaAdapter(ApplyAdapter):
    """An adapter that calls ``apply(name, value, grad)`` for every parameter, then ``step()`` if there is one."""

    # Only a distopt `OptimizerWrapper` is also asked for checks, masters and numbers.

    def check(self, buckets: BucketSet) -> None:
        for bucket in buckets if isinstance(self.opt, OptimizerWrapper) else ():
            self.opt.check(bucket.parameters)

    def masters(self, bucket: Bucket) -> np.ndarray | None:
        return self.opt.masters(bucket.parameters, bucket.gradient) if isinstance(self.opt, OptimizerWrapper) else None

    def numbers(self) -> list[str]:
        return self.opt.numbers() if isinstance(self.opt, OptimizerWrapper) else []

    def __repr__(self) -> str:
        return f"optimizer {self.opt!r}" if isinstance(self.opt, OptimizerWrapper) else super().__repr__()
