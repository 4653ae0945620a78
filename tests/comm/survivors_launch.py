"""Ranks that exchange until it is enough, without those that are killed, over either transport.

``python survivors_launch.py TRANSPORT WHAT FOLDER``: each rank writes its process into ``FOLDER/N.process``, and into
``FOLDER/N.sums`` a line for each first sum over the ranks of an epoch: when, and of whom.  A file
``FOLDER/enough`` ends them.
"""

import contextlib
import os
import sys
import threading
import time
from pathlib import Path

import numpy as np

from distopt.comm.control import fingerprint
from distopt.resilience import job


def begin(transport):
    """The communicator, and this process's number in the job."""
    if transport == "gloo":
        job.enter(int(os.environ["DISTOPT_MEMBER"]), Path(os.environ.pop("DISTOPT_JOB")))
        from distopt.comm import process_group
        from distopt.comm.process_group import ProcessGroupCommunicator

        if how("apart"):  # as ranks of several hosts, which share nothing
            process_group.Board.open = lambda *_: []
            process_group._machine = lambda: os.environ["DISTOPT_MEMBER"]
        return ProcessGroupCommunicator("a test"), int(os.environ["DISTOPT_MEMBER"])
    from distopt.comm import MpiCommunicator

    comm = MpiCommunicator()
    return comm, comm.rank


def all_reduce(comm, members, turn):
    for dtype in (np.float32, np.float16):
        x = np.full(1 + 3000 * (turn % 5), 1 + comm.rank, dtype)
        comm.all_reduce(x)
        assert (x == sum(range(1, comm.size + 1))).all()


def all_gather(comm, members, turn):
    for ragged in (False, True):
        sizes = [100 + r * ragged for r in range(comm.size)]
        found = comm.all_gather(np.full(sizes[comm.rank], comm.rank), ragged)
        assert [(x.size, set(x.tolist())) for x in found] == [(n, {r}) for r, n in enumerate(sizes)]


def all_to_all(comm, members, turn):
    found = comm.all_to_all([np.full(turn % 999 + 1, comm.rank * 100 + r) for r in range(comm.size)])
    assert [set(x.tolist()) for x in found] == [{r * 100 + comm.rank} for r in range(comm.size)]


def broadcast(comm, members, turn):
    x = np.full(5000, float(comm.rank))
    comm.broadcast(x, turn % comm.size)
    assert (x == turn % comm.size).all()


def barrier(comm, members, turn):
    comm.barrier()


def vote(comm, members, turn):
    lines = [f"turn {turn}"]
    reports = comm.control.vote("turn", fingerprint(lines), lambda: lines, report="yes" * (comm.rank == 0))
    assert reports == ["yes"] + [""] * (comm.size - 1)


def gather(comm, members, turn):
    assert comm.control.gather(str(members[comm.rank])) == list(map(str, members))


def duplicate(comm, members, turn):
    other = comm.make_duplicate()
    try:
        barrier(other, members, turn)
    except Exception:
        other.revoke()
        raise
    other.close()


def subgroup(comm, members, turn):
    groups = (tuple(range(0, comm.size, 2)), tuple(range(1, comm.size, 2)))
    group = comm.make_subgroup(tuple(filter(None, groups)))
    all_reduce(group, members, turn)
    group.close()


def memory(comm, members, turn):
    if how("apart"):
        return
    mine = comm.alloc(1000, np.float32)
    mine[:] = members[comm.rank]
    arrays = comm.peers(mine)
    assert arrays is not None
    comm.barrier()
    assert [x[7] for x in arrays] == members


def mixed(comm, members, turn):
    OPERATIONS[list(OPERATIONS)[turn % (len(OPERATIONS) - 1)]](comm, members, turn)


OPERATIONS = {
    f.__name__: f
    for f in (all_reduce, all_gather, all_to_all, broadcast, barrier, vote, gather, memory, duplicate, subgroup, mixed)
}


def turns(comm, member, what, enough, note):
    """Exchange until one sees that it is enough; the last communicator."""
    members, turn, first, epoch = list(range(comm.size)), 0, True, 0
    while True:
        try:
            OPERATIONS[what](comm, members, turn)
            x = np.array([2.0**member, enough.exists()])
            comm.all_reduce(x)
            assert x[0] == sum(2.0**m for m in members), (x, members)
            if first:
                note(f"{time.monotonic()} {members}")
            first, turn = False, turn + 1
            if x[1]:
                return comm
            if turn == 20 and epoch == 0 and how("gives up"):
                give_up(comm)
            if turn == 20 and epoch == 0 and how("another thread"):
                comm, first, epoch = go_on_in_a_thread(comm), True, 1
            if member == 1 and turn == 20 and how("leaves"):
                return comm
            if member == 1 and turn == 20 and how("raises"):
                raise ValueError("of this rank alone")
            if member == 1 and turn == 20 and how("exits"):
                sys.exit(3)
            if member == 1 and turn == 20 and how("skips"):
                os._exit(3)
        except Exception as error:
            if not comm.lost(error):
                raise
            comm, texts = go_on(comm, f"{member} {turn}")
            members, first, epoch = [int(text.split()[0]) for text in texts], True, epoch + 1
            turn = max(int(text.split()[1]) for text in texts)


def give_up(comm):
    """Rank 0 goes on without the others while rank 1 sends what rank 2 takes later; nobody has ended."""
    if comm.rank == 0:
        time.sleep(0.3)
        comm.revoke()
    if comm.rank == 2:
        time.sleep(0.6)
    comm.all_to_all([np.zeros(100_000)] * comm.size)


def go_on_in_a_thread(comm):
    """As ``comm.elastic.EpochGroup``: a thread goes on for all communicators, while the main one waits for rank 2."""
    made = []

    def work():
        time.sleep(0.3)
        comm.revoke()
        made.append(comm.next_epoch("")[0])

    comm.set_poll_interval(0.2)  # the thread is done with it before this one looks again
    thread = threading.Thread(target=work)
    thread.start()
    if comm.rank == 2:
        time.sleep(0.6)
    try:
        comm.all_to_all([np.zeros(100_000)] * comm.size)
        raise AssertionError("no rank had all parts")
    except Exception as error:
        if not comm.lost(error):
            raise
    thread.join()
    return made[0]


def go_on(comm, text):
    while True:
        try:
            comm.revoke()
            return comm.next_epoch(text)
        except Exception as error:
            if not comm.lost(error):
                raise


def how(word):
    """Tell if the test has asked for this."""
    return word in os.environ.get("HOW", "")


def main(transport, what, folder):
    if how("dump"):
        import faulthandler

        faulthandler.dump_traceback_later(12, repeat=False)
    comm, member = begin(transport)
    folder = Path(folder)
    (folder / f"{member}.part").write_text(str(os.getpid()))
    os.replace(folder / f"{member}.part", folder / f"{member}.process")
    with (folder / f"{member}.sums").open("w", buffering=1) as sums:
        comm = turns(comm, member, what, folder / "enough", lambda line: sums.write(f"{line}\n"))
    if how("late") and comm.rank == 0:
        time.sleep(2)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(*sys.argv[1:])
