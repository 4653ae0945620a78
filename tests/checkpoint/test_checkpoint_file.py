"""A checkpoint's file: it is read back to the bit or refused, whatever has happened to it."""

import json
import math
import os
import pickle
import random
import signal
import struct
import sys
import tracemalloc
import zlib

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distopt import checkpoint
from distopt.checkpoint import CheckpointError, Tensor, head
from distopt.checkpoint.error import DAMAGED
from distopt.cli import main
from launch import finish

DTYPES = [np.dtype(c) for c in "? i1 i2 i4 i8 u1 u2 u4 u8 f2 f4 f8".split()] + [np.dtype(ml_dtypes.bfloat16)]
NASTY = ["", "/", "//", "~", "~1", "__metadata__", "a/b", "a", "b", "0", "\0", "\x1b[0m", '"', "\\", "é", "\U0001f600"]
ABOUT = {"world": 2, "rank": 0, "step": 7}
SMALL = {
    "w": np.arange(6, dtype="f4").reshape(2, 3),
    "h": np.float16(0.5),
    "k": [True, None, -0.0, "x", np.ones((0, 2))],
}
EXTRA = 64 << 20  # bytes that reading may take beyond the file's own


def bits(x):
    """What equals only what has the same types and bits."""
    if isinstance(x, np.ndarray | np.generic):
        return type(x).__name__, str(x.dtype), x.shape, x.tobytes()
    if isinstance(x, dict):
        return [(key, bits(value)) for key, value in x.items()]
    if isinstance(x, list | tuple):
        return type(x).__name__, [bits(value) for value in x]
    return type(x).__name__, struct.pack("<d", x) if isinstance(x, float) else x


# ------------------------------------------------------------------------------------------------- what comes out


@st.composite
def arrays(draw):
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(st.lists(st.integers(0, 3), max_size=3))
    count = math.prod(shape) * dtype.itemsize
    data = bytearray(draw(st.binary(min_size=count, max_size=count)))  # every NaN there is
    if dtype.kind == "b":
        data = bytearray(byte & 1 for byte in data)
    x = np.frombuffer(data, dtype).reshape(shape)
    return draw(st.sampled_from([x, x.T, x[..., ::-1] if shape else x[()]]))


floats = st.one_of(st.floats(), st.binary(min_size=8, max_size=8).map(lambda b: struct.unpack("<d", b)[0]))
leaves = st.one_of(
    arrays(), floats, st.none(), st.booleans(), st.integers(), st.integers(-(2**200), 2**200), st.text(), st.binary()
)
keys = st.one_of(st.sampled_from(NASTY), st.text(max_size=5))
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.lists(inner, max_size=4).map(tuple), st.dictionaries(keys, inner, max_size=5)
    ),
    max_leaves=12,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("trees")


@given(tree=trees)
def test_a_written_tree_is_read_back_to_the_bit(tree, folder):
    checkpoint.write(folder / "x", tree, ABOUT)
    assert bits(checkpoint.read(folder / "x")) == bits((tree, ABOUT))
    assert all(whole for _, whole in checkpoint.check(folder / "x"))


@pytest.mark.parametrize(
    "tree",
    [
        {key: {other: np.float32(k) for k, other in enumerate(NASTY)} for key in NASTY},
        {"a/b": np.ones(1), "a": {"b": np.zeros(2), "": [np.ones(3)]}, "": np.ones(4), "__metadata__": np.ones(5)},
        [10**5000, -(2**127), 2**53, -(2**53), 2**53 - 1, math.inf, -math.inf, 5e-324, -0.0, 1e308],
        np.random.default_rng(0).bit_generator.state,
        np.arange(3),
        {"big": np.arange(1 << 19, dtype="f8"), "long int": np.zeros(3, np.longlong)},
        {},
    ],
    ids=["nasty", "collisions", "numbers", "generator", "bare", "chunks", "empty"],
)
def test_special_values_are_read_back_to_the_bit(tree, tmp_path):
    checkpoint.write(tmp_path / "x", tree, {})
    assert bits(checkpoint.read(tmp_path / "x")) == bits((tree, {}))


def test_arrays_read_from_a_file_are_copies(tmp_path):
    checkpoint.write(tmp_path / "x", SMALL, ABOUT)
    one, other = checkpoint.read(tmp_path / "x")[0], checkpoint.read(tmp_path / "x")[0]
    one["w"][:] = 9
    assert bits(other) == bits(SMALL)


def loop():
    inner = []
    inner.append(inner)
    return inner


@pytest.mark.parametrize(
    ("tree", "kind", "text"),
    [
        ({"a": [1, {2}]}, TypeError, "/a/1: neither a checkpoint nor a message holds set"),
        (
            {"a/b": np.array([None])},
            TypeError,
            r"/a~1b: neither a checkpoint nor a message holds an array of dtype\('O'\)",
        ),
        ({"a": np.ones(2, ">f4")}, TypeError, "/a: .*>f4"),
        (np.ones(2, "c8"), TypeError, "the tree: .*complex64"),
        ({"a": np.ma.ones(2)}, TypeError, "/a: .*MaskedArray"),
        ({"a": np.longdouble(1)}, TypeError, "/a: "),
        ({"a": np.str_("x")}, TypeError, "/a: "),
        ({"a": {1.0: 2}}, TypeError, "/a: a key must be str or int, got float"),
        ({"a": {True: 2}}, TypeError, "/a: a key must be str or int, got bool"),
        (
            {"a": {1: 2, "1": 3}},
            CheckpointError,
            "/a: must have a name of its own for each key, got two alike, as 1 and '1' are",
        ),
        ({"a": signal.SIGTERM}, TypeError, "/a: neither a checkpoint nor a message holds signal.Signals"),
        ({"a": 1j}, TypeError, "/a: neither a checkpoint nor a message holds complex"),
        ({"a": "\ud800"}, CheckpointError, r"/a: must be Unicode, got '\\ud800'"),
        ({"\ud800": 1}, CheckpointError, "the tree: must be Unicode"),
        ({"a": loop()}, CheckpointError, "must be nested at most 64 deep"),
        ({"k" * 5000: 1}, CheckpointError, "must have keys of at most 2000 characters"),
        ({"a": [0] * 200_000}, CheckpointError, "at most 14[0-9]* values"),
        ({"a": "x" * 9_000_000}, CheckpointError, "put what is large into arrays"),
    ],
)
def test_values_that_are_no_tree_are_refused_before_anything_is_written(tree, kind, text, tmp_path):
    with pytest.raises(kind, match=text):
        checkpoint.prepare(tmp_path / "x", tree, ABOUT)
    assert not list(tmp_path.iterdir())


def test_about_is_a_dict_of_plain_values(tmp_path):
    with pytest.raises(TypeError, match="about/step: about must be a dict without numpy's arrays and scalars"):
        checkpoint.prepare(tmp_path / "x", {}, {"step": np.int64(3)})
    with pytest.raises(TypeError, match="about must be a dict"):
        checkpoint.prepare(tmp_path / "x", {}, [1])
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------- the format


def safetensors(data):
    """{name: (dtype, shape, bytes)} and the metadata, by safetensors' text alone."""
    (length,) = struct.unpack("<Q", data[:8])
    text, rest = data[8 : 8 + length], data[8 + length :]
    assert text.startswith(b"{")
    entries = json.loads(text)
    metadata = entries.pop("__metadata__")
    assert all(type(key) is type(value) is str for key, value in metadata.items())
    found, end = {}, 0
    for name, entry in entries.items():
        assert set(entry) == {"dtype", "shape", "data_offsets"}
        first, last = entry["data_offsets"]
        assert first == end, "no holes"
        end = last
        found[name] = entry["dtype"], entry["shape"], rest[first:last]
    assert end == len(rest)
    return found, metadata


def test_the_layout_is_that_of_safetensors(tmp_path):
    tree = {
        "a": {"b": np.array([1, -2], "i2")},
        "a/b": np.array(True),
        "c": [np.array([[1.5]]), np.zeros((2, 0), "u1")],
    }
    pending = checkpoint.prepare(tmp_path / "x", tree | {"h": ml_dtypes.bfloat16(1)}, ABOUT)
    pending.commit()
    data = (tmp_path / "x").read_bytes()
    tensors, metadata = safetensors(data)
    assert tensors == {
        "/c/0": ("F64", [1, 1], b"\0\0\0\0\0\0\xf8\x3f"),
        "/a/b": ("I16", [2], b"\1\0\xfe\xff"),
        "/h": ("BF16", [], b"\x80\x3f"),
        "/a~1b": ("BOOL", [], b"\1"),
        "/c/1": ("U8", [2, 0], b""),
    }
    assert next(iter(tensors)) == "/c/0", "large items first, so that all are aligned"
    assert int.from_bytes(data[:8], "little") % 8 == 0
    assert (metadata["format"], metadata["version"]) == ("distopt checkpoint", "2")
    assert json.loads(metadata["about"]) == ABOUT
    assert json.loads(metadata["tree"])["c"] == ["list", ["array"], ["array"]]
    assert metadata["crc32"] == "".join(f"{zlib.crc32(raw):08x}" for _, _, raw in tensors.values())
    assert (pending.nbytes, pending.digest) == (len(data), metadata["seal"])
    found = checkpoint.header(tmp_path / "x")
    assert (found.about, found.digest, found.nbytes) == (ABOUT, pending.digest, pending.nbytes)
    assert found.tree["a/b"] == Tensor("/a~1b", np.dtype(bool), (), 14, 15, zlib.crc32(b"\1"))


def test_the_digest_depends_on_arrays_names_and_about(tmp_path):
    digests = set()
    for tree, about in (({"a": np.zeros(9)}, {}), ({"a": np.ones(9)}, {}), ({"b": np.ones(9)}, {}), ({}, {"step": 1})):
        pending = checkpoint.prepare(tmp_path / "x", tree, about)
        digests.add(pending.digest)
        pending.discard()
    assert len(digests) == 4


def test_writing_and_reading_hold_no_second_copy_in_memory(tmp_path):
    """Of arrays that are not contiguous there is one copy at a time."""
    tree = {str(k): np.ones((512, 512)).T for k in range(16)}
    size = sum(x.nbytes for x in tree.values())
    tracemalloc.start()
    try:
        checkpoint.write(tmp_path / "x", tree, {})
        assert tracemalloc.get_traced_memory()[1] < size / 8
        tracemalloc.reset_peak()
        read = checkpoint.read(tmp_path / "x")
        assert tracemalloc.get_traced_memory()[1] < size * 9 / 8
    finally:
        tracemalloc.stop()
    assert bits(read[0]) == bits(tree)


# ------------------------------------------------------------------------------------------------- what is refused


@pytest.fixture
def small(tmp_path):
    checkpoint.write(tmp_path / "x", SMALL, ABOUT)
    return tmp_path / "x"


def outcome(path):
    """What is read, or the error."""
    try:
        return checkpoint.read(path)
    except CheckpointError as error:
        return error


def refused(path):
    """The error with which a file is refused, None if it is read as it was written."""
    result = outcome(path)
    if isinstance(result, CheckpointError):
        return result
    assert bits(result) == bits((SMALL, ABOUT)), "neither refused nor what was written"
    return None


def test_every_flipped_bit_is_found(small):
    data = small.read_bytes()
    with open(small, "r+b", buffering=0) as file:
        for place in range(len(data)):
            for bit in range(8):
                os.pwrite(file.fileno(), bytes([data[place] ^ 1 << bit]), place)
                assert refused(small), f"byte {place}, bit {bit}"
            os.pwrite(file.fileno(), data[place : place + 1], place)
    assert not refused(small)


def test_every_truncation_is_found(small):
    data = small.read_bytes()
    for length in range(len(data)):
        small.write_bytes(data[:length])
        assert refused(small), length
    small.write_bytes(data + b"\0")
    assert refused(small).field == "data"


def sealed(text, data=b""):
    """A file that somebody made on purpose: the seal is right."""
    made = bytearray(struct.pack("<Q", len(text)) + text)
    made[head.SEAL] = head.seal(made).encode()
    return bytes(made) + data


def taken_apart(data):
    """A file's header, as JSON, and its data."""
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def text_of(entries):
    return json.dumps(entries, separators=(",", ":")).encode()


def noise(data, chance):
    """A file with a few bytes changed, left out, doubled or put in."""
    data = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        place, length = chance.randrange(len(data)), chance.randint(1, 9)
        piece = data[place : place + length]
        data[place : place + length] = chance.choice([b"", piece * 2, chance.randbytes(length), piece[::-1]])
    return bytes(data)


NUMBERS = [-1, 0, 1, 2, 3, 7, 24, 2**31, 2**46, 2**63, 2**64, 2**200, 10**19, 1.5, 1e308, True, None, "1", [], {}]
NUMBERS += [math.nan, math.inf]


def lie(data, chance):
    """A file with a header that says something else, sealed; sometimes by hand, in a way that JSON libraries do not."""
    entries, raw = taken_apart(data)
    metadata = entries["__metadata__"]
    name = chance.choice([n for n in entries if n != "__metadata__"])
    entry, number = entries[name], chance.choice(NUMBERS)
    match chance.randrange(10):
        case 0:
            entry["data_offsets"][chance.randrange(2)] = number
        case 1:
            entry["shape"] = [number] * chance.randrange(70)
        case 2:
            entry[chance.choice(list(entry))] = number
        case 3:
            entry["dtype"] = chance.choice([*head.DTYPES, "F8_E4M3", "C64", "O", ""])
        case 4:
            metadata[chance.choice(list(metadata)[1:])] = chance.choice(
                [number, "", "[" * 5000, "{}", "[]", "1", "[[]]"]
            )
        case 5:
            entries[chance.choice(["", "/w", "/a", "__metadata__"])] = entries.pop(name)
        case 6:
            del metadata[chance.choice(list(metadata)[1:])]
        case 7:
            text = text_of(entries)
            return sealed(text[:60] + noise(text[60:], chance), raw)
        case 8:
            text = text_of(entries)
            return sealed(
                text[:-1] + chance.choice([b"," + text[1:], b"}}", b'"', b',"a":' + b"[" * 9999, b"\xff}"]), raw
            )
        case 9:
            metadata["tree"] = noise(metadata["tree"].encode(), chance).decode(errors="replace")
    return sealed(text_of(entries), raw)


@pytest.mark.thorough
def test_a_thousand_mutated_files_are_refused_or_harmless(small):
    """Noise is refused or harmless; a lie on purpose is refused or a tree; neither takes memory."""
    data, chance = small.read_bytes(), random.Random(20)
    outcomes = []
    tracemalloc.start()
    try:
        for _ in range(500):
            small.write_bytes(noise(data, chance))
            outcomes.append(refused(small))
        for _ in range(500):
            small.write_bytes(lie(data, chance))
            outcomes.append(outcome(small))
        assert tracemalloc.get_traced_memory()[1] < EXTRA / 8
    finally:
        tracemalloc.stop()
    errors = [error for error in outcomes if isinstance(error, CheckpointError)]
    assert len(errors) > 900
    assert len({error.reason for error in errors}) > 25, "they are refused for many reasons"
    assert all(str(error).isprintable() for error in errors)


def changed(change):
    def make(data):
        entries, raw = taken_apart(data)
        return sealed(text_of(change(entries, entries["__metadata__"]) or entries), raw)

    return make


def tensor(**fields):
    return changed(lambda entries, _: entries["/w"].update(fields))


def said(**fields):
    return changed(lambda _, metadata: metadata.update(fields))


def twice(data):
    entries, raw = taken_apart(data)
    return sealed(text_of(entries)[:-1] + b',"/w":' + text_of(entries["/w"]) + b"}", raw)


def escaped(data):
    """The tree's commas are none in the header's text."""
    entries, raw = taken_apart(data)
    entries["__metadata__"]["tree"] = "[" + "0;" * 200_000 + "0]"
    return sealed(text_of(entries).replace(b"0;", b"0\\u002c"), raw)


LIES = {
    "64 TiB": (tensor(shape=[2**44], data_offsets=[0, 2**46]), "must lie in 0:"),
    "64 TiB in 24 bytes": (tensor(shape=[2**44]), "must have the bytes of its shape and dtype"),
    "a product that wraps": (tensor(shape=[2**32, 2**32, 2**32]), "must have the bytes of its shape and dtype"),
    "negative": (tensor(shape=[-2, -3]), "shape"),
    "65 dimensions": (tensor(shape=[1] * 64 + [6]), "shape"),
    "NaN": (tensor(shape=[math.nan]), "NaN is no number"),
    "a long number": (tensor(shape=[10**400]), "is no number"),
    "a dtype of others": (tensor(dtype="F8_E4M3"), "must have a dtype of .*, got 'F8_E4M3'"),
    "an offset that is true": (
        tensor(data_offsets=[False, 24]),
        "must have a shape of at most 64 integers and two offsets",
    ),
    "overlap": (tensor(data_offsets=[0, 0]), "/w: must have the bytes of its shape and dtype, got 0"),
    "hole": (tensor(data_offsets=[1, 25]), "/w: must lie in 0:.* without a gap, got 1:25"),
    "backwards": (tensor(data_offsets=[24, 0]), "/w: must lie in 0:.* without a gap, got 24:0"),
    "more fields": (tensor(crc32=0), "must have dtype, shape and data_offsets alone"),
    "twice": (twice, "a name comes twice"),
    "a tensor that no tree has": (said(tree="{}"), "/k/4: must be in the tree"),
    "a tree without its tensors": (said(tree='{"a":["array"]}'), "/a: must be one array of the file"),
    "an array as a scalar": (said(tree='{"w":["scalar"]}'), "/w: must be one scalar"),
    "an array in about": (said(about='{"a":["array"]}'), "about/a: "),
    "about is a list": (said(about='["list"]'), "about: must be a dict, got list"),
    "a word that there is not": (said(tree='{"a":["eval","1"]}'), "/a: must begin with one of"),
    "no int": (said(tree='["int","x"]'), "the tree: must be int, got 'x'"),
    "no float": (said(tree='["float","00"]'), "the tree: must be float, got '00'"),
    "deep": (said(tree='{"a":' * 70 + "0" + "}" * 70), "tree: must be nested at most"),
    "very deep": (said(tree="[" * 90_000), "tree: must be nested at most"),
    "twice in the tree": (said(tree='{"a":1,"a":2}'), "a name comes twice"),
    "many": (said(tree="[" + "0," * 200_000 + "0]"), "at most 14[0-9]* values"),
    "many, behind escapes": (escaped, "tree: must have at most 14[0-9]* values"),
    "another version": (
        said(version="3"),
        "format: must be distopt checkpoint 1 or 2, got distopt checkpoint 3; ",
    ),
    "checksums": (said(crc32="00"), "crc32: must be 3 checksums, got "),
    "checksum": (said(crc32="00" * 12), "must have the checksum that was written with it, got another: it is damaged"),
    "a text that is none": (said(about=1), "must be an object of texts"),
    "an escape sequence": (said(tree='["\\u001b[31m"]'), "the tree: must begin with one of"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_file_with_a_consistent_lie_is_refused(name, small):
    make, text = LIES[name]
    small.write_bytes(make(small.read_bytes()))
    with pytest.raises(CheckpointError, match=text) as caught:
        checkpoint.read(small)
    assert caught.value.path == small
    assert str(caught.value).startswith(f"{small}: ")


KEY = "\\ud83d\\ude00" + "k" * 40  # one such character makes four bytes of each
LARGE = [
    '["list",' + ",".join(['{"a":0}'] * 45_000) + "]",
    "{" + ",".join(f'"{KEY}{k:x}":0' for k in range(90_000)) + "}",
    json.dumps("x" * 8_000_000),
    '["bytes","' + "f" * 8_000_000 + '"]',
]
PEAK = """
import re, sys
from pathlib import Path
from distopt import checkpoint

def peak():
    return int(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

before = peak()
try:
    checkpoint.read(sys.argv[1])
except checkpoint.CheckpointError as error:
    print(error)
print(peak() - before)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("tree", LARGE, ids=["dicts", "wide keys", "a long text", "bytes"])
def test_memory_for_parsing_is_bounded(tree, small):
    small.write_bytes(said(tree=tree)(small.read_bytes()))
    code, output = finish([sys.executable, "-c", PEAK, str(small)], 30)
    assert code == 0, output
    error, peak = output.splitlines()
    assert "must be in the tree" in error, "it was parsed"
    assert int(peak) < EXTRA + small.stat().st_size


def test_a_header_that_claims_64_tib_is_refused(small):
    small.write_bytes((2**46).to_bytes(8, "little") + small.read_bytes()[8:])
    with pytest.raises(CheckpointError, match=r"header: must be at most .* bytes in a file of .*, got 70368744177664"):
        checkpoint.read(small)


@pytest.mark.thorough
def test_data_that_cannot_be_allocated_are_refused(small):
    """A file with a hole is as long as it says; what cannot be allocated is an error of its own."""
    entries, _ = taken_apart(small.read_bytes())
    n = 2**43
    entries = {"__metadata__": entries["__metadata__"], "/w": {"dtype": "U8", "shape": [n], "data_offsets": [0, n]}}
    entries["__metadata__"].update(tree='{"w":["array"]}', crc32="00000000")
    small.write_bytes(sealed(text_of(entries)))
    try:
        os.truncate(small, small.stat().st_size + n)
    except OSError:
        pytest.skip("no such files here")
    program = f"""
import resource
from distopt import checkpoint
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
checkpoint.read({str(small)!r})
"""
    code, output = finish([sys.executable, "-c", program], 30)
    assert code == 1
    assert "CheckpointError" in output
    assert "/w: must fit into memory" in output


class Bomb:
    def __reduce__(self):
        return os.mkdir, (self.folder,)


def test_a_pickle_is_refused_and_not_executed(tmp_path):
    bomb = Bomb()
    bomb.folder = str(tmp_path / "ran")
    for number, make in enumerate((pickle.dumps, lambda b: sealed(b" " * 200 + pickle.dumps(b)))):
        file = tmp_path / str(number)
        file.write_bytes(make(bomb))
        with pytest.raises(CheckpointError):
            checkpoint.read(file)
        np.savez(file.with_suffix(".npz"), np.array([bomb], object))
        with pytest.raises(CheckpointError):
            checkpoint.read(file.with_suffix(".npz"))
    assert not (tmp_path / "ran").exists()


def test_pipes_folders_and_devices_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError):
        checkpoint.read(tmp_path / "x")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, "/dev/zero"):
        with pytest.raises(CheckpointError, match="must be a regular file"):
            checkpoint.read(path)


# ------------------------------------------------------------------------------------------------- what is written


def test_the_old_file_stays_until_commit(small):
    pending = checkpoint.prepare(small, {"new": 1}, {})
    assert pending.nbytes > 0
    assert not refused(small)
    pending.discard()
    assert not refused(small)
    assert list(small.parent.iterdir()) == [small]
    pending = checkpoint.prepare(small, {"new": 1}, {})
    pending.commit()
    pending.discard()
    assert checkpoint.read(small)[0] == {"new": 1}
    assert list(small.parent.iterdir()) == [small]


def test_a_checkpoint_file_is_readable_by_its_owner_only(tmp_path):
    before = os.umask(0)
    try:
        pending = checkpoint.prepare(tmp_path / "x", SMALL, ABOUT)
        (temporary,) = tmp_path.iterdir()
        assert temporary.stat().st_mode & 0o777 == 0o600
        pending.commit()
    finally:
        os.umask(before)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o600


def test_a_link_at_the_temporary_name_is_refused(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / f"x.tmp.{os.getpid()}").symlink_to(victim)
    with pytest.raises(FileExistsError):
        checkpoint.write(tmp_path / "x", SMALL, ABOUT)
    checkpoint.sweep(tmp_path)
    assert victim.read_text() == "precious"
    assert not (tmp_path / "x").exists()


def test_writing_over_a_folder_or_into_a_missing_one_is_refused(tmp_path):
    (tmp_path / "x").mkdir()
    with pytest.raises(IsADirectoryError):
        checkpoint.write(tmp_path / "x", SMALL, ABOUT)
    assert list(tmp_path.iterdir()) == [tmp_path / "x"]
    with pytest.raises(FileNotFoundError):
        checkpoint.write(tmp_path / "no" / "x", SMALL, ABOUT)


@pytest.mark.thorough
def test_a_full_disk_keeps_the_old_file_and_leaves_no_temporary_one(small):
    program = f"""
import resource, signal
import numpy as np
from distopt import checkpoint
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, 3 << 20))
checkpoint.write({str(small)!r}, {{"w": np.ones(1 << 20)}}, {{}})
"""
    code, output = finish([sys.executable, "-c", program], 30)
    assert code == 1
    assert "OSError: [Errno 27] File too large" in output
    assert not refused(small)
    assert list(small.parent.iterdir()) == [small]


def test_sweep_removes_temporary_files_of_dead_writers_only(tmp_path):
    """Not by process ids: containers have the same ones again and again."""
    pending = checkpoint.prepare(tmp_path / "x", SMALL, ABOUT)
    assert checkpoint.sweep(tmp_path) == []
    with pytest.raises(FileExistsError):
        checkpoint.prepare(tmp_path / "x", SMALL, ABOUT)
    pending.commit()
    left = [tmp_path / f"x.tmp.{pid}" for pid in (1, os.getpid(), 2**22)]
    for path in left:
        path.write_text("half")
    (tmp_path / "y.tmp.z").write_text("not ours")
    assert checkpoint.sweep(tmp_path) == sorted(left)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x", "y.tmp.z"]
    left[1].write_text("half, by one who had our number")
    checkpoint.write(tmp_path / "x", {}, {})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x", "y.tmp.z"]


KILLED = """
import os, random, signal, sys, time
import numpy as np
from distopt import checkpoint

path = sys.argv[1]
last = 0
for turn in range(20):
    pid = os.fork()
    if not pid:
        for number in range(last + 1, last + 10_000):
            checkpoint.write(path, {"w": np.full(1 << 17, number), "number": number}, {})
    time.sleep(random.uniform(0.01, 0.06))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    if os.path.exists(path):
        tree, _ = checkpoint.read(path)
        assert tree["number"] >= last and (tree["w"] == tree["number"]).all()
        last = tree["number"]
folder = os.path.dirname(path)
left = [name for name in os.listdir(folder) if ".tmp." in name]
assert len(checkpoint.sweep(folder)) == len(left)
assert os.listdir(folder) == [os.path.basename(path)]
print(last, "written,", len(left), "swept")
"""


@pytest.mark.thorough
def test_writers_killed_at_any_time_leave_the_old_file_whole(tmp_path):
    code, output = finish([sys.executable, "-c", KILLED, str(tmp_path / "x")], 60)
    assert code == 0, output
    written, swept = (int(word) for word in output.split() if word.isdigit())
    assert written > 0
    assert swept > 0, "none was killed while it wrote"


# ------------------------------------------------------------------------------------------------- distopt inspect


def test_inspect_lists_every_value_of_a_file(small, capsys):
    assert main(["inspect", str(small)]) == 0
    output = capsys.readouterr().out
    assert f"{small}: world 2, rank 0, step 7; " in output
    for line in ("/k/2   -0.0", "/w      float32  (2, 3)  24     ok", "/k/4    float64  (0, 2)  0      ok"):
        assert line in output


def test_inspect_finds_what_is_damaged(small, capsys):
    data = bytearray(small.read_bytes())
    data[-1] ^= 1
    small.write_bytes(data)
    assert main(["inspect", str(small)]) == 1
    output, error = capsys.readouterr()
    assert "/h      float16  ()      2      DIFFERS" in output
    assert error == f"distopt inspect: {small}: /h: {DAMAGED} (1 of 3 tensors)\n"
    small.write_bytes(data[:100])
    assert main(["inspect", str(small)]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["inspect", str(small) + "0"]) == 1
    assert "No such file" in capsys.readouterr().err


def test_inspect_shows_nothing_to_the_terminal_but_text(tmp_path, capsys):
    checkpoint.write(tmp_path / "x", {"\x1b[31m": np.ones(1), "k": "\x07", "n": 10**5000}, {"\n": "\r"})
    assert main(["inspect", str(tmp_path / "x")]) == 0
    output = capsys.readouterr().out
    assert all(line.isprintable() for line in output.splitlines())
    assert "more digits than can be printed" in output


def test_inspect_lists_the_checkpoints_of_a_folder_newest_first(small, capsys):
    for number, name in enumerate(("old", "new"), start=1):
        path = small.parent / "step" / name
        path.parent.mkdir(exist_ok=True)
        checkpoint.write(path, {}, {"step": number})
        os.utime(path, (number, number))
    (small.parent / "notes.json").write_text("{}")
    (small.parent / "x.tmp.1").write_text("half")
    assert main(["inspect", str(small.parent)]) == 0
    names = [line.split(":")[0].rpartition("/")[2] for line in capsys.readouterr().out.splitlines()]
    assert names == ["x", "new", "old"]
    path.write_text("no")
    assert main(["inspect", str(small.parent)]) == 1
    assert f"{path}: header: must begin with 8 bytes, got 2" in capsys.readouterr().out
