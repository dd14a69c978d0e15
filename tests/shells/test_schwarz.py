"""Bounds of shell pairs from diagonal integrals."""

import numpy as np
import pytest
from pair_lists import s_and_p

from md4.contract.gradient import norms_of
from md4.shells.schwarz import GradientBounds, block_norms, exchange_norms, row_norms


def test_row_norms():
    """The largest root of a sum over a row or a column; what is negative by rounding counts as zero."""
    diagonal = np.random.default_rng(0).uniform(0, 1, (4, 3, 5))
    diagonal[0, 1, 2] = -1e-3
    found = row_norms(diagonal)
    for norm, block in zip(found, np.maximum(diagonal, 0)):
        assert norm == pytest.approx(np.sqrt(max(*block.sum(axis=0), *block.sum(axis=1))))
        assert norm <= np.sqrt(block.sum()) <= np.sqrt(3) * norm


def test_gradient_bounds():
    """f_ab is 1 for the pair of a shell with itself and else 2; a derivative counts twice on one centre."""
    shells = np.array([[0, 0], [0, 1], [2, 0], [1, 2]])
    centres = np.array([[0.0, 0.0, 1.0], [0.0, 0.0, 1.0], [0.0, 2.0, 1.0]])
    made = GradientBounds(shells, centres, np.array([1.0, 2.0, 3.0, 4.0]), np.array([10.0, 20.0, 30.0, 40.0]))
    np.testing.assert_allclose(made.own, [1.0, 4.0, 6.0, 8.0])
    np.testing.assert_allclose(made.derivative, [20.0, 80.0, 60.0, 80.0])


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_norms_of_blocks(rows, monkeypatch):
    """By threads, too; and the largest of each shell with the shells of some pairs, whose second index they are."""
    monkeypatch.setattr("md4.cpu.screening.NORM_ROWS", rows)
    monkeypatch.setattr("md4.cpu.threads.THREAD_ELEMENTS", 1)
    monkeypatch.setattr("md4.cpu.threads.number_of_threads", lambda: 3)
    basis = s_and_p(2, 3, [1])
    dm = np.random.default_rng(0).normal(size=(2, basis.nao, basis.nao))
    found = block_norms(basis, dm)
    ends = list(zip(basis.ao_loc[:-1], basis.ao_loc[1:]))
    want = [[[np.linalg.norm(d[a:b, c:e]) for c, e in ends] for a, b in ends] for d in dm]
    np.testing.assert_allclose(found, want, rtol=1e-13)
    np.testing.assert_allclose(norms_of(basis, dm), want, rtol=1e-13)
    np.testing.assert_array_equal(exchange_norms(found[0], np.array([[3, 1], [1, 1]])), found[0][:, [1, 3]].max(axis=1))
