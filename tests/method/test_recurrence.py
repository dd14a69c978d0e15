"""The 1-index recurrence, run as plain Python, against derivatives of a Gaussian."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.polynomial.hermite import hermval
from plain_r import plain_r

from md4.method.angular import hermite_ordinal, hermite_triples, nherm
from md4.method.mirror import part_functions
from md4.method.recurrence import by_axis, by_axis_in_plane, recurrence_table

number = st.floats(-2, 2)


def recurrence(l, zeros, centre):
    """r[t]^(0) as an array."""
    return np.array(plain_r(l, zeros, centre))


def gaussian_zeros(l, alpha, centre):
    """[0]^(m) = ((1/R) d/dR)^m exp(-alpha R^2)."""
    return (-2 * alpha) ** np.arange(l + 1) * np.exp(-alpha * np.dot(centre, centre))


@given(l=st.integers(0, 10), alpha=st.floats(0.1, 3), centre=st.tuples(number, number, number))
def test_derivatives_of_a_gaussian(l, alpha, centre):
    """For g(R) = exp(-alpha R^2), r[t] is the derivative of order t: a product of Hermite polynomials."""
    root = np.sqrt(alpha)
    axis = np.array([[(-root) ** n * hermval(root * x, [0] * n + [1]) for n in range(l + 1)] for x in centre])
    x, y, z = hermite_triples(l).T
    exact = axis[0, x] * axis[1, y] * axis[2, z] * np.exp(-alpha * np.dot(centre, centre))
    r = recurrence(l, gaussian_zeros(l, alpha, centre), centre)
    degree = x + y + z
    for d in range(l + 1):
        # By degree, since each brings in another power of alpha; at most (2 alpha)^d (d-1)!! at the origin.
        size = max(abs(exact[degree == d]).max(), (2 * alpha) ** (d / 2))
        np.testing.assert_allclose(r[degree == d], exact[degree == d], rtol=0, atol=1e-11 * size)


@given(l=st.integers(0, 14), alpha=st.floats(0.1, 3), centre=st.tuples(number, number, number))
def test_axis_by_axis_gives_the_same(l, alpha, centre):
    """Axis by axis, and the last one in closed form."""
    zeros = gaussian_zeros(l, alpha, centre).tolist()
    found = dict(by_axis(zeros, centre, lambda a, b: a * b, lambda a, b, c: a * b + c))
    assert sorted(found) == list(range(nherm(l)))
    expected, degree = recurrence(l, zeros, centre), hermite_triples(l).sum(axis=1)
    for t, value in found.items():
        size = max(abs(expected[degree == degree[t]]).max(), (2 * alpha) ** (degree[t] / 2))
        assert abs(value - expected[t]) < 1e-11 * size


@given(l=st.integers(0, 14), alpha=st.floats(0.1, 3), place=st.tuples(number, number))
def test_in_a_plane(l, alpha, place):
    """Where R_0 = 0, what is left out is zero, and all else the same."""
    zeros, numbers = gaussian_zeros(l, alpha, (0.0, *place)).tolist(), (lambda a, b: a * b, lambda a, b, c: a * b + c)
    every, found = dict(by_axis(zeros, (0.0, *place), *numbers)), dict(by_axis_in_plane(zeros, place, *numbers))
    assert sorted(found) == part_functions(l, 0, 0).tolist()
    for t, value in every.items():
        assert value == found.get(t, 0.0)


@pytest.mark.parametrize("l", [0, 1, 5, 12])
def test_words_name_the_predecessors(l):
    for t, (indices, rule) in zip(hermite_triples(l).tolist()[1:], recurrence_table(l).tolist()[1:]):
        axis, factor = rule & 255, rule >> 8
        assert factor == t[axis] - 1
        t[axis] -= 1
        assert indices & 65535 == hermite_ordinal(*t)
        if factor:
            t[axis] -= 1
            assert indices >> 16 == hermite_ordinal(*t)
