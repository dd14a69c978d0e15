"""[0]^(m) of every two-electron operator: the formulas, and `DEFINITIONS`, where an operator is added.

An operator g(r12) enters the integrals only by [0]^(m). For Hermite Gaussians of exponents p and q at a distance R, and
rho = p q / (p + q),

    [0]^(m) = ((1/R) d/dR)^m [0]^(0) ,    [0]^(0) = the integral of two s Gaussians over g(r12) .

With c = 2 pi^(5/2) / (p q sqrt(p + q)), T = rho R^2, theta = omega^2 / (omega^2 + rho) and U = zeta^2 / (4 rho):

    coulomb   1/r               c (-2 rho)^m  int_0^1 t^(2m) exp(-T t^2) dt  =  c (-2 rho)^m F_m(T)
    erf       erf(omega r)/r    the same over 0 < t < sqrt(theta)  =  c sqrt(theta) (-2 rho theta)^m F_m(theta T)
    erfc      erfc(omega r)/r   the same over sqrt(theta) < t < 1
    yukawa    exp(-zeta r)/r    the same under exp(-U (1/t^2 - 1))
    slater    exp(-zeta r)      yukawa's integrand times (zeta / 2 rho) (1/t^2 - 1)
    gaussian  exp(-omega r^2)   (pi^2 / ((p + q) (rho + omega)))^(3/2) (-2 alpha)^m exp(-alpha R^2),
                                alpha = rho omega / (rho + omega)
    gaussian_coulomb            with the same alpha and nu = rho - alpha = rho^2 / (rho + omega)
              exp(-omega r^2)/r c (nu / rho) exp(-alpha R^2) sum_k binomial(m, k) (-2 alpha)^(m-k) (-2 nu)^k F_k(nu R^2)

The highest order is m = MMAX = 32. |[0]^(m)| must stay below 1e308. This is so for exponents up to 1e10 at every m, and
for larger exponents at lower m (`md4.shells.limits`; `md4.Basis` refuses the others).

Device functions and makers are as in `md4.method.boys`. A maker `make_NAME(jit)` binds the function
NAME(m, p, q, r2, parameter, table) -> [0]^(m), where r2 is R^2. A maker `make_NAME_upto(jit)` binds
NAME_upto(mmax, p, q, r2, parameter, table, out, offset, stride), which writes [0]^(m) to out[offset + m stride] for
m = 0..mmax.
"""

from dataclasses import dataclass
from math import exp, expm1, pi, sqrt

import numpy as np

from md4.method.boys import FACTORIAL_ROW, boys_table, make_scaled_boys, make_scaled_boys_upto, scaled_power

COULOMB_FACTOR = 2 * pi**2.5
NODES = 32  # of the Gauss-Legendre rule for erfc
NODE_ROW, WEIGHT_ROW = FACTORIAL_ROW + 1, FACTORIAL_ROW + 2  # of erfc's table
# Largest step of the trapezoidal rule for yukawa and slater in ln(1/t^2 - 1), and in units of the peak's width; see
# `make_damped`.
LARGEST_STEP = 0.2
STEP_PER_WIDTH = 0.45
NEGLIGIBLE = 1e-18  # a term this small, relative to the sum, ends it
MOST_STEPS = 4000  # a bound that is never reached


def prefactor(p, q):
    """2 pi^(5/2) / (p q sqrt(p + q)) (device function)."""
    return COULOMB_FACTOR / (p * q * sqrt(p + q))


def make_coulomb(jit):
    boys, factor = make_scaled_boys(jit), jit(prefactor)

    def coulomb(m, p, q, r2, parameter, table):
        rho = p * q / (p + q)
        return boys(m, factor(p, q), -2.0 * rho, rho * r2, table)

    return jit(coulomb)


def make_coulomb_upto(jit):
    boys, factor = make_scaled_boys_upto(jit), jit(prefactor)

    def coulomb_upto(mmax, p, q, r2, parameter, table, out, offset, stride):
        rho = p * q / (p + q)
        boys(mmax, factor(p, q), -2.0 * rho, rho * r2, table, out, offset, stride)

    return jit(coulomb_upto)


def make_erf(jit):
    boys, factor = make_scaled_boys(jit), jit(prefactor)

    def erf(m, p, q, r2, omega, table):
        rho = p * q / (p + q)
        theta = 1.0 / (1.0 + rho / omega / omega)
        narrow = rho / (1.0 + rho / omega / omega)
        return boys(m, factor(p, q) * sqrt(theta), -2.0 * narrow, narrow * r2, table)

    return jit(erf)


def make_erf_upto(jit):
    boys, factor = make_scaled_boys_upto(jit), jit(prefactor)

    def erf_upto(mmax, p, q, r2, omega, table, out, offset, stride):
        rho = p * q / (p + q)
        theta = 1.0 / (1.0 + rho / omega / omega)
        narrow = rho / (1.0 + rho / omega / omega)
        boys(mmax, factor(p, q) * sqrt(theta), -2.0 * narrow, narrow * r2, table, out, offset, stride)

    return jit(erf_upto)


def make_erfc(jit):
    boys, factor, segment = make_scaled_boys(jit), jit(prefactor), make_upper_segment(jit)

    def erfc(m, p, q, r2, omega, table):
        c = factor(p, q)
        rho = p * q / (p + q)
        theta = 1.0 / (1.0 + rho / omega / omega)
        narrow = rho / (1.0 + rho / omega / omega)
        full = boys(m, c, -2.0 * rho, rho * r2, table)
        long_range = boys(m, c * sqrt(theta), -2.0 * narrow, narrow * r2, table)
        if abs(long_range) <= 0.5 * abs(full):
            return full - long_range
        rest = 1.0 / (1.0 + omega / rho * omega)  # 1 - theta, with all its digits
        return segment(m, c, -2.0 * rho, rho * r2, theta, rest, table)

    return jit(erfc)


def make_upper_segment(jit):
    """The function -> factor scale^m int_a^1 t^(2m) exp(-T t^2) dt, a = sqrt(theta), for theta T above m or near 1.

    Gauss-Legendre quadrature in t, over the part of the interval that matters: for theta T > m, what lies beyond
    T (t^2 - theta) = 41 + 7 sqrt(m) is below exp(-40) of the whole. The integrand at every node is computed relative to
    that at t = a, where it is largest or nearly so.
    """
    power = jit(scaled_power)

    def upper_segment(m, factor, scale, t, theta, rest, table):
        a = sqrt(theta)
        span = rest  # of t^2
        reach = 41.0 + 7.0 * sqrt(1.0 * m)
        if t * span > reach:
            span = reach / t
        length = span / (a + sqrt(theta + span))
        total = 0.0
        for i in range(NODES):
            x = length * table[NODE_ROW, i]
            s = x * (2.0 * a + x)
            total += table[WEIGHT_ROW, i] * power(exp(-t * s), 1.0 + s / theta, m)
        decay = exp(-0.5 * t * theta)  # multiplied in twice, since (scale theta)^m may be huge
        return power(factor * length * total * decay, scale * theta, m) * decay

    return jit(upper_segment)


def make_yukawa(jit):
    factor, damped = jit(prefactor), make_damped(jit)

    def yukawa(m, p, q, r2, zeta, table):
        rho = p * q / (p + q)
        return damped(m, 1, factor(p, q), -2.0 * rho, rho * r2, 0.25 * zeta / rho * zeta)

    return jit(yukawa)


def make_slater(jit):
    factor, damped = jit(prefactor), make_damped(jit)

    def slater(m, p, q, r2, zeta, table):
        rho = p * q / (p + q)
        c = factor(p, q) * zeta / (2.0 * rho)
        return damped(m, 2, c, -2.0 * rho, rho * r2, 0.25 * zeta / rho * zeta)

    return jit(slater)


def damped_peak(m, j, t, u):
    """The w = 1/t^2 - 1 at which the integrand of `make_damped` is largest (device function).

    The derivative of its logarithm with respect to y = ln w is a cubic in w, divided by (1+w)^2. The cubic has one
    change of sign, so there is one root, which is found by bisection.
    """
    low, high = -300.0, 300.0
    for _ in range(60):
        y = 0.5 * (low + high)
        w = exp(y)
        s = 1.0 / (1.0 + w)
        if j - (m + 1.5) * w * s + t * s * w * s > u * w:
            low = y
        else:
            high = y
    return exp(0.5 * (low + high))


def make_damped_tail(jit):
    """The function -> sum of the integrand, relative to its peak (w0, s0), over one side of it in steps `h` of y."""
    power = jit(scaled_power)

    def damped_tail(m, j, t, u, w0, s0, h):
        total = 0.0
        for n in range(1, MOST_STEPS):
            s = 1.0 / (1.0 + w0 * exp(n * h))
            ratio = s / s0
            log_rest = j * n * h + w0 * expm1(n * h) * (t * s0 * s - u)  # of w^j exp(-T s - U w), relative to the peak
            term = power(exp(log_rest) * sqrt(ratio) * ratio, ratio, m)
            total += term
            if term < NEGLIGIBLE * (1.0 + total):
                break
        return total

    return jit(damped_tail)


def make_damped(jit):
    """The function -> factor scale^m int_0^1 w^(j-1) t^(2m) exp(-T t^2 - U w) dt, w = 1/t^2 - 1, j = 1 or 2.

    In y = ln w, with s = t^2 = 1/(1+w), this is 1/2 int w^j s^(m+3/2) exp(-T s - U w) dy over the whole real line. The
    integrand is positive, has one peak, and is analytic around the real axis. Therefore the trapezoidal rule converges
    exponentially if the step resolves the peak. The step follows from the curvature of the peak, whose three terms are
    added with their moduli: where they cancel the peak is flat, but the integrand still grows fast off the real axis.
    """
    power, peak, tail = jit(scaled_power), jit(damped_peak), make_damped_tail(jit)

    def damped(m, j, factor, scale, t, u):
        w = peak(m, j, t, u)
        s = 1.0 / (1.0 + w)
        curvature = (m + 1.5 + t) * s * w * s + u * w
        h = min(LARGEST_STEP, STEP_PER_WIDTH / sqrt(curvature))
        decay = exp(-0.5 * (t * s + u * w))
        top = power(0.5 * h * factor * decay * power(s * sqrt(s), w, j), scale * s, m) * decay
        if top == 0.0:
            return top
        return top * (1.0 + tail(m, j, t, u, w, s, h) + tail(m, j, t, u, w, s, -h))

    return jit(damped)


def make_gaussian(jit):
    power = jit(scaled_power)

    def gaussian(m, p, q, r2, omega, table):
        rho = p * q / (p + q)
        overlap = pi / (p + q) * (pi / (rho + omega))
        alpha = rho * (omega / (rho + omega))
        decay = exp(-0.5 * alpha * r2)
        return power(overlap * sqrt(overlap) * decay, -2.0 * alpha, m) * decay

    return jit(gaussian)


def make_gaussian_coulomb(jit):
    """The sum over k, all of whose terms have the sign (-1)^m."""
    boys, power, prefactor_of = make_scaled_boys(jit), jit(scaled_power), jit(prefactor)

    def gaussian_coulomb(m, p, q, r2, omega, table):
        rho = p * q / (p + q)
        theta = 1.0 / (1.0 + omega / rho)
        nu, alpha = rho * theta, omega * theta
        decay = exp(-0.5 * alpha * r2)
        factor = prefactor_of(p, q) * theta * decay
        total, binomial = 0.0, 1.0
        for k in range(m + 1):
            total += power(binomial * boys(k, factor, -2.0 * nu, nu * r2, table), -2.0 * alpha, m - k)
            binomial = binomial * (m - k) / (k + 1)
        return total * decay

    return jit(gaussian_coulomb)


def make_gaussian_coulomb_upto(jit):
    """The sums over k for all m, in place by Pascal's rule: after n steps the values of m <= n are complete."""
    boys, factor = make_scaled_boys_upto(jit), jit(prefactor)

    def gaussian_coulomb_upto(mmax, p, q, r2, omega, table, out, offset, stride):
        rho = p * q / (p + q)
        theta = 1.0 / (1.0 + omega / rho)
        nu, alpha = rho * theta, omega * theta
        decay = exp(-0.5 * alpha * r2)
        boys(mmax, factor(p, q) * theta * decay, -2.0 * nu, nu * r2, table, out, offset, stride)
        for n in range(mmax):
            for m in range(mmax, n, -1):
                out[offset + m * stride] -= 2.0 * alpha * out[offset + (m - 1) * stride]
        for m in range(mmax + 1):
            out[offset + m * stride] *= decay

    return jit(gaussian_coulomb_upto)


# What operators there are ---------------------------------------------------------------------------------------------


def one_by_one(make_zero):
    """The maker of a function of all m that calls `zero` for one m after the other."""

    def make_zeros(jit):
        zero = make_zero(jit)

        def zeros(mmax, p, q, r2, parameter, table, out, offset, stride):
            for m in range(mmax + 1):
                out[offset + m * stride] = zero(m, p, q, r2, parameter, table)

        return jit(zeros)

    return make_zeros


def no_table():
    """The table of functions that read none."""
    return np.zeros((1, 1))


def boys_table_and_nodes():
    """`boys_table` with a row of nodes and one of weights on (0, 1) below it, for erfc."""
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    rows = np.zeros((2, boys_table().shape[1]))
    rows[:, :NODES] = (nodes + 1) / 2, weights / 2
    return np.concatenate([boys_table(), rows])


@dataclass(frozen=True)
class Definition:
    """All that md4 needs to know of an operator.

    Attributes
    ----------
    make_zero, make_zeros : callable
        Makers of the functions that give [0]^(m) of one m, and of all m up to some; see this module's docstring.
    make_table : callable
        Makes the `table` that both functions read, float64 and two-dimensional.
    parameter : str, optional
        Name of the operator's parameter; None where it has none.
    """

    make_zero: object
    make_zeros: object
    make_table: object = no_table
    parameter: str | None = None


DEFINITIONS = {
    "coulomb": Definition(make_coulomb, make_coulomb_upto, boys_table),
    "erf": Definition(make_erf, make_erf_upto, boys_table, "omega"),
    "erfc": Definition(make_erfc, one_by_one(make_erfc), boys_table_and_nodes, "omega"),
    "yukawa": Definition(make_yukawa, one_by_one(make_yukawa), parameter="zeta"),
    "slater": Definition(make_slater, one_by_one(make_slater), parameter="zeta"),
    "gaussian": Definition(make_gaussian, one_by_one(make_gaussian), parameter="omega"),
    "gaussian_coulomb": Definition(make_gaussian_coulomb, make_gaussian_coulomb_upto, boys_table, "omega"),
}
