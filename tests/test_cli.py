import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from md4.__main__ import main
from md4.progress import Progress

gto = pytest.importorskip("pyscf.gto")

WATER = str(Path(__file__).parents[1] / "docs" / "examples" / "water.xyz")
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


def test_info(capsys):
    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    for name in ("python", "numba-cuda", "llvmlite", "GPU", "backend", "cache"):
        assert name in printed


def test_info_shows_the_cache(capsys, tmp_path, monkeypatch):
    pytest.importorskip("md4.dispatch")
    monkeypatch.setenv("MD4_CACHE_DIR", str(tmp_path))
    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    assert str(tmp_path) in printed
    assert "compiled variants" in printed


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
