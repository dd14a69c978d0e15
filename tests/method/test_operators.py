"""[0]^(m) of every operator against mpmath: closed forms for conventions, wide ranges for accuracy."""

from functools import cache
from types import SimpleNamespace

import mpmath
import numba
import numpy as np
import pytest
from mpmath import mpf

from md4.errors import ArgumentError, UnsupportedError
from md4.method import operators
from md4.method.operators import MMAX, OPERATORS, Operator, as_operator, check_order

# What is compiled is compiled once for all of these.
pytestmark = pytest.mark.xdist_group("operators")
NJIT = numba.njit(error_model="numpy")


def plain(function):
    """The `jit` of plain Python."""
    return function


@cache
def compiled(kind):
    """(`zero_function`, `zeros_function`) of an operator, compiled once for all tests."""
    return operators.zero_function(kind, NJIT), operators.zeros_function(kind, NJIT)


def example(kind, parameter=0.8):
    return Operator(kind, 0.0 if kind == "coulomb" else parameter)


# Closed forms of [0]^(0) ----------------------------------------------------------------------------------------------


def charge(p, q):
    return (mpmath.pi**2 / (mpf(p) * mpf(q))) ** mpf(1.5)


def closed_yukawa(rho, r, zeta):
    """Two unit Gaussian charges under exp(-zeta r)/r."""
    a, b = zeta / (2 * mpmath.sqrt(rho)), mpmath.sqrt(rho) * r
    minus, plus = (mpmath.exp(s * zeta * r) * mpmath.erfc(a + s * b) for s in (-1, 1))
    return mpmath.exp(a * a) * (minus - plus) / (2 * r)


def closed_form(kind, p, q, r2, parameter):
    """[0]^(0) as a function of R^2."""
    rho, x = mpf(p) * q / (mpf(p) + q), mpf(parameter)
    r = mpmath.sqrt(r2)
    narrow = mpmath.sqrt(rho * x * x / (rho + x * x))
    unit = {
        "coulomb": lambda: mpmath.erf(mpmath.sqrt(rho) * r) / r,
        "erf": lambda: mpmath.erf(narrow * r) / r,
        "erfc": lambda: (mpmath.erf(mpmath.sqrt(rho) * r) - mpmath.erf(narrow * r)) / r,
        "yukawa": lambda: closed_yukawa(rho, r, x),
        "slater": lambda: -mpmath.diff(lambda zeta: closed_yukawa(rho, r, zeta), x),
        "gaussian": lambda: (rho / (rho + x)) ** mpf(1.5) * mpmath.exp(-rho * x / (rho + x) * r2),
        "gaussian_coulomb": lambda: (
            mpmath.sqrt(rho / (rho + x))
            * mpmath.exp(-rho * x / (rho + x) * r2)
            * mpmath.erf(rho / mpmath.sqrt(rho + x) * r) / r
        ),
    }[kind]()
    return charge(p, q) * unit


@pytest.mark.parametrize("kind", OPERATORS)
@pytest.mark.parametrize("p, q, r2", [(0.5, 1.3, 0.7), (20.0, 0.3, 9.0), (3.0, 4.0, 0.04)])
def test_definition(kind, p, q, r2):
    """[0]^(m) = ((1/R) d/dR)^m [0]^(0) = 2^m (d/dR^2)^m [0]^(0)."""
    operator = example(kind)
    zero, table = operators.zero_function(kind, plain), operators.kind_table(operator.kind)
    with mpmath.workdps(40):
        derivatives = mpmath.diffs(lambda x: closed_form(kind, p, q, x, operator.parameter), mpf(r2), 4)
        for m, derivative in enumerate(derivatives):
            assert abs(zero(m, p, q, r2, operator.parameter, table) / (2**m * derivative) - 1) < 1e-13


# Accuracy over wide ranges --------------------------------------------------------------------------------------------


def lower_boys(m, t, theta=1):
    """int_0^sqrt(theta) x^(2m) exp(-t x^2) dx"""
    half = m + mpf(1) / 2
    if t == 0:
        return mpf(theta) ** half / (2 * half)
    return mpmath.gammainc(half, 0, theta * t) / (2 * t**half)


def upper_boys(m, t, theta):
    """The same from sqrt(theta) to 1; for large t from the complementary function, which keeps the digits."""
    half = m + mpf(1) / 2
    if t < 30:
        return lower_boys(m, t) - lower_boys(m, t, theta)
    return (mpmath.gammainc(half, theta * t) - mpmath.gammainc(half, t)) / (2 * t**half)


def damped(m, j, t, u):
    """int_0^1 w^(j-1) x^(2m) exp(-t x^2 - u w) dx, w = 1/x^2 - 1, by a much finer trapezoidal rule in ln w."""

    def integrand(y):
        w = mpmath.exp(y)
        s = 1 / (1 + w)
        return w**j * s ** (m + mpf(3) / 2) * mpmath.exp(-t * s - u * w)

    y = np.linspace(-60, 60, 240001)
    w = np.exp(y)
    top = np.argmax(j * y - (m + 1.5) * np.log1p(w) - float(t) / (1 + w) - float(u) * w)
    h = min(0.15, 0.33 / (2 * m + 3 + 2 * float(u) * w[top]) ** 0.5)
    centre = total = integrand(mpf(y[top]))
    for step in (h, -h):
        n, term = 0, centre
        while term > 1e-22 * total:
            n += 1
            term = integrand(mpf(y[top]) + n * step)
            total += term
    return total * h / 2


def exact_zero(kind, m, p, q, r2, parameter):
    """[0]^(m) to many digits, and how negative the exponent of its decay is."""
    p, q, r2, x = map(mpf, (p, q, r2, parameter))
    rho = p * q / (p + q)
    t, theta, u = rho * r2, x * x / (x * x + rho), x * x / (4 * rho)
    front = 2 * mpmath.pi ** mpf(2.5) / (p * q * mpmath.sqrt(p + q)) * (-2 * rho) ** m
    if kind in ("coulomb", "erf"):
        return front * lower_boys(m, t, 1 if kind == "coulomb" else theta), 0
    if kind == "erfc":
        return front * upper_boys(m, t, theta), theta * t
    if kind == "gaussian":
        alpha = rho * x / (rho + x)
        overlap = (mpmath.pi**2 / ((p + q) * (rho + x))) ** mpf(1.5)
        return overlap * (-2 * alpha) ** m * mpmath.exp(-alpha * r2), alpha * r2
    if kind == "gaussian_coulomb":
        theta = x / (rho + x)
        terms = (mpmath.binomial(m, k) * theta ** (m - k) * (1 - theta) ** (k + 1) * lower_boys(k, (1 - theta) * t)
                 for k in range(m + 1))  # fmt: skip
        return front * mpmath.exp(-theta * t) * mpmath.fsum(terms), theta * t
    decay = min(t, x * mpmath.sqrt(r2))
    return front * (damped(m, 1, t, u) if kind == "yukawa" else x / (2 * rho) * damped(m, 2, t, u)), decay


def random_arguments(rng, index):
    """(m, p, q, r2, parameter) from ordinary to extreme: exponents to 1e10, T to 1e6, R^2 to 1e8."""
    low, high = (-4, 10) if index % 2 else (-1, 2)
    p, q = 10 ** rng.uniform(low, high, 2)
    rho = p * q / (p + q)
    r2 = min(10 ** rng.uniform(-3, 6 if index % 3 else 2.2) / rho, 1e8)
    parameter = rho**0.5 * 10 ** rng.uniform(-4, 4) if index % 4 else 10 ** rng.uniform(-3, 3)
    m = rng.choice([0, 1, 2, 3, 4, 8, 12, 16, 20, 24, 28, 31, 32])
    return int(m), float(p), float(q), float(0 if index % 17 == 0 else r2), float(parameter)


def worst_errors(kind, samples, seed=0):
    """Largest (relative error) / (1 + decay/30) of `zero` and of `zeros`.

    A result that decays as exp(-x) carries at least the error x eps of its argument's rounding.
    """
    (zero, zeros), table = compiled(kind), operators.kind_table(kind)
    rng, worst = np.random.default_rng(seed), [0.0, 0.0]
    for index in range(samples):
        m, *arguments = random_arguments(rng, index)
        exact, decay = exact_zero(kind, m, *arguments)
        out = np.zeros(MMAX + 1)
        zeros(m, *arguments, table, out, 0, 1)
        values = zero(m, *arguments, table), out[m]
        if abs(exact) < 1e-290:
            assert all(abs(value) < 2e-290 for value in values)
            continue
        errors = [float(abs(value / exact - 1) / (1 + decay / 30)) for value in values]
        worst = np.maximum(worst, errors)  # a NaN stays
    return worst


@pytest.mark.sample("coulomb-*", "erf-*", "gaussian-*")
@pytest.mark.parametrize(
    "kind, samples, digits, tolerance",
    [
        ("coulomb", 1500, 40, 1e-14),
        ("erf", 1500, 40, 1.5e-14),
        ("erfc", 1000, 60, 1.5e-14),
        ("gaussian", 1500, 40, 1.5e-14),
        ("gaussian_coulomb", 400, 40, 1.5e-14),
        ("yukawa", 50, 25, 3e-14),
        ("slater", 50, 25, 3e-14),
    ],
)
def test_accuracy(kind, samples, digits, tolerance):
    with mpmath.workdps(digits):
        worst = worst_errors(kind, samples)
    print(kind, worst)
    assert max(worst) < tolerance


def test_erfc_where_the_difference_cancels():
    """theta near 1 at all decays, and theta T either side of m, where the two formulas meet."""
    (zero, _), table = compiled("erfc"), operators.kind_table("erfc")
    with mpmath.workdps(80):
        for m in (0, 1, 5, 16, 32):
            for omega in (0.5, 3.0, 30.0, 1e3, 1e5):
                for narrow_t in (0.0, 0.5 * m, m, m + 0.5, m + 1.0, 1.5 * m, 2.0 * m, 60.0, 300.0, 650.0):
                    r2 = narrow_t * (1 / omega**2 + 1)
                    exact, decay = exact_zero("erfc", m, 2.0, 2.0, r2, omega)
                    assert abs(zero(m, 2.0, 2.0, r2, omega, table) / exact - 1) < 1.5e-14 * (1 + decay / 30)


@pytest.mark.sample("[17]-*")
@pytest.mark.parametrize("kind", ["yukawa", "slater"])
@pytest.mark.parametrize("m", [0, 1, 7, 32])
def test_damped_at_the_origin(kind, m):
    """R = 0, by quadrature."""
    (zero, _), table = compiled(kind), operators.kind_table(kind)
    with mpmath.workdps(30):
        for u in (1e-10, 1e-3, 1.0, 40.0, 1e4, 1e6):
            j, zeta = 1 + (kind == "slater"), 2 * float(np.sqrt(u))  # p = q = 2: rho = 1
            exact_u = mpf(zeta) ** 2 / 4
            middle = mpmath.sqrt(1 / (1 + 1 / exact_u))
            w = lambda x: 1 / x**2 - 1  # noqa: E731
            f = lambda x: w(x) ** (j - 1) * x ** (2 * m) * mpmath.exp(-exact_u * w(x))  # noqa: E731,B023
            exact = mpmath.quad(f, [0, middle / 8, middle / 2, middle, (1 + middle) / 2, 1 - (1 - middle) / 64, 1])
            exact *= mpmath.pi ** mpf(2.5) / 4 * mpf(-2) ** m * (mpf(zeta) / 2 if j == 2 else 1)
            assert abs(zero(m, 2.0, 2.0, 0.0, zeta, table) / exact - 1) < 3e-14


@pytest.mark.parametrize("kind", OPERATORS)
def test_plain_python_is_the_compiled_function(kind):
    table = operators.kind_table(kind)
    zeros = [operators.zeros_function(kind, plain), compiled(kind)[1]]
    rng = np.random.default_rng(5)
    for index in range(20):
        _, *arguments = random_arguments(rng, index)
        if kind == "coulomb":
            arguments[-1] = 0.0
        out = np.full((2, 100), np.nan)
        for row, function in zip(out, zeros, strict=True):
            function(24, *arguments, table, row, 7, 3)
        assert np.isfinite(out[0]).sum() == 25
        np.testing.assert_allclose(out[0], out[1], rtol=2e-13, atol=1e-300)


@pytest.mark.parametrize("kind", OPERATORS)
def test_extremes_stay_finite(kind):
    """The corners of exponents, distances and parameters give finite numbers at m = 32."""
    (zero, _), table = compiled(kind), operators.kind_table(kind)
    for p in (1e-4, 1.0, 1e10):
        for q in (1e-4, 1.0, 1e10):
            for r2 in (0.0, 5e-324, 1e-30, 1e-8, 1.0, 1e8):
                for parameter in (1e-20, 1e-3, 1.0, 1e5, 1e20):
                    for m in (0, 32):
                        assert np.isfinite(zero(m, p, q, r2, parameter, table)), (m, p, q, r2, parameter)


@pytest.mark.sample("coulomb")
@pytest.mark.parametrize("kind", OPERATORS)
def test_compiles_for_cuda_without_a_gpu(kind, monkeypatch):
    cuda = pytest.importorskip("numba.cuda")
    from numba.cuda import dispatcher

    monkeypatch.setattr(dispatcher, "get_current_device", lambda: SimpleNamespace(compute_capability=(9, 0)))
    jit = cuda.jit(device=True)
    zero, zeros = operators.zero_function(kind, jit), operators.zeros_function(kind, jit)

    def kernel(p, q, r2, parameter, table, out):
        m = cuda.threadIdx.x
        out[m] = zero(m, p, q, r2, parameter, table)
        zeros(m, p, q, r2, parameter, table, out, m, 2)

    f8 = numba.float64
    signature = numba.void(f8, f8, f8, f8, f8[:, ::1], f8[::1])
    code, _ = cuda.compile(kernel, signature, device=False, abi="numba", output="ltoir", cc=(9, 0))
    assert len(code) > 1000


# Arguments ------------------------------------------------------------------------------------------------------------


def test_constructors():
    assert Operator() == Operator.coulomb() == as_operator("coulomb")
    assert Operator.from_omega(0) == Operator.from_omega(None) == Operator.coulomb()
    assert Operator.from_omega(0.3) == Operator.erf(0.3) == as_operator(("erf", 0.3))
    assert Operator.from_omega(-0.3) == Operator.erfc(0.3)
    assert {Operator.yukawa(1), Operator.slater(1), Operator.gaussian(1), Operator.gaussian_coulomb(1)} == {
        Operator(kind, 1.0) for kind in ("yukawa", "slater", "gaussian", "gaussian_coulomb")
    }
    assert as_operator(Operator.slater(2)) == Operator.slater(2.0)


@pytest.mark.parametrize("value", ["f12", ("f12", 1.0), None, 3, ("erf",), ("erf", 1.0, 2.0), (["erf"], 1.0)])
def test_unknown_operators_list_the_known(value):
    with pytest.raises(ArgumentError, match="'coulomb', 'erf', 'erfc', 'yukawa', 'slater', 'gaussian'"):
        as_operator(value)


@pytest.mark.parametrize("kind", OPERATORS[1:])
@pytest.mark.parametrize("parameter", [0, -1, np.nan, np.inf, 1e-30, None, "x"])
def test_bad_parameters(kind, parameter):
    with pytest.raises(ArgumentError, match="parameter"):
        Operator(kind, parameter)


def test_more_bad_arguments():
    with pytest.raises(ArgumentError, match="no parameter"):
        Operator("coulomb", 0.3)
    with pytest.raises(ArgumentError, match="parameter"):
        as_operator("erf")
    for omega in (np.nan, np.inf, "x"):
        with pytest.raises(ArgumentError):
            Operator.from_omega(omega)
    with pytest.raises(ArgumentError):
        operators.zero_function("f12", plain)


def test_check_order():
    check_order(MMAX)
    with pytest.raises(UnsupportedError, match=r"L = 33.*limit of 32"):
        check_order(33)
