"""The AO tensor that an attached object keeps on a CPU: when, for which molecule, and what is made of it."""

import pickle

import numpy as np
import pytest
from molecules import WATER, molecule
from pyscf import dft, lib, scf
from solvers import assert_same, density, solver

import md4
from md4.contract.fock import JK
from md4.pyscf.builder import made_for
from md4.shells.basis import fingerprint


@pytest.fixture
def direct(monkeypatch):
    """Counts direct builds."""
    calls, get_jk = [], JK.get_jk
    monkeypatch.setattr(JK, "get_jk", lambda self, *args: calls.append(args) or get_jk(self, *args))
    return calls


@pytest.mark.parametrize("kind", ["RHF", "UHF", "ROHF", "GHF"])
def test_all_builds_are_from_one_tensor(kind, cation, direct):
    """That of md4, where PySCF would make its own; as PySCF's, builds are then of whole densities."""
    ours, theirs = md4.attach(solver(kind, cation), backend="cpu"), solver(kind, cation)
    assert abs(ours.kernel() - theirs.kernel()) < 1e-9
    assert ours.cycles == theirs.cycles
    assert made_for(ours._eri) == fingerprint(cation)
    assert theirs._eri is not None
    assert abs(ours._eri - theirs._eri).max() < 1e-12
    assert not direct


@pytest.mark.parametrize(("hermi", "complex_"), [(1, False), (0, False), (2, False), (1, True)])
@pytest.mark.parametrize("options", [{}, {"with_k": False}, {"with_j": False}])
def test_matrices(rhf, water, hermi, complex_, options):
    dm = density(water.nao, complex_=complex_, shape=(2,)) + (0 if hermi == 1 else np.tri(water.nao))
    dm = dm - dm.swapaxes(1, 2) if hermi == 2 else dm
    assert_same(rhf.get_jk(water, dm, hermi, **options), scf.RHF(water).get_jk(water, dm, hermi, **options))


@pytest.mark.parametrize(("settings", "incore", "kept"), [
    ({}, False, True), ({"max_memory": 0}, False, False), ({"max_memory": 0}, True, True),
    ({"direct_scf": False}, False, True), ({"direct_scf": False, "max_memory": 0}, False, False),
])  # fmt: skip
def test_where_pyscf_keeps_one(water, settings, incore, kept, direct):
    mol = water.copy().set(incore_anyway=incore)
    ours, theirs = md4.attach(scf.RHF(mol).set(**settings), backend="cpu"), scf.RHF(mol).set(**settings)
    dm = density(mol.nao)
    assert_same(ours.get_jk(dm=dm), theirs.get_jk(dm=dm))
    assert (ours._eri is not None) == (theirs._eri is not None) == kept
    assert len(direct) == 1 - kept


def test_the_cap_is_md4s(water, direct):
    """Where the tensor does not fit below `max_memory` of attach, builds are direct."""
    mf = md4.attach(scf.RHF(molecule(WATER, "cc-pvtz")), backend="cpu", max_memory=10)
    dm = density(mf.mol.nao)
    assert mf._is_mem_enough()
    assert_same(mf.get_jk(dm=dm), scf.RHF(mf.mol).get_jk(dm=dm))
    assert mf._eri is None
    assert len(direct) == 1


def test_a_tensor_of_another_geometry_is_dropped_without_memory_for_the_next(direct):
    """Builds are direct then, not from what is there."""
    mol = molecule("H 0 0 0; H 0 0 1", "sto-3g")
    mf, dm = md4.attach(scf.RHF(mol), backend="cpu"), density(mol.nao)
    mf.get_jk(dm=dm)
    assert made_for(mf._eri) == fingerprint(mol)
    mol.set_geom_("H 0 0 0; H 0 0 2")
    mf.max_memory = 0
    assert_same(mf.get_jk(dm=dm), scf.RHF(mol).get_jk(dm=dm))
    assert mf._eri is None
    assert len(direct) == 1


def test_other_operators_are_built_directly(rhf, water, direct):
    """The tensor that is kept is that of 1/r, which PySCF's methods for correlated electrons expect."""
    dm = density(water.nao)
    rhf.get_jk(water, dm, omega=0.3)
    with water.with_range_coulomb(0.3):
        rhf.get_jk(water, dm)
        rhf.get_jk(water, dm, omega=0)
    assert rhf._eri is None
    assert len(direct) == 3
    rhf.get_jk(water, dm)
    assert rhf._eri is not None
    with water.with_range_coulomb(0.3):
        assert_same(rhf.get_jk(water, dm), scf.hf.dot_eri_dm(water.intor("int2e"), dm))
        assert rhf._eri is None
    assert len(direct) == 4


def test_exchange_of_a_functional(water, direct):
    """J from the tensor; the part of K with another operator directly, as in PySCF."""
    mf = md4.attach(dft.RKS(water).set(xc="hse06", verbose=0), backend="cpu")
    mf.grids.level = 0
    mf.kernel()
    assert made_for(mf._eri) is not None
    assert direct
    assert all(call[4] == 0.11 or call[4] == -0.11 for call in direct)


def test_tensor_of_a_moved_molecule(water):
    """Also of another molecule that is given: the tensor is that of the object's own."""
    mol = water.copy()
    mf, dm = md4.attach(scf.RHF(mol), backend="cpu"), density(mol.nao)
    mf.get_jk(dm=dm)
    mol.set_geom_(mol.atom_coords() * 1.1, unit="Bohr")
    mf.get_jk(dm=dm)
    assert made_for(mf._eri) == fingerprint(mol)
    kept = mf._eri
    assert_same(mf.get_jk(water, dm), scf.hf.dot_eri_dm(water.intor("int2e"), dm))
    assert mf._eri is kept
    assert mf.reset()._eri is None


def test_a_molecule_that_is_refused_leaves_no_trace(rhf, water):
    """What builds J and K of the one before is made again."""
    dm = density(water.nao)
    wanted = rhf.get_jk(water, dm, omega=0.3)
    high = molecule("He 0 0 0", {"He": [[9, [1.0, 1.0]]]})
    with pytest.raises(md4.UnsupportedError, match="beyond the limit"):
        rhf.get_jk(high, np.eye(high.nao))
    assert rhf.md4_jk.basis.nao == water.nao
    assert_same(rhf.get_jk(water, dm, omega=0.3), wanted)


def test_copies_share_it(rhf, water):
    """And give it back with the last of them."""
    twin, dm = rhf.copy(), density(water.nao)
    rhf.get_jk(dm=dm)
    twin.get_jk(dm=dm)
    assert twin._eri is rhf._eri
    assert rhf.to_uhf()._eri is rhf._eri
    rhf._eri = twin._eri = None
    assert rhf._md4._tensor() is None


def test_a_copy_keeps_that_of_another_geometry(water):
    """Then the tensor of the molecule as it is is made, although that of before is still there."""
    mol = water.copy()
    mf, dm = md4.attach(scf.RHF(mol), backend="cpu"), density(mol.nao)
    mf.get_jk(dm=dm)
    twin = mf.copy()
    mol.set_geom_(mol.atom_coords() * 1.1, unit="Bohr")
    wanted = scf.hf.dot_eri_dm(mol.intor("int2e"), dm)
    for this in (mf, twin):
        assert_same(this.get_jk(dm=dm), wanted)


def test_integrals_of_the_user_are_still_refused(rhf, water):
    """Also those made of md4's tensor; what md4 made is dropped by detach."""
    dm = density(water.nao)
    rhf.get_jk(dm=dm)
    rhf._eri *= 2.0
    with pytest.raises(md4.UnsupportedError, match=r"mf\._eri = None"):
        rhf.get_jk(dm=dm)
    rhf._eri = None
    rhf.get_jk(dm=dm)
    assert md4.detach(rhf)._eri is None


def test_correlation_energy_of_integrals_of_the_user(rhf):
    """Those of PySCF's MP2, in which (ia|jb) stand twice."""
    once = md4.attach(rhf.run().MP2()).run().e_corr
    rhf._eri = 2.0 * np.asarray(rhf._eri)
    assert abs(md4.attach(rhf.MP2()).run().e_corr - 4 * once) < 1e-9


def test_densities_that_cannot_be_used(rhf, water):
    with pytest.raises(md4.ArgumentError, match="not finite"):
        rhf.get_jk(dm=np.full((water.nao, water.nao), np.nan))
    with pytest.raises(md4.ArgumentError, match="hermi"):
        rhf.get_jk(dm=np.eye(water.nao), hermi=3)


def test_correlated_electrons(rhf, water, monkeypatch):
    """PySCF makes the integrals over orbitals of md4's tensor."""
    theirs = scf.RHF(water).run(verbose=0).MP2().run().e_tot
    rhf.run()
    monkeypatch.setattr("pyscf.ao2mo.outcore.general", None)
    assert abs(rhf.MP2().run().e_tot - theirs) < 1e-8


def test_correlated_electrons_with_another_operator():
    """The tensor of 1/r is gone with `mol.omega`, so what looks into `mf._eri` has the operator of the SCF."""
    mol = molecule(WATER, "6-31g").copy()
    mf = md4.attach(scf.RHF(mol), backend="cpu").run(verbose=0)
    without = mf.MP2().run(verbose=0).e_corr
    other = mol.copy()
    other.omega = mol.omega = 0.3
    wanted = scf.RHF(other).run(verbose=0).MP2().run(verbose=0).e_corr
    assert abs(mf.run().MP2().run(verbose=0).e_corr - wanted) < 1e-7
    mol.omega = 0.0
    assert abs(mf.run().MP2().run(verbose=0).e_corr - without) < 1e-7
    assert made_for(mf._eri) is not None


def test_a_pickle_has_none(rhf, water):
    rhf.get_jk(dm=density(water.nao))
    twin = pickle.loads(pickle.dumps(rhf))
    assert twin._eri is None
    assert isinstance(rhf._eri, lib.NPArrayWithTag)


@pytest.mark.gpu
def test_none_on_a_gpu(water, gpu):
    mf = md4.attach(solver("RHF", water), backend="cuda")
    mf.kernel()
    assert mf._eri is None
