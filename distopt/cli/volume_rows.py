"""The rows that ``distopt volume`` prints and draws."""

from collections.abc import Sequence
from typing import NamedTuple

from distopt.cli.gradients import Replay
from distopt.volume import Forecast, Mode, Prediction, Question, Wire, forecast, sendings
from distopt.volume.break_even import DENSE


class Row(NamedTuple):
    """A mode on so many ranks; ``dense`` is what dense gradients put on the wire."""

    mode: Mode
    ranks: int
    sends: Forecast
    takes: Prediction
    dense: float


def rows(question: Question, chosen: Sequence[Mode], ranks: Sequence[int], replay: Replay | None) -> list[Row]:
    """By number of ranks, then by mode; the question's own number does not matter."""
    per_node, found = question.wire.per_node, []
    for size in ranks:
        there = question._replace(ranks=size)
        dense = forecast(question.buckets, DENSE, size).sent
        for mode in chosen:
            if replay:
                sends, sent = replay.send(mode, size, per_node)
            else:
                sends = forecast(question.buckets, mode, size, per_node)
                sent = sendings(question.buckets, mode, size)
            found.append(Row(mode, size, sends, there.timed(sent, mode, there.compute(mode)), dense))
    return found


def between(ranks: Sequence[int], network: Wire) -> list[int]:
    """Powers of two from the first number of ranks to the last, as many nodes as that."""
    local = network.per_node
    nodes = [1 << k for k in range(ranks[-1].bit_length())]
    return [n * local for n in nodes if ranks[0] < n * local < ranks[-1] and n * local not in ranks]
