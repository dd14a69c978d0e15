"""The entry points under PySCF's names."""

import numpy as np
import pytest
from molecules import WATER, molecule

import md4
from md4.errors import ArgumentError, BasisError, UnsupportedError
from md4.pyscf.intor import NAMES
from md4.validation import oracle as reference


@pytest.fixture(scope="module")
def water():
    return molecule(WATER, "6-31g**")


@pytest.mark.parametrize("cart", [False, True])
@pytest.mark.parametrize("name", ["int2e", "int2e_sph", "int2e_cart"])
def test_names(backend, name, cart):
    mol = molecule(WATER, "6-31g*", cart=cart)
    ours, theirs = md4.intor(mol, name, aosym="s4", backend=backend), mol.intor(name, aosym="s4")
    assert ours.shape == theirs.shape
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("name", "kind"), [("int2e_yp", "yukawa"), ("int2e_stg", "slater")])
def test_geminals(backend, name, kind):
    """Against the oracle, since PySCF's libcint comes without them."""
    mol = molecule(WATER, "sto-3g")
    mol.set_f12_zeta(1.2)
    ours, shells = md4.intor(mol, name, backend=backend), md4.Basis.from_mol(mol).shells
    np.testing.assert_array_equal(md4.intor(mol, f"{name}_sph", backend=backend), ours)
    for quartet in ((0, 1, 2, 3), (3, 2, 4, 1), (0, 0, 0, 0)):
        part = tuple(slice(mol.ao_loc[s], mol.ao_loc[s + 1]) for s in quartet)
        expected = reference.eri([shells[s] for s in quartet], operator=(kind, 1.2), dps=20)
        np.testing.assert_allclose(ours[part], expected, rtol=0, atol=1e-14)


def test_geminals_need_an_exponent(water):
    with pytest.raises(ArgumentError, match=r"int2e_yp needs the geminal's exponent; set it by mol\.set_f12_zeta"):
        md4.intor(water, "int2e_yp", backend="cpu")


@pytest.mark.parametrize("name", ["int1e_ovlp", "int2e_ipip1", "eri", ""])
def test_unsupported_names_list_the_supported_ones(water, name):
    with pytest.raises(UnsupportedError, match="is not offered") as error:
        md4.intor(water, name)
    assert all(supported in str(error.value) for supported in NAMES)


@pytest.mark.parametrize("omega", [0.3, -0.3])
def test_omega_is_the_molecules_by_default(backend, omega):
    mol = molecule(WATER, "sto-3g")
    plain = md4.int2e(mol, backend=backend)
    mol.set_range_coulomb(omega)
    np.testing.assert_allclose(md4.int2e(mol, backend=backend), mol.intor("int2e"), rtol=0, atol=1e-12)
    np.testing.assert_array_equal(md4.int2e(mol, omega=0, backend=backend), plain)
    mol.set_range_coulomb(0)
    np.testing.assert_array_equal(
        md4.int2e(mol, omega=omega, backend=backend), md4.intor(mol, "int2e", omega=omega, backend=backend)
    )


@pytest.mark.parametrize("omega", [np.nan, np.inf, "0.3a"])
def test_wrong_omega(water, omega):
    with pytest.raises(ArgumentError, match="omega must be a finite real number"):
        md4.int2e(water, omega=omega, backend="cpu")


def test_no_shells():
    with pytest.raises(BasisError, match="has no shells"):
        md4.int2e(molecule("ghost-He 0 0 0", {}), backend="cpu")


def test_progress_bar(water, capsys):
    md4.int2e(water, backend="cpu", progress=False)
    assert capsys.readouterr().err == ""


def test_positional_arguments_are_in_order(water):
    """int2e hands its arguments to intor by position."""
    out = np.empty((3, 3, 3, 3))
    assert md4.int2e(water, "s1", 0.2, (0, 3) * 4, out, "cpu", False, 100, None, False) is out
    with water.with_range_coulomb(0.2):
        np.testing.assert_allclose(out, water.intor("int2e", shls_slice=(0, 3) * 4), rtol=0, atol=1e-13)
