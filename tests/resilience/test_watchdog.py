"""The watchdog: the log of operations, time limits, and reports made of several ranks' records."""

import contextlib
import json
import threading
import time

import pytest

from distopt.cli import main
from distopt.resilience import flight_recorder, watchdog
from distopt.resilience.merge import tell
from distopt.resilience.operation_log import OperationLog, OperationRecorder
from distopt.resilience.report import names
from distopt.resilience.timeouts import Limits, limits
from distopt.resilience.watchdog import Watchdog


class Mail:
    """Both ends in one process; a ``deaf`` one never answers."""

    def __init__(self, rank, boxes, deaf=False):
        self.rank, self.ranks, self.boxes, self.deaf = rank, list(range(len(boxes))), boxes, deaf

    def send(self, to, text):
        self.boxes[to].append((self.rank, text))

    def receive(self):
        return self.boxes[self.rank].pop(0) if self.boxes[self.rank] and not self.deaf else None


class Watched(Watchdog):
    """One that tells what it would have said instead of ending this process."""

    def __init__(self, rank, recorder, limits, mailboxes=()):
        self.said, self.ended = [], threading.Event()
        super().__init__(rank, recorder, limits, None, mailboxes)

    def _run(self):
        with contextlib.suppress(SystemExit):
            super()._run()

    def _end(self, text):
        self.said.append(text)
        self.ended.set()
        raise SystemExit

    def _wait_for_the_end(self):
        self.ended.set()
        raise SystemExit


def test_the_log_knows_open_and_ended_operations():
    recorder = OperationRecorder()
    votes, data = (OperationLog(recorder, name, [0, 1]) for name in ("votes", "data"))
    recorder.step = "step 3"
    with votes("vote", 0, "step 3, its sums"):
        pass
    with data("all_reduce", 12, "bucket 7"):
        assert [str(o) for o in recorder.open()] == ["all_reduce of bucket 7 in step 3"]
        last, now = recorder.operations()
        assert last.began <= last.ended <= now.began
        assert not now.ended
    assert recorder.open() == []
    with pytest.raises(OSError, match="gone"), data("barrier"):
        raise OSError("gone")
    assert [o.ended > 0 for o in recorder.operations()] == [True] * 3
    assert str(recorder.operations()[-1]) == "barrier after the vote on step 3"
    assert [o.key for o in recorder.operations()] == [("votes", 1), ("data", 1), ("data", 2)]


def test_the_ring_of_operations_keeps_the_open_ones():
    recorder = OperationRecorder()
    slow, fast = (OperationLog(recorder, name, [0, 1]) for name in ("slow", "fast"))
    with slow("barrier"):
        for _ in range(1000):
            with fast("barrier"):
                pass
        found = recorder.operations()
        assert found[0].key == ("slow", 1)
        assert not found[0].ended
        assert [o.number for o in found[1:]] == list(range(1000 - 256 + 1, 1001))
        assert all(o.ended for o in found[1:])


def test_logs_of_several_threads_are_read_consistently():
    recorder, count = OperationRecorder(), 20_000
    logs = [OperationLog(recorder, f"log {k}", [0, 1]) for k in range(4)]

    def work(log):
        for _ in range(count):
            with log("barrier"):
                pass

    threads = [threading.Thread(target=work, args=(log,)) for log in logs]
    for t in threads:
        t.start()
    while any(t.is_alive() for t in threads):
        for o in recorder.operations() + recorder.open():
            assert 0 <= o.number <= count
            assert not o.ended or o.ended >= o.began
    assert [log.count for log in logs] == [count] * 4
    assert len(recorder.operations()) == 256


def test_a_name_of_a_log_is_given_once():
    """Or nobody would look at the waits of the first one any more."""
    recorder = OperationRecorder()
    first = OperationLog(recorder, "votes", [0, 1])
    with first("barrier"):
        with pytest.raises(ValueError, match="a log's name must be its own, got 'votes' twice"):
            OperationLog(recorder, "votes", [0, 1])
        assert [o.log for o in recorder.open()] == [first]


def test_a_log_is_forgotten_with_its_owner():
    recorder = OperationRecorder()
    log = OperationLog(recorder, "data", [0, 1])
    assert recorder.known() == [log]
    del log
    assert recorder.known() == []


@pytest.mark.parametrize(
    ("given", "found"),
    [("", Limits(300, 1800)), ("2.5", Limits(2.5, 2.5)), (" 60 ", Limits(60, 60)), ("0", None), ("never", None)],
)
def test_time_limits_are_read_from_the_environment(given, found):
    assert limits({"DISTOPT_TIMEOUT": given}) == found
    assert limits({}) == Limits(300, 1800)


@pytest.mark.parametrize("given", ["soon", "-1", "nan", "inf", "1 2", "5s"])
def test_wrong_time_limits_are_refused(given):
    with pytest.raises(ValueError, match=f"DISTOPT_TIMEOUT must be .* got '{given}'"):
        limits({"DISTOPT_TIMEOUT": given})


@pytest.mark.thorough
def test_the_first_step_may_take_longer(tmp_path, monkeypatch):
    monkeypatch.setenv("DISTOPT_FLIGHT", str(tmp_path / "new"))
    recorder = OperationRecorder()
    log = OperationLog(recorder, "data", [0, 1])
    watched = Watched(0, recorder, Limits(0.3, 60))
    with log("barrier"):
        assert not watched.ended.wait(1)
        recorder.first = False
        assert watched.ended.wait(2)
    assert watched.said[0].startswith("distopt: rank 0 waits since 1.")
    assert "for barrier after the start; at " in watched.said[0]
    file = tmp_path / "new" / "distopt-flight.0.json"
    assert file.stat().st_mode & 0o777 == 0o600
    assert flight_recorder.read(file)["reason"] == "barrier after the start took more than 0.3 s"


@pytest.mark.thorough
def test_what_is_not_limited_may_last():
    recorder = OperationRecorder()
    with OperationLog(recorder, "the end", [0], limited=False)("the end of the others"):
        watched = Watched(0, recorder, Limits(0.2, 0.2))
        assert not watched.ended.wait(1)
    watched.stop()


def test_where_others_go_on_a_wait_over_the_limit_is_told_again_and_again_but_ends_nothing(monkeypatch):
    said, complained = [], threading.Semaphore(0)
    monkeypatch.setenv("DISTOPT_ELASTIC", "1")
    monkeypatch.setattr(watchdog, "ANSWER_SECONDS", 0.05)
    monkeypatch.setattr(watchdog.job, "is_rank", lambda: True)
    monkeypatch.setattr(watchdog.job, "complain", complained.release)
    monkeypatch.setattr(watchdog, "say", said.append)
    recorder, boxes = OperationRecorder(), [[], []]
    mailbox = Mail(0, boxes)
    watched = Watched(0, recorder, Limits(0.2, 0.2), [mailbox])
    with OperationLog(recorder, "votes", [0, 1], mailbox)("vote", 0, "step 3"):
        for _ in range(2):
            assert complained.acquire(timeout=10)
    watched.stop()
    assert said[0].startswith("distopt: rank 0 waits since 0.")
    assert "rank 1: no answer" in said[0]
    assert said[0].endswith("the limit is 0.2 s (DISTOPT_TIMEOUT); distopt run ends who keeps it waiting\n")
    assert watched.said == []
    assert {json.loads(text)[0] for _, text in boxes[1]} == {"how"}, "no other watchdog is told of an end"


@pytest.mark.thorough
def test_one_of_several_waiting_ranks_reports(tmp_path, monkeypatch):
    """All wait for a rank that does not answer, and run into the limit in the same moment."""
    monkeypatch.setenv("DISTOPT_FLIGHT", str(tmp_path))
    boxes, kept, watched = [[] for _ in range(4)], [], []
    for rank in range(4):
        recorder = OperationRecorder()
        mailbox = Mail(rank, boxes, deaf=rank == 2)
        log = OperationLog(recorder, "votes", range(4), mailbox)
        kept.append(log)
        watched.append(Watched(rank, recorder, Limits(0.5, 0.5), [mailbox]))
    for log in kept:
        if log.mailbox.rank != 2:
            log("vote", 0, "step 1")
    for w in watched:
        assert w.ended.wait(5) or w.rank == 2
    said = [text for w in watched for text in w.said]
    assert len(said) == 1
    assert "rank 2: no answer (stopped, dead, or holding the interpreter lock)" in said[0]
    assert "waits for the same" in said[0]
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"distopt-flight.{r}.json" for r in (0, 1, 3)]
    watched[2].stop()


@pytest.mark.thorough
def test_a_long_wait_is_warned_about_once(monkeypatch):
    said = []
    monkeypatch.setattr(watchdog, "WARN_FROM", 2.0)
    monkeypatch.setattr(watchdog, "say", said.append)
    recorder, boxes = OperationRecorder(), [[], []]
    watched = Watched(0, recorder, Limits(4, 4), [Mail(0, boxes)])
    with OperationLog(recorder, "data", [0, 1], Mail(0, boxes))("all_reduce", 8):
        time.sleep(2)
    watched.stop()
    assert len(said) == 1
    assert "waits since 0." in said[0]
    assert "the job ends when this has taken 4 s (DISTOPT_TIMEOUT)" in said[0]


def record(rank, operations, at="train.py:3 in backward", wall=1000.0):
    """Operations are (log, number, text, began, ended)."""
    keys = ("log", "number", "text", "began", "ended")
    entries = [dict(zip(keys, o, strict=True)) | {"bytes": 0} for o in operations]
    base = {
        "format": flight_recorder.FORMAT,
        "rank": rank,
        "reason": "",
        "host": "",
        "pid": 1,
        "wall": wall,
        "now": 100.0,
    }
    return base | {"at": at, "stack": [], "logs": {"votes": [0, 1, 2], "data": [0, 1, 2]}, "operations": entries}


def test_the_report_names_the_operations_in_which_ranks_differ():
    same = [("votes", 1, "the vote on step 1", 1, 2)]
    a, b = (("data", 1, text, 2, 0) for text in ("all_reduce of 8 bytes", "broadcast of 4 bytes"))
    found = tell([record(0, [*same, a]), record(1, [*same, b]), record(2, [*same, a])])
    assert found[0] == "the ranks differ: ranks 0, 2 in all_reduce of 8 bytes; rank 1 in broadcast of 4 bytes"


def test_the_report_names_ranks_that_did_not_begin_an_operation():
    one, two = ("votes", 1, "the vote on step 1", 1, 2), ("votes", 2, "the vote on step 2", 5, 0)
    found = tell([record(0, [one, two]), record(1, [one]), record(2, [one, two], wall=1001.0)])
    assert found == [
        "ranks 0, 2 began the vote on step 2; rank 1 did not: at train.py:3 in backward "
        "(the last that all completed: the vote on step 1)",
        "  rank 0: waited 95.0 s for the vote on step 2; at train.py:3 in backward",
        "  rank 1: in no operation; the vote on step 1 ended 98.0 s before; at train.py:3 in backward",
        "  rank 2: waited 95.0 s for the vote on step 2; at train.py:3 in backward",
    ]
    found = tell([record(0, [one, two]), record(2, [one, two]), record(1, [one], wall=10.0)])
    assert found[:2] == [
        "left out, since of an earlier job: rank 1",
        "ranks 0, 2 began the vote on step 2, which not all ended (the last that all completed: the vote on step 1)",
    ]
    assert "no record of rank 1: stopped, ended too early, or holding the interpreter lock" in found


def test_the_report_of_records_without_operations_names_no_rank():
    assert tell([record(r, []) for r in range(3)])[0].startswith("the ranks do not part")


@pytest.mark.parametrize("text", ["", "[]", "{}", "[" * 10**5, json.dumps(record(0, []) | {"rank": "0"}), "\0", "1"])
def test_trace_refuses_files_that_are_no_flight_record(text, tmp_path, capsys):
    file = tmp_path / "distopt-flight.0.json"
    file.write_text(text)
    assert main(["trace", str(tmp_path)]) == 1
    assert f"distopt trace: {file} must be a flight record" in capsys.readouterr().err


def test_trace_without_records_or_with_two_of_one_rank_is_refused(tmp_path, capsys, monkeypatch):
    assert main(["trace", str(tmp_path)]) == 1
    assert "there are no flight records in" in capsys.readouterr().err
    assert main(["trace", str(tmp_path / "nowhere")]) == 1
    file = tmp_path / "distopt-flight.0.json"
    file.write_text(json.dumps(record(0, [])))
    assert main(["trace", str(file), str(file)]) == 1
    assert "the records must be of different ranks, got several of one" in capsys.readouterr().err
    monkeypatch.setenv("DISTOPT_FLIGHT", str(tmp_path))
    assert main(["trace"]) == 0


def test_rank_numbers_are_named_as_ranges():
    assert names([1]) == "rank 1"
    assert names([3, 0]) == "ranks 0, 3"
    assert names(range(64)) == "ranks 0 to 63"
    assert names([0, 5, 6, 7]) == "ranks 0, 5 to 7"
