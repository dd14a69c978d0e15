"""What a lane of `md4.gpu.kernels.digest_rows` has to itself: an element of the ket, and sums over the lanes of X."""

from typing import NamedTuple

from md4.gpu.device_code import i32, i64, types
from md4.gpu.emit.scalars import add_at, address_at, load_shared, quotient
from md4.gpu.tuning import DIGEST_ROWS

# Bytes from one row of parts of X in shared memory to the next; see `digest_rows.WarpMemory`.
SUM_ROW = DIGEST_ROWS.sum_row


class Shape(NamedTuple):
    """Functions of the four shells, and the most functions b of a tile."""

    na: i64
    nb: i64
    nc: i64
    nd: i64
    b_step: i64


class KetElement(NamedTuple):
    """One c and d of a ket pair.

    Attributes
    ----------
    pair : int64
        The ket pair in the chunk.
    cd : int32
        c nd + d with c and d counted in their shells.
    c, d : int32
        The two AOs.
    c_first, d_first : int64
        First AOs of their shells.
    live : bool
        False for lanes beyond the last element: they repeat the last one with weight 0.
    """

    pair: i64
    cd: i32
    c: i32
    d: i32
    c_first: i64
    d_first: i64
    live: types.boolean


class LaneSum(NamedTuple):
    """Which of the parts that 32 lanes write to a row of shared memory a lane sums up.

    Attributes
    ----------
    begin, reach, step : int32
        Bytes to the first part from the row's begin, from there to the end, and from one part to the next. A lane with
        nothing to sum has reach 0.
    ao : int32
        The AO c (or d) that the sum belongs to.
    row, sharing : int32
        The lane takes rows row, row + sharing, ...: `sharing` lanes share the rows of one sum.
    """

    begin: i32
    reach: i32
    step: i32
    ao: i32
    row: i32
    sharing: i32


def ket_element(lane, first, last, lists, shape):
    """`KetElement` of a lane of the warp whose elements are `first` to `last` - 1 (device function)."""
    ncd = i32(shape.nc * shape.nd)
    element = min(first + lane, last - 1)
    pair = quotient(element, ncd)
    cd = i32(element - pair * ncd)
    c_first, d_first = lists.ao_ket[lists.first_ket + pair, 0], lists.ao_ket[lists.first_ket + pair, 1]
    c = i32(quotient(cd, shape.nd))
    return KetElement(
        pair, cd, i32(c_first + c), i32(d_first + cd - c * shape.nd), c_first, d_first, first + lane < last
    )


def lane_sum(over_c, lane, first, last, lists, shape):
    """The `LaneSum` over d or over c of a lane; the warp's elements are `first` to `last` - 1 (device function).

    There is a sum over d for each (kl, c), and a sum over c for each (kl, d). Those that have parts among the warp's
    elements are shared out to the lanes in this order.
    """
    nc, nd = shape.nc, shape.nd
    ncd = nc * nd
    if over_c:
        width, shift, step, run = nd, 1, nd, ncd
        start, end = quotient(first, ncd) * nd, (quotient(last - 1, ncd) + 1) * nd
    else:
        width, shift, step, run = nc, nd, 1, nd
        start, end = quotient(first, nd), quotient(last - 1, nd) + 1
    count = end - start
    sharing, row = quotient(32, count), quotient(lane, count)
    u = start + lane - row * count
    if count > 32:  # there are so many d that hardly one has two elements here: each lane takes its own element
        sharing, row, run = i64(1), i64(0), i64(1)
        begin = min(first + lane, last)
        pair = quotient(begin, ncd)
        u = pair * nd + (begin - pair * ncd) - quotient(begin - pair * ncd, nd) * nd
    else:
        pair = quotient(u, width)
        begin = pair * ncd + (u - pair * width) * shift
    stop = min(begin + run, last)
    if begin < first:
        begin += quotient(first - begin + step - 1, step) * step
    if row >= sharing:
        stop = begin
    reach, ao = i32(8 * (stop - begin)), i32(u - pair * width)
    if reach > 0:
        ao = i32(lists.ao_ket[lists.first_ket + pair, 1 if over_c else 0] + ao)
    return LaneSum(i32(8 * (begin - first)), reach, i32(8 * step), ao, i32(row), i32(sharing))


def add_lane_sums(mine, address, rows_b, rows, to_b, to_a, row_bytes):
    """Makes a lane's sums of rows at a shared address, and adds them to X (device function).

    Of `rows` rows the first `rows_b` belong to the functions b whose first row of X begins at the address `to_b`, the
    others to the functions a at `to_a`.
    """
    to_b, to_a = address_at(to_b, mine.ao, 8), address_at(to_a, mine.ao, 8)
    n = mine.row
    while n < rows:
        part = i32(i32(address + mine.begin) + SUM_ROW * n)
        end, total = i32(part + mine.reach), 0.0
        while part < end:
            total += load_shared(part)
            part = i32(part + mine.step)
        if mine.reach > 0:
            target = address_at(to_b, n, row_bytes) if n < rows_b else address_at(to_a, i32(n - rows_b), row_bytes)
            add_at(target, total)
        n = i32(n + mine.sharing)
