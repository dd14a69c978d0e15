"""What PySCF does to a mean-field object, done to one with md4's J and K: md4 stays, or goes as it should."""

import copy
import io
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
from molecules import WATER, molecule
from pyscf import df, dft, gto, lib, scf
from solvers import assert_same, density, solver

import md4
from md4.errors import ArgumentError
from md4.pyscf.builder import made_for
from md4.pyscf.geometry import load_molecule
from md4.pyscf.scf import MD4SCF


def test_attach_does_no_work(water, monkeypatch):
    """Nor does it look for a GPU."""

    def never(*args, **kwargs):
        raise AssertionError

    monkeypatch.setattr("md4.contract.fock.JK.__init__", never)
    monkeypatch.setattr("md4.gpu.context.gpu_available", never)
    mf = scf.RHF(water)
    assert md4.attach(mf, backend="cuda", max_memory=100) is mf
    assert repr(mf) == "<MD4RHF: 3 atoms, 13 AOs, J and K by md4, backend='cuda', max_memory=100>"


def test_attach_again_changes_options(rhf):
    md4.attach(rhf, backend="cuda")
    assert type(rhf).__mro__.count(MD4SCF) == 1
    assert "cuda" in repr(rhf)


def test_attach_to_one_that_has_run(water):
    """PySCF's tensor is given back; md4 makes its own."""
    mf = scf.RHF(water).run(verbose=0)
    assert mf._eri is not None
    assert md4.attach(mf, backend="cpu")._eri is None
    assert abs(mf.kernel() - scf.RHF(water).run(verbose=0).e_tot) < 1e-8
    assert made_for(mf._eri) is not None


def test_detach(rhf, water):
    rhf.kernel()
    mf = md4.detach(rhf)
    assert mf is rhf
    assert type(mf) is scf.hf.RHF
    assert abs(mf.kernel() - scf.RHF(water).run(verbose=0).e_tot) < 1e-9
    assert mf._eri is not None
    with pytest.raises(md4.ArgumentError, match="not attached"):
        md4.detach(mf)


def test_copy_shares_pairs_until_reset(rhf, water):
    dm = density(water.nao)
    twin, pairs = rhf.copy(), rhf.md4_jk
    assert twin.md4_jk is pairs
    want = rhf.get_jk(water, dm)
    stretched = molecule("O 0 0 0.1173; H 0 0.8 -0.5; H 0 -0.8 -0.5", "6-31g")
    twin.reset(stretched)
    found = twin.get_jk(dm=dm)
    assert_same(found, scf.hf.dot_eri_dm(stretched.intor("int2e"), dm))
    assert_same(rhf.get_jk(dm=dm), want)
    assert rhf.md4_jk is pairs


def test_molecule_changed_in_place(water):
    """Without a reset, too: the pairs are those of the geometry that mol has."""
    mol = water.copy()
    mf, dm = md4.attach(scf.RHF(mol), backend="cpu"), density(mol.nao)
    mf.get_jk(dm=dm)
    mol.set_geom_("O 0 0 0; H 0 0 1; H 0 1 0")
    assert_same(mf.get_jk(dm=dm), scf.hf.dot_eri_dm(mol.intor("int2e"), dm))


GEOMETRIES = [f"H 0 0 0; F 0 0 {r}" for r in (0.9, 0.95, 1.0)]


@pytest.mark.parametrize("kind, xc", [("RHF", None), ("RKS", "wb97x")])
def test_scanner(kind, xc):
    mf = solver(kind, molecule(GEOMETRIES[0], "6-31g"), xc)
    ours, theirs = md4.attach(mf.copy(), backend="cpu").as_scanner(), mf.as_scanner()
    for geometry in GEOMETRIES:
        assert abs(ours(geometry) - theirs(geometry)) < 1e-8
        assert ours.cycles == theirs.cycles


@pytest.mark.gpu
def test_scanner_reuses_kernels(gpu):
    from md4.gpu import compile as dispatch

    scanner = md4.attach(solver("RHF", molecule(GEOMETRIES[0], "cc-pvtz")), backend="cuda").as_scanner()
    scanner(GEOMETRIES[0])
    before = dispatch.compile_count
    scanner(GEOMETRIES[1])
    assert dispatch.compile_count == before


@pytest.mark.parametrize("first", ["attach", "newton"])
@pytest.mark.parametrize("kind", ["RHF", "UHF", "ROHF", "GHF"])
def test_newton(kind, first, cation, water):
    """Both halves of newton() build by md4 and from the same pairs, before and after a reset."""
    mol = water if kind == "RHF" else cation
    mf = solver(kind, mol)
    want = mf.newton().kernel()
    plain = solver(kind, mol)
    ours = md4.attach(plain, backend="cpu").newton() if first == "attach" else md4.attach(plain.newton(), backend="cpu")
    assert isinstance(plain, MD4SCF) == (first == "attach")
    assert abs(ours.kernel() - want) < 1e-8
    assert ours._eri is ours._scf._eri
    assert made_for(ours._eri) is not None
    assert ours.md4_jk is ours._scf.md4_jk
    ours.reset(molecule(GEOMETRIES[0], "6-31g"))
    assert ours.md4_jk is ours._scf.md4_jk
    assert isinstance(ours.undo_soscf(), MD4SCF)
    back = md4.detach(ours)
    assert not isinstance(back, MD4SCF)
    assert not isinstance(back._scf, MD4SCF)


def test_chkfile(rhf, tmp_path, water):
    rhf.chkfile = str(tmp_path / "water.chk")
    energy = rhf.kernel()
    assert lib.chkfile.load(rhf.chkfile, "scf/e_tot") == energy
    again = md4.attach(scf.RHF(water), backend="cpu").update_from_chk(rhf.chkfile)
    assert abs(again.energy_tot() - energy) < 1e-8
    assert abs(again.kernel(again.from_chk(rhf.chkfile)) - energy) < 1e-8
    assert again.cycles <= 2


@pytest.mark.parametrize("make", [
    lambda mf: mf, lambda mf: mf.as_scanner(), lambda mf: mf.newton(), lambda mf: mf.to_ks("b3lyp"),
])  # fmt: skip
def test_pickle(rhf, water, make):
    dm = density(water.nao)
    mf = make(rhf)
    want = mf.get_jk(dm=dm)
    twin = pickle.loads(pickle.dumps(mf))
    assert type(twin) is type(mf)
    assert twin._md4._jk is None
    assert_same(twin.get_jk(dm=dm), want)
    direct = md4.detach(twin).set(max_memory=0)  # PySCF's own direct builds
    assert abs(direct.get_veff(dm=dm) - mf.get_veff(dm=dm)).max() < 1e-9


def test_pickle_to_another_process(rhf, water, tmp_path):
    """Where PySCF has not made the class."""
    (tmp_path / "mf.pickle").write_bytes(pickle.dumps(rhf))
    code = (
        "import pickle, sys; mf = pickle.load(open(sys.argv[1], 'rb')); print(type(mf).__name__, mf.kernel()); "
        "from pyscf.mp import mp2; assert mp2._ao2mo_ovov.__wrapped__"  # which `attach` would have replaced
    )
    run = [sys.executable, "-c", code, str(tmp_path / "mf.pickle")]
    environment = {**os.environ, "NUMBA_NUM_THREADS": "1"}
    done = subprocess.run(run, capture_output=True, text=True, check=True, env=environment)
    name, energy = done.stdout.split()[-2:]
    assert name == "MD4RHF"
    assert abs(float(energy) - scf.RHF(water).run(verbose=0).e_tot) < 1e-8


def test_deepcopy(rhf, water):
    twin = copy.deepcopy(rhf)
    dm = density(water.nao)
    assert_same(twin.get_jk(dm=dm), rhf.get_jk(dm=dm))
    assert twin.md4_jk is not rhf.md4_jk


@pytest.mark.parametrize("convert, kind", [
    ("to_uhf", scf.uhf.UHF), ("to_ghf", scf.ghf.GHF), ("to_ks", dft.rks.RKS), ("to_uks", dft.uks.UKS),
    ("to_gks", dft.gks.GKS),
])  # fmt: skip
def test_conversions(rhf, convert, kind):
    rhf.kernel()
    other = getattr(rhf, convert)()
    assert isinstance(other, MD4SCF)
    assert isinstance(other, kind)
    assert other.md4_jk is rhf.md4_jk
    assert abs(other.energy_tot() - rhf.e_tot) < 1e-8
    assert isinstance(rhf, scf.hf.RHF)


def test_response(rhf, water):
    """Excitation energies and stability, from transition densities."""
    want, ours = scf.RHF(water).run(verbose=0), rhf.run()
    assert (
        ours.stability(external=True, return_status=True)[2:] == want.stability(external=True, return_status=True)[2:]
    )
    assert abs(ours.TDA().run(nstates=3).e - want.TDA().run(nstates=3).e).max() < 1e-7


@pytest.mark.parametrize("first", ["attach", "PCM"])
def test_solvent(rhf, water, first):
    want = scf.RHF(water).PCM().run(verbose=0)
    ours = rhf.PCM() if first == "attach" else md4.attach(scf.RHF(water).PCM(), backend="cpu")
    assert abs(ours.run(verbose=0).e_tot - want.e_tot) < 1e-8
    assert isinstance(ours.undo_solvent(), MD4SCF)


def test_point_charges(water):
    """QM/MM changes one-electron matrices only."""
    from pyscf import qmmm

    charges = [[0.0, 0.0, 3.0]], [0.5]
    want = qmmm.mm_charge(scf.RHF(water), *charges).run(verbose=0).e_tot
    ours = md4.attach(qmmm.mm_charge(scf.RHF(water), *charges), backend="cpu").run(verbose=0)
    assert abs(ours.e_tot - want) < 1e-8


# refusals -------------------------------------------------------------------------------------------------------------


def periodic():
    from pyscf.pbc import gto as pgto
    from pyscf.pbc import scf as pscf

    return pscf.RHF(pgto.M(atom="He 0 0 0", a=np.eye(3) * 4, basis="sto-3g", verbose=0))


def model():
    """A Hamiltonian of one's own."""
    mol = gto.M(verbose=0)
    mol.nelectron = 2
    mol.incore_anyway = True
    mf = scf.RHF(mol)
    mf._eri = np.zeros((2, 2, 2, 2))
    return mf


def scaled(aosym="s8"):
    """PySCF would use these integrals, and `mol.incore_anyway` is not set."""
    mol = molecule(WATER, "sto-3g")
    return scf.RHF(mol).set(_eri=1.05 * mol.intor("int2e", aosym=aosym))


def moved():
    """With PySCF's tensor of another geometry."""
    mf = scf.RHF(molecule(WATER, "sto-3g")).run()
    mf.mol.set_geom_(1.1 * mf.mol.atom_coords(), unit="Bohr")
    return mf


def overridden():
    mf = scf.RHF(molecule(WATER, "sto-3g"))
    mf.get_jk = lambda *args, **kwargs: None
    return mf


class Fitting(df.DF):
    """Another kind of density fitting."""

    def __init__(self):
        super().__init__(molecule(WATER, "sto-3g"))


def fitting():
    """With a tensor that its user gave it."""
    return df.DF(molecule(WATER, "sto-3g")).set(_cderi=np.zeros((5, 28)))


@pytest.mark.parametrize("make, error, match", [
    (periodic, md4.UnsupportedError, "periodic"),
    (lambda: scf.DHF(molecule(WATER, "sto-3g")), md4.UnsupportedError, r"four-component object pyscf\.scf\.dhf\.DHF"),
    (lambda: scf.X2C(molecule(WATER, "sto-3g")), md4.UnsupportedError, r"X2C object pyscf\.x2c\.x2c\.UHF"),
    (lambda: scf.X2C(molecule(WATER, "sto-3g")), md4.UnsupportedError, r"mol\.RHF\(\)\.x2c\(\) or mf\.x2c1e\(\)"),
    (lambda: scf.RHF(molecule(WATER, "sto-3g")).density_fit(with_df=fitting()), md4.UnsupportedError, "of its own"),
    (lambda: scf.RHF(molecule(WATER, "sto-3g")).density_fit(with_df=Fitting()), md4.UnsupportedError, "class Fitting"),
    (lambda: scf.RHF(molecule(WATER, "sto-3g")).COSX(), md4.UnsupportedError, "undo"),
    (model, md4.UnsupportedError, "of its own"),
    (scaled, md4.UnsupportedError, "not those of its molecule"),
    (lambda: scaled("s4"), md4.UnsupportedError, "not those of its molecule"),
    (moved, md4.UnsupportedError, "not those of its molecule"),
    (overridden, md4.UnsupportedError, "the object itself"),
    (lambda: molecule(WATER, "sto-3g"), md4.ArgumentError, "mean-field"),
])  # fmt: skip
def test_refusals(make, error, match):
    mf = make()
    kind = type(mf)
    with pytest.raises(error, match=match):
        md4.attach(mf)
    assert type(mf) is kind


def test_unknown_backend(water):
    with pytest.raises(md4.ArgumentError, match="backend 'gpu'"):
        md4.attach(scf.RHF(water), backend="gpu")


def test_import_needs_no_pyscf():
    code = "import sys, md4; md4.attach; assert not [m for m in sys.modules if m.startswith('pyscf')]"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("verbose", "told"), [(3, False), (4, True)])
def test_the_log_tells_the_backend_once(water, verbose, told):
    mf = md4.attach(scf.RHF(water), backend="auto")
    mf.verbose, mf.stdout = verbose, io.StringIO()
    for _ in range(2):
        mf.get_jk(dm=np.eye(water.nao))
    name = mf.md4_jk.engine.backend.name
    assert mf.stdout.getvalue().count(f"J and K by md4: backend {name} (") == told


@pytest.mark.parametrize("use", [lambda: md4.attach(None), lambda: load_molecule("H 0 0 0; H 0 0 1", "sto-3g")])
def test_without_pyscf(use, monkeypatch):
    monkeypatch.setattr("md4.pyscf.util.find_spec", lambda name: None)
    with pytest.raises(ArgumentError, match=r"needs PySCF, which is not installed; .*pyscf"):
        use()
