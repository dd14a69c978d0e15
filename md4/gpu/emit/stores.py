"""Storing register tiles: as an operand of the next product, into results with any strides, to shared memory.

Intrinsics on the tiles of `md4.gpu.emit.tile_products`. Rows that are those of an H matrix come in the order of
`md4.gpu.staircases` and are stored by their table: rows[first_row + n] is the place of the lane's row first_row + n, -1
for padding, where nothing is stored.
"""

from functools import cache

from numba.cuda import types
from numba.cuda.extending import intrinsic

from md4.gpu.emit.instructions import (
    I32,
    I64,
    aggregate,
    doubles_if,
    element_address,
    fields,
    global_int,
    store_if,
)
from md4.gpu.emit.tile_products import Lane, neighbours, tile_kind

i32, i64 = types.int32, types.int64


@cache
def make_write_out(rounds, stride, add=False):
    """Intrinsic (array, index, address, count): doubles of shared memory to global memory, or added to what is there.

    Those at address + 8 n go to array[index + n] for n = 0, `stride`, ..., `rounds` of them, as far as n < count.
    """

    @intrinsic
    def write_out(typingctx, array, index, address, count):
        def codegen(context, builder, signature, args):
            target = element_address(context, builder, signature.args[0], *args[:2])
            room = builder.trunc(args[3], I32)
            steps, values = range(0, rounds * stride, stride), []
            for n in steps:
                values += doubles_if(builder, args[2], (room, n), offset=8 * n, space="shared")
            for n, value in zip(steps, values):
                there = doubles_if(builder, target, (room, n), offset=8 * n, space="global") if add else []
                total = builder.fadd(there[0], value) if add else value
                store_if(builder, target, [total], (room, n), offset=8 * n)
            return context.get_dummy_value()

        return types.void(array, i64, i32, i64), codegen

    return write_out


def places(context, builder, signature, args, array, steps):
    """Yields (n, what a table of int32 holds n items from the lane's first on) for `steps`; arguments as in rows."""
    base = element_address(context, builder, signature.args[array], args[array], args[array + 1], 4)
    for n in steps:
        yield n, global_int(builder, base, 4 * n)


def is_place(builder, place):
    """Whether it is none of padding."""
    return builder.icmp_signed(">=", place, I32(0))


@cache
def make_store_panels(rows8, nt, turned):
    """Intrinsic (tile, array, first, stride, ncols, rows, first_row): the tile as operand of the next product.

    Row n of column fragment j goes to the 8 doubles array[first + j stride + 8 n:], for j < ncols; `first` holds the
    lane's first column, which is a q.
    """
    lane, tile = Lane(rows8, nt, turned), tile_kind(rows8, nt)

    @intrinsic
    def store_panels(typingctx, acc, array, first, stride, ncols, rows, first_row):
        def codegen(context, builder, signature, args):
            c = fields(builder, args[0], tile.count)
            base = element_address(context, builder, signature.args[1], args[1], args[2])
            step = builder.mul(args[3], I64(8))
            for row, place in places(context, builder, signature, args, 5, lane.rows):
                with builder.if_then(is_place(builder, place)):
                    here = builder.add(base, builder.mul(builder.sext(place, I64), I64(64)))
                    for j in range(nt):
                        values = [c[lane.index(row, column)] for column in lane.columns if column // 8 == j]
                        store_if(builder, builder.add(here, builder.mul(step, I64(j))), values, (args[4], j))
            return context.get_dummy_value()

        return types.void(tile, array, i64, i64, i64, rows, i64), codegen

    return store_panels


@cache
def make_store_columns(rows8, nt):
    """Intrinsic that writes a tile of (ab|cd) element by element, rows in their own order.

    (tile, array, first, column, ncol, group, s_group, s_column, s_row, nrow): column c of the matrix is column
    c % group of group c // group, at first + (c // group) s_group + (c % group) s_column; `column` is the lane's first,
    `ncol` their number in all, `first` holds the lane's row, `nrow` what is left from there on. Where rows are
    contiguous, 8 lanes store 64 contiguous bytes.
    """
    lane, tile = Lane(rows8, nt), tile_kind(rows8, nt)

    @intrinsic
    def store_columns(typingctx, acc, array, first, first_column, ncol, group, s_group, s_column, s_row, nrow):
        def codegen(context, builder, signature, args):
            c = fields(builder, args[0], tile.count)
            first_column, ncol, group, s_group, s_column, s_row, nrow = args[3:]
            base = element_address(context, builder, signature.args[1], args[1], args[2])
            row_step = builder.mul(s_row, I64(64))
            for column in lane.columns:
                this = builder.add(first_column, I64(column))
                with builder.if_then(builder.icmp_signed("<", this, ncol)):
                    place = grouped_offset(builder, this, group, s_group, s_column)
                    address = builder.add(base, builder.mul(place, I64(8)))
                    for row in lane.rows:
                        store_if(builder, address, [c[lane.index(row, column)]], (nrow, row))
                        address = builder.add(address, row_step)
            return context.get_dummy_value()

        return types.void(tile, array, *[i64] * 8), codegen

    return store_columns


@cache
def make_store_rows(rows8, nt):
    """Intrinsic that writes a turned tile of (ab|cd) element by element, rows by their table.

    (tile, array, first, column, ncol, group, s_group, s_column, s_row, rows, first_row), columns as in
    `make_store_columns`; row n is at `first` + n s_row. Where columns are contiguous, 8 lanes store 64 contiguous
    bytes.
    """
    lane, tile = Lane(rows8, nt, turned=True), tile_kind(rows8, nt)

    @intrinsic
    def store_rows(typingctx, acc, array, first, first_column, ncol, group, s_group, s_column, s_row, rows, first_row):
        def codegen(context, builder, signature, args):
            c, (first_column, ncol, group, s_group, s_column, s_row) = fields(builder, args[0], tile.count), args[3:9]
            base = element_address(context, builder, signature.args[1], args[1], args[2])
            columns = []
            for column in lane.columns:
                this = builder.add(first_column, I64(column))
                place = grouped_offset(builder, this, group, s_group, s_column)
                columns.append((column, builder.add(base, builder.mul(place, I64(8)))))
            step, room = builder.mul(s_row, I64(8)), builder.sub(ncol, first_column)
            for row, place in places(context, builder, signature, args, 9, lane.rows):
                with builder.if_then(is_place(builder, place)):
                    offset = builder.mul(builder.sext(place, I64), step)
                    for column, address in columns:
                        value = c[lane.index(row, column)]
                        store_if(builder, builder.add(address, offset), [value], (room, column))
            return context.get_dummy_value()

        return types.void(tile, array, *[i64] * 7, rows, i64), codegen

    return store_rows


def grouped_offset(builder, n, group, s_group, s_item):
    """(n // group) s_group + (n % group) s_item; n below 2^31, where division takes a third of the instructions."""
    quotient = builder.zext(builder.udiv(builder.trunc(n, I32), builder.trunc(group, I32)), I64)
    rest = builder.sub(n, builder.mul(quotient, group))
    return builder.add(builder.mul(quotient, s_group), builder.mul(rest, s_item))


@cache
def make_scale_columns(rows8, nt):
    """Intrinsic (tile, array, first, step, room): each column times its weight.

    The lane's n-th column from its first on has array[first + n step], for n < room, the others 0.
    """
    lane, tile = Lane(rows8, nt), tile_kind(rows8, nt)

    @intrinsic
    def scale_columns(typingctx, acc, array, first, step, room):
        def codegen(context, builder, signature, args):
            c = fields(builder, args[0], tile.count)
            base = element_address(context, builder, signature.args[1], args[1], args[2])
            step = builder.mul(args[3], I64(8))
            for column in lane.columns:
                address = builder.add(base, builder.mul(step, I64(column)))
                (weight,) = doubles_if(builder, address, (args[4], column))
                for row in lane.rows:
                    k = lane.index(row, column)
                    c[k] = builder.fmul(c[k], weight)
            return aggregate(builder, context.get_value_type(tile), c)

        return tile(tile, array, i64, i64, i64), codegen

    return scale_columns


@cache
def make_stage_tile(rows8, nt, tiles=1):
    """Intrinsic that brings `tiles` tiles, side by side in one, to shared memory in the same order of rows and columns.

    (tile, address, rows, first_row, row_stride, columns, first_column, col_stride, step): element (row, column) of the
    tables goes to `address` + row row_stride + column col_stride, in bytes, those of the next tile `step` further on.
    """
    lane, tile = Lane(rows8, tiles * nt), tile_kind(rows8, tiles * nt)

    @intrinsic
    def stage_tile(typingctx, acc, address, rows, first_row, row_stride, columns, first_column, col_stride, step):
        def codegen(context, builder, signature, args):
            c, (address, row_stride) = fields(builder, args[0], tile.count), (args[1], args[4])
            col_stride, step = args[7:]
            found = []
            for n, place in places(context, builder, signature, args, 2, lane.rows):
                found.append((n, place, builder.add(address, builder.mul(place, row_stride))))
            for column, place in places(context, builder, signature, args, 5, neighbours(nt)):
                with builder.if_then(is_place(builder, place)):
                    offset = builder.mul(place, col_stride)
                    for n in range(tiles):
                        for row, live, here in found:
                            value = c[lane.index(row, column + 8 * nt * n)]
                            store_if(builder, builder.add(here, offset), [value], (live, -1), space="shared")
                        offset = builder.add(offset, step)
            return context.get_dummy_value()

        return types.void(tile, i32, rows, i64, i32, columns, i64, i32, i32), codegen

    return stage_tile
