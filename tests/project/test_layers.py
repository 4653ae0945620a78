"""Imports only go down, and siblings do not know each other."""

import graphlib

import drawing
import layers
from layers import HEAVY, LEVEL, PACKAGE, ROWS, arrows, module_name, owner, sources

from distopt.kernels.signatures import NATIVE

# Imports that go up, inside functions that most programs never call: opt.advise, opt.observe, and for distopt record;
# and for what is torch's, as a tensor, a model, an optimizer.
LATE = {(path, "distopt.lab") for path in ("singa.py", "local_steps.py", "engine/facade.py")} | {
    (path, "distopt.torch") for path in ("device/kinds.py", "engine/facade.py", "optim/adapters/__init__.py")
}


def test_there_are_twenty_four_entries_in_ten_layers():
    entries = {owner(f.relative_to(PACKAGE)) for f in PACKAGE.rglob("*.py")}
    assert entries == set(LEVEL)
    assert len(entries - {"__init__"}) == 24
    assert len(ROWS) == 10


def goes_up(path, own, other, module):
    """Is it one of the imports that may?"""
    if own == "kernels" and other == "__init__":
        return True  # looks for the library beside the package, when it is first called
    programs = ("cli", "lab", "run")  # use distopt as a script does
    return (own in programs and other == "__init__") or (path, module) in LATE or (path, f"distopt.{other}") in LATE


def test_imports_only_go_down():
    for path, own, other, module, name in arrows():
        assert LEVEL[other] < LEVEL[own] or goes_up(path, own, other, module), f"{path} imports {module}.{name}"


def test_the_table_of_the_layers_is_true():
    assert layers.table() in drawing.PAGE.read_text(), f"{drawing.PAGE} must have this table:\n{layers.table()}"


def test_the_drawing_of_the_layers_is_true():
    assert drawing.svg() == drawing.FILE.read_text(), "the layers have changed: python tests/project/drawing.py"


def test_the_allowed_upward_imports_are_still_needed():
    up = {(path, f"distopt.{other}") for path, own, other, *_ in arrows() if LEVEL[other] > LEVEL[own]}
    assert {late for late in up if late[0].split("/")[0] not in ("cli", "lab", "run", "kernels")} == LATE


def test_there_are_no_import_cycles():
    """Within a package too; its modules do not import the package itself."""
    files = {module_name(file): source for file, source in sources().items()}
    graph = {
        name: {f"{m}.{n}" if f"{m}.{n}" in files else m for m, n in source.imports + source.for_types}
        for name, source in files.items()
        if name != "distopt.kernels.signatures"  # as above
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_heavy_packages_stay_in_the_one_file_that_needs_them():
    for file, source in sources().items():
        path = str(file.relative_to(PACKAGE))
        for module, _ in source.imports + source.for_types:
            for heavy, homes in HEAVY.items():
                assert module.split(".")[0] != heavy or path in homes, f"{path} imports {module}"


def test_cupys_runtime_has_one_owner():
    """What is enqueued, and in which stream, is for device/ alone to say; and of torch's streams for one file."""
    for file, source in sources().items():
        if PACKAGE / "device" not in file.parents and file != PACKAGE / "torch" / "tensors.py":
            assert not {"cuda", "runtime"} & source.attributes, file


def test_collectives_have_one_owner():
    """No bare MPI call outside the two files: every message belongs to a communicator, and so to a vote."""
    bare = {"Allreduce", "Iallreduce", "Bcast", "Allgather", "Isend", "COMM_WORLD"}
    for file, source in sources().items():
        if file.name not in ("mpi.py", "mpi_control.py", "mpi_start.py"):
            assert not bare & source.attributes, file


def test_kernel_texts_know_no_compiler():
    """But for topk_device.cu, which is a device's way alone; sums in a fixed order are float64 for every dtype."""
    norms = ("reduce.cu", "dgc.cu", "lars.cu", "lamb.cu", "lans.cu", "lbsgd.cu", "muon.cu", "exact.cu")
    exempt = {("topk_device.cu", "blockIdx"), *((text, "double *") for text in norms)}
    for text in NATIVE.glob("*.cu"):
        for word in ("__CUDACC__", "blockIdx", "__global__", "#ifdef", "float ", "double *"):
            assert word not in text.read_text() or (text.name, word) in exempt, f"{text.name} says {word}"
