"""Groups of parameters that several kernels take, and what the launchers make them of.

A group is a NamedTuple whose annotations are the Numba types of its fields; `md4.gpu.compile.Kernel` finds a kernel's
signature from them. Functions marked as device functions are compiled by the kernels that use them.

Launchers write a group as a plain tuple in the order of its fields, which Python makes and takes apart several times as
fast as a NamedTuple: there are thousands of launches in a second.
"""

from functools import cache
from inspect import get_annotations
from typing import NamedTuple

from md4.gpu.buffers import Buffer
from md4.gpu.device_code import F32, F64, I32, I64, cuda, i64, types
from md4.gpu.staircases import level_ends, row_table


@cache
def with_floats(group, *names):
    """A group like another one, whose arrays of these names are in FP32."""
    return NamedTuple(f"Single{group.__name__}", {**get_annotations(group), **dict.fromkeys(names, F32)}.items())


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


class Limits(NamedTuple):
    """Which quartets count: each pair of one list counts with so many pairs of the other one, the first of that list.

    Kernels may leave the r, (ab|q] and integrals of all other quartets unwritten, and never use them. Pairs are those
    of the whole lists: pair n of a chunk is pair `PairRange.first` + n.

    Attributes
    ----------
    counts : int32 array
        With how many ket pairs each bra pair counts, or with how many bra pairs each ket pair. It is empty if all
        quartets count.
    by_ket : bool
        The numbers are those of ket pairs.
    """

    counts: I32
    by_ket: types.boolean


class Owners(NamedTuple):
    """The pair of each primitive pair of two whole lists.

    Attributes
    ----------
    bra, ket : int64 array
    """

    bra: I64
    ket: I64


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


class Panel(NamedTuple):
    """H of a whole list for products on tensor cores, in a form of `md4.gpu.h_layout` that is padded to blocks of 8.

    Attributes
    ----------
    h : float64 array
        [primitive pair][block of 8 Hermite functions][rows8 blocks of 8 rows], 64 numbers a block.
    rows8, steps : int64
        Blocks of 8 rows and of 8 Hermite functions.
    """

    h: F64
    rows8: i64
    steps: i64


class Staircase(NamedTuple):
    """Which products of a panel count, and in which order its rows are; see `md4.gpu.staircases`.

    Attributes
    ----------
    reach : int32 array
        Blocks of 8 rows that count of each block of 8 Hermite functions.
    depths : int32 array
        Blocks of 8 Hermite functions that count of each row block of the grid.
    rows : int32 array
        Place of each row, -1 for padding.
    """

    reach: I32
    depths: I32
    rows: I32


class Levels(NamedTuple):
    """A staircase of a tile that holds all rows, as `md4.gpu.emit.tile_products.make_staircase_products` wants it.

    Attributes
    ----------
    ends : int32 array
        Steps up to which each number of row blocks is needed; see `md4.gpu.staircases.level_ends`.
    rows : int32 array
        Place of each row, -1 for padding.
    """

    ends: I32
    rows: I32


class HalfTransformed(NamedTuple):
    """(ab|q] of a chunk: numbers[((k nq8 + block) npair + ij) nab + ab][8 q] for block `block` of ket primitive k.

    Attributes
    ----------
    numbers : float64 array
    nq8 : int64
        Blocks of 8 Hermite functions q.
    npair, nab : int64
        Bra pairs of the chunk, and functions ab.
    """

    numbers: F64
    nq8: i64
    npair: i64
    nab: i64


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
    """(row block, column block, pair) of this block of threads (device function).

    In this order: with // before %, the compiler does not see that all threads of a warp have the same numbers.
    """
    row_block, rest = i64(cuda.blockIdx.x) % grid.row_blocks, i64(cuda.blockIdx.x) // grid.row_blocks
    return row_block, rest % grid.column_blocks, rest // grid.column_blocks


def primitives_of(pairs, n):
    """The first primitive pair of pair n of a chunk, and the one after its last (device function)."""
    return pairs.start[pairs.first + n], pairs.start[pairs.first + n + 1]


def survives(limits, ij, kl):
    """Whether the quartet of two pairs counts (device function)."""
    if limits.counts.size == 0:
        return True
    return ij < limits.counts[kl] if limits.by_ket else kl < limits.counts[ij]


def end_of_kets(limits, ij, end):
    """`end`, or where before it the ket pairs end that may count with a bra pair (device function)."""
    if limits.counts.size == 0 or limits.by_ket:
        return end
    return min(end, i64(limits.counts[ij]))


def any_survives(counts, its_own, one, first, last):
    """Whether a pair counts with any pair of the other list from `first` to `last`, for a whole warp (device function).

    `counts` are those of `Limits`: of the list of pair `one` if `its_own`, else of the other list.
    """
    if counts.size == 0:
        return True
    if its_own:
        return first < counts[one]
    found, n = False, first + (i64(cuda.threadIdx.x) & 31)
    while n <= last:
        found = found or one < counts[n]
        n += 32
    return cuda.ballot_sync(-1, found) != 0


# for launchers

# `Limits` where all quartets count.
NO_LIMITS = Buffer(0, (0,), 4, None), False


def pair_range(side):
    """`PairRange` of `md4.engine.PreparedPairs`."""
    return side.data.start, side.first, side.first_prim


def owners(ab, cd):
    """`Owners` of two `md4.engine.PreparedPairs`."""
    return ab.data.owner, cd.data.owner


def records(side):
    """`Records` of `md4.engine.PreparedPairs`."""
    return side.data.records, side.data.width


def levels_of(context, pairs, rows8, turned):
    """`Levels` of a list for a tile of `rows8` blocks of 8 rows."""
    blocks = (rows8, 1) if turned else (rows8 // 2, 2)
    return context.table(level_ends, pairs.h_class, *blocks), context.table(row_table, pairs.h_class, rows8)


def result(block):
    """`Result` of a `md4.gpu.targets.DeviceBlock`."""
    return block.array, block.first, *block.strides
