"""The layers of distopt and what imports what, read from the code: for the tests, and for the drawing of them."""

import ast
import functools
from pathlib import Path
from typing import NamedTuple

import distopt

ROWS = {  # from the ground up
    "ground": "checks formatting version io",
    "machine and job": "device resilience",
    "maths and files": "kernels checkpoint",
    "parts": "buckets comm compress",
    "exchange and update": "exchange optim",
    "the step": "engine",
    "SINGA's methods": "singa",
    "facades, launcher": "data dist_opt local_steps trainer torch jax run",
    "laboratory": "lab",
    "start": "__init__ cli",  # of which the second may ask the first
}
HEAVY = {
    "cupy": {"device/gpus.py", "comm/nccl_library.py"},
    "mpi4py": {
        *("comm/mpi.py", "comm/mpi_control.py", "comm/mpi_losses.py", "comm/mpi_joiners.py", "comm/mpi_start.py"),
        *("run/launcher.py", "resilience/rank.py"),
    },
    "torch": {
        *("comm/process_group.py", "comm/gloo.py", "comm/epoch_ranks.py", "torch/ddp.py", "torch/exchange.py"),
        *("torch/local_steps.py", "torch/model.py", "torch/rank_buffers.py", "torch/rank_passes.py", "torch/state.py"),
        *("torch/sparse.py", "torch/synchronize.py", "torch/tensors.py"),
        *("torch/integrations/__init__.py", "torch/integrations/accelerate.py"),
    },
    "jax": {"jax/trees.py", "optim/adapters/optax.py"},
    **{name: {f"torch/integrations/{name}.py"} for name in ("accelerate", "lightning", "transformers")},
    "matplotlib": {"lab/commands/plotting.py"},
}
DOORS = {"cost", "experiment", "fit", "monitor", "volume"}  # public names of modules of lab/, as __init__ has others
LEVEL = {name: row for row, names in enumerate(ROWS.values()) for name in names.split()}
PACKAGE = Path(distopt.__file__).parent


class Source(NamedTuple):
    """What a file takes from elsewhere."""

    imports: list[tuple[str, str]]  # (module, name), inside functions too
    for_types: list[tuple[str, str]]  # those that only a type checker reads
    attributes: set[str]  # the names that it takes of something, as ``x.name``


@functools.cache
def sources():
    """Each file of the package; its syntax tree is let go, as all of them are half a million objects."""
    return {file: _source(ast.parse(file.read_text())) for file in PACKAGE.rglob("*.py")}


def _source(tree):
    found = Source([], [], set())
    for statement in tree.body:
        typing = isinstance(statement, ast.If) and getattr(statement.test, "id", "") == "TYPE_CHECKING"
        imports = found.for_types if typing else found.imports
        for node in ast.walk(statement):
            if isinstance(node, ast.ImportFrom):
                imports += [(node.module or "", alias.name) for alias in node.names]
            elif isinstance(node, ast.Import):
                imports += [(alias.name, "") for alias in node.names]
            elif isinstance(node, ast.Attribute):
                found.attributes.add(node.attr)
    return found


def module_name(file):
    """A package's ``__init__`` has the package's."""
    return ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def place(module, name):
    """The entry of this package that an import enters, None for other packages."""
    parts = [*module.split("."), name]
    return None if parts[0] != "distopt" else parts[1] if parts[1] in LEVEL else "__init__"


def owner(path):
    """The entry that a file belongs to."""
    entry = path.with_suffix("").parts[0]
    return "cli" if entry == "__main__" else "__init__" if entry in DOORS else entry


@functools.cache
def arrows():
    """(file, entry, imported entry, module, name) of every import of another entry, but for those of types."""
    found = []
    for file, source in sources().items():
        path = file.relative_to(PACKAGE)
        own = owner(path)
        for module, name in source.imports:
            other = place(module, name)
            if other not in (None, own):
                found.append((str(path), own, other, module, name))
    return found


@functools.cache
def below():
    """The entries of lower layers that each entry imports."""
    return {
        name: {other for _, own, other, *_ in arrows() if own == name and LEVEL[other] < LEVEL[name]} for name in LEVEL
    }


def table():
    """The layers from the top, each package with those that it imports, as docs/concepts/architecture.md shows them."""
    lines = ["layer  package      imports"]
    for name in sorted(LEVEL, key=LEVEL.get, reverse=True):
        imported = " ".join(sorted(below()[name], key=lambda other: (-LEVEL[other], other)))
        lines.append(f"{LEVEL[name] + 1:5}  {name:12} {imported}".rstrip())
    return "\n".join(lines)
