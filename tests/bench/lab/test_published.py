"""bench/lab/published.py: one small energy, and that violations are told."""

import sys

import pytest
from places import ROOT

pytest.importorskip("pyscf")
sys.path.insert(0, str(ROOT / "bench" / "lab"))
import published

BY_NAME = {s.name: s for s in published.SYSTEMS}


def row(name, basis, energy, converged=1):
    return {
        "system": name, "basis": basis, "energy": f"{energy:.12f}", "converged": converged, "aos": 28, "above": 3.9e-2
    }  # fmt: skip


def test_energy():
    """Against PySCF's own integrals."""
    helium = BY_NAME["He"]
    found = published.calculate(14, helium, "cc-pvtz", "cpu")
    assert float(found["energy"]) == pytest.approx(helium.solver("cc-pvtz").kernel(), abs=1e-11)
    assert float(found["above"]) == pytest.approx(5.267e-4, abs=1e-7)
    assert published.violations([found]) == []


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([row("He", "cc-pvdz", -2.855), row("He", "cc-pvtz", -2.861)], []),
        ([row("He", "cc-pvdz", -2.861), row("He", "cc-pvtz", -2.855)], ["above the energy in the smaller set"]),
        ([row("He", "cc-pvtz", -2.861681)], ["below the limit"]),
        ([row("He", "cc-pvtz", -2.861, 0)], ["did not converge"]),
        ([row("O", "aug-cc-pv7z", -74.81239279168)], []),
        ([row("O", "aug-cc-pv7z", -74.8123927)], ["is off by 9.2e-08"]),
    ],
)
def test_violations(rows, words):
    found = published.violations(rows)
    assert len(found) == len(words)
    assert all(word in sentence for word, sentence in zip(words, found))


def test_geometry():
    """Bond lengths are in Bohr."""
    nitrogen = BY_NAME["N2"].mol("cc-pvdz")
    assert nitrogen.energy_nuc() == pytest.approx(49 / 2.068)
    assert BY_NAME["O"].mol("aug-cc-pvdz").spin == 2


@pytest.mark.parametrize("name", list(BY_NAME))
def test_largest_basis_sets_need_no_internet(name):
    """They are stored, and md4 computes them: the angular momenta of a quartet add up to 32 at most."""
    system = BY_NAME[name]
    assert isinstance(published.basis_set(system.bases[-1], set(system.elements)), dict)
    mol = system.mol(system.bases[-1])
    assert 5 <= max(mol.bas_angular(n) for n in range(mol.nbas)) <= 8


def test_tables(capsys):
    rows = [row("N2", basis, -108.98) for basis in ("cc-pvdz", "aug-cc-pv7z")] + [row("O", "aug-cc-pvdz", -74.79)]
    published.print_tables(rows)
    printed = capsys.readouterr().out
    assert "| N2 | 2.068 | -108.99382564, x2dhf | 3.9e-02 |  |  |  |  | 3.9e-02 in aug-cc-pv7z |" in printed
    assert "| aug-cc-pvdz | 28 | -74.790000000000 |" in printed
