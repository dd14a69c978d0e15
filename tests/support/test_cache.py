"""Files of compiled code: what is relied on, and that no trouble with them ends a calculation."""

import errno
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from md4.cpu.compile import Loop, helper
from md4.method.operators import zeros_function
from md4.support import cache
from md4.support.cache import entry_path, load, store

FACTS = {"kernel": "x", "capability": [9, 0]}
CODE = bytes(range(256)) * 4

root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setenv("MD4_CACHE_DIR", str(tmp_path))
    return entry_path("x.kernel")


def test_what_is_stored_is_loaded(path):
    assert load(path, FACTS) is None
    store(path, FACTS, CODE)
    assert load(path, FACTS) == CODE
    assert load(path, FACTS | {"kernel": "y"}) is None
    assert [p.name for p in path.parent.iterdir()] == ["x.kernel"]
    assert not path.stat().st_mode & cache.WRITABLE_BY_OTHERS


@pytest.mark.parametrize("part", ["Python", "source", *cache.TOOLCHAIN])
def test_the_fingerprint_follows_the_toolchain(part, monkeypatch):
    """Code of another Python, compiler or driver is not what this process would make."""
    before, version = cache.fingerprint(), cache.version
    if part == "Python":
        monkeypatch.setattr("sys.version", "another one")
    elif part == "source":
        monkeypatch.setattr(cache, "IMPORTED", "another one")
    else:
        monkeypatch.setattr(cache, "version", lambda package: "99" if package == part else version(package))
    assert cache.fingerprint.__wrapped__() != before


@given(st.data())
def test_no_damaged_file_is_loaded(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("cache") / "x.kernel"
    store(path, FACTS, CODE)
    whole = path.read_bytes()
    place = data.draw(st.integers(0, len(whole) - 1))
    change = data.draw(st.sampled_from(["cut", "flip", "insert", "append"]))
    some = data.draw(st.binary(min_size=1, max_size=8))
    damaged = {
        "cut": whole[:place],
        "flip": whole[:place] + bytes([whole[place] ^ (some[0] | 1)]) + whole[place + 1 :],
        "insert": whole[:place] + some + whole[place:],
        "append": whole + some,
    }[change]
    path.write_bytes(damaged)
    assert damaged == whole or load(path, FACTS) is None


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666, 0o777])
def test_a_file_that_others_can_write_is_not_trusted(path, mode):
    store(path, FACTS, CODE)
    path.chmod(mode)
    assert load(path, FACTS) is None


@pytest.mark.parametrize("mode", [0o000, 0o666])
def test_what_is_not_trusted_is_replaced_by_what_is(path, mode):
    store(path, FACTS, CODE)
    path.chmod(mode)
    store(path, FACTS, CODE)
    assert load(path, FACTS) == CODE


def test_a_link_is_replaced_not_followed(path, tmp_path):
    path.parent.mkdir()
    (tmp_path / "mine").write_text("mine")
    path.symlink_to(tmp_path / "mine")
    store(path, FACTS, CODE)
    assert load(path, FACTS) == CODE
    assert (tmp_path / "mine").read_text() == "mine"


@root
def test_a_file_of_another_user_is_not_trusted(path):
    store(path, FACTS, CODE)
    os.chown(path, 65534, 65534)
    assert load(path, FACTS) is None


@root
def test_files_of_the_owner_of_the_sources_are_trusted(path, tmp_path, monkeypatch):
    """Who installed md4 decides what it executes."""
    store(path, FACTS, CODE)
    os.chown(path, 65534, 65534)
    sources = tmp_path / "sources"
    sources.mkdir()
    os.chown(sources, 65534, 65534)
    monkeypatch.setattr(cache, "SOURCES", sources)
    assert load(path, FACTS) == CODE


@pytest.mark.parametrize("kind", ["folder", "pipe", "loop"])
def test_what_is_no_file_is_none(path, kind):
    path.parent.mkdir()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)  # opening it would wait for a writer
    else:
        path.symlink_to(path)
    assert load(path, FACTS) is None
    store(path, FACTS, CODE)
    assert load(path, FACTS) == (None if kind == "folder" else CODE)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("call", ["mkdir", "open", "fsync", "replace"])
def test_a_cache_that_cannot_be_written_is_none(path, monkeypatch, code, call):
    def fail(*_, **__):
        raise OSError(code, os.strerror(code))

    if call != "mkdir":
        path.parent.mkdir()
    monkeypatch.setattr(*((Path, "mkdir") if call == "mkdir" else (os, call)), fail)
    store(path, FACTS, CODE)
    monkeypatch.undo()
    assert not path.parent.exists() or not list(path.parent.iterdir())


def test_edited_sources_are_not_stored_under_the_old_name(path, monkeypatch):
    monkeypatch.setattr(cache, "IMPORTED", "0" * 64)
    store(path, FACTS, CODE)
    assert not path.exists()


FINGERPRINT = "from md4.support import cache; print(cache.__file__, cache.fingerprint())"


def test_the_fingerprint_follows_every_source(tmp_path):
    """Of all files, also of those that are not imported."""
    shutil.copytree(cache.SOURCES, tmp_path / "md4", ignore=shutil.ignore_patterns("__pycache__"))
    found = []
    for edit in ("", "\nX = 1\n", ""):
        source = tmp_path / "md4" / "method/recurrence.py"
        source.write_text((cache.SOURCES / "method/recurrence.py").read_text() + edit)
        env = os.environ | {"PYTHONPATH": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", FINGERPRINT], env=env, cwd=tmp_path, capture_output=True, text=True, check=True
        )
        place, name = done.stdout.split()
        assert place.startswith(str(tmp_path))
        found.append(name)
    assert found[0] == found[2] != found[1]


# loops ----------------------------------------------------------------------------------------------------------------


def add_loop(array, amount):
    for n in range(len(array)):
        array[n] += amount


def found_on_disk(loop):
    """Number of signatures of a loop that were."""
    return sum(loop.dispatcher.stats.cache_hits.values())


def test_compiled_loops_are_found_on_disk(path):
    """A file for each signature, and none of Numba's own."""
    hits = []
    for _ in range(2):
        loop = Loop(add_loop)
        for array in (np.zeros(3), np.zeros((3, 2))[:, 0]):
            loop(array, 1.5)
            np.testing.assert_array_equal(array, 1.5)
        hits.append(found_on_disk(loop))
    assert hits == [0, 2]
    assert [p.suffix for p in path.parent.iterdir()] == [".loop"] * 2


zeros_upto = None  # set by `Loop`


def zeros_of_points(r2, omega, table, zeros):
    for n in range(len(r2)):
        zeros_upto(0, 1.0, 1.0, r2[n], omega, table, zeros, n, 1)


def test_device_functions_that_are_compiled_anew_in_each_process_are_no_obstacle(path):
    hits = []
    for _ in range(2):
        zeros_upto, zeros = zeros_function("gaussian", helper), np.empty(5)
        loop = Loop(zeros_of_points, "zeros_of_points", zeros_upto=zeros_upto)
        loop(np.linspace(0, 1, 5), 0.5, np.zeros((1, 1)), zeros)
        assert (np.diff(zeros) < 0).all()
        hits.append(found_on_disk(loop))
    assert hits == [0, 1]


def test_damaged_loops_are_compiled_again_and_replaced(path):
    Loop(add_loop)(np.zeros(3), 1.0)
    (file,) = path.parent.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    for hits in (0, 1):
        loop, array = Loop(add_loop), np.zeros(3)
        loop(array, 2.0)
        np.testing.assert_array_equal(array, 2.0)
        assert found_on_disk(loop) == hits


def test_only_the_owner_writes(path):
    """Whatever the umask: a file that a group could write would be of no use."""
    before = os.umask(0)
    try:
        store(path, FACTS, CODE)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == cache.PERMISSIONS


def test_a_user_without_a_home(monkeypatch):
    """As in a container under any number."""

    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    for name in ("MD4_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    assert cache.cache_folder().name == f"md4-{os.geteuid()}"
