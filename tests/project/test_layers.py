"""Imports only go down, and siblings do not know each other."""

import ast
import functools
import graphlib
from pathlib import Path

import distopt
from distopt.kernels.signatures import NATIVE

ROWS = [  # from the ground up
    "checks formatting version device resilience",
    "kernels",
    "buckets comm compress checkpoint",
    "exchange optim",
    "engine",
    "dist_opt local_steps trainer torch",
    "volume",
    "__init__ cli",  # of which the second may ask the first
]
HEAVY = {
    "cupy": {"device/gpus.py", "comm/nccl_library.py"},
    "mpi4py": {
        *("comm/mpi.py", "comm/mpi_control.py", "comm/mpi_losses.py", "comm/mpi_newcomers.py", "comm/mpi_start.py"),
        *("cli/launcher.py", "resilience/rank.py"),
    },
    "torch": {
        *("comm/process_group.py", "comm/gloo.py", "comm/epoch_ranks.py", "device/tensors.py", "engine/torch_model.py"),
        *("torch/exchange.py", "torch/local_steps.py", "torch/state.py", "torch/synchronize.py"),
    },
    "matplotlib": {"cli/plotting.py"},
}
LEVEL = {name: row for row, names in enumerate(ROWS) for name in names.split()}
# Imports that go up, inside functions that most programs never call: opt.advise, opt.observe, and for distopt record.
LATE = {(path, "distopt.volume") for path in ("dist_opt.py", "local_steps.py", "engine/facade.py")}
UP = {path for path, _ in LATE}
PACKAGE = Path(distopt.__file__).parent


@functools.cache
def trees():
    """The syntax tree of each file of the package."""
    return {file: ast.parse(file.read_text()) for file in PACKAGE.rglob("*.py")}


@functools.cache
def attributes(file):
    """The names that a file takes of something, as ``x.name``."""
    return {node.attr for node in ast.walk(trees()[file]) if isinstance(node, ast.Attribute)}


def imports(tree):
    """(module, name) of every import in a tree, those inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)


def place(module, name):
    """The entry of this package that an import enters, None for other packages."""
    parts = [*module.split("."), name]
    return None if parts[0] != "distopt" else parts[1] if parts[1] in LEVEL else "__init__"


def owner(path):
    """The entry that a file belongs to."""
    entry = path.with_suffix("").parts[0]
    return "cli" if entry == "__main__" else entry


def without_typing(tree):
    """The tree without the imports that only a type checker reads."""
    body = [n for n in tree.body if not (isinstance(n, ast.If) and getattr(n.test, "id", "") == "TYPE_CHECKING")]
    return ast.Module(body, [])


def test_there_are_nineteen_entries_in_eight_layers():
    entries = {f.relative_to(PACKAGE).parts[0].removesuffix(".py") for f in PACKAGE.rglob("*.py")} - {"__main__"}
    assert entries == set(LEVEL)
    assert len(entries - {"__init__"}) == 19
    assert len(ROWS) == 8


@functools.cache
def arrows():
    """(file, entry, imported entry, module, name) of every import of another entry."""
    return list(_arrows())


def _arrows():
    for file, tree in trees().items():
        path = file.relative_to(PACKAGE)
        own = owner(path)
        for module, name in imports(without_typing(tree)):
            other = place(module or "", name)
            if other not in (None, own):
                yield str(path), own, other, module, name


def goes_up(path, own, other, module):
    """Is it one of the imports that may?"""
    if own == "kernels" and other == "__init__":
        return True  # looks for the library beside the package, when it is first called
    return (own, other) == ("cli", "__init__") or (path, module) in LATE or (path, f"distopt.{other}") in LATE


def test_imports_only_go_down():
    for path, own, other, module, name in arrows():
        assert LEVEL[other] < LEVEL[own] or goes_up(path, own, other, module), f"{path} imports {module}.{name}"


def drawing():
    """The layers from the top, each package with those that it imports, as docs/architecture.md shows them."""
    below = {
        name: {other for _, own, other, *_ in arrows() if own == name and LEVEL[other] < LEVEL[name]} for name in LEVEL
    }
    lines = ["layer  package      imports"]
    for level in reversed(range(len(ROWS))):
        for name in ROWS[level].split():
            imported = " ".join(sorted(below[name], key=lambda other: (-LEVEL[other], other)))
            lines.append(f"{level + 1:5}  {name:12} {imported}".rstrip())
    return "\n".join(lines)


def test_the_drawing_of_the_layers_is_true():
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    assert drawing() in page, f"docs/architecture.md must have this drawing:\n{drawing()}"


def test_the_allowed_upward_imports_are_still_needed():
    assert {(path, f"distopt.{other}") for path, _, other, *_ in arrows() if other == "volume" and path in UP} == LATE


def module_name(file):
    """A package's ``__init__`` has the package's."""
    return ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def test_there_are_no_import_cycles():
    """Within a package too; its modules do not import the package itself."""
    files = {module_name(file): tree for file, tree in trees().items()}
    graph = {
        name: {f"{m}.{n}" if f"{m}.{n}" in files else m for m, n in imports(tree)}
        for name, tree in files.items()
        if name != "distopt.kernels.signatures"  # as above
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_heavy_packages_stay_in_the_one_file_that_needs_them():
    for file, tree in trees().items():
        path = str(file.relative_to(PACKAGE))
        for module, _ in imports(tree):
            for heavy, homes in HEAVY.items():
                assert (module or "").split(".")[0] != heavy or path in homes, f"{path} imports {module}"


def test_cupys_runtime_has_one_owner():
    """What is enqueued, and in which stream, is for device/ alone to say."""
    for file in trees():
        if PACKAGE / "device" not in file.parents:
            assert not {"cuda", "runtime"} & attributes(file), file


def test_collectives_have_one_owner():
    """No bare MPI call outside the two files: every message belongs to a communicator, and so to a vote."""
    bare = {"Allreduce", "Iallreduce", "Bcast", "Allgather", "Isend", "COMM_WORLD"}
    for file in trees():
        if file.name not in ("mpi.py", "mpi_control.py", "mpi_start.py"):
            assert not bare & attributes(file), file


def test_kernel_texts_know_no_compiler():
    """But for topk_device.cu, which is a device's way alone; sums in a fixed order are float64 for every dtype."""
    norms = ("reduce.cu", "dgc.cu", "lars.cu", "lamb.cu", "lans.cu", "lbsgd.cu", "muon.cu")
    exempt = {("topk_device.cu", "blockIdx"), *((text, "double *") for text in norms)}
    for text in NATIVE.glob("*.cu"):
        for word in ("__CUDACC__", "blockIdx", "__global__", "#ifdef", "float ", "double *"):
            assert word not in text.read_text() or (text.name, word) in exempt, f"{text.name} says {word}"
