"""The Boys function F_m(T) = int_0^1 t^(2m) exp(-T t^2) dt, m = 0..32, for the CPU and for the GPU.

For small T, a Taylor series of 8 terms about the nearest point of a uniform grid is used, whose values are tabulated:

    F_m(T) = sum_k F_{m+k}(T0) (T0 - T)^k / k! ,        |T0 - T| <= 3/64; the remainder is below 1e-15 F_m.

For large T >= 45 + 2m, the interval may be taken as infinite, which adds less than 1e-16 F_m:

    F_m(T) = (2m-1)!! / (2T)^m  sqrt(pi / T) / 2 .

In single precision, the highest order comes from 4 terms about points of a finer grid, |T0 - T| <= 1/32, and the
asymptotic form holds from T = 20 + 2m on (`single_boys_table`); both leave out less than 4e-8 F_m.

Integrals need scale^m F_m(T) with |scale| up to 1e10. There scale^32 or F_32 alone may leave the range of double
precision, while their product does not. Therefore the functions here return the product `factor scale^m F_m(T)`.

Device functions are undecorated Python. A maker `make_*(jit)` returns such a function, compiled by `jit` together with
all that it calls. `jit` is `numba.njit(...)`, `cuda.jit(device=True)`, or the identity for plain Python.
"""

from functools import cache
from math import pi, sqrt

import numpy as np

MMAX = 32  # highest order, the sum of the four angular momenta of a quartet
TERMS = 8  # of the Taylor series
STEP = 3 / 32  # of the grid; exact in binary, and so are the grid points
FAR = 45  # the asymptotic form holds from T = FAR + FAR_SLOPE m on
FAR_SLOPE = 2
COLUMNS = MMAX + TERMS
DECAY_COLUMN = COLUMNS  # of the table: exp(-T)
ROWS = int((FAR + FAR_SLOPE * MMAX) / STEP) + 2
FACTORIAL_ROW = ROWS  # of the table: (2m-1)!!

SINGLE_TERMS, SINGLE_STEP = 4, 1 / 16  # the same in single precision
SINGLE_FAR, SINGLE_FAR_SLOPE = 20, 2

PER_STEP = 1 / STEP
HALF_SQRT_PI = sqrt(pi) / 2
C2, C3, C4, C5, C6, C7, C8 = 1 / 2, 1 / 3, 1 / 4, 1 / 5, 1 / 6, 1 / 7, 1 / 8


@cache
def boys_table():
    """Table of shape (ROWS + 1, COLUMNS + 1), float64.

    Row i holds F_m(STEP i) in column m, and exp(-STEP i) in its last column. The last row holds (2m-1)!! in column m.
    The highest m is summed from its series, all of whose terms are positive. The others follow from the stable downward
    recursion. Both use the platform's long double, so that the entries are right to about the last bit.
    """
    t = np.arange(ROWS, dtype=np.longdouble) * STEP
    table = np.zeros((ROWS + 1, COLUMNS + 1))
    column, decay = highest_column(t), np.exp(-t)
    table[:ROWS, COLUMNS - 1], table[:ROWS, DECAY_COLUMN] = column, decay
    for m in range(COLUMNS - 1, 0, -1):
        column = (2 * t * column + decay) / (2 * m - 1)
        table[:ROWS, m - 1] = column
    table[FACTORIAL_ROW, :COLUMNS] = np.cumprod([1.0, *range(1, 2 * COLUMNS - 2, 2)])
    table.flags.writeable = False
    return table


@cache
def single_boys_table(m):
    """Table of shape (rows, SINGLE_TERMS), float32, for single precision: the Taylor series of F_m at each grid point.

    Row i holds F_{m+k}(T) / k! in column k, T = SINGLE_STEP i, up to the T from which on F_m is asymptotic.
    """
    points = SINGLE_STEP * np.arange((SINGLE_FAR + SINGLE_FAR_SLOPE * m) / SINGLE_STEP + 1)
    full, nearest = boys_table(), np.rint(points * PER_STEP).astype(int)
    orders = m + np.arange(SINGLE_TERMS)[:, None]
    factorials = np.cumprod([1.0, *range(1, SINGLE_TERMS)])
    values = taylor(nearest, orders, nearest * STEP - points, full).T / factorials
    table = np.ascontiguousarray(values, dtype=np.float32)
    table.flags.writeable = False
    return table


def highest_column(t):
    """F_m(T) for m = COLUMNS - 1 from exp(-T) sum_k (2T)^k / ((2m+1) (2m+3) ... (2m+2k+1))."""
    odd = 2 * COLUMNS - 1
    term = np.exp(-t) / odd
    total = term.copy()
    while np.any(term > 1e-20 * total):
        odd += 2
        term *= 2 * t / odd
        total += term
    return total


def scaled_power(factor, x, n):
    """factor x^n for n >= 0 (device function).

    The power is multiplied in two halves, so that the result is right also where x^n alone would overflow.
    """
    half = 1.0
    square = x
    k = n >> 1
    while k > 0:
        if k & 1:
            half *= square
        square *= square
        k >>= 1
    value = factor * half * half
    if n & 1:
        value *= x
    return value


def taylor(i, m, d, table):
    """F_m(T0 - d) of grid point i, where `d` is T0 - T (device function)."""
    return table[i, m] + d * (
        table[i, m + 1]
        + C2 * d * (
            table[i, m + 2]
            + C3 * d * (
                table[i, m + 3]
                + C4 * d * (
                    table[i, m + 4]
                    + C5 * d * (table[i, m + 5] + C6 * d * (table[i, m + 6] + C7 * d * table[i, m + 7]))
                )
            )
        )
    )


def make_scaled_boys(jit):
    """The function (m, factor, scale, t, table) -> factor scale^m F_m(t) of one m, bound with `jit`."""
    power, near = jit(scaled_power), jit(taylor)

    def scaled_boys(m, factor, scale, t, table):
        if t < FAR + FAR_SLOPE * m:
            i = int(t * PER_STEP + 0.5)
            return power(factor, scale, m) * near(i, m, i * STEP - t, table)
        # In an integral scale / 2t is -1/R^2, which stays in range where scale^m and F_m do not.
        leading = factor * HALF_SQRT_PI / sqrt(t) * table[FACTORIAL_ROW, m]
        return power(leading, scale / (2.0 * t), m)

    return jit(scaled_boys)


def down(m, t, f, decay):
    """F_m(t) from f = F_{m+1}(t) and exp(-t) (device function)."""
    return (2.0 * t * f + decay) * (1.0 / (2 * m + 1))


def make_highest(jit):
    """The function (i, m, d, table) -> F_m(T0 - d) of grid point i: the series of `taylor` from three entries only.

    The entries are F_m, F_{m+7} and exp(-T0); the other orders follow from them by recursion. These are multiplied by d
    at least, and so are their errors. Few entries matter on a GPU, because each lane of a warp reads another row.
    """
    below = jit(down)

    def highest(i, m, d, table):
        t, decay = i * STEP, table[i, DECAY_COLUMN]
        f = table[i, m + 7]
        total = C7 * d * f
        f = below(m + 6, t, f, decay)
        total = C6 * d * (f + total)
        f = below(m + 5, t, f, decay)
        total = C5 * d * (f + total)
        f = below(m + 4, t, f, decay)
        total = C4 * d * (f + total)
        f = below(m + 3, t, f, decay)
        total = C3 * d * (f + total)
        f = below(m + 2, t, f, decay)
        total = C2 * d * (f + total)
        f = below(m + 1, t, f, decay)
        return table[i, m] + d * (f + total)

    return jit(highest)


def exponential(d):
    """exp(d) for |d| <= 3/64 by nine terms (device function)."""
    total = 1.0 + C7 * d * (1.0 + C8 * d)
    total = 1.0 + C4 * d * (1.0 + C5 * d * (1.0 + C6 * d * total))
    return 1.0 + d * (1.0 + C2 * d * (1.0 + C3 * d * total))


def make_scaled_boys_upto(jit):
    """The function (mmax, factor, scale, t, table, out, offset, stride), bound with `jit`.

    It writes out[offset + m stride] = factor scale^m F_m(t) for m = 0..mmax. The highest order comes from the table,
    the others follow by the stable downward recursion.
    """
    highest, below, small_exponential = make_highest(jit), jit(down), jit(exponential)

    def scaled_boys_upto(mmax, factor, scale, t, table, out, offset, stride):
        if t < FAR + FAR_SLOPE * mmax:
            i = int(t * PER_STEP + 0.5)
            d = i * STEP - t
            value = highest(i, mmax, d, table)
            out[offset + mmax * stride] = value
            decay = table[i, DECAY_COLUMN] * small_exponential(d)
            for m in range(mmax - 1, -1, -1):
                value = below(m, t, value, decay)
                out[offset + m * stride] = value
            for m in range(mmax + 1):
                out[offset + m * stride] *= factor
                factor *= scale
            return
        value = factor * HALF_SQRT_PI / sqrt(t)
        ratio = scale / (2.0 * t)
        for m in range(mmax + 1):
            out[offset + m * stride] = value
            value *= (2 * m + 1) * ratio

    return jit(scaled_boys_upto)
