"""What outlives a step, in memory from which another process goes on: what it finds, whenever the first one ends."""

import os

import numpy as np
import pytest

from distopt.buckets import shared_state as module
from distopt.buckets.shared_state import SharedState, StateFolder
from distopt.compress.state import RESIDUAL, prefixed, state_array
from distopt.engine.undo import Undo


class Job:
    """A job in its n-th transaction, and a process of it."""

    def __init__(self, path):
        self.path, self.transaction = path / "memory", 1

    def attached(self, owner="3-0-0", number=0):
        """What a process finds that takes over, or begins."""
        return SharedState(StateFolder.made(self.path, lambda: self.transaction, number), owner)


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path)


def contents(state):
    return {name: x.tolist() for name, x in state.items()}


X = np.array([1, 2, 3], np.float32)


def test_two_trainings_of_a_job_have_files_of_their_own(job):
    for number in range(12):
        job.attached(number=number)["residual"] = X + number
    assert [contents(job.attached(number=k))["residual"] for k in range(12)] == [(X + k).tolist() for k in range(12)]


def test_another_process_finds_what_there_is(job):
    state = job.attached()
    state["residual"], state["a name/with.dots"] = X, X.astype(np.float64)
    state["residual"] += 1
    found = job.attached()
    assert contents(found) == {"residual": [2, 3, 4], "a name/with.dots": [1, 2, 3]}
    assert {name: x.dtype.name for name, x in found.items()} == {"residual": "float32", "a name/with.dots": "float64"}
    assert not contents(job.attached("3-0-1"))
    assert not contents(job.attached("3-0"))


def changed(state, undo, until):
    """A step that ends after so many of its parts; what has been done then."""
    parts = [
        lambda: undo.keep_state(state),
        lambda: state["residual"].__iadd__(10),
        lambda: state_array(state, "velocity", X).__iadd__(7),
        lambda: state.__delitem__("owed"),
        lambda: state_array(state, "owed", X),
    ]
    for part in parts[:until]:
        part()


BEFORE = {"residual": [1, 2, 3], "owed": [1, 2, 3]}


@pytest.mark.parametrize("until", range(6))
def test_a_step_that_others_make_again_begins_where_it_began(job, until):
    state = job.attached()
    state["residual"], state["owed"] = X, X
    job.transaction += 1
    changed(state, Undo(), until)
    assert contents(job.attached()) == BEFORE
    again = job.attached()  # the one that took over ended, too
    undo = Undo()
    changed(again, undo, 5)
    assert contents(job.attached()) == BEFORE


@pytest.mark.parametrize("until", range(6))
def test_a_step_that_all_have_made_is_kept(job, until):
    state = job.attached()
    state["residual"], state["owed"] = X, X
    job.transaction += 1
    changed(state, Undo(), 5)
    after = contents(state)
    assert after != BEFORE
    job.transaction += 1
    changed(state, Undo(), until)
    assert contents(job.attached()) == after


def test_this_process_puts_back_what_it_has_changed(job):
    state, undo = job.attached(), Undo()
    state["residual"], state["owed"] = X, X
    for _ in range(3):
        undo.forget()
        changed(state, undo, 5)
        undo.undo()
        assert contents(state) == BEFORE == contents(job.attached())
        changed(state, undo, 5)
        undo.undo()
        assert contents(state) == BEFORE


def test_what_is_assigned_is_copied_to_where_the_state_lies(job):
    state = job.attached()
    state["residual"] = X
    place = state["residual"]
    state["residual"] = X + 1
    assert state["residual"] is place
    assert place is not X
    state.clear()
    state["residual"] = X
    assert state["residual"] is place
    assert contents(job.attached()) == {"residual": [1, 2, 3]}


def test_a_compressor_sees_it_by_its_own_names(job):
    class Traits:
        state_prefix = "frequencies of "

    state = job.attached()
    state_array(prefixed(state, Traits), RESIDUAL, X)[:] = 5
    assert contents(job.attached()) == {"frequencies of residual": [5, 5, 5]}


def test_files_are_this_users_alone(job):
    state = job.attached()
    state["residual"] = X
    assert oct(job.path.stat().st_mode)[-3:] == "700"
    assert [oct(path.stat().st_mode)[-3:] for path in job.path.iterdir()] == ["600"]


@pytest.mark.parametrize("kind", ["of others", "a link", "a file"])
def test_a_folder_of_somebody_else_is_not_used(tmp_path, kind):
    path = tmp_path / "memory"
    if kind == "of others":
        path.mkdir()
        path.chmod(0o755)
    elif kind == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.touch()
    assert StateFolder.made(path, lambda: 1, 0) is None


def test_without_room_states_are_private_and_that_is_said_once(job, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    state = job.attached()
    monkeypatch.setattr(os, "posix_fallocate", full)
    undo = Undo()
    for name in ("residual", "velocity"):
        state[name] = X.copy()
    undo.keep_state(state)
    state["residual"] += 1
    undo.undo()
    assert contents(state) == {"residual": [1, 2, 3], "velocity": [1, 2, 3]}
    assert not contents(job.attached())
    assert not list(job.path.iterdir())
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 1
    assert "residuals are lost with a process that is killed" in texts[0]
    assert "No space left on device" in texts[0]
    assert module.LOG.name == "distopt"
