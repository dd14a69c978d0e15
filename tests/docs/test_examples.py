"""The examples of docs/examples run and are right."""

import runpy
import subprocess
import sys

import pytest
from places import EXAMPLES
from pyscf import gto, scf


def test_scf_plain(backend):
    example = runpy.run_path(str(EXAMPLES / "scf_plain.py"))
    energy, density = example["heh_cation"](backend)
    basis = {
        e: [[0, *zip(*shell)] for shell in example[name]] for e, name in (("He", "HELIUM"), ("H", "HYDROGEN"))
    }  # fmt: skip
    atoms = list(zip(("He", "H"), example["POSITIONS"]))
    mf = scf.RHF(gto.M(atom=atoms, basis=basis, unit="Bohr", charge=1, verbose=0)).run(conv_tol=1e-12)
    assert energy == pytest.approx(mf.e_tot, abs=1e-9)
    assert density == pytest.approx(mf.make_rdm1(), abs=1e-5)


def test_scf_plain_needs_no_pyscf():
    code = (
        "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__'); "
        "assert not [m for m in sys.modules if m.startswith('pyscf')]"
    )
    run = [sys.executable, "-c", code, str(EXAMPLES / "scf_plain.py")]
    printed = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    assert "Hartree" in printed
