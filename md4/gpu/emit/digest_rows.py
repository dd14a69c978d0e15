"""Code that digests a tile of integrals by one lane: `rows` functions a by `columns` functions b with one c and d.

Words in the manner of `md4.gpu.emit.vectors`. The integrals I_ab of a tile are a tuple in the order [a][b].
"""

from functools import cache

from md4.gpu.emit.instructions import (
    address_plus,
    global_number,
    load_if,
    mma_8x8x4,
    one_where,
    shared_int,
    shared_real,
    shared_vector,
    store,
)
from md4.gpu.emit.values import FP64, f64, fma, i32, i64, select, tuple_of, word
from md4.gpu.emit.warp_sums import emit_halved


@word(None, i32, i32)
def store_number(address, number):
    """A 32-bit number to shared memory."""
    store(address, [number])


@word(i32, i32, i32)
def number_of_lane(address, n):
    """The 32-bit number in shared memory 128 n bytes after an address."""
    return shared_int(address + n * 128)


@cache
def make_load_tile(rows, columns, every):
    """Intrinsic (address, row_step, step, rows, columns) -> the integrals of a tile.

    They are at address + a row_step + b step, in bytes, in global memory that no one writes meanwhile. Those of a tile
    with fewer functions a or b are zeros there, and nothing is read for them. With `every` the last two arguments are
    not looked at.
    """

    @word(tuple_of(FP64, rows * columns), i64, i32, i32, i32, i32)
    def load_tile(first, row_step, step, rows_left, columns_left):
        values = []
        for a in range(rows):
            row = address_plus(first, row_step, a)
            live = None if every else select(rows_left > a, columns_left, 0)
            for b in range(columns):
                address = address_plus(row, step, b)
                values += [global_number(address)] if every else load_if(address, (live, b))
        return values

    return load_tile


def emit_dots(groups):
    """A sum of products for each list of pairs."""
    totals = []
    for pairs in groups:
        total = None
        for x, y in pairs:
            total = x * y if total is None else fma(x, y, total)
        totals.append(total)
    return totals


@cache
def make_tile_times(rows, columns, over_a):
    """Intrinsic (I, x) -> sum_a I_ab x_a for each b if `over_a`, else sum_b I_ab x_b for each a."""
    inner, outer = (rows, columns) if over_a else (columns, rows)

    @word(tuple_of(FP64, outer), tuple_of(FP64, rows * columns), tuple_of(FP64, inner))
    def tile_times(values, factors):
        lines = [values[b::columns] if over_a else values[b * columns : (b + 1) * columns] for b in range(outer)]
        return emit_dots(zip(line, factors) for line in lines)

    return tile_times


@cache
def make_scale_tile(count):
    """Intrinsic (I, s) -> s I."""

    @word(tuple_of(FP64, count), tuple_of(FP64, count), f64)
    def scale_tile(integrals, s):
        return [x * s for x in integrals]

    return scale_tile


@cache
def make_shared_dot(count):
    """Intrinsic (I, address) -> sum_n I_n x_n with the doubles x at a shared address, a multiple of 16."""

    @word(f64, tuple_of(FP64, count), i32)
    def shared_dot(values, address):
        factors = [x for n in range(0, count - 1, 2) for x in shared_vector(address, 8 * n, FP64)]
        if count % 2:
            factors.append(shared_real(address, 8 * (count - 1)))
        chains = [list(zip(values, factors))[n::4] for n in range(min(4, count))]  # four, for the latency of one
        total, *others = emit_dots(chains)
        for other in others:
            total += other
        return total

    return shared_dot


def sum_place(lane):
    """The first of the sums that a lane gets from `make_tile_sums` (device function)."""
    return i32((lane & 1) * 16 + (lane >> 1 & 1) * 8 + (lane >> 2))


@cache
def make_tile_sums(count):
    """Intrinsic (I, s, lane) -> sums over the warp of s I_n, some of the `count` in each lane.

    The m-th number of a lane is the sum n = 32 m + `sum_place`, if that is below `count`, else nothing of use.
    """

    @word(tuple_of(FP64, -(-count // 32)), tuple_of(FP64, count), f64, i32)
    def tile_sums(values, factor, lane):
        return emit_tile_sums(count, lambda n: values[n] * factor, lane)

    return tile_sums


def emit_tile_sums(count, value, lane):
    """The sums over the warp of `count` values, of which value(n) makes the n-th, in the order of `sum_place`.

    Tensor instructions sum over four lanes each: with a value as the right operand, columns are the groups of four
    lanes, and a left operand with ones in the row n % 8 puts their sums there. The eight columns of a row come to four
    lanes.
    """
    row, groups = lane >> 2, [[0.0, 0.0] for _ in range(0, count, 8)]
    for m in range(min(8, count)):
        chosen = one_where(row, m)
        for g, n in enumerate(range(m, count, 8)):
            groups[g] = mma_8x8x4(groups[g], chosen, value(n))
    sums = [one + other for one, other in groups]
    for mask in (2, 1):
        sums = emit_halved(sums, lane, mask)
    return sums
