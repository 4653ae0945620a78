"""A process that has imported what ranks need, and starts others as forks of itself: at once, instead of in seconds.

It needs only the standard library, since the runner of ranks (``rank.py``) loads it by its path.
"""

import contextlib
import importlib
import json
import os
import select
import socket
import sys


def serve(line: socket.socket, modules: list[str]) -> list[int]:
    """Start a process whenever the launcher asks for one at the other end of this line; return in each of them.

    The launcher sends variables of its environment, and descriptors: of its output, of its errors, and more, which are
    returned.  It is told its process ID, with a descriptor of it, and later how it has ended.
    """
    for module in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    line.send(json.dumps({"ready": os.getpid()}).encode())
    children: dict[int, int] = {}  # process IDs by their descriptors
    ready = select.poll()
    ready.register(line, select.POLLIN)
    while True:
        for descriptor, _ in ready.poll():
            if descriptor in children:
                ready.unregister(descriptor)
                os.close(descriptor)
                pid, status = os.waitpid(children.pop(descriptor), 0)
                _tell(line, {"pid": pid, "status": os.waitstatus_to_exitcode(status)})
                continue
            text, given, _, _ = socket.recv_fds(line, 1 << 20, 8)
            if not text:  # the launcher is gone
                os._exit(0)
            pid = os.fork()
            if pid == 0:
                for mine in [line.detach(), *children]:
                    os.close(mine)
                return _become(json.loads(text), given)
            for descriptor in given:
                os.close(descriptor)
            child = os.pidfd_open(pid)
            children[child] = pid
            ready.register(child, select.POLLIN)
            socket.send_fds(line, [json.dumps({"pid": pid}).encode()], [child])


def _tell(line: socket.socket, message: dict[str, int]) -> None:
    try:
        line.send(json.dumps(message).encode())
    except OSError:
        os._exit(0)


def _become(variables: dict[str, str], given: list[int]) -> list[int]:
    """Be a process of its own; return what else it was given."""
    os.setsid()
    os.environ.update(variables)
    for number, descriptor in enumerate(given[:2], 1):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if numpy := sys.modules.get("numpy"):  # all forks would have one seed, unlike those of `random`
        numpy.random.seed()
    return given[2:]
