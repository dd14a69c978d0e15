"""Fitted integrals over orbitals against md4's own rows over AOs, which NumPy transforms: stores, ranges, memory."""

import numpy as np
import pytest
from fitted_orbitals import AUXILIARY, assert_close, bases, fitting, orbitals, watched
from molecules import WATER, molecule
from pyscf import lib

import md4
from md4.contract.fitting_orbitals import Pieces, integrals
from md4.contract.fitting_team import density_fitting

STORES = ["device", "host", "direct"]
# Two functions are there twice, so that eigenvectors are taken.
TWICE = {symbol: [[l, [a, 1]] for l in (0, 1, 2) for a in (0.4, 1.5, 1.5)] for symbol in "OH"}
# Up to i functions in both basis sets.
HIGH = {symbol: [[l, [0.6 + 0.3 * l, 1]] for l in (0, 2, 4, 6)] for symbol in "OH"}


def by_numpy(fit, left, right):
    """Rows (size, n_i, n_a)."""
    return np.einsum("qmn,mi,na->qia", lib.unpack_tril(fit.rows(0, fit.size)), left, right, optimize=True)


# rows -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("auxbasis", [AUXILIARY, TWICE], ids=["Cholesky", "eigenvectors"])
@pytest.mark.parametrize("store", STORES)
def test_rows(backend, water, store, auxbasis):
    """With fewer orbitals on either side, one, and none; more than there are AOs."""
    fit = fitting(water, auxbasis, backend=backend, store=store)
    assert (fit.size < fit.three.naux) == (auxbasis is TWICE)
    for counts in ((2, 7), (7, 2), (1, 1), (0, 3), (3, 0), (20, 15)):
        left, right = orbitals(water, *counts)
        assert_close(fit.mo_rows(left, right), by_numpy(fit, left, right))


@pytest.mark.parametrize("store", ["device", "direct"])
def test_high_angular_momentum(backend, store):
    mol = molecule(WATER, HIGH)
    fit = fitting(mol, HIGH, backend=backend, store=store)
    left, right = orbitals(mol, 3, 8)
    assert_close(fit.mo_rows(left, right), by_numpy(fit, left, right))


def test_pairs_that_are_left_out():
    """Two atoms far apart."""
    mol = molecule("He 0 0 0; He 0 0 30", "cc-pvdz")
    for store in ("device", "direct"):
        fit = fitting(mol, store=store)
        assert fit.three.ncol < fitting(mol, cutoff=0).three.ncol
        left, right = orbitals(mol, 2, 3)
        assert_close(fit.mo_rows(left, right), by_numpy(fit, left, right))


@pytest.mark.parametrize("store", STORES)
def test_several_workers(water, store, monkeypatch):
    """Each has some of the rows; more workers than rows of a block."""
    monkeypatch.setattr("md4.contract.team.chosen", lambda *_: [None] * 3)
    team = density_fitting(*bases(water, AUXILIARY), backend="cpu", store=store)
    alone, (left, right) = fitting(water), orbitals(water, 2, 5)
    assert team.count == 3
    assert_close(team.mo_rows(left, right), alone.mo_rows(left, right), 1e-11)
    assert_close(integrals(team, (left, right)), integrals(alone, (left, right)), 1e-11)


# integrals ------------------------------------------------------------------------------------------------------------


def wanted(fit, bra, ket, compact):
    """By NumPy."""
    sides = []
    for pair, triangle in zip((bra, ket), compact):
        rows = by_numpy(fit, *pair)
        kept = np.tril(np.ones(rows.shape[1:])).astype(bool) if triangle else np.ones(rows.shape[1:], dtype=bool)
        sides.append(rows[:, kept])
    return sides[0].T @ sides[1]


@pytest.mark.parametrize("cap", [None, 0.65], ids=["whole", "ranges"])
@pytest.mark.parametrize("compact", [(False, False), (True, False), (False, True), (True, True)], ids=str)
def test_integrals(water, cap, compact):
    """Of the same orbitals in both pairs, and of others; with little memory in ranges of orbitals."""
    fit = fitting(water, store="direct", max_memory=cap)
    a, b, c = orbitals(water, 30, 29, 28)
    assert Pieces(fit, [(a, b)], beside=100_000).whole == (cap is None)
    first, second = (a, a if compact[0] else b), (b, b if compact[1] else c)
    assert_close(integrals(fit, first, second, compact), wanted(fit, first, second, compact))
    both = compact[0], compact[0]
    assert_close(integrals(fit, first, None, compact[:1]), wanted(fit, first, first, both))
    assert integrals(fit, (a[:, :0], b), second, (False, compact[1])).shape[0] == 0


@pytest.mark.parametrize("store", ["device", "direct"])
def test_peak_stays_below_the_cap(water, store):
    for cap in (0.8, 1.2):
        fit = fitting(water, store=store, max_memory=cap)
        most = watched(fit)
        a, b = orbitals(water, 28, 30)
        assert_close(integrals(fit, (a, b)), integrals(fitting(water), (a, b)), 1e-11)
        assert 0 < most[0] <= cap * 1e6


def test_refusals(water, monkeypatch):
    a, b = orbitals(water, 12, 13)
    with pytest.raises(md4.MemoryLimitError, match=r"two orbitals with 3000 others .* take [\d.]+ MB, but 4 MB"):
        integrals(fitting(water, max_memory=4), (a, np.zeros((13, 3000))))
    fit = fitting(water)
    monkeypatch.setattr("md4.support.memory.host_memory", lambda: 1000)
    with pytest.raises(md4.MemoryLimitError, match="156 x 156 integrals over orbitals take 195 kB, but the host has 1"):
        integrals(fit, (a, b))
    with pytest.raises(md4.MemoryLimitError, match="rows of fitted integrals over orbitals take"):
        fit.mo_rows(a, b)


def test_one_orbital_at_a_time(water, monkeypatch):
    """Of what is made from integrals there is not always room for all orbitals; for none it is refused."""
    fit, (a, b) = fitting(water, store="direct"), orbitals(water, 3, 5)
    expected = fit.mo_rows(a, b)
    size = 8 * fit.three.naux * (water.nao + 2 * 5)
    monkeypatch.setattr("md4.cpu.backend.UNASKED", 0)
    monkeypatch.setattr(type(fit.algebra.backend), "memory_left", lambda _: fit.columns.least_bytes + 3 * size)
    assert_close(fit.mo_rows(a, b), expected)
    monkeypatch.setattr(type(fit.algebra.backend), "memory_left", lambda _: fit.columns.least_bytes + size)
    with pytest.raises(md4.MemoryLimitError, match="over one orbital need at least"):
        fit.mo_rows(a, b)
