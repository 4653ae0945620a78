"""Compiled kernels on disk: compiled once, whole or not there, and nobody else's."""

import os
import pathlib
import stat
import threading
import time

import pytest

from distopt.io import pending
from distopt.kernels import cubins


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(cubins, "folder", lambda: tmp_path)
    return tmp_path


def files(folder):
    return sorted(p.name for p in folder.iterdir() if p.suffix != ".lock")


def compiler(result=b"machine code"):
    """A compiler, and how often it was called."""
    calls = []

    def compile_source():
        calls.append(1)
        return result

    return compile_source, calls


def test_a_text_is_compiled_once(folder):
    compile_source, calls = compiler()
    paths = {cubins.cached("a", compile_source) for _ in range(3)}
    assert len(paths) == len(calls) == 1
    assert pathlib.Path(*paths).read_bytes() == b"machine code"
    assert cubins.cached("b", compile_source) not in paths
    assert len(calls) == 2


@pytest.mark.parametrize("damage", [b"", b"machine", b"machine code and more", b"Machine code"])
def test_a_damaged_file_is_not_taken(folder, damage):
    compile_source, calls = compiler()
    path = pathlib.Path(cubins.cached("a", compile_source))
    path.write_bytes(damage)
    assert cubins.cached("a", compile_source) == str(path)
    assert path.read_bytes() == b"machine code"
    assert len(calls) == 2


def test_a_compiler_that_fails_leaves_nothing(folder):
    def broken():
        raise RuntimeError("line 3")

    with pytest.raises(RuntimeError, match="line 3"):
        cubins.cached("a", broken)
    assert files(folder) == []
    compile_source, calls = compiler()
    cubins.cached("a", compile_source)
    assert len(calls) == 1


def test_a_disk_that_is_full_leaves_no_part(folder, monkeypatch):
    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pending.os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        cubins.cached("a", lambda: b"machine code")
    assert files(folder) == []


def test_of_many_ranks_one_compiles(folder):
    calls = []

    def slow():
        calls.append(1)
        time.sleep(0.1)
        return b"machine code"

    threads = [threading.Thread(target=cubins.cached, args=("a", slow)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert len(files(folder)) == 1


def test_who_waits_too_long_for_a_stopped_rank_compiles_too(folder, monkeypatch):
    monkeypatch.setattr(cubins, "PATIENCE", 0.1)
    compile_source, calls = compiler()

    def compile_in_a_stopped_rank():
        cubins.cached("a", compile_source)  # another rank, while this one holds the lock
        return b"machine code"

    cubins.cached("a", compile_in_a_stopped_rank)
    assert len(calls) == 1
    assert len(files(folder)) == 1


def chosen_folder(monkeypatch, **environment):
    for name in ("DISTOPT_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    return cubins.folder.__wrapped__()


def test_the_folder_is_the_users_cache_and_nobody_elses(tmp_path, monkeypatch):
    assert chosen_folder(monkeypatch, HOME=tmp_path) == tmp_path / ".cache" / "distopt"
    assert chosen_folder(monkeypatch, HOME=tmp_path, XDG_CACHE_HOME=tmp_path / "x") == tmp_path / "x" / "distopt"
    own = chosen_folder(monkeypatch, HOME=tmp_path, DISTOPT_CACHE=tmp_path / "y")
    assert own == tmp_path / "y"
    assert stat.S_IMODE(own.stat().st_mode) == 0o700


def test_a_folder_that_others_may_write_to_is_not_used(tmp_path, monkeypatch):
    others = tmp_path / "distopt"
    others.mkdir()
    others.chmod(0o777)
    used = chosen_folder(monkeypatch, XDG_CACHE_HOME=tmp_path)
    assert used != others
    assert stat.S_IMODE(used.stat().st_mode) == 0o700
    with pytest.raises(PermissionError, match="distopt must be the user's own, and writable by nobody else"):
        chosen_folder(monkeypatch, DISTOPT_CACHE=others)


def test_a_folder_that_cannot_be_made_is_replaced_by_one_for_this_process(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    ends = []
    monkeypatch.setattr(cubins.atexit, "register", lambda *call, **options: ends.append((call, options)))
    used = chosen_folder(monkeypatch, XDG_CACHE_HOME=tmp_path / "file")
    assert os.access(used, os.W_OK)
    [((remove, *arguments), options)] = ends
    remove(*arguments, **options)
    assert not used.exists()
    with pytest.raises(OSError, match="Not a directory"):
        chosen_folder(monkeypatch, DISTOPT_CACHE=tmp_path / "file" / "cache")
