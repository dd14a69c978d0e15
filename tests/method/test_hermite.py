"""Hermite expansion coefficients and H matrices; device functions run as plain Python."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.polynomial.hermite import hermval

from md4.cpu import loops
from md4.method import hermite
from md4.method.angular import AXES, cartesian_triples, component_coefficients, hermite_triples, nherm

number = st.floats(-2, 2)
exponent = st.floats(0.1, 10)


def axis_table(la, lb, p, xpa, xpb):
    """E_t^{ij} of one axis as [i][j][t], filled in the order that `e_coefficient` needs."""
    nt = la + lb + 1
    e = np.zeros(hermite.axis_size(la, lb))
    for i in range(la + 1):
        for j in range(lb + 1):
            for t in range(nt):
                e[(i * (lb + 1) + j) * nt + t] = hermite.e_coefficient(i, j, t, lb, nt, 0.5 / p, xpa, xpb, e, 0)
    return e.reshape(la + 1, lb + 1, nt)


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
def test_cpu_h_is_h_element(la, lb, pure):
    """The CPU goes by Cartesian functions, `h_element` straight to components."""
    rng = np.random.default_rng(la + 10 * lb)
    pa, pb = rng.normal(size=(2, 3))
    e = np.concatenate([axis_table(la, lb, 1.3, pa[x], pb[x]).ravel() for x in range(3)])
    tables = loops.angular_tables(la, pure), loops.angular_tables(lb, pure)
    (powers_a, pure_a), (powers_b, pure_b) = tables
    h = loops.primitive_h(la, lb, e, powers_a, powers_b, pure_a, pure_b, hermite_triples(la + lb), False)
    np.testing.assert_array_equal(loops.e_coefficients(la, lb, 1.3, pa, pb), e)
    start_a, *terms_a = hermite.component_table(la, pure)
    start_b, *terms_b = hermite.component_table(lb, pure)
    nt, size = la + lb + 1, hermite.axis_size(la, lb)
    expected = [
        hermite.h_element(
            start_a[a], start_a[a + 1], *terms_a, start_b[b], start_b[b + 1], *terms_b, x, y, z, lb, nt, size, e
        )
        for a in range(len(start_a) - 1)
        for b in range(len(start_b) - 1)
        for x, y, z in hermite_triples(la + lb).tolist()
    ]
    assert h.shape[2] == nherm(la + lb)
    np.testing.assert_allclose(h.ravel(), expected, rtol=0, atol=1e-14 * abs(h).max())
