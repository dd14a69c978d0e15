"""Integrals over three and two centres under PySCF's names."""

import numpy as np
import pytest
from molecules import WATER, host, molecule
from pyscf import df, gto

import md4
from md4.errors import ArgumentError, BasisError, DeviceError, MemoryLimitError, UnsupportedError


def water(basis="cc-pvdz", auxiliary="cc-pvdz-jkfit", **options):
    """Water with an orbital and an auxiliary basis; the general contractions of oxygen are split."""
    mol = molecule(WATER, basis, **options)
    return mol, df.make_auxmol(mol, auxiliary)


def assert_near(ours, theirs):
    assert ours.shape == theirs.shape
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-13 * abs(theirs).max())


@pytest.mark.parametrize("cart", [False, True])
@pytest.mark.parametrize("aosym", ["s1", "s2ij"])
def test_three_centres(backend, aosym, cart):
    mol, auxmol = water(cart=cart)
    assert_near(md4.int3c2e(mol, auxmol, aosym, backend=backend), df.incore.aux_e2(mol, auxmol, aosym=aosym))


@pytest.mark.parametrize("cart", [False, True])
def test_two_centres(backend, cart):
    _, auxmol = water(cart=cart)
    ours = md4.int2c2e(auxmol, backend=backend)
    assert_near(ours, auxmol.intor("int2c2e"))
    np.testing.assert_array_equal(ours, ours.T)


@pytest.mark.parametrize("omega", [0.3, -0.3])
def test_omega_is_the_molecules_by_default(backend, omega):
    mol, auxmol = water()
    with mol.with_range_coulomb(omega), auxmol.with_range_coulomb(omega):
        three, two = df.incore.aux_e2(mol, auxmol), auxmol.intor("int2c2e")
        assert_near(md4.int3c2e(mol, auxmol, backend=backend), three)
        assert_near(md4.int2c2e(auxmol, backend=backend), two)
        plain = md4.int2c2e(auxmol, omega=0, backend=backend)
    assert_near(md4.int3c2e(mol, auxmol, omega=omega, backend=backend), three)
    np.testing.assert_array_equal(plain, md4.int2c2e(auxmol, backend=backend))


@pytest.mark.parametrize("shells", [(1, 4, 2, 6, 3, 9), (0, 3, 0, 3, 11, 12), (5, 6, 0, 8, 0, 40), (2, 8, 4, 5, 7, 8)])
def test_slices(backend, shells):
    mol, auxmol = water()
    ends = (*shells[:5], min(shells[5], auxmol.nbas))
    theirs = df.incore.aux_e2(mol, auxmol, shls_slice=ends)
    assert_near(md4.int3c2e(mol, auxmol, shls_slice=ends, backend=backend), theirs)


@pytest.mark.parametrize(("first", "columns"), [(0, 7), (2, 7), (5, 9)])
def test_rows_of_the_triangle(backend, first, columns):
    mol, auxmol = water()
    ends = first, 7, 0, columns, 4, 20
    theirs = df.incore.aux_e2(mol, auxmol, aosym="s2ij", shls_slice=ends)
    assert_near(md4.int3c2e(mol, auxmol, "s2ij", shls_slice=ends, backend=backend), theirs)


def test_a_triangle_within_the_triangle(backend):
    mol, auxmol = water()
    ends = 2, 7, 2, 7, 4, 20
    square = df.incore.aux_e2(mol, auxmol, shls_slice=ends)
    ours = md4.int3c2e(mol, auxmol, "s2ij", shls_slice=ends, backend=backend)
    assert_near(ours, square[np.tril_indices(len(square))])


@pytest.mark.parametrize("shells", [(2, 8, 5, 9), (0, 3, 0, 3), (4, 9, 1, 6)])
def test_slices_of_two_centres(backend, shells):
    _, auxmol = water()
    assert_near(md4.int2c2e(auxmol, shls_slice=shells, backend=backend), auxmol.intor("int2c2e", shls_slice=shells))


@pytest.mark.parametrize("name", ["int3c2e", "int3c2e_sph", "int3c2e_cart", "int2c2e", "int2c2e_sph", "int2c2e_cart"])
def test_names(backend, name):
    mol = molecule(WATER, "6-31g*")
    assert_near(md4.intor(mol, name, backend=backend), mol.intor(name))


def test_one_molecule_of_two(backend):
    both = gto.conc_mol(*water("6-31g", "weigend"))
    ends = 0, 5, 0, 5, both.nbas - 12, both.nbas
    assert_near(md4.intor(both, "int3c2e", "s2ij", shls_slice=ends, backend=backend),
                both.intor("int3c2e", aosym="s2ij", shls_slice=ends))  # fmt: skip


def test_results_go_where_they_should(backend):
    mol, auxmol = water("6-31g", "weigend")
    out = np.empty((mol.nao, mol.nao, auxmol.nao))
    assert md4.int3c2e(mol, auxmol, out=out, backend=backend) is out
    assert_near(out, df.incore.aux_e2(mol, auxmol))
    if backend == "cuda":
        assert_near(host(md4.int3c2e(mol, auxmol, backend=backend, device=True)), out)
        assert_near(host(md4.int2c2e(auxmol, backend=backend, device=True)), auxmol.intor("int2c2e"))


def test_positional_arguments_are_in_order():
    mol, auxmol = water("6-31g", "weigend")
    ends, out = (0, 3, 0, 3, 0, 2), np.empty((3, 3, 2))
    assert md4.int3c2e(mol, auxmol, "s1", 0.2, ends, out, "cpu", False, 100, None, False) is out
    with mol.with_range_coulomb(0.2):
        assert_near(out, df.incore.aux_e2(mol, auxmol, shls_slice=ends))
    out = np.empty((2, 3))
    assert md4.int2c2e(auxmol, 0.2, (0, 2, 0, 3), out, "cpu", False, 100, None, False) is out
    with auxmol.with_range_coulomb(0.2):
        assert_near(out, auxmol.intor("int2c2e", shls_slice=(0, 2, 0, 3)))


WRONG = [
    ({"aosym": "s8"}, "aosym 's8' is unknown; use one of s1, s2ij"),
    ({"shls_slice": (0, 1, 0, 1)}, r"must hold 6 shell numbers \(two for each index\), not 4"),
    ({"shls_slice": (0, 1, 0, 1, 0, 1.5)}, "must hold integers, not 1.5"),
    ({"shls_slice": (0, 1, 0, 1, 3, 3)}, "must hold non-empty ranges; the indices have 9, 9, 25 shells"),
    ({"shls_slice": (0, 1, 0, 1, 3, 4000)}, "must hold non-empty ranges; the indices have 9, 9, 25 shells"),
    ({"shls_slice": (0, 2, 0, 1, 3, 4), "aosym": "s2ij"}, "'s2ij' needs a range of j that is that of i, or all j <= i"),
    ({"out": np.empty(3)}, "out must be"),
    ({"device": "yes"}, "device must be"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_wrong_arguments(options, message):
    mol, auxmol = water("6-31g", "weigend")
    with pytest.raises(ArgumentError, match=message):
        md4.int3c2e(mol, auxmol, backend="cpu", **options)


def test_molecules_that_cannot_be_used():
    mol, _ = water("6-31g", "weigend")
    cartesian = df.make_auxmol(molecule(WATER, "6-31g", cart=True), "weigend")
    with pytest.raises(ArgumentError, match="must be all spherical or all Cartesian"):
        md4.int3c2e(mol, cartesian, backend="cpu")
    with pytest.raises(ArgumentError, match=r"auxmol must be a pyscf\.gto\.Mole.*make_auxmol"):
        md4.int3c2e(mol, "weigend", backend="cpu")
    with pytest.raises(ArgumentError, match=r"auxmol must be a pyscf\.gto\.Mole.*make_auxmol"):
        md4.int2c2e("weigend", backend="cpu")
    with pytest.raises(BasisError, match="has no shells"):
        md4.int2c2e(molecule("ghost-He 0 0 0", {}), backend="cpu")


def test_limits():
    mol, auxmol = water("6-31g", "weigend")
    with pytest.raises(MemoryLimitError, match="raise max_memory"):
        md4.int3c2e(mol, auxmol, backend="cpu", max_memory=0.05)
    with pytest.raises(DeviceError, match="device=True keeps the result on a GPU"):
        md4.int3c2e(mol, auxmol, backend="cpu", device=True)
    high = molecule("He 0 0 0", {"He": [[12, [1.0, 1.0]]]})
    with pytest.raises(UnsupportedError, match="add up to"):
        md4.intor(high, "int3c2e", backend="cpu")
    assert_near(md4.int2c2e(high, backend="cpu"), md4.int2c2e(high, backend="cpu").T)


@pytest.mark.parametrize("options", [{"devices": 0}, {"gather": True}])
def test_one_device_makes_them(options):
    with pytest.raises(ArgumentError, match="int2c2e is made by one device: leave out devices, comm and gather"):
        md4.intor(molecule(WATER, "6-31g"), "int2c2e", backend="cpu", **options)
