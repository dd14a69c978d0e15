"""Survivors, tiles and bounds, against plain loops."""

from functools import reduce
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from molecules import WATER, molecule

from md4 import Basis, Engine
from md4.contract.screening import DensityNorms, pair_bounds, sorted_lists, tiles
from md4.shells.schwarz import larger, row_norms
from md4.shells.shell_pairs import pairs_by_kind, shell_kinds

lengths = st.lists(st.integers(0, 3000), min_size=1, max_size=400)


@given(n=lengths, most=st.integers(1, 10**6), least=st.sampled_from([0, 20000, 10**7]))
def test_tiles_cover_survivors_once(n, most, least):
    n = np.array(n)
    covered = np.zeros((len(n), max(1, n.max())), dtype=int)
    for bra, ket in tiles(n, most, least):
        covered[bra, ket] += 1
        assert (bra.stop - bra.start) * (ket.stop - ket.start) <= most
    assert covered.max() <= 1
    assert all(row[:k].all() for row, k in zip(covered, n))


def test_tiles_waste_little_unless_they_are_short():
    n = np.arange(1, 2001)  # a triangle
    area = sum((b.stop - b.start) * (k.stop - k.start) for b, k in tiles(n, 10**9, 20000))
    assert area < 1.15 * n.sum()
    assert tiles(n, 10**9, 10**7) == [(slice(0, 2000), slice(0, 2000))]


@pytest.mark.parametrize("mixed", [0, 40])
def test_pairs_by_kind_are_all_pairs_once(mixed):
    """Of one class, and of one number of primitives where many shells differ in theirs."""
    basis = Basis.from_mol(molecule(WATER, "cc-pvtz"))
    kind, lists = shell_kinds(basis, mixed), pairs_by_kind(basis, mixed)
    pairs = np.concatenate(lists)
    assert len(np.unique(np.sort(pairs, axis=1), axis=0)) == len(pairs) == basis.nshell * (basis.nshell + 1) // 2
    for one in lists:
        assert len(np.unique(kind[one], axis=0)) == 1
        assert np.all(basis.classes[one] == basis.classes[one[0]])
        assert mixed or np.all(basis.nprims[one] == basis.nprims[one[0]])


def test_bounds_are_those_of_the_integrals():
    mol = molecule(WATER, "cc-pvdz")
    engine = Engine(Basis.from_mol(mol), backend="cpu")
    every = pairs_by_kind(engine.bra_basis, engine.backend.sums.mixed_shells)
    for this in sorted_lists(engine, every, pair_bounds(engine, every, 1e-13), 1e-13, 1 << 30):
        assert np.all(np.diff(this.bound) <= 0)
        for pair, bound in zip(this.pairs.pairs, this.bound):
            block = engine.compute([pair], [pair])[0, 0]
            diagonal = np.einsum("abab->ab", block)
            assert abs(bound - row_norms(diagonal[None])[0]) < 1e-12


@pytest.mark.parametrize("shape", [(3, 1), (2, 5), (1, 1)])
def test_row_norms(shape):
    """Written out; rounding errors below zero count as zero, what is no number stays."""
    diagonal = np.random.default_rng(0).uniform(-0.1, 1, (4, *shape))
    diagonal[3, 0, 0] = np.nan
    for block, bound in zip(diagonal[:3], row_norms(diagonal)):
        positive = [[max(v, 0.0) for v in row] for row in block.tolist()]
        sums = [sum(row) for row in positive] + [sum(column) for column in zip(*positive)]
        assert bound == pytest.approx(reduce(larger, sums) ** 0.5)
    assert np.isnan(row_norms(diagonal)[3])


@pytest.mark.parametrize("x, y", [(1.0, 2.0), (2.0, 2.0), (np.nan, 1.0), (1.0, np.nan), (np.inf, np.nan)])
def test_larger(x, y):
    np.testing.assert_equal(larger(x, y), np.maximum(x, y))


def test_density_norms():
    mol = molecule(WATER, "cc-pvdz")
    basis = Basis.from_mol(mol)
    dm = np.random.default_rng(0).normal(size=(2, mol.nao, mol.nao))
    norms, kind, loc = DensityNorms(basis, dm, True, True, 40), shell_kinds(basis, 40), basis.ao_loc
    ranges = [slice(*r) for r in pairwise(loc)]
    block = np.array([[max(np.linalg.norm(d[a, b]) for d in dm) for b in ranges] for a in ranges])
    block = np.maximum(block, block.T)
    for k in range(kind.max() + 1):
        assert np.allclose(norms.exchange[k], block[:, kind == k].max(axis=1))
    assert np.allclose(norms.coulomb[3, 0], 2 * np.sqrt(min(np.diff(loc)[[3, 0]])) * block[3, 0])
