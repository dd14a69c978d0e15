"""bench/gradients.py: what it compares, prints and writes, with PySCF in the place of GPU4PySCF, and without either."""

import csv
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from places import ROOT

pytest.importorskip("pyscf")
sys.path.insert(0, str(ROOT / "bench"))
import gradients
from nuclear_forces import forces_by_pyscf
from pyscf import lib, scf
from systems import System


class OnDevice(scf.hf.RHF):
    """GPU4PySCF's RHF, by PySCF. Its forces are multiplied by `factor`."""

    factor, highest = 1.0, 4

    def Gradients(self):
        return self

    def jk_energy_per_atom(self, dm, j_factor, k_factor):
        assert max(self.mol.bas_angular(n) for n in range(self.mol.nbas)) <= self.highest
        return self.factor * forces_by_pyscf(self.mol, dm, j_factor, k_factor)


class Sent(np.ndarray):
    """An array of CuPy."""

    def get(self):
        return np.asarray(self)


class FittedOnDevice(OnDevice):
    """GPU4PySCF's RHF with density fitting, by PySCF. `get_jk` returns two arrays whatever is asked for."""

    def density_fit(self, auxbasis):
        mf = scf.RHF(self.mol).density_fit(auxbasis)
        made = SimpleNamespace(Gradients=lambda: self, with_df=SimpleNamespace(build=lambda build_cderi: None))
        made.with_df.get_jk = lambda dm, hermi, with_k: [v.view(Sent) for v in mf.with_df.get_jk(np.asarray(dm), hermi)]
        self.of_fitting = mf.nuc_grad_method()
        return made

    def jk_energy_per_atom(self, dm, j_factor, k_factor, hermi):
        gradients = self.of_fitting
        gradients.base.mo_coeff, gradients.base.mo_occ = dm.mo_coeff, dm.mo_occ
        vj, vk = gradients.get_jk(self.mol, dm)
        of_aos = np.einsum("xij,ij->xi", 2 * j_factor * vj - k_factor * vk, dm)
        found = np.array([of_aos[:, first:last].sum(axis=1) for *_, first, last in self.mol.aoslice_by_atom()])
        return found + np.asarray(j_factor * vj.aux - k_factor / 2 * vk.aux)[0, 0]


PEER = SimpleNamespace(scf=SimpleNamespace(RHF=OnDevice))
FITTED = SimpleNamespace(
    scf=SimpleNamespace(RHF=FittedOnDevice), cupy=SimpleNamespace(asarray=np.asarray), tagged=lib.tag_array
)


@pytest.fixture
def measured(tmp_path):
    """Rows by kind, and what a process leaves to the one that waits for it."""

    def measure(peer, fitted=False, kinds=("jk", "j")):
        file = tmp_path / "rows.json"
        args = SimpleNamespace(
            kinds=kinds, backend="cpu", repeats=2, pyscf=not fitted, fitted=fitted, inside=file
        )
        made = gradients.Measurement(System("water", "cc-pvdz" if fitted else "sto-3g"), args)
        made.measure(peer, "GPU4PySCF 1.9")
        return made.rows, json.loads(file.read_text())

    return measure


def test_all_programs(measured):
    rows, kept = measured(PEER)
    assert kept == list(rows.values())
    for row in kept:
        assert tuple(row) == gradients.COLUMNS
        assert "" not in {**row, "note": "none"}.values()
        assert row["note"] == ""
        assert row["ratio"] == row["gradient"] / row["build"]
        assert row["speedup"] == row["peer_gradient"] / row["gradient"]
        assert max(row["difference"], row["pyscf_difference"]) < 1e-11
        assert row["error_estimate"] <= row["error_bound"] < 1e-9
        cells = [cell.strip() for cell in gradients.line(row).split("|")[1:-1]]
        assert [len(text.split("|")) - 2 for text in gradients.HEADER.splitlines()[1:]] == [len(cells)] * 2
        assert cells[:4] == ["water", "sto-3g", "7", row["kind"]]
        assert [float(cells[n]) for n in (4, 5)] == pytest.approx([row["build"], row["gradient"]], rel=0.01)
        assert [float(cells[n]) for n in (10, 11)] == pytest.approx([row["peer_build"], row["peer_gradient"]], rel=0.01)


def test_density_fitting(measured):
    """Both have the tolerance, md4 without bounds."""
    for row in measured(FITTED, fitted=True)[0].values():
        assert row["difference"] < 1e-9
        assert row["peer_build"] > 0
        assert row["error_bound"] == row["pyscf"] == row["note"] == ""
        assert row["tolerance"] == 1e-12


def test_matrices(measured):
    """The same forces, without bounds and without GPU4PySCF."""
    (row,) = measured(PEER, kinds=["matrices"])[0].values()
    assert row["pyscf_difference"] < 1e-11
    assert row["gradient"] > 0
    assert row["error_bound"] == row["peer_gradient"] == row["note"] == ""
    assert row["tolerance"] == 1e-13


def test_wrong_forces_are_found(measured, monkeypatch):
    monkeypatch.setattr(OnDevice, "factor", 1.001)
    rows, _ = measured(PEER)
    assert min(row["difference"] for row in rows.values()) > 1e-4


def test_a_peer_without_forces(measured, monkeypatch):
    """The other columns are there, the table says none; without a peer it says not run."""
    monkeypatch.setattr(OnDevice, "highest", 0)
    for peer, shown, note in (PEER, "none", "GPU4PySCF: AssertionError"), (None, "not run", ""):
        row = measured(peer)[0]["jk"]
        assert row["note"].startswith(note)
        assert row["peer_gradient"] == row["peer_build"] == row["speedup"] == row["difference"] == ""
        assert row["pyscf_difference"] < 1e-11
        assert gradients.line(row).split("|")[12].strip() == shown


@pytest.mark.parametrize("most, calls", [(1e9, 7), (0.0, 4)])
def test_each_call_has_another_density(monkeypatch, most, calls):
    """The result is that of the density itself; a slow call is repeated twice only."""
    monkeypatch.setattr(gradients, "LONG", most)
    got = []
    columns, result = gradients.timed("build", lambda dm: got.append(float(dm[0])) or 2 * dm, np.ones(1), 5)
    assert result == 2.0
    assert len(set(got)) == len(got) == calls
    assert max(got) < 1.01
    assert [*columns] == ["build", "build_spread", "build_first"]


def test_what_an_ended_process_left(tmp_path, monkeypatch, capfd):
    """By a failure, or by the limit of time."""
    script = tmp_path / "script.py"
    script.write_text("""
import json, pathlib, sys, time
pathlib.Path(sys.argv[-1]).write_text(json.dumps(sys.argv[1:-1]))
time.sleep(float(sys.argv[1]))
raise SystemExit(3)
""")
    monkeypatch.setattr(gradients, "__file__", str(script))
    for wait, limit, status in ("0", 60, "exit status 3"), ("600", 3, "exit status none within 3 s"):
        assert gradients.rows_of("water/sto-3g", [wait], limit) == [wait, "--systems", "water/sto-3g", "--inside"]
        assert f"water/sto-3g: {status}" in capfd.readouterr().out
    with pytest.raises(SystemExit, match="is no system"):
        gradients.main(["--systems", "nowhere"])


@pytest.mark.thorough
def test_the_table_and_the_file(tmp_path, capfd):
    path = tmp_path / "rows.csv"
    options = ["--backend", "cpu", "--no-peer", "--pyscf", "--repeats", "1", "--csv", str(path)]
    gradients.main([*options, "--systems", "water/cc-pvdz", "water/sto-3g"])
    told = capfd.readouterr()
    assert told.out.count("md4") == 2  # the machine, and the header of one table
    assert "water cc-pvdz jk: build " in told.err
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["basis"], row["kind"], row["nao"]) for row in rows] == [("cc-pvdz", "jk", "24"), ("sto-3g", "jk", "7")]
    for row in rows:
        assert float(row["pyscf_difference"]) < 1e-11
        assert row["peer_gradient"] == row["note"] == ""
        assert f"| water | {row['basis']} | {row['nao']} | jk |" in told.out
