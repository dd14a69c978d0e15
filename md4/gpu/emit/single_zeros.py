"""[0]^(m) of a primitive quartet in single precision (FP32), as code without branches.

The formulas are those of `md4.method.zeros` and `md4.method.boys`, with rho, c and T of the operator,

    near:   [0]^(m) = c (-2 rho)^m F_m(T), F_L from a series of few terms, the others by downward recursion
    far:    [0]^(0) = c sqrt(pi / T) / 2,   [0]^(m+1) = -(2m+1) / R^2 [0]^(m)

All lanes compute both, and each selects its own. The device's approximations of 1/x, 1/sqrt(x) and 2^x are as accurate
as FP32 allows and take one instruction each. Only 1 / (p + q), whose error the power m multiplies, is refined.
"""

from functools import cache
from math import log, pi, sqrt

import numpy as np

from md4.gpu.emit.instructions import approximate, load
from md4.gpu.emit.values import FP32, FP64, OPEN, f64, fma, select, tuple_of, word
from md4.method.boys import SINGLE_FAR, SINGLE_FAR_SLOPE, SINGLE_STEP, SINGLE_TERMS
from md4.method.zeros import COULOMB_FACTOR

# Added to a number below 2^22 it leaves the nearest integer in the low bits of the sum.
ROUNDING, ROUNDING_BITS = 1.5 * 2**23, 0x4B400000
LOG2_E = float(np.float32(1 / log(2)))
LOG2_E_REST = 1 / log(2) - LOG2_E


def reciprocal(x):
    """1/x to the last bit, by a step of Newton's method."""
    first = approximate("rcp", x)
    return fma(first, fma(-x, first, 1.0), first)


def exponential(t):
    """exp(-t) of t from 0 to 50; the product with log2(e) has more digits than FP32."""
    power = t * -LOG2_E
    rest = fma(-LOG2_E_REST, t, fma(-LOG2_E, t, -power))
    value = approximate("ex2", power)
    return fma(value, rest * log(2), value)


def table_row(base, t):
    """(T0 - t, the row of the table for T0), T0 the grid point nearest to `t`."""
    shifted = fma(1 / SINGLE_STEP, t, ROUNDING)
    place = base + (shifted.bits - ROUNDING_BITS).i64 * (4 * SINGLE_TERMS)
    numbers = load("global.nc", place, 0, FP32, SINGLE_TERMS, effects=False)
    return fma(SINGLE_STEP, shifted - ROUNDING, -t), numbers


def boys(l, t, base):
    """F_m(t), m = 0..l, for t up to the table's end."""
    step, numbers = table_row(base, t)
    value = numbers[-1]
    for number in numbers[-2::-1]:
        value = fma(step, value, number)
    values = [value]
    if l > 0:
        twice, decay = t + t, exponential(t)
    for m in range(l - 1, -1, -1):
        value = fma(twice, value, decay) * (1 / (2 * m + 1))
        values.append(value)
    return values[::-1]


def emit_zeros(l, p, q, separation, omega, base):
    """[0]^(m), m = 0..l; `omega` is that of erf, None for 1/r, and `base` the table's address."""
    total, product, (rz, ry, rx) = p + q, p * q, separation
    rho = product * reciprocal(total)
    factor = approximate("rcp", product) * approximate("rsqrt", total) * COULOMB_FACTOR
    if omega is not None:  # theta = omega^2 / (rho + omega^2), which may be below FP32's range, but not beyond it
        total = fma(omega, omega, rho)
        theta = omega * reciprocal(total) * omega
        factor = factor * (omega * approximate("rsqrt", total))
        rho = rho * theta
    r2 = fma(rz, rz, fma(ry, ry, rx * rx))
    t, end = rho * r2, SINGLE_FAR + SINGLE_FAR_SLOPE * l
    is_near = t < end
    scale, power = rho * -2.0, factor
    far = factor * (sqrt(pi) / 2) * approximate("rsqrt", t)
    ratio = -approximate("rcp", r2) if l > 0 else None
    zeros = []
    for m, value in enumerate(boys(l, select(is_near, t, end), base)):
        zeros.append(select(is_near, power * value, far))
        if m < l:
            power = power * scale
            far = far * (2 * m + 1) * ratio
    return zeros


@cache
def make_single_zeros(l, is_erf):
    """Intrinsic (p, q, rz, ry, rx, omega, table) -> tuple of [0]^(m), m = 0..l, of 1/r, or of erf(omega r)/r.

    Numbers are doubles, R = P - Q in the order z, y, x. `omega` has no meaning for 1/r; the table is
    `md4.method.boys.single_boys_table` of l.
    """

    @word(tuple_of(FP32, l + 1), f64, f64, f64, f64, f64, f64, OPEN)
    def single_zeros(*args):
        p, q, rz, ry, rx, omega = (value.narrowed(FP32) for value in args[:6])
        return emit_zeros(l, p, q, (rz, ry, rx), omega if is_erf else None, args[6].at())

    return single_zeros


@cache
def make_narrow(count):
    """Intrinsic: a tuple of `count` doubles as floats."""

    @word(tuple_of(FP32, count), tuple_of(FP64, count))
    def narrow(values):
        return [value.narrowed(FP32) for value in values]

    return narrow
