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
from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from md4.gpu.emit.instructions import (
    FLOAT,
    FP32,
    I32,
    I64,
    aggregate,
    call_asm,
    element_address,
    fields,
    fma,
    narrowed,
)
from md4.method.boys import SINGLE_FAR, SINGLE_FAR_SLOPE, SINGLE_STEP, SINGLE_TERMS
from md4.method.zeros import COULOMB_FACTOR

f64 = types.float64

# Added to a number below 2^22 it leaves the nearest integer in the low bits of the sum.
ROUNDING, ROUNDING_BITS = 1.5 * 2**23, 0x4B400000
LOG2_E = float(np.float32(1 / log(2)))
LOG2_E_REST = 1 / log(2) - LOG2_E


def constant(value):
    """An FP32 constant; LLVM writes it as the double that it is equal to."""
    return ir.Constant(FLOAT, float(np.float32(value)))


def negative(builder, x):
    """-x; the dialect of LLVM that the device's compiler reads on all architectures has no fneg."""
    return builder.fsub(constant(-0.0), x)


def approximate(builder, name, x):
    """The device's approximation 'rcp' (1/x), 'rsqrt' (1/sqrt(x)) or 'ex2' (2^x); subnormal numbers count as 0."""
    return call_asm(builder, FLOAT, [x], f"{name}.approx.ftz.f32 $0, $1;", "=f,f")


def reciprocal(builder, x):
    """1/x to the last bit, by a step of Newton's method."""
    first = approximate(builder, "rcp", x)
    return fma(builder, first, fma(builder, negative(builder, x), first, constant(1.0)), first)


def exponential(builder, t):
    """exp(-t) of t from 0 to 50; the product with log2(e) has more digits than FP32."""
    power = builder.fmul(t, constant(-LOG2_E))
    rest = fma(builder, t, constant(-LOG2_E), negative(builder, power))
    rest = fma(builder, t, constant(-LOG2_E_REST), rest)
    value = approximate(builder, "ex2", power)
    return fma(builder, value, builder.fmul(rest, constant(log(2))), value)


def table_row(builder, base, t):
    """(T0 - t, the row of the table for T0), T0 the grid point nearest to `t`."""
    shifted = fma(builder, t, constant(1 / SINGLE_STEP), constant(ROUNDING))
    row = builder.sub(builder.bitcast(shifted, I32), I32(ROUNDING_BITS))
    point = builder.fsub(shifted, constant(ROUNDING))
    names, last = ", ".join(f"${n}" for n in range(SINGLE_TERMS)), SINGLE_TERMS
    text = f"ld.global.nc.v{SINGLE_TERMS}.f32 {{{names}}}, [${last}];"
    kind, constraints = ir.LiteralStructType([FLOAT] * SINGLE_TERMS), ",".join(["=f"] * SINGLE_TERMS + ["l"])
    place = builder.add(base, builder.mul(builder.sext(row, I64), I64(4 * SINGLE_TERMS)))
    numbers = fields(builder, call_asm(builder, kind, [place], text, constraints), SINGLE_TERMS)
    return fma(builder, point, constant(SINGLE_STEP), negative(builder, t)), numbers


def boys(builder, l, t, base):
    """F_m(t), m = 0..l, for t up to the table's end."""
    step, numbers = table_row(builder, base, t)
    value = numbers[-1]
    for number in numbers[-2::-1]:
        value = fma(builder, step, value, number)
    values = [value]
    if l > 0:
        twice, decay = builder.fadd(t, t), exponential(builder, t)
    for m in range(l - 1, -1, -1):
        value = builder.fmul(fma(builder, twice, value, decay), constant(1 / (2 * m + 1)))
        values.append(value)
    return values[::-1]


def least(builder, x, limit):
    """The less of a number and a constant."""
    return builder.select(builder.fcmp_ordered("<", x, limit), x, limit)


def emit_zeros(builder, l, p, q, separation, omega, base):
    """[0]^(m), m = 0..l; `omega` is that of erf, None for 1/r, and `base` the table's address."""
    total, product, (rz, ry, rx) = builder.fadd(p, q), builder.fmul(p, q), separation
    rho = builder.fmul(product, reciprocal(builder, total))
    factor = builder.fmul(approximate(builder, "rcp", product), approximate(builder, "rsqrt", total))
    factor = builder.fmul(factor, constant(COULOMB_FACTOR))
    if omega is not None:  # theta = omega^2 / (rho + omega^2), which may be below FP32's range, but not beyond it
        total = fma(builder, omega, omega, rho)
        theta = builder.fmul(builder.fmul(omega, reciprocal(builder, total)), omega)
        factor = builder.fmul(factor, builder.fmul(omega, approximate(builder, "rsqrt", total)))
        rho = builder.fmul(rho, theta)
    r2 = fma(builder, rz, rz, fma(builder, ry, ry, builder.fmul(rx, rx)))
    t, end = builder.fmul(rho, r2), constant(SINGLE_FAR + SINGLE_FAR_SLOPE * l)
    is_near = builder.fcmp_ordered("<", t, end)
    scale, power = builder.fmul(rho, constant(-2.0)), factor
    far = builder.fmul(builder.fmul(factor, constant(sqrt(pi) / 2)), approximate(builder, "rsqrt", t))
    ratio = negative(builder, approximate(builder, "rcp", r2)) if l > 0 else None
    zeros = []
    for m, value in enumerate(boys(builder, l, least(builder, t, end), base)):
        zeros.append(builder.select(is_near, builder.fmul(power, value), far))
        if m < l:
            power = builder.fmul(power, scale)
            far = builder.fmul(builder.fmul(far, constant(2 * m + 1)), ratio)
    return zeros


@cache
def make_single_zeros(l, is_erf):
    """Intrinsic (p, q, rz, ry, rx, omega, table) -> tuple of [0]^(m), m = 0..l, of 1/r, or of erf(omega r)/r.

    Numbers are doubles, R = P - Q in the order z, y, x. `omega` has no meaning for 1/r; the table is
    `md4.method.boys.single_boys_table` of l.
    """
    kind = types.UniTuple(types.float32, l + 1)

    @intrinsic
    def single_zeros(typingctx, p, q, rz, ry, rx, omega, table):
        def codegen(context, builder, signature, args):
            numbers = [narrowed(builder, value, FP32) for value in args[:6]]
            base = element_address(context, builder, signature.args[6], args[6], I64(0))
            values = emit_zeros(builder, l, *numbers[:2], numbers[2:5], numbers[5] if is_erf else None, base)
            return aggregate(builder, context.get_value_type(kind), values)

        return kind(f64, f64, f64, f64, f64, f64, table), codegen

    return single_zeros


@cache
def make_narrow(count):
    """Intrinsic: a tuple of `count` doubles as floats."""
    kind, wide = types.UniTuple(types.float32, count), types.UniTuple(f64, count)

    @intrinsic
    def narrow(typingctx, values):
        def codegen(context, builder, signature, args):
            values = [narrowed(builder, value, FP32) for value in fields(builder, args[0], count)]
            return aggregate(builder, context.get_value_type(kind), values)

        return kind(wide), codegen

    return narrow
