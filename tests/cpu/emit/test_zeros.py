"""[0]^(m) of LANES quartets against the functions of `md4.method.zeros`, which run as plain Python."""

import numpy as np
import pytest
from numba import njit

from md4.cpu.emit.vectors import LANES, load
from md4.cpu.emit.zeros import FORMULAS, zeros_of
from md4.method import operators
from md4.method.boys import FAR, FAR_SLOPE
from md4.method.operators import MMAX, Mixture, Operator


def compiled(kind):
    """The function of an operator with arrays instead of vectors."""
    zeros_of_lanes = zeros_of(kind)

    @njit(error_model="numpy")
    def run(l, p, q, r2, parameter, table, numbers, zeros):
        zeros_of_lanes(l, load(p, 0), load(q, 0), load(r2, 0), parameter, table, numbers, zeros)

    return run


def plain(kind, l, p, q, r2, parameter, table):
    """The same of one quartet, shape (l + 1,)."""
    out = np.empty(l + 1)
    with np.errstate(over="ignore"):  # of the power after the last one
        operators.zeros_function(kind, lambda function: function)(l, p, q, r2, parameter, table, out, 0, 1)
    return out


def quartets(rng, l, count):
    """Exponents and squared distances: T is 0, small, on either side of the border to large T, and huge."""
    p, q = 10 ** rng.uniform(-2, 3, (2, count))
    border = FAR + FAR_SLOPE * l
    t = rng.choice([0.0, 1e-300, 1e-9, 0.5, 3.0, border - 1e-9, border, border + 1e-9, 7 * border, 1e9], count)
    t *= rng.choice([1.0, rng.uniform(0.5, 1)], count)
    return p, q, t * (p + q) / (p * q)


@pytest.mark.parametrize("kind", sorted(FORMULAS))
def test_lanes_have_what_plain_python_gives(kind):
    """Lanes side by side may be near and far, and none disturbs another."""
    operator = Operator(kind, 0.0 if kind == "coulomb" else 0.7)
    run, table, rng = compiled(kind), operators.kind_table(operator.kind), np.random.default_rng(1)
    for l in (*range(14), 17, 23, MMAX):
        for p, q, r2 in (quartets(rng, l, LANES) for _ in range(20)):
            zeros = np.full((l + 1, LANES), np.nan)
            run(l, p, q, r2, operator.parameter, table, np.empty(3 * LANES), zeros.reshape(-1))
            exact = [plain(kind, l, *these, operator.parameter, table) for these in zip(p, q, r2)]
            np.testing.assert_allclose(zeros.T, exact, rtol=2e-14 * (1 + l / 8), atol=1e-307)


@pytest.mark.parametrize("kind", sorted(FORMULAS))
@pytest.mark.parametrize(
    ("l", "exponent"), [(0, 1e100), (0, 1e-100), (8, 1e30), (8, 1e-22), (MMAX, 1e10), (MMAX, 1e-9)]
)
def test_extreme_exponents(kind, l, exponent):
    """Nothing leaves the range of double precision that does not do so in the formulas of one quartet."""
    operator = Operator(kind, 0.0 if kind == "coulomb" else 0.7)
    run, table = compiled(kind), operators.kind_table(operator.kind)
    p, q = np.full(LANES, exponent), np.full(LANES, 1.5 * exponent)
    r2 = np.resize([0.0, 1e-3, 1.0, 30.0, 200.0, 1e12, 1e24, 3.0], LANES) / exponent
    r2[-1] = 1e24  # Bohr^2
    zeros = np.full((l + 1, LANES), np.nan)
    run(l, p, q, r2, operator.parameter, table, np.empty(3 * LANES), zeros.reshape(-1))
    exact = np.array([plain(kind, l, *these, operator.parameter, table) for these in zip(p, q, r2)])
    assert np.isfinite(exact).all()
    np.testing.assert_allclose(zeros.T, exact, rtol=1e-13, atol=1e-307)


def test_mixture():
    mixture, rng = Mixture(0.7, 0.3, -0.8), np.random.default_rng(3)
    run, table = compiled(mixture.kind), operators.kind_table(mixture.kind)
    for l in (0, 1, 6, MMAX):
        p, q, r2 = quartets(rng, l, LANES)
        zeros = np.full((l + 1, LANES), np.nan)
        run(l, p, q, r2, mixture.parameter, table, np.empty((l + 1) * LANES), zeros.reshape(-1))
        whole, long_range = (
            np.array([plain(kind, l, *these, omega, table) for these in zip(p, q, r2)])
            for kind, omega in (("coulomb", 0.0), ("erf", 0.7))
        )
        assert (abs(zeros.T - 0.3 * whole + 0.8 * long_range) <= 1e-13 * abs(whole)).all()


@pytest.mark.parametrize("kind", ["gaussian", "yukawa"])
def test_other_operators_lane_by_lane(kind):
    run, table, rng = compiled(kind), operators.kind_table(kind), np.random.default_rng(2)
    for l in (0, 3, 11):
        p, q, r2 = rng.uniform(0.3, 4, (3, LANES))
        zeros = np.full((l + 1, LANES), np.nan)
        run(l, p, q, r2, 0.4, table, np.empty(3 * LANES), zeros.reshape(-1))
        exact = [plain(kind, l, *these, 0.4, table) for these in zip(p, q, r2)]
        np.testing.assert_allclose(zeros.T, exact, rtol=1e-14)
