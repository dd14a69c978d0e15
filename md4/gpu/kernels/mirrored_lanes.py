"""What a warp and its lanes know of even and odd parts; see `md4.gpu.kernels.digest_mirrored`."""

from typing import NamedTuple

from md4.gpu.device_code import F64, I32, i32, i64, types, u64
from md4.gpu.emit.instructions import address_of
from md4.gpu.emit.scalars import address_at
from md4.gpu.kernels.digest_lanes import KetElement


class MirrorBlock(NamedTuple):
    """(ij|kl) of all bra pairs with all ket pairs of a chunk, in two parts.

    Attributes
    ----------
    even, odd : float64 array
        In C order (ij, kl, ab, cd), with the rows ab and cd of `md4.method.mirror.part_rows`.
    nbra, nket : int64
        Bra pairs and ket pairs.
    """

    even: F64
    odd: F64
    nbra: i64
    nket: i64


class MirrorShape(NamedTuple):
    """Functions of the four shells.

    Attributes
    ----------
    na_even, na_odd, nb_even, nb_odd : int64
        Even and odd functions of the bra's shells; never more odd than even ones.
    nc, nd : int64
    ncd_even : int64
        Pairs of functions c, d of the same parity.
    functions : int32 array
        The even functions a as they are counted in their shell, the odd ones, and the same of b.
    columns : int32 array
        2 n + parity for each c nd + d, with the place n in the rows cd of this parity.
    """

    na_even: i64
    na_odd: i64
    nb_even: i64
    nb_odd: i64
    nc: i64
    nd: i64
    ncd_even: i64
    functions: I32
    columns: I32


class WarpMemory(NamedTuple):
    """Addresses in the shared memory of a warp.

    Attributes
    ----------
    mine : int32
        The lane's own numbers, 128 bytes apart: its number, AO and parts of its sum over d, and those of its sum over
        c (see `lane_sum`), the places of its two numbers (D + D^T)_ab (see `ab_place`), the row whose AO it finds (see
        `own_row`), and the last four numbers of its `Part`.
    rows : int32
        AOs of a tile; -1 minus the shell's first one where the tile has no such function.
    ab : int32
        (D + D^T)_ab of a tile, those of the even part first.
    sums : int32
        Rows of parts of X: 32 for (b or a, c), then 32 for (b or a, d).
    """

    mine: i32
    rows: i32
    ab: i32
    sums: i32


class Part(NamedTuple):
    """The part that a lane reads, and what of it the warp's memory holds; see `WarpMemory`.

    Attributes
    ----------
    parity : int32
    source : int64
        Address of the lane's first integral of the first bra pair.
    quartet : int32
        Bytes of a quartet.
    step : int32
        Bytes from one row ab to the next.
    first, second : int32
        Bytes from the first row ab to those with which the first and the second list of functions a begin.
    """

    parity: i32
    source: i64
    quartet: i32
    step: i32
    first: i32
    second: i32


def part_of_lane(block, ket, shape):
    """`Part` of a lane with its element of the ket (device function).

    The bytes of a quartet are below 2^31; see `md4.gpu.part_plans.TOO_MANY`.
    """
    word = i32(shape.columns[u64(ket.cd)])
    parity, column, ncd = i32(word & 1), i64(word >> 1), i32(shape.ncd_even)
    integrals, even_b, odd_b = address_of(block.even, column), i32(shape.nb_even), i32(shape.nb_odd)
    first, second = i32(0), i32(shape.na_even * shape.nb_even)
    if parity != 0:
        integrals, ncd, even_b, odd_b = address_of(block.odd, column), i32(shape.nc * shape.nd - ncd), odd_b, even_b
        first, second = i32(shape.na_even * shape.nb_odd), i32(0)
    step = i32(8 * ncd)
    quartet = i32(step * i32(shape.na_even * even_b + shape.na_odd * odd_b))
    return Part(parity, address_at(integrals, ket.pair, quartet), quartet, step, i32(step * first), i32(step * second))


class Task(NamedTuple):
    """What a lane works on: its element of the ket, the first integral of its part and whether that is the odd one, and
    the warp's bra pairs `first_bra` to `last_bra` - 1.
    """

    ket: KetElement
    source: i64
    parity: i32
    first_bra: i32
    last_bra: i32


class Tile(NamedTuple):
    """Functions a and b of a bra pair with the lane's element of the ket.

    Attributes
    ----------
    a, b : int32
        First AOs of the two shells.
    first_a, first_even, first_odd : int32
        The first of the even and odd functions a, of the even b, and of the odd b, as they are counted there.
    rows, second_rows : int32
        How many functions a of the lane's first and second list; 0 or less if none, or if its quartet does not count.
    even, odd : int32
        How many functions b.
    every : bool
        The lanes' quartets all count, and the tile has as many functions as there can be, but perhaps for the last a.
    origin, source, second : int64
        Addresses of the quartet's first integral, and of the first ones of both lists.
    row_step, second_step, step : int32
        Bytes from one a of both lists, and from one b, to the next.
    """

    a: i32
    b: i32
    first_a: i32
    first_even: i32
    first_odd: i32
    rows: i32
    second_rows: i32
    even: i32
    odd: i32
    every: types.boolean
    origin: i64
    source: i64
    second: i64
    row_step: i32
    second_step: i32
    step: i32
