"""Step 2 on the CPU: [0]^(m) of LANES primitive quartets.

1/r and erf(omega r)/r, which nearly all calculations need, have code for all lanes at once. It is generated from the
formulas of `md4.method.zeros` and `md4.method.boys`, which are written here for vectors. The other operators go through
the functions of those modules, lane by lane.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils

from md4.cpu.compile import bound, helper, part
from md4.cpu.emit.vectors import (
    ARRAY,
    I64,
    LANES,
    TABLE,
    Memory,
    Value,
    anywhere,
    broadcast,
    f64,
    fma,
    i64,
    load,
    multiply,
    store,
    table_entries,
    vector,
    word,
)
from md4.method import operators
from md4.method.boys import (
    C2,
    C3,
    C4,
    C5,
    C6,
    C7,
    C8,
    DECAY_COLUMN,
    FAR,
    FAR_SLOPE,
    HALF_SQRT_PI,
    PER_STEP,
    STEP,
)
from md4.method.zeros import COULOMB_FACTOR

zeros_upto = zeros_of_coulomb = zeros_of_erf = None  # set by `zeros_of`


def coulomb(p, q, r2, omega):
    """(factor, scale, T) of 1/r, for which [0]^(m) = factor scale^m F_m(T); all are `Value`."""
    rho = p * q / (p + q)
    return COULOMB_FACTOR / (p * q * (p + q).function("sqrt")), rho * -2.0, rho * r2


def erf(p, q, r2, omega):
    """The same of erf(omega r)/r."""
    factor, scale, t = coulomb(p, q, r2, omega)
    theta = 1.0 / (p * q / (p + q) / omega / omega + 1.0)
    return factor * theta.function("sqrt"), scale * theta, t * theta


class Numbers(Memory):
    """The vectors [0]^(m), m = 0..l, and loops over m, while code is generated."""

    def __init__(self, builder, l, data):
        super().__init__(builder, data)
        self.l = l

    def loop(self, begin, step, body, *carried):
        """For m = 0..l, or l-1..0 if `step` is -1: carried = body(m, *carried)."""
        cells = [cgutils.alloca_once_value(self.builder, value.value) for value in carried]
        end = self.builder.add(self.l, I64(1)) if step > 0 else I64(-1)
        with cgutils.for_range_slice(self.builder, begin, end, I64(step), intp=I64, inc=step > 0) as (m, _):
            values = [Value(self.builder, self.builder.load(cell)) for cell in cells]
            for cell, value in zip(cells, body(m, *values)):
                self.builder.store(value.value, cell)


def near(builder, l, t, table, zeros):
    """Writes F_m(t), m = 0..l, from the Taylor series about the nearest point of the grid.

    As `md4.method.boys.make_scaled_boys_upto`: the highest order from the series, the others by recursion.
    """
    row = (t * PER_STEP + 0.5).function("floor")
    point = row * STEP
    d, decay = point - t, table_entries(builder, table, row, I64(DECAY_COLUMN))
    entry = table_entries(builder, table, row, builder.add(l, I64(7)))
    twice_l, tail = builder.sitofp(builder.add(l, l), ir.DoubleType()), 0.0
    for n, c in ((7, C7), (6, C6), (5, C5), (4, C4), (3, C3), (2, C2)):
        tail = d * c * (entry + tail)
        odd = builder.fadd(twice_l, ir.Constant(ir.DoubleType(), 2.0 * n - 1.0))  # 2 (l + n - 1) + 1
        entry = (point * 2.0).times_plus(entry, decay) / odd
    f = d.times_plus(entry + tail, table_entries(builder, table, row, l))
    power = (d * C8 + 1.0).times_plus(d * C7, 1.0)
    for c in (C6, C5, C4, C3, C2, 1.0):
        power = power.times_plus(d * c, 1.0)
    decay, twice = decay * power, t * 2.0
    zeros[l] = f

    def down(m, f):
        odd = builder.sitofp(builder.add(builder.add(m, m), I64(1)), ir.DoubleType())
        f = twice.times_plus(f, decay) * builder.fdiv(ir.Constant(ir.DoubleType(), 1.0), odd)
        zeros[m] = f
        return (f,)

    zeros.loop(builder.sub(l, I64(1)), -1, down, f)


def scaled_boys(builder, l, factor, scale, t, table, zeros):
    """Writes factor scale^m F_m(t), m = 0..l."""
    limit = builder.sitofp(builder.add(builder.mul(l, I64(FAR_SLOPE)), I64(FAR)), ir.DoubleType())
    far = t.above(limit)
    near(builder, l, (t * 0.0).choose(far, t), table, zeros)

    def scaled(m, power):
        zeros[m] = zeros[m] * power
        return (power * scale,)

    zeros.loop(I64(0), 1, scaled, factor)
    with builder.if_then(anywhere(builder, far)):
        ratio = scale / (t * 2.0)

        def asymptotic(m, value):
            zeros[m] = value.choose(far, zeros[m])
            return (value * ratio * builder.sitofp(builder.add(builder.add(m, m), I64(1)), ir.DoubleType()),)

        zeros.loop(I64(0), 1, asymptotic, factor * HALF_SQRT_PI / t.function("sqrt"))


def make_zeros(formula):
    """Intrinsic (l, p, q, r2, parameter, table, numbers, zeros) of an operator given by factor, scale and T."""

    @word(types.void, i64, vector, vector, vector, f64, TABLE, ARRAY, ARRAY)
    def zeros_of_lanes(builder, l, p, q, r2, parameter, table, numbers, zeros):
        p, q, r2 = (Value(builder, value) for value in (p, q, r2))
        scaled_boys(builder, l, *formula(p, q, r2, parameter), table, Numbers(builder, l, zeros))

    return zeros_of_lanes


def one_by_one(l, p, q, r2, parameter, table, numbers, zeros):
    """[0]^(m) of any operator, lane by lane; `numbers` has room for three vectors."""
    store(numbers, 0, p)
    store(numbers, LANES, q)
    store(numbers, 2 * LANES, r2)
    for lane in range(LANES):
        exponents = numbers[lane], numbers[LANES + lane]
        zeros_upto(l, *exponents, numbers[2 * LANES + lane], parameter, table, zeros, lane, LANES)


def mixed(l, p, q, r2, parameter, table, numbers, zeros):
    """[0]^(m) of a `Mixture`; `numbers` has room for l + 1 vectors."""
    omega, of_coulomb, of_erf = parameter
    zeros_of_coulomb(l, p, q, r2, omega, table, numbers, zeros)
    zeros_of_erf(l, p, q, r2, omega, table, numbers, numbers)
    for at in range(0, (l + 1) * LANES, LANES):
        value = multiply(broadcast(of_coulomb), load(zeros, at))
        store(zeros, at, fma(broadcast(of_erf), load(numbers, at), value))


# Operators that have code for all lanes.
FORMULAS = {"coulomb": coulomb, "erf": erf}


def zeros_of(kind):
    """The function (l, p, q, r2, parameter, table, numbers, zeros) of an operator; p, q and r2 are vectors."""
    if kind in FORMULAS:
        return make_zeros(FORMULAS[kind])
    if kind == operators.Mixture.kind:
        return bound(mixed, make=part, zeros_of_coulomb=make_zeros(coulomb), zeros_of_erf=make_zeros(erf))
    return bound(one_by_one, make=part, zeros_upto=operators.zeros_function(kind, helper))
