"""Epochs: whoever asks and whoever is lost, in any order, all members are told the same and nobody is left behind."""

import contextlib
import os
import socket
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distopt.resilience import membership
from distopt.resilience.environment import LINE, MEMBER
from distopt.resilience.job import AWAITED
from distopt.resilience.membership import Epoch, LauncherLink, Quorum
from distopt.run.rendezvous import RankLinks, Rendezvous

# A history: each event is a member that asks, or is lost.
EVENTS = st.lists(st.tuples(st.sampled_from(["ask", "lose"]), st.integers(0, 4)), max_size=40)


@given(st.integers(1, 5), EVENTS)
def test_an_epoch_begins_when_all_that_live_have_asked(size, events):
    made, living, asked, epochs = Quorum(range(size)), set(range(size)), {}, []
    for moment, (what, member) in enumerate(events):
        if member not in living:
            continue
        if what == "lose":
            living.discard(member)
            asked.pop(member, None)
            made.lose(member)
        else:
            asked[member] = f"{member} at {moment}"
            made.ask(member, asked[member])
        epoch = made.begin()
        assert (epoch is not None) == (bool(asked) and asked.keys() == living)
        if epoch:
            assert epoch == Epoch(len(epochs), sorted(living), [asked[m] for m in sorted(living)])
            epochs.append(epoch)
            asked = {}
        assert made.members == living
        assert made.awaited() == (living - asked.keys() if asked else set())
        assert made.begin() is None, "an epoch begins once"


def test_one_that_is_no_member_waits_until_all_members_let_it_in():
    made = Quorum([0, 1])
    for member in (0, 2, 1):
        assert made.begin() is None
        made.ask(member, "", lets_in=True)
    assert made.begin().members == [0, 1], "not into the first epoch"
    assert made.joiners() == {2}
    assert made.awaited() == set(), "nobody waits for members but a newcomer"
    made.ask(0, "", lets_in=True)
    made.ask(1, "")  # it has lost a rank, in the middle of a step
    assert made.begin().members == [0, 1]
    made.ask(0, "", lets_in=True)
    assert made.awaited() == {1}
    made.ask(1, "", lets_in=True)
    assert made.begin().members == [0, 1, 2]
    assert made.joiners() == set()


def test_nobody_comes_beyond_the_most_and_who_waited_comes_when_there_may_be_more():
    made = Quorum([0, 1, 2], 3)
    for member in range(5):
        made.ask(member, "")
    assert made.begin().members == [0, 1, 2]
    for most, come in ((2, set()), (3, set()), (4, {3}), (9, {3, 4})):
        made.most = most
        assert made.joiners() == come


@given(st.lists(st.tuples(st.sampled_from(["ask", "let in", "lose"]), st.integers(0, 5)), max_size=60))
def test_a_newcomer_is_a_member_once_all_let_it_in(events):
    made, members, asked, number = Quorum(range(3)), {0, 1, 2}, {}, -1
    for what, member in events:
        if what == "lose":
            members.discard(member)
            asked.pop(member, None)
            made.lose(member)
        else:
            asked[member] = what == "let in"
            made.ask(member, "", lets_in=asked[member])
        epoch = made.begin()
        assert (epoch is not None) == (bool(members) and members <= asked.keys())
        if epoch:
            whole = number >= 0 and all(asked[m] for m in members)
            members, number = set(asked) if whole else set(members), number + 1
            assert epoch.members == sorted(members)
            asked = {m: lets_in for m, lets_in in asked.items() if m not in members}
        assert made.joiners() == asked.keys() - members


class Hearing:
    """A rendezvous, and the lines of their members, as a launcher has them."""

    def __init__(self, size, folder):
        self._lines = RankLinks(lambda *said: self.rendezvous.hear(*said))
        self.sockets = [self._lines.add(member) for member in range(size)]
        self.rendezvous = Rendezvous(range(size), self._lines.send, folder)
        self.lines = [LauncherLink(theirs, member) for member, theirs in enumerate(self.sockets)]
        self._lines.start()

    def add(self):
        """One more process's line."""
        member = len(self.sockets)
        self.rendezvous.add(member)
        self.sockets.append(self._lines.add(member))
        return LauncherLink(self.sockets[-1], member)

    def end(self, member):
        """Close a line, as the end of its process does."""
        self.sockets[member].shutdown(socket.SHUT_RDWR)

    def close(self):
        self._lines.close()
        for member, line in enumerate(self.sockets):
            with contextlib.suppress(OSError):  # the other end has gone
                self.end(member)
            line.close()


@pytest.fixture
def hearing(tmp_path):
    opened = []

    def hearing(size):
        opened.append(Hearing(size, tmp_path))
        return opened[-1]

    yield hearing
    for each in opened:
        each.close()


def ask_all(lines, name="world"):
    """What each line is told; they ask at the same time."""
    told = {}
    threads = [
        threading.Thread(target=lambda line=line: told.update({line.member: line.ask(name, f"I am {line.member}")}))
        for line in lines
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return told


def test_all_members_are_told_the_same_over_their_lines(hearing):
    job = hearing(4)
    lines = job.lines
    first = Epoch(0, [0, 1, 2, 3], [f"I am {k}" for k in range(4)])
    assert ask_all(lines) == dict.fromkeys(range(4), first)
    job.end(2)
    second = Epoch(1, [0, 1, 3], ["I am 0", "I am 1", "I am 3"])
    assert ask_all([lines[0], lines[1], lines[3]]) == dict.fromkeys([0, 1, 3], second)
    job.rendezvous.hear(3, None)  # which has forked a child that has the line too
    assert ask_all(lines[:2]) == dict.fromkeys([0, 1], Epoch(2, [0, 1], ["I am 0", "I am 1"]))


def test_a_communicator_that_is_asked_for_later_has_those_that_live(hearing):
    job = hearing(3)
    job.rendezvous.hear(0, None)
    assert ask_all(job.lines[1:], "second") == dict.fromkeys([1, 2], Epoch(0, [1, 2], ["I am 1", "I am 2"]))


def test_who_keeps_others_waiting_is_known(hearing):
    job = hearing(3)
    rendezvous, lines = job.rendezvous, job.lines
    assert rendezvous.awaited() == set()
    asking = threading.Thread(target=lines[1].ask, args=["world", ""])
    asking.start()
    while rendezvous.awaited() != {0, 2}:
        assert asking.is_alive()
    ask_all([lines[0], lines[2]])
    asking.join(10)
    assert rendezvous.awaited() == set()


def test_what_a_lost_member_has_sent_before_is_not_heard(hearing):
    job = hearing(2)
    job.rendezvous.hear(0, None)
    job.rendezvous.hear(0, {"of": "world", "text": "late", "lets_in": False, "first": []})
    assert ask_all(job.lines[1:]) == {1: Epoch(0, [1], ["I am 1"])}


def test_two_threads_of_a_rank_ask_for_two_communicators_over_one_line(hearing):
    lines = hearing(2).lines
    told = [{}, {}]
    threads = [
        threading.Thread(target=lambda line=line, name=name: told[line.member].update({name: line.ask(name, name)}))
        for line, names in zip(lines, (["a", "b"], ["b", "a"]), strict=True)
        for name in names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    expected = {name: Epoch(0, [0, 1], [name, name]) for name in "ab"}
    assert told == [expected, expected]


def test_what_a_member_puts_comes_to_those_it_names(hearing):
    job = hearing(3)
    job.lines[0].put("a/address", b"\x00\xff", [0, 1])
    job.lines[0].put("b/address", b"", [2])
    for line in job.lines[:2]:
        assert line.wait(lambda line=line: line.value("a/address") is not None, 10)
        assert (line.value("a/address"), line.value("b/address")) == (b"\x00\xff", None)
    assert job.lines[2].wait(lambda: job.lines[2].value("b/address") == b"", 10)
    assert not job.lines[2].wait(lambda: job.lines[2].value("a/address") is not None, 0.01)
    job.lines[1].forget("a/")
    assert job.lines[1].value("a/address") is None


def test_who_has_ended_is_known_to_those_who_wait(hearing):
    job = hearing(3)
    threading.Timer(0.05, job.end, [1]).start()
    assert job.lines[0].wait(lambda: job.lines[0].lost([0, 1]), 10)
    assert (job.lines[0].lost([1, 2]), job.lines[0].lost([0, 2])) == ([1], [])


def test_who_reads_nothing_is_given_up_and_holds_nobody_up(tmp_path):
    said = []
    lines = RankLinks(lambda *heard: said.append(heard))
    theirs = lines.add(5)
    for _ in range(1000):
        lines.send(5, {"put": "x" * 10000})
    lines.start()
    while not said:
        time.sleep(1e-3)
    assert said == [(5, None)]
    lines.close()
    theirs.close()


def test_the_end_of_the_launcher_is_an_error():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        threading.Timer(0.05, ours.close).start()
        with pytest.raises(ConnectionError, match="the launcher has ended"):
            LauncherLink(theirs, 0).ask("world", "")


def test_a_process_has_one_line_and_leaves_it_to_no_other(monkeypatch):
    monkeypatch.setattr(membership, "_line", None)
    assert membership.line({}) is None
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    descriptor = theirs.detach()
    os.set_inheritable(descriptor, True)
    environ = {LINE: str(descriptor), MEMBER: "7"}
    line = membership.line(environ)
    assert (line.member, membership.line(environ)) == (7, line)
    assert LINE not in environ
    assert not os.get_inheritable(descriptor)
    ours.close()


def test_torchrun_cannot_lose_a_rank():
    torchrun = {"DISTOPT_ELASTIC": "1", "TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2"}
    with pytest.raises(RuntimeError, match="torchrun ends all of its workers when one of them dies; start the script"):
        membership.wanted(torchrun)
    assert membership.wanted(torchrun | {"WORLD_SIZE": "1"})
    assert not membership.wanted(torchrun | {"DISTOPT_ELASTIC": "0"})
    assert not membership.wanted({})


def test_a_process_that_comes_later_is_let_in_between_epochs(hearing, tmp_path):
    job = hearing(2)
    lines = job.lines
    ask_all(lines)
    new = job.add()
    told = []
    waiting = threading.Thread(target=lambda: told.append(new.ask("world", "new", True)))
    waiting.start()
    while not (tmp_path / AWAITED).exists():
        assert waiting.is_alive()
    assert ask_all(lines)[0].members == [0, 1]
    assert (tmp_path / AWAITED).exists()
    threads = [threading.Thread(target=line.ask, args=["world", "in", True]) for line in lines]
    for thread in threads:
        thread.start()
    for thread in [*threads, waiting]:
        thread.join(10)
    assert told == [Epoch(2, [0, 1, 2], ["in", "in", "new"])]
    assert not (tmp_path / AWAITED).exists()
