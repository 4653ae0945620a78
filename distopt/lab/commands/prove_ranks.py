"""What the two ranks of ``distopt prove`` do: ``python -m distopt.lab.commands.prove_ranks FOLDER TASK ARGUMENTS``.

A task is a function of a communicator and plain values; what it returns, plain values again, is left in the folder.
"""

import functools
import hashlib
import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import distopt
from distopt import DistOpt, Parameter, checkpoint
from distopt.comm import Communicator, Metered
from distopt.comm.communicator import slices
from distopt.comm.sockets import SocketControl
from distopt.compress import Dense, ErrorFeedback, Half, Int8, Packed, TopK
from distopt.lab.commands.prove_socket import SocketPair
from distopt.optim import SGD, Adam

SOCKET = "DISTOPT_PROVE_SOCKET"  # the environment variable that has a rank's number, its socket, and the pair's secret
SHAPES = ((300, 40), (50,), (7,), (4001,))
MODES = {
    "dense": Dense(),
    "half": Half(),
    "packed top-K": ErrorFeedback(Packed(TopK(0.01))),
    "int8": ErrorFeedback(Int8()),
}
STEPS = 6  # of a run that meets a NaN
REFUSALS = ("skipped", "skips_in_a_row")  # the counts of refused steps in a DistOpt's state
BATCH, FEATURES, OUTPUTS = 64, 20, 6

product = functools.partial(np.einsum, "ij,jk->ik")  # a BLAS may have other bits with another number of threads

Pairs = Iterator[tuple[Parameter, np.ndarray]]


def parameters(seed: int) -> list[Parameter]:
    """Return parameters, the same on all ranks."""
    rng = np.random.default_rng(seed)
    return [Parameter(f"p{k}", rng.standard_normal(shape).astype(np.float32)) for k, shape in enumerate(SHAPES)]


def gradients(params: list[Parameter], *keys: int) -> Pairs:
    """Yield each parameter with a gradient of its own for each seed, step and rank."""
    rng = np.random.default_rng(keys)
    yield from ((p, rng.standard_normal(p.data.shape).astype(np.float32)) for p in params)


def digest(params: list[Parameter], *states: Any) -> str:
    """Return the sha256 of parameters and states, as a checkpoint has them."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "state")
        checkpoint.write(file, [{p.name: p.data for p in params}, *states], {})
        return hashlib.sha256(file.read_bytes()).hexdigest()


def exchange(pair: SocketPair, seed: int, steps: int) -> dict[str, Any]:
    """Train in each mode; return what the ledger has of it, and what was written to the socket."""
    found: dict[str, Any] = {"modes": {}}
    for mode, compressor in MODES.items():
        comm, params, written, messages = Metered(pair), parameters(seed), pair.written, pair.messages
        opt = DistOpt(SGD(0.1), comm, threshold=5000)
        for step in range(steps):
            opt.step(gradients(params, seed, step, pair.rank), compressor)
        found["modes"][mode] = {
            "report": comm.report(),
            "written": pair.written - written,
            "messages": pair.messages - messages,
        }
    pair.barrier()  # all that the other rank has written is here
    found |= {"written": pair.written, "received by the kernel": pair.received_by_kernel}
    pair.barrier()  # nobody has closed the connection yet, which counts as a byte
    return found


def kill() -> None:
    """End this process as the kernel does when memory is short: at once, and without a word."""
    os.kill(os.getpid(), signal.SIGKILL)


def killed(loss: Pairs) -> Pairs:
    """Yield one gradient, and end this process before the next one."""
    yield next(loss)
    kill()
    yield from loss


def train(comm: Communicator, folder: str, seed: int, steps: int, fatal: list[int]) -> dict[str, Any]:
    """Go on from the newest checkpoint of a folder, saving every 5 steps.

    Args:
        comm: the communicator.
        folder: of checkpoints.
        seed: of parameters and gradients.
        steps: of a run that is not stopped.
        fatal: the rank and the step in which it is killed; [] for none.

    Returns:
        The step it went on from, and the digest of this rank's parameters and states at the end.
    """
    params, compressor = parameters(seed), ErrorFeedback(TopK(0.05))
    opt = DistOpt(Adam(0.01), comm, threshold=5000)
    opt.load(folder, params)
    start = opt.step_counter
    for step in range(start, steps):
        loss = gradients(params, seed, step, comm.rank)
        opt.step(killed(loss) if fatal == [comm.rank, step] else loss, compressor)
        if (step + 1) % 5 == 0:
            opt.save(folder, params)
    return {"start": start, "digest": digest(params, opt.state_dict())}


def meet_nan(comm: Communicator, seed: int, rank: int, step: int) -> dict[str, Any]:
    """Train in each mode, with a NaN in a gradient of one rank in one step, and without that step.

    Args:
        comm: the communicator.
        seed: of parameters and gradients.
        rank: the rank that has the NaN.
        step: the step in which it has it.

    Returns:
        By policy and mode, what ``_updates`` returns with the NaN, and the digests without that step.
    """
    found = {}
    for nonfinite in ("skip", "raise"):
        for mode in MODES:
            met = _updates(comm, seed, nonfinite, mode, range(STEPS), step if comm.rank == rank else -1)
            expected = _updates(comm, seed, nonfinite, mode, [k for k in range(STEPS) if k != step], -1)
            found[f"{nonfinite!r}, {mode}"] = {"met": met, "expected": expected}
    return found


def _updates(
    comm: Communicator, seed: int, nonfinite: Any, mode: str, steps: Iterable[int], fatal: int
) -> dict[str, Any]:
    """Make these steps, with a NaN in one; return those that were refused, errors, and digests."""
    params, refused, errors = parameters(seed), [], []
    opt = DistOpt(Adam(0.01), comm, threshold=5000, nonfinite=nonfinite)
    for step in steps:
        loss = list(gradients(params, seed, step, comm.rank))
        if step == fatal:
            loss[1][1][3] = np.nan
        try:
            if not opt.step(loss, MODES[mode]):
                refused.append(step)
        except FloatingPointError as error:
            errors.append(str(error))
    return {
        "refused": refused,
        "errors": errors,
        "parameters": digest(params),
        "states": digest(params, opt.state_dict() | dict.fromkeys(REFUSALS, 0)),
    }


def fit(comm: Communicator, seed: int, parts: int) -> list[float]:
    """Fit a linear model in 30 dense steps, and return its weights.

    Args:
        comm: the communicator.
        seed: of the data.
        parts: of the batch, of which each rank has as many; its gradient is the mean of theirs.
    """
    rng = np.random.default_rng(seed)
    truth = rng.standard_normal((FEATURES, OUTPUTS)).astype(np.float32)
    w = Parameter("w", np.zeros((FEATURES, OUTPUTS), np.float32))
    opt = DistOpt(SGD(0.1, momentum=0.9), comm)
    for _ in range(30):
        x = rng.standard_normal((BATCH, FEATURES)).astype(np.float32)
        y = product(x, truth)
        own = [slices(BATCH, parts)[k] for k in range(parts)[slices(parts, comm.size)[comm.rank]]]
        each = [product(x[rows].T, product(x[rows], w.data) - y[rows]) / np.float32(len(x[rows])) for rows in own]
        opt([(w, sum(each[1:], start=each[0]) / np.float32(len(each)))])
    weights: list[float] = w.data.ravel().tolist()
    return weights


TASKS: dict[str, Callable[..., Any]] = {task.__name__: task for task in (exchange, train, meet_nan, fit)}


def world() -> Communicator:
    """Return the communicator of this process: of the socket that it was given, or of its launcher."""
    if SOCKET not in os.environ:
        return distopt.world()
    rank, descriptor, secret = os.environ[SOCKET].split()
    end = socket.socket(fileno=int(descriptor))
    return SocketPair(end, int(rank), SocketControl(bytes.fromhex(secret), int(rank), 2))


def main() -> None:
    """Do one task, and leave its result in the folder."""
    folder, task, arguments = sys.argv[1:]
    comm = world()
    result = TASKS[task](comm, *json.loads(arguments))
    Path(folder, f"rank-{comm.rank}").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
