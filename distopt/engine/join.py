"""Uneven data: ranks that have no batches left take part in the steps of the others."""

from collections.abc import Callable

from distopt.engine.agreement import AllJoinedError
from distopt.engine.engine import Engine


def join(engine: Engine, repeat: Callable[[], object]) -> None:
    """Call ``repeat``, which makes this rank's last step again without gradients, until all ranks have joined."""
    collector, agreement = engine.store.collector, engine.agreement
    agreement.joined, missing = True, collector.allow_missing
    collector.allow_missing = True
    try:
        while True:
            repeat()
    except AllJoinedError:
        pass
    finally:
        agreement.joined, collector.allow_missing = False, missing
