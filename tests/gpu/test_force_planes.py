"""Gradients of molecules in a plane on the emulated GPU: as on the CPU, for densities with the symmetry and without."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from emulator import running
from nuclear_forces import symmetric

import md4
from md4.gpu import force_planes, forces, reverse_ways
from md4.gpu.force_planes import mixed_bound, plane_of
from md4.gpu.tuning import REVERSE
from md4.method.mirror import ao_parities, between_parities
from md4.shells.schwarz import block_norms

# Angular momenta and contracted functions of the shells, and whether they are spherical.
CASES = {
    "(p, s)": ((1, 0), 1, True), "(p, s) of two functions": ((1, 0), 2, True), "(d, s)": ((2, 0), 1, True),
    "(d, p), Cartesian": ((2, 1), 1, False), "(f, s)": ((3, 0), 1, True),
}  # fmt: skip


def basis_in_plane(ls, nctr=1, pure=True, axis=0, copies=1):
    """Shells on centres that have the same coordinate on an axis (0, 1, 2 for z, y, x)."""
    rng, ls = np.random.default_rng(0), ls * copies
    centres = rng.normal(size=(len(ls), 3))
    centres[:, 2 - axis] = 0.3
    exponents, coefficients = np.geomspace(0.5, 2.0, nctr), rng.uniform(0.2, 1.0, (nctr, nctr))
    return md4.Basis.from_arrays(ls, [exponents] * len(ls), [coefficients] * len(ls), centres, pure=pure)


def density(basis, axis, mixed=0.0):
    """A random density, whose elements between even and odd AOs are `mixed` times what they would be."""
    found = symmetric(basis.nao)
    between = between_parities(ao_parities(basis.classes, basis.pure, axis), found)
    return found - between + mixed * between


@pytest.fixture(params=["fused", "rectangles"])
def way(request, monkeypatch):
    """Even and odd functions meet apart, however few quartets there are, on lists of what counts or in rectangles."""
    monkeypatch.setattr(reverse_ways, "lane_plan", lambda *_: None)
    monkeypatch.setattr(reverse_ways, "LEAST_SAVED", -np.inf)
    if request.param == "rectangles":
        monkeypatch.setattr(reverse_ways, "fused_reverse", lambda *_: None)


def both(basis, dm, tolerance=0.0):
    """(forces on the emulated GPU, on the CPU, statistics of the former)."""
    right = md4.JK(basis, backend="cpu").gradient(dm, tolerance=0)
    with running() as machine:
        jk = md4.JK(basis, backend="cuda")
        ours = jk.gradient(dm, tolerance=tolerance)
    assert "pair_forces" in machine.kernels
    return ours, right, jk.stats


@pytest.mark.sample("fused-0.0-(p, s)", "rectangles-1.0-(d, p)*")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mixed", [0.0, 1.0])
def test_shells(name, mixed, way):
    """The axis is another one for each case."""
    axis = list(CASES).index(name) % 3
    basis = basis_in_plane(*CASES[name], axis)
    ours, right, stats = both(basis, density(basis, axis, mixed))
    np.testing.assert_allclose(ours, right, rtol=0, atol=1e-13 * abs(right).max())
    assert (abs(right[:, 2 - axis]).max() > 0.01) == (mixed == 1)
    assert stats.error_bound == 0


@pytest.mark.thorough
def test_some_classes_apart(monkeypatch):
    """Sums of all functions and those of even and of odd ones are of the same bra pairs."""
    basis = basis_in_plane((2, 1, 0), copies=2)
    most = max(len(md4.JK(basis, backend="cpu").lists[n].pairs) for n in range(3))
    monkeypatch.setattr(reverse_ways, "LEAST_SAVED", 8 * most**2 * reverse_ways.WORK)
    kept, of = [], reverse_ways.Way.of.__func__

    def noted(*args):
        kept.append(of(*args))
        return kept[-1]

    monkeypatch.setattr(reverse_ways.Way, "of", classmethod(noted))
    ours, right, _ = both(basis, density(basis, 0))
    np.testing.assert_allclose(ours, right, rtol=0, atol=1e-13 * abs(right).max())
    parities = {tuple(one.parity for one in way.meetings) for way in kept if way.fused}
    assert {(None,), (0, 1)} <= parities
    assert any(way.lanes for way in kept)


@pytest.mark.parametrize("mixed", [0.0, 1.0])
def test_singles(mixed, monkeypatch):
    """Even and odd functions apart in TF32, with r without its odd elements."""
    monkeypatch.setattr(reverse_ways, "lane_plan", lambda *_: None)
    monkeypatch.setattr(reverse_ways, "LEAST_SAVED", -np.inf)
    tuning = replace(REVERSE, single_ratio=1e28, single_share=0.0, single_seconds=0.0)
    monkeypatch.setattr(forces, "REVERSE", tuning)
    basis = basis_in_plane((1, 1))
    ours, right, _ = both(basis, density(basis, 0, mixed), 1e-25)
    assert 2**-18 < abs(ours - right).max() / abs(right).max() < 2**-8


@pytest.mark.parametrize("size, apart", [(1e-15, False), (1e-11, True)])
def test_few_mixed_elements(size, apart, way):
    """They are left out if the bound of what they add is small, and are in the bound of the error then."""
    basis, tolerance = basis_in_plane((1, 0)), 1e-6
    dm = density(basis, 0, size)
    ours, right, stats = both(basis, dm, tolerance)
    error = abs(ours - right)
    assert error.max() < max(stats.error_bound, 1e-15)
    assert ours[:, 2].any() == apart
    if not apart:
        assert 0 < abs(right[:, 2]).max() < stats.error_bound < force_planes.MIXED_PART * tolerance * stats.computed


def given(basis, dm, factors):
    """Arguments of `plane_of` before the tolerance."""
    jk = md4.JK(basis, backend="cpu")
    forces = jk._forces_of_lists(1e-12)
    pairs, d = [this.pairs.pairs for this in forces.lists], np.asarray(dm)
    return basis, pairs, forces.bounds, d, block_norms(basis, d), *map(np.array, factors)


def test_the_bound_of_mixed_elements():
    """It is the sum over all quartets, f = 2 for two orders of two shells, of products that have a mixed element."""
    basis = basis_in_plane((1, 0), copies=2)
    dm = np.stack([density(basis, 0, 0.1), symmetric(basis.nao, seed=1)])
    _, pairs, bounds, d, norms, *factors = given(basis, dm, ([0.7, -0.2], [0.3, 1.1]))
    mixed, total = block_norms(basis, between_parities(ao_parities(basis.classes, basis.pure, 0), d)), 0.0
    for (of_bra, one), (of_ket, other) in product(zip(pairs, bounds), repeat=2):
        for ((a, b), left), ((c, e), right) in product(zip(of_bra, one.derivative), zip(of_ket, other.own)):
            for m, n, j, k in zip(mixed, norms, *map(abs, factors)):
                total += left * right * j * (m[a, b] * n[c, e] + n[a, b] * m[c, e])
                of_k = m[a, c] * n[b, e] + n[a, c] * m[b, e] + m[a, e] * n[b, c] + n[a, e] * m[b, c]
                total += left * right * k / 2 * of_k
    found = mixed_bound(basis, pairs, bounds, mixed, norms, *factors)
    assert abs(found - total) < 1e-13 * total


def test_planes():
    basis = basis_in_plane((1, 0), axis=1)
    factors = [1.0], [0.5]
    plane, left_out = plane_of(*given(basis, density(basis, 1)[None], factors), 1e-12)
    assert plane == (1, False)
    assert not left_out.any()
    plane, left_out = plane_of(*given(basis, density(basis, 1, 1e-17)[None], factors), 1e-12)
    assert plane == (1, False)
    assert 0 < left_out[0] < 1e-15 * 9
    assert left_out[1] == left_out[0] ** 2 / 9
    plane, left_out = plane_of(*given(basis, density(basis, 1, 1e-3)[None], factors), 1e-12)
    assert plane == (1, True)
    assert not left_out.any()
    plane, _ = plane_of(*given(basis, np.full((1, basis.nao, basis.nao), np.nan), factors), 1e-12)
    assert plane == (1, True)
    centres = np.random.default_rng(0).normal(size=(2, 3))
    askew = md4.Basis.from_arrays([1, 0], [[1.0]] * 2, [[1.0]] * 2, centres)
    assert plane_of(*given(askew, np.eye(askew.nao)[None], factors), 1e-12)[0] is None
