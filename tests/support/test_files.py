import gc
import os
import resource
import signal
import stat
import subprocess
import sys
import time
import weakref
from pathlib import Path

import numpy as np
import pytest

from md4.cli.tensor_files import tensor_file
from md4.errors import ArgumentError
from md4.support.files import checked_target, replacing

FORMATS = ["npy", "h5"]
OLD, NEW = np.arange(10.0), np.arange(1 << 18, dtype=float)  # 2 MiB

# Writes NEW again and again over a whole OLD, under the command line's handlers, until a signal ends it.
WRITER = """
import signal
import sys
import numpy as np
from md4.cli.ending import exit_status, signals_exit
from md4.cli.tensor_files import tensor_file

# Whoever runs the tests in the background may ignore these for all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

def command():
    file, eri = tensor_file(sys.argv[1], 1 << 21), np.arange(1 << 18, dtype=float)
    with signals_exit():
        print("ready", flush=True)
        while True:
            file.write(eri)

sys.exit(exit_status(command))
"""


def content(path):
    """The array in a file."""
    if path.suffix == ".npy":
        return np.load(path)
    h5py = pytest.importorskip("h5py")
    with h5py.File(path) as file:
        return file["eri"][:]


@pytest.fixture(params=FORMATS)
def target(request, tmp_path):
    """A file that holds OLD, alone in its folder."""
    if request.param == "h5":
        pytest.importorskip("h5py")
    path = tmp_path / f"eri.{request.param}"
    tensor_file(str(path), OLD.nbytes).write(OLD)
    return path


def test_a_whole_block_replaces(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    path.chmod(0o640)
    with replacing(path) as beside:
        beside.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["a.txt"]


def replace_in_vain(path, error):
    """Begins to replace a file, and fails."""
    with replacing(path) as beside:
        beside.write_text("half")
        raise error


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt, SystemExit])
def test_a_broken_block_changes_nothing(tmp_path, error):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(error):
        replace_in_vain(path, error)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_name_of_255_bytes(tmp_path):
    path = tmp_path / ("\N{SNOWMAN}" * 83 + ".npy")  # 253 bytes of UTF-8
    with replacing(path) as beside:
        beside.write_text("new")
    assert path.read_text() == "new"


def test_a_link_stays_one(tmp_path):
    (tmp_path / "a.npy").symlink_to(tmp_path / "b.npy")
    tensor_file(str(tmp_path / "a.npy"), 80).write(OLD)
    assert (tmp_path / "a.npy").is_symlink()
    np.testing.assert_array_equal(np.load(tmp_path / "b.npy"), OLD)


@pytest.mark.parametrize("order", ["C", "F"])
def test_npy_of_any_shape_and_order(tmp_path, order):
    array = np.asarray(np.random.default_rng(0).random((3, 4, 5)), order=order)
    tensor_file(str(tmp_path / "a.npy"), array.nbytes).write(array)
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), array)


@pytest.mark.parametrize("short", [8, 100, 3000, 100000])
def test_a_full_disk_changes_nothing(target, short):
    """Files may not grow to the whole size; `np.save` does not see that the last 4096 bytes are missing."""
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    whole = target.stat().st_size + NEW.nbytes - OLD.nbytes
    before, file = target.read_bytes(), tensor_file(str(target), 0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (whole - short, limits[1]))
    try:
        with pytest.raises(OSError, match=r"too large|write"):
            file.write(NEW)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert target.read_bytes() == before
    assert os.listdir(target.parent) == [target.name]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB; only root may mount one, and not everywhere."""
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        pytest.skip("no file system can be mounted here")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


@pytest.mark.parametrize("ending", FORMATS)
def test_a_small_disk(small_disk, ending):
    if ending == "h5":
        pytest.importorskip("h5py")
    path = small_disk / f"eri.{ending}"
    file = tensor_file(str(path), OLD.nbytes)
    file.write(OLD)
    with pytest.raises(OSError, match=r"No space left|write"):
        file.write(NEW)
    np.testing.assert_array_equal(content(path), OLD)
    assert os.listdir(small_disk) == [path.name]
    with pytest.raises(ArgumentError, match=r"would take 2\.1 MB, but its disk has 1\.\d+ MB left"):
        tensor_file(str(path), NEW.nbytes)


@pytest.mark.sample("h5-15", "npy-2")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_signals_at_any_moment(target, number):
    """Writers are ended at moments spread over some writes; the file is always OLD or NEW, whole."""
    seconds = np.random.default_rng(int(number)).uniform(0, 0.03, 3)
    for delay in seconds:
        with subprocess.Popen([sys.executable, "-c", WRITER, target], stdout=subprocess.PIPE, text=True,
                              stderr=subprocess.DEVNULL) as writer:  # fmt: skip
            assert writer.stdout.readline() == "ready\n"
            time.sleep(delay)
            writer.send_signal(number)
            try:
                status = writer.wait(60)
            finally:
                writer.kill()
        assert status == (-number if number == signal.SIGKILL else 128 + number)
        found = content(target)
        assert np.array_equal(found, OLD) or np.array_equal(found, NEW)
        if number != signal.SIGKILL:
            assert os.listdir(target.parent) == [target.name]


@pytest.mark.parametrize("step", ["write", "begun"])
def test_signals_wait_for_callbacks_of_weak_references(tmp_path, step):
    """Exceptions are lost in these callbacks, so no signal that arrives in one may be handled there."""
    pytest.importorskip("h5py")
    path = str(tmp_path / "a.h5")
    tensor_file(path, OLD.nbytes).write(OLD)
    file, handled, before, after = tensor_file(path, OLD.nbytes), [], [], []

    def profile(frame, event, _):
        if event == "call" and frame.f_code.co_filename == weakref.__file__ and frame.f_code.co_name == "remove":
            before.append(len(handled))
            signal.raise_signal(signal.SIGTERM)
            after.append(len(handled))

    handler = signal.signal(signal.SIGTERM, lambda *_: handled.append("handled"))
    gc.collect()  # what other tests have left
    gc.disable()
    try:
        sys.setprofile(profile)
        if step == "write":
            file.write(OLD)
        else:
            with file.begun({"eri": OLD.shape}):
                pass
    finally:
        sys.setprofile(None)
        gc.enable()
        signal.signal(signal.SIGTERM, handler)
    assert before == after
    assert len(handled) == len(before) > 0


def test_h5_keeps_everything_else(target):
    h5py = pytest.importorskip("h5py")
    path = target.with_suffix(".h5")
    with h5py.File(path, "w") as file:
        file["eri"] = [1.0, 2.0]
        file["eri"].attrs["of"] = "another molecule"
        file["group/data"] = [3, 4]
        file.attrs["title"] = "mine"
    old = tensor_file(str(path), NEW.nbytes)
    assert old.replaces == f"dataset 'eri' of {path} (2,)"
    old.write(NEW)
    with h5py.File(path) as file:
        np.testing.assert_array_equal(file["eri"], NEW)
        assert file["group/data"][:].tolist() == [3, 4]
        assert file.attrs["title"] == "mine"
        assert not file["eri"].attrs
        assert sorted(file) == ["eri", "group"]


def test_h5_of_the_same_size_does_not_grow(tmp_path):
    pytest.importorskip("h5py")
    path = tmp_path / "eri.h5"
    sizes = set()
    for _ in range(4):
        tensor_file(str(path), NEW.nbytes).write(NEW)
        sizes.add(path.stat().st_size)
    assert max(sizes) < 1.1 * min(sizes)


@pytest.mark.parametrize("make", ["group", "text", "halved"])
def test_h5_that_cannot_be_kept_is_refused(tmp_path, make):
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "eri.h5"
    with h5py.File(path, "w") as file:
        file["eri/part" if make == "group" else "eri"] = NEW
    if make == "halved":
        os.truncate(path, 1 << 20)
    elif make == "text":
        path.write_text("not HDF5")
    before = path.read_bytes()
    with pytest.raises(ArgumentError, match="group 'eri'" if make == "group" else "cannot be used as an HDF5 file"):
        tensor_file(str(path), OLD.nbytes)
    assert path.read_bytes() == before


def test_an_empty_h5_file_is_a_new_one(tmp_path):
    path = tmp_path / "eri.h5"
    pytest.importorskip("h5py")
    path.touch()
    tensor_file(str(path), OLD.nbytes).write(OLD)
    np.testing.assert_array_equal(content(path), OLD)


def test_targets_that_are_refused(tmp_path):
    (tmp_path / "folder.npy").mkdir()
    os.mkfifo(tmp_path / "pipe.npy")
    (tmp_path / "full.npy").symlink_to("/dev/full")
    (tmp_path / "file").touch()
    for name, message in [
        ("nowhere/a.npy", "no folder"), ("file/a.npy", "no folder"), ("folder.npy", "is a folder"),
        ("pipe.npy", "a pipe or the like"), ("full.npy", "a device"), ("a\0.npy", "zero byte"),
        ("a\ud800.npy", "half a character"),
        (f"{'a' * 300}.npy", "name too long"),
    ]:  # fmt: skip
        with pytest.raises(ArgumentError, match=f"(?i){message}"):
            checked_target(tmp_path / name)
    with pytest.raises(ArgumentError, match=r"would take 1000 PB, but its disk has"):
        checked_target(tmp_path / "a.npy", 10**18)
    assert sorted(os.listdir(tmp_path)) == ["file", "folder.npy", "full.npy", "pipe.npy"]


@pytest.fixture
def mortal():
    """Permissions do not hold root; it becomes nobody for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    yield
    os.seteuid(0)


@pytest.mark.parametrize(("folder_mode", "file_mode"), [(0o555, 0o666), (0o777, 0o444), (0o1777, 0o644)])
def test_permissions_are_respected(tmp_path, folder_mode, file_mode, request):
    """A folder or file that is read only, and, where root made it, a file of another in a sticky folder."""
    if folder_mode == 0o1777 and os.geteuid() != 0:
        pytest.skip("needs a file of another user")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.npy").write_text("old")
    (folder / "a.npy").chmod(file_mode)
    folder.chmod(folder_mode)
    for parent in [tmp_path, *tmp_path.parents][: len(tmp_path.parts) - 2]:
        parent.chmod(parent.stat().st_mode | 0o111)
    request.getfixturevalue("mortal")
    with pytest.raises(ArgumentError, match=r"may not be replaced|Permission denied"):
        checked_target(folder / "a.npy")


def test_a_new_file_has_ordinary_permissions(tmp_path):
    tensor_file(str(tmp_path / "a.npy"), OLD.nbytes).write(OLD)
    (tmp_path / "b").touch()
    modes = {stat.S_IMODE(Path(tmp_path / name).stat().st_mode) for name in ("a.npy", "b")}
    assert len(modes) == 1
