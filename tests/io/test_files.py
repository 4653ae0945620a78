"""Foreign files: reading one takes bounded time and memory, texts do nothing, and none is overwritten."""

import csv
import json
import os
import re
import socket
import sys
import threading
import tracemalloc

import numpy as np
import pytest
from test_watchdog import record

from distopt import DistOpt, Parameter, Tape, checkpoint, simulate
from distopt.buckets import plan
from distopt.cli import main
from distopt.io import files, pending, strict_json
from distopt.lab.experiment import Experiment, read
from distopt.optim import SGD
from distopt.resilience import flight_recorder
from distopt.resilience.operation_log import OperationRecorder
from launch import finish, needs_mpi

# ------------------------------------------------------------------------------------------------- what is no file


def in_time(call, seconds=20):
    """Fail, and let the thread wait, if a call does not end."""
    found = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert found, "it waits"
    return found[0]


READERS = {
    "trace": ["trace", "{}"],
    "compare": ["compare", "{}"],
    "advise": ["advise", "--fit", "{}", "--model", "resnet50"],
    "volume": ["volume", "--model", "{}"],
    "gradients": ["volume", "--gradients", "{}"],
    "inspect": ["inspect", "{}"],
}


@pytest.mark.parametrize("command", READERS)
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path)], ids=["pipe", "device"])
def test_no_command_waits_for_what_is_no_file(command, make, tmp_path, capsys):
    path = tmp_path / "x.json"
    make(path)
    code = in_time(lambda: main([word.format(path) for word in READERS[command]]))
    assert code in (1, 2)
    assert re.search("must be a regular file|must be a flight record", capsys.readouterr().err)


def test_no_command_waits_for_a_pipe_in_a_folder(tmp_path, capsys):
    os.mkfifo(tmp_path / "distopt-flight.0.json")
    assert in_time(lambda: main(["trace", str(tmp_path)])) == 1
    assert "must be a flight record" in capsys.readouterr().err
    (tmp_path / "000001-step-2").mkdir()
    os.mkfifo(tmp_path / "000001-step-2" / "manifest.json")
    assert in_time(lambda: main(["inspect", str(tmp_path)])) == 1


def test_reading_refuses_pipes_folders_devices_and_large_files(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, "/dev/zero"):
        with pytest.raises(files.NotRegularError, match=f"{path} must be a regular file"):
            files.read(path, 10)
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(tmp_path / "socket"))
        with pytest.raises(OSError, match="No such device"):
            files.read(tmp_path / "socket", 10)
    (tmp_path / "file").write_bytes(b"12345")
    assert files.read(tmp_path / "file", 5) == b"12345"
    with pytest.raises(ValueError, match="must be at most 4 bytes"):
        files.read(tmp_path / "file", 4)


# ------------------------------------------------------------------------------------------------- memory


@pytest.mark.sampled(3)
@pytest.mark.parametrize("text", ["{},", "0,"], ids=["objects", "numbers"])
@pytest.mark.parametrize("command", ["compare", "trace", "volume"])
def test_memory_for_reading_json_is_bounded(command, text, tmp_path, capsys):
    path, text = tmp_path / "x.json", "[" + text * 9_000_000 + "1]"
    path.write_text(text)
    tracemalloc.start()
    try:
        assert main([word.format(path) for word in READERS[command]]) in (1, 2)
        assert tracemalloc.get_traced_memory()[1] < 3 * len(text) + (1 << 20)
    finally:
        tracemalloc.stop()
    assert "Traceback" not in capsys.readouterr().err


def test_a_long_run_can_be_read_again(tmp_path):
    run = Experiment(tmp_path / "run.json", "dense")
    run._curves["loss"] = {"steps": list(range(1, 200_001)), "values": [0.123456789012345] * 200_000}
    run.finish()
    assert len(read(tmp_path / "run.json")["curves"]["loss"]["values"]) == 200_000


def test_a_record_too_large_to_be_read_warns(tmp_path, monkeypatch):
    monkeypatch.setattr(strict_json, "VALUES", 100)
    run = Experiment(tmp_path / "run.json", "dense")
    for step in range(1, 100):
        run.log(step, loss=1.0)
    with pytest.warns(RuntimeWarning, match="run.json is too large to be read again"):
        run.finish()
    with pytest.raises(ValueError, match="must be at most"):
        read(tmp_path / "run.json")


# ------------------------------------------------------------------------------------------------- texts


def test_trace_shows_nothing_to_the_terminal_but_text(tmp_path, capsys):
    evil = "\x1b]0;owned\x07\x1b[2J\r\nrank 7: all is well"
    operations = [("votes", 1, evil, 1, 2), ("votes", 2, evil, 5, 0)]
    for rank in range(2):
        file = tmp_path / f"distopt-flight.{rank}.json"
        file.write_text(json.dumps(record(rank, operations[: 2 - rank], at=evil)))
    assert main(["trace", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.isprintable() for line in lines)
    assert not any(line.startswith("rank 7") for line in lines)
    assert "owned" in lines[0]
    assert main(["trace", str(tmp_path / "\x1b[2J")]) == 1
    assert capsys.readouterr().err.rstrip("\n").isprintable()


def test_a_plan_shows_nothing_to_the_terminal_but_text():
    found = str(plan(["\x1b[2J", "b\r\nc"], [3, 3], ["float32"] * 2, 100))
    assert all(line.isprintable() for line in found.split("\n"))
    assert found.endswith(r"\x1b[2J .. b\r\nc")


def test_a_spreadsheet_sees_no_formula(tmp_path):
    names = ["=cmd|'/c calc'!A1", "+1", "-1", "@sum", "plain"]
    sim = simulate(2, SGD(0.1))
    params = [Parameter(name, np.zeros(3)) for name in names]
    sim.step(lambda rank: [(p, np.ones(3)) for p in params])
    sim.ledger.write_csv(tmp_path / "x.csv", "tensor")
    with open(tmp_path / "x.csv", newline="") as file:
        cells = [row[0] for row in csv.reader(file)]
    assert {"'" + name for name in names[:4]} | {"plain"} <= set(cells)
    assert not any(cell.startswith(("=", "+", "-", "@")) for cell in cells)


# ------------------------------------------------------------------------------------------------- places


def beside(path):
    return path.with_stem(path.stem + "-1")


@pytest.mark.parametrize("before", [False, True], ids=["new", "in the place of an older one"])
def test_a_record_does_not_replace_a_file_created_meanwhile(before, tmp_path):
    path = tmp_path / "run.json"
    if before:
        Experiment(path, "older").finish()
    run = Experiment(path, "newer")
    run.log(1, loss=2.0)
    path.write_text("precious")
    with pytest.raises(FileExistsError, match=f"{path} is there and is no record.*the record is in {beside(path)}"):
        run.finish()
    assert path.read_text() == "precious"
    assert read(beside(path))["curves"]["loss"]["values"] == [2.0]
    with pytest.raises(FileExistsError), Experiment(tmp_path / "other.json", "dense"):
        (tmp_path / "other.json").mkdir()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other-1.json", "other.json", "run-1.json", "run.json"]


def test_a_record_whose_name_is_occupied_takes_the_next_free_one(tmp_path):
    run = Experiment(tmp_path / "run.json", "dense")
    for name in ("run.json", "run-1.json"):
        (tmp_path / name).symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError, match=r"the record is in .*run-2\.json"):
        run.finish()
    assert read(tmp_path / "run-2.json")["mode"] == "dense"
    assert not (tmp_path / "nowhere").exists()


def test_a_record_is_written_on_a_file_system_without_links(tmp_path, monkeypatch):
    def none(*names):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(pending.os, "link", none)
    Experiment(tmp_path / "run.json", "dense").finish()
    assert read(tmp_path / "run.json")["mode"] == "dense"
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


def test_an_error_in_the_block_is_raised_although_the_records_name_is_occupied(tmp_path):
    path = tmp_path / "run.json"

    def train():
        with Experiment(path, "dense"):
            path.write_text("precious")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        train()
    assert f"the record is in {beside(path)}" in caught.value.__notes__[0]
    assert read(beside(path))["raised"] == "ZeroDivisionError"


OWN_TRACE = """
import numpy as np, distopt
opt = distopt.DistOpt(distopt.optim.SGD(1.0))
w = distopt.Parameter("w", np.zeros(3))
opt([(w, np.ones(3))])
open("trace.safetensors", "w").write("precious")
"""


@pytest.mark.mpi
@needs_mpi
def test_a_script_that_writes_where_its_tape_would_be_loses_nothing(tmp_path):
    (tmp_path / "script.py").write_text(OWN_TRACE)
    code, output = finish([sys.executable, "-m", "distopt", "record", "script.py"], 60, cwd=tmp_path)
    assert code == 2, output
    assert "trace.safetensors is there and is no tape: it is not replaced; the tape is in trace-1.safetensors" in output
    assert (tmp_path / "trace.safetensors").read_text() == "precious"
    assert Tape(tmp_path / "trace-1.safetensors").steps == (0,)


# ------------------------------------------------------------------------------------------------- a full disk


@pytest.mark.mpi
def test_a_full_disk_is_named(tmp_path):
    program = f"""
import resource, signal
import numpy as np
from distopt import checkpoint
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, 3 << 20))
checkpoint.write({str(tmp_path / "x")!r}, {{"w": np.ones(1 << 20)}}, {{}})
"""
    code, output = finish([sys.executable, "-c", program], 30)
    assert code == 1
    assert f"OSError: [Errno 27] File too large: '{tmp_path / 'x'}'" in output


def test_a_write_that_fails_names_its_file(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    for verb in ("pwrite", "fsync"):
        with monkeypatch.context() as patched:
            patched.setattr(pending.os, verb, full)
            with pytest.raises(OSError, match=f"No space left on device: '{tmp_path / 'x'}'"):
                checkpoint.write(tmp_path / "x", {"w": np.ones(3)}, {})
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------- whose, and whole


def test_a_checkpoint_of_another_user_is_loaded_with_a_word(tmp_path, monkeypatch, caplog):
    w = Parameter("w", np.ones(4))
    opt = DistOpt(SGD(0.5))
    opt([(w, np.ones(4))])
    saved = opt.save(tmp_path / "run", [w])
    opt.load(tmp_path / "run", [w])
    assert not caplog.messages
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    opt.load(tmp_path / "run", [w])
    assert caplog.messages == [f"distopt: loads {saved}, which another user has written, of uid {mine}"]


def test_a_flight_record_replaces_what_a_rank_has_left_that_ended_while_it_wrote(tmp_path, monkeypatch):
    monkeypatch.setenv(flight_recorder.VARIABLE, str(tmp_path))
    for name in ("distopt-flight.0.json.tmp.1", "distopt-flight.1.json.tmp.1", "mine.json.tmp.1"):
        (tmp_path / name).touch()
    flight_recorder.write(OperationRecorder(), 0, "a test")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"distopt-flight.0.json", "distopt-flight.1.json.tmp.1", "mine.json.tmp.1"}
