"""Caches that are damaged, full, foreign, shared or not to be written: they may cost time, never results.

The cache is a black box here: files in a folder. Children count what they compile, by Numba's own events.
"""

import os
import shutil
import subprocess

import faults
import numpy as np
import pytest
from faults import NOBODY, Child, copy_of, files, planted, read_only, run

pytestmark = pytest.mark.xdist_group("faults")  # one cache for all, that of `filled`
root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


@pytest.fixture
def cache(filled, tmp_path):
    """A copy of it to spoil."""
    return copy_of(filled, tmp_path / "cache")


def names(folder):
    """Names of a cache's files."""
    return {path.relative_to(folder).as_posix() for path in files(folder)}


# damage ---------------------------------------------------------------------------------------------------------------


def spoil(cache, kinds, seed, share=1.0):
    """Spoils a share of a cache's files, each in one of the ways `kinds`; returns how many."""
    rng = np.random.default_rng(seed)
    chosen = [path for path in files(cache) if rng.random() < share] or files(cache)[:1]
    for path in chosen:
        kinds[rng.integers(len(kinds))](path, rng)
    return len(chosen)


def check_spoilt(cache, filled, kinds, seed, share=1.0):
    """Right at once and, where the files can be replaced, without compiling again afterwards."""
    assert spoil(cache, kinds, seed, share)
    run(cache, restricted=True).right()
    again = run(cache, restricted=True).right()
    if faults.directory not in kinds:
        assert again["compiled"] == 0
        assert names(cache) == names(filled)


@pytest.mark.thorough
def test_damaged_files(cache, filled):
    check_spoilt(cache, filled, [kind for kind in faults.DAMAGES if kind is not faults.directory], 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", faults.DAMAGES, ids=lambda f: f.__name__)
def test_damage_of_one_kind(cache, filled, kind, seed):
    check_spoilt(cache, filled, [kind], seed, share=(0.3, 1.0)[seed % 2])


# folders that cannot be written ---------------------------------------------------------------------------------------


def test_a_filled_folder_is_used_though_it_cannot_be_written(cache):
    read_only(cache)
    assert run(cache, restricted=True).right()["compiled"] == 0


@pytest.fixture
def sources(tmp_path):
    """A copy of md4's sources, without what Python and Numba left there; returns the folder above."""
    copy = tmp_path / "sources" / "md4"
    shutil.copytree(faults.SOURCES, copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy.parent


def locked(path):
    """A folder that nobody can write to."""
    path.mkdir()
    path.chmod(0o555)
    return path


@pytest.mark.thorough
def test_nothing_is_written_beside_the_sources(tmp_path, sources):
    before = names(sources)
    run(locked(tmp_path / "cache"), restricted=True, sources=sources).right()
    assert names(sources) == before


@pytest.mark.slow
def test_stale_code_is_never_used(tmp_path, sources):
    """A fault in recurrence.py shows and, once mended, is gone, where no cache can be written."""
    cache, path = locked(tmp_path / "cache"), sources / "md4" / "method" / "recurrence.py"
    text = path.read_text()
    run(cache, restricted=True, sources=sources).right()
    path.write_text(spoilt_recurrence(text))
    with pytest.raises(AssertionError):
        run(cache, restricted=True, sources=sources).right()
    path.write_text(text)
    run(cache, restricted=True, sources=sources).right()


def spoilt_recurrence(text):
    """The source with a wrong factor in the recurrence along the last axis."""
    head, tail = text.split("def closed_form_coefficient", 1)
    place = tail.index("return ") + len("return ")
    end = tail.index("\n", place)
    return f"{head}def closed_form_coefficient{tail[:place]}2 * ({tail[place:end]}){tail[end:]}"


@pytest.mark.thorough
@pytest.mark.parametrize("size", [3000, pytest.param(1, marks=pytest.mark.slow)])
def test_no_room_for_files(tmp_path, filled, size):
    """As on a full disk: files break off after `size` bytes. Nothing is left but what is whole."""
    cache = tmp_path / "cache"
    run(cache, file_bytes=size).right()
    assert names(cache) <= names(filled)
    assert all(path.stat().st_size <= size for path in files(cache))
    if size == 1:
        assert not [path for path in files(cache) if path.stat().st_size]


@pytest.mark.slow
@root
@pytest.mark.parametrize("kilobytes", [4, 64, 300])
def test_a_full_disk(tmp_path, filled, kilobytes):
    """A file system of its own, which is full before everything is written; then there is room again."""
    disk, options = tmp_path / "disk", f"size={kilobytes}k,mode=755"
    disk.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(disk)], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        run(disk / "cache").right()
        assert names(disk / "cache") <= names(filled)
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        run(disk / "cache").right()
        assert run(disk / "cache").right()["compiled"] == 0
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


# planted code ---------------------------------------------------------------------------------------------------------


def plant(cache, marker, mode, owner):
    """Replaces all files of a cache by pickles that would run code."""
    for path in files(cache):
        faults.remade(path, planted(marker))
        path.chmod(mode)
        if owner is not None:
            os.chown(path, owner, owner)


slow = pytest.mark.slow
PLANTED = {
    "anybody can write": pytest.param(0o666, None),
    "another user's": pytest.param(0o644, NOBODY, marks=[root, slow]),
    "one's own": pytest.param(0o600, None, marks=slow),
}


@pytest.mark.thorough
@pytest.mark.parametrize(("mode", "owner"), PLANTED.values(), ids=PLANTED)
def test_planted_code_does_not_run(cache, tmp_path, mode, owner):
    marker = tmp_path / "it-ran"
    plant(cache, marker, mode, owner)
    run(cache).right()
    assert not marker.exists()


# several at once ------------------------------------------------------------------------------------------------------


TOGETHER = """
    done, events = job(), [event for _, event in compilations.buffer if event.is_start]
    report([done], begun=[event.data["dispatcher"].py_func.__name__ for event in events])
"""


def check_together(cache, filled, number):
    """Processes that start at once on one empty cache are right, and leave nothing to do for the next.

    Each function is compiled by one of them.
    """
    children = [Child(cache, TOGETHER) for _ in range(number)]
    begun = [name for child in children for name in child.done().right()["begun"]]
    loops = [path.name.rpartition("-")[0] for path in files(cache) if path.suffix == ".loop"]
    assert {loop: begun.count(loop) for loop in loops} == {loop: loops.count(loop) for loop in loops}
    assert run(cache).right()["compiled"] == 0
    assert names(cache) == names(filled)


@pytest.mark.thorough
def test_two_processes_on_an_empty_cache(tmp_path, filled):
    check_together(tmp_path / "cache", filled, 2)


@pytest.mark.slow
@pytest.mark.parametrize("tries", range(3))
@pytest.mark.parametrize("number", [2, 8])
def test_processes_on_an_empty_cache(tmp_path, filled, number, tries):
    check_together(tmp_path / "cache", filled, number)


THREADS = """
    import types
    settings = []

    class Watched(types.ModuleType):
        def __setattr__(self, name, value):
            settings.append(name)
            super().__setattr__(name, value)

    numba.config.__class__ = Watched
    results, start = [], threading.Barrier(8)

    def one():
        start.wait()
        results.append(job())

    threads = [threading.Thread(target=one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report(results, settings=settings)
"""


def check_threads(folder):
    """All right; Numba's settings are the user's, and nobody else changes them, be it for a moment."""
    told = run(folder, THREADS).right()
    assert len(told["results"]) == 8
    assert "CACHE_DIR" not in told["settings"]
    return told


@pytest.mark.thorough
def test_eight_threads_at_first_use(filled):
    assert check_threads(filled)["compiled"] == 0


@pytest.mark.slow
def test_eight_threads_on_an_empty_cache(tmp_path, filled):
    check_threads(tmp_path / "cache")
    assert run(tmp_path / "cache").right()["compiled"] == 0
    assert names(tmp_path / "cache") == names(filled)
