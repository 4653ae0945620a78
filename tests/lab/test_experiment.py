"""Records of runs are read back as they were written, or refused."""

import datetime
import json
import math
import os
import platform
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import distopt
from distopt.lab.experiment import Experiment, read
from launch import distopt_run, needs_mpi

NUMBERS = st.floats(allow_nan=True) | st.integers(-(2**70), 2**70)
NAMES = st.text(min_size=1, max_size=8)
PLAIN = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text().filter(lambda t: t not in ("NaN", "Infinity", "-Infinity")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
CURVES = st.dictionaries(
    NAMES.filter(lambda n: n not in ("step", "payload", "wire")),
    st.dictionaries(st.integers(0, 2**53), NUMBERS, min_size=1, max_size=5),
    max_size=4,
)
HUGE = 10**400
LOOP: list = []
LOOP.append(LOOP)
COUNTS = st.dictionaries(NAMES, st.dictionaries(NAMES, st.integers(0, 2**63)), max_size=3)


def same(a, b):
    """Equal, NaN to NaN, -0.0 to -0.0, and 1 not to 1.0 nor True."""
    return repr(a) == repr(b)


def record(path, **fields):
    """A record as a file, some of its fields replaced."""
    Experiment(path, "dense", seed=1, ranks=2).finish()
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return path


@settings(max_examples=60, deadline=None)
@given(chosen=st.dictionaries(NAMES, PLAIN, max_size=3), curves=CURVES, totals=COUNTS)
def test_a_record_is_read_back_as_it_was_written(chosen, curves, totals, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "any.json"
    run = Experiment(path, "topk", 3, hosts=1, chosen=chosen)
    points = sorted((step, name, value) for name, curve in curves.items() for step, value in curve.items())
    for step, name, value in points:
        run(step, {name: value})
    run.finish(totals, accuracy=np.float32(0.1), loss=math.nan)

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    json.loads(path.read_text(), parse_constant=refuse)
    found = read(path)
    assert same(found["settings"], {"chosen": chosen})
    assert same(found["totals"], totals)
    assert same(found["results"], {"accuracy": float(np.float32(0.1)), "loss": math.nan})
    assert found["steps"] == max((step for step, _, _ in points), default=0)
    assert found["curves"].keys() == curves.keys()
    for name, curve in curves.items():
        assert found["curves"][name]["steps"] == sorted(curve)
        assert same(found["curves"][name]["values"], [curve[step] for step in sorted(curve)])
    assert (found["mode"], found["seed"], found["topology"]) == ("topk", 3, {"ranks": None, "hosts": 1})


def test_a_record_has_time_versions_and_machine_but_no_host_name(tmp_path):
    before = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    with Experiment(tmp_path / "run.json", "dense") as run:
        run.log(4, loss=1.0)
    after = datetime.datetime.now(datetime.UTC)
    found = read(tmp_path / "run.json")
    assert before <= datetime.datetime.fromisoformat(found["started"]) <= after
    assert found["started"] <= found["ended"]
    assert found["versions"]["distopt"] == distopt.__version__
    assert found["versions"]["numpy"] == np.__version__
    assert found["machine"] == {"cores": len(os.sched_getaffinity(0)), "platform": platform.platform()}
    text = (tmp_path / "run.json").read_text()
    assert platform.node() not in text or platform.node() in platform.platform()
    assert str(tmp_path) not in text
    assert found["raised"] is None
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


def test_a_run_that_raises_is_written_and_raises(tmp_path):
    path = tmp_path / "run.json"

    def interrupted():
        with Experiment(path, "dense") as run:
            run.log(7, loss=0.5)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    found = read(path)
    assert (found["raised"], found["steps"], found["results"]) == ("KeyboardInterrupt", 7, {})
    assert found["curves"] == {"loss": {"steps": [7], "values": [0.5]}}


def test_what_a_run_raises_is_raised_though_its_record_cannot_be_written(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()

    def lost():
        with Experiment(folder / "run.json", "dense"):
            folder.rmdir()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        lost()
    assert caught.value.__notes__[0].startswith("and the record was not written: [Errno 2]")


def test_an_experiment_is_finished_only_once(tmp_path):
    path = tmp_path / "run.json"
    with Experiment(path, "dense") as run:
        run.finish(steps=9, accuracy=0.5)
        written = path.read_bytes()
        for again in (run.finish, lambda: run.log(1, loss=1.0)):
            with pytest.raises(RuntimeError, match="this experiment is finished"):
                again()
    assert path.read_bytes() == written, "leaving the block changes nothing"
    assert read(path)["steps"] == 9


def test_an_older_record_stays_until_the_new_one_is_whole(tmp_path, monkeypatch):
    path = record(tmp_path / "run.json", mode="older")
    run = Experiment(path, "newer")

    def full(file):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            run.finish()
    assert read(path)["mode"] == "older"
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]
    run.finish()  # there is space again
    assert read(path)["mode"] == "newer"


def test_nothing_but_a_record_is_replaced(tmp_path):
    mine, link, pipe = (tmp_path / name for name in ("mine", "link", "pipe"))
    mine.write_text("precious")
    link.symlink_to(record(tmp_path / "run.json"))
    os.mkfifo(pipe)
    for path, text in [(mine, "is there and is no record"), (link, "no regular file"), (pipe, "no regular file")]:
        with pytest.raises(FileExistsError, match=f"{path} .*{text}"):
            Experiment(path, "dense")
    assert mine.read_text() == "precious"


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"mode": ""}, ValueError, "mode must not be empty"),
        ({"mode": 3}, TypeError, "mode must be a text, got 3"),
        ({"seed": "x"}, TypeError, "seed must be an integer, got 'x'"),
        ({"seed": -1}, ValueError, "seed must be at least 0, got -1"),
        ({"ranks": 0}, ValueError, "ranks must be at least 1, got 0"),
        ({"hosts": 1.0}, TypeError, "hosts must be an integer, got 1.0"),
        ({"model": {"lr": object}}, TypeError, "settings.model.lr must be a text, number, flag, None, list or dict"),
        ({"layers": [{1: 2}]}, TypeError, r"keys of settings.layers\[0\] must be texts"),
        ({"clip": "NaN"}, ValueError, "settings.clip must be another text, got 'NaN'"),
        ({"mode": "NaN"}, ValueError, "mode must be another text, got 'NaN'"),
        ({"seed": HUGE}, ValueError, "seed must be a number that a float can hold"),
        ({"lr": [HUGE]}, ValueError, r"settings.lr\[0\] must be a number that a float can hold"),
        ({"net": LOOP}, ValueError, "settings must be at most 100 levels of lists and dicts"),
    ],
)
def test_wrong_arguments_are_refused_and_no_file_is_written(arguments, error, text, tmp_path):
    with pytest.raises(error, match=text):
        Experiment(tmp_path / "run.json", **({"mode": "dense"} | arguments))
    assert not list(tmp_path.iterdir())


def test_wrong_points_and_totals_change_nothing(tmp_path):
    run = Experiment(tmp_path / "run.json", "dense")
    run.log(2, loss=1.0, wire=100)
    with pytest.raises(ValueError, match="step must be above 2, the last of curve 'loss', got 2"):
        run.log(2, accuracy=0.5, loss=0.5)
    with pytest.raises(ValueError, match="wire must be the bytes since the start, which never fall, got 99"):
        run.log(3, accuracy=0.5, wire=99)
    with pytest.raises(ValueError, match="payload must be the bytes since the start, which never fall, got nan"):
        run.log(3, accuracy=0.5, payload=math.nan)
    with pytest.raises(ValueError, match="wire must be the bytes since the start, which never fall, got inf"):
        run.log(3, accuracy=0.5, wire=math.inf)
    with pytest.raises(TypeError, match="totals must be counts by name, got 5"):
        run.finish(totals=5)
    with pytest.raises(TypeError, match=r"totals.all_reduce.wire must be an integer, got 0.5"):
        run.finish(totals={"all_reduce": {"wire": 0.5}})
    with pytest.raises(ValueError, match="steps must be at least 2, got 1"):
        run.finish(steps=1)
    with pytest.raises(TypeError, match="accuracy must be a number, got 'good'"):
        run.finish(accuracy="good")
    for name, wrong in {
        "step": lambda: run.log(HUGE, loss=1.0),
        "wire": lambda: run.log(3, wire=HUGE),
        "steps": lambda: run.finish(steps=HUGE),
        "totals.x.wire": lambda: run.finish({"x": {"wire": HUGE}}),
        "accuracy": lambda: run.finish(accuracy=HUGE),
    }.items():
        with pytest.raises(ValueError, match=f"{name} must be a number that a float can hold"):
            wrong()
    run.finish()
    found = read(tmp_path / "run.json")
    assert found["curves"] == {name: {"steps": [2], "values": [x]} for name, x in (("loss", 1.0), ("wire", 100))}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mode", ""),
        ("mode", None),
        ("seed", 1.5),
        ("seed", True),
        ("settings", []),
        ("topology", {"ranks": 2}),
        ("topology", {"ranks": 0, "hosts": 1}),
        ("started", "yesterday"),
        ("ended", "2030-01-01T00:00:00"),
        ("raised", 1),
        ("versions", "all"),
        ("machine", None),
        ("steps", -1),
        ("totals", {"all_reduce": {"wire": -1}}),
        ("totals", [1]),
        ("results", {"accuracy": "good"}),
        ("curves", {"loss": [1, 2]}),
        ("curves", {"loss": {"steps": [1, 2], "values": [1.0]}}),
        ("curves", {"loss": {"steps": [2, 2], "values": [1.0, 1.0]}}),
        ("curves", {"loss": {"steps": [], "values": []}}),
        ("curves", {"loss": {"steps": [0.5], "values": [1.0]}}),
        ("curves", {"wire": {"steps": [1, 2], "values": [9, 8]}}),
        ("seed", HUGE),
        ("steps", HUGE),
        ("totals", {"all_reduce": {"wire": HUGE}}),
        ("results", {"accuracy": -HUGE}),
        ("counted_from", -1),
        ("counted_from", "start"),
        ("curves", {"loss": {"steps": [1], "values": [HUGE]}}),
    ],
)
def test_reading_names_the_file_and_the_field(field, value, tmp_path):
    path = record(tmp_path / "run.json", **{field: value})
    with pytest.raises(ValueError, match=f"run.json: {field} must be "):
        read(path)
    found = json.loads(path.read_text())
    del found[field]
    path.write_text(json.dumps(found))
    if field == "counted_from":  # older records have no such field
        assert read(path)[field] is None
        return
    with pytest.raises(ValueError, match=f"run.json: {field} must be "):
        read(path)


def test_a_curve_beyond_the_last_step_is_refused(tmp_path):
    path = record(tmp_path / "run.json", steps=1, curves={"loss": {"steps": [1, 2], "values": [0.5, 0.25]}})
    with pytest.raises(ValueError, match=r"run.json: steps must be at least 2, the last of curve 'loss', got 1"):
        read(path)


def test_bytes_that_are_counted_from_a_step_after_the_last_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"run.json: counted_from must be at most steps 3, got 4"):
        read(record(tmp_path / "run.json", steps=3, counted_from=4))


def test_a_report_knows_its_steps_which_a_record_may_count_in_another_unit(tmp_path):
    meter = distopt.comm.Metered(distopt.comm.LocalCommunicator())
    assert meter.report().steps is None
    opt, w = distopt.DistOpt(distopt.optim.SGD(0.1), meter), distopt.Parameter("w", np.zeros(9, np.float32))
    for _ in range(4):
        opt([(w, np.ones(9, np.float32))])
    assert meter.report().steps == meter.ledger.copy().report().steps == (1, 4)
    meter.reset()
    assert meter.report().steps is None
    for _ in range(4):
        opt([(w, np.ones(9, np.float32))])
    assert meter.report().steps == (5, 8)
    for steps, counted_from in ((8, 4), (80, 40), (0, 0)):
        path = tmp_path / f"{steps}.json"
        Experiment(path, "dense").finish(meter.report(), steps)
        assert read(path)["counted_from"] == counted_from
    Experiment(path, "dense").finish(dict(meter.report()), 8)
    assert read(path)["counted_from"] is None, "a copy does not know"


def test_files_that_are_no_record_are_refused(tmp_path):
    path = record(tmp_path / "run.json")
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=r"run.json is no experiment's record"):
            read(path)
    for text in (b"\xff\xfe", b"[" * 100_000, b"{}", b"[]", b"null", b'{"format": 1}', b'{"format": NaN}'):
        path.write_bytes(text)
        with pytest.raises(ValueError, match=r"run.json is no experiment's record"):
            read(path)
    path.write_bytes(whole.replace(b"distopt experiment 1", b"distopt experiment 2"))
    with pytest.raises(ValueError, match=r"run.json: format must be 'distopt experiment 1', the one that distopt"):
        read(path)
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "gone.json")


@pytest.mark.thorough
def test_it_starts_no_mpi(tmp_path):
    script = "import sys; from distopt.experiment import Experiment; Experiment(sys.argv[1], 'dense').finish(); "
    script += "assert not {n for n in sys.modules if n.startswith(('mpi4py', 'matplotlib'))}"
    subprocess.run([sys.executable, "-c", script, tmp_path / "run.json"], check=True, timeout=30)
    assert read(tmp_path / "run.json")["versions"]["mpi"] is None


SCRIPT = """
import sys
import numpy as np
import distopt
from distopt.experiment import Experiment

world = distopt.comm.Metered(distopt.world())
opt = distopt.DistOpt(distopt.optim.SGD(0.1), world)
w = distopt.Parameter("w", np.zeros(1000, np.float32))
if world.rank == 0:
    run = Experiment(sys.argv[1], "dense", ranks=world.size, lr=0.1)
for step in range(1, 4):
    opt([(w, np.ones(1000, np.float32))])
    if world.rank == 0:
        run.log(step, wire=world.ledger.total_of_steps()["sent"], w=w.data[0])
if world.rank == 0:
    run.finish(world.report(), w=w.data[0])
"""


@needs_mpi
def test_a_record_of_two_ranks_has_their_bytes(tmp_path):
    script, path = tmp_path / "train.py", tmp_path / "run.json"
    script.write_text(SCRIPT)
    code, output = distopt_run(2, script, path)
    assert code == 0, output
    found = read(path)
    assert found["totals"] == {
        "all_reduce": {"calls": 3, "payload": 12000, "wire": 12000},  # 2 (P - 1) / P of each
        "start broadcast": {"calls": 1, "payload": 4000, "wire": 4000},
    }
    assert found["curves"]["wire"] == {"steps": [1, 2, 3], "values": [4000, 8000, 12000]}
    assert found["topology"]["ranks"] == 2
    assert found["versions"]["mpi"].startswith(("MPICH ", "Open MPI "))
    assert found["results"]["w"] == pytest.approx(-0.3)


def test_a_record_is_readable_for_others_as_the_umask_allows(tmp_path):
    """Records are compared by colleagues; checkpoints are private."""
    before = os.umask(0o027)
    try:
        with Experiment(tmp_path / "a.json", "dense", 1, ranks=2) as run:
            run.finish(None)
    finally:
        os.umask(before)
    assert (tmp_path / "a.json").stat().st_mode & 0o777 == 0o640
