"""A folder of checkpoints: complete ones are found, damaged ones are named, and foreign files are left alone."""

import errno
import itertools
import json
import os
import random
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
import warnings

import numpy as np
import pytest

import laws
from distopt import DistOpt, Parameter, cli, run_ranks
from distopt.checkpoint import CheckpointError, file, folder, lock
from distopt.comm import LocalCommunicator
from distopt.optim import SGD
from launch import finish

NOBODY = 65534


def trained(steps=1, value=0.0):
    """A parameter, and a DistOpt of one rank."""
    w = Parameter("w", np.full(3, value))
    opt = DistOpt(SGD(1.0), LocalCommunicator())
    for _ in range(steps):
        opt([(w, np.ones(3))])
    return w, opt


def loaded(path):
    """The step that ``load`` goes on from, None if it finds nothing."""
    w, opt = trained(0)
    return None if opt.load(path, [w]) is None else (opt.step_counter, w.data.tolist())


@pytest.fixture
def place(tmp_path):
    """A checkpoint of two ranks, with residuals."""

    def main(comm):
        params, opt = laws.train(comm, steps=2, mode="topk")
        return opt.save(tmp_path / "saved", params)

    return run_ranks(2, main)[0]


# ------------------------------------------------------------------------------------------------- what is found


def test_what_save_returns_can_be_loaded(tmp_path):
    w, opt = trained(2)
    first = opt.save(tmp_path, [w])
    opt([(w, np.ones(3))])
    opt.save(tmp_path, [w])
    assert loaded(first) == (2, [-2.0] * 3)
    assert loaded(tmp_path) == (3, [-3.0] * 3)


def test_a_checkpoint_under_a_name_of_ones_own_can_be_loaded(tmp_path):
    w, opt = trained(2)
    shutil.copytree(opt.save(tmp_path, [w]), tmp_path / "best")
    assert loaded(tmp_path / "best") == (2, [-2.0] * 3)


@pytest.mark.parametrize("name", ["all", "rank-0", "manifest.json"])
def test_a_file_is_no_folder_of_checkpoints(name, tmp_path):
    w, opt = trained()
    with pytest.raises(ValueError, match=f"{name}: folder: must be a folder of checkpoints, or one of them"):
        loaded(opt.save(tmp_path, [w]) / name)


def test_an_uncompleted_checkpoint_is_refused_by_name_and_ignored_in_its_folder(tmp_path):
    w, opt = trained()
    given = opt.save(tmp_path, [w])
    (given / folder.MANIFEST).unlink()
    with pytest.raises(ValueError, match="this checkpoint was never completed"):
        loaded(given)
    assert loaded(tmp_path) is None


def test_a_folder_without_checkpoints_is_reported_in_the_log(tmp_path, caplog):
    def main(comm):
        _, opt = laws.train(comm, steps=0)
        return opt.load(tmp_path / "none"), opt.load(tmp_path)

    assert run_ranks(2, main) == [(None, None)] * 2
    assert caplog.messages == [
        f"distopt: there is no checkpoint in {tmp_path / 'none'}: nothing was loaded",
        f"distopt: there is no checkpoint in {tmp_path}: nothing was loaded",
    ]


def test_a_link_to_nowhere_is_not_an_empty_folder(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "unmounted")
    with pytest.raises(RuntimeError, match="FileNotFoundError"):
        loaded(tmp_path / "link")


PRIVATE = """
import os, sys
import numpy as np, distopt
opt = distopt.DistOpt(distopt.optim.SGD(1.0), distopt.comm.LocalCommunicator())
w = distopt.Parameter("w", np.zeros(3))
opt([(w, np.ones(3))])
path, mode = sys.argv[1], sys.argv[2]
place = opt.save(path, [w])
os.chmod(path, 0o755 if mode == "checkpoint" else int(mode, 8))
os.setuid(65534)
other = distopt.DistOpt(distopt.optim.SGD(1.0), distopt.comm.LocalCommunicator())
print("it returned", other.load(path, [w]))
"""


@pytest.mark.mpi
@pytest.mark.skipif(os.geteuid() != 0, reason="another user's files need root")
@pytest.mark.parametrize("mode", ["0700", "0711", "0744", "checkpoint"])
def test_a_folder_that_another_user_may_not_read_is_an_error(mode):
    """A folder that cannot be read, listed or searched; and one that can, with checkpoints that cannot."""
    with tempfile.TemporaryDirectory() as path:  # tmp_path is in a folder of this user's alone
        code, output = finish([sys.executable, "-W", "ignore", "-c", PRIVATE, path, mode], 60)
    assert code == 1, output
    assert "it returned" not in output
    if mode in ("0744", "checkpoint"):
        assert "none is good" in output or "PermissionError" in output
    else:
        assert f"PermissionError: [Errno 13] Permission denied: '{path}" in output


def test_an_unreadable_checkpoint_is_passed_over_with_a_warning(tmp_path, monkeypatch):
    w, opt = trained()
    opt.save(tmp_path, [w])
    opt([(w, np.ones(3))])
    newest = opt.save(tmp_path, [w])
    look = os.stat

    def refused(path, *args, **kwargs):
        if str(path).startswith(str(newest)):
            raise PermissionError(13, "Permission denied", str(path))
        return look(path, *args, **kwargs)

    monkeypatch.setattr(folder.os, "stat", refused)
    (newest / folder.MANIFEST).rename(newest / "hidden")
    with pytest.warns(RuntimeWarning, match="passed over the checkpoint .*000002-step-2"):
        assert loaded(tmp_path) == (1, [-1.0] * 3)
    shutil.rmtree(tmp_path / "000001-step-1")
    with pytest.warns(RuntimeWarning, match="passed over"), pytest.raises(CheckpointError, match="none is good"):
        loaded(tmp_path)


# ------------------------------------------------------------------------------------------------- the manifest


def rewritten(place, **changes):
    """A manifest that somebody has changed, without a seal, as older ones are."""
    path = place / folder.MANIFEST
    said = json.loads(path.read_text())
    del said["seal"]
    path.write_text(json.dumps(said | changes))


def refused(place):
    """Why neither ``load`` nor ``inspect`` takes a checkpoint; None if both do."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")

        def main(comm):
            params = laws.parameters(rank=comm.rank)
            DistOpt(laws.sgd(), comm, threshold=60).load(place, params)

        try:
            run_ranks(2, main)
        except CheckpointError:
            assert cli.main(["inspect", str(place)]) == 1
            return str(caught[0].message)
    assert cli.main(["inspect", str(place)]) == 0
    return None


def test_every_flipped_bit_of_a_seal_is_found(place):
    """Those of its name too, without which it is none."""
    path = place / folder.MANIFEST
    data = path.read_bytes()
    for at, bit in itertools.product(range(data.index(b'"format"')), range(8)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
        with pytest.raises(CheckpointError, match=folder.MANIFEST):
            folder.manifest(place)


def test_a_manifest_without_a_seal_is_compared_with_the_files(place):
    rewritten(place)
    assert refused(place) is None


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"world_size": 1}, "all: world_size: must be 1 as in the manifest, got 2"),
        ({"world_size": 3}, "all: world_size: must be 3 as in the manifest, got 2"),
        ({"world_size": 300_000_000}, "all: world_size: must be 300000000 as in the manifest, got 2"),
        ({"world_size": 10**400}, "manifest: must be JSON, got another text: 1000"),
        ({"world_size": True}, "world_size: must be int"),
        ({"step": 3}, "all: step: must be 3 as in the manifest, got 2"),
        ({"ranks_differ": True}, "all: ranks_differ: must be True as in the manifest, got False"),
        ({"window_of_sums": True}, "all: window_of_sums: must be True as in the manifest, got False"),
        ({"save": "0" * 32}, "all: save: must be that of the manifest"),
        ({"seal": "0" * 32}, "manifest: must have the checksum that was written with it, got another: it is damaged"),
    ],
)
def test_a_manifest_that_says_something_else_is_refused(changes, text, place, capsys):
    rewritten(place, **changes)
    begun = time.monotonic()
    assert text in refused(place)
    assert time.monotonic() - begun < 30
    assert text in capsys.readouterr().out


@pytest.mark.parametrize("name", [folder.MANIFEST, "all", "rank-1"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_pipes_and_links_in_a_checkpoint_are_refused(name, make, place):
    (place / name).unlink()
    make(place / name)
    assert "must be a regular file" in refused(place)


def test_a_manifest_that_is_large_is_refused(place):
    rewritten(place, optimizer="x" * folder.MAX_MANIFEST_BYTES)
    assert f"must be at most {folder.MAX_MANIFEST_BYTES} bytes, got" in refused(place)
    (place / folder.MANIFEST).write_text("[" + "[]," * 200_000 + "[]]")
    assert f"must have at most {folder.VALUES} values, got" in refused(place)


def test_a_forged_huge_world_size_is_refused_at_once(place):
    """Files that were forged together claim 10**12 ranks."""
    for rank in (None, 0, 1):
        tree, about = file.read(folder.file_of(place, rank))
        file.write(folder.file_of(place, rank), tree, about | {"world_size": 10**12})
    rewritten(place, world_size=10**12)
    assert "rank-2" in refused(place)


# ------------------------------------------------------------------------------------------------- inspect


def flip(path):
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


FAULTS = {
    "a flipped bit": (
        lambda place: flip(place / "rank-1"),
        "must have the checksum that was written with it, got another: it is damaged",
    ),
    "a missing rank": (lambda place: (place / "rank-0").unlink(), "No such file or directory"),
    "a cut file": (lambda place: os.truncate(place / "all", 100), "header: "),
    "a folder": (lambda place: ((place / "all").unlink(), (place / "all").mkdir()), "must be a regular file"),
    "two ranks' files exchanged": (
        lambda place: shutil.copy(place / "rank-0", place / "rank-1"),
        "rank-1: rank: must be 1, got 0",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_inspect_calls_nothing_complete_that_is_not_whole(fault, place, capsys):
    damage, text = FAULTS[fault]
    assert cli.main(["inspect", str(place.parent)]) == 0
    assert f"{place}: complete, of 2 ranks after step 2" in capsys.readouterr().out
    damage(place)
    for path in (place, place.parent):
        assert cli.main(["inspect", str(path)]) == 1
        output = capsys.readouterr().out
        assert ": complete" not in output
        (line,) = (line for line in output.splitlines() if line.startswith(f"{place}: not whole: "))
        assert text in line


def test_inspect_finds_a_file_of_another_checkpoint(place, tmp_path, capsys):
    def main(comm):
        params, opt = laws.train(comm, steps=2, mode="topk")
        return opt.save(tmp_path / "other", params)

    shutil.copy(run_ranks(2, main)[0] / "all", place / "all")
    assert cli.main(["inspect", str(place)]) == 1
    assert "all: save: must be that of the manifest" in capsys.readouterr().out


def test_inspect_names_checkpoints_that_were_never_completed(place, capsys):
    (place.parent / "000002-step-9").mkdir()
    assert cli.main(["inspect", str(place.parent)]) == 0
    assert capsys.readouterr().out.endswith("000002-step-9: never completed\n")


# ------------------------------------------------------------------------------------------------- what keep removes


def saved_often(path, count=3, keep=1):
    w, opt = trained()
    for _ in range(count):
        opt.save(path, [w], keep=keep)


def numbered(path):
    return sorted(p.name for p in path.iterdir() if p.name[0] == "0")


def test_keep_follows_no_link(tmp_path):
    """A checkpoint that is pinned by a link stays, and so does the link."""
    w, opt = trained(2)
    best = opt.save(tmp_path / "archive", [w])
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "000001-step-2").symlink_to(best)
    saved_often(tmp_path / "saved")
    assert sorted(p.name for p in best.iterdir()) == ["all", "manifest.json", "rank-0"]
    assert numbered(tmp_path / "saved") == ["000001-step-2", "000004-step-1"]
    assert loaded(best) == (2, [-2.0] * 3)


def test_keep_removes_no_foreign_folder(tmp_path):
    for number, name in enumerate(("notes.txt", "deep/all", "all.txt"), start=1):
        path = tmp_path / f"00000{number}-step-1" / name
        path.parent.mkdir(parents=True)
        path.write_text("precious")
    saved_often(tmp_path)
    assert numbered(tmp_path) == [*(f"00000{k}-step-1" for k in (1, 2, 3)), "000006-step-1"]


def test_a_checkpoint_with_a_foreign_file_stays_and_does_not_count(tmp_path):
    w, opt = trained()
    first = opt.save(tmp_path, [w])
    (first / "why.txt").write_text("the best one")
    saved_often(tmp_path, count=3, keep=2)
    assert numbered(tmp_path) == ["000001-step-1", "000003-step-1", "000004-step-1"]
    assert loaded(first) == (1, [-1.0] * 3)


def test_a_damaged_checkpoint_does_not_count_towards_keep(tmp_path):
    w, opt = trained()
    opt.save(tmp_path, [w], keep=3)
    second = opt.save(tmp_path, [w], keep=3)
    (second / folder.MANIFEST).write_text("{")
    opt.save(tmp_path, [w], keep=2)
    assert numbered(tmp_path) == ["000001-step-1", "000002-step-1", "000003-step-1"]
    opt.save(tmp_path, [w], keep=1)
    assert numbered(tmp_path) == ["000004-step-1"]


# ------------------------------------------------------------------------------------------------- one job at a time

HOLD = """
import sys
import numpy as np, distopt
opt = distopt.DistOpt(distopt.optim.SGD(1.0), distopt.comm.LocalCommunicator())
w = distopt.Parameter("w", np.zeros(3))
opt([(w, np.ones(3))])
opt.save(sys.argv[1], [w])
print("saved", flush=True)
sys.stdin.readline()
if sys.argv[2] == "close":
    opt.close()
    print("closed", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def other_job(tmp_path):
    """Another process that has saved in the folder."""
    made = []

    def make(end="exit"):
        command = [sys.executable, "-c", HOLD, str(tmp_path), end]
        made.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        assert made[-1].stdout.readline() == "saved\n"
        return made[-1]

    yield make
    for process in made:
        process.kill()
        process.communicate()


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(lock, "LOCK_SECONDS", 0.05)


@pytest.mark.mpi
@pytest.mark.parametrize("end", ["kill", "exit", "close"])
def test_a_second_job_is_refused_until_the_first_has_ended(end, other_job, impatient, tmp_path):
    other = other_job(end)

    def main(comm):
        params, opt = laws.train(comm, steps=1)
        texts = []
        for save in (opt.save, opt.save_when_stopped):
            with pytest.raises(RuntimeError) as caught:
                save(tmp_path, params)
            texts.append(str(caught.value))
        return texts

    for text in itertools.chain(*run_ranks(2, main)):
        assert text.startswith(f"rank 0: another job saves checkpoints in {tmp_path}: process {other.pid} on ")
    assert numbered(tmp_path) == ["000001-step-1"]
    if end == "kill":
        other.kill()
        other.wait()
    else:
        other.stdin.write("\n")
        other.stdin.flush()
        if end == "close":
            assert other.stdout.readline() == "closed\n"
        else:
            other.communicate("\n")
    w, opt = trained(2)
    opt.save(tmp_path, [w])
    assert numbered(tmp_path) == ["000001-step-1", "000002-step-2"]


def test_several_optimizers_of_one_process_save_into_one_folder(tmp_path):
    w, opt = trained()
    _, other = trained()
    for each in (opt, other, opt, other):
        each.save(tmp_path, [w])
    opt.close()
    other.save(tmp_path, [w])
    assert numbered(tmp_path) == ["000004-step-1", "000005-step-1"]


@pytest.mark.mpi
def test_a_forked_child_does_not_hold_the_lock_of_the_folder(tmp_path, impatient):
    """Workers of a data loader may outlive the process that was killed."""
    program = HOLD.replace("sys.stdin.readline()\n", "", 1).replace(
        "if sys.argv[2]", "import os, time\nif os.fork() == 0:\n    time.sleep(60)\n    os._exit(0)\nif sys.argv[2]"
    )
    job = subprocess.Popen(
        [sys.executable, "-c", program, tmp_path, "fork"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert job.stdout.readline() == "saved\n"
        time.sleep(1)
        job.kill()
        job.wait()
        saved_often(tmp_path, count=1)
    finally:
        os.killpg(job.pid, 9)
        job.stdin.close()
        job.stdout.close()


def test_a_file_system_without_locks_is_named_once(tmp_path, monkeypatch, caplog):
    def none(file, how):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(lock.fcntl, "flock", none)
    saved_often(tmp_path)
    assert caplog.messages == [
        f"distopt: {tmp_path}: no locks in this file system: nothing keeps two jobs from saving there at once"
    ]


def test_a_folder_that_was_removed_and_made_again_is_locked_again(tmp_path):
    w, opt = trained()
    opt.save(tmp_path / "saved", [w])
    shutil.rmtree(tmp_path / "saved")
    opt.save(tmp_path / "saved", [w])
    assert len({id(held) for held in opt._checkpointer._locks}) == 2


# ------------------------------------------------------------------------------------------------- half of a step


class Failing:
    """An optimizer that fails at the second parameter of a step."""

    def __init__(self):
        self.count = 0

    def apply(self, name, value, grad):
        self.count += 1
        if self.count == 4:
            raise OSError("no more")
        value -= grad


def test_a_step_that_failed_halfway_cannot_be_saved(tmp_path):
    def main(comm):
        params = [Parameter("a", np.zeros(2)), Parameter("b", np.zeros(2))]
        opt = DistOpt(Failing(), comm)
        opt([(p, np.ones(2)) for p in params])
        opt.save(tmp_path, params, keep=1)
        with pytest.raises(OSError, match="no more"):
            opt([(p, np.ones(2)) for p in params])
        text = "the update of step 2 failed halfway with OSError: no more; load a checkpoint to go on"
        for keep in (opt.save, opt.save_when_stopped):
            with pytest.raises(RuntimeError, match=f"rank 0: {text}"):
                keep(tmp_path, params, keep=1)
        with pytest.raises(RuntimeError, match=text):
            opt.state_dict()
        opt.load(tmp_path, params)
        opt([(p, np.ones(2)) for p in params])
        opt.save(tmp_path, params, keep=1)
        return [p.data.tolist() for p in params]

    assert run_ranks(2, main) == [[[-2.0, -2.0]] * 2] * 2
    assert numbered(tmp_path) == ["000002-step-2"]


# ------------------------------------------------------------------------------------------------- a damaged disk


def state_of(path):
    """All that two ranks go on with, to the bit; None if they refuse."""

    def main(comm):
        params = laws.parameters(rank=comm.rank)
        opt = DistOpt(laws.sgd(), comm, threshold=60, num_batches=2)
        extra = opt.load(path, params)
        opt.gradient_views(params)
        return laws.digest(params), extra, opt.state_dict()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return run_ranks(2, main)
        except CheckpointError:
            return None


def damaged(path, count, chance):
    """A file with one bit after the other flipped, every byte of a short one; restored in the end."""
    data = path.read_bytes()
    places = range(len(data)) if len(data) <= count else sorted(chance.sample(range(len(data)), count))
    with open(path, "r+b", buffering=0) as stream:
        for at in places:
            os.pwrite(stream.fileno(), bytes([data[at] ^ 1 << chance.randrange(8)]), at)
            yield at
            os.pwrite(stream.fileno(), data[at : at + 1], at)


@pytest.mark.parametrize("count", [12, pytest.param(1200, marks=pytest.mark.slow)])
def test_no_flipped_bit_gives_another_state(count, tmp_path):
    """Of the manifest, heads and data of all files, with a seal and, in the manifest, without."""
    chance = random.Random(count)

    def main(comm):
        params, opt = laws.train(comm, steps=3, mode="topk", num_batches=2)
        return opt.save(tmp_path, params, {"epoch": comm.rank})

    place = run_ranks(2, main)[0]
    expected = state_of(place)
    assert expected is not None
    outcomes = []
    for step in range(2):
        for name in (folder.MANIFEST, "all", "rank-0", "rank-1"):
            for at in damaged(place / name, count, chance):
                found = state_of(place)
                outcomes.append(found is None)
                if found is not None:
                    for (digest, extra, state), (good, same, whole) in zip(found, expected, strict=True):
                        assert (digest, extra) == (good, same), (name, at)
                        laws.assert_equal_states(state, whole)
        if step == 0:
            rewritten(place)
    assert sum(outcomes) > 0.7 * len(outcomes)
    print(f"{len(outcomes)} flips, {sum(outcomes)} refused, the others without an effect")


@pytest.fixture
def failing_fsync(monkeypatch):
    """Let fsync of folders, or of files, fail with an error of this number."""
    real = os.fsync

    def install(number, of_folders):
        def fsync(handle):
            if stat.S_ISDIR(os.fstat(handle).st_mode) == of_folders:
                raise OSError(number, os.strerror(number))
            real(handle)

        monkeypatch.setattr(os, "fsync", fsync)

    return install


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.ENOSYS])
def test_a_folder_that_cannot_be_flushed_has_checkpoints(number, failing_fsync, tmp_path):
    failing_fsync(number, True)
    w = Parameter("w", np.ones(4))
    opt = DistOpt(SGD(0.5), LocalCommunicator())
    opt([(w, np.ones(4))])
    opt.save(tmp_path, [w])
    again = Parameter("w", np.zeros(4))
    assert DistOpt(SGD(0.5), LocalCommunicator()).load(tmp_path, [again]) is not None
    assert (again.data == 0.5).all()


@pytest.mark.parametrize(("number", "of_folders"), [(errno.EIO, True), (errno.EIO, False), (errno.EINVAL, False)])
def test_a_disk_that_fails_is_an_error_with_the_path(number, of_folders, failing_fsync, tmp_path):
    failing_fsync(number, of_folders)
    w = Parameter("w", np.ones(4))
    opt = DistOpt(SGD(0.5), LocalCommunicator())
    opt([(w, np.ones(4))])
    with pytest.raises(Exception, match=re.escape(f"{os.strerror(number)}: '{tmp_path}")):
        opt.save(tmp_path, [w])
