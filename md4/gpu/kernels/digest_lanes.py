"""What a lane has to itself where warps digest rows ab: an element of the ket, and sums of parts of X.

For `md4.gpu.kernels.digest_rows` and `md4.gpu.kernels.digest_mirrored`.
"""

from typing import NamedTuple

from md4.gpu.device_code import f64, i32, i64, u64
from md4.gpu.emit.digest_rows import number_of_lane, store_number
from md4.gpu.emit.scalars import add_at, address_at, load_shared, quotient

THREADS = 128  # of a block
# (blocks that share a multiprocessor, most doubles of a thread in registers)
BLOCKS_OF_DOUBLES = ((6, 17), (5, 23), (4, 41), (3, 63))
# Bytes from one row of 2 x 32 parts of X in shared memory to the next (`digest_rows.warp_bytes`); a multiple of 128
# would put them in one bank.
SUM_ROW = 520

# More than there are pairs.
ANY = i32((1 << 31) - 1)


class Shape(NamedTuple):
    """Functions of the four shells."""

    na: i64
    nb: i64
    nc: i64
    nd: i64


class KetElement(NamedTuple):
    """One c and d of a ket pair.

    Attributes
    ----------
    pair : int32
        The ket pair in the chunk.
    place : int32
        Its place in the list, less that of the chunk's first bra pair in its own.
    cd : int32
        c nd + d with c and d counted in their shells.
    c, d : int32
        The two AOs.
    weight : float64
        The part of a quartet's weight that is the ket pair's. 0 for lanes beyond the last element, which repeat it.
    bras : int32
        Quartets count with bra pairs of the chunk below this number.
    """

    pair: i32
    place: i32
    cd: i32
    c: i32
    d: i32
    weight: f64
    bras: i32


def ket_element(lane, first, last, lists, limits, shape):
    """`KetElement` of a lane of the warp whose elements are `first` to `last` - 1 (device function)."""
    ncd = i32(shape.nc * shape.nd)
    element = min(first + lane, last - 1)
    pair = quotient(element, ncd)
    cd = i32(element - pair * ncd)
    c_first, d_first = lists.ao_ket[lists.first_ket + pair, 0], lists.ao_ket[lists.first_ket + pair, 1]
    c = i32(quotient(cd, shape.nd))
    weight, bras = 1.0 if first + lane < last else 0.0, ANY
    if limits.counts.size > 0 and limits.by_ket:
        bras = i32(limits.counts[lists.first_ket + pair] - lists.first_bra)
    return KetElement(
        i32(pair), i32(lists.first_ket + pair - lists.first_bra), cd, i32(c_first + c),
        i32(d_first + cd - c * shape.nd), 0.5 * weight if c_first == d_first else weight, bras,
    )  # fmt: skip


def bra_pair(lists, limits, pair):
    """First AOs of the two shells of a bra pair, and the end of the ket pairs with which it counts (device function).

    The end is counted as `KetElement.place` is.
    """
    place, end = u64(lists.first_bra + pair), ANY
    if limits.counts.size > 0 and not limits.by_ket:
        end = i32(limits.counts[place] - lists.first_bra)
    return i32(lists.ao_bra[place, 0]), i32(lists.ao_bra[place, 1]), end


def lane_sum(over_c, lane, first, last, lists, shape):
    """Which of the parts that 32 lanes write to a row of shared memory a lane sums up over d or c (device function).

    There is a sum over d for each (kl, c), and a sum over c for each (kl, d). Those that have parts among the warp's
    elements, which are `first` to `last` - 1, are shared out to the lanes in this order.

    Returns
    -------
    ao : int32
        The AO c (or d) that the sum belongs to.
    packed : int32
        Four numbers in one. Bits 0 to 4: the first part, by its lane; 5 to 10: how many parts, 0 for a lane with
        nothing to sum; 11 to 15 and from 16: the lane takes rows row, row + sharing, ..., since `sharing` lanes share
        the rows of one sum.
    """
    nc, nd = shape.nc, shape.nd
    ncd = nc * nd
    if over_c:
        width, shift, step, run = nd, 1, nd, ncd
        start, end = quotient(first, ncd) * nd, (quotient(last - 1, ncd) + 1) * nd
    else:
        width, shift, step, run = nc, nd, 1, nd
        start, end = quotient(first, nd), quotient(last - 1, nd) + 1
    sums = end - start
    sharing, row = quotient(32, sums), quotient(lane, sums)
    u = start + lane - row * sums
    if sums > 32:  # there are so many d that hardly one has two elements here: each lane takes its own element
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
    count, ao = (quotient(stop - begin + step - 1, step) if stop > begin else i64(0)), i32(u - pair * width)
    if count > 0:
        ao = i32(lists.ao_ket[lists.first_ket + pair, 1 if over_c else 0] + ao)
    begin, row = begin - first if count > 0 else i64(0), min(row, i64(31))
    return ao, i32(begin | count << 5 | row << 11 | sharing << 16)


def keep_lane(mine, lane, over_d, over_c):
    """Puts a lane's number and its two `lane_sum` to shared memory, 128 bytes apart (device function)."""
    store_number(mine, lane)
    store_number(i32(mine + 128), over_d[0])
    store_number(i32(mine + 256), over_d[1])
    store_number(i32(mine + 384), over_c[0])
    store_number(i32(mine + 512), over_c[1])


def add_lane_sums(ao, packed, step, address, rows_b, rows, to_b, to_a, row_bytes):
    """Makes a lane's sums of rows at a shared address, and adds them to X (device function).

    `ao` and `packed` are those of `lane_sum`. The parts of a sum are `step` bytes apart. Of `rows` rows the first
    `rows_b` belong to the functions b whose first row of X begins at the address `to_b`, the others to the functions a
    at `to_a`.
    """
    begin, count, n, sharing = i32(packed & 31), i32(packed >> 5 & 63), i32(packed >> 11 & 31), i32(packed >> 16)
    to_b, to_a = address_at(to_b, ao, 8), address_at(to_a, ao, 8)
    while n < rows and count > 0:
        other = i32(n + sharing)  # two rows at a time, for the latency of one
        part, between = i32(address + 8 * begin + SUM_ROW * n), i32(SUM_ROW * sharing if other < rows else 0)
        end, total, total_other = i32(part + count * step), 0.0, 0.0
        while part < end:
            total += load_shared(part)
            total_other += load_shared(i32(part + between))
            part = i32(part + step)
        add_at(address_at(to_b, n, row_bytes) if n < rows_b else address_at(to_a, i32(n - rows_b), row_bytes), total)
        if other < rows:
            n = i32(other - rows_b)
            add_at(address_at(to_b, other, row_bytes) if n < 0 else address_at(to_a, n, row_bytes), total_other)
        n = i32(other + sharing)


def add_listed_sums(ao, packed, step, address, aos, rows, to, row_bytes):
    """As `add_lane_sums` of `rows` rows, whose AOs are successive 32-bit numbers at the shared address `aos`.

    Row n of parts belongs to row aos[n] of X, which begins at the address `to`, and to none if that is -1.
    """
    begin, count, n, sharing = i32(packed & 31), i32(packed >> 5 & 63), i32(packed >> 11 & 31), i32(packed >> 16)
    to = address_at(to, ao, 8)
    while n < rows and count > 0:
        other = i32(n + sharing)  # two rows at a time, for the latency of one
        one_ao = number_of_lane(i32(aos + 4 * n), 0)
        other_ao = number_of_lane(i32(aos + 4 * other), 0) if other < rows else i32(-1)
        part, between = i32(address + 8 * begin + SUM_ROW * n), i32(SUM_ROW * sharing if other < rows else 0)
        end, total, total_other = i32(part + count * step), 0.0, 0.0
        while part < end:
            total += load_shared(part)
            total_other += load_shared(i32(part + between))
            part = i32(part + step)
        if one_ao >= 0:
            add_at(address_at(to, one_ao, row_bytes), total)
        if other_ao >= 0:
            add_at(address_at(to, other_ao, row_bytes), total_other)
        n = i32(other + sharing)
