"""Checkpoints of all ranks: a resumed run has the bits of an unbroken one."""

import errno
import json
import sys
import warnings

import numpy as np
import pytest

import laws
from distopt import DistOpt, Parameter, cli, run_ranks
from distopt.checkpoint import CheckpointError, file, folder, lock
from distopt.comm import LocalCommunicator
from distopt.comm.control import PeerLeft
from distopt.optim import SGD, Adam
from launch import finish


def saved(comm, path, steps=2, mode="dense", extra=None, **options):
    """Train, and save."""
    params, opt = laws.train(comm, steps=steps, mode=mode, **options)
    opt.save(path, params, extra)
    return params, opt


def resumed(comm, path, make=laws.sgd, mode="dense", **options):
    """New parameters of a new process, and what ``load`` returned."""
    params = laws.move_to_device(comm, laws.parameters(rank=comm.rank))
    opt = DistOpt(laws.maker_for(mode, make)(), comm, **{"threshold": 60} | options)
    return params, opt, opt.load(path, params)


def visible(path):
    """What is in a folder, but for the lock."""
    return sorted(p.name for p in path.iterdir() if p.name != lock.NAME)


def passed_over(size, path):
    """Digests of what all ranks have loaded, or the error; and the warnings, in order."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = run_ranks(size, lambda comm: laws.digest(resumed(comm, path)[0]))
        except CheckpointError as error:
            found = str(error)
    return found, [str(w.message).removeprefix(f"passed over the checkpoint {path}/") for w in caught]


# --------------------------------------------------------------------------------------------- to the same bits


@pytest.mark.sampled(7)
@pytest.mark.parametrize("num_batches", [1, 2])
@pytest.mark.parametrize("mode", laws.MODES)
@pytest.mark.parametrize("size", [1, 3])
def test_a_resumed_run_has_the_bits_of_an_unbroken_one(size, mode, num_batches, tmp_path):
    def main(comm):
        expected = laws.train(comm, steps=6, mode=mode, num_batches=num_batches)
        saved(comm, tmp_path, steps=3, mode=mode, num_batches=num_batches)
        params, opt, extra = resumed(comm, tmp_path, mode=mode, num_batches=num_batches)
        assert extra == {}
        laws.train(comm, steps=3, start=3, params=params, opt=opt, mode=mode)
        assert laws.digest(params) == laws.digest(expected[0])
        laws.assert_equal_states(opt.state_dict(), expected[1].state_dict())

    run_ranks(size, main)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("make", laws.OPTIMIZERS.values(), ids=laws.OPTIMIZERS)
def test_a_run_resumes_with_every_optimizer(make, tmp_path):
    def main(comm):
        expected = laws.train(comm, steps=5, make=make)
        saved(comm, tmp_path, steps=2, make=make)
        params, opt, _ = resumed(comm, tmp_path, make=make)
        laws.train(comm, steps=3, start=2, params=params, opt=opt)
        assert laws.digest(params) == laws.digest(expected[0])

    run_ranks(2, main)


def test_a_run_with_shared_parameters_resumes_to_the_same_bits(tmp_path):
    def main(comm):
        expected = laws.train(comm, steps=4)
        params, opt = laws.train(comm, steps=0)
        for p, view in zip(params, opt.parameter_views(params), strict=True):
            p.data = view
        laws.train(comm, steps=2, params=params, opt=opt)
        opt.save(tmp_path, params)
        for _ in range(2):  # into new ones that are shared already, and into new ones that are not yet
            params = laws.parameters(rank=comm.rank)
            opt = DistOpt(laws.sgd(), comm, threshold=60)
            for p, view in zip(params, opt.parameter_views(params), strict=True):
                p.data = view
            opt.load(tmp_path, params)
            laws.train(comm, steps=2, start=2, params=params, opt=opt)
            assert laws.digest(params) == laws.digest(expected[0])
        params, opt, _ = resumed(comm, tmp_path)
        for p, view in zip(params, opt.parameter_views(params), strict=True):
            p.data = view
        laws.train(comm, steps=2, start=2, params=params, opt=opt)
        assert laws.digest(params) == laws.digest(expected[0])

    run_ranks(2, main)


def test_shared_parameters_are_saved_after_a_refused_step(tmp_path):
    """The vote on the checkpoint is not one on that step."""

    def main(comm):
        params, opt = laws.share(*laws.train(comm, steps=0))
        laws.train(comm, steps=1, params=params, opt=opt)
        with pytest.raises(ValueError, match="ranks differ: rank 0 has a step with Dense"):
            laws.train(comm, steps=1, start=1, params=params, opt=opt, mode="half" if comm.rank else "dense")
        opt.save(tmp_path, params)
        laws.train(comm, steps=2, start=1, params=params, opt=opt)
        found = laws.digest(params)
        comm.barrier()
        return found

    assert run_ranks(2, main) == run_ranks(2, lambda comm: laws.digest(laws.train(comm, steps=3)[0]))
    assert visible(tmp_path) == ["000001-step-1"]


def test_a_custom_optimizer_is_saved_and_resumed(tmp_path):
    class Own:
        def __init__(self):
            self.seen = {}

        def update(self, param, grad):
            self.seen[param.name] = self.seen.get(param.name, 0) + 1
            param.data -= grad * self.seen[param.name]

        def state_dict(self):
            return {"seen": self.seen, "note": ["a", 1.5, None, np.arange(3)]}

        def load_state_dict(self, state):
            self.seen = dict(state["seen"])

    def main(comm):
        expected = laws.train(comm, steps=4, make=Own)[0]
        saved(comm, tmp_path, make=Own)
        params, opt, _ = resumed(comm, tmp_path, make=Own)
        laws.train(comm, steps=2, start=2, params=params, opt=opt)
        assert laws.digest(params) == laws.digest(expected)

    run_ranks(2, main)


def test_extra_is_saved_for_each_rank_and_read_when_saving(tmp_path):
    def main(comm):
        rng = np.random.default_rng(comm.rank)
        epoch = [0]
        params, opt = laws.train(comm, steps=1)
        for _ in range(2):
            epoch[0] += 1
            opt.save(tmp_path, params, lambda: {"epoch": epoch[0], "rng": rng.bit_generator.state})
        drawn = rng.random(3)
        *_, extra = resumed(comm, tmp_path)
        rng.bit_generator.state = extra["rng"]
        assert (rng.random(3) == drawn).all()
        return extra["epoch"]

    assert run_ranks(3, main) == [2] * 3


def test_loading_from_a_missing_folder_changes_nothing(tmp_path):
    def main(comm):
        params, opt, extra = resumed(comm, tmp_path / "none")
        assert extra is None
        laws.train(comm, steps=1, params=params, opt=opt)
        return laws.digest(params)

    assert run_ranks(2, main) == run_ranks(2, lambda comm: laws.digest(laws.train(comm, steps=1)[0]))


# --------------------------------------------------------------------------------------------- other ranks


@pytest.mark.sampled(4)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("num_batches", [1, 3])
def test_the_pending_mean_stays_when_another_number_of_ranks_resumes(size, num_batches, tmp_path):
    zero = np.zeros(())  # of a rank that has inherited nothing

    def mean(opts):
        return {
            (state, name): sum(o["states"].get(state, {}).get(name, zero).astype(np.float64) for o in opts) / len(opts)
            for state in opts[0]["states"]
            for name in opts[0]["states"][state]
        }

    def save(comm):
        params, opt = saved(comm, tmp_path, steps=5, mode="topk", num_batches=num_batches)
        return params, opt.state_dict()

    def load(comm):
        params, opt, _ = resumed(comm, tmp_path, num_batches=num_batches)
        laws.train(comm, steps=2 * num_batches - 1, start=5, params=params, opt=opt, mode="topk")
        return opt.state_dict()

    def look(comm):
        params, opt, _ = resumed(comm, tmp_path, num_batches=num_batches)
        opt.gradient_views(params)
        return params, opt.state_dict()

    before, after = run_ranks(4, save), run_ranks(size, look)
    assert laws.digest(before[0][0]) == laws.digest(after[0][0])
    a, b = mean([state for _, state in before]), mean([state for _, state in after])
    assert a.keys() == b.keys()
    for key in a:
        np.testing.assert_allclose(a[key], b[key], rtol=0, atol=1e-6)
    assert after[0][1]["contributions"] == before[0][1]["contributions"]
    run_ranks(size, load)


def closed_window(comm, path):
    """The parameter after the second of two calls, with 4, after what was saved."""
    w = Parameter("w", np.ones(2))
    opt = DistOpt(SGD(1.0), comm, num_batches=2, sync_on_apply=False)
    opt.load(path, [w])
    opt([(w, np.full(2, 4.0))])
    return w.data.tolist()


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_window_of_sums_is_restored_on_one_rank_only(size, tmp_path):
    options = {"num_batches": 2, "sync_on_apply": False}

    def save(comm):
        w = Parameter("w", np.zeros(2))
        opt = DistOpt(SGD(1.0), comm, **options)
        opt([(w, np.full(2, 1.0 + comm.rank))])
        opt.save(tmp_path, [w])

    run_ranks(4, save)  # the mean of this half is 2.5
    assert run_ranks(size, lambda comm: closed_window(comm, tmp_path)) == [[-3.25, -3.25]] * size


@pytest.mark.parametrize("summed", [False, True])
def test_an_open_window_resumes_only_with_the_same_sync_on_apply(summed, tmp_path):
    """An open window has sums over ranks or gradients of one rank; without one, either setting resumes."""

    def main(comm, steps):
        saved(comm, tmp_path, steps=steps, num_batches=2, sync_on_apply=not summed)
        return resumed(comm, tmp_path, num_batches=2, sync_on_apply=summed)[1].step_counter

    assert run_ranks(2, lambda comm: main(comm, 2)) == [1, 1]
    with pytest.raises(
        ValueError, match=f"sync_on_apply must be {not summed} .*saved in the middle of a window, got {summed}"
    ):
        run_ranks(2, lambda comm: main(comm, 3))


@pytest.mark.parametrize("calls", [1, 3])
def test_an_open_window_of_partial_steps_is_restored_rank_by_rank(calls, tmp_path):
    options = {"num_batches": 2, "sync_on_apply": False}

    def save(comm):
        w = Parameter("w", np.zeros(2))
        opt = DistOpt(SGD(1.0), comm, **options)
        for _ in range(calls):
            opt.backward_and_partial_update([(w, np.full(2, 1.0 + comm.rank))])
        opt.save(tmp_path, [w])

    def load(comm):
        w = Parameter("w", np.ones(2))
        opt = DistOpt(SGD(1.0), comm, **options)
        opt.load(tmp_path, [w])
        opt.backward_and_partial_update([(w, np.full(2, 4.0))])
        return w.data.tolist()

    run_ranks(2, save)  # 1 and 2 wait; all have 0, after three calls -1.5
    expected = [-2.75 - 1.5 * (calls == 3)] * 2  # (0 - 2.5 + 0 - 3) / 2
    assert run_ranks(2, load) == [expected] * 2
    assert run_ranks(1, load) == [expected]  # the pending mean stays: 0 - (1.5 + 4) / 2


@pytest.mark.parametrize("saved_by", [1, 4])
def test_a_window_of_sums_after_partial_steps_is_restored_on_one_rank_only(saved_by, tmp_path):
    options = {"num_batches": 2, "sync_on_apply": False}

    def save(comm):
        w = Parameter("w", np.zeros(2))
        opt = DistOpt(SGD(1.0), comm, **options)
        for _ in range(2):
            opt.backward_and_partial_update([(w, np.full(2, 1.0))])
        opt([(w, np.full(2, 1.0 + comm.rank))])
        opt.save(tmp_path, [w])
        opt([(w, np.full(2, 4.0))])
        return w.data.tolist()

    went_on = run_ranks(saved_by, save)[0]
    assert run_ranks(2, lambda comm: closed_window(comm, tmp_path)) == [went_on] * 2


def test_another_number_of_ranks_resumes_from_the_average_of_partial_steps(tmp_path):
    def save(comm):
        params, opt = saved(comm, tmp_path, steps=3, mode="partial", extra={"rank": comm.rank})
        return [p.data.copy() for p in params], opt.state_dict()["optimizer"]["moments"]

    def load(comm):
        params, opt, extra = resumed(comm, tmp_path)
        return [p.data.copy() for p in params], opt.state_dict()["optimizer"]["moments"], extra["rank"]

    before, same, other = run_ranks(3, save), run_ranks(3, load), run_ranks(2, load)
    for rank in range(3):
        assert same[rank][2] == rank
        for a, b in zip(before[rank][0], same[rank][0], strict=True):
            np.testing.assert_array_equal(a, b)
    for rank in range(2):
        assert other[rank][2] == rank
        for k, found in enumerate(other[rank][0]):
            np.testing.assert_allclose(found, np.mean([b[0][k] for b in before], axis=0), rtol=0, atol=1e-6)
        for name, found in other[rank][1].items():
            np.testing.assert_allclose(found, np.mean([b[1][name] for b in before], axis=0), rtol=0, atol=1e-6)


def test_resuming_on_another_number_of_ranks_is_logged_once(tmp_path, caplog):
    run_ranks(2, lambda comm: saved(comm, tmp_path))
    run_ranks(3, lambda comm: resumed(comm, tmp_path))
    assert caplog.text.count("2 ranks saved it, 3 go on; the pending mean stays as it was") == 1


# --------------------------------------------------------------------------------------------- damage


def test_a_damaged_checkpoint_is_passed_over_by_all(tmp_path):
    """By all ranks, although one can read all that it needs."""

    def save(comm):
        params, opt = laws.train(comm, steps=0)
        digests = []
        for step in range(3):
            laws.train(comm, steps=1, start=step, params=params, opt=opt)
            opt.save(tmp_path, params, keep=3)
            digests.append(laws.digest(params))
        return digests

    expected = run_ranks(2, save)[0]
    newest = tmp_path / "000003-step-3"
    raw = bytearray((newest / "rank-1").read_bytes())
    raw[-1] ^= 1
    (newest / "rank-1").write_bytes(raw)
    found, (said,) = passed_over(2, tmp_path)
    assert found == [expected[1]] * 2
    assert said.startswith(f"000003-step-3: rank 1: {newest / 'rank-1'}: ")
    (tmp_path / "000002-step-2" / "all").unlink()
    found, (_, said) = passed_over(2, tmp_path)
    assert found == [expected[0]] * 2
    assert "No such file" in said
    (tmp_path / "000001-step-1" / "manifest.json").write_text("{}")
    found, said = passed_over(2, tmp_path)
    assert found.endswith("none is good")
    assert "must be of the format" in said[2]


def test_files_of_two_checkpoints_are_not_mixed(tmp_path):
    for _ in range(2):
        run_ranks(2, lambda comm: saved(comm, tmp_path))
    (tmp_path / "000001-step-2" / "rank-1").replace(tmp_path / "000002-step-2" / "rank-1")
    found, said = passed_over(2, tmp_path)
    assert found.endswith("none is good")
    assert "rank-1: save: must be that of the manifest" in said[0]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("stage", ["prepare", "commit", "manifest"])
def test_a_full_disk_on_one_rank_keeps_the_older_checkpoint_and_training_goes_on(stage, rank, tmp_path, monkeypatch):
    """All ranks learn it, the older checkpoint stays, and training goes on."""
    prepare = file.prepare

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    def sometimes(path, tree, about):
        if about["step"] < 2 or f"rank-{rank}" not in str(path):
            return prepare(path, tree, about)
        if stage == "prepare":
            full()
        pending = prepare(path, tree, about)
        pending.commit = full
        return pending

    def main(comm):
        params, opt = saved(comm, tmp_path, steps=1)
        laws.train(comm, steps=1, start=1, params=params, opt=opt)
        with pytest.raises(RuntimeError, match=r"rank \d: OSError: \[Errno 28\] No space left on device"):
            opt.save(tmp_path, params)
        laws.train(comm, steps=2, start=2, params=params, opt=opt)
        return laws.digest(params)

    if stage == "manifest":
        complete = folder.complete
        monkeypatch.setattr(
            folder, "complete", lambda place, about: (complete if about["step"] < 2 else full)(place, about)
        )
    else:
        monkeypatch.setattr(file, "prepare", sometimes)
    expected = laws.digest(run_ranks(2, lambda comm: laws.train(comm, steps=4)[0])[0])
    assert run_ranks(2, main) == [expected] * 2
    assert visible(tmp_path) == ["000001-step-1"]
    assert not list(tmp_path.glob("**/*.tmp.*"))
    run_ranks(2, lambda comm: resumed(comm, tmp_path))


@pytest.mark.parametrize("end", ["Ctrl-C", "left"])
def test_save_keeps_the_last_checkpoint_until_the_next_is_agreed_on(end, tmp_path, monkeypatch):
    """Also if only one is kept."""
    complete = folder.complete

    def interrupted(place, about):
        complete(place, about)
        if about["step"] > 1 and end == "Ctrl-C":
            raise KeyboardInterrupt

    def leave(*arguments):
        raise SystemExit

    def main(comm):
        params, opt = saved(comm, tmp_path, steps=1)
        laws.train(comm, steps=1, start=1, params=params, opt=opt)
        if comm.rank and end == "left":
            opt._checkpointer._on_rank_0 = leave  # first asked when the checkpoint is completed
        opt.save(tmp_path, params, keep=1)

    monkeypatch.setattr(folder, "complete", interrupted)
    with pytest.raises(KeyboardInterrupt if end == "Ctrl-C" else PeerLeft):
        run_ranks(2, main)
    assert visible(tmp_path) == ["000001-step-1"]


@pytest.mark.parametrize("what", ["state_dict", "__repr__"])
def test_an_optimizer_that_cannot_tell_its_state_on_one_rank_is_an_error_of_all(what, tmp_path):
    def main(comm):
        class Own:
            def update(self, param, grad):
                param.data -= grad

        def fails(self):
            raise KeyError("mine")

        params, opt = laws.train(comm, steps=1, make=Own)
        if comm.rank:
            setattr(Own, what, fails)
        with pytest.raises(RuntimeError, match="rank 1: KeyError: 'mine'"):
            opt.save(tmp_path, params)
        laws.train(comm, steps=1, start=1, params=params, opt=opt)

    run_ranks(2, main)
    assert not visible(tmp_path)


def test_an_optimizer_with_a_megabyte_of_repr_is_saved(tmp_path):
    def make():
        return SGD(0.1, lr_mult={f"p{k}" + 40 * "_": 2.0 for k in range(25_000)})

    def main(comm):
        params, _ = saved(comm, tmp_path, make=make)
        assert laws.digest(resumed(comm, tmp_path, make=make)[0]) == laws.digest(params)

    run_ranks(1, main)


def test_save_keeps_the_newest_checkpoints_and_foreign_folders(tmp_path):
    def main(comm):
        params, opt = laws.train(comm, steps=1)
        for _ in range(5):
            opt.save(tmp_path, params, keep=2)
        opt.save(tmp_path / "other", params, keep=1)

    (tmp_path / "000001-step-7").mkdir()  # never completed
    (tmp_path / "mine").mkdir()
    run_ranks(2, main)
    assert visible(tmp_path) == ["000005-step-1", "000006-step-1", "mine", "other"]
    manifest = json.loads((tmp_path / "000006-step-1" / "manifest.json").read_text())
    assert (manifest["world_size"], manifest["step"]) == (2, 1)
    assert {p.name for p in (tmp_path / "000006-step-1").iterdir()} == {"all", "rank-0", "rank-1", "manifest.json"}


def test_inspect_shows_the_checkpoints_of_a_folder(tmp_path, capsys):
    run_ranks(2, lambda comm: saved(comm, tmp_path, steps=1))
    run_ranks(3, lambda comm: saved(comm, tmp_path, steps=2))
    assert cli.main(["inspect", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{tmp_path}/000002-step-2: complete, of 3 ranks after step 2"
    assert lines[5] == f"{tmp_path}/000001-step-1: complete, of 2 ranks after step 1"
    assert len(lines) == 9
    (tmp_path / "000001-step-1" / "manifest.json").write_text("{")
    assert cli.main(["inspect", str(tmp_path)]) == 1
    assert "000001-step-1: not whole: " in capsys.readouterr().out


# --------------------------------------------------------------------------------------------- bad input


def nothing_saved(tmp_path):
    assert not list(tmp_path.glob("*/manifest.json"))


def test_save_refuses_objects_duplicates_and_a_closed_optimizer(tmp_path):
    def main(comm):
        params, opt = laws.train(comm, steps=1)
        with pytest.raises(TypeError, match=r"rank 1: .*extra/model.*object"):
            opt.save(tmp_path, params, {"model": object() if comm.rank else None})
        with pytest.raises(ValueError, match="keep must be at least 1, got 0"):
            opt.save(tmp_path, params, keep=0)
        with pytest.raises(ValueError, match="p0: given twice"):
            opt.save(tmp_path, [params[0], params[0]])
        opt.close()
        with pytest.raises(RuntimeError, match="closed"):
            opt.save(tmp_path)
        with pytest.raises(RuntimeError, match="closed"):
            opt.load(tmp_path)

    run_ranks(2, main)
    nothing_saved(tmp_path)


def test_a_bare_array_has_no_name_before_the_first_step_or_in_another_process(tmp_path):
    w = np.zeros(3)
    opt = DistOpt(SGD(1.0), LocalCommunicator())
    with pytest.raises(ValueError, match="a parameter must be named before the first step, got a bare array"):
        opt.save(tmp_path, [w])
    opt([(w, np.ones(3))])
    opt.save(tmp_path, [w])
    with pytest.raises(ValueError, match="a parameter must be named before the first step, got a bare array"):
        DistOpt(SGD(1.0), LocalCommunicator()).load(tmp_path, [w])
    w[...] = 5
    opt.load(tmp_path)
    assert w.tolist() == [-1.0] * 3


def test_other_parameters_are_refused_before_anything_changes(tmp_path):
    run_ranks(2, lambda comm: saved(comm, tmp_path))

    def refused(comm, change, text):
        params = laws.parameters(rank=0)
        change(params, comm.rank)
        before = laws.digest(params)
        opt = DistOpt(laws.sgd(), comm)
        with pytest.raises(ValueError, match=text):
            opt.load(tmp_path, params)
        assert laws.digest(params) == before
        assert opt.step_counter == 0

    def reshape(params, rank):
        if rank:
            params[1].data = np.zeros((3, 99), "f4")

    def rename(params, rank):
        params[1].name = "q"

    def drop(params, rank):
        del params[1]

    def freeze(params, rank):
        params[5].data.flags.writeable = False

    run_ranks(2, lambda comm: refused(comm, reshape, r"rank 1: p1: the checkpoint has .*, the model has \(3, 99\)"))
    run_ranks(2, lambda comm: refused(comm, rename, "(p1: the checkpoint has .*nothing|q: the checkpoint has nothing)"))
    run_ranks(2, lambda comm: refused(comm, drop, "p1: the checkpoint has .*, the model has nothing"))
    run_ranks(2, lambda comm: refused(comm, freeze, "rank 0: p5: its array must be writable, got a read-only one"))


def test_another_optimizer_is_refused_before_anything_changes(tmp_path):
    def main(comm):
        saved(comm, tmp_path)
        params = laws.parameters(rank=0)
        before, opt = laws.digest(params), DistOpt(Adam(0.1), comm)
        with pytest.raises(ValueError, match="the states must be those of Adam, got those of SGD"):
            opt.load(tmp_path, params)
        assert (laws.digest(params), opt.step_counter) == (before, 0)

    run_ranks(2, main)


def test_load_asks_for_parameters_that_it_does_not_know(tmp_path):
    def main(comm):
        params, opt = saved(comm, tmp_path)
        with pytest.raises(ValueError, match=r"params must be the model's, as the checkpoint has parameters, got None"):
            DistOpt(laws.sgd(), comm).load(tmp_path)
        opt.load(tmp_path)  # it knows them
        opt.save(tmp_path / "without")
        with pytest.raises(ValueError, match="the checkpoint was saved without parameters"):
            opt.load(tmp_path / "without", params)
        assert opt.load(tmp_path / "without") == {}

    run_ranks(2, main)


STOPPED = """
import os, signal, sys
import numpy as np, distopt
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where this was started in the background
opt = distopt.DistOpt(distopt.optim.SGD(1.0), distopt.comm.LocalCommunicator())
w = distopt.Parameter("w", np.zeros(3))
for _ in range(2):
    opt.save_when_stopped(sys.argv[1], [w])
for step in range(10):
    if step == 5:
        os.kill(os.getpid(), signal.SIGTERM)
        if sys.argv[2] != "first":
            os.kill(os.getpid(), signal.SIGTERM if sys.argv[2] == "twice" else signal.SIGINT)
    grad = np.ones(3)
    opt.all_reduce(grad)
    opt.update(w, grad)
    opt.step()
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("which", "code", "found"),
    [("first", 143, ["000001-step-6"]), ("twice", 143, ["000001-step-6"]), ("another", -2, [])],
)
def test_a_signal_in_a_hand_written_loop_saves_and_another_one_ends_at_once(which, code, found, tmp_path):
    """Also after ``save_when_stopped`` was called twice; the second signal comes before the next step."""
    ended = finish([sys.executable, "-c", STOPPED, tmp_path, which], 20)
    assert ended[0] == code, ended[1]
    assert visible(tmp_path) == found


def test_save_when_stopped_needs_the_main_thread(tmp_path):
    def main(comm):
        _, opt = laws.train(comm, steps=1)
        opt.save_when_stopped(tmp_path)

    with pytest.raises(ValueError, match="signal only works in main thread"):
        run_ranks(2, main)


def test_ranks_that_save_and_load_at_once_are_refused(tmp_path):
    def main(comm):
        params, opt = laws.train(comm, steps=1)
        if comm.rank:
            opt.load(tmp_path)
        else:
            opt.save(tmp_path, params)

    with pytest.raises(
        ValueError, match=r"ranks differ: rank 0 has saving a checkpoint.*, rank 1 has loading a checkpoint"
    ):
        run_ranks(2, main)
    with warnings.catch_warnings():
        assert run_ranks(2, lambda comm: resumed(comm, tmp_path)[2]) == [None] * 2
