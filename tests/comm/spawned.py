"""Ranks that are spawned processes of this machine and vote over sockets, without MPI: on GPUs, or on their doubles."""

import multiprocessing
import time

import nccl_checks

import laws
from distopt.comm import NcclCommunicator, nccl_unique_id


def run(main, size, folder, begin, ranks=None, timeout=120.0, patience=60.0):
    """What ``main(comm)`` returned or raised, by rank, in each process that ended by itself.

    ``begin(rank)`` comes first in a process, before CUDA and NCCL are called; here, nothing but the id is made.
    """
    spawn, unique_id = multiprocessing.get_context("spawn"), nccl_unique_id()
    children = [
        spawn.Process(target=child, args=(main, unique_id, rank, size, folder, begin, patience), daemon=True)
        for rank in (range(size) if ranks is None else ranks)
    ]
    for process in children:
        process.start()
    deadline = time.monotonic() + timeout
    for process in children:
        process.join(max(0.0, deadline - time.monotonic()))
    late = [rank for rank, process in enumerate(children) if process.exitcode is None]
    for process in children:
        process.kill()
    assert not late, f"processes {late} do not end within {timeout} s"
    return {f.name: f.read_text() for f in sorted(folder.iterdir())}


def child(main, unique_id, rank, size, folder, begin, patience):
    """One of them; its result, or its error, goes into a file."""
    begin(rank)
    try:
        comm = NcclCommunicator.from_id(unique_id, rank, size, patience=patience)
        found = str(main(comm))
        comm.close()
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    (folder / str(rank)).write_text(found)


def on_doubles(rank):
    """GPUs and NCCL for a process that has none."""
    nccl_checks.install(processes=True)


# ------------------------------------------------------------------------------------------- what a rank may be told


def verbs(comm):
    """All of them."""
    nccl_checks.everything(comm, pieces=False)
    return "done"


def streams(comm):
    """The order of what is enqueued in two streams."""
    nccl_checks.streams(comm)
    return "done"


def steps(comm):
    """Every mode has the same bits on all ranks."""
    for mode in laws.MODES:
        laws.same_bits(comm, mode)
    return "done"


def captured(comm):
    """A replay is the step."""
    for compressor in laws.CAPTURED:
        laws.capture_changes_no_bit(comm, compressor)
    return "done"


def registered(comm):
    """Buckets in memory that NCCL knows."""
    assert "buckets registered" in repr(comm)
    for mode in ("dense", "half", "topk"):
        laws.same_bits(comm, mode)
    return "done"


def law(comm, part):
    """One of ``LAWS``."""
    LAWS[part](comm)
    return "done"


def digests(comm):
    """Those that a host must give too."""
    return laws.independence(comm)


def more(comm):
    """What no other part has."""
    laws.modes_agree(comm)
    laws.resume(comm, "topk", num_batches=3, sync_on_apply=False, deterministic=True)


MODES = list(laws.MODES)
LAWS = {  # the parts of laws.all_of_them but ``digests``: where ranks share a GPU, none should take minutes
    "sums": laws.sums,
    "optimizers": laws.every_optimizer,
    "more": more,
    "modes, first half": lambda comm: laws.every_mode(comm, MODES[: len(MODES) // 2]),
    "modes, second half": lambda comm: laws.every_mode(comm, MODES[len(MODES) // 2 :]),
}
