"""`md4.DF` in place of PySCF's `df.DF`: the same energies of mean fields and of correlated methods."""

import copy
import io
import pickle

import h5py
import numpy as np
import pytest
from molecules import WATER, molecule
from pyscf import df, dft, gto, lib, mcscf, scf
from pyscf.agf2 import AGF2
from pyscf.df.df_jk import _DFHF
from pyscf.gw.gw_ac import GWAC
from pyscf.gw.rpa import RPA
from pyscf.mp.dfmp2 import DFMP2
from solvers import assert_same, density, solver

import md4
from md4.errors import MemoryLimitError
from md4.gpu import device_count
from md4.pyscf.builder import made_for
from md4.pyscf.scf import MD4SCF
from md4.pyscf.tensors import Rows

AUXILIARY = "cc-pvdz-jkfit"


@pytest.fixture
def ours(water):
    return md4.DF(water, AUXILIARY, backend="cpu")


@pytest.fixture(scope="module")
def theirs(water):
    fit = df.DF(water, AUXILIARY)
    fit.max_memory = 1 << 20  # MB: in memory, however much of it this process has taken
    return fit.build()


@pytest.fixture(scope="module")
def pair(water):
    """The same converged RHF with md4's and with PySCF's density fitting."""
    mine = md4.attach(scf.RHF(water), backend="cpu").density_fit(auxbasis=AUXILIARY)
    return mine.run(verbose=0, conv_tol=1e-11), scf.RHF(water).density_fit(AUXILIARY).run(verbose=0, conv_tol=1e-11)


# the interface of PySCF's class ---------------------------------------------------------------------------------------


def test_it_is_one_of_pyscf(ours, water):
    assert isinstance(ours, md4.DF)
    assert isinstance(ours, df.DF)
    assert ours.build() is ours
    assert ours.auxmol.nao == ours.get_naoaux() == 116
    assert repr(ours) == (
        "<md4.DF: 3 atoms, 13 AOs, auxbasis 'cc-pvdz-jkfit', backend='cpu', store='auto', cutoff=1e-13>"
    )
    assert md4.DF(water).build().auxmol.nao == df.DF(water).build().auxmol.nao  # PySCF's choice


def test_printing_makes_nothing(water, monkeypatch):
    """PySCF's own prints and computes nothing, and so does md4's; a file that was given is named."""
    told = io.StringIO()
    ours = md4.DF(water, AUXILIARY, backend="cpu").set(verbose=4, stdout=told)
    with monkeypatch.context() as patches:
        patches.setattr("md4.pyscf.tensors.Tensors.fitting", None)
        ours.dump_flags()
    assert f"auxbasis = {AUXILIARY}" in told.getvalue()
    assert "store='auto'" in told.getvalue()
    assert "_cderi =" not in told.getvalue()
    ours._cderi = "tensor.h5"
    ours.dump_flags()
    assert "_cderi = tensor.h5" in told.getvalue()
    assert ours._cderi == "tensor.h5"


def test_nothing_is_done_before_it_is_needed(water, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError

    monkeypatch.setattr("md4.contract.density_fitting.DensityFitting.__init__", never)
    monkeypatch.setattr("md4.gpu.context.gpu_available", never)
    fit = md4.DF(water, max_memory=100)
    md4.attach(scf.RHF(water)).density_fit(with_df=fit)
    md4.attach(scf.RHF(water).density_fit())


@pytest.mark.parametrize("store", ["device", "host", "direct"])
def test_rows(water, theirs, store):
    ours = md4.DF(water, AUXILIARY, backend="cpu", store=store)
    assert ours.store == store
    blocks = list(ours.loop(7))
    assert [len(block) for block in blocks] == [7] * 16 + [4]
    assert abs(np.concatenate(blocks) - theirs._cderi).max() < 1e-11
    assert abs(np.asarray(ours._cderi) - theirs._cderi).max() < 1e-11
    assert abs(ours._cderi[5:9] - theirs._cderi[5:9]).max() < 1e-11
    assert abs(ours._cderi[5] - theirs._cderi[5]).max() < 1e-11
    assert isinstance(ours._cderi, Rows)
    assert len(ours._cderi) == len(theirs._cderi)
    assert ours._cderi.sum(axis=0).shape == (91,)


def test_copies_of_rows_are_copies(ours):
    rows = ours._cderi
    whole = np.asarray(rows)
    changed = np.array(rows)
    changed[...] = 0.0
    assert np.asarray(rows) is whole
    assert whole.any()
    assert np.asarray(rows, dtype=np.float32).dtype == np.float32


def test_integrals_of_orbitals(ours, theirs, water):
    c = np.random.default_rng(0).normal(size=(water.nao, 5))
    assert abs(ours.get_eri() - theirs.get_eri()).max() < 1e-12
    assert abs(ours.ao2mo(c) - theirs.ao2mo(c)).max() < 1e-10
    assert abs(ours.ao2mo([c, c[:, :2], c, c[:, 3:]]) - theirs.ao2mo([c, c[:, :2], c, c[:, 3:]])).max() < 1e-10


@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_get_jk(ours, theirs, water, shape):
    dm = np.triu(density(water.nao, shape=shape))
    assert_same(ours.get_jk(dm, 0), theirs.get_jk(dm, 0))
    vj, vk = ours.get_jk(dm, 0, with_k=False)
    assert vk is None
    assert abs(vj - theirs.get_jk(dm, 0)[0]).max() < 1e-10


def test_tagged_densities(pair, water):
    """PySCF's densities know their orbitals, those of an open shell as two sets of occupations in one."""
    fit = pair[0].with_df
    dm = pair[0].make_rdm1()
    assert dm.mo_coeff is not None
    assert_same(fit.get_jk(dm), fit.get_jk(np.asarray(dm)))
    triplet = scf.ROHF(molecule(WATER, "6-31g", spin=2)).run(verbose=0)
    dm = triplet.make_rdm1()
    assert dm.mo_occ.ndim == 1
    assert_same(fit.get_jk(dm), fit.get_jk(np.asarray(dm)))


def test_tags_that_are_no_orbitals(ours, water):
    """Spins with different numbers of orbitals, and what is not even an array of them."""
    orbitals = np.linalg.qr(density(water.nao))[0]
    dm = np.stack([orbitals[:, :n] @ orbitals[:, :n].T for n in (3, 2)])
    filled = [np.arange(13) < 3, np.arange(5) < 2]
    for coefficients, occupations in (((orbitals, orbitals[:, :5]), filled), ("orbitals", "occupied")):
        tagged = lib.tag_array(dm, mo_coeff=coefficients, mo_occ=occupations)
        assert_same(ours.get_jk(tagged), ours.get_jk(dm))


@pytest.mark.parametrize("omega", [0.3, -0.3, 0.0])
def test_omega(ours, theirs, water, omega):
    """An argument, mol.omega, or range_coulomb; one tensor an operator."""
    dm = density(water.nao)
    wanted = theirs.get_jk(dm, omega=omega)
    assert_same(ours.get_jk(dm, omega=omega), wanted)
    with water.with_range_coulomb(omega):
        assert_same(ours.get_jk(dm), wanted)
    with ours.range_coulomb(omega) as fit, theirs.range_coulomb(omega) as other:
        assert_same(fit.get_jk(dm), wanted)
        assert abs(fit.get_eri() - other.get_eri()).max() < 1e-10
    assert water.omega == ours.auxmol.omega == 0
    assert set(ours._md4.made) == {omega}


def test_an_error_within_range_coulomb(ours, water):
    """The operators of both molecules are those from before."""
    ours.build()
    with pytest.raises(md4.ArgumentError, match="shape"), ours.range_coulomb(0.3) as fit:
        fit.get_jk(np.eye(2))
    assert water.omega == ours.auxmol.omega == 0


def test_reset_and_another_geometry(ours, water):
    dm, before = density(water.nao), ours._md4_fitting()
    assert ours._md4_fitting() is before
    other = molecule("O 0 0 0.1; H 0 0.8 -0.4; H 0 -0.7 -0.5", "6-31g")
    wanted = df.DF(other, AUXILIARY).get_jk(dm)
    assert_same(ours.reset(other).get_jk(dm), wanted)
    moved = copy.deepcopy(water)
    fit = md4.DF(moved, AUXILIARY, backend="cpu").build()
    moved.set_geom_(other.atom_coords(), unit="Bohr")  # without reset
    assert_same(fit.get_jk(dm), wanted)
    assert np.allclose(fit.auxmol.atom_coords(), other.atom_coords())


def test_auxbasis_can_change(ours, water):
    assert ours.get_naoaux() == 116
    ours.auxbasis = "cc-pvdz-ri"
    assert ours.get_naoaux() == df.DF(water, "cc-pvdz-ri").get_naoaux() != 116


def test_copies_and_pickles(ours, water):
    """Copies share tensors, pickles make theirs anew."""
    dm, shared = density(water.nao), ours._md4_fitting()
    wanted = ours.get_jk(dm)
    assert ours.copy()._md4_fitting() is shared
    for other in (pickle.loads(pickle.dumps(ours)), copy.deepcopy(ours)):
        assert type(other) is type(ours)
        assert other._md4_fitting() is not shared
        assert_same(other.get_jk(dm), wanted)


def test_file(ours, theirs, water, tmp_path):
    """A file that PySCF reads, and one of PySCF's that is given to md4."""
    name = str(tmp_path / "cderi.h5")
    ours._cderi_to_save = name
    ours.build()
    read = df.DF(water)
    read._cderi = name
    dm = density(water.nao)
    assert_same(read.get_jk(dm), theirs.get_jk(dm))
    given = md4.DF(water)
    given._cderi = name
    assert given.build()._cderi == name
    assert given.get_naoaux() == 116
    assert_same(given.get_jk(dm), theirs.get_jk(dm))
    assert sum(map(len, given.loop())) == 116
    assert not given._md4.made
    assert "_cderi" not in given.__getstate__()


@pytest.mark.parametrize("make", [df.DF, md4.DF])
def test_rows_as_the_tensor_of_another_object(make, ours, theirs, water):
    md4.attach(scf.RHF(water), backend="cpu")
    other, dm = make(water), density(water.nao)
    other._cderi = ours._cderi
    assert isinstance(other._cderi, Rows)
    assert_same(other.get_jk(dm), theirs.get_jk(dm))


@pytest.mark.parametrize("use", [
    lambda fit: fit.build(), lambda fit: fit.get_naoaux(), lambda fit: fit.get_jk(np.eye(fit.mol.nao)),
    lambda fit: (fit.get_naoaux(), fit.build()),
])  # fmt: skip
def test_what_else_is_in_the_file_stays(use, ours, theirs, tmp_path):
    """Whoever has the tensor made; as PySCF does."""
    name = str(tmp_path / "mine.h5")
    with h5py.File(name, "w") as file:
        file["mine"], file["j3c"] = np.arange(3), np.zeros(2)
    ours._cderi_to_save = name
    use(ours)
    with h5py.File(name) as file:
        assert sorted(file) == ["j3c", "mine"]
        assert abs(file["j3c"][:] - theirs._cderi).max() < 1e-11
    (tmp_path / "mine.h5").unlink()
    ours.get_jk(np.eye(ours.mol.nao), omega=0.3)
    assert not (tmp_path / "mine.h5").exists()


def test_a_file_that_is_asked_for_later(ours, theirs, tmp_path):
    """`build` writes a tensor that is there already."""
    ours.get_naoaux()
    ours._cderi_to_save = str(tmp_path / "cderi.h5")
    ours.build()
    with h5py.File(ours._cderi_to_save) as file:
        assert abs(file["j3c"][:] - theirs._cderi).max() < 1e-11


def test_a_file_keeps_its_operator(ours, theirs, tmp_path):
    """Within range_coulomb the tensor is another one. PySCF's goes to the file, too, but not to the same place."""
    name = str(tmp_path / "cderi.h5")
    ours._cderi_to_save = name
    ours.build()
    with ours.range_coulomb(0.3) as fit:
        fit.get_naoaux()
    with h5py.File(name) as file:
        assert abs(file["j3c"][:] - theirs._cderi).max() < 1e-11


@pytest.mark.parametrize("key", [
    slice(3, 7), slice(-2, None), slice(9, 4), slice(None, None, 50), slice(7, 3, -1), 5, (slice(2, 4), 1), [0, 8], ...,
], ids=str)  # fmt: skip
def test_some_of_the_rows(ours, theirs, key):
    """With all kinds of indices, as those of an array."""
    found, wanted = ours._cderi[key], theirs._cderi[key]
    assert np.shape(found) == np.shape(wanted)
    assert abs(found - wanted).max(initial=0.0) < 1e-11


def test_arithmetic_of_rows(ours, theirs):
    whole = np.asarray(ours._cderi)
    for found, wanted in [
        (2.0 * ours._cderi, 2.0 * whole), (ours._cderi - theirs._cderi, whole - theirs._cderi),
        (-ours._cderi, -whole), (ours._cderi @ whole.T, whole @ whole.T), (abs(ours._cderi), abs(whole)),
    ]:  # fmt: skip
        assert type(found) is np.ndarray
        assert abs(found - wanted).max() < 1e-13
    ours._cderi *= 2.0
    assert abs(ours._cderi - 2 * theirs._cderi).max() < 1e-11


def test_rows_in_blocks_keep_the_cap():
    """Of a tensor that is made as often as it is asked for."""
    fit = md4.DF(molecule(WATER, "cc-pvtz"), "cc-pvqz-jkfit", backend="cpu", store="direct", max_memory=8)
    lengths, rows_of = [], type(fit._md4_fitting()).rows
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(fit._md4_fitting()), "rows", lambda self, a, b: lengths.append(b - a) or rows_of(self, a, b))
        assert sum(map(len, fit.loop(8))) == fit.get_naoaux()
    assert 8 * max(lengths) * fit.mol.nao * (fit.mol.nao + 1) // 2 < 4e6


def test_green_functions_of_an_attached_object(water):
    """AGF2 makes a fitting of PySCF's own class of the object's."""
    ours, theirs = md4.attach(scf.RHF(water).density_fit(), backend="cpu"), scf.RHF(water).density_fit()
    found, wanted = (AGF2(mf.run(verbose=0)).run(verbose=0, max_cycle=2).e_tot for mf in (ours, theirs))
    assert abs(found - wanted) < 1e-8


@pytest.mark.parametrize("make, error, match", [
    (lambda mol: md4.DF("water"), md4.ArgumentError, "mol must be"),
    (lambda mol: md4.DF(mol, backend="gpu"), md4.ArgumentError, "backend 'gpu'"),
    (lambda mol: md4.DF(mol, store="disk"), md4.ArgumentError, "store 'disk'"),
    (lambda mol: md4.DF(mol, max_memory=-1), md4.ArgumentError, "max_memory"),
    (lambda mol: md4.DF(mol, cutoff="small"), md4.ArgumentError, "cutoff"),
    (lambda mol: md4.DF(mol, backend="cpu", devices=[0]), md4.ArgumentError, "devices cannot be"),
    (lambda mol: md4.DF(mol, "no-such-basis").build(), md4.BasisError, "no-such-basis.* H, O"),
    (lambda mol: md4.DF(mol, 3).build(), md4.ArgumentError, "auxiliary basis of 3"),
    (lambda mol: md4.DF(mol, {"O": AUXILIARY}).build(), md4.BasisError, "no functions for H; add them to the dict"),
    (lambda mol: md4.DF(mol, {"O": [], "H": AUXILIARY}).build(), md4.ArgumentError, "give a name, or a dict"),
    (lambda mol: md4.DF(mol, AUXILIARY, "cpu").get_jk(np.eye(13), omega="long"), md4.ArgumentError, "'long'"),
    (lambda mol: md4.DF(mol, AUXILIARY, "cpu").get_jk(np.zeros((2, 2))), md4.ArgumentError, "shape"),
    (lambda mol: md4.DF(mol, AUXILIARY, "cpu").get_jk(np.eye(13), with_j="x"), md4.ArgumentError, "with_j must be"),
    (lambda mol: md4.DF(mol, AUXILIARY, "cpu").ao2mo(np.eye(13), compact="x"), md4.ArgumentError, "compact must be"),
    (lambda mol: md4.DF(mol, AUXILIARY, "cpu").mo_rows(np.eye(13), [[np.inf]] * 13), md4.ArgumentError, "not finite"),
    (lambda mol: md4.DF(mol, AUXILIARY, "cpu").range_coulomb("x").__enter__(), md4.ArgumentError, "omega must be"),
    (lambda mol: next(md4.DF(mol, AUXILIARY, "cpu").loop(0)), md4.ArgumentError, "blksize"),
    (lambda mol: md4.DF(mol, AUXILIARY, "cpu", 0.01).build(), md4.MemoryLimitError, "max_memory"),
])  # fmt: skip
def test_errors(water, make, error, match):
    with pytest.raises(error, match=match):
        make(water)


def test_a_dict_of_auxiliary_functions(water):
    """By elements, with a default, and for an atom that has no orbital functions either."""
    for auxbasis in ({"H": AUXILIARY, "O": AUXILIARY}, {"O": AUXILIARY, "default": AUXILIARY}):
        assert md4.DF(water, auxbasis, "cpu").build().get_naoaux() == 116
    bare = molecule("He 0 0 0; X 0 0 3", {"He": "6-31g"})
    assert bare.atom_nshells(1) == 0
    assert md4.DF(bare, {"He": "weigend"}, "cpu").get_naoaux() == df.DF(bare, {"He": "weigend"}).get_naoaux()


# mean fields ----------------------------------------------------------------------------------------------------------


def fitted(mf, how):
    """A solver with md4 and density fitting, in either order."""
    if how == "attach first":
        return md4.attach(mf, backend="cpu").density_fit(AUXILIARY)
    return md4.attach(mf.density_fit(AUXILIARY), backend="cpu")


@pytest.mark.parametrize("how", ["attach first", "fit first"])
@pytest.mark.parametrize("kind, charge, xc", [
    ("RHF", 0, None), ("UHF", 1, None), ("ROHF", 1, None), ("GHF", 1, None),
    ("RKS", 0, "b3lyp"), ("RKS", 0, "wb97x"), ("UKS", 1, "hse06"), ("RKS", 0, "pbe"),
])  # fmt: skip
def test_energy(kind, charge, xc, how, water, cation):
    mol = cation if charge else water
    ours, theirs = fitted(solver(kind, mol, xc), how).run(), solver(kind, mol, xc).density_fit(AUXILIARY).run()
    assert isinstance(ours.with_df, md4.DF)
    assert theirs.converged
    assert abs(ours.e_tot - theirs.e_tot) < 1e-9
    assert ours.cycles == theirs.cycles
    assert "J and K by md4," in repr(ours)


@pytest.fixture
def two(backend, monkeypatch):
    """Options for two workers."""
    if backend == "cpu":
        monkeypatch.setattr("md4.contract.team.chosen", lambda *_: [None, None])
        return {"backend": "cpu"}
    pytest.importorskip("cupy")
    if device_count() < 2:
        pytest.skip("needs two GPUs")
    return {"backend": "cuda", "devices": "all"}


@pytest.mark.parametrize("kind, charge, xc", [
    ("RHF", 0, None), ("UHF", 1, None), ("RKS", 0, "b3lyp"), ("RKS", 0, "wb97x"),
])  # fmt: skip
def test_energy_by_two_workers(two, kind, charge, xc, water, cation):
    """Devices of attach are those of density fitting."""
    mol = cation if charge else water
    ours = md4.attach(solver(kind, mol, xc).density_fit(AUXILIARY), **two).run()
    one = md4.attach(solver(kind, mol, xc).density_fit(AUXILIARY), backend="cpu").run()
    assert ours.with_df._md4_fitting().count >= 2
    assert abs(ours.e_tot - one.e_tot) < 1e-10
    assert abs(ours.e_tot - solver(kind, mol, xc).density_fit(AUXILIARY).run().e_tot) < 1e-9


@pytest.mark.parametrize("store", ["device", "direct"])
def test_the_tensor_of_two_workers(two, pair, water, theirs, store):
    """Its rows in blocks, as an array, in a file of PySCF; MP2 with it."""
    ours = md4.DF(water, AUXILIARY, store=store, **two)
    assert abs(np.concatenate(list(ours.loop(7))) - theirs._cderi).max() < 1e-11
    assert abs(np.asarray(ours._cderi) - theirs._cderi).max() < 1e-11
    c = np.random.default_rng(0).normal(size=(water.nao, 5))
    assert abs(ours.ao2mo(c) - theirs.ao2mo(c)).max() < 1e-10
    energies = [DFMP2(pair[1]).set(with_df=fit).run().e_corr for fit in (ours, theirs)]
    assert abs(energies[0] - energies[1]) < 1e-10
    for other in (ours.copy(), pickle.loads(pickle.dumps(ours))):
        assert_same(other.get_jk(density(water.nao)), theirs.get_jk(density(water.nao)))


@pytest.mark.parametrize("how", ["attach first", "fit first"])
def test_only_dfj(water, how):
    """J by fitting, exact K of md4."""
    mf = scf.RHF(water)
    if how == "attach first":
        ours = md4.attach(mf, backend="cpu").density_fit(AUXILIARY, only_dfj=True)
    else:
        ours = md4.attach(mf.density_fit(AUXILIARY, only_dfj=True), backend="cpu")
    dm = density(water.nao)
    vj, vk = ours.get_jk(dm=dm)
    assert abs(vk - scf.hf.dot_eri_dm(water.intor("int2e"), dm)[1]).max() < 1e-10
    assert abs(vj - df.DF(water, AUXILIARY).get_jk(dm)[0]).max() < 1e-10
    assert made_for(ours._eri) is not None
    reference = scf.RHF(water).density_fit(AUXILIARY, only_dfj=True).run(verbose=0)
    assert abs(ours.run(verbose=0).e_tot - reference.e_tot) < 1e-9


def test_undone_and_detached(rhf, water):
    fit = rhf.density_fit(AUXILIARY)
    exact = scf.hf.dot_eri_dm(water.intor("int2e"), density(water.nao))
    assert rhf._md4._jk is None
    undone = fit.undo_df()
    assert_same(undone.get_jk(dm=density(water.nao)), exact)
    assert isinstance(undone, MD4SCF)
    theirs = md4.detach(fit)
    assert type(theirs.with_df) is df.DF
    assert isinstance(theirs, _DFHF)
    assert not isinstance(theirs, MD4SCF)
    assert abs(theirs.run(verbose=0).e_tot - scf.RHF(water).density_fit(AUXILIARY).run(verbose=0).e_tot) < 1e-9


def test_an_object_of_the_caller_stays(rhf, water):
    mine = md4.DF(water, AUXILIARY, backend="cpu", store="direct")
    assert rhf.density_fit(with_df=mine).with_df is mine
    assert md4.attach(scf.RHF(water).density_fit(with_df=mine)).with_df is mine
    theirs = df.DF(water, AUXILIARY)
    mf = rhf.density_fit(with_df=theirs)
    assert mf.with_df is theirs
    assert "not by md4 alone" in repr(mf)


def test_attached_again_with_other_options(water):
    """Those of density fitting change, too, unless it is the caller's own."""
    mf = md4.attach(scf.RHF(water).density_fit(AUXILIARY), backend="cpu")
    first, whole = mf.with_df, mf.run(verbose=0).e_tot
    assert md4.attach(mf, backend="cpu").with_df is first
    copied = pickle.loads(pickle.dumps(mf))
    for again in (md4.attach(mf, backend="cpu", max_memory=100), md4.attach(copied, backend="cpu", max_memory=100)):
        assert again.with_df is not first
        assert again.with_df.auxbasis == AUXILIARY
        assert "max_memory=100" in repr(again.with_df)
        assert abs(again.run(verbose=0).e_tot - whole) < 1e-9
    with pytest.raises(MemoryLimitError):
        md4.attach(mf, backend="cpu", max_memory=0.05).run(verbose=0)
    mine = md4.DF(water, AUXILIARY, backend="cpu")
    assert md4.attach(scf.RHF(water).density_fit(with_df=mine), backend="cpu", max_memory=100).with_df is mine
    again = md4.attach(scf.RHF(water).density_fit(AUXILIARY), backend="cpu")
    again.with_df._cderi = tensor = np.array(mine._cderi)  # which md4 would ignore
    assert md4.attach(again, backend="cpu", max_memory=100).with_df._cderi is tensor


@pytest.mark.parametrize("make", [
    lambda mol: md4.attach(scf.RHF(mol), backend="cpu").density_fit(AUXILIARY).newton(),
    lambda mol: md4.attach(scf.RHF(mol).density_fit(AUXILIARY).newton(), backend="cpu"),
], ids=["newton last", "attach last"])  # fmt: skip
def test_newton(pair, water, make):
    mf = make(water)
    assert mf.with_df is mf._scf.with_df
    assert isinstance(mf.with_df, md4.DF)
    assert abs(mf.run(verbose=0).e_tot - pair[1].e_tot) < 1e-9


def test_approximate_newton(water):
    """Fitting in the Hessian alone; the energy is exact."""
    mf = md4.attach(scf.RHF(water).newton().density_fit(AUXILIARY), backend="cpu")
    assert isinstance(mf.with_df, md4.DF)
    assert abs(mf.run(verbose=0).e_tot - scf.RHF(water).run(verbose=0).e_tot) < 1e-9


def test_response(pair):
    ours, theirs = ((mf.TDA().run(nstates=2).e, mf.TDHF().run(nstates=2).e) for mf in pair)
    assert np.allclose(ours, theirs, atol=1e-7, rtol=0)
    found, wanted = (mf.stability()[0] for mf in pair)
    assert abs(abs(found) - abs(wanted)).max() < 1e-5


def test_scanner_and_reset(water):
    other = molecule("O 0 0 0.1; H 0 0.8 -0.4; H 0 -0.7 -0.5", "6-31g")
    wanted = scf.RHF(other).density_fit(AUXILIARY).run(verbose=0).e_tot
    for change in (lambda mf: mf.as_scanner()(other), lambda mf: mf.reset(other).kernel()):
        mine = md4.attach(scf.RHF(water), backend="cpu").density_fit(AUXILIARY).run(verbose=0)
        assert abs(change(mine) - wanted) < 1e-8


def test_output_of_other_threads_stays(water, monkeypatch, capsys):
    """Of the whole process: while PySCF makes an auxiliary basis, other threads print, and PySCF gives no advice."""

    def make(*given, make=df.addons.make_auxmol):
        print("from a thread")
        return make(*given)

    monkeypatch.setattr(df.addons, "make_auxmol", make)
    assert md4.DF(water, AUXILIARY, backend="cpu").build().auxmol.basis == AUXILIARY
    with pytest.raises(md4.BasisError, match="does not have all of"):
        md4.DF(molecule("U 0 0 0", "ano"), AUXILIARY, backend="cpu").build()
    assert capsys.readouterr().out == "from a thread\n" * 2


@pytest.mark.parametrize("convert, kind", [
    ("to_uhf", scf.uhf.UHF), ("to_ghf", scf.ghf.GHF), ("to_ks", dft.rks.RKS),
])  # fmt: skip
def test_conversions(water, convert, kind):
    mine = md4.attach(scf.RHF(water), backend="cpu").density_fit(AUXILIARY).run(verbose=0)
    other = getattr(mine, convert)()
    assert isinstance(other, MD4SCF)
    assert isinstance(other, kind)
    assert other.with_df is mine.with_df
    if convert != "to_ks":
        assert abs(other.energy_tot() - mine.e_tot) < 1e-9


def test_copies_and_pickles_of_mean_fields(water):
    mine = md4.attach(scf.RHF(water), backend="cpu").density_fit(AUXILIARY).run(verbose=0)
    assert mine.copy().with_df is mine.with_df
    for other in (pickle.loads(pickle.dumps(mine)), copy.deepcopy(mine)):
        assert type(other) is type(mine)
        assert isinstance(other.with_df, md4.DF)
        assert abs(other.kernel() - mine.e_tot) < 1e-8


def test_the_log_tells_the_store(water):
    mf = md4.attach(scf.RHF(water), backend="cpu").density_fit(AUXILIARY)
    mf.with_df.verbose, mf.with_df.stdout = 4, io.StringIO()
    for _ in range(2):
        mf.get_jk(dm=density(water.nao))
    assert mf.with_df.stdout.getvalue().count("116 auxiliary functions, store device, metric by Cholesky") == 1


# correlated methods of PySCF ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["device", "direct"])
def test_mp2(pair, water, store):
    """With an auxiliary basis of its own; in memory and on disk."""
    energies = []
    for fit in (md4.DF(water, "cc-pvdz-ri", backend="cpu", store=store), df.DF(water, "cc-pvdz-ri").build()):
        mp = DFMP2(pair[1]).set(with_df=fit, force_outcore=store == "direct")
        energies.append(mp.run().e_corr)
    assert energies[0] < -0.1
    assert abs(energies[0] - energies[1]) < 1e-9


def test_other_methods(pair):
    """RPA, CASSCF and CCSD take the fitting of the mean field.

    Four orbitals are a space with one minimum; with three, rounding decides to which of several PySCF converges.
    """
    ours, theirs = ([
        RPA(mf).run().e_tot, mcscf.DFCASSCF(mf, 4, 4).run(conv_tol=1e-9).e_tot,
        mf.CCSD().run(max_cycle=2, verbose=0).e_tot,
    ] for mf in pair)  # fmt: skip
    assert np.allclose(ours, theirs, atol=1e-8, rtol=0)
    assert mcscf.DFCASSCF(pair[0], 3, 4).with_df is pair[0].with_df


def test_whole_tensor_in_c(pair):
    """GW hands the tensor to PySCF's C."""
    ours, theirs = (GWAC(mf).set(with_df=mf.with_df).ao2mo(pair[1].mo_coeff) for mf in pair)
    assert abs(ours - theirs).max() < 1e-10


def test_gradient(pair):
    """PySCF's own, with its integrals, of the same energy."""
    ours, theirs = (mf.nuc_grad_method().set(verbose=0).kernel() for mf in pair)
    assert abs(ours - theirs).max() < 1e-6


def test_cartesian_functions():
    mol = molecule(WATER, "6-31g*", cart=True)
    dm = density(mol.nao)
    assert_same(md4.DF(mol, AUXILIARY, backend="cpu").get_jk(dm), df.DF(mol, AUXILIARY).get_jk(dm))


def test_high_angular_momentum():
    """An i shell in the auxiliary basis; PySCF's MP2 energy of both."""
    mol = gto.M(atom="Ne 0 0 0", basis="6-31g", verbose=0)
    auxbasis = {"Ne": [[l, [a, 1]] for l in (0, 1, 2, 6) for a in (0.5, 1.7, 6.0)]}
    mf = scf.RHF(mol).run()
    ours, theirs = (DFMP2(mf).set(with_df=make(mol, auxbasis)).run().e_corr for make in (md4.DF, df.DF))
    assert abs(ours - theirs) < 1e-10
