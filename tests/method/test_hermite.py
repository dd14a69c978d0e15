"""Hermite expansion coefficients and H matrices; device functions run as plain Python."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.polynomial.hermite import hermval
from plain_h import axis_table, plain_h

from md4.method import hermite
from md4.method.angular import AXES, cartesian_triples, component_coefficients, hermite_triples, nherm

number = st.floats(-2, 2)
exponent = st.floats(0.1, 10)


def hermite_gaussian(t, p, x):
    """(d/dP)^t exp(-p x^2), x relative to P."""
    return np.sqrt(p) ** t * hermval(np.sqrt(p) * x, [0] * t + [1]) * np.exp(-p * x * x)


@given(la=st.integers(0, 6), lb=st.integers(0, 6), p=exponent, xpa=number, xpb=number, x=number)
def test_e_expands_products_of_monomials(la, lb, p, xpa, xpb, x):
    e = axis_table(la, lb, p, xpa, xpb)[la, lb]
    terms = np.array([e[t] * hermite_gaussian(t, p, x) for t in range(la + lb + 1)])
    exact = (x + xpa) ** la * (x + xpb) ** lb * np.exp(-p * x * x)
    assert abs(terms.sum() - exact) <= 1e-13 * abs(terms).sum() + 1e-300


@pytest.mark.parametrize("l", range(7))
@pytest.mark.parametrize("pure", [True, False])
def test_component_table_is_the_coefficient_matrix(l, pure):
    start, powers, weights = hermite.component_table(l, pure)
    dense = np.zeros_like(component_coefficients(l, pure))
    rows = {tuple(t): n for n, t in enumerate(cartesian_triples(l)[:, AXES].tolist())}
    for m in range(len(start) - 1):
        for n in range(start[m], start[m + 1]):
            dense[rows[powers[n] & 255, (powers[n] >> 8) & 255, powers[n] >> 16], m] += weights[n]
    np.testing.assert_allclose(dense, component_coefficients(l, pure), rtol=0, atol=1e-14 * abs(dense).max())


@pytest.mark.parametrize("la, lb", [(0, 0), (1, 0), (1, 1), (2, 1), (3, 2)])
@pytest.mark.parametrize("pure", [True, False])
def test_h_is_the_expansion_of_products_of_components(la, lb, pure):
    """Over Cartesian functions and with the coefficient matrices; and what `structure` leaves out is zero."""
    rng = np.random.default_rng(la + 10 * lb)
    pa, pb = rng.normal(size=(2, 3))
    e = [axis_table(la, lb, 1.3, pa[x], pb[x]) for x in range(3)]
    shape = len(cartesian_triples(la)), len(cartesian_triples(lb)), nherm(la + lb)
    cartesian = np.ones(shape)
    for axis in range(3):
        of_a, of_b = (cartesian_triples(l)[:, AXES][:, axis] for l in (la, lb))
        cartesian *= e[axis][of_a[:, None, None], of_b[:, None], hermite_triples(la + lb)[:, axis]]
    a, b = (component_coefficients(l, pure) for l in (la, lb))
    expected = np.einsum("abp,ac,bd->cdp", cartesian, a, b).reshape(-1, shape[2])
    found = plain_h(la, lb, pure, 1.3, pa, pb, np.ndindex(expected.shape)).reshape(expected.shape)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-14 * abs(expected).max())
    assert set(zip(*found.nonzero())) <= set(hermite.structure(la, lb, pure))
