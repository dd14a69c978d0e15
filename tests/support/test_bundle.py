"""Files of many kernels, and the package md4-kernels: what is taken from them, and that no fault gives wrong code."""

import logging
import os
import sys
import tracemalloc
import types
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from md4.support import bundle, cache
from md4.support.bundle import Bundle, installed, installed_kernel, is_installed

KERNELS = {f"h_panels-{n}-True.{n}": bytes(range(n, 256)) * (n + 1) for n in range(4)}


def written(folder, architecture="sm_90", kernels=KERNELS):
    path = folder / f"{architecture}.kernels"
    bundle.write(path, architecture, kernels.items())
    return path


def forged(path, *lines, data=b"", facts=None):
    """A file that no `write` makes, with right checksums."""
    index = "\n".join([" ".join(facts or [*bundle.made_for(), "sm_90"]), *lines]).encode()
    path.write_bytes(b"md4 kernels 1 %b %d\n" % (cache.checksum(index), len(index)) + index + data)
    return path


def test_what_is_written_is_read(tmp_path):
    found = Bundle(written(tmp_path), "sm_90")
    assert found.architecture == Bundle(found.path).architecture == "sm_90"
    assert {name: found.load(name) for name in found.entries} == KERNELS
    assert [path.name for path in tmp_path.iterdir()] == ["sm_90.kernels"]
    empty = Bundle(written(tmp_path, "sm_100", {}))
    assert (empty.architecture, empty.entries) == ("sm_100", {})


def damaged(whole, draw):
    """The content of a file with one fault."""
    place, some = draw(st.integers(0, len(whole) - 1)), draw(st.binary(min_size=1, max_size=8))
    return draw(st.sampled_from([
        whole[:place], whole[:place] + bytes([whole[place] ^ (some[0] | 1)]) + whole[place + 1 :],
        whole[:place] + some + whole[place:], whole + some, some + whole,
    ]))  # fmt: skip


@given(st.data())
def test_no_damaged_kernel_is_read(tmp_path_factory, data):
    path = written(tmp_path_factory.mktemp("bundle"))
    content = damaged(path.read_bytes(), data.draw)
    path.write_bytes(content)
    try:
        found = Bundle(path, "sm_90")
    except ValueError:
        return
    assert {found.load(name) for name in found.entries} <= {*KERNELS.values(), None}
    assert list(found.entries) == list(KERNELS)


def test_one_damaged_kernel_is_one(tmp_path):
    """The others are read without it."""
    path = written(tmp_path)
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1
    path.write_bytes(whole)
    found = Bundle(path)
    *others, last = KERNELS
    assert found.load(last) is None
    assert all(found.load(name) == KERNELS[name] for name in others)
    path.unlink()
    assert found.load(others[0]) is None


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/b", "", "x y", "x\0", "\u00e9", "x" * 201, "..\\x"])
def test_names_that_are_no_file_of_the_cache(tmp_path, name):
    path = forged(tmp_path / "x", f"{name} 1 1 {'0' * 64}", data=b"x")
    with pytest.raises(ValueError, match="which no kernel of md4 is called"):
        Bundle(path)


@pytest.mark.parametrize(
    "facts, message",
    [
        (["0" * 64, "13", "sm_90"], "of another version of md4"), ([], "of another version of md4"),
        (["sm_90"], "of another version of md4"), ([None, "1", "sm_90"], "made by CUDA 1, but md4 is installed with"),
        ([None, None, "sm_80"], "for sm_80, not for sm_90"), ([None, None, "sm_90", "x"], "for sm_90 x, not for sm_90"),
        ([None, None, "../x"], "for ../x, not for sm_90"), ([None, None, ""], "for , not for sm_90"),
    ],
)  # fmt: skip
def test_what_is_made_for_something_else(tmp_path, facts, message):
    ours = [*bundle.made_for(), "sm_90"]
    path = forged(tmp_path / "x", facts=[ours[n] if word is None else word for n, word in enumerate(facts)] or [""])
    with pytest.raises(ValueError, match=message):
        Bundle(path, "sm_90")


def test_architectures_that_are_none(tmp_path):
    with pytest.raises(ValueError, match="not for an architecture"):
        Bundle(forged(tmp_path / "x", facts=[*bundle.made_for(), "../sm_90"]))


def test_sources_that_cannot_be_read_are_no_version(tmp_path, monkeypatch):
    """Two such states of md4 need not be the same."""
    monkeypatch.setattr(cache, "IMPORTED", None)
    with pytest.raises(ValueError, match="of another version of md4"):
        Bundle(written(tmp_path))


def test_a_kernel_that_is_larger_than_it_says(tmp_path):
    packed = zlib.compress(bytes(1 << 26))
    found = Bundle(forged(tmp_path / "x", f"x {len(packed)} 10 {'0' * 64}", data=packed))
    tracemalloc.start()
    try:
        assert found.load("x") is None
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()


# the package md4-kernels ----------------------------------------------------------------------------------------------


def test_kernels_of_the_package(kernels_package, caplog):
    caplog.set_level(logging.INFO, "md4")
    written(kernels_package)
    assert {name: installed_kernel(name, "sm_90") for name in KERNELS} == KERNELS
    assert all(is_installed(name, "sm_90") for name in KERNELS)
    assert not is_installed("other", "sm_90")
    assert installed_kernel("other", "sm_90") is None
    assert installed("sm_80") is None
    assert not caplog.records
    assert bundle.PACKAGE not in sys.modules


def times(folder):
    """When each file of a folder, and the folder, was written."""
    return sorted((path.name, path.stat().st_mtime_ns) for path in [folder, *folder.iterdir()])


def test_a_package_that_cannot_be_written(kernels_package):
    written(kernels_package).chmod(0o444)
    kernels_package.chmod(0o555)
    before = times(kernels_package)
    assert installed_kernel("h_panels-1-True.1", "sm_90") == KERNELS["h_panels-1-True.1"]
    assert times(kernels_package) == before
    kernels_package.chmod(0o755)


@pytest.mark.parametrize("fault", ["old", "architecture", "cut", "empty", "folder", "permissions"])
def test_a_package_of_no_use_is_one_line(kernels_package, caplog, monkeypatch, fault):
    caplog.set_level(logging.INFO, "md4")
    path = written(kernels_package, "sm_80" if fault == "architecture" else "sm_90")
    if fault == "old":
        monkeypatch.setattr(cache, "IMPORTED", "0" * 64)
    elif fault == "architecture":
        path.rename(kernels_package / "sm_90.kernels")
    elif fault in ("cut", "empty"):
        path.write_bytes(path.read_bytes()[:-1] if fault == "cut" else b"")
    elif fault == "permissions":
        path.chmod(0o666)
    else:
        path.unlink()
        path.mkdir()
    assert [installed_kernel(name, "sm_90") for name in KERNELS] == [None] * len(KERNELS)
    (record,) = caplog.records
    assert record.levelname == "INFO"
    words = {"old": "another version of md4", "architecture": "for sm_80, not for sm_90", "cut": "not as long",
             "empty": "is damaged", "folder": "by others", "permissions": "can be written by others"}  # fmt: skip
    assert words[fault] in record.getMessage()
    assert "install the md4-kernels of this version of md4" in record.getMessage()


def test_damaged_kernels_of_the_package_are_one_line(kernels_package, caplog):
    caplog.set_level(logging.INFO, "md4")
    path = written(kernels_package)
    whole = bytearray(path.read_bytes())
    place = Bundle(path).entries["h_panels-2-True.2"][0]
    whole[place + 4 :] = bytes(len(whole) - place - 4)
    path.write_bytes(whole)
    found = [installed_kernel(name, "sm_90") for name in KERNELS]
    assert found == [*list(KERNELS.values())[:2], None, None]
    (record,) = caplog.records
    assert f"{path} is damaged" in record.getMessage()


def test_a_package_as_writable_as_the_source(kernels_package, monkeypatch, tmp_path):
    """Where a whole group can write md4's source, nothing is lost if it can write the package."""
    path, source = written(kernels_package), tmp_path / "cache.py"
    source.touch()
    for mode, found in ((0o644, None), (0o664, KERNELS["h_panels-0-True.0"])):
        path.chmod(0o664)
        source.chmod(mode)
        monkeypatch.setattr(cache, "__file__", str(source))
        installed.made.clear()
        assert installed_kernel("h_panels-0-True.0", "sm_90") == found


def test_a_module_of_this_name(kernels_package, monkeypatch):
    monkeypatch.setitem(sys.modules, bundle.PACKAGE, types.ModuleType(bundle.PACKAGE))
    assert installed("sm_90") is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
def test_a_package_of_another_user(kernels_package):
    path = written(kernels_package)
    os.chown(path, 65534, 65534)
    assert installed("sm_90") is None
