"""`md4 eri --df` and `md4 validate --df`."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from places import EXAMPLES
from pyscf import df, gto

from md4.__main__ import main
from md4.cli.fitting import row_ranges
from md4.errors import MemoryLimitError
from md4.validation.libcint import Libcint

WATER = str(EXAMPLES / "water.xyz")
BASIS = ["--basis", "sto-3g", "--backend", "cpu"]


def reference(aosym="s2ij", auxbasis="def2-svp-jkfit", omega=0.0, cart=False):
    """PySCF's tensors by name."""
    mol = gto.M(atom=WATER, basis="sto-3g", cart=cart, verbose=0)
    auxmol = df.make_auxmol(mol, auxbasis)
    with mol.with_range_coulomb(omega), auxmol.with_range_coulomb(omega):
        return {"int3c2e": df.incore.aux_e2(mol, auxmol, aosym=aosym), "int2c2e": auxmol.intor("int2c2e")}


def written(path):
    """The tensors in a file, by name."""
    if path.suffix == ".npy":
        return {name: np.load(path.with_suffix(f".{name}.npy")) for name in ("int3c2e", "int2c2e")}
    h5py = pytest.importorskip("h5py")
    with h5py.File(path) as file:
        return {name: file[name][:] for name in ("int3c2e", "int2c2e")}


def assert_same(found, expected):
    for name, theirs in expected.items():
        assert found[name].shape == theirs.shape
        np.testing.assert_allclose(found[name], theirs, rtol=0, atol=1e-12 * abs(theirs).max())


@pytest.mark.parametrize("name", ["eri.npy", "eri.h5"])
@pytest.mark.parametrize("aosym", ["s1", "s2ij"])
@pytest.mark.parametrize("large", [False, True])
def test_files(tmp_path, name, aosym, large, monkeypatch, capsys):
    """PySCF's default auxiliary basis; as a whole and, when it is large, some shells at a time."""
    pytest.importorskip("h5py")
    if large:
        monkeypatch.setattr("md4.cli.fitting.LARGE", 1e-9)
    path = tmp_path / name
    assert main(["eri", WATER, *BASIS, "--df", "--aosym", aosym, "-o", str(path)]) == 0
    expected = reference(aosym)
    assert_same(written(path), expected)
    printed = capsys.readouterr().out
    assert f"{expected['int2c2e'].shape[0]} functions in def2-svp-jkfit" in printed
    norms = [float(text) for text in re.findall(r"norm (\S+),", printed)]
    assert norms == pytest.approx([np.linalg.norm(tensor) for tensor in expected.values()], rel=1e-11)
    assert len(list(tmp_path.iterdir())) == (2 if name == "eri.npy" else 1)


def test_options(tmp_path, capsys):
    """A named auxiliary basis, Cartesian functions, omega; the default symmetry."""
    path, arguments = tmp_path / "eri.npy", ["--df", "cc-pvdz-ri", "--cart", "--omega", "0.4"]
    assert main(["eri", WATER, *BASIS, *arguments, "-o", str(path), "--max-memory", "500"]) == 0
    assert_same(written(path), reference("s2ij", "cc-pvdz-ri", 0.4, cart=True))
    assert f"wrote {tmp_path / 'eri.int3c2e.npy'}, {tmp_path / 'eri.int2c2e.npy'}\n" in capsys.readouterr().out


def test_without_a_file(capsys):
    assert main(["eri", WATER, *BASIS, "--df"]) == 0
    shapes = re.findall(r"(int\S+ .*) float64", capsys.readouterr().out)
    expected = reference()
    assert shapes == [f"int3c2e s2ij {expected['int3c2e'].shape}", f"int2c2e {expected['int2c2e'].shape}"]


@pytest.mark.parametrize("name", ["eri.npy", "eri.h5"])
def test_what_is_there_stays_if_it_fails(tmp_path, name, monkeypatch, capsys):
    pytest.importorskip("h5py")
    path = tmp_path / name
    arguments = ["eri", "He 0 0 0", *BASIS, "--df", "cc-pvdz-ri", "-o", str(path)]
    assert main(arguments) == 0
    assert "replaces" not in capsys.readouterr().out
    before = {entry.name: entry.read_bytes() for entry in tmp_path.iterdir()}

    def fail(*_, **__):
        raise MemoryLimitError("too much")

    monkeypatch.setattr("md4.int2c2e", fail)
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert "too much" in printed.err
    assert re.search(r"replaces .*int3c2e.* \(1, 9\), .*int2c2e.* \(9, 9\)\n", printed.out)
    assert {entry.name: entry.read_bytes() for entry in tmp_path.iterdir()} == before


def test_h5_keeps_other_datasets(tmp_path):
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "eri.h5"
    assert main(["eri", "He 0 0 0", *BASIS, "-o", str(path)]) == 0
    assert main(["eri", "He 0 0 0", *BASIS, "--df", "cc-pvdz-ri", "-o", str(path)]) == 0
    with h5py.File(path, "r+") as file:
        assert {name: data.shape for name, data in file.items()} == {
            "eri": (1, 1, 1, 1), "int2c2e": (9, 9), "int3c2e": (1, 9),
        }  # fmt: skip
        del file["int2c2e"]
        file.create_group("int2c2e")
    assert main(["eri", "He 0 0 0", *BASIS, "--df", "cc-pvdz-ri", "-o", str(path)]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--df", "no-such-basis"], "has the basis set 'no-such-basis'"),
        (["--df", "aug-cc-pv6z-no"], "Without a name PySCF's choice is taken"),
        (["--df", " "], "--df is empty"),
        (["--df", "--aosym", "s4"], "--aosym 's4' is unknown; use one of s1, s2ij"),
        (["--aosym", "s2ij"], "--aosym 's2ij' is unknown; use one of s1, s4, s8"),
        (["--df", "--mpi"], "leave out --mpi and --devices"),
        (["--df", "--devices", "0,1"], "leave out --mpi and --devices"),
        (["--df", "-o", "eri.txt"], "must end in .npy"),
    ],
)
def test_errors_are_one_line(arguments, message, capsys):
    assert main(["eri", WATER, *BASIS, *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("md4: ")
    assert printed.err.count("\n") == 1
    assert message in printed.err
    assert printed.out == ""


def test_too_little_memory_is_told_in_options(capsys):
    assert main(["eri", WATER, *BASIS, "--df", "--max-memory", "0.001"]) == 2
    assert capsys.readouterr().err.endswith("but 1 kB may be used; use a larger --max-memory.\n")


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20), st.integers(0, 200))
def test_row_ranges(sizes, most):
    """They cover all items, and none that has several is too large, nor could it take one more."""
    found = list(row_ranges([0, *np.cumsum(sizes).tolist()], most))
    assert [n for first, last in found for n in range(first, last)] == list(range(len(sizes)))
    for first, last in found:
        assert last == first + 1 or sum(sizes[first:last]) <= most
        assert last == len(sizes) or sum(sizes[first : last + 1]) > most


def test_validate(capsys, monkeypatch):
    arguments = ["validate", WATER, *BASIS, "--df", "--max-quartets", "8"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "auxiliary basis def2-svp-jkfit" in printed
    assert "(pp|d)" in printed
    assert re.search(r"blocks: all within tolerance\n$", printed)
    blocks = Libcint.blocks
    monkeypatch.setattr(Libcint, "blocks", lambda *args: blocks(*args) + 1e-9)
    assert main(arguments) == 0
    assert "libcint off, by the oracle" in capsys.readouterr().out
    monkeypatch.setattr("md4.validation.arbiter.load_oracle", lambda: None)
    assert main(arguments) == 1
    assert "FAILED" in capsys.readouterr().out


def test_validate_with_a_report(tmp_path, capsys, monkeypatch):
    for name in ("contraction_checks", "symmetry_checks", "oracle_checks"):
        monkeypatch.setattr(f"md4.validation.report.{name}", lambda *_: [])
    path = tmp_path / "report.html"
    options = ["--df", "cc-pvdz-ri", "--max-quartets", "2", "--report", str(path)]
    assert main(["validate", "He 0 0 0", *BASIS, *options]) == 0
    assert "(ss|p)" in capsys.readouterr().out
    assert "Density fitting" in path.read_text()
