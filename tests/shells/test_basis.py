"""Shells and basis sets: from PySCF, from plain arrays, and what is refused."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from molecules import WATER, molecule

import md4
from md4.errors import BasisError
from md4.shells.basis import PTR_ENV_START, Basis, fingerprint
from md4.shells.shell import Shell
from md4.support.display import shell_letter

ONE = ([0], [[1.0]], [[1.0]], [[0.0, 0.0, 0.0]])


@pytest.mark.parametrize("name", ["sto-3g", "cc-pvtz", "ano-rcc"])
@pytest.mark.parametrize("cart", [False, True])
def test_from_mol(name, cart):
    mol = molecule(WATER, name, cart=cart)
    basis = Basis.from_mol(mol)
    assert (basis.nshell, basis.nao, basis.pure) == (mol.nbas, mol.nao, not cart)
    np.testing.assert_array_equal(basis.ao_loc, mol.ao_loc)
    np.testing.assert_array_equal(basis.centres, [mol.bas_coord(i) for i in range(mol.nbas)])
    assert [s.nctr for s in basis.shells] == [mol.bas_nctr(i) for i in range(mol.nbas)]


def test_flat_arrays_hold_the_shells():
    basis = Basis.from_mol(molecule(WATER, "ano-rcc"))
    for i, shell in enumerate(basis.shells):
        first, n = basis.prim_loc[i], basis.nprims[i]
        np.testing.assert_array_equal(basis.exponents[first : first + n], shell.exponents)
        flat = basis.coefficients[basis.coef_loc[first : first + n][:, None] + np.arange(shell.nctr)]
        np.testing.assert_array_equal(flat, shell.coefficients)


@given(
    l=st.integers(0, 8), e=st.lists(st.floats(1e-3, 1e5), min_size=1, max_size=4, unique=True), seed=st.integers(0, 9)
)
def test_normalisation(l, e, seed):
    """Contracted functions come out with unit radial norm; the second time nothing changes."""
    c = np.random.default_rng(seed).uniform(0.1, 1, (len(e), 2))
    shell = Basis.from_arrays([l], [e], [c], np.zeros((1, 3))).shells[0]
    sums = np.add.outer(shell.exponents, shell.exponents)
    overlap = np.array([[md4.shells.shell.gamma(l + 1.5) / (2 * s ** (l + 1.5)) for s in row] for row in sums])
    norms = np.einsum("ic,ij,jc->c", shell.coefficients, overlap, shell.coefficients)
    np.testing.assert_allclose(norms, 1, rtol=1e-12)


def test_from_arrays_is_from_mol():
    """Coefficients of normalised primitives, as in basis-set files."""
    from pyscf import gto

    mol = molecule(WATER, "6-31g")
    data = [shell for a in range(3) for shell in gto.basis.load("6-31g", mol.atom_pure_symbol(a))]
    centres = [mol.atom_coord(a) for a in range(3) for _ in gto.basis.load("6-31g", mol.atom_pure_symbol(a))]
    columns = [np.array(s[1:]) for s in data]
    ours = Basis.from_arrays([s[0] for s in data], [c[:, 0] for c in columns], [c[:, 1:] for c in columns], centres)
    for a, b in zip(ours.shells, Basis.from_mol(mol).shells):
        np.testing.assert_allclose(a.coefficients, b.coefficients, rtol=1e-13)


def test_coefficients_as_they_are():
    basis = Basis.from_arrays(*ONE, normalise=False)
    np.testing.assert_array_equal(basis.shells[0].coefficients, [[1.0]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({1: [[-1.0]]}, r"shell 0 \(l = 0\): exponent .*-1.0.* is not a positive finite number"),
        ({1: [[0.0]]}, r"exponent .*0.0.* is not a positive"),
        ({1: [[np.nan]]}, r"exponent .*nan.* is not a positive"),
        ({1: [[np.inf]]}, r"exponent .*inf.* is not a positive"),
        ({2: [[np.nan]]}, r"a contraction coefficient is not finite"),
        ({2: [[0.0]]}, r"zero norm"),
        ({1: [[1.0, 2.0]]}, r"2 exponents but coefficients of shape \(1, 1\)"),
        ({1: [[]], 2: [[]]}, r"no primitives"),
        ({0: [-1]}, r"non-negative integer"),
        ({0: [0.5]}, r"non-negative integer"),
        ({3: [[0.0, np.nan, 0.0]]}, r"three finite coordinates"),
        ({3: [[0.0, 0.0]]}, r"three finite coordinates"),
        ({0: [0, 1]}, r"one entry for each shell"),
        ({n: [] for n in range(4)}, r"the basis has no shells"),
    ],
)
def test_refusals(change, message):
    arguments = [change.get(n, part) for n, part in enumerate(ONE)]
    with pytest.raises(BasisError, match=message):
        Basis.from_arrays(*arguments)


def segmented_classes(basis):
    """(l, nprim, nctr) of the shells of a segmented basis, whose functions are checked to be the same."""
    split = basis.segmented()
    assert split is basis or np.array_equal(basis._split(False)[1], np.arange(basis.nao))
    assert split.nao == basis.nao
    assert set(basis.ao_loc) <= set(split.ao_loc)
    for ao, shell in zip(basis.ao_loc, basis.shells):
        for c in range(shell.nctr):
            first = ao + c * basis.ncomp(shell.l)
            n = int(np.searchsorted(split.ao_loc, first, side="right")) - 1
            part, column = split.shells[n], (first - split.ao_loc[n]) // basis.ncomp(shell.l)
            used = np.flatnonzero(shell.coefficients[:, c])
            rows = np.flatnonzero(part.coefficients[:, column])
            assert np.array_equal(part.exponents[rows], shell.exponents[used])
            assert np.array_equal(part.coefficients[rows, column], shell.coefficients[used, c])
    return [(s.l, s.nprim, s.nctr) for s in split.shells]


def test_segmented():
    """cc-pV6Z of the Basis Set Exchange, one shell an l; in PySCF's order of functions the contracted s are apart."""
    classes = segmented_classes(Basis.from_mol(molecule("O", "cc-pv6z")))
    assert [c for c in classes if c[0] == 0] == [(0, n, 1) for n in (16, 1, 1, 1, 16, 1, 1)]
    assert [c for c in classes if c[0] == 5] == [(5, 1, 1)] * 2


def test_regrouped():
    """The two contracted s functions of oxygen share a shell, whatever stands between them."""
    own = Basis.from_mol(molecule("O", "cc-pv6z"))
    basis, order = own.regrouped()
    assert [(s.nprim, s.nctr) for s in basis.shells if s.l == 0] == [(16, 2)] + [(1, 1)] * 5
    assert order[:7].tolist() == [0, 4, 1, 2, 3, 5, 6]
    s = own.shells[0].coefficients
    assert np.array_equal(basis.shells[0].coefficients, s[:, [0, 4]])
    assert [basis.shells[n].coefficients for n in (1, 2, 3)] == [s[:, n][s[:, n] != 0] for n in (1, 2, 3)]
    assert sorted(order) == list(range(own.nao))


@pytest.mark.parametrize("basis", ["cc-pvtz", "roosdz"])
def test_nothing_to_split(basis):
    """Functions that share their primitives stay in one shell."""
    own = Basis.from_mol(molecule("C", basis))
    assert own.segmented() is own
    assert own.regrouped()[0] is own
    assert own.classes[:, 1].max() > 1


def test_functions_of_different_primitives():
    coefficients = [[1, 2, 0, 0], [1, 1, 0, 0], [1, 0, 0, 3], [0, 0, 0, 0], [0, 0, 0, 1]]
    basis = Basis([Shell(1, np.arange(5.0, 0, -1), np.array(coefficients, float), np.zeros(3))])
    assert segmented_classes(basis) == [(1, 3, 2), (1, 1, 1), (1, 2, 1)]


@pytest.mark.parametrize("pure", [True, False], ids=["spherical", "Cartesian"])
def test_decontracted(pure):
    """J and K of D over contracted functions are those of C D C^T over primitives, in terms of C."""
    shells = [Shell(0, [3.0, 0.4], [[0.2, -1.5], [0.7, 0.0]], np.zeros(3)), Shell(2, [0.8], [[1.5]], np.ones(3))]
    shells += [Shell(1, [1.1, 0.3], [[0.5], [0.6]], np.array([0.0, 0.3, -0.7]))]
    basis = Basis(shells, pure)
    primitive, owner, c = basis.decontracted()
    assert [shell.nprim for shell in primitive.shells] == [1, 1, 1, 2]
    assert owner.tolist() == [0, 0, 1, 2]
    assert c.shape == (primitive.nao, basis.nao)
    assert abs(c).max() == 1
    dm = np.random.default_rng(0).normal(size=(basis.nao,) * 2)
    want, found = (md4.get_jk(*of, hermi=0, backend="cpu") for of in ((basis, dm), (primitive, c @ dm @ c.T)))
    for one, other in zip(want, found):
        assert abs(c.T @ other @ c - one).max() < 1e-12


def test_a_molecule_without_shells():
    with pytest.raises(BasisError, match="the molecule has no shells"):
        Basis.from_mol(molecule("ghost-He 0 0 0", {}))


def test_shells_are_checked_however_they_come():
    with pytest.raises(BasisError, match="is not a positive finite number"):
        Basis([Shell(0, np.array([-2.0]), np.ones((1, 1)), np.zeros(3))])


def test_repr():
    assert repr(Basis.from_mol(molecule(WATER, "cc-pvdz"))) == "Basis(11 spherical shells, 24 AOs: 7s4p1d)"
    assert [shell_letter(l) for l in (0, 6, 7, 30)] == ["s", "i", "k", "[l=30]"]


def test_import_needs_neither_pyscf_nor_a_gpu():
    code = (
        "import sys, md4; sys.exit(any(m.split('.')[0] == 'pyscf' or m.startswith('numba.cuda') for m in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_arrays_of_the_caller_may_change():
    """A basis has numbers of its own, also for what is made of its shells later."""
    centres, exponents, coefficients = np.array([[0.0, 0, 0], [0, 0, 1.8]]), np.array([1.0]), np.array([[1.0]])
    basis = Basis.from_arrays([0, 0], [exponents] * 2, [coefficients] * 2, centres)
    one = Basis([md4.Shell(0, exponents, coefficients, centres[1])])

    def numbers():
        shells = (*basis.shells, *one.shells)
        return [(*shell.centre, shell.exponents.item(), shell.coefficients.item()) for shell in shells]

    before = numbers()
    centres[1, 2], exponents[0], coefficients[0, 0] = 10.0, 2.0, 3.0
    assert numbers() == before


def test_shells_of_lists():
    assert md4.Shell(0, [1.0], [[1.0]], [0, 0, 0]).nctr == 1


def test_the_fingerprint_follows_every_number():
    """From the first coordinate to the last coefficient, but not the options of a calculation before them."""
    mol = molecule(WATER, "6-31g")
    before, first = fingerprint(mol), mol._atm[0, 1]
    assert first == PTR_ENV_START
    for n in range(len(mol._env)):
        other = mol.copy()
        other._env = mol._env.copy()
        other._env[n] += 0.5
        assert (fingerprint(other) != before) == (n >= first), n


def test_moduli_of_joined_bases():
    """Those of all parts, on which rounding errors of integrals over two and three centres depend."""
    signs = Basis.from_arrays([0, 1], [[1.0, 3.0]] * 2, [[0.3, -0.8], [0.4, 0.7]], np.zeros((2, 3)))
    joined = Basis.joined([signs, signs])
    assert joined.alternating.tolist() == [True, False, True, False, False]
    np.testing.assert_array_equal(joined.absolute.coefficients, abs(joined.coefficients))
    assert joined.absolute.unit == joined.unit


def test_decontracted_primitives_without_coefficients():
    """They are functions with coefficients of zero, not of something that is no number."""
    basis = Basis([Shell(0, [1.0, 2.0], [[0.0, 0.0], [0.5, -0.3]], [0.0, 0.0, 0.0])])
    np.testing.assert_array_equal(basis.decontracted()[2], [[0.0, 0.0], [1.0, -0.6]])
