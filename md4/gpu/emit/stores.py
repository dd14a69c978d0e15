"""Storing register tiles: as an operand of the next product, into results with any strides, to shared memory.

Words on the tiles of `md4.gpu.emit.tile_products`. Rows that are those of an H matrix come in the order of
`md4.gpu.staircases` and are stored by their table: rows[first_row + n] is the place of the lane's row first_row + n, -1
for padding, where nothing is stored.
"""

from functools import cache

from md4.gpu.emit.instructions import global_int, load, load_if, store_if
from md4.gpu.emit.tile_products import Lane, neighbours, tile_kind
from md4.gpu.emit.values import OPEN, i32, i64, when, word


@cache
def make_write_out(rounds, stride, add=False):
    """Intrinsic (array, index, address, count): doubles of shared memory to global memory, or added to what is there.

    Those at address + 8 n go to array[index + n] for n = 0, `stride`, ..., `rounds` of them, as far as n < count.
    """
    steps = range(0, rounds * stride, stride)

    @word(None, OPEN, i64, i32, i64)
    def write_out(array, index, address, count):
        target, room = array.at(index), count.i32
        values = [load("shared", address, 8 * n, live=(room, n))[0] for n in steps]
        for n, value in zip(steps, values):
            total = load("global", target, 8 * n, live=(room, n))[0] + value if add else value
            store_if(target, [total], (room, n), offset=8 * n)

    return write_out


def places(table, first, steps):
    """Yields (n, what a table of int32 holds n items from the lane's first on) for `steps`."""
    base = table.at(first, 4)
    for n in steps:
        yield n, global_int(base, 4 * n)


@cache
def make_store_panels(rows8, nt, turned):
    """Intrinsic (tile, array, first, stride, ncols, rows, first_row): the tile as operand of the next product.

    Row n of column fragment j goes to the 8 doubles array[first + j stride + 8 n:], for j < ncols; `first` holds the
    lane's first column, which is a q.
    """
    lane = Lane(rows8, nt, turned)

    @word(None, tile_kind(rows8, nt), OPEN, i64, i64, i64, OPEN, i64)
    def store_panels(c, array, first, stride, ncols, rows, first_row):
        base, step = array.at(first), stride * 8
        for row, place in places(rows, first_row, lane.rows):
            with when(place >= 0):
                here = base + place.i64 * 64
                for j in range(nt):
                    values = [c[lane.index(row, column)] for column in lane.columns if column // 8 == j]
                    store_if(here + step * j, values, (ncols, j))

    return store_panels


@cache
def make_store_columns(rows8, nt):
    """Intrinsic that writes a tile of (ab|cd) element by element, rows in their own order.

    (tile, array, first, column, ncol, group, s_group, s_column, s_row, nrow): column c of the matrix is column
    c % group of group c // group, at first + (c // group) s_group + (c % group) s_column; `column` is the lane's first,
    `ncol` their number in all, `first` holds the lane's row, `nrow` what is left from there on. Where rows are
    contiguous, 8 lanes store 64 contiguous bytes.
    """
    lane = Lane(rows8, nt)

    @word(None, tile_kind(rows8, nt), OPEN, *[i64] * 8)
    def store_columns(c, array, first, first_column, ncol, group, s_group, s_column, s_row, nrow):
        base, row_step = array.at(first), s_row * 64
        for column in lane.columns:
            this = first_column + column
            with when(this < ncol):
                address = base + grouped_offset(this, group, s_group, s_column) * 8
                for row in lane.rows:
                    store_if(address, [c[lane.index(row, column)]], (nrow, row))
                    address = address + row_step

    return store_columns


@cache
def make_store_rows(rows8, nt):
    """Intrinsic that writes a turned tile of (ab|cd) element by element, rows by their table.

    (tile, array, first, column, ncol, group, s_group, s_column, s_row, rows, first_row), columns as in
    `make_store_columns`; row n is at `first` + n s_row. Where columns are contiguous, 8 lanes store 64 contiguous
    bytes.
    """
    lane = Lane(rows8, nt, turned=True)

    @word(None, tile_kind(rows8, nt), OPEN, *[i64] * 7, OPEN, i64)
    def store_rows(c, array, first, first_column, ncol, group, s_group, s_column, s_row, rows, first_row):
        base, columns = array.at(first), []
        for column in lane.columns:
            columns.append((column, base + grouped_offset(first_column + column, group, s_group, s_column) * 8))
        step, room = s_row * 8, ncol - first_column
        for row, place in places(rows, first_row, lane.rows):
            with when(place >= 0):
                offset = place.i64 * step
                for column, address in columns:
                    store_if(address + offset, [c[lane.index(row, column)]], (room, column))

    return store_rows


def grouped_offset(n, group, s_group, s_item):
    """(n // group) s_group + (n % group) s_item; n below 2^31, where division takes a third of the instructions."""
    quotient = (n.i32 // group.i32).u64
    rest = n - quotient * group
    return quotient * s_group + rest * s_item


@cache
def make_scale_columns(rows8, nt):
    """Intrinsic (tile, array, first, step, room): each column times its weight.

    The lane's n-th column from its first on has array[first + n step], for n < room, the others 0.
    """
    lane, tile = Lane(rows8, nt), tile_kind(rows8, nt)

    @word(tile, tile, OPEN, i64, i64, i64)
    def scale_columns(c, array, first, step, room):
        base, step = array.at(first), step * 8
        for column in lane.columns:
            (weight,) = load_if(base + step * column, (room, column))
            for row in lane.rows:
                k = lane.index(row, column)
                c[k] = c[k] * weight
        return c

    return scale_columns


@cache
def make_stage_tile(rows8, nt, tiles=1):
    """Intrinsic that brings `tiles` tiles, side by side in one, to shared memory in the same order of rows and columns.

    (tile, address, rows, first_row, row_stride, columns, first_column, col_stride, step): element (row, column) of the
    tables goes to `address` + row row_stride + column col_stride, in bytes, those of the next tile `step` further on.
    """
    lane = Lane(rows8, tiles * nt)

    @word(None, tile_kind(rows8, tiles * nt), i32, OPEN, i64, i32, OPEN, i64, i32, i32)
    def stage_tile(c, address, rows, first_row, row_stride, columns, first_column, col_stride, step):
        found = [(n, live, address + live * row_stride) for n, live in places(rows, first_row, lane.rows)]
        for column, place in places(columns, first_column, neighbours(nt)):
            with when(place >= 0):
                offset = place * col_stride
                for n in range(tiles):
                    for row, live, here in found:
                        value = c[lane.index(row, column + 8 * nt * n)]
                        store_if(here + offset, [value], (live, -1), space="shared")
                    offset = offset + step

    return stage_tile
