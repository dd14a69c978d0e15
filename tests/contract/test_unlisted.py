"""Bounds of shell pairs and primitive pairs that are in no list."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from molecules import molecule
from nuclear_forces import MIXED, SHELLS, WATER, symmetric

import md4
from md4.contract.unlisted import unlisted, unlisted_bound
from md4.shells.basis import Basis
from md4.shells.shell import Shell


@pytest.mark.parametrize("pure", [
    pytest.param(True, id="spherical"), pytest.param(False, id="Cartesian", marks=pytest.mark.thorough),
])  # fmt: skip
def test_bounds_of_primitive_pairs(pure):
    """They are not below norms of tight and diffuse primitives, on one centre and on two, and of their derivatives."""
    rng, shells = np.random.default_rng(0), []
    for l in (0, 1, 3, 7):
        for exponent, place in ((0.02, 0.0), (1.3, 0.0), (300.0, 0.2), (0.9, 2.5)):
            shells.append(Shell(l, [exponent], rng.uniform(-2, 2, (1, 1 + l % 2)), [place, -0.3 * place, 0.1 * place]))
    basis = Basis(shells, pure=pure)
    jk = md4.JK(basis, backend="cpu", direct_scf_tol=0.0)
    size, derived = unlisted(jk.basis, [], 0.0)
    for this in jk._forces_of_lists(0.0).lists:
        places = tuple(this.pairs.pairs.T)
        assert (size[places] >= this.given.exact).all()
        assert (derived[places] >= this.largest).all()


@pytest.mark.parametrize("cutoff", [0.0, 1e-18, 1e-3])
def test_what_is_missing(cutoff, monkeypatch):
    """In slices as at once; bounds are zero where all primitive pairs are in a list."""
    basis = md4.JK(molecule(MIXED, SHELLS), backend="cpu").basis
    engine = md4.Engine(basis, backend="cpu")
    pairs = [np.array([[a, b]]) for a in range(basis.nshell) for b in range(a + 1)]
    lists = list(engine.prepare_lists(pairs[::2], basis, cutoff))
    size, derived = unlisted(basis, lists, cutoff)
    assert (size == size.T).all()
    assert (derived == derived.T).all()
    for this in lists:
        (a, b), count = this.pairs.pairs[0], basis.nprims[this.pairs.pairs[0]].prod()
        assert (size[a, b] > 0) == (derived[a, b] > 0) == (this.pairs.nprim < count)
        assert size[a, b] < 3 * 4 * count * cutoff + 1e-300
    for (pair,) in pairs[1::2]:
        assert size[tuple(pair)] > 0
    monkeypatch.setattr("md4.contract.unlisted.PAIRS", 1)
    np.testing.assert_array_equal(unlisted(basis, lists, cutoff), [size, derived])


@pytest.mark.parametrize("options", [{}, {"exchange": 0.0}, {"coulomb": 0.0}])
def test_errors_by_lists_are_bounded(options):
    """Where lists are too coarse for a density, with no quartet of them left out."""
    mol = molecule(WATER, "6-31g")
    dm, found = 1e6 * symmetric(mol.nao), []
    exact = md4.JK(mol, backend="cpu").gradient(dm, tolerance=0, **options)
    for tolerance in (1e-2, 1.0, 1e2):
        jk = md4.JK(mol, backend="cpu", direct_scf_tol=tolerance)
        error = abs(jk.gradient(dm, **options) - exact).max()
        assert jk.stats.skipped == 0
        assert 1e-13 * abs(exact).max() < error < jk.stats.error_bound
        found.append(jk.stats.error_bound)
    assert all(one < two for one, two in pairwise(found))


@pytest.mark.parametrize("coulomb, exchange", [(0.7, 0.0), (-0.7, 0.3), (0.0, -0.3)])
def test_bound_by_loops(coulomb, exchange):
    """A quartet lacks what is missing of either pair: its derivative with all of the other, or it beside a derivative.

    Derivatives of what is missing are by the centre of either shell.
    """
    rng, n = np.random.default_rng(0), 3
    missing, d = rng.uniform(size=(2, n, n)), rng.uniform(size=(n, n))
    d, (pairs, derivatives) = d + d.T, missing
    own, derived, want = np.zeros((n, n)), np.zeros((n, n)), 0.0
    own[2, 0], own[2, 2], derived[2, 0], derived[2, 2] = rng.uniform(size=4)
    for a, b, c, e in np.ndindex(n, n, n, n):
        quartet = 2 * derivatives[a, b] * (own[c, e] + pairs[c, e]) + derived[a, b] * pairs[c, e]
        want += quartet * (abs(coulomb) * d[a, b] * d[c, e] + abs(exchange) * d[a, c] * d[b, e])
    given = SimpleNamespace(pairs=SimpleNamespace(pairs=np.array([[2, 0], [2, 2]])))
    bounds = SimpleNamespace(own=own[2, [0, 2]], derivative=derived[2, [0, 2]])
    found = unlisted_bound([given], [bounds], missing, d[None], np.array([coulomb]), np.array([exchange]))
    assert found == pytest.approx(want, rel=1e-12)
