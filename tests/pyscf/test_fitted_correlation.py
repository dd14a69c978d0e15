"""DFMP2, DFUMP2 and RPA objects that are attached: PySCF's energies and amplitudes, nothing of AO size on the host."""

import copy
import pickle

import pytest
from fitted_orbitals import AUXILIARY
from pyscf import df, gto, scf
from pyscf.gw.rpa import RPA
from pyscf.gw.urpa import URPA
from pyscf.mp.dfmp2 import DFMP2
from pyscf.mp.dfump2 import DFUMP2

import md4
from md4.contract.density_fitting import DensityFitting
from md4.pyscf.fitted_correlation import MD4FittedMP2

FROZEN = [(DFMP2, None), (DFMP2, 1), (DFMP2, [0, 2, 11]), (DFUMP2, None), (DFUMP2, 1), (DFUMP2, [[0, 12], [1]])]


@pytest.fixture(scope="module")
def closed(water):
    return scf.RHF(water).run(conv_tol=1e-11)


@pytest.fixture(scope="module")
def opened(cation):
    return scf.UHF(cation).run(conv_tol=1e-11)


@pytest.fixture
def nothing_of_pyscf(monkeypatch):
    """Integrals over three centres by PySCF, and rows over AOs on the host, are errors."""
    monkeypatch.setattr(DensityFitting, "rows", None)
    monkeypatch.setattr(gto.moleintor, "getints3c", None)


def made(kind, mf, frozen=None):
    """An object of PySCF with an auxiliary basis for MP2."""
    return kind(mf, frozen=frozen).set(with_df=df.DF(mf.mol, AUXILIARY), verbose=0)


def assert_same(ours, theirs, tolerance=1e-11):
    for name in ("e_corr", "e_corr_ss", "e_corr_os", "e_tot"):
        assert abs(getattr(ours, name) - getattr(theirs, name)) < tolerance, name
    for one, other in zip(*(mp.t2 if isinstance(mp.t2, tuple) else (mp.t2,) for mp in (ours, theirs)), strict=True):
        assert one.shape == other.shape
        assert abs(one - other).max() < tolerance


@pytest.mark.parametrize("kind, frozen", FROZEN, ids=str)
def test_energy(backend, closed, opened, kind, frozen, monkeypatch):
    """Frozen orbitals, occupied and virtual ones; amplitudes are there if they are asked for."""
    if backend == "cuda":
        pytest.importorskip("cupy")
    mf = closed if kind is DFMP2 else opened
    theirs = made(kind, mf, frozen).run()
    monkeypatch.setattr(DensityFitting, "rows", None)
    monkeypatch.setattr(gto.moleintor, "getints3c", None)
    ours = md4.attach(made(kind, mf, frozen), backend=backend)
    assert ours.kernel()[0] == ours.e_corr
    assert_same(ours, theirs)
    ours.t2 = None
    assert ours.kernel(with_t2=False)[1] is None
    assert abs(ours.e_corr - theirs.e_corr) < 1e-11
    assert ours.with_df.store == ("direct" if backend == "cpu" else "device")


def test_density_matrix(closed):
    ours, theirs = md4.attach(made(DFMP2, closed), backend="cpu").run(), made(DFMP2, closed).run()
    assert abs(ours.make_rdm1() - theirs.make_rdm1()).max() < 1e-11


def test_little_memory(closed):
    """The cap of attach is that of the whole calculation."""
    theirs = made(DFMP2, closed).run()
    ours = md4.attach(made(DFMP2, closed), backend="cpu", max_memory=0.6)
    assert abs(ours.kernel(with_t2=False)[0] - theirs.e_corr) < 1e-11
    with pytest.raises(md4.MemoryLimitError, match="max_memory"):
        md4.attach(made(DFMP2, closed), backend="cpu", max_memory=0.2).run()


def test_fitting_of_the_mean_field(water, nothing_of_pyscf):
    """An `md4.DF` of the mean field is used as it is; its tensor is made once. MP2 without attach has its integrals."""
    mf = md4.attach(scf.RHF(water).density_fit(AUXILIARY), backend="cpu").run()
    plain, ours = mf.MP2().set(verbose=0), md4.attach(mf.MP2().set(verbose=0))
    assert isinstance(plain, DFMP2)
    assert ours.with_df is plain.with_df is mf.with_df
    made = dict(mf.with_df._md4.made)
    assert_same(ours.run(), plain.run())
    assert mf.with_df._md4.made == made
    assert mf.with_df.store == "device"


@pytest.mark.parametrize("kind", [RPA, URPA])
def test_random_phase_approximation(closed, opened, kind, nothing_of_pyscf, monkeypatch):
    """Its energy is PySCF's, from integrals of md4."""
    mf = closed if kind is RPA else opened
    ours = md4.attach(made(kind, mf), backend="cpu")
    assert not isinstance(ours, MD4FittedMP2)
    ours.run(nw=10)
    monkeypatch.undo()
    assert abs(ours.e_corr - made(kind, mf).run(nw=10).e_corr) < 1e-11
    assert type(md4.detach(ours).with_df) is df.DF


def test_what_is_given(closed, nothing_of_pyscf, monkeypatch):
    """Integrals of the caller, or a tensor, are taken by PySCF."""
    ours = md4.attach(made(DFMP2, closed), backend="cpu")
    wanted = ours.run().e_corr
    eris = ours.ao2mo()
    assert abs(ours.kernel(eris=eris)[0] - wanted) < 1e-12
    eris.ovL *= 0.5
    assert abs(ours.kernel(eris=eris)[0] - wanted / 16) < 1e-12
    monkeypatch.undo()
    tensor = df.DF(closed.mol, AUXILIARY).build()._cderi
    ours.with_df._cderi = 0.5 * tensor
    assert abs(ours.kernel()[0] - wanted / 16) < 1e-11


def test_copies_and_detach(closed, opened):
    for kind, mf in ((DFMP2, closed), (DFUMP2, opened)):
        ours = md4.attach(made(kind, mf), backend="cpu")
        assert md4.attach(ours) is ours
        wanted = ours.run().e_corr
        for other in (ours.copy(), copy.copy(ours), pickle.loads(pickle.dumps(ours))):
            assert isinstance(other, MD4FittedMP2)
            assert abs(other.run().e_corr - wanted) < 1e-12
        back = md4.detach(ours)
        assert type(back) is kind
        assert type(back.with_df) is df.DF
        assert abs(back.run().e_corr - wanted) < 1e-11
        with pytest.raises(md4.ArgumentError, match="is not attached to md4"):
            md4.detach(back)


def test_other_molecules(closed, water):
    """After reset the integrals are those of the new molecule."""
    ours = md4.attach(made(DFMP2, closed.copy()), backend="cpu").run()
    mol = water.set_geom_(1.1 * water.atom_coords(), unit="Bohr", inplace=False)
    mf = scf.RHF(mol).run(conv_tol=1e-11)
    ours.with_df.reset(mol)
    ours.set(mol=mol, _scf=mf, mo_coeff=mf.mo_coeff, mo_energy=mf.mo_energy)
    assert abs(ours.run().e_corr - made(DFMP2, mf).run().e_corr) < 1e-11


def test_refusals(closed, monkeypatch):
    with pytest.raises(md4.ArgumentError, match="backend"):
        md4.attach(made(DFMP2, closed), backend="tpu")
    for wrong, match in ((False, "leave mo_integrals=False out"), ("no", "mo_integrals must be True")):
        with pytest.raises(md4.ArgumentError, match=match):
            md4.attach(made(DFMP2, closed), mo_integrals=wrong)
    with pytest.raises(md4.UnsupportedError, match=r"md4 replaces pyscf\.df\.DF only"):
        md4.attach(made(DFMP2, closed).set(with_df=type("Other", (df.DF,), {})(closed.mol)))
    with monkeypatch.context() as patches:
        patches.delattr(DFMP2, "split_mo_coeff")
        with pytest.raises(md4.UnsupportedError, match=r"with PySCF 2\.8 or newer; set its with_df"):
            md4.attach(made(DFMP2, closed))
    ours = md4.attach(made(DFMP2, closed), backend="cpu")
    ours.mo_coeff = closed.mo_coeff.astype(complex)
    with pytest.raises(md4.UnsupportedError, match="complex"):
        ours.kernel()
