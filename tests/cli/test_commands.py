import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from places import EXAMPLES

import md4
from md4.__main__ import main
from md4.errors import MemoryLimitError
from md4.support.cache import fingerprint
from md4.support.progress import Progress

gto = pytest.importorskip("pyscf.gto")

WATER = str(EXAMPLES / "water.xyz")
BASIS = ["--basis", "sto-3g", "--backend", "cpu"]


@pytest.fixture(scope="module")
def water():
    return gto.M(atom=WATER, basis="sto-3g", verbose=0)


@pytest.mark.parametrize("aosym", ["s1", "s4", "s8"])
def test_eri_npy(tmp_path, water, aosym, capsys):
    path = tmp_path / "eri.npy"
    assert main(["eri", WATER, *BASIS, "--aosym", aosym, "-o", str(path)]) == 0
    np.testing.assert_allclose(np.load(path), water.intor("int2e", aosym=aosym), atol=1e-12)
    assert str(path) in capsys.readouterr().out


def test_eri_h5_with_omega(tmp_path, water):
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "eri.h5"
    assert main(["eri", WATER, *BASIS, "--omega", "-0.3", "-o", str(path)]) == 0
    with water.with_range_coulomb(-0.3), h5py.File(path) as file:
        np.testing.assert_allclose(file["eri"][:], water.intor("int2e"), atol=1e-12)


@pytest.mark.parametrize("name", ["eri.npy", "eri.h5"])
def test_eri_larger_than_the_memory(tmp_path, water, name, capsys, monkeypatch):
    """Row by row into the file, which holds the same as one that is written as a whole, and so do norm and sum."""
    h5py = pytest.importorskip("h5py")
    monkeypatch.setattr("md4.cli.eri.AT_ONCE", 1000)
    monkeypatch.setattr("md4.contract.rows.SLICE_SHARE", 0.01)
    path = tmp_path / name
    arguments = ["eri", WATER, *BASIS, "-o", str(path)]
    assert main(arguments) == 0
    whole, before = capsys.readouterr().out, path.stat()
    monkeypatch.setattr("md4.cli.eri.LARGE", 0.01)
    assert main([*arguments, "--max-memory", "1"]) == 0
    replaces, *printed = capsys.readouterr().out.splitlines(keepends=True)
    assert replaces.startswith("replaces ")
    assert without_times(printed) == without_times(whole.splitlines(keepends=True))
    assert path.stat().st_ino != before.st_ino
    assert name == "eri.h5" or path.stat().st_size == before.st_size
    assert [entry.name for entry in tmp_path.iterdir()] == [name]
    if name == "eri.npy":
        np.testing.assert_allclose(np.load(path), water.intor("int2e"), atol=1e-12)
    else:
        with h5py.File(path) as file:
            np.testing.assert_allclose(file["eri"][:], water.intor("int2e"), atol=1e-12)


def without_times(lines):
    """Lines of the command's output without the seconds."""
    return [re.sub(r": [0-9.]+ s,", "", line) for line in lines]


@pytest.mark.parametrize("name", ["eri.npy", "eri.h5"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), MemoryLimitError("too much")])
def test_what_is_there_stays_if_a_large_tensor_fails(tmp_path, name, error, monkeypatch, capsys):
    pytest.importorskip("h5py")
    path = tmp_path / name
    assert main(["eri", "He 0 0 0", *BASIS, "-o", str(path)]) == 0
    before = path.read_bytes()

    def fail(*_, out, **__):
        out[...] = 1.0
        raise error

    monkeypatch.setattr("md4.int2e", fail)
    assert main(["eri", WATER, *BASIS, "-o", str(path), "--max-memory", "0.03"]) == 2
    assert ("No space left on device. What was there" in capsys.readouterr().err) == isinstance(error, OSError)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


def test_a_disk_without_room_is_known_before_the_work(tmp_path, monkeypatch, capsys):
    """A memory map could not tell of it."""

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    monkeypatch.setattr("md4.int2e", None)
    assert main(["eri", WATER, *BASIS, "-o", str(tmp_path / "eri.npy"), "--max-memory", "0.03"]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_devices_go_to_int2e(water, monkeypatch, capsys):
    asked, tensor = [], water.intor("int2e")

    def int2e(mol, **options):
        asked.append(options["devices"])
        return tensor

    monkeypatch.setattr("md4.int2e", int2e)
    for devices in (["--devices", "all"], ["--devices", "0,12"], ["--devices", "1"], []):
        assert main(["eri", WATER, "--basis", "sto-3g", *devices]) == 0
    assert asked == ["all", [0, 12], [1], None]


def test_devices_of_the_cpu(capsys):
    assert main(["eri", "He 0 0 0", *BASIS, "--devices", "0,1"]) == 2
    assert "the CPU backend has none" in capsys.readouterr().err


def test_mpi_is_asked_for_where_it_is_missing(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    assert main(["eri", "He 0 0 0", *BASIS, "--mpi"]) == 2
    assert "--mpi needs mpi4py and an MPI library" in capsys.readouterr().err


def test_eri_prints_shape_and_norm(water, capsys):
    assert main(["eri", WATER, *BASIS, "--aosym", "s4", "--max-memory", "500"]) == 0
    printed = capsys.readouterr().out
    assert "(28, 28)" in printed
    norm = float(printed.split("norm ")[1].split(",")[0])
    assert norm == pytest.approx(np.linalg.norm(water.intor("int2e", aosym="s4")), rel=1e-11)


def test_validate(capsys):
    arguments = ["validate", WATER, *BASIS, "--max-quartets", "20"]
    assert main(arguments) == 0
    assert "(pp|pp)" in capsys.readouterr().out
    assert main([*arguments, "--abs-tolerance", "0"]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"md4 {md4.__version__}\n"


def test_info(capsys):
    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    for name in ("python", "numba-cuda", "llvmlite", "GPU", "threads of md4", "backend", "cache"):
        assert name in printed


def test_info_shows_the_cache(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("MD4_CACHE_DIR", str(tmp_path))
    folder = tmp_path / fingerprint()
    folder.mkdir()
    for name in ("h_panels-sm_90.kernel", "sums-0123.loop", "r_erf-45.loop", "r_erf-67.loop"):
        (folder / name).touch()
    assert main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("cache"))
    assert str(tmp_path) in lines[start]
    assert [line.split(maxsplit=0 if line[0] == " " else 2)[-1].strip() for line in lines[start + 1 :]] == [
        "1 compiled variants in the cache", "h_panels-sm_90", "3 compiled variants in the cache", "r_erf, 2 variants",
        "sums",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eri", "nowhere.xyz", *BASIS], "no geometry file"),
        (["eri", WATER, "--basis", "no-such-basis"], "no-such-basis"),
        (["eri", WATER, *BASIS, "-o", "eri.txt"], "must end in .npy"),
        (["eri", WATER, *BASIS, "-o", "nowhere/eri.npy"], "no folder"),
        (["eri", WATER, *BASIS, "--aosym", "s9"], "s9"),
        (["eri", WATER, "--basis", "sto-3g", "--backend", "abacus"], "abacus"),
        (["validate", WATER, *BASIS, "--spin", "1"], "spin"),
    ],
)
def test_errors_are_one_line(arguments, message, capsys):
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("md4: ")
    assert printed.err.count("\n") == 1
    assert message in printed.err


@pytest.fixture
def no_work(monkeypatch):
    """Whatever computes or compiles fails the test."""

    def work(*_, **__):
        raise AssertionError("work was begun")

    for name in ("int2e", "int2c2e", "int3c2e", "validation.libcint.compare", "validation.report.make_report"):
        monkeypatch.setattr(f"md4.{name}", work)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["validate", WATER, *BASIS, "--seed", "-1"], "--seed takes"),
        (["validate", WATER, *BASIS, "--seed", "9" * 400], "one of 400 digits"),
        (["validate", WATER, *BASIS, "--max-quartets", "0"], "--max-quartets takes"),
        (["validate", WATER, *BASIS, "--max-quartets", "-1"], "--max-quartets takes"),
        (["validate", WATER, *BASIS, "--tolerance", "nan"], "--tolerance takes"),
        (["validate", WATER, *BASIS, "--tolerance", "-1"], "--tolerance takes"),
        (["validate", WATER, *BASIS, "--abs-tolerance", "inf"], "--abs-tolerance takes"),
        (["validate", WATER, *BASIS, "--report", "nowhere/a.html"], "no folder"),
        (["eri", WATER, *BASIS, "--omega", "nan"], "--omega takes"),
        (["eri", WATER, *BASIS, "--omega", "inf"], "--omega takes"),
        (["eri", WATER, *BASIS, "--omega", "1e300"], "1e+300"),
        *[(["eri", WATER, *BASIS, "--max-memory", value], "--max-memory takes") for value in ("nan", "inf", "-1", "0")],
        (["eri", WATER, *BASIS, "--charge", "9" * 400], "--charge takes"),
        (["eri", WATER, *BASIS, "--charge", "11"], "leaves the molecule -1 electrons"),
        (["eri", WATER, *BASIS, "--spin", "-2"], "--spin takes"),
        (["eri", WATER, "--basis", " "], "--basis is empty"),
        (["eri", WATER, "--basis", "nowhere/basis.nw"], "nor is there such a file"),
        (["eri", WATER, "--basis", "__import__('os').abort()"], "basis set"),
        (["eri", str(Path(WATER).parent), *BASIS], "is a folder"),
        (["eri", "/dev/null", *BASIS], "is a device"),
        (["eri", "H 0 0 0; " * 600 + "H 0 0", *BASIS], "atom 601"),
        (["eri", WATER, *BASIS, "-o", "/dev/full"], "must end in .npy"),
        *[(["eri", WATER, *BASIS, "--devices", text], "--devices takes all") for text in ("", "0,", "-1", "a", "0 1")],
        (["warmup", "--jobs", "0"], "--jobs takes"),
        (["warmup", "--jobs", "9" * 9], "--jobs takes"),
        (["warmup", "--lmax", "-1"], "--lmax takes"),
        (["warmup", "--lmax", "99"], "--lmax takes"),
        (["warmup", "--operator", "abacus"], "abacus"),
    ],
)
def test_bad_values_are_refused_before_work(arguments, message, capsys):
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("md4: ")
    assert printed.err.count("\n") == 1
    assert message in printed.err
    assert printed.out == ""


ODD = st.sampled_from(["nan", "inf", "-1", "0", "1e400", "", "x", "\0", "\ud800", "9" * 5000, "1e-320", "[]", "../.."])
OPTIONS = ["--basis", "--charge", "--spin", "--omega", "--backend", "--max-memory", "--aosym", "-o", "--tolerance",
           "--abs-tolerance", "--max-quartets", "--seed", "--report", "--jobs", "--lmax", "--operator",
           "--devices", "--df", "--export", "--import"]  # fmt: skip


@pytest.mark.usefixtures("no_work")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["eri", "validate", "warmup"]), st.dictionaries(st.sampled_from(OPTIONS), ODD, min_size=1), ODD)
def test_random_values_end_in_a_sentence(command, options, geometry):
    arguments = [text for option in options.items() for text in option]
    try:
        # the backend is one that no work can be begun with
        status = main([command, geometry, "--basis", "sto-3g", "--backend", "abacus", *arguments])
    except SystemExit as ended:
        status = ended.code
    assert status == 2


def test_the_end_says_what_was_replaced(tmp_path, capsys):
    path = tmp_path / "eri.npy"
    path.write_text("no array")
    arguments = ["eri", "He 0 0 0", *BASIS, "-o", str(path)]
    for before in ("(8 bytes, not an array)", "(1, 1, 1, 1)"):
        assert main(arguments) == 0
        assert f"replaces {path} {before}\n" in capsys.readouterr().out


def test_h5_keeps_other_datasets(tmp_path):
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "eri.h5"
    with h5py.File(path, "w") as file:
        file["mine"] = [1, 2, 3]
    assert main(["eri", "He 0 0 0", *BASIS, "-o", str(path)]) == 0
    with h5py.File(path) as file:
        assert file["mine"][:].tolist() == [1, 2, 3]
        assert file["eri"].shape == (1, 1, 1, 1)


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (MemoryError("Unable to allocate 3 TiB"), 2, "out of memory (Unable to allocate 3 TiB); give a --max-memory"),
        (MemoryError(), 2, "out of memory; give a --max-memory"),
        (MemoryLimitError("too much"), 2, "too much"),
        (OSError(12, "Cannot allocate memory"), 2, "out of memory"),
        (OSError(5, "Input/output error"), 2, "Input/output error"),
    ],
)
def test_errors_of_the_system(error, status, message, monkeypatch, capsys):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("md4.int2e", fail)
    assert main(["eri", "He 0 0 0", *BASIS]) == status
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1


def run(*arguments, **options):
    return subprocess.run([sys.executable, "-m", "md4", *arguments], stderr=subprocess.PIPE, text=True, check=False,
                          **options)  # fmt: skip


def test_nobody_reads():
    read, write = os.pipe()
    os.close(read)
    try:
        done = run("info", stdout=write)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_output_to_a_full_disk():
    with open("/dev/full", "w") as full:
        done = run("info", stdout=full)
    assert done.returncode == 2
    assert done.stderr == "md4: [Errno 28] No space left on device.\n"


def test_little_address_space():
    """The whole tensor of benzene in cc-pvdz would take 1.3 GB."""

    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))

    benzene = str(Path(WATER).with_name("benzene.xyz"))
    threads = {"NUMBA_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = run("eri", benzene, "--basis", "cc-pvdz", "--backend", "cpu", preexec_fn=limit, env=os.environ | threads,
               stdout=subprocess.DEVNULL, timeout=120)  # fmt: skip
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "--aosym" in done.stderr
    assert "memory" in done.stderr


@pytest.mark.parametrize("name", ["file", "\udcff"])
def test_info_on_an_odd_cache_folder(name, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MD4_CACHE_DIR", str(tmp_path / name))
    assert main(["info"]) == 0
    assert "cache  " in capsys.readouterr().out


def test_info_on_an_unreadable_cache(monkeypatch, capsys):
    def refuse(_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setenv("MD4_CACHE_DIR", "/")
    monkeypatch.setattr("os.listdir", refuse)
    assert main(["info"]) == 0
    assert "/ cannot be read: Permission denied" in capsys.readouterr().out


def test_jobs_of_the_environment(monkeypatch, capsys):
    pytest.importorskip("md4.gpu.warmup")
    monkeypatch.setenv("MD4_JOBS", "abc")
    assert main(["eri", "He 0 0 0", *BASIS]) == 2
    assert "MD4_JOBS must be" in capsys.readouterr().err


def test_python_m_md4():
    done = subprocess.run([sys.executable, "-m", "md4", "--help"], capture_output=True, text=True, check=True)
    assert all(command in done.stdout for command in ("eri", "validate", "info"))


def test_usage_error_exits_2():
    with pytest.raises(SystemExit, match="2"):
        main(["eri", WATER])


@pytest.mark.parametrize(("enabled", "delay", "shown"), [(None, 0, False), (True, 0, True), (True, 60, False)])
def test_progress_is_seen_only_when_it_should(capsys, enabled, delay, shown):
    with Progress(3, enabled=enabled, delay=delay, label="work") as bar:
        for _ in range(3):
            bar.update()
    assert ("work" in capsys.readouterr().err) == shown
