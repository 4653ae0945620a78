"""Hosts and the switch between them on one machine: network namespaces, each with a shaped cable to a bridge.

Each host has its own network, host name, process ids, shared memory, temporary folder and share of the cores, so that
an MPI library takes the others for distant machines.  Needs root.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.measure import MALLOC
from distopt.run.launcher import find_launcher

ADDRESSES = tuple(f"10.77.0.{number}" for number in range(1, 9))
INTERFACE = "eth0"
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
APART = ("unshare", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")
SHAPED = f"qdisc replace dev {INTERFACE} root tbf burst 256kb latency 20ms rate"

# In place of ssh: what it is given is options, an address, and a command for the shell there.
AGENT = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
address="$1"; shift
case "$address" in
"""


class Hosts(NamedTuple):
    """Namespaces, and a folder for what belongs to them."""

    names: tuple[str, ...]
    folder: Path

    def on(self, host: int, command: Sequence[str]) -> list[str]:
        """The command that runs a command on a host, as the first of its processes: they all end with it."""
        cores = sorted(os.sched_getaffinity(0))
        pinned = ("taskset", "-c", ",".join(map(str, cores[host % len(cores) :: len(self.names)])))
        start = f'hostname "$0" && export TMPDIR=$(mktemp -d -p {self.folder}) && exec "$@"'
        name = self.names[host]
        return ["ip", "netns", "exec", name, *pinned, *APART, "sh", "-c", start, name, *command]

    def environment(self, brand: str, ranks: Sequence[int]) -> dict[str, str]:
        """What makes a launcher on the first host start so many ranks on each, in order."""
        agent, table = self.folder / "agent", self.folder / "hosts"
        there = [" ".join(f"'{word}'" for word in self.on(host, [])) for host in range(len(self.names))]
        cases = [f'{a}) exec {words} sh -c "$*" ;;\n' for a, words in zip(ADDRESSES, there, strict=False)]
        agent.write_text("".join([AGENT, *cases, "esac\n"]))
        agent.chmod(0o700)
        slots = list(zip(ADDRESSES, ranks, strict=False))
        if brand == "MPICH":
            table.write_text("".join(f"{a}:{n}\n" for a, n in slots))
            hydra = {"LAUNCHER": "ssh", "LAUNCHER_EXEC": agent, "HOST_FILE": table, "IFACE": INTERFACE}
            return {f"HYDRA_{name}": str(value) for name, value in hydra.items()} | {"UCX_NET_DEVICES": INTERFACE}
        table.write_text("".join(f"{a} slots={n}\n" for a, n in slots))
        prrte = {"plm_ssh_agent": agent, "prte_default_hostfile": table, "prte_if_include": INTERFACE}
        return {f"PRTE_MCA_{name}": str(value) for name, value in prrte.items()} | {"OMPI_MCA_btl": "^ofi"}

    def sent(self) -> list[int]:
        """The bytes that each host has put on its cable so far, headers included."""
        return [_interface(name)["stats64"]["tx"]["bytes"] for name in self.names]


@contextlib.contextmanager
def joined_hosts(number: int = 2, rate: str = "") -> Iterator[Hosts]:
    """So many hosts for as long as the context lasts; whatever still runs on them then is killed.

    ``rate``: what each host sends at most, as tc(8) writes it: '1gbit'; empty is as fast as it goes.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"distopt-{os.getpid()}-")))
        stem = folder.name.replace("_", "-")  # which no host may have in its name
        switch, names = f"{stem}-switch", tuple(f"{stem}-{'abcdefgh'[host]}" for host in range(number))
        for name in (switch, *names):
            _output(f"ip netns add {name}")
            stack.callback(_remove, name)
        _output(f"ip -netns {switch} link add ports type bridge")
        _output(f"ip -netns {switch} link set ports up")
        for name, address in zip(names, ADDRESSES, strict=False):
            port = f"port{address[-1]}"
            _output(f"ip link add {INTERFACE} netns {name} type veth peer name {port} netns {switch}")
            _output(f"ip -netns {switch} link set {port} master ports up")
            _output(f"ip -netns {name} address add {address}/24 dev {INTERFACE}")
            for interface in ("lo", INTERFACE):
                _output(f"ip -netns {name} link set {interface} up")
            if rate:
                _output(f"tc -netns {name} {SHAPED} {rate}")
        for name in names:
            _wait_until_up(name)
        yield Hosts(names, folder)


def measured(script: Sequence[str], ranks: Sequence[int], limit: float) -> Any:
    """What the ranks of a Python script, so many on each host, write as JSON into the ``--file`` that it is given.

    ``script`` is what follows ``python``; it may take so many seconds.
    """
    launcher, size = find_launcher(), sum(ranks)
    with joined_hosts(len(ranks)) as hosts:
        file = hosts.folder / "measured"
        command = [*launcher.command(size), sys.executable, *script, "--file", str(file)]
        env = launcher.environment(size) | hosts.environment(launcher.brand, ranks)
        env |= MALLOC | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE}
        subprocess.run(hosts.on(0, command), env=env, timeout=limit, check=True)
        return json.loads(file.read_text())


def cut(hosts: Hosts) -> None:
    """Pull the cable out of the second host; the first one hears nothing of it."""
    _output(f"ip -netns {hosts.names[1]} link set {INTERFACE} down")


def shape(rate: str) -> None:
    """From now on the host that this process runs on sends no faster than that."""
    _output(f"tc {SHAPED} {rate}")


def shape_closely(rate: str) -> None:
    """The same, as a real card does it: after a pause hardly anything goes faster, and nothing is dropped.

    The token bucket has room for 0.26 ms, and for two packets at least.
    """
    burst = max(4096, int(bits_per_second(rate) / 8 * 262e-6))
    _output(f"tc qdisc replace dev {INTERFACE} root tbf rate {rate} burst {burst} limit 20mb")


def bits_per_second(rate: str) -> float:
    """The number of a rate that tc(8) reads."""
    found = re.fullmatch(r"(\d+)(kbit|mbit|gbit)", rate)
    if found is None:
        raise ValueError(f"rate must be a whole number of kbit, mbit or gbit, as 100mbit, got {rate!r}")
    return int(found[1]) * UNITS[found[2]]


def missing() -> str:
    """Why there can be no hosts here; empty if they can be made."""
    if os.geteuid():
        return "network namespaces need root"
    absent = [tool for tool in ("ip", "tc", "unshare", "taskset") if shutil.which(tool) is None]
    if absent:
        return f"{', '.join(absent)} not found: install iproute2 and util-linux"
    trial = [*APART, "--net", *f"tc {SHAPED} 1gbit".replace(INTERFACE, "lo").split()]
    done = subprocess.run(trial, capture_output=True, text=True, timeout=10, check=False)
    return f"this machine makes no namespaces with a shaped link: {done.stderr.strip()}" if done.returncode else ""


def _interface(name: str) -> dict[str, Any]:
    return dict(json.loads(_output(f"ip -json -stats -netns {name} link show dev {INTERFACE}"))[0])


def _wait_until_up(name: str) -> None:
    """The kernel reports a new link up to a second late, and an MPI library that starts before does not use it."""
    for _ in range(500):
        if _interface(name)["operstate"] == "UP":
            return
        time.sleep(0.01)
    raise RuntimeError(f"{INTERFACE} of {name} does not come up")


def _remove(name: str) -> None:
    for pid in _output(f"ip netns pids {name}").split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    _output(f"ip netns delete {name}")


def _output(command: str) -> str:
    done = subprocess.run(command.split(), capture_output=True, text=True, timeout=10, check=False)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr.strip()}")
    return done.stdout
