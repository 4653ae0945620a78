"""What a reader must follow: ``python tests/project/house.py`` prints it, with the bounds that are in house.json.

* *Steps*: every call of a Python function on one of two ranks counts, numpy's and lambdas' too; files and classes are
  those of distopt in which such a call lands; depth is the frames below the user's own call.
* *Names*: the public names of what somebody implements.
* *Lines*: of distopt/, by package.

``--lower`` lowers bounds to what there is now; a higher one is written by hand, with its reason in the commit.
"""

import ast
import collections
import io
import json
import sys
import tempfile
import tokenize
from pathlib import Path

import numpy as np

import distopt
from distopt import DistOpt, LocalSteps, Parameter, run_ranks
from distopt.comm import Communicator
from distopt.comm.control import ControlChannel
from distopt.compress import Compressor, Dense, ErrorFeedback, Packed, TopK
from distopt.compress.shards import ShardCodec
from distopt.engine.hooks import StepHook
from distopt.optim import SGD
from distopt.optim.adapters import OptimizerAdapter

PACKAGE = Path(distopt.__file__).parent
BOUNDS = Path(__file__).with_name("house.json")
INTERFACES = Communicator, ControlChannel, Compressor, ShardCodec, OptimizerAdapter, StepHook
COLUMNS = "calls", "files", "classes", "depth"
WARM = 5  # steps before those that are counted
COUNTED = 40  # steps: of a dozen, some have none in which this thread came first to all meetings
TOP = ErrorFeedback(Packed(TopK(0.01)))


def counted(step):
    """The least of several steps: who comes last to a meeting of threads does what all have met for."""
    return _least([_counted(step) for _ in range(COUNTED)])


def _least(found):
    return {column: min(once[column] for once in found) for column in COLUMNS}


def _counted(step):
    """The calls, files, classes and depth of a step, on this thread."""
    found, files, classes, start = collections.Counter(), set(), set(), sys._getframe()

    def count(frame, event, _):
        if event != "call":
            return
        depth, above = 0, frame
        while above is not start:
            depth, above = depth + 1, above.f_back
        code = frame.f_code
        found["calls"] += 1
        if code.co_filename.startswith(str(PACKAGE)):
            files.add(code.co_filename)
            owner, _, method = code.co_qualname.partition(".")
            classes.update([owner] if method and not method.startswith("<locals>") else [])
            found["depth"] = max(found["depth"], depth - 1)  # the step itself is the user's

    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return dict(zip(COLUMNS, (found["calls"] - 1, len(files), len(classes), found["depth"]), strict=True))


def arrays(rank):
    """Three parameters, and this rank's gradients of them."""
    rng = np.random.default_rng(rank)
    return [
        (Parameter(f"p{k}", np.ones((30, 20), np.float32)), rng.standard_normal((30, 20), np.float32)) for k in "abc"
    ]


def of_dist_opt(compressor, **options):
    """Count a step of a DistOpt."""

    def count(comm):
        pairs, opt = arrays(comm.rank), DistOpt(SGD(0.1, momentum=0.9), comm)
        for _ in range(WARM):
            opt.step(pairs, compressor, **options)
        return counted(lambda: opt.step(pairs, compressor, **options))

    return count


def of_local_steps(comm):
    """Count a step after which nothing is exchanged."""
    pairs, opt = arrays(comm.rank), LocalSteps(SGD(0.1, momentum=0.9), comm, every=100)
    for _ in range(WARM):
        opt(pairs)
    return counted(lambda: opt(pairs))


def of_synchronize(comm):
    """Count the exchange at the end of a backward pass."""
    import torch

    import distopt.torch as dt

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 1, bias=False))
    dt.synchronize(model, group=comm)
    for _ in range(WARM):
        model(torch.randn(4, 20)).sum().backward()
    losses = iter([model(torch.randn(4, 20)).sum() for _ in range(COUNTED)])
    return counted(lambda: next(losses).backward())


STEPS = {
    "dense": of_dist_opt(Dense()),
    "packed top-K, gathered": of_dist_opt(TOP, exchange="gather", break_even=False),
    "packed top-K, two phases": of_dist_opt(TOP, exchange="two_phase", break_even=False),
    "an inner step of LocalSteps": of_local_steps,
}
WITH_TORCH = {"dt.synchronize, dense": of_synchronize}


def classes():
    """The modules in which a class of each name stands."""
    found = collections.defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(path.relative_to(PACKAGE)))
    return found


def names():
    """How many public names each interface has."""
    return {kind.__name__: {"names": sum(not name.startswith("_") for name in dir(kind))} for kind in INTERFACES}


def lines():
    """Lines of code, of docstrings and of comments, by package; of the modules beside them together."""
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        path, text = file.relative_to(PACKAGE), file.read_text()
        row = found.setdefault(path.parts[0] if len(path.parts) > 1 else "beside them", collections.Counter())
        docstrings = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
                docstrings.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
        code = set()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                row["comments"] += not token.line[: token.start[1]].strip()
            elif token.string.strip() and token.type != tokenize.ENDMARKER:
                code.update(range(token.start[0], token.end[0] + 1))
        row["code"] += len(code - docstrings)
        row["docstrings"] += sum(bool(text.splitlines()[n - 1].strip()) for n in docstrings)
    found["all"] = sum(found.values(), collections.Counter())
    return {name: {kind: row[kind] for kind in ("code", "docstrings", "comments")} for name, row in found.items()}


def measured(steps=STEPS):
    """What each step takes now on one of two threads that waits for the other one as little as may be."""
    return {name: _least(run_ranks(2, count)) for name, count in steps.items()}


def all_steps(comm):
    """What each step takes on a rank of a process."""
    return {name: np.array(list(count(comm).values())) for name, count in STEPS.items()}


def over_mpi():
    """What each step takes over MPI on the first of two ranks."""
    from launch import run_mpi

    with tempfile.TemporaryDirectory() as folder:
        found = run_mpi(2, all_steps, folder)[0]
    return {name: dict(zip(COLUMNS, map(int, counts), strict=True)) for name, counts in found.items()}


def bounds(part):
    """The bounds of "steps", "over MPI", "names" or "lines", by row and column."""
    return json.loads(BOUNDS.read_text())[part]


def above(now, most, slack=0):
    """Lines on what is more than ``slack`` above its bound, or has none; comments have none, as there may be more."""
    flat = [(row, column, n, most.get(row, {}).get(column, 0)) for row, f in now.items() for column, n in f.items()]
    return [f"{r}: {c} must be at most {m}, got {n}" for r, c, n, m in flat if n > m + slack and c != "comments"]


def table(now, most):
    """The rows of ``now``, each number with its bound."""
    rows = [["", *next(iter(now.values()))]]
    rows += [[row, *(f"{n} of {most.get(row, {}).get(c, 0)}" for c, n in found.items())] for row, found in now.items()]
    return "\n".join(f"{row:28}" + "".join(f"{cell:>18}" for cell in cells) for row, *cells in rows)


def main():
    """Print the tables, of steps on threads and over MPI; lower bounds if asked to."""
    all_bounds = json.loads(BOUNDS.read_text()) if BOUNDS.exists() else {}
    now = {"steps": measured(STEPS | WITH_TORCH), "over MPI": over_mpi(), "names": names(), "lines": lines()}
    for part, rows in now.items():
        known = all_bounds.setdefault(part, {})
        print(f"{part}\n{table(rows, known)}\n")
        for row, found in rows.items() if "--lower" in sys.argv else ():
            there = known.setdefault(row, {})
            there.update({c: min(n, there.get(c, n)) for c, n in found.items() if c != "comments"})
    if "--lower" in sys.argv:
        BOUNDS.write_text(json.dumps(all_bounds, indent=1) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import house  # by its name, as the processes of MPI import it

    house.main()
