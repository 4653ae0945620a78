"""The phases of a step as ranges: in torch.profiler, in NVTX, and in flight records.

While nobody profiles there are none: a range is around a method, and that has its own name again when the profiler has
stopped.  Here alone phases are named.
"""

import atexit
import contextlib
import functools
import inspect
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from time import monotonic
from types import FunctionType
from typing import Any

import numpy as np

from distopt.buckets import Bucket
from distopt.comm import Communicator
from distopt.comm.control import ControlChannel
from distopt.compress import Compressor, ExchangeContext
from distopt.compress.shards import ShardCodec
from distopt.device import nvtx
from distopt.engine.bucket_store import BucketStore
from distopt.exchange import shared_memory
from distopt.optim.adapters import OptimizerAdapter
from distopt.resilience import flight_recorder
from distopt.resilience.operation_log import Range, recorder

VARIABLE = "DISTOPT_PROFILE"
WANTED = os.environ.get(VARIABLE, "")

Of = tuple[int | None, int]  # the bucket, and the bytes of this rank's arrays, as a ledger counts them


def _of_vote(*_: Any, **__: Any) -> Of:
    return None, 0


def _of_bucket(store: BucketStore, bucket: Bucket, *_: Any, **__: Any) -> Of:
    return bucket.number, bucket.gradient.nbytes


def _of_call(_: Any, x: np.ndarray, *rest: Any, **named: Any) -> Of:
    context = next(item for item in (*rest, *named.values()) if isinstance(item, ExchangeContext))
    return context.bucket.number, x.nbytes


def _of_update(_: Any, buckets: Iterable[Bucket], *__: Any, **___: Any) -> Of:
    return None, sum(bucket.gradient.nbytes for bucket in buckets)


def _of_message(comm: Communicator, *arguments: Any, **named: Any) -> Of:
    x, *rest = *arguments, *named.values()
    if isinstance(x, str):  # `exchange_in_phases` has a verb, and then the parts
        x = rest[0][comm.rank] if x == "all_gather" else rest[0]
    nbytes = sum(part.nbytes for part in x) if isinstance(x, list | tuple) else getattr(x, "nbytes", 8)
    bucket = str(vars(comm.unwrapped).get("_tag", "")).removeprefix("bucket ")
    return int(bucket) if bucket else None, nbytes


def _of_shard(_: Any, arrays: Sequence[np.ndarray], sums: Any, nonfinite: Any, comm: Communicator) -> Of:
    return _of_message(comm, [arrays[rank] for rank in comm.ranks.here])


VERBS = "all_reduce all_gather all_to_all reduce_scatter broadcast lengths sum_in_phases exchange_in_phases"
# A phase, the class or module that has what makes it, the names of that, and what tells a call's bucket and bytes.
PHASES: tuple[tuple[str, Any, str, Callable[..., Of]], ...] = (
    ("pack", BucketStore, "pack", _of_bucket),
    ("vote", ControlChannel, "vote", _of_vote),
    ("select", Compressor, "compress write", _of_call),
    ("select", ShardCodec, "select compress_sum", _of_call),
    ("exchange", Communicator, f"{VERBS} count_all_reduce", _of_message),
    ("exchange", shared_memory, "sum_shard", _of_shard),
    ("update", OptimizerAdapter, "update one_by_one", _of_update),
)

_lock = threading.Lock()
_own = list[tuple[Any, str, FunctionType]]()  # what ranges are around now
_inside = threading.local()


def follow(rank: int) -> None:
    """Put ranges around the phases if a profiler has started since the last step, and take them away if it stopped."""
    wanted = bool(WANTED) or getattr(sys.modules.get("torch.autograd.profiler"), "_is_profiler_enabled", False)
    if wanted != bool(_own):
        _switch(wanted, rank)


def check() -> None:
    """Raise ValueError if ``DISTOPT_PROFILE`` asks for what there is not."""
    if WANTED not in ("", "flight", "nvtx"):
        raise ValueError(f"{VARIABLE} must be one of flight, nvtx, got {WANTED!r}")
    if WANTED == "nvtx":
        nvtx.push_and_pop()


def _switch(on: bool, rank: int) -> None:
    with _lock:  # ranks may be threads of one process
        while _own and not on:
            setattr(*_own.pop())
        if not on or _own:
            return
        for phase, owner, names, of in PHASES:
            for kind, name in itertools.product(_with_subclasses(owner), names.split()):
                method = vars(kind).get(name)
                if isinstance(method, FunctionType):
                    _own.append((kind, name, method))
                    setattr(kind, name, _ranged(method, phase, of))
        if WANTED == "flight":
            atexit.register(flight_recorder.write, recorder, rank, "its end")


def _with_subclasses(owner: Any) -> list[Any]:
    found = [owner]
    for kind in found:  # which grows
        found += [] if inspect.ismodule(kind) else set(kind.__subclasses__()).difference(found)
    return found


def _ranged(method: FunctionType, phase: str, of: Callable[..., Of]) -> Callable[..., Any]:
    """Return a method whose calls are ranges, but for those that another one of the phase makes."""
    if inspect.isgeneratorfunction(method):  # others are under way on the same thread

        @functools.wraps(method)
        def ranged(*args: Any, **kwargs: Any) -> Any:
            with _range(phase, *of(*args, **kwargs)):
                return (yield from method(*args, **kwargs))

        return ranged

    @functools.wraps(method)
    def outermost(*args: Any, **kwargs: Any) -> Any:
        if getattr(_inside, phase, False):
            return method(*args, **kwargs)
        setattr(_inside, phase, True)
        try:
            with _range(phase, *of(*args, **kwargs)):
                return method(*args, **kwargs)
        finally:
            setattr(_inside, phase, False)

    return outermost


@contextlib.contextmanager
def _range(phase: str, bucket: int | None, nbytes: int) -> Iterator[None]:
    details = [f"bucket {bucket}"] * (bucket is not None) + [f"{nbytes} bytes"] * (nbytes > 0)
    text, torch = ", ".join([f"distopt {phase}", *details]), sys.modules.get("torch.autograd.profiler")
    with contextlib.ExitStack() as ranges:
        if torch and torch._is_profiler_enabled:
            ranges.enter_context(torch.record_function(text))
        if WANTED == "nvtx":
            push, pop = nvtx.push_and_pop()
            push(text)
            ranges.callback(pop)
        began = monotonic()
        try:
            yield
        finally:
            row = Range(phase, bucket, nbytes, threading.current_thread().name, began, monotonic())
            recorder.ranges.append(row)
