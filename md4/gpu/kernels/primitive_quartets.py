"""What the work on a primitive quartet begins with: its exponents, R = P - Q, and step 2, [0]^(m) of the operator.

Groups of parameters and device functions that the kernels of `recurrence` and `thread_quartet` share.
"""

from typing import NamedTuple

from md4.gpu.device_code import F64_2D, cuda, f64, i64, jit_device, types
from md4.gpu.emit.scalars import quotient
from md4.gpu.emit.unrolled import make_pack
from md4.gpu.kernels.groups import Records
from md4.method import operators


class OperatorArguments(NamedTuple):
    """What [0]^(m) of an operator depends on besides the quartet; see `md4.method.zeros`.

    Attributes
    ----------
    parameter : float64
    table : float64 array, two-dimensional
    """

    parameter: f64
    table: F64_2D


class PrimitiveQuartets(NamedTuple):
    """The primitive quartets of a chunk; ket primitives run fastest.

    Attributes
    ----------
    bra, ket : Records
        Of the whole lists.
    first_bra, first_ket : int64
        First primitive pairs of the chunk.
    nket : int64
        Ket primitives of the chunk.
    count : int64
        Primitive quartets, below 2^31.
    """

    bra: Records
    ket: Records
    first_bra: i64
    first_ket: i64
    nket: i64
    count: i64


class Charge(NamedTuple):
    """Exponent p and centre of a primitive pair."""

    p: f64
    z: f64
    y: f64
    x: f64


class Separation(NamedTuple):
    """Exponents of a primitive quartet, R = P - Q and its square."""

    p: f64
    q: f64
    rz: f64
    ry: f64
    rx: f64
    r2: f64


# device functions


def charge(numbers, first):
    """`Charge` of the record that begins at `first` (device function)."""
    return Charge(numbers[first], numbers[first + 1], numbers[first + 2], numbers[first + 3])


def separate(one, two):
    """`Separation` of two `Charge` (device function)."""
    rz, ry, rx = one.z - two.z, one.y - two.y, one.x - two.x
    return Separation(one.p, two.p, rz, ry, rx, rz * rz + ry * ry + rx * rx)


def make_separation():
    """Device function (quartets, n) -> `Separation` of quartet n of a chunk."""
    charge_at, separation_of = jit_device(charge), jit_device(separate)

    def separation(quartets, n):
        i = quotient(n, quartets.nket)
        k = n - i * quartets.nket
        bra = charge_at(quartets.bra.numbers, (quartets.first_bra + i) * quartets.bra.width)
        ket = charge_at(quartets.ket.numbers, (quartets.first_ket + k) * quartets.ket.width)
        return separation_of(bra, ket)

    return jit_device(separation)


def make_zeros_upto(kind, l):
    """Device function (separation, operator) -> tuple of [0]^(m), m = 0..l, of a primitive quartet."""
    zeros_upto, pack, orders = operators.zeros_function(kind, jit_device), make_pack(l + 1), l + 1

    def zeros(separation, operator):
        values = cuda.local.array(orders, types.float64)
        s = separation
        zeros_upto(l, s.p, s.q, s.r2, operator.parameter, operator.table, values, 0, 1)
        return pack(values)

    return jit_device(zeros)


# for launchers


def primitive_quartets(ab, cd):
    """`PrimitiveQuartets` of two `md4.engine.PreparedPairs`."""
    bra, ket, nket = ab.data, cd.data, cd.nprim
    return (
        (bra.records, bra.width), (ket.records, ket.width), ab.first_prim, cd.first_prim, nket, ab.nprim * nket,
    )  # fmt: skip


def operator_arguments(context, kind, parameter):
    """`OperatorArguments` of an operator.

    Launchers that `DeviceContext.fixed` keeps have its kind and parameter as a key, which is quicker than the operator.
    """
    return parameter, context.table(operators.operator_table, operators.Operator(kind, parameter))
