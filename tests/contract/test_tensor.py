"""Whole AO tensors against PySCF: molecules of all kinds, symmetries, slices, memory, and bad input."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from molecules import (
    HYDROGEN_FLUORIDE,
    METHANE,
    STORED,
    WATER,
    arbitrate,
    joined,
    molecule,
    relative_error,
    tensor_error,
)
from pyscf import gto

import md4
from md4.contract.tensor import Request, piece_size
from md4.engine import Engine, make_backend
from md4.errors import ArgumentError, DeviceError, MemoryLimitError
from md4.method.operators import Operator
from md4.shells.basis import Basis
from md4.validation import oracle as reference

BENZENE = "; ".join(
    f"{name} {r * np.cos(n * np.pi / 3):.6f} {r * np.sin(n * np.pi / 3):.6f} 0"
    for name, r in (("C", 1.3915), ("H", 2.4715))
    for n in range(6)
)


def check(mol, backend, factor=1):
    """Compares 's8' tensors element by element, and as a whole; `factor` is for libcint's own errors."""
    ours = md4.int2e(mol, aosym="s8", backend=backend)
    theirs = mol.intor("int2e", aosym="s8")
    assert abs(ours - theirs).max() <= 1e-10
    assert tensor_error(ours, theirs) <= factor
    assert relative_error(ours, theirs) <= factor * 1e-12
    if factor == SEXTUPLE:
        for our_error, their_error in arbitrate(mol, ours, theirs):
            print(f"against the oracle: md4 {our_error:.1e}, libcint {their_error:.1e} of what is allowed")
            assert our_error <= 0.1 < their_error


# Of general contractions libcint's rounding errors are multiplied by large coefficients that cancel: where they differ
# most in CH in ano-rcc, the oracle finds md4 right to 8e-15, libcint to 4e-12; see test_ano_against_the_oracle.
ANO = 3000
# Water in cc-pV5Z: 9.5e-12 of the Schwarz bound in libcint's tensor at an (ff|ff) where md4 is right to 1e-18.
QUINTUPLE = 5
# HF in cc-pV6Z: 5e-10 of the Schwarz bound, where the oracle finds libcint off and md4 right; see `check`.
SEXTUPLE = 500


@pytest.mark.sample("cpu-cc-pvdz", "cpu-cc-pvtz")
@pytest.mark.parametrize("basis", ["cc-pvdz", "cc-pvtz", "cc-pvqz"])
def test_water(backend, basis):
    check(molecule(WATER, basis), backend)


def test_water_cartesian(backend):
    check(molecule(WATER, "cc-pvtz", cart=True), backend)


def test_methane_in_an_ano_basis(backend):
    """General contraction: two functions of 3 to 9 primitives in each shell."""
    check(molecule(METHANE, "roosdz"), backend, factor=3)


@pytest.mark.slow
def test_ano_against_the_oracle():
    """(sp|sp) of 8 x 9 x 8 x 9 primitives, 6 and 8 functions in a shell."""
    mol = molecule("C 0 0 0; H 0.63 0.63 0.63", "ano-rcc")
    shells = Basis.from_mol(mol).shells
    h = next(s for s in shells if s.l == 0 and s.nctr == 6)
    c = next(s for s in shells if s.l == 1 and s.nctr == 8)
    block = Engine(Basis([h, c]), backend="cpu").compute([[0, 1]], [[0, 1]])[0, 0]
    elements = [(5, 20, 5, 20), (0, 2, 3, 11)]
    values = reference.eri([h, c, h, c], elements=elements, dps=25)
    assert max(abs(block[e] - v) for e, v in zip(elements, values)) < 1e-13


@pytest.mark.parametrize("name, elements", [(name, tuple(sets)) for name, sets in STORED.items()])
def test_stored_basis_sets_are_those_of_the_exchange(name, elements):
    pytest.importorskip("basis_set_exchange")
    for element in elements:
        assert gto.basis.load(name, element) == STORED[name][element]


def test_heavy_element(backend):
    """Exponents to 2e6."""
    mol = molecule("I 0 0 0; H 0 0 1.609", "x2c-svpall")
    assert max(mol.bas_exp(i).max() for i in range(mol.nbas)) > 1e6
    check(mol, backend)


@pytest.mark.parametrize(
    "atom",
    [
        "O 0 0 0.1173; H 0 0.7572 -0.4692; ghost-H 0 -0.7572 -0.4692",
        "Ne 0 0 0; ghost-O 0 0 0",
        "He 0 0 0; Ne 0 0 26.4589",
    ],
    ids=["ghost atom", "coincident centres", "50 Bohr apart"],
)
def test_centres(backend, atom):
    check(molecule(atom, "cc-pvtz"), backend)


@pytest.mark.parametrize("omega", [0.3, -0.3])
def test_range_separation(backend, omega):
    """erfc as Coulomb minus erf: libcint's own is good to 2e-11 only."""
    mol = molecule(WATER, "cc-pvdz")
    ours = md4.int2e(mol, aosym="s8", omega=omega, backend=backend)
    with mol.with_range_coulomb(abs(omega)):
        theirs = mol.intor("int2e", aosym="s8")
    if omega < 0:
        theirs = mol.intor("int2e", aosym="s8") - theirs
    assert tensor_error(ours, theirs) <= 1


@pytest.mark.thorough
def test_benzene(backend):
    check(molecule(BENZENE, "cc-pvdz"), backend)


@pytest.mark.slow
def test_large_bases_on_cpu():
    check(molecule("C 0 0 0; H 0.63 0.63 0.63", "ano-rcc"), "cpu", ANO)
    check(molecule(WATER, "cc-pv5z"), "cpu", QUINTUPLE)


@pytest.mark.slow
def test_i_functions_on_cpu():
    check(hydrogen_fluoride(), "cpu", SEXTUPLE)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["water cc-pv5z", "methane ano-rcc", "hydrogen fluoride cc-pv6z"])
def test_large_on_gpu(gpu, name):
    mols = {
        "water cc-pv5z": (lambda: molecule(WATER, "cc-pv5z"), QUINTUPLE),
        "methane ano-rcc": (lambda: molecule(METHANE, "ano-rcc"), ANO),
        "hydrogen fluoride cc-pv6z": (hydrogen_fluoride, SEXTUPLE),
    }
    make, factor = mols[name]
    check(make(), "cuda", factor)


def hydrogen_fluoride():
    """In cc-pV6Z: i functions, 231 AOs."""
    mol = molecule(HYDROGEN_FLUORIDE, "cc-pv6z")
    assert max(mol.bas_angular(i) for i in range(mol.nbas)) == 6
    return mol


# symmetries and slices ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def water():
    return molecule(WATER, "6-31g**")


@pytest.fixture(scope="module")
def full(water):
    return water.intor("int2e", aosym="s1")


@pytest.mark.parametrize("aosym", ["s1", "s4", "s8"])
def test_symmetries(backend, water, aosym):
    ours, theirs = md4.int2e(water, aosym, backend=backend), water.intor("int2e", aosym=aosym)
    assert ours.shape == theirs.shape
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-13)


def test_s1_is_symmetric_to_the_last_bit(backend, water):
    t = md4.int2e(water, "s1", backend=backend)
    for order in ((1, 0, 2, 3), (0, 1, 3, 2), (2, 3, 0, 1)):
        np.testing.assert_array_equal(t, t.transpose(order))


SLICES = [
    (0, 12, 0, 12, 0, 12, 0, 12),
    (0, 3, 3, 8, 1, 4, 7, 12),  # nothing in common
    (0, 8, 3, 12, 0, 8, 3, 12),  # i and j overlap, bra and ket the same
    (0, 8, 3, 12, 3, 12, 0, 8),  # the same pairs the other way round
    (2, 9, 2, 9, 0, 5, 0, 5),  # i = j, k = l
    (2, 9, 4, 6, 2, 9, 2, 9),  # j within i
    (5, 6, 5, 6, 5, 6, 5, 6),  # one shell
    (3, 4, 0, 12, 0, 12, 3, 4),
]


@pytest.mark.parametrize("shls_slice", SLICES, ids=str)
def test_s1_slices(backend, water, full, shls_slice):
    assert water.nbas == 12
    check_slice(backend, water, full, shls_slice)


def check_slice(backend, water, full, shls_slice):
    ours = md4.int2e(water, shls_slice=shls_slice, backend=backend)
    ends = water.ao_loc[list(shls_slice)].reshape(4, 2)
    np.testing.assert_allclose(ours, full[tuple(slice(*e) for e in ends)], rtol=0, atol=1e-13)


ranges = st.tuples(st.integers(0, 11), st.integers(1, 12)).map(lambda r: (min(r), max(*r, min(r) + 1)))


@given(parts=st.tuples(ranges, ranges, ranges, ranges))
def test_any_s1_slice(water, full, parts):
    check_slice("cpu", water, full, sum(parts, ()))


def test_needless_zeros_of_general_contractions(backend, water):
    """Symmetries and slices where the shells that are named are not those that are computed with."""
    mol = molecule(WATER, joined("cc-pvdz", "OH"))
    for aosym in ("s1", "s4", "s8"):
        assert relative_error(md4.int2e(mol, aosym=aosym, backend=backend), mol.intor("int2e", aosym=aosym)) < 1e-12
    part = (0, 2, 1, 4, 2, 5, 0, 3)
    ours = md4.int2e(mol, shls_slice=part, backend=backend)
    assert relative_error(ours, mol.intor("int2e", shls_slice=part)) < 1e-12


@pytest.mark.parametrize("bra", [(0, 12), (2, 9)])
@pytest.mark.parametrize("ket", [(0, 12), (2, 9), (5, 12)])
def test_s4_slices(backend, water, bra, ket):
    shls_slice = (*bra, *bra, *ket, *ket)
    ours = md4.int2e(water, "s4", shls_slice=shls_slice, backend=backend)
    theirs = water.intor("int2e", aosym="s4", shls_slice=shls_slice)
    assert ours.shape == theirs.shape
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-13)


@pytest.mark.sample("cpu-s8")
@pytest.mark.parametrize("aosym", ["s1", "s4", "s8"])
def test_small_blocks(backend, water, aosym, monkeypatch):
    """Pieces of few pairs, H matrices dropped and made again: the same tensor."""
    monkeypatch.setattr(type(make_backend(backend, Operator())), "block_bytes", lambda _: 4000)
    monkeypatch.setattr("md4.contract.tensor.HERMITE_SHARE", 1e-12)
    np.testing.assert_allclose(
        md4.int2e(water, aosym, backend=backend), water.intor("int2e", aosym=aosym), rtol=0, atol=1e-13
    )


@given(nab=st.integers(1, 784), h=st.integers(0, 10**7), block=st.integers(0, 10**10), hermite=st.integers(0, 10**11))
def test_piece_size(nab, h, block, hermite):
    size = piece_size(nab, h, block, hermite)
    assert size >= 1
    assert size == 1 or ((size * nab) ** 2 * 8 <= block and 4 * size * h <= hermite)


# arguments ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aosym", ["s1", "s8"])
def test_out(backend, water, aosym):
    theirs = water.intor("int2e", aosym=aosym)
    out = np.full(theirs.shape, np.nan)
    assert md4.int2e(water, aosym, out=out, backend=backend) is out
    np.testing.assert_allclose(out, theirs, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("aosym", "out"),
    [
        ("s8", np.empty((24, 24))),
        ("s4", np.empty((300, 300), np.float32)),
        ("s4", np.empty((300, 300)).T),
        ("s8", "eri"),
    ],
    ids=["shape", "dtype", "order", "type"],
)
def test_wrong_out(backend, water, aosym, out):
    with pytest.raises(ArgumentError, match="out must be a C-contiguous float64 NumPy array of shape"):
        md4.int2e(water, aosym, out=out, backend=backend)


@pytest.mark.parametrize(
    ("aosym", "shls_slice", "message"),
    [
        ("s2", None, "aosym 's2' is unknown; use one of s1, s4, s8"),
        ("s8", (0, 1) * 4, "'s8' has no shls_slice; use 's4' or 's1'"),
        ("s1", (0, 1) * 3, "must hold 8 shell numbers .* not 6"),
        ("s1", (0, 13) * 4, r"non-empty ranges within 0\.\.12 shells"),
        ("s1", (-1, 3) * 4, r"non-empty ranges within 0\.\.12 shells"),
        ("s1", (3, 3) * 4, r"non-empty ranges within 0\.\.12 shells"),
        ("s4", (0, 1, 0, 2, 0, 1, 0, 1), "'s4' needs equal ranges for i and j"),
    ],
)
def test_wrong_arguments(water, aosym, shls_slice, message):
    with pytest.raises(ArgumentError, match=message):
        md4.int2e(water, aosym, shls_slice=shls_slice, backend="cpu")


def test_device_needs_a_gpu(water):
    with pytest.raises(DeviceError, match="device=True keeps the result on a GPU"):
        md4.int2e(water, device=True, backend="cpu")


def test_request_knows_when_bra_and_ket_are_the_same(water):
    basis = Basis.from_mol(water)
    assert Request.checked(basis, "s1", None).swap
    assert Request.checked(basis, "s1", (0, 3, 2, 5, 2, 5, 0, 3)).swap
    assert not Request.checked(basis, "s1", (0, 3, 2, 5, 2, 5, 2, 5)).swap


@pytest.mark.parametrize("aosym", ["s1", "s8"])
def test_too_little_memory(backend, water, aosym):
    with pytest.raises(MemoryLimitError, match=r"the AO tensor of shape \(.*\) takes .* raise max_memory"):
        md4.int2e(water, aosym, max_memory=0.01, backend=backend)


def test_tensor_beyond_all_memory(backend):
    """Refused by a message, before anything is allocated."""
    basis = Basis.from_arrays([6] * 200, [[1.0]] * 200, [[1.0]] * 200, np.arange(600.0).reshape(200, 3))
    with pytest.raises(MemoryLimitError, match=r"higher aosym, take parts by shls_slice, or write to a file by out"):
        md4.contract.tensor.ao_tensor(Engine(basis, backend=backend), "s1")


def test_too_little_memory_for_the_workspace(water):
    """A file would not help who has an array of the tensor's size."""
    out = np.empty((water.nao,) * 4)
    with pytest.raises(MemoryLimitError, match=r"least workspace .* may be used; raise max_memory[.]$"):
        md4.int2e(water, out=out, max_memory=1e-4, backend="cpu")


def test_little_memory_is_enough(backend, water):
    """A cap somewhat above the tensor: work is cut, the result is the same."""
    theirs = water.intor("int2e", aosym="s8")
    ours = md4.int2e(water, "s8", max_memory=4, backend=backend)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-13)
