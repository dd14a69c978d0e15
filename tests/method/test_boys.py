"""The Boys function against mpmath, 1e-14 everywhere."""

import time

import mpmath
import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from md4.method import boys

TOLERANCE = 1e-14
TABLE = boys.boys_table()


def plain(function):
    """The `jit` of plain Python."""
    return function


def reference(m, t):
    """F_m(t) to 30 digits."""
    with mpmath.workdps(30):
        t = mpmath.mpf(float(t))
        half = m + mpmath.mpf(1) / 2
        if t < 1e-3:
            return mpmath.hyp1f1(half, half + 1, -t) / (2 * half)
        return mpmath.gammainc(half, 0, t) / (2 * t**half)


def far(m):
    return float(boys.FAR + boys.FAR_SLOPE * m)


@pytest.fixture(scope="module")
def compiled():
    """Both functions under njit: one m, and all m up to mmax."""
    jit = numba.njit(error_model="numpy")
    return boys.make_scaled_boys(jit), boys.make_scaled_boys_upto(jit)


def worst_error(compiled, m, t):
    one, upto = compiled
    exact = reference(m, t)
    out = np.zeros(boys.MMAX + 1)
    upto(m, 1.0, 1.0, t, TABLE, out, 0, 1)
    return max(float(abs(value / exact - 1)) for value in (one(m, 1.0, 1.0, t, TABLE), out[m]))


@pytest.mark.parametrize("m", range(boys.MMAX + 1))
def test_dense(compiled, m):
    rng = np.random.default_rng(m)
    grid = np.concatenate([np.linspace(0, 130, 70), 10 ** rng.uniform(-6, 6, 30)])
    assert max(worst_error(compiled, m, t) for t in grid) < TOLERANCE


@pytest.mark.parametrize("m", range(boys.MMAX + 1))
def test_edges(compiled, m):
    """Both sides of the asymptotic edges and of the middles between grid points; tiny and denormal T."""
    edges = [far(m), far(boys.MMAX), *(boys.STEP * (i + 0.5) for i in (0, 1, 10, 100, 400))]
    grid = [0.0, 5e-324, 1e-310, 1e-16, 1e6]
    grid += [t for edge in edges for t in (np.nextafter(edge, 0), edge, np.nextafter(edge, 1e9))]
    assert max(worst_error(compiled, m, float(t)) for t in grid) < TOLERANCE


@settings(deadline=None, max_examples=100)
@given(st.integers(0, boys.MMAX), st.floats(0, 200) | st.floats(0, 1e6))
def test_random(m, t):
    value = boys.make_scaled_boys(plain)(m, 1.0, 1.0, t, TABLE)
    assert abs(value / reference(m, t) - 1) < TOLERANCE


@pytest.mark.parametrize("mmax", [0, 1, 8, 32])
def test_upto_layout(mmax):
    """Written at offset + m stride, and nowhere else."""
    one, upto = boys.make_scaled_boys(plain), boys.make_scaled_boys_upto(plain)
    for t in (0.3, 40.0, 500.0):
        out = np.full(120, np.nan)
        upto(mmax, 2.0, -0.7, t, TABLE, out, 5, 3)
        np.testing.assert_allclose(
            out[5 : 6 + 3 * mmax : 3], [one(m, 2.0, -0.7, t, TABLE) for m in range(mmax + 1)], rtol=TOLERANCE
        )
        assert np.isfinite(out).sum() == mmax + 1


def test_product_stays_in_range_where_its_factors_do_not(compiled):
    """scale^32 = 1e320 overflows and F_32(1e18) underflows, but the products do not."""
    one, upto = compiled
    out = np.zeros(33)
    for t in (0.0, 20.0, 100.0, 1e12):
        exact = mpmath.mpf(1e-24) * mpmath.mpf(-1e10) ** 32 * reference(32, t)
        upto(32, 1e-24, -1e10, t, TABLE, out, 0, 1)
        assert abs(one(32, 1e-24, -1e10, t, TABLE) / exact - 1) < TOLERANCE
        assert abs(out[32] / exact - 1) < TOLERANCE
    assert one(32, 1.0, 1.0, 1e18, TABLE) == 0.0


def test_not_a_number_is_not_a_table_index(compiled):
    assert np.isnan(compiled[0](3, 1.0, 1.0, np.nan, TABLE))
    assert compiled[0](3, 1.0, 1.0, np.inf, TABLE) == 0.0


def test_table():
    assert TABLE.dtype == np.float64
    assert TABLE.flags.c_contiguous
    assert TABLE.shape == (boys.ROWS + 1, boys.COLUMNS + 1)
    assert (boys.ROWS - 1) * boys.STEP >= far(boys.MMAX)
    assert boys.boys_table() is TABLE
    start = time.perf_counter()
    boys.boys_table.__wrapped__()
    assert time.perf_counter() - start < 1.0  # some 10 ms on an idle machine
    for i, m in ((0, 39), (1, 0), (400, 20), (boys.ROWS - 1, 39), (boys.ROWS - 1, 0)):
        assert abs(TABLE[i, m] / reference(m, i * boys.STEP) - 1) < 1e-15


@given(st.floats(-9, 9), st.integers(0, 32))
def test_scaled_power(x, n):
    assert boys.scaled_power(3.0, x, n) == pytest.approx(3.0 * x**n, rel=1e-14, abs=1e-300)
