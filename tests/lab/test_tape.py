"""distopt record: a tape has the gradients that the losses yielded, to the bit, and replays them."""

import contextlib
import json
import re
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import laws
from distopt import DistOpt, LossScaler, Parameter, Tape, Trainer, checkpoint, run_ranks, simulate
from distopt.checkpoint import CheckpointError, head
from distopt.comm import LocalCommunicator
from distopt.compress import DeepGradientCompression, Dense, ErrorFeedback, TopK
from distopt.lab.tape.join import check_replaceable, join
from distopt.lab.tape.recorder import request
from distopt.optim import SGD
from doubles.ranks import on_gpus
from launch import finish, needs_mpi

SHAPES = [(3, 4), (), (50,), (0,), (2, 3, 5)]
DTYPES = ["float32", "float64", "float16", "bfloat16", "float32"]
NAMES = [f"layer{k}/w" for k in range(5)]


def gradient(step, rank, k):
    """That of the k-th parameter, computed anew wherever it is needed."""
    x = np.random.default_rng([step, rank, k]).standard_normal(SHAPES[k])
    return np.asarray(x).astype(ml_dtypes.bfloat16 if DTYPES[k] == "bfloat16" else DTYPES[k])


def record(folder, size, main, steps=10, every=1, ranks=run_ranks):
    """The tape of ranks that are threads."""
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in request(folder, steps, every).items():
            patch.setenv(name, value)
        ranks(size, main)
    return join(folder, folder / "tape", "main.py")


def same(found, wanted):
    """Arrays of one dtype, shape and bits."""
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    assert found.tobytes() == wanted.tobytes()


# ------------------------------------------------------------------------------------------------- the command

SCRIPT = """
import sys
import time
import ml_dtypes
import numpy as np
import distopt

mode, overlap, loss = sys.argv[1:]
shapes = [(3, 4), (), (50,), (0,), (2, 3, 5)]
dtypes = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.float32]
params = [distopt.Parameter(f"layer{k}/w", np.zeros(s, d)) for k, (s, d) in enumerate(zip(shapes, dtypes))]
opt = distopt.DistOpt(distopt.optim.SGD(lr=0.5), threshold=40, overlap=overlap == "on")
views = [None] * len(params)
if loss == "views":
    views = opt.gradient_views(params)

def backward(step):
    for k in range(5) if step == 0 or loss == "views" else reversed(range(5)):  # they may come in another order
        if k == 4 and loss == "views":
            time.sleep(0.1)  # sums of what was sent come to where the gradients were
        x = np.asarray(np.random.default_rng([step, opt.global_rank, k]).standard_normal(shapes[k])).astype(dtypes[k])
        if views[k] is None:
            yield params[k], x
        else:
            views[k][...] = x
            yield params[k], views[k]

for step in range(5):
    pairs = list(backward(step)) if loss == "list" else backward(step)
    if mode == "dense":
        opt(pairs)
    else:
        opt.backward_and_sparse_update(pairs, spars=0.1, topK=True)
np.savez(f"{opt.global_rank}.npz", *(p.data.astype(np.float64) for p in params))
"""


def distopt_record(folder, script, *args, env=(), **options):
    command = [sys.executable, "-m", "distopt", "record", "--out", str(folder / "out.safetensors")]
    flags = [str(x) for name, value in options.items() for x in (f"--{name}", value)]
    file = folder / "script.py"
    file.write_text(script)
    code, output = finish([*command, *flags, str(file), *args], 60, cwd=folder, env=dict(env))
    assert not list(folder.glob(".distopt-record-*")), "what is temporary is gone"
    return code, output, folder / "out.safetensors"


@needs_mpi
@pytest.mark.parametrize(
    ("mode", "overlap", "loss"),
    [("dense", "off", "list"), ("dense", "on", "generator"), ("sparse", "off", "generator"), ("sparse", "on", "list")],
)
def test_a_recorded_script_replays_to_the_same_parameters(tmp_path, mode, overlap, loss):
    """Steps 0, 2 and 4 of two processes; replayed on two threads every step gives the script's parameters."""
    every = 1 if mode == "sparse" else 2
    code, output, path = distopt_record(tmp_path, SCRIPT, mode, overlap, loss, ranks=2, every=every)
    assert code == 0, output
    steps = tuple(range(0, 5, every))
    assert f"distopt record: {len(steps)} steps, and not 10, of 2 ranks, in {path}" in output
    found = Tape(path)
    assert (found.ranks, found.steps, found.about["script"]) == (2, steps, "script.py")
    assert found.about["optimizer"].startswith("SGD(lr=0.5")
    assert [(n, s, d.name) for n, s, d in found.order] == list(zip(NAMES, SHAPES, DTYPES, strict=True))
    for step in steps:
        for rank in range(2):
            pairs = found.gradients(step, rank)
            assert [p.name for p, _ in pairs] == NAMES
            for k, (_, grad) in enumerate(pairs):
                same(grad, gradient(step, rank, k))
    if every == 1:
        replayed(found, tmp_path)


def replayed(recorded, folder):
    def main(comm):
        found = Tape(recorded._path)
        opt = DistOpt(SGD(lr=0.5), comm, threshold=40)
        for step in found.steps:
            loss = found.losses(step)(comm.rank)
            opt.backward_and_sparse_update(loss, spars=0.1, topK=True)
        return [p.data.astype(np.float64) for p, _ in loss]

    for rank, params in enumerate(run_ranks(2, main)):
        with np.load(folder / f"{rank}.npz") as saved:
            for k, value in enumerate(params):
                same(value, saved[f"arr_{k}"])


@needs_mpi
def test_gradient_views_are_recorded_before_they_are_overwritten(tmp_path):
    wide = SCRIPT.replace("np.float16, ml_dtypes.bfloat16", "np.float32, np.float64")
    code, output, path = distopt_record(tmp_path, wide, "dense", "on", "views", ranks=2, steps=4)
    assert code == 0, output
    found = Tape(path)
    assert found.steps == (0, 1, 2, 3)
    for step in found.steps:
        for rank in range(2):
            for param, grad in found.gradients(step, rank):
                k = NAMES.index(param.name)
                wanted = np.random.default_rng([step, rank, k]).standard_normal(SHAPES[k])
                same(grad, np.asarray(wanted).astype(grad.dtype))


KILLED = """
import os, signal, sys
import numpy as np
import distopt

opt = distopt.DistOpt()
p = distopt.Parameter("p", np.zeros(1000))
for step in range(5):
    if step == 3 and opt.global_rank == 1:
        {end}
    opt([(p, np.full(1000, 10.0 * step + opt.global_rank))])
"""


@needs_mpi
@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(3)"])
def test_a_script_that_fails_leaves_its_complete_steps_on_the_tape(tmp_path, end):
    code, output, path = distopt_record(tmp_path, KILLED.format(end=end), ranks=2)
    assert code == 3 if "exit" in end else code not in (0, 2), output
    found = Tape(path)
    assert found.steps == (0, 1, 2)
    for rank in range(2):
        same(found.gradients(2, rank)[0][1], np.full(1000, 20.0 + rank))


@needs_mpi
@pytest.mark.parametrize(("script", "wanted"), [("pass", 2), ("import sys; sys.exit(7)", 7)])
def test_a_script_without_a_step_leaves_no_tape(tmp_path, script, wanted):
    code, output, path = distopt_record(tmp_path, script)
    assert code == wanted
    assert "distopt record: steps must be at least one that all ranks have made" in output
    assert not path.exists()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"steps": 0}, "--steps must be at least 1, got 0"),
        ({"ranks": 0}, "-n must be at least 1, got 0"),
        ({"every": -1}, "--every must be at least 1, got -1"),
        ({"out": "/no/such/folder/x"}, "No such file or directory: '/no/such/folder/x'"),
        ({"out": "/"}, "/ is a folder, and a tape is a file"),
    ],
)
def test_wrong_options_of_record_are_refused_before_the_script_runs(tmp_path, flags, text):
    code, output, _ = distopt_record(tmp_path, "print('ran')", **flags)
    assert code == 2
    assert text in output
    assert len(output.splitlines()) == 1, "nothing has been run"


@pytest.mark.thorough
def test_record_replaces_nothing_but_a_tape(small, tmp_path):
    """Not the script itself, another checkpoint, a device or a link to a tape; a tape is replaced."""
    script, other, link = (tmp_path / name for name in ("script.py", "checkpoint", "link"))
    script.write_text("pass")
    checkpoint.write(other, {}, {})
    link.symlink_to(small._path)
    for path, text in [
        (script, "is there and is no tape"),
        (other, "is there and is no tape"),
        (Path("/dev/null"), "is no regular file"),
        (link, "is no regular file"),
    ]:
        with pytest.raises(FileExistsError, match=f"{path} {text}"):
            check_replaceable(path)
    check_replaceable(Path(small._path))
    check_replaceable(tmp_path / "new")
    code, output, _ = distopt_record(tmp_path, "print('ran')", out=script)
    assert code == 2
    assert output == f"distopt record: {script} is there and is no tape: it is not replaced\n"


# ------------------------------------------------------------------------------------------------- what is recorded


def test_nothing_is_recorded_without_distopt_record(monkeypatch):
    assert DistOpt(communicator=LocalCommunicator()).engine.hooks == []
    for wrong in ("10", "0:1:/x", "1:1:", "a:1:/x"):
        monkeypatch.setenv("DISTOPT_RECORD", wrong)
        with pytest.raises(ValueError, match=f"DISTOPT_RECORD must be STEPS:EVERY:FOLDER.*{wrong}"):
            DistOpt(communicator=LocalCommunicator())


def test_only_steps_that_all_ranks_agreed_on_are_recorded(tmp_path):
    """A backward pass that raises on one rank halfway leaves nothing; the second optimizer is not the recorded one."""

    def main(comm):
        params, other = laws.parameters(), laws.parameters()
        opt, second = DistOpt(SGD(), comm), DistOpt(SGD(), comm)

        def loss(step):
            pairs = zip(params, laws.gradients(params, step, comm.rank), strict=True)
            for k, pair in enumerate(pairs):
                if (step, k, comm.rank) == (1, 5, 1):
                    raise ValueError("no data")
                yield pair

        for step in range(4):
            with pytest.raises(ValueError, match="no data") if step == 1 else contextlib.nullcontext():
                opt(loss(step))
            second(zip(other, laws.gradients(other, 99, comm.rank), strict=True))

    found = record(tmp_path, 2, main, steps=3)
    assert found.steps == (0, 1, 2)
    for step, given_at in enumerate((0, 2, 3)):
        for rank in range(2):
            wanted = laws.gradients(laws.parameters(), given_at, rank)
            for (_, grad), x in zip(found.gradients(step, rank), wanted, strict=True):
                same(grad, x)


@pytest.mark.parametrize(("line", "steps"), [(3, (0, 1)), (2, (0,)), (1, ()), (0, ())])
def test_the_steps_before_a_rank_was_killed_while_writing_are_kept(tmp_path, line, steps):
    """A line of its list is cut, and the data have bytes that it does not list."""

    def main(comm):
        opt, p = DistOpt(SGD(), comm), Parameter("p", np.zeros(3))
        for step in range(3):
            opt([(p, np.full(3, 10.0 * step + comm.rank))])

    record(tmp_path, 2, main)
    written = tmp_path / "1.steps"
    lines = written.read_text().splitlines(keepends=True)
    written.write_text("".join(lines[: line + 1])[:-1])
    if not steps:
        with pytest.raises(ValueError, match="steps must be at least one that all ranks"):
            join(tmp_path, tmp_path / "cut", "main.py")
        return
    found = join(tmp_path, tmp_path / "cut", "main.py")
    assert found.steps == steps
    for step in steps:
        same(found.gradients(step, 1)[0][1], np.full(3, 10.0 * step + 1))


def test_steps_of_a_trainer_are_recorded_with_zeros_for_stale_gradients(tmp_path):
    """Zeros stand for a stale gradient; sums and updates by hand are one step; a scale is in the gradients."""

    def main(comm):
        params = laws.parameters()
        trainer = Trainer(params, SGD(lr=0.1), communicator=comm, loss_scaler=LossScaler(8.0))
        views = trainer.gradient_views(params)
        for step in range(3):
            for p, x, view in zip(params, laws.gradients(params, step, comm.rank), views, strict=True):
                view[...] = x
                if (p.name, step, comm.rank) != ("p1", 2, 0):
                    p.grad = view
            if step == 1:
                trainer.allreduce_grads()
                trainer.update(4)
            else:
                trainer.step(4, ignore_stale_grad=True)

    found = record(tmp_path, 2, main)
    assert found.steps == (0, 1, 2)
    for step in range(3):
        for rank in range(2):
            for (p, grad), x in zip(
                found.gradients(step, rank), laws.gradients(laws.parameters(), step, rank), strict=True
            ):
                same(grad, np.zeros_like(x) if (p.name, step, rank) == ("p1", 2, 0) else x)


def test_bare_strided_and_scalar_gradients_are_recorded(tmp_path):
    """Bare arrays, not contiguous, a scalar; an object with backward()."""
    grads = [np.arange(12.0).reshape(4, 3).T, np.float64(5)]
    assert not grads[0].flags.c_contiguous

    class Loss:
        def __init__(self, params):
            self.params = params

        def backward(self):
            yield from zip(self.params, grads, strict=True)

    def main(comm):
        loss = Loss([np.zeros((3, 4)), np.zeros(())])
        opt = DistOpt(SGD(), comm)
        opt(loss)
        opt(loss.backward)

    found = record(tmp_path, 1, main)
    assert [entry.name for entry in found.order] == ["parameter 0", "parameter 1"]
    for _, grad in found.gradients(1, 0):
        same(grad, np.ascontiguousarray(grads[grad.ndim == 0]).reshape(grad.shape))


def test_gradients_on_a_gpu_are_recorded(doubles, tmp_path):
    def main(comm):
        params = laws.move_to_device(comm, laws.parameters())
        opt = DistOpt(SGD(), comm)
        for step in range(2):
            grads = laws.gradients(laws.parameters(), step, comm.rank)
            opt(list(zip(params, laws.to_device(comm, grads), strict=True)))
        with pytest.raises(ValueError, match="the gradients of a captured step"):
            opt.capture(lambda: [])

    found = record(tmp_path, 2, main, ranks=on_gpus)
    for step in range(2):
        for rank in range(2):
            for (_, grad), x in zip(
                found.gradients(step, rank), laws.gradients(laws.parameters(), step, rank), strict=True
            ):
                same(grad, x)


# ------------------------------------------------------------------------------------------------- what is replayed


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Two ranks, steps 0, 3 and 6: the gradient of "w" is 100 step + rank, that of "b" the same of 16 bits."""

    def main(comm):
        params = [Parameter("w", np.zeros((2, 3), np.float32)), Parameter("b", np.zeros(4, np.float16))]
        opt = DistOpt(SGD(), comm)
        for step in range(8):
            opt([(p, np.full_like(p.data, 100 * step + comm.rank)) for p in params])

    return record(tmp_path_factory.mktemp("small"), 2, main, every=3)


@given(position=st.integers(0, 2), rank=st.integers(0, 5000))
def test_losses_of_virtual_ranks_walk_through_recorded_ranks_and_steps(small, position, rank):
    """All recorded ranks of this step, then all of the next one, and so on."""
    walk = [(s, r) for s in (0, 3, 6) for r in (0, 1)]
    step, recorded = walk[(2 * position + rank) % 6]
    for _, grad in small.losses((0, 3, 6)[position])(rank):
        same(grad, np.full_like(grad, 100 * step + recorded))


def test_losses_of_a_tape_are_copies_and_gradients_are_read_only(small):
    for _, grad in small.losses(3)(1):
        grad[...] = 7
    for _, grad in small.losses(3)(1):
        same(grad, np.full_like(grad, 301))
    view = small.gradients(3, 1)[0][1]
    with pytest.raises(ValueError, match="read-only"):
        view[...] = 7


def test_all_ranks_have_the_same_parameters(small):
    for pairs in (small.losses(0)(5), small.losses(6)(3), small.gradients(3, 1)):
        assert all(p is known for (p, _), known in zip(pairs, small.parameters, strict=True))


@pytest.mark.parametrize(
    "compressor",
    [Dense(), ErrorFeedback(TopK(0.3)), DeepGradientCompression(TopK(0.3), weight_decay=0.5, exclude_1d=False)],
    ids=["dense", "top-K", "DGC"],
)
def test_virtual_ranks_replay_what_threads_do(small, compressor):
    def replay(opt, losses_of):
        found = Tape(small._path)
        for k, p in enumerate(found.parameters):
            p.data += k + 1
        for step in found.steps:
            opt.step(losses_of(found, step), compressor)
        return [p.data for p in found.parameters]

    def main(comm):
        return replay(DistOpt(SGD(0.1), comm, deterministic=True), lambda found, step: found.losses(step)(comm.rank))

    virtual = replay(simulate(3, SGD(0.1)), lambda found, step: found.losses(step))
    for real in run_ranks(3, main):
        for x, y in zip(virtual, real, strict=True):
            same(x, y)


@pytest.mark.parametrize("mode", ["dense", "half", "sparse"])
def test_a_tape_replays_on_one_rank_in_every_mode(small, mode):
    """With lr=1 and all sent, a parameter is minus the sum of what one rank has had."""
    found, opt = Tape(small._path), DistOpt(SGD(lr=1.0), LocalCommunicator())
    call = {
        "dense": opt,
        "half": opt.backward_and_update_half,
        "sparse": lambda loss: opt.backward_and_sparse_update(loss, spars=1.0, topK=True),
    }[mode]
    for step in found.steps:
        pairs = found.losses(step)(1)
        call(pairs)
    for param, _ in pairs:
        same(param.data, np.full_like(param.data, -(1 + 301 + 601)))


def test_check_refuses_a_model_of_other_names_or_shapes(small):
    small.check([("b", (4,)), ("w", (2, 3))])
    small.check({"w": (2, 3), "b": [4]})
    for shapes, text in [
        ({"w": (3, 2), "b": (4,)}, r"w must be \(2, 3\) as on the tape, got \(3, 2\) in the model"),
        ({"weight": (2, 3), "B": (4,), "w1": ()}, "w must be in the model, got it on the tape alone; did you mean w1"),
        ({"w": (2, 3), "b": (4,), "c": (1,)}, "c must be on the tape, got it in the model alone"),
    ]:
        with pytest.raises(ValueError, match=text):
            small.check(shapes)


def test_steps_and_ranks_that_were_not_recorded_are_refused(small):
    for wrong, text in [
        (lambda: small.gradients(4, 0), "step must be one of the 3 that were recorded, got 4; the nearest is 3"),
        (lambda: small.losses(7), "step must be one of the 3 that were recorded, got 7"),
        (lambda: small.gradients(0, 2), r"rank must be in 0\.\.1, got 2"),
        (lambda: small.losses(0)(-1), "rank must be at least 0, got -1"),
        (lambda: small.losses("a"), "step must be an integer, got 'a'"),
        (lambda: small.gradients(0, 1.0), r"rank must be an integer, got 1\.0"),
    ]:
        with pytest.raises((ValueError, TypeError), match=text):
            wrong()


# ------------------------------------------------------------------------------------------------- the file


def test_a_tape_can_be_read_by_the_layout_of_safetensors_alone(small):
    """The layout of safetensors, by its text alone: a length, JSON, data."""
    data = Path(small._path).read_bytes()
    length = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + length])
    entries.pop("__metadata__")
    assert list(entries) == [f"/{s}/{r}/{name}" for name in "wb" for s in (0, 3, 6) for r in (0, 1)]
    for name, entry in entries.items():
        _, step, rank, param = name.split("/")
        begin, end = (8 + length + at for at in entry["data_offsets"])
        kind, shape = {"w": ("F32", [2, 3]), "b": ("F16", [4])}[param]
        assert (entry["dtype"], entry["shape"]) == (kind, shape)
        x = np.frombuffer(data[begin:end], {"F32": "<f4", "F16": "<f2"}[kind])
        assert (x == 100 * int(step) + int(rank)).all()


@pytest.mark.thorough
def test_the_safetensors_package_reads_it(small):
    read = pytest.importorskip("safetensors.numpy")
    found = read.load_file(small._path)
    assert len(found) == 12
    same(found["/6/1/w"], np.full((2, 3), 601, np.float32))


def test_a_truncated_tape_is_refused(small, tmp_path):
    data, cut = Path(small._path).read_bytes(), tmp_path / "cut"
    for length in (0, 7, 8, 100, len(data) // 2, len(data) - 1):
        cut.write_bytes(data[:length])
        with pytest.raises(ValueError, match=f"{cut}: (header|data|/)"):
            Tape(cut)


def test_a_tape_with_overlapping_offsets_is_refused(small, tmp_path):
    """Sealed anew, as a forger would."""
    data, forged = bytearray(Path(small._path).read_bytes()), tmp_path / "forged"
    length = 8 + int.from_bytes(data[:8], "little")
    text = data[:length].replace(b'"data_offsets":[24,48]', b'"data_offsets":[ 0,24]')
    assert text != data[:length]
    forged.write_bytes(text + data[length:])
    with pytest.raises(ValueError, match=f"{forged}: header: must have the checksum"):
        Tape(forged)
    text[head.SEAL] = head.seal(text).encode()
    forged.write_bytes(text + data[length:])
    with pytest.raises(ValueError, match=f"{forged}: /0/1/w: must lie in 24:.* without a gap, got 0:24"):
        Tape(forged)


GOOD = {"format": "distopt tape 1", "ranks": 1, "steps": [0], "order": [["w", [2], "float32"]]}


@pytest.mark.parametrize(
    ("tree", "about", "field"),
    [
        ({"0": {"0": {"w": np.zeros(3, np.float32)}}}, {}, "/0/0/w"),
        ({"0": {"0": {"w": np.zeros(2, np.float64)}}}, {}, "/0/0/w"),
        ({"0": {"0": {"w": 5}}}, {}, "/0/0/w"),
        ({"0": {"0": {}}}, {}, "/0/0"),
        ({"0": {"1": {"w": np.zeros(2, np.float32)}}}, {}, "/0"),
        ({"1": {"0": {"w": np.zeros(2, np.float32)}}}, {}, "the tree"),
        (5, {}, "the tree"),
        ({}, {"format": "distopt tape 2"}, "about"),
        ({}, {"ranks": 0}, "about"),
        ({}, {"ranks": True}, "about"),
        ({}, {"steps": []}, "about"),
        ({}, {"steps": [3, 0]}, "about"),
        ({}, {"steps": 5}, "about"),
        ({}, {"order": [["w", [2], "int8"]]}, "about"),
        ({}, {"order": [["w", [2], "float32"]] * 2}, "about"),
        ({}, {"order": [["w", [2]]]}, "about"),
        ({}, {"order": [[["w"], 2, "float32"]]}, "about"),
        ({}, {"order": [[5, [2], "float32"]]}, "about"),
        ({}, {"order": [["w", [2.0], "float32"]]}, "about"),
        ({}, {"order": [["w", [True], "float32"]]}, "about"),
        ({"0": {"0": {"w": np.ones(2, np.float32)}}}, {"ranks": 10**15}, "/0"),
        ({"0": {"0": {"w": np.ones(2, np.float32)}}}, {"ranks": 10**30}, "/0"),
    ],
)
def test_a_checkpoint_that_is_no_tape_is_refused(tmp_path, tree, about, field):
    path = tmp_path / "x"
    checkpoint.write(path, {"0": {"0": {"w": np.ones(2, np.float32)}}}, GOOD)
    same(Tape(path).gradients(0, 0)[0][1], np.ones(2, np.float32))
    checkpoint.write(path, tree, GOOD | about)
    with pytest.raises(ValueError, match=f"{path}: {field}: "):
        Tape(path)


@pytest.mark.parametrize(("limit", "most"), [("MAX_HEAD_BYTES", 4000), ("VALUES", 400)])
def test_a_tape_keeps_the_first_steps_when_its_header_is_full(tmp_path, monkeypatch, limit, most):
    """As many as there is room for, found with few attempts."""

    def main(comm):
        opt, p = DistOpt(SGD(), comm), Parameter("p", np.zeros(1))
        for step in range(400):
            opt([(p, np.full(1, float(step)))])

    tries = []
    monkeypatch.setattr(head, limit, most)
    monkeypatch.setattr(head, "SPARSE", 512)
    monkeypatch.setattr(checkpoint, "prepare", lambda *a: tries.append(a) or checkpoint.file.prepare(*a))
    found = record(tmp_path, 1, main, steps=400)
    assert len(tries) <= 4
    assert 5 < len(found.steps) < 400
    assert found.about["recorded"] == 400
    assert found.steps == tuple(range(len(found.steps)))
    assert found.gradients(found.steps[-1], 0)[0][1] == found.steps[-1]
    (_, tree, about), more = tries[0], range(len(found.steps) * 5 // 4)
    with pytest.raises(CheckpointError):
        checkpoint.file.prepare(tmp_path / "more", {str(k): tree[str(k)] for k in more}, about | {"steps": list(more)})


MORE = """
import numpy as np
import distopt

w = distopt.Parameter("w", np.zeros(5))

def simulated():
    distopt.simulate(4)(lambda rank: [(w, np.full(5, 1.0 + rank))])

def main(comm, *optimizers):
    params = [distopt.Parameter("w", np.zeros(5)) for _ in optimizers]
    for step in range(2):
        for opt, p in zip(optimizers, params):
            opt([(p, np.full(5, float(comm.rank)))])
"""


@needs_mpi
@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("simulated()", "steps must be at least one .*; those of virtual ranks are not"),
        ("distopt.run_ranks(3, lambda c: main(c, distopt.DistOpt(None, c)))", "2 steps, .* of 3 ranks, in "),
        (
            "main(distopt.world(), distopt.DistOpt(), distopt.DistOpt())",
            "of 1 ranks, of the first of several optimizers",
        ),
    ],
)
def test_record_prints_what_is_on_the_tape(tmp_path, script, said):
    code, output, path = distopt_record(tmp_path, MORE + script)
    assert code == (0 if path.exists() else 2)
    assert re.search(f"distopt record: .*{said}", output), output


def test_simulated_steps_are_not_recorded_beside_real_ranks(tmp_path):
    def main(comm):
        p = Parameter("p", np.zeros(3))
        simulate(4)(lambda rank: [(p, np.full(3, 9.0))])
        DistOpt(SGD(), comm)([(p, np.full(3, 10.0 + comm.rank))])

    found = record(tmp_path, 2, main)
    assert (found.ranks, found.steps, found.about["others"]) == (2, (0,), False)
    same(found.gradients(0, 1)[0][1], np.full(3, 11.0))
