"""``exchange="measure"``: steps take each exchange that trains the same in turn, and then the fastest."""

import json
import logging
import statistics
import time
from collections.abc import Sequence
from typing import Any

from distopt import device
from distopt.comm import Communicator
from distopt.exchange import EXCHANGES

LOG = logging.getLogger("distopt")
# Steps that each exchange is measured in.
STEPS = 3
# Of the time of what 'auto' chooses another exchange must need less, so that noise decides nothing.
WINS = 0.95


class MeasuredExchanges:
    """What was measured of each compressor, on the hosts that ranks are on now."""

    # All ranks take the same exchange in the same step, and hear of all ranks' times.

    def __init__(self, comm: Communicator):
        self._comm = comm
        # By the compressor's text.
        self._chosen: dict[str, str] = {}
        self._hosts: tuple[int, ...] = ()
        # Of what is measured now: the compressor, the exchanges, the seconds of each step, and when the last one began.
        self._trying, self._exchanges, self._seconds, self._began = "", list[str](), list[float](), 0.0
        # The step that goes on is measured.
        self.trying = False

    def exchange(self, compressor: str, exchanges: Sequence[str]) -> str:
        """Return the exchange of the step that begins, one of these; the first is what counts if none is faster."""
        hosts = tuple(self._comm.hosts)
        if hosts != self._hosts:
            if self._chosen and self._comm.rank == 0:
                LOG.warning("distopt: ranks are on other hosts than before: exchange='measure' measures again")
            self._chosen, self._hosts, self._trying = {}, hosts, ""
        known = self._chosen.get(compressor, exchanges[0] if len(exchanges) == 1 else "")
        self.trying = not known
        if known:
            return known
        if (compressor, exchanges) != (self._trying, self._exchanges):
            self._trying, self._exchanges, self._seconds = compressor, list(exchanges), []
        self._began = time.perf_counter()
        return exchanges[len(self._seconds) // STEPS]

    def end_step(self) -> None:
        """Note how long the step took that was measured, and choose after the last one.  Collective then."""
        if self._comm.gpu is not None:
            device.synchronize(device.current_stream(), self._comm.check)
        self._seconds.append(time.perf_counter() - self._began)
        if len(self._seconds) < STEPS * len(self._exchanges):
            return
        medians = [statistics.median(self._seconds[k : k + STEPS]) for k in range(0, len(self._seconds), STEPS)]
        texts = self._comm.transaction(lambda: self._comm.control.gather(json.dumps(medians)))
        everyones = map(json.loads, texts)
        slowest = dict(zip(self._exchanges, map(max, zip(*everyones, strict=True)), strict=True))
        usual = self._exchanges[0]
        best = min(slowest, key=lambda exchange: slowest[exchange] * (1 if exchange == usual else 1 / WINS))
        self._chosen[self._trying] = best
        if self._comm.rank == 0:
            times = ", ".join(f"{exchange} {1e3 * seconds:.1f} ms" for exchange, seconds in slowest.items())
            LOG.info("distopt: exchange='measure' takes %s for %s; a step took: %s", best, self._trying, times)

    def state(self) -> list[Any]:
        """Return what is known, for a checkpoint: the hosts, by number, and what was chosen."""
        return [list(self._hosts), self._chosen] if self._chosen else []

    def restore(self, state: Sequence[Any]) -> None:
        """Go on from what ``state`` has returned, if ranks are on such hosts again."""
        hosts, chosen = state or ((), {})
        self._hosts, self._chosen, self._trying = tuple(hosts), dict(chosen), ""


def check_measured(state: Any) -> None:
    """Raise ValueError for what ``MeasuredExchanges.state`` cannot have returned."""
    if isinstance(state, list) and len(state) in (0, 2):
        hosts, chosen = state or ([], {})
        if isinstance(hosts, list) and isinstance(chosen, dict) and set(chosen.values()) <= set(EXCHANGES[:-1]):
            return
    raise ValueError(f"measured must be hosts and an exchange for each compressor, got {state!r}")
