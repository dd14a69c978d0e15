"""`md4.DF.mo_rows` and `ao2mo`, and PySCF's functions of fitted integrals that ask an `md4.DF` for them."""

import sys

import numpy as np
import pytest
from fitted_orbitals import AUXILIARY, orbitals
from pyscf import df, lib, mcscf, scf
from pyscf.mp import dfmp2, dfump2

import md4
from md4.contract.density_fitting import DensityFitting
from md4.pyscf.orbitals import install, of_closed_shells, of_two_spins

FUNCTIONS = [(dfmp2, "ovL"), (dfump2, "ovL0")]


@pytest.fixture
def ours(water):
    return md4.DF(water, AUXILIARY, backend="cpu")


@pytest.fixture(scope="module")
def theirs(water):
    # in memory, however much the process has taken
    return df.DF(water, AUXILIARY).set(max_memory=1e6).build()


@pytest.fixture
def no_rows(monkeypatch):
    """Rows over AOs are an error."""
    monkeypatch.setattr(DensityFitting, "rows", None)


@pytest.fixture
def fitter(backend):
    """Name of each backend; a GPU with CuPy."""
    if backend == "cuda":
        pytest.importorskip("cupy")
    return backend


def test_rows(fitter, water, theirs, no_rows):
    """Lists of numbers, integers, and any order in memory."""
    fit, (a, b) = md4.DF(water, AUXILIARY, backend=fitter), orbitals(water, 3, 5)
    wanted = np.einsum("qmn,mi,na->qia", lib.unpack_tril(theirs._cderi), a, b)
    for left in (a, a.tolist(), np.asfortranarray(a)):
        found = fit.mo_rows(left, b)
        assert found.shape == (84, 15)
        assert abs(found - wanted.reshape(84, 15)).max() < 1e-11
    assert np.array_equal(fit.mo_rows(np.eye(13, dtype=int), b), fit.mo_rows(np.eye(13), b))


def test_ao2mo(fitter, water, theirs, no_rows):
    """Results are those of PySCF, with the same shapes, for sets that it calls the same."""
    fit, (a, b, c) = md4.DF(water, AUXILIARY, backend=fitter), orbitals(water, 5, 3, 9)
    for sets in (a, [a, a, a, a.copy()], [a, b, a, b], [a, b, b, a], [a, a, c, b], [a + 1e-14, a, b, b], [b, c, c, c]):
        for compact in (True, False):
            found, wanted = fit.ao2mo(sets, compact=compact), theirs.ao2mo(sets, compact=compact)
            assert found.shape == wanted.shape
            assert abs(found - wanted).max() < 1e-12 * abs(wanted).max()
    assert fit.get_mo_eri(a).shape == (15, 15)


def test_arguments(ours, water):
    a = np.zeros((13, 2))
    for call in (ours.mo_rows, lambda *pair: ours.ao2mo([*pair, a, a])):
        with pytest.raises(md4.UnsupportedError, match="the orbitals are complex"):
            call(a, a + 0j)
        for wrong in (a[:5], a[:, 0], a.astype(str)):
            with pytest.raises(md4.ArgumentError, match=r"orbitals must have the shape \(13, n\), not"):
                call(a, wrong)
    for wrong in ([a, a], 3):
        with pytest.raises(md4.ArgumentError, match="must hold 4 arrays of orbitals, one for each index"):
            ours.ao2mo(wrong)


def test_a_tensor_that_was_given(ours, theirs, water, tmp_path):
    """As an array, and in a file; all is PySCF's."""
    theirs.copy().set(_cderi=None, _cderi_to_save=str(tmp_path / "tensor.h5")).build()
    a, b = orbitals(water, 3, 5)
    wanted, functions = ours.mo_rows(a, b), [module._init_mp_df_eris for module, _ in FUNCTIONS]
    for tensor in (2 * theirs._cderi, str(tmp_path / "tensor.h5")):
        factor = 1 if isinstance(tensor, str) else 2
        fit = md4.DF(water, AUXILIARY, backend="cpu")
        fit._cderi = tensor
        assert abs(fit.mo_rows(a, b) - factor * wanted).max() < 1e-11
        assert fit.mo_rows(a[:, :0], b).shape == (84, 0)
        assert abs(fit.ao2mo(a) - factor**2 * ours.ao2mo(a)).max() < 1e-10
        assert abs(functions[0](fit, a, b, 4000) - factor * wanted.T).max() < 1e-11
        assert fit._md4.made == {}


def test_active_space(water, no_rows):
    """CASCI with density fitting has no other two-electron integrals than these, and J and K."""
    theirs = scf.RHF(water).density_fit(AUXILIARY)
    ours = md4.attach(theirs.copy(), backend="cpu")
    energies = [mcscf.DFCASCI(mf.run(conv_tol=1e-11), 4, 4).run(verbose=0).e_tot for mf in (ours, theirs)]
    assert abs(energies[0] - energies[1]) < 1e-9


# PySCF's functions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module, name", FUNCTIONS, ids=["one spin", "two spins"])
def test_fitted_pairs(ours, theirs, water, module, name, no_rows, tmp_path):
    """In memory, and as datasets of a file."""
    a, b = orbitals(water, 3, 5)
    occupied, virtual = (a, b) if module is dfmp2 else ([a, b], [b, a])
    with lib.H5FileWrap(str(tmp_path / "ovL.h5"), "w") as file:
        wanted = module._init_mp_df_eris(theirs, occupied, virtual, 4000)
        found = module._init_mp_df_eris(ours, occupied, virtual, 4000)
        stored = module._init_mp_df_eris(ours, occupied, virtual, 4000, h5obj=file)
        assert np.array_equal(file[name], found if module is dfmp2 else found[0])
        few = (a[:, :0], b) if module is dfmp2 else ([a, a[:, :0]], [b, b])
        none = module._init_mp_df_eris(ours, *few, 4000, h5obj=file.create_group("none"))
        assert (none if module is dfmp2 else none[1]).shape == (0, 84)
        if module is dfmp2:
            wanted, found, stored = [wanted], [found], [stored]
        for one, other, dataset in zip(found, wanted, stored, strict=True):
            assert one.shape == other.shape == (15, 84)
            assert abs(one - other).max() < 1e-11
            assert np.array_equal(one, dataset)


@pytest.mark.parametrize("module", [dfmp2, dfump2])
def test_other_objects_keep_pyscfs_bits(ours, theirs, water, module):
    """What is not md4's goes to PySCF's function, which is replaced once."""
    a, b = orbitals(water, 3, 5)
    given = (a, b, 4000) if module is dfmp2 else ([a, b], [b, a], 4000)
    ours.build()
    function = module._init_mp_df_eris
    assert function.__wrapped__.__module__ == module.__name__
    found, wanted = function(theirs, *given), function.__wrapped__(theirs, *given)
    assert np.array_equal(found, wanted) if module is dfmp2 else all(map(np.array_equal, found, wanted))
    md4.DF(water).copy()
    assert module._init_mp_df_eris is function


def test_other_versions_of_pyscf(monkeypatch):
    """Without a module, or its function, all is as before."""
    monkeypatch.delattr(dfmp2, "_init_mp_df_eris")
    monkeypatch.setitem(sys.modules, "pyscf.mp.dfump2", None)
    install()
    assert not hasattr(dfmp2, "_init_mp_df_eris")


@pytest.mark.parametrize("function", [of_closed_shells, of_two_spins])
def test_all_arguments_are_handed_on(function):
    """With their names."""

    def original(with_df, occ_coeff, vir_coeff, max_memory, h5obj=None, log=None):
        return with_df, occ_coeff, vir_coeff, max_memory, h5obj, log

    assert function(original, 1, 2, 3, 4, log=6, h5obj=5) == (1, 2, 3, 4, 5, 6)
