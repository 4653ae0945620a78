"""The journal of what a step changes, and that each part of an engine says what a step replaces."""

import numpy as np
import pytest

from distopt import DistOpt, LossScaler, Parameter, run_ranks
from distopt.comm import Elastic
from distopt.compress import Dense, ErrorFeedback, TopK
from distopt.engine.undo import Undo
from distopt.optim import SGD


class Part:
    def __init__(self):
        self.count, self.text = 1, "before"


def test_all_that_was_kept_is_put_back_and_what_is_done_again_is_put_back_again():
    x, y, part, state, undo = np.arange(3.0), np.zeros(2), Part(), {"residual": np.ones(2)}, Undo()
    residual, called = state["residual"], []
    undo.keep(x, y)
    undo.keep_fields(part, "count")
    undo.keep_state(state)
    for attempt in range(2):
        undo.on_undo(lambda attempt=attempt: called.append(attempt))
        x[:], y[:], part.count, part.text = 9, 9, 9, "after"
        residual[:] = 9
        state["velocity"] = state.pop("residual")
        undo.undo()
        assert (x.tolist(), y.tolist(), part.count, part.text) == ([0, 1, 2], [0, 0], 1, "after")
        assert state == {"residual": residual}
        assert residual.tolist() == [1, 1]
    assert called == [0, 1]


def test_the_first_copy_counts_until_all_is_forgotten():
    x, undo = np.zeros(2), Undo()
    for value in (1, 2):
        undo.keep(x)
        x[:] = value
    undo.undo()
    assert x.tolist() == [0, 0]
    x[:] = 5
    undo.forget()
    undo.keep(x)
    x[:] = 6
    undo.undo()
    assert x.tolist() == [5, 5]


@pytest.mark.parametrize("compressor", [Dense(), ErrorFeedback(TopK(0.5))], ids=repr)
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_each_part_says_what_a_step_replaces(compressor, clip_norm):
    """What else a step replaces would be lost, or kept, if a rank ends in it."""

    def main(comm):
        comm = Elastic(comm)
        pairs = [(Parameter(n, np.zeros(8, np.float32)), np.full(8, comm.rank + 1.0, np.float32)) for n in "ab"]
        options = {"num_batches": 2, "nonfinite": LossScaler(init_scale=1.0, window=2), "clip_norm": clip_norm}
        opt = DistOpt(SGD(0.1), comm, **options)
        engine, found = opt.engine, set()
        parts = [engine, engine.progress, engine.accumulator, engine.nonfinite.policy, engine.nonfinite, engine.means]
        for _ in range(6):
            before = [dict(vars(part)) for part in (*parts, engine.reducers.bounds)]
            opt.step(pairs, compressor, exchange="two_phase")
            for part, values in zip((*parts, engine.reducers.bounds), before, strict=True):
                now = vars(part)
                replaced = {name for name in now if name not in values or now[name] is not values[name]}
                found |= {f"{type(part).__name__}.{name}" for name in replaced - set(part.CHANGES)}
        comm.leave()
        return found

    assert run_ranks(2, main) == [set(), set()]
