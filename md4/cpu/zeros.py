"""Step 2 on the CPU: [0]^(m) of LANES primitive quartets.

1/r and erf(omega r)/r, which nearly all calculations need, have formulas for all lanes at once. They are those of
`md4.method.zeros` and `md4.method.boys`. The other operators go through the functions given there, lane by lane.
"""

from md4.cpu.compile import bound, helper, part
from md4.cpu.vectors import (
    LANES,
    add,
    any_above,
    broadcast,
    choose,
    divide,
    entries,
    floor,
    fma,
    load,
    multiply,
    square_root,
    store,
    subtract,
)
from md4.method import operators
from md4.method.boys import (
    C2, C3, C4, C5, C6, C7, C8, DECAY_COLUMN, FAR, FAR_SLOPE, HALF_SQRT_PI, PER_STEP, STEP,
)  # fmt: skip
from md4.method.zeros import COULOMB_FACTOR

zeros_upto = None  # set by `zeros_of`, for one operator


@part
def near(l, t, table, zeros):
    """F_m(t), m = 0..l, from the Taylor series about the nearest point of the grid; see `make_scaled_boys_upto`."""
    row = floor(fma(t, broadcast(PER_STEP), broadcast(0.5)))
    point = multiply(row, broadcast(STEP))
    d, twice, decay = subtract(point, t), add(point, point), entries(table, row, DECAY_COLUMN)
    f = entries(table, row, l + 7)
    tail = multiply(multiply(broadcast(C7), d), f)
    f = multiply(fma(twice, f, decay), broadcast(1.0 / (2 * l + 13)))
    tail = multiply(multiply(broadcast(C6), d), add(f, tail))
    f = multiply(fma(twice, f, decay), broadcast(1.0 / (2 * l + 11)))
    tail = multiply(multiply(broadcast(C5), d), add(f, tail))
    f = multiply(fma(twice, f, decay), broadcast(1.0 / (2 * l + 9)))
    tail = multiply(multiply(broadcast(C4), d), add(f, tail))
    f = multiply(fma(twice, f, decay), broadcast(1.0 / (2 * l + 7)))
    tail = multiply(multiply(broadcast(C3), d), add(f, tail))
    f = multiply(fma(twice, f, decay), broadcast(1.0 / (2 * l + 5)))
    tail = multiply(multiply(broadcast(C2), d), add(f, tail))
    f = multiply(fma(twice, f, decay), broadcast(1.0 / (2 * l + 3)))
    f = fma(d, add(f, tail), entries(table, row, l))
    store(zeros, l * LANES, f)
    # exp(d), as `md4.method.boys.exponential`
    power = fma(multiply(broadcast(C7), d), fma(broadcast(C8), d, broadcast(1.0)), broadcast(1.0))
    power = fma(multiply(broadcast(C6), d), power, broadcast(1.0))
    power = fma(multiply(broadcast(C5), d), power, broadcast(1.0))
    power = fma(multiply(broadcast(C4), d), power, broadcast(1.0))
    power = fma(multiply(broadcast(C3), d), power, broadcast(1.0))
    power = fma(multiply(broadcast(C2), d), power, broadcast(1.0))
    decay, twice = multiply(decay, fma(d, power, broadcast(1.0))), add(t, t)
    for m in range(l - 1, -1, -1):
        f = multiply(fma(twice, f, decay), broadcast(1.0 / (2 * m + 1)))
        store(zeros, m * LANES, f)


@part
def boys(l, factor, scale, t, table, zeros):
    """factor scale^m F_m(t), m = 0..l."""
    limit = broadcast(float(FAR + FAR_SLOPE * l))
    near(l, choose(t, limit, broadcast(0.0), t), table, zeros)
    power = factor
    for m in range(l + 1):
        store(zeros, m * LANES, multiply(power, load(zeros, m * LANES)))
        power = multiply(power, scale)
    if any_above(t, limit):
        value = divide(multiply(factor, broadcast(HALF_SQRT_PI)), square_root(t))
        ratio = divide(scale, add(t, t))
        for m in range(l + 1):
            store(zeros, m * LANES, choose(t, limit, value, load(zeros, m * LANES)))
            value = multiply(value, multiply(broadcast(2.0 * m + 1.0), ratio))


@part
def coulomb_lanes(l, p, q, r2, parameter, table, numbers, zeros):
    """[0]^(m) of 1/r."""
    product, total = multiply(p, q), add(p, q)
    factor = divide(broadcast(COULOMB_FACTOR), multiply(product, square_root(total)))
    rho = divide(product, total)
    boys(l, factor, multiply(broadcast(-2.0), rho), multiply(rho, r2), table, zeros)


@part
def erf_lanes(l, p, q, r2, omega, table, numbers, zeros):
    """[0]^(m) of erf(omega r)/r."""
    product, total = multiply(p, q), add(p, q)
    factor = divide(broadcast(COULOMB_FACTOR), multiply(product, square_root(total)))
    rho = divide(product, total)
    theta = divide(broadcast(1.0), add(broadcast(1.0), divide(divide(rho, broadcast(omega)), broadcast(omega))))
    narrow = multiply(rho, theta)
    factor = multiply(factor, square_root(theta))
    boys(l, factor, multiply(broadcast(-2.0), narrow), multiply(narrow, r2), table, zeros)


def one_by_one(l, p, q, r2, parameter, table, numbers, zeros):
    """[0]^(m) of any operator, lane by lane; `numbers` has room for three vectors."""
    store(numbers, 0, p)
    store(numbers, LANES, q)
    store(numbers, 2 * LANES, r2)
    for lane in range(LANES):
        exponents = numbers[lane], numbers[LANES + lane]
        zeros_upto(l, *exponents, numbers[2 * LANES + lane], parameter, table, zeros, lane, LANES)


def zeros_of(kind):
    """The function (l, p, q, r2, parameter, table, numbers, zeros) of an operator; all numbers but `l` are vectors."""
    if kind == "coulomb":
        return coulomb_lanes
    if kind == "erf":
        return erf_lanes
    return bound(one_by_one, make=part, zeros_upto=operators.zeros_function(kind, helper))
