"""What the work on a primitive quartet begins with: its exponents, R = P - Q, and step 2, [0]^(m) of the operator.

Groups of parameters and device functions that the kernels of `recurrence` and `thread_quartet` share.
"""

from typing import NamedTuple

import numpy as np

from md4.gpu.buffers import Buffer
from md4.gpu.device_code import F32_2D, F64_2D, I32, cuda, f64, i64, jit_device, types, u64
from md4.gpu.emit.scalars import quotient
from md4.gpu.emit.single_zeros import make_narrow, make_single_zeros
from md4.gpu.emit.unrolled import make_pack
from md4.gpu.kernels.groups import Records, survives
from md4.method import operators
from md4.method.boys import single_boys_table
from md4.shells.shell import radial_norm

# Operators whose [0]^(m) are computed in FP32 where all else is; those of the others in FP64 also there.
SINGLE_KINDS = ("coulomb", "erf")
# Numbers that must fit FP32, whose range is 1e-38 to 3e38, stay within these limits.
LARGEST_SINGLE = 1e30
# So do p q and 1 / (p q sqrt(p + q)) of exponents p and q between these, and H of normalised functions.
LEAST_SINGLE_EXPONENT, LARGEST_SINGLE_EXPONENT = 1e-12, 1e15
LEAST_SINGLE_ZERO = 1e-36  # of [0]^(l), in which digits are left
# Its square is so far above the exponents that in FP32 erf is 1/r.
LARGEST_SINGLE_OMEGA = 1e15
LARGEST_SINGLE_DISTANCE = 1e5  # in Bohr: R^L is also in the range
# Of contracted functions, relative to normalised primitives: H of all is in the range, where that of these is.
LARGEST_SINGLE_COEFFICIENT = 1e4


class OperatorArguments(NamedTuple):
    """What [0]^(m) of an operator depends on besides the quartet; see `md4.method.zeros`.

    Attributes
    ----------
    parameter : float64
    table : float64 array, two-dimensional
    """

    parameter: f64
    table: F64_2D


class SingleArguments(NamedTuple):
    """The same for `SINGLE_KINDS` in FP32.

    Attributes
    ----------
    omega : float64
        Of erf, at most `LARGEST_SINGLE_OMEGA`; 0 for 1/r.
    table : float32 array, two-dimensional
        `md4.method.boys.single_boys_table`.
    """

    omega: f64
    table: F32_2D


class PrimitiveQuartets(NamedTuple):
    """The primitive quartets of a chunk; ket primitives run fastest. Or some, listed one by one.

    Attributes
    ----------
    bra, ket : Records
        Of the whole lists.
    first_bra, first_ket : int64
        First primitive pairs of the chunk.
    nket : int64
        Ket primitives of the chunk.
    bra_prims, ket_prims : int32 array
        Of quartets that are listed the numbers of both primitive pairs in the whole lists; of a chunk empty.
    count : int64
        Primitive quartets, below 2^31.
    """

    bra: Records
    ket: Records
    first_bra: i64
    first_ket: i64
    nket: i64
    bra_prims: I32
    ket_prims: I32
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
    """Device function (quartets, n) -> `Separation` of quartet n of `PrimitiveQuartets`."""
    charge_at, separation_of = jit_device(charge), jit_device(separate)

    def separation(quartets, n):
        if quartets.ket_prims.size > 0:
            i, k = i64(quartets.bra_prims[u64(n)]), i64(quartets.ket_prims[u64(n)])
        else:
            of_chunk = quotient(n, quartets.nket)
            i, k = quartets.first_bra + of_chunk, quartets.first_ket + n - of_chunk * quartets.nket
        bra = charge_at(quartets.bra.numbers, i * quartets.bra.width)
        ket = charge_at(quartets.ket.numbers, k * quartets.ket.width)
        return separation_of(bra, ket)

    return jit_device(separation)


def make_any_counts(lanes):
    """Device function (quartets, owners, limits, first): whether any of `lanes` quartets from `first` on counts.

    All lanes of a warp call it, and are told the same; `lanes` is 32 at most.
    """
    counts = jit_device(survives)

    def any_counts(quartets, owners, limits, first):
        if limits.counts.size == 0:
            return True
        n = min(first + min(i64(cuda.threadIdx.x) & 31, i64(lanes - 1)), quartets.count - 1)
        i = quotient(n, quartets.nket)
        ij = owners.bra[quartets.first_bra + i]
        kl = owners.ket[quartets.first_ket + n - i * quartets.nket]
        return cuda.ballot_sync(-1, counts(limits, ij, kl)) != 0

    return jit_device(any_counts)


def make_zeros_upto(kind, l, single=False):
    """Device function (separation, operator) -> tuple of [0]^(m), m = 0..l, of a primitive quartet.

    The operator is of `arguments_group`, the numbers are floats if `single`.
    """
    if single:
        return make_single_zeros_upto(kind, l)
    zeros_upto, pack, orders = operators.zeros_function(kind, jit_device), make_pack(l + 1), l + 1

    def zeros(separation, operator):
        values = cuda.local.array(orders, types.float64)
        s = separation
        zeros_upto(l, s.p, s.q, s.r2, operator.parameter, operator.table, values, 0, 1)
        return pack(values)

    return jit_device(zeros)


def make_single_zeros_upto(kind, l):
    """`make_zeros_upto` in FP32."""
    if kind in SINGLE_KINDS:
        single_zeros = make_single_zeros(l, kind == "erf")

        def zeros(separation, operator):
            s = separation
            return single_zeros(s.p, s.q, s.rz, s.ry, s.rx, operator.omega, operator.table)
    else:
        zeros_upto, narrow = make_zeros_upto(kind, l), make_narrow(l + 1)

        def zeros(separation, operator):
            return narrow(zeros_upto(separation, operator))

    return jit_device(zeros)


# for launchers

# `PrimitiveQuartets.bra_prims` and `ket_prims` of a chunk.
NO_LIST = Buffer(0, (0,), 4, None)


def primitive_quartets(ab, cd):
    """`PrimitiveQuartets` of two `md4.engine.PreparedPairs`."""
    bra, ket, nket = ab.data, cd.data, cd.nprim
    return (
        (bra.records, bra.width), (ket.records, ket.width), ab.first_prim, cd.first_prim, nket, NO_LIST, NO_LIST,
        ab.nprim * nket,
    )  # fmt: skip


def arguments_group(kind, single):
    """The group of an operator's arguments in FP32, if `single`, or in FP64."""
    return SingleArguments if single and kind in SINGLE_KINDS else OperatorArguments


def operator_arguments(context, kind, parameter, single=False, l=None):
    """What belongs to the `arguments_group` of an operator; if `single`, for quartets of total angular momentum `l`.

    Launchers that `DeviceContext.fixed` keeps have its kind and parameter as a key, which is quicker than the operator.
    """
    if single and kind in SINGLE_KINDS:
        return min(LARGEST_SINGLE_OMEGA, parameter) if kind == "erf" else 0.0, context.table(single_boys_table, l)
    return parameter, context.table(operators.kind_table, kind)


class Extent(NamedTuple):
    """What decides whether FP32 has the range for a basis.

    Attributes
    ----------
    exponents : dict
        Least and largest exponent (Bohr^-2) of the shells of each angular momentum.
    distance : float
        No two centres are further apart (Bohr).
    coefficient : float
        The largest one, relative to that of a normalised primitive.
    """

    exponents: dict
    distance: float
    coefficient: float


def extent(basis):
    """`Extent` of a `Basis`."""
    degrees = np.repeat(basis.classes[:, 0], basis.nprims)
    shells = ((l, basis.exponents[degrees == l]) for l in np.unique(degrees).tolist())
    exponents = {l: (float(found.min()), float(found.max())) for l, found in shells}
    coefficient = (basis.largest_coefficients / radial_norm(degrees, basis.exponents)).max()
    return Extent(exponents, float(np.linalg.norm(np.ptp(basis.centres, axis=0))), float(coefficient))


def largest_single_exponent(l):
    """Exponents of bra and ket up to which powers do not overflow FP32, if one of both is as small (Bohr^-2)."""
    return 0.5 * LARGEST_SINGLE ** (1 / max(1, l))


def least_single_exponent(l):
    """Exponents of bra and ket from which on [0]^(l) of both does not vanish in FP32 (Bohr^-2).

    It goes as p^(l - 5/2), and what it is multiplied by as p^(-l / 2).
    """
    return max(LEAST_SINGLE_EXPONENT, LEAST_SINGLE_ZERO ** (1 / (l - 2.5))) if l > 3 else LEAST_SINGLE_EXPONENT


def in_range(where):
    """Whether distances and coefficients of a basis are in the range."""
    return where.distance <= LARGEST_SINGLE_DISTANCE and where.coefficient <= LARGEST_SINGLE_COEFFICIENT


def has_range_of_single(where):
    """Whether distances and exponents of a basis fit FP32, but for the powers of `largest_single_exponent`."""
    least, largest = (pick(end) for pick, end in zip((min, max), zip(*where.exponents.values())))
    return (
        in_range(where) and LEAST_SINGLE_EXPONENT <= 2.0 * least
        and 2.0 * largest <= LARGEST_SINGLE_EXPONENT
    )  # fmt: skip


def fits_single(where, bra, ket, more=0):
    """Whether nothing overflows FP32, or is lost by underflow, in the quartets of two lists.

    Parameters
    ----------
    where : Extent
        Of their basis.
    bra, ket : ListFacts
    more : int
        By how much the degree of r is larger than that of the quartets.
    """
    (least_p, largest_p), (least_q, largest_q) = (
        np.add(where.exponents[pairs.la], where.exponents[pairs.lb]) for pairs in (bra, ket)
    )
    most = largest_single_exponent(bra.l + ket.l + more)
    return bool(
        in_range(where) and min(largest_p, largest_q) <= most
        and least_single_exponent(bra.l + ket.l + more) <= min(least_p, least_q)
        and max(largest_p, largest_q) <= LARGEST_SINGLE_EXPONENT
    )  # fmt: skip
