"""bench/peers.py: what it compares, prints and writes, with PySCF in the place of GPU4PySCF, and without either."""

import csv
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from places import ROOT

import md4

pytest.importorskip("pyscf")
sys.path.insert(0, str(ROOT / "bench"))
import peers
import pyscf
import systems
from pyscf import df, lib, scf
from systems import System

WATER = System("water", "sto-3g")


class OnDevice(np.ndarray):
    """A CuPy array."""

    def get(self):
        return np.array(self)


def on_device(array):
    return np.array(array).view(OnDevice)


class Tagged(OnDevice):
    """A CuPy array with tags."""


def tagged(array, **tags):
    assert isinstance(array, OnDevice)
    array = array.view(Tagged)
    array.__dict__.update(tags)
    return array


class Fitting(df.DF):
    """GPU4PySCF's DF, by PySCF."""

    def get_jk(self, dm, **options):
        assert isinstance(dm, Tagged)
        density = lib.tag_array(dm.get(), mo_coeff=dm.mo_coeff.get(), mo_occ=dm.mo_occ.get())
        return [on_device(v) for v in super().get_jk(density, **options)]


@pytest.fixture
def stand_in(monkeypatch):
    """Modules with the names that GPU4PySCF and CuPy have, by PySCF and NumPy; the calls that they got."""
    told = []

    def note(name, result=None):
        return lambda *args: told.append(name) or result

    pool = SimpleNamespace(free_all_blocks=note("freed"))
    cuda = SimpleNamespace(Device=lambda: SimpleNamespace(synchronize=note("synchronized")))
    names = {
        "cupy": {
            "asarray": on_device, "cuda": cuda, "__version__": "14", "get_default_memory_pool": lambda: pool,
            "get_default_pinned_memory_pool": lambda: pool,
        },
        "gpu4pyscf": {"__version__": "1.9"},
        "gpu4pyscf.scf": {"RHF": scf.RHF},
        "gpu4pyscf.df": {"DF": Fitting},
        "gpu4pyscf.lib": {},
        "gpu4pyscf.lib.cupy_helper": {"tag_array": tagged},
        "gpu4pyscf.lib.cutensor": {"contract_engine": "cupy"},
    }  # fmt: skip
    for name, content in names.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    return told


@pytest.fixture
def missing(monkeypatch):
    """No CuPy, no GPU4PySCF."""
    for name in ("cupy", "gpu4pyscf"):
        monkeypatch.setitem(sys.modules, name, None)


def run(monkeypatch, capsys, path, *options):
    """What a run of the script on the CPU prints, and the rows of its file."""
    command = ["peers.py", "--backend", "cpu", "--repeats", "2", "--csv", str(path), *options]
    monkeypatch.setattr(sys, "argv", command)
    peers.main()
    with path.open(newline="") as file:
        return capsys.readouterr().out, list(csv.DictReader(file))


def cells(told):
    """Cells of the Markdown table's rows."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in told.splitlines() if line.startswith("|")]
    assert len({len(row) for row in rows}) == 1
    return rows[2:]


@pytest.mark.thorough
def test_all_programs(monkeypatch, capsys, tmp_path, stand_in):
    options = "--systems", "water/cc-pvdz", "--check", "--pyscf", "1"
    told, rows = run(monkeypatch, capsys, tmp_path / "rows.csv", *options)
    assert f"PySCF {pyscf.__version__} on" in told
    assert "GPU4PySCF 1.9, CuPy 14, products of tensors by cupy, no cuTENSOR" in told
    assert [(row["method"], row["matrices"]) for row in rows] == [
        (method, matrices) for method in ("direct", "fitting") for matrices in ("J, K", "J", "K")
    ]
    for row, shown in zip(rows, cells(told)):
        assert float(row["ratio"]) == pytest.approx(float(row["peer_seconds"]) / float(row["seconds"]))
        assert float(row["difference"]) < 1e-10
        assert (row["naux"] == "") == (row["setup"] == "") == (row["peer_setup"] == "") == (row["method"] == "direct")
        assert (row["system"], row["nao"], row["lmax"], row["note"]) == ("water", "24", "2", "")
        assert shown[:6] == [row[name] for name in ("system", "basis", "nao", "naux", "method", "matrices")]
        assert float(shown[6]) == pytest.approx(float(row["seconds"]), rel=0.01)
        assert float(shown[9]) == pytest.approx(float(row["peer_seconds"]), rel=0.01)
        if row["method"] == "direct":
            assert row["pyscf_seconds"] == row["store"] == row["peak_gb"] == ""
            continue
        assert float(row["pyscf_difference"]) < 1e-10
        assert float(row["pyscf_setup"]) > 0
        assert float(shown[16]) == pytest.approx(float(row["pyscf_seconds"]), rel=0.01)
        assert (shown[19], row["store"], row["peak_gb"]) == ("device", "device", "")  # the CPU's memory has no peak
    assert 0 < float(rows[0]["error"]) < 1e-11
    assert 0 < float(rows[0]["peer_error"]) < 1e-11
    assert "synchronized" in stand_in
    assert "freed" in stand_in


@pytest.mark.thorough
def test_not_installed(monkeypatch, capsys, tmp_path, missing):
    told, rows = run(monkeypatch, capsys, tmp_path / "rows.csv", "--systems", "water/sto-3g", "--methods", "direct")
    assert "GPU4PySCF: not run (ModuleNotFoundError" in told
    assert [shown[9] for shown in cells(told)] == ["not run"] * 3
    for row in rows:
        assert float(row["seconds"]) > 0
        assert row["peer_seconds"] == row["ratio"] == row["difference"] == row["error"] == ""
        assert row["note"] == "GPU4PySCF: not run"
        assert "GPU4PySCF: not run" in row["machine"]


def test_no_density_fitting(monkeypatch, capsys, tmp_path, missing):
    monkeypatch.delattr(md4, "DF", raising=False)
    told, rows = run(monkeypatch, capsys, tmp_path / "rows.csv", "--systems", "water/sto-3g")
    assert "density fitting: not run, as this md4 has no md4.DF" in told
    assert {row["method"] for row in rows} == {"direct"}


def test_tensors_that_pyscf_is_not_to_make(monkeypatch, capsys, tmp_path, missing):
    """One of 4 kB with --pyscf 1e-6, that is 1 kB."""
    options = "--systems", "water/sto-3g", "--methods", "fitting", "--pyscf", "1e-6"
    monkeypatch.setattr(peers, "auxiliary", lambda basis: "weigend")
    _, rows = run(monkeypatch, capsys, tmp_path / "rows.csv", *options)
    assert peers.tensor_gb(WATER.mol(), "weigend") > 1e-6
    assert all(float(row["seconds"]) > 0 and row["pyscf_seconds"] == "" for row in rows)


def test_no_time(monkeypatch, capsys, missing):
    args = SimpleNamespace(limit=-1, csv=None)
    assert peers.run_all([(WATER, "direct")], peers.MD4("cpu"), None, args) == []
    assert "no time for water sto-3g, direct" in capsys.readouterr().out


class Broken:
    """A program whose K fails."""

    compiles = True

    def __init__(self):
        self.released, self.none = 0, []

    def direct(self, mol, dm):
        vj, vk = scf.hf.get_jk(mol, dm)
        return {"J, K": lambda: (vj, vk), "J": lambda: (vj,), "K": lambda: self.none[0]}

    def release(self):
        self.released += 1


def test_a_program_that_fails(capsys):
    broken, args = Broken(), SimpleNamespace(limit=60, csv=None, seed=0, repeats=1, check=False, machine="here")
    rows = peers.run_all([(WATER, "direct")], peers.MD4("cpu"), broken, args)
    assert broken.released == 1
    assert [row["note"] for row in rows] == ["GPU4PySCF: IndexError: list index out of range"] * 3
    assert all(row["seconds"] > 0 and row["peer_seconds"] == "" for row in rows)
    assert "water sto-3g, direct: GPU4PySCF: IndexError: list index out of range" in capsys.readouterr().out


def test_wrong_matrices_are_seen():
    """Of J and of K."""
    right = peers.results(peers.MD4("cpu"), "direct", (WATER.mol(), peers.guess_density(WATER.mol())), 1)[0]
    for place in range(2):
        wrong = [v.copy() for v in right["J, K"].matrices]
        wrong[place][1, 2] += 1e-3
        assert max(map(peers.difference, wrong, right["J, K"].matrices)) == pytest.approx(1e-3)
    wrong[0][0, 0] = np.nan
    assert np.isnan(peers.difference(wrong[0], right["J, K"].matrices[0]))


@pytest.mark.parametrize(("seconds", "count"), [(0.01, 5), (0.8, 3), (1.5, 2), (9, 2)])
def test_long_builds_are_repeated_less(monkeypatch, seconds, count):
    clock, calls = iter(np.arange(20) * seconds), []
    monkeypatch.setattr(peers, "perf_counter", lambda: next(clock))
    median, spread, result = peers.timed(lambda: calls.append(0) or len(calls), 5)
    assert len(calls) == result == 1 + count
    assert median == pytest.approx(seconds)
    assert spread == pytest.approx(0, abs=1e-12)


def test_closed_shell():
    mol = System.parse("2waters/cc-pvdz").mol()
    dm, overlap = peers.closed_shell(mol, systems.guess_density(mol)), mol.intor("int1e_ovlp")
    assert np.trace(dm @ overlap) == pytest.approx(20)
    np.testing.assert_allclose(dm @ overlap @ dm, 2 * np.asarray(dm), atol=1e-10)
    np.testing.assert_allclose((dm.mo_coeff * dm.mo_occ) @ dm.mo_coeff.T, np.asarray(dm), atol=1e-12)
    assert scf.RHF(mol).energy_tot(np.asarray(dm)) < -151  # Hartree; -152.05 with the orbitals of Hartree-Fock


@pytest.mark.parametrize("name", dict.fromkeys([*peers.TABLE, *peers.FITTED]))
def test_systems_of_the_table(name):
    """Their basis sets are there, and but for cc-pV5Z no function is above g: those GPU4PySCF computes on the CPU."""
    system = System.parse(name)
    mol = system.mol()
    assert max(mol.bas_angular(n) for n in range(mol.nbas)) <= 4 + name.endswith("5z")
    assert mol.spin == 0
    if name in peers.FITTED:
        auxiliary = df.addons.make_auxmol(mol, peers.auxiliary(system.basis))
        assert max(auxiliary.bas_angular(n) for n in range(auxiliary.nbas)) <= 6


@pytest.mark.parametrize(
    ("name", "atoms", "nao"),
    [("vitaminc/def2-tzvpp", 20, 484), ("tamoxifen/def2-tzvpp", 57, 1274), ("taxol/def2-svp", 113, 1123)],
)
def test_molecules(name, atoms, nao):
    system = System.parse(name)
    mol = system.mol()
    assert (mol.natm, mol.nao, system.waters) == (atoms, nao, 0)


@pytest.mark.parametrize("text", ["benzene", "taxol", "taxols/sto-3g", "xwaters/sto-3g", "/sto-3g"])
def test_no_systems(text):
    with pytest.raises(SystemExit, match="is no"):
        System.parse(text)
