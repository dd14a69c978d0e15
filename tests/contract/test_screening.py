"""Lists of shell pairs and their bounds, against plain loops."""

from functools import reduce

import numpy as np
import pytest
from molecules import WATER, molecule

from md4 import Basis, Engine
from md4.contract.screening import pair_bounds, sorted_lists
from md4.shells.schwarz import larger, row_norms
from md4.shells.shell_pairs import pairs_by_kind, shell_kinds


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
