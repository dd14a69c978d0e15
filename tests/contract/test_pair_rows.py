"""Rows of pairs of AOs: the pieces together are the AO tensor."""

import numpy as np
import pytest
from molecules import HYDROGEN_FLUORIDE, host, joined, molecule

import md4
from md4.contract.pair_rows import PairRows
from md4.errors import MemoryLimitError, UnsupportedError
from md4.shells.basis import Basis
from md4.shells.shell import Shell


def rows_of(mol, backend="cpu", **options):
    return PairRows(md4.Engine(Basis.from_mol(mol), backend=backend, **options))


@pytest.mark.parametrize("cart", [False, True])
def test_pieces_are_the_tensor(backend, cart):
    """Of general contractions; each integral once, but for pieces with themselves."""
    mol = molecule(HYDROGEN_FLUORIDE, joined("cc-pvdz", "HF"), cart=cart)
    rows = rows_of(mol, backend)
    full, pieces = np.full((rows.nrow, rows.nrow), np.nan), rows.pieces(1)
    assert len(pieces) > 10
    for first, last in pieces:
        out = rows.engine.backend.result((last - first, last + 3))
        rows.integrals(first, last, out, last)
        full[first:last, :last] = host(out)[:, :last]
    aos, others = rows.order[rows.first], rows.order[rows.second]
    want = mol.intor("int2e")[aos[:, None], others[:, None], aos, others]
    made = np.isfinite(full)
    assert made[np.tril_indices(rows.nrow)].all()
    np.testing.assert_allclose(full[made], want[made], rtol=0, atol=1e-12)
    assert made.sum() < 0.6 * made.size


def test_each_pair_has_a_column():
    rows = rows_of(molecule(HYDROGEN_FLUORIDE, "cc-pvdz"))
    places = rows.places()
    assert sorted({*places.ravel().tolist()}) == list(range(rows.nrow))
    np.testing.assert_array_equal(places[rows.first, rows.second], np.arange(rows.nrow))
    np.testing.assert_array_equal(places[rows.second, rows.first][rows.twice], np.flatnonzero(rows.twice))
    assert rows.twice.sum() + rows.nrow == rows.nao**2
    for (first, last), reach in zip(rows.pieces(20), rows.reaches[[last - 1 for _, last in rows.pieces(20)]]):
        assert max(rows.first[:last].max(), rows.second[first:last].max()) < reach


def test_distant_pairs_are_left_out():
    """Of two atoms 12 Angstrom apart, only diffuse functions overlap; places of the others say that there is none."""
    rows = rows_of(molecule("He 0 0 0; He 0 0 12", "cc-pvdz"))
    assert len(rows.edges) - 1 < 21
    assert (rows.places() == rows.nrow).any()
    geminal = PairRows(rows.engine.with_operator(("gaussian", 1.0)))
    assert len(geminal.edges) - 1 == 21


def test_refused():
    mol = molecule(HYDROGEN_FLUORIDE, "cc-pvdz")
    with pytest.raises(MemoryLimitError, match=r"one block .* takes .* but 1 kB may be used"):
        rows_of(mol, max_memory=0.001)
    high = Basis([Shell(9, [1.0], [[1.0]], [0, 0, 0])])
    with pytest.raises(UnsupportedError):
        PairRows(md4.Engine(high, backend="cpu"))
