"""Rows of W of any division are those of the whole metric, also where auxiliary functions are nearly dependent."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from md4.contract.metric import Metric
from md4.contract.metric_rows import LARGEST, Substitution, Weights, inverse
from md4.cpu.algebra import HostAlgebra
from md4.engine import make_backend
from md4.method.operators import as_operator

BACKEND = make_backend("cpu", as_operator("coulomb"))


@pytest.fixture
def algebra():
    return HostAlgebra(BACKEND)


def metric(n, smallest, seed=0):
    """A positive matrix whose smallest eigenvalue is about this; negative: one that is not positive."""
    rng = np.random.default_rng(seed)
    q = np.linalg.qr(rng.normal(size=(n, n)))[0]
    found = (q * np.geomspace(abs(smallest), 10, n)) @ q.T
    if smallest < 0:
        found -= 2 * abs(smallest) * np.outer(q[:, 0], q[:, 0])
    return (found + found.T) / 2


def whole(matrix, algebra, array):
    """W times an array, by a `Metric`."""
    return Metric(matrix.copy(), algebra).apply(array.copy())


CASES = {"usual": 1e-3, "nearly dependent": 1e-12, "dependent": -1e-9}


@pytest.mark.parametrize("smallest", CASES.values(), ids=CASES)
@given(n=st.integers(1, 40), count=st.integers(1, 7), seed=st.integers(0, 1000))
def test_all_rows_of_all_workers(smallest, n, count, seed):
    """They are the rows of the whole product, each of one worker."""
    algebra, matrix = HostAlgebra(BACKEND), metric(n, smallest, seed)
    if smallest < 0 and n == 1:
        return
    array = np.random.default_rng(seed).normal(size=(n, 9))
    wanted, given_ = whole(matrix, algebra, array), inverse(matrix.copy(), algebra)
    assert given_.size == len(wanted)
    found, owners = np.full_like(wanted, np.nan), np.zeros(len(wanted), dtype=int)
    for number in range(count):
        rows = given_.rows(slice(number, None, count), algebra)
        found[number::count] = rows.apply(array.copy())
        owners[number::count] += 1
        assert rows.size == len(wanted[number::count])
    assert (owners == 1).all()
    scale = abs(np.linalg.inv(np.linalg.cholesky(matrix))).max() if smallest > 0 else 1 / np.sqrt(1e-7)
    assert abs(found - wanted).max() <= 1e-12 * scale
    some = given_.rows(slice(n // 3, len(wanted)), algebra)
    assert abs(some.apply(array.copy()) - wanted[n // 3 :]).max(initial=0) <= 1e-12 * scale


@pytest.mark.parametrize("smallest, how, kind", [
    (1e-3, "Cholesky", Weights), (1e-10, "Cholesky", Substitution), (-1e-9, "eigenvectors", Weights),
])  # fmt: skip
def test_the_way(algebra, smallest, how, kind):
    """A matrix where its elements are small, else substitution; W^T W = (P|Q)^-1 with either."""
    matrix = metric(30, smallest)
    found = inverse(matrix.copy(), algebra)
    rows = found.rows(slice(None), algebra)
    assert (type(rows), rows.how, rows.naux) == (kind, how, 30)
    assert kind is Substitution or abs(found.matrix).max() <= LARGEST
    array = np.random.default_rng(0).normal(size=(30, 4))
    reference = Metric(matrix.copy(), algebra)
    wanted = reference.apply_transposed(reference.apply(array.copy()).copy())
    made = rows.apply_transposed(rows.apply(array.copy()).copy())
    assert abs(made - wanted).max() <= 1e-5 * abs(wanted).max()


@pytest.mark.parametrize("smallest", CASES.values(), ids=CASES)
def test_columns_in_steps(algebra, smallest, monkeypatch):
    """Where there is memory for a few columns only."""
    matrix, array = metric(20, smallest), np.random.default_rng(0).normal(size=(20, 50))
    wanted, found = whole(matrix, algebra, array), inverse(matrix.copy(), algebra)
    monkeypatch.setattr(HostAlgebra, "block_bytes", 8 * 30 * 7)
    rows = found.rows(slice(1, None, 3), algebra)
    assert len(rows.steps(50)) > 5
    assert abs(rows.apply(array.copy()) - wanted[1::3]).max() <= 1e-6 * abs(wanted).max()
