"""Index maps, and the solid harmonics against PySCF's and against their definition."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from molecules import component_rotation, monomials
from pyscf import gto

from md4.method.angular import (
    cartesian_triples,
    component_coefficients,
    hermite_ordinal,
    hermite_triples,
    ncart,
    nherm,
    npure,
    packed_hermite,
    solid_harmonics,
    sum_ordinal,
)

triples = st.tuples(*[st.integers(0, 5)] * 3)


@pytest.mark.parametrize("l", range(10))
def test_ordinals_count_the_triples(l):
    t = hermite_triples(l)
    assert t.shape == (nherm(l), 3)
    assert [hermite_ordinal(*x) for x in t.tolist()] == list(range(nherm(l)))
    assert cartesian_triples(l).shape == (ncart(l), 3)
    assert set(cartesian_triples(l).sum(axis=1)) == {l}


@given(p=triples, q=triples)
def test_ordinal_of_a_sum(p, q):
    words = packed_hermite(15)
    packed = [int(words[hermite_ordinal(*t)]) for t in (p, q)]
    assert sum_ordinal(*packed) == hermite_ordinal(*(a + b for a, b in zip(p, q)))


@pytest.mark.parametrize("l", range(7))
def test_solid_harmonics_are_pyscfs(l):
    """PySCF leaves the norms of s and p to the radial functions."""
    factor = {0: np.sqrt(4 * np.pi), 1: np.sqrt(4 * np.pi / 3)}.get(l, 1.0)
    np.testing.assert_allclose(solid_harmonics(l) * factor, gto.cart2sph(l, normalized="sp"), rtol=0, atol=2e-14 * 4**l)


@pytest.mark.parametrize("l", range(9))
def test_solid_harmonics_are_orthonormal_on_the_sphere(l):
    """By Gauss-Legendre in cos(theta) and equal steps in phi, exact for these degrees."""
    z, w = np.polynomial.legendre.leggauss(l + 1)
    phi = np.arange(2 * l + 2) * np.pi / (l + 1)
    s = np.sqrt(1 - z**2)[:, None]
    points = np.stack([s * np.cos(phi), s * np.sin(phi), np.broadcast_to(z[:, None], (l + 1, 2 * l + 2))], axis=-1)
    values = monomials(l, points.reshape(-1, 3)) @ solid_harmonics(l)
    weights = np.repeat(w, 2 * l + 2) * np.pi / (l + 1)
    np.testing.assert_allclose(values.T * weights @ values, np.eye(npure(l)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("l", range(8))
def test_rotations_of_solid_harmonics_are_orthogonal(l):
    q, _ = np.linalg.qr(np.random.default_rng(l).normal(size=(3, 3)))
    d = component_rotation(l, True, q)
    np.testing.assert_allclose(d.T @ d, np.eye(npure(l)), rtol=0, atol=1e-11)


def test_cartesian_components_are_bare_monomials():
    np.testing.assert_array_equal(component_coefficients(3, False), np.eye(10))
    np.testing.assert_array_equal(component_coefficients(1, False), solid_harmonics(1))
    assert cartesian_triples(2).tolist() == [[2, 0, 0], [1, 1, 0], [1, 0, 1], [0, 2, 0], [0, 1, 1], [0, 0, 2]]
