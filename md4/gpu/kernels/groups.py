"""Groups of parameters that several kernels take, and what the launchers make them of.

A group is a NamedTuple whose annotations are the Numba types of its fields; `md4.gpu.compile.Kernel` finds a kernel's
signature from them. Functions marked as device functions are compiled by the kernels that use them.
"""

from typing import NamedTuple

from md4.gpu.device_code import F64, I64, cuda, i64
from md4.gpu.tuning import r_stride


class PairRange(NamedTuple):
    """A chunk of a list of shell pairs, which stands in the whole list's arrays.

    Attributes
    ----------
    start : int64 array
        Pair n of the whole list has the primitive pairs start[n] to start[n + 1] - 1.
    first, first_prim : int64
        First pair and first primitive pair of the chunk.
    """

    start: I64
    first: i64
    first_prim: i64


class Records(NamedTuple):
    """Exponents and centres of the primitive pairs of a whole list; see `md4.gpu.kernels.shell_pairs`.

    Attributes
    ----------
    numbers : float64 array
        `width` of each primitive pair, the first of which are the exponent p and P_z, P_y, P_x.
    width : int64
    """

    numbers: F64
    width: i64


class HermiteIntegrals(NamedTuple):
    """[r] of a chunk: r[t] of bra primitive i and ket primitive k is numbers[(i nket + k) stride + t].

    Attributes
    ----------
    numbers : float64 array
    stride : int64
        Numbers from one primitive quartet to the next.
    nket : int64
        Ket primitives of the chunk.
    """

    numbers: F64
    stride: i64
    nket: i64


class Result(NamedTuple):
    """(ab|cd) of a chunk: the element (ij, kl, ab, cd) is numbers[first + ij s_ij + kl s_kl + ab s_ab + cd s_cd].

    Attributes
    ----------
    numbers : float64 array
    first, s_ij, s_kl, s_ab, s_cd : int64
    """

    numbers: F64
    first: i64
    s_ij: i64
    s_kl: i64
    s_ab: i64
    s_cd: i64


class Grid(NamedTuple):
    """Blocks of threads of a product for each pair of a chunk: rows run fastest, then columns, then pairs.

    Attributes
    ----------
    row_blocks, column_blocks : int64
    """

    row_blocks: i64
    column_blocks: i64


# device functions


def block_place(grid):
    """(row block, column block, pair) of this block of threads (device function)."""
    n = i64(cuda.blockIdx.x)
    rest = n // grid.row_blocks
    return n % grid.row_blocks, rest % grid.column_blocks, rest // grid.column_blocks


def primitives_of(pairs, n):
    """The first primitive pair of pair n of a chunk, and the one after its last (device function)."""
    return pairs.start[pairs.first + n], pairs.start[pairs.first + n + 1]


# for launchers


def pair_range(side):
    """`PairRange` of `md4.engine.PreparedPairs`."""
    return PairRange(side.data.start, side.first, side.first_prim)


def records(side):
    """`Records` of `md4.engine.PreparedPairs`."""
    return Records(side.data.records, side.data.width)


def hermite_integrals(r, ab, cd):
    """`HermiteIntegrals` of the r of two chunks."""
    return HermiteIntegrals(r, r_stride(ab.pairs.l + cd.pairs.l), cd.pairs.nprim)


def result(block):
    """`Result` of a `md4.gpu.targets.DeviceBlock`."""
    return Result(block.array, block.first, *block.strides)
