"""Digestion by the threads that make the integrals, of chosen quartets, on the emulator, beside NumPy."""

from types import SimpleNamespace

import numpy as np
import pytest
from emulator import running
from random_blocks import right

import md4
from md4.gpu import paths
from md4.plan import QuartetRows, QuartetRule

# Runs of successive ket pairs with the same shell c: more and fewer than add up their parts of X first.
RUNS = (11, 1, 3, 1, 8, 9)


def basis_of(l, nctr):
    """A p and an s shell for the bra, a shell c of l and `nctr` functions for each run, and s shells d."""
    kinds = [(1, 1), (0, 1), *[(l, nctr)] * len(RUNS), *[(0, 1)] * max(RUNS)]
    rng, exponents = np.random.default_rng(0), [[0.3 + 0.1 * n] for n in range(len(kinds))]
    coefficients = [rng.uniform(0.2, 1.0, (1, count)) for _, count in kinds]
    return md4.Basis.from_arrays([k for k, _ in kinds], exponents, coefficients, rng.normal(size=(len(kinds), 3)))


def rule_of(pairs, nshell):
    """By which all quartets survive, in double precision."""
    ones = np.ones(len(pairs))
    return QuartetRule(0.0, np.array(pairs), ones, ones, ones, np.ones((nshell, nshell)), np.zeros(1, np.int32))


@pytest.mark.races
@pytest.mark.parametrize("l, nctr, counts", [(1, 1, (2, 1)), (1, 1, (0, 1)), (1, 11, (1, 1))], ids=str)
def test_runs_of_lanes(l, nctr, counts, monkeypatch):
    """A contracted shell may have more functions c than a lane has bits."""
    monkeypatch.setattr(paths, "FEWEST_QUARTETS", 1)
    basis, first_d = basis_of(l, nctr), 2 + len(RUNS)
    bra_pairs = [[0, 1]] * 2
    ket_pairs = [[2 + n, first_d + k] for n, length in enumerate(RUNS) for k in range(length)]
    rng = np.random.default_rng(1)
    d, half = (rng.normal(size=(count, basis.nao, basis.nao)) for count in counts)
    twice = half + half.swapaxes(1, 2)
    with running() as machine:
        engine = md4.Engine(basis, backend="cuda")
        bra, ket = engine.prepare(bra_pairs), engine.prepare(ket_pairs)
        survivors = SimpleNamespace(rule=rule_of(bra_pairs + ket_pairs, basis.nshell))
        target = engine.backend.sums.digest(engine, [bra, ket], survivors, d, twice)
        counts = np.full(len(bra_pairs), len(ket_pairs), np.int32)
        everywhere = 0, basis.nshell, 0, basis.nshell
        assert target.take_rows(QuartetRows(bra, ket, False, 0, counts, (0, len(bra_pairs)), everywhere))
        assert target.end([bra, ket]) == (counts.sum(), counts.sum())
        x, y = target.result()
    assert "digest_in_place" in machine.kernels
    integrals = md4.Engine(basis, backend="cpu").compute(bra_pairs, ket_pairs)
    known_x, known_y = right(integrals, [basis.ao_loc[np.array(p)] for p in (bra_pairs, ket_pairs)], d, twice, False)
    np.testing.assert_allclose(x, known_x, rtol=0, atol=1e-13 * abs(known_x).max(initial=0.0))
    # Y of a pair may stand in either triangle
    y, known_y = (m + m.swapaxes(1, 2) for m in (y, known_y))
    np.testing.assert_allclose(y, known_y, rtol=0, atol=1e-13 * abs(known_y).max())
