"""Votes over sockets: who belongs together meets, whoever else is at the listener."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client

import pytest

from distopt.comm import listener, sockets
from distopt.comm.sockets import SocketControl

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="to be another user needs root")


@pytest.fixture
def names(monkeypatch):
    """The names of the sockets that are opened, which anybody can read in /proc/net/unix."""
    found, opened = [], listener.RankListener

    def note(name, *arguments):
        found.append(name)
        return opened(name, *arguments)

    monkeypatch.setattr(sockets, "RankListener", note)
    return found


def controls(size, secrets, sizes=None, ranks=None, patience=1.0, first=0.0):
    """What comes of SocketControls that threads make: a control, or an error; rank 0 is there ``first`` seconds before.

    Every thread must end.
    """
    found = [None] * len(secrets)

    def make(k):
        try:
            rank = ranks[k] if ranks else k
            found[k] = SocketControl(secrets[k], rank, sizes[k] if sizes else size, patience=patience)
        except Exception as error:
            found[k] = error

    threads = [threading.Thread(target=make, args=(k,)) for k in range(len(secrets))]
    for t in threads:
        t.start()
        time.sleep(first)
        first = 0.0
    for t in threads:
        t.join(60)
        assert not t.is_alive()
    return found


def all_there(found):
    """Have all come?  They part again."""
    texts = [str(c) for c in found if isinstance(c, Exception)]
    assert not texts, texts
    assert [c.rank for c in found] == list(range(len(found)))
    for c in found:
        c.close()


def test_processes_with_other_ranks_or_world_sizes_are_refused():
    for error in controls(2, [os.urandom(128)] * 2, sizes=[2, 3]):
        assert str(error) == "rank 1 was told world_size=3, rank 0 world_size=2"
    for error in controls(3, [os.urandom(128)] * 3, ranks=[0, 1, 1]):
        assert str(error) == "two processes were told local_rank=1"


def test_processes_with_different_secrets_do_not_meet(names):
    strangers = controls(2, [os.urandom(128), os.urandom(128)], patience=0.2)
    assert "rank 1 of 2 did not come within 0.2 s" in str(strangers[0])
    assert "rank 0 did not come within 0.2 s" in str(strangers[1])
    assert names[0].startswith("\0distopt-")


def test_one_secret_may_be_used_again_and_again():
    """As soon as all have come the name is free."""
    secret = os.urandom(128)
    for _ in range(3):
        all_there(controls(3, [secret] * 3, patience=20.0))


def test_connections_without_the_secret_do_not_disturb_the_ranks(names):
    """Somebody knocks who knows the sockets' name but not the secret: the ranks meet all the same."""
    stop = threading.Event()

    def knock(key):
        while not stop.is_set():
            with contextlib.suppress(OSError, IndexError, EOFError, AuthenticationError, AssertionError):
                Client(names[0], family="AF_UNIX", authkey=key).close()
            time.sleep(0.005)

    strangers = [threading.Thread(target=knock, args=(key,)) for key in (b"guess", None)]
    for s in strangers:
        s.start()
    try:
        all_there(controls(3, [os.urandom(128)] * 3, patience=20.0, first=0.3))
    finally:
        stop.set()
        for s in strangers:
            s.join()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("says", [b"", b"x" * 20, b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff" + b"\xff" * 8])
def test_silent_connections_do_not_keep_ranks_out(says, names):
    """It connects before the others, and says nothing, or what makes no sense."""
    silent = []

    def make(name):
        for _ in range(20):
            line = socket.socket(socket.AF_UNIX)
            line.connect(name)
            line.send(says)
            silent.append(line)

    late = threading.Thread(target=lambda: (time.sleep(0.2), make(names[0])))
    late.start()
    try:
        all_there(controls(3, [os.urandom(128)] * 3, patience=20.0, first=0.6))
    finally:
        late.join()
        for line in silent:
            line.close()
    assert len(silent) == 20


def test_a_connection_that_proves_nothing_is_closed(names, monkeypatch):
    """And those that wait behind a crowd of them are let in then."""
    monkeypatch.setattr(listener, "PROOF_SECONDS", 0.1)
    monkeypatch.setattr(listener, "MAX_UNPROVEN", -2)  # one at a time
    opened = threading.Event()

    def stay():
        while not names:
            time.sleep(0.01)
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(names[0])
            opened.set()
            while line.recv(100):
                pass

    connection = threading.Thread(target=stay)
    connection.start()
    all_there(controls(3, [os.urandom(128)] * 3, patience=20.0, first=0.1))
    connection.join(20)
    assert not connection.is_alive()
    assert opened.is_set()


def test_a_full_listen_queue_ends_in_a_timeout():
    """A listener whose queue is full, and that accepts nobody: a rank does not wait for longer than its patience."""
    secret = os.urandom(128)
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.socket(socket.AF_UNIX))
        full.bind(f"\0distopt-test-{secret.hex()[:16]}")
        full.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                line = stack.enter_context(socket.socket(socket.AF_UNIX))
                line.setblocking(False)
                line.connect(full.getsockname())
        begun = time.monotonic()
        with pytest.raises(TimeoutError):
            listener.connect(f"\0distopt-test-{secret.hex()[:16]}", b"key", 1, 2, begun + 0.1)
        assert time.monotonic() - begun < 20


@pytest.mark.thorough
def test_a_listener_that_never_answers_ends_in_a_timeout():
    """It takes a rank in, and is silent: the rank does not wait for longer than its patience."""
    name = f"\0distopt-test-{os.urandom(8).hex()}"
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(name)
        silent.listen(5)
        begun = time.monotonic()
        with pytest.raises(TimeoutError):
            listener.connect(name, b"key", 1, 2, begun + 0.2)
        assert time.monotonic() - begun < 30


# ------------------------------------------------------------------------------------------------- another user

STRANGERS = """
import os, socket, sys, time
how = sys.argv[1]
os.setuid(65534)
while True:  # as anybody can read it
    names = [line.split()[-1] for line in open("/proc/net/unix") if "@distopt-" in line]
    if names:
        break
    time.sleep(0.01)
lines = []
print("there", flush=True)
end = time.monotonic() + 30
while time.monotonic() < end:
    for name in names:
        line = socket.socket(socket.AF_UNIX)
        line.setblocking(False)
        try:
            line.connect("\\0" + name[1:])
            if how == "garbage":
                line.send(os.urandom(100))
            lines.append(line)
        except OSError:
            line.close()
    if len(lines) >= (1 if how == "silent" else 400):
        if how == "silent":
            time.sleep(30)
        for line in lines:
            line.close()
        lines = []
"""


@as_root
@pytest.mark.faults
@pytest.mark.parametrize("how", ["silent", "garbage", "flood"])
def test_another_users_connection_does_not_keep_ranks_out(how, names):
    """It reads the socket's name, connects before the others, and stays, or comes again and again."""
    job = subprocess.Popen([sys.executable, "-c", STRANGERS, how], stdout=subprocess.PIPE, text=True)
    found = []
    try:
        secret = os.urandom(128)
        rank_0 = threading.Thread(target=lambda: found.append(SocketControl(secret, 0, 3, patience=60.0)))
        rank_0.start()
        assert job.stdout.readline() == "there\n"
        time.sleep(0.5)
        others = controls(3, [secret] * 2, ranks=[1, 2], patience=60.0)
        rank_0.join(60)
        all_there([*found, *others])
    finally:
        job.kill()
        job.communicate()


@as_root
@pytest.mark.mpi
def test_another_users_listener_is_refused(tmp_path):
    program = """
import os, socket, sys, time
os.setuid(65534)
line = socket.socket(socket.AF_UNIX)
line.bind("\\0" + sys.argv[1])
line.listen(5)
print("there", flush=True)
time.sleep(60)
"""
    name = f"distopt-test-{os.urandom(8).hex()}"
    job = subprocess.Popen([sys.executable, "-c", program, name], stdout=subprocess.PIPE, text=True)
    try:
        assert job.stdout.readline() == "there\n"
        with pytest.raises(AuthenticationError, match="it is another user's process"):
            listener.connect("\0" + name, b"key", 1, 2, time.monotonic() + 30)
    finally:
        job.kill()
        job.communicate()
