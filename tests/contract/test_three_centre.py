"""Tensors over three and two centres in PySCF's order, and the matrix that density fitting uses."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from molecules import HYDROGEN_FLUORIDE, host, joined, molecule, relative_error
from pyscf import df

import md4
from md4.contract.three_centre import ThreeCentre
from md4.engine import make_backend
from md4.errors import ArgumentError, MemoryLimitError, UnsupportedError
from md4.method.operators import Operator
from md4.shells.basis import Basis
from md4.shells.shell import Shell

TOLERANCE = 1e-12  # of the largest element


# tensors --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hf():
    """General contractions, some of whose functions have one primitive only."""
    return molecule(HYDROGEN_FLUORIDE, joined("cc-pvdz", "HF"))


@pytest.fixture(scope="module")
def auxmol(hf):
    return df.make_auxmol(hf, "cc-pvdz-jkfit")


@pytest.fixture(scope="module")
def full(hf, auxmol):
    return df.incore.aux_e2(hf, auxmol)


def test_s1_is_symmetric_to_the_last_bit(backend, hf, auxmol, full):
    ours = md4.int3c2e(hf, auxmol, backend=backend)
    assert relative_error(ours, full) < TOLERANCE
    np.testing.assert_array_equal(ours, ours.transpose(1, 0, 2))
    rows, cols = np.tril_indices(hf.nao)
    np.testing.assert_array_equal(md4.int3c2e(hf, auxmol, "s2ij", backend=backend), ours[rows, cols])
    metric = md4.int2c2e(auxmol, backend=backend)
    assert relative_error(metric, auxmol.intor("int2c2e")) < TOLERANCE
    np.testing.assert_array_equal(metric, metric.T)


def ranges(count):
    """First and last + 1 of `count` things."""
    return st.lists(st.integers(0, count), min_size=2, max_size=2, unique=True).map(sorted)


@given(data=st.data())
def test_any_slice(hf, auxmol, full, data):
    count, aux = hf.nbas, auxmol.nbas
    i, k = data.draw(ranges(count)), data.draw(ranges(aux))
    same = data.draw(st.booleans())
    j = i if same else data.draw(ranges(count))
    (i0, i1), (j0, j1), (k0, k1) = hf.ao_loc[i], hf.ao_loc[j], auxmol.ao_loc[k]
    theirs = full[i0:i1, j0:j1, k0:k1]
    ours = md4.int3c2e(hf, auxmol, shls_slice=(*i, *j, *k), backend="cpu")
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)
    if same:
        packed = md4.int3c2e(hf, auxmol, "s2ij", shls_slice=(*i, *i, *k), backend="cpu")
        np.testing.assert_allclose(packed, theirs[np.tril_indices(i1 - i0)], rtol=0, atol=1e-12)


@given(data=st.data())
def test_any_slice_of_the_metric(auxmol, data):
    i, k = (data.draw(ranges(auxmol.nbas)) for _ in range(2))
    (i0, i1), (k0, k1) = (auxmol.ao_loc[ends] for ends in (i, k))
    ours = md4.int2c2e(auxmol, shls_slice=(*i, *k), backend="cpu")
    np.testing.assert_allclose(ours, auxmol.intor("int2c2e")[i0:i1, k0:k1], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("aosym", "smaller"), [("s1", "use aosym='s2ij', "), ("s2ij", "")])
def test_what_helps_where_a_tensor_does_not_fit(hf, auxmol, aosym, smaller, tmp_path):
    """The message names what these calls accept: a file by NumPy, and the one symmetry that there is."""
    advice = rf"raise max_memory, {smaller}take parts by shls_slice, or write to a file by out \(numpy.memmap\)[.]$"
    with pytest.raises(MemoryLimitError, match=advice):
        md4.int3c2e(hf, auxmol, aosym, max_memory=0.2, backend="cpu")
    if aosym == "s1":
        with pytest.raises(MemoryLimitError, match=advice.replace(smaller, "")):
            md4.int2c2e(auxmol, max_memory=0.05, backend="cpu")
    shape = md4.int3c2e(hf, auxmol, aosym, backend="cpu").shape
    file = np.lib.format.open_memmap(tmp_path / "tensor.npy", "w+", float, shape)
    assert md4.int3c2e(hf, auxmol, aosym, out=file, max_memory=1, backend="cpu") is file


def test_small_blocks(backend, hf, auxmol, full, monkeypatch):
    """Pieces of few pairs, H matrices dropped and made again: the same tensor."""
    monkeypatch.setattr(type(make_backend(backend, Operator())), "block_bytes", lambda _: 4000)
    monkeypatch.setattr("md4.contract.tensor.HERMITE_SHARE", 1e-12)
    np.testing.assert_allclose(md4.int3c2e(hf, auxmol, backend=backend), full, rtol=0, atol=1e-12)


# ThreeCentre ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parts(hf, auxmol):
    return Basis.from_mol(hf), Basis.from_mol(auxmol)


def test_matrix(backend, parts, full):
    three = ThreeCentre(*parts, backend=backend)
    assert (three.naux, three.edges[0], three.edges[-1]) == (full.shape[2], 0, three.ncol)
    theirs = full[three.rows, three.cols][:, three.auxiliary_order].T
    assert relative_error(host(three.integrals(0, three.ncol)), theirs) < TOLERANCE
    first, last = three.edges[[3, -5]]
    piece = host(three.integrals(first, last))
    assert relative_error(piece, theirs[:, first:last]) < TOLERANCE


def test_each_pair_is_there_as_the_weights_say(parts, full):
    three = ThreeCentre(*parts, backend="cpu")
    counts = np.zeros((three.nao, three.nao))
    np.add.at(counts, (three.rows, three.cols), three.weights)
    np.testing.assert_array_equal(counts + counts.T, 2)
    np.testing.assert_array_equal(np.sort(three.auxiliary_order), np.arange(three.naux))
    dm = np.random.default_rng(1).normal(size=(three.nao, three.nao))
    dm += dm.T
    found = three.integrals(0, three.ncol) @ (three.weights * dm[three.rows, three.cols])
    np.testing.assert_allclose(found, np.einsum("ijk,ij->k", full, dm)[three.auxiliary_order], rtol=0, atol=1e-11)


def test_matrix_of_metric(backend, parts, auxmol):
    three = ThreeCentre(*parts, backend=backend)
    theirs = auxmol.intor("int2c2e")[np.ix_(three.auxiliary_order, three.auxiliary_order)]
    assert relative_error(np.tril(host(three.metric())), np.tril(theirs)) < TOLERANCE


def test_out_of_the_matrix(parts):
    three = ThreeCentre(*parts, backend="cpu")
    last = int(three.edges[4])
    out = np.full((three.naux, last), np.nan)
    assert three.integrals(0, last, out=out) is out
    np.testing.assert_array_equal(out, three.integrals(0, last))
    inside = next(n for n in range(three.ncol) if n not in set(three.edges.tolist()))
    for first, end in ((inside, three.ncol), (0, inside), (-1, last), (0, three.ncol + 1), (last, 0)):
        with pytest.raises(ArgumentError, match="must be edges of shell pairs"):
            three.integrals(first, end)


def test_cutoff(parts, full):
    """What is left out is below the cutoff, and something is left out."""
    far = [Shell(s.l, s.exponents, s.coefficients, s.centre * 8) for s in parts[0].shells]
    everything = ThreeCentre(Basis(far), parts[1], backend="cpu")
    three = ThreeCentre(Basis(far), parts[1], backend="cpu", cutoff=1e-7)
    assert three.ncol < everything.ncol
    whole = np.zeros((three.naux, three.nao, three.nao))
    whole[:, everything.rows, everything.cols] = everything.integrals(0, everything.ncol)
    whole[:, three.rows, three.cols] -= three.integrals(0, three.ncol)
    assert 0 < abs(whole).max() < 1e-7


def test_operator_of_the_matrix(parts, hf, auxmol):
    three = ThreeCentre(*parts, operator=("erf", 0.4), backend="cpu")
    theirs = md4.int3c2e(hf, auxmol, omega=0.4, backend="cpu")[three.rows, three.cols][:, three.auxiliary_order].T
    assert relative_error(three.integrals(0, three.ncol), theirs) < 1e-14


def test_refusals(parts, hf):
    cart = Basis(parts[1].shells, pure=False)
    with pytest.raises(ArgumentError, match="all spherical or all Cartesian"):
        ThreeCentre(parts[0], cart, backend="cpu")
    with pytest.raises(ArgumentError, match="cutoff needs one of the operators coulomb, erf, erfc, not yukawa"):
        ThreeCentre(*parts, operator=("yukawa", 1.0), backend="cpu", cutoff=1e-9)
    high = Basis.from_arrays([17], [[1.0]], [[1.0]], [[0, 0, 0]])
    with pytest.raises(UnsupportedError, match="beyond the limit of 32"):
        ThreeCentre(parts[0], high, backend="cpu")
    three = ThreeCentre(*parts, backend="cpu", max_memory=0.01)
    with pytest.raises(MemoryLimitError, match="ask for fewer columns or raise max_memory"):
        three.integrals(0, three.ncol)
