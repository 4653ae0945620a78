"""Ranks that end, stop or sleep before they have met the others: how many jobs end, how soon, and whom they name.

``python tests/faults/campaign.py [--rounds R] [--launcher run|bare] [--limit S]`` prints a table for the MPI of its own
environment; ``make kills`` runs it under ``distopt run`` and under the environment's own mpirun.
"""

import argparse
import contextlib
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from distopt.run.launcher import find_launcher
from distopt.run.processes import descendants

SCRIPT = """
import os, signal, sys, time
import distopt

rank = os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
if rank == "1":
    time.sleep(float(sys.argv[2]))
    print(f"fault at {time.time()}", flush=True)
    match sys.argv[1]:
        case "exception": {}["lost"]
        case "failing import": import no_such_module
        case "sys.exit(0)": sys.exit(0)
        case "sys.exit(3)": sys.exit(3)
        case "os._exit(0)": os._exit(0)
        case "SIGKILL": os.kill(os.getpid(), signal.SIGKILL)
        case "SIGSEGV": os.kill(os.getpid(), signal.SIGSEGV)
        case "SIGSTOP": os.kill(os.getpid(), signal.SIGSTOP)
        case "sleeping": time.sleep(600)
distopt.world()
print("done")
"""
FAULTS = {  # and what names it
    "exception": r"KeyError: 'lost'",
    "failing import": "ModuleNotFoundError: No module named 'no_such_module'",
    "sys.exit(0)": "rank 1.* ended before distopt.world|process rank 1 with PID|not come to it",
    "sys.exit(3)": r"rank 1 ended by exit code 3|rank 1.* ended before distopt.world|,1\]\s+Exit code: +3",
    "os._exit(0)": r"rank 1: left by os._exit|rank 1 ended by os._exit\(0\)|process rank 1 with PID",
    "SIGKILL": r"rank 1 (was killed by SIGKILL|ended without a word)|process rank 1 with PID|EXIT STRING: Killed",
    "SIGSEGV": r"rank 1 (crashed|was killed by SIGSEGV)|process rank 1 with PID|EXIT STRING: Segm",
    "SIGSTOP": r"rank 1: has not come to it \(stopped\)|rank 0 waits since .* for MPI's start",
    "sleeping": r"rank 1: has not come to it \(it runs\)|rank 0 waits since .* for MPI's start",
}
LIMITED = ("SIGSTOP", "sleeping")  # which nothing but the time limit ends
HUNG = 60.0  # seconds after which a job is given up


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--launcher", choices=("run", "bare"), default="run")
    parser.add_argument("--limit", type=float, default=3.0, help="DISTOPT_TIMEOUT of the jobs")
    given = parser.parse_args()
    print(f"{find_launcher().brand}, {'distopt run' if given.launcher == 'run' else 'mpirun'}, limit {given.limit:g} s")
    print(f"{'rank 1 of 2':16}{'ended':>8}{'code 0':>8}{'named':>8}{'median s':>10}{'max s':>8}")
    with tempfile.TemporaryDirectory() as folder:
        for fault in FAULTS:
            found = [one(fault, 0.2 * k, given, Path(folder)) for k in range(given.rounds)]
            ended = [seconds for seconds, _, _ in found if seconds < HUNG]
            counts = (len(ended), sum(code == 0 for _, code, _ in found), sum(named for *_, named in found))
            times = (statistics.median(ended), max(ended)) if ended else (float("nan"),) * 2
            shares = "".join(f"{f'{n}/{given.rounds}':>8}" for n in counts)
            print(f"{fault:16}{shares}{times[0]:10.1f}{times[1]:8.1f}", flush=True)


def one(fault, delay, given, folder):
    """Seconds from the fault to the end of the job, without the limit where only that ends it; exit code; named?"""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    launcher = find_launcher()
    start = [sys.executable, "-m", "distopt", "run", "-n", "2"]
    if given.launcher == "bare":
        start = [*launcher.command(2), sys.executable]
    environment = launcher.environment(2) | {"DISTOPT_TIMEOUT": str(given.limit), "DISTOPT_FLIGHT": str(folder)}
    with tempfile.TemporaryFile("w+") as log:
        command = [*start, str(script), fault, str(delay)]
        job = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        began = time.time()
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(HUNG)
        ended = time.time()
        if job.poll() is None:
            for pid in (*descendants(job.pid), job.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            job.wait()
            return HUNG, None, False
        log.seek(0)
        output = log.read()
    at = float((re.findall(r"fault at ([\d.]+)", output) or [began])[0])
    seconds = ended - at - given.limit * (fault in LIMITED)
    named = bool(re.search(FAULTS[fault], output))
    if not named:
        print(output)
    return seconds, job.returncode, named


if __name__ == "__main__":
    main()
