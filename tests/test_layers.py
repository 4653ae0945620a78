"""Imports only go down, and siblings do not know each other."""

import ast
import graphlib
from pathlib import Path

import distopt
from distopt.texts import NATIVE

ROWS = [  # from the ground up
    "files",
    "texts device version names numbers rank signals models plain",
    "tables monitor watch job",
    "kernels cost guard checkpoint",
    "units",
    "ledger",
    "buckets compress optim comm gradients nonfinite freshness experiment",
    "exchange adapters gluon tape fit",
    "verbs volume",
    "memory",
    "conditions",
    "loop",
    "uneven capture",
    "saving",
    "dist_opt trainer",
    "virtual_ranks",
    "__init__",
    "cli",
    "__main__",
]
LEVEL = {name: row for row, names in enumerate(ROWS) for name in names.split()}
HEAVY = {
    "cupy": {"device/gpus.py", "comm/nccl_library.py"},
    "mpi4py": {"comm/mpi.py", "comm/mpi_control.py", "comm/mpi_start.py", "cli/launcher.py"},
    "torch": set(),
    "matplotlib": {"cli/picture.py"},
}
PACKAGE = Path(distopt.__file__).parent


def imports(tree):
    """(module, name) of every import in a tree, those inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)


def room(module, name):
    """The room of this package that an import enters, None for other packages."""
    parts = [*module.split("."), name]
    return None if parts[0] != "distopt" else parts[1] if parts[1] in LEVEL else "__init__"


def test_every_file_has_a_room():
    rooms = {f.relative_to(PACKAGE).parts[0].removesuffix(".py") for f in PACKAGE.rglob("*.py")}
    assert rooms == set(LEVEL)


def test_imports_only_go_down():
    for file in PACKAGE.rglob("*.py"):
        path = file.relative_to(PACKAGE)
        own = path.parts[0].removesuffix(".py")
        for module, name in imports(ast.parse(file.read_text())):
            other = room(module or "", name)
            if own == "texts" and other == "__init__":
                continue  # looks for the library beside the package, when it is first called
            assert other is None or other == own or LEVEL[other] < LEVEL[own], f"{path} imports {module}.{name}"


def module_name(file):
    """A package's ``__init__`` has the package's."""
    return ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def test_no_file_imports_itself_in_the_end():
    """Within a room too; and what a package is made of does not ask the package."""
    files = {module_name(file): file for file in PACKAGE.rglob("*.py")}
    graph = {
        name: {f"{m}.{n}" if f"{m}.{n}" in files else m for m, n in imports(ast.parse(file.read_text()))}
        for name, file in files.items()
        if name != "distopt.texts"  # as above
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_heavy_packages_stay_in_the_one_file_that_needs_them():
    for file in PACKAGE.rglob("*.py"):
        path = str(file.relative_to(PACKAGE))
        for module, _ in imports(ast.parse(file.read_text())):
            for heavy, homes in HEAVY.items():
                assert (module or "").split(".")[0] != heavy or path in homes, f"{path} imports {module}"


def test_cupys_runtime_has_one_owner():
    """What is enqueued, and in which stream, is for device/ alone to say."""
    for file in PACKAGE.rglob("*.py"):
        if PACKAGE / "device" not in file.parents:
            calls = {n.attr for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Attribute)}
            assert not {"cuda", "runtime"} & calls, file


def test_collectives_have_one_owner():
    """No bare MPI call outside the two files: every message belongs to a communicator, and so to a vote."""
    for file in PACKAGE.rglob("*.py"):
        if file.name not in ("mpi.py", "mpi_control.py", "mpi_start.py"):
            calls = [n.attr for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Attribute)]
            assert not {"Allreduce", "Iallreduce", "Bcast", "Allgather", "Isend", "COMM_WORLD"} & set(calls), file


def test_kernel_texts_know_no_compiler():
    """But for sift.cu, which is a device's way alone; sums in a fixed order are float64 for every dtype."""
    norms = ("reduce.cu", "dgc.cu", "lars.cu", "lamb.cu", "lans.cu", "lbsgd.cu")
    exempt = {("sift.cu", "blockIdx"), *((text, "double *") for text in norms)}
    for text in NATIVE.glob("*.cu"):
        for word in ("__CUDACC__", "blockIdx", "__global__", "#ifdef", "float ", "double *"):
            assert word not in text.read_text() or (text.name, word) in exempt, f"{text.name} says {word}"
