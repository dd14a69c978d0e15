"""Storing register tiles: as an operand of the next product, into results with any strides, to shared memory.

Intrinsics in the manner of `md4.gpu.emit.instructions`, whose tiles these are. Rows that are those of an H matrix come
in the order of `md4.gpu.staircases` and are stored by their table: rows[first_row + n] is the place of the lane's row
first_row + n, -1 for padding, where nothing is stored.
"""

from functools import cache

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from md4.gpu.emit.instructions import DOUBLE, I32, I64, aggregate, call_asm, element_address, fields, global_int


def store_pair(builder, address, values):
    """16 bytes to global memory."""
    operands = [address, *values]
    call_asm(builder, ir.VoidType(), operands, "st.global.v2.f64 [$0], {$1, $2};", "l,d,d", effects=True)


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
            steps = range(0, rounds * stride, stride)
            values = []
            for n in steps:
                text = f"ld.shared.f64 $0, [$1+{8 * n}];"
                text = f"{{ .reg .pred p; setp.gt.s32 p, $2, {n}; mov.f64 $0, 0d0000000000000000; @p {text} }}"
                values.append(call_asm(builder, DOUBLE, [args[2], room], text, "=&d,r,r", effects=True))
            for n, value in zip(steps, values):
                text = f"@p st.global.f64 [$0+{8 * n}], $1;"
                if add:
                    text = f".reg .f64 x; @p ld.global.f64 x, [$0+{8 * n}]; @p add.f64 x, x, $1; "
                    text += f"@p st.global.f64 [$0+{8 * n}], x;"
                text = f"{{ .reg .pred p; setp.gt.s32 p, $2, {n}; {text} }}"
                call_asm(builder, ir.VoidType(), [target, value, room], text, "l,d,r", effects=True)
            return context.get_dummy_value()

        return types.void(array, types.int64, types.int32, types.int64), codegen

    return write_out


def store_below(builder, address, value, room):
    """A double to global memory if `room` > 0."""
    text = "{ .reg .pred p; setp.gt.s64 p, $2, 0; @p st.global.f64 [$0], $1; }"
    call_asm(builder, ir.VoidType(), [address, value, room], text, "l,d,l", effects=True)


def places(context, builder, signature, args, array, steps):
    """Yields (n, what a table of int32 holds n items from the lane's first on) for `steps`; arguments as in rows."""
    base = element_address(context, builder, signature.args[array], args[array], args[array + 1], 4)
    for n in steps:
        yield n, global_int(builder, base, 4 * n)


def is_place(builder, place):
    """Whether it is none of padding."""
    return builder.icmp_signed(">=", place, I32(0))


def turned_rows(nb):
    """Rows of a lane of a turned tile from its first on."""
    return [8 * j + e for j in range(nb) for e in range(2)]


@cache
def make_store_panels(mt, nt):
    """Intrinsic (tile, array, first, stride, ncols, rows, first_row): the tile as operand of the next product.

    Row n of column fragment j goes to the 8 doubles array[first + j stride + 8 n:], for j < ncols; `first` holds the
    lane's offset 2 (lane%4).
    """
    tile = types.UniTuple(types.float64, 4 * mt * nt)

    @intrinsic
    def store_panels(typingctx, acc, array, first, stride, ncols, rows, first_row):
        def codegen(context, builder, signature, args):
            c = fields(builder, args[0], 4 * mt * nt)
            base = element_address(context, builder, signature.args[1], args[1], args[2])
            step = builder.mul(args[3], I64(8))
            for row, place in places(context, builder, signature, args, 5, range(0, 16 * mt, 8)):
                with builder.if_then(is_place(builder, place)):
                    here = builder.add(base, builder.mul(builder.sext(place, I64), I64(64)))
                    for j in range(nt):
                        n = 4 * (row // 16 * nt + j) + 2 * (row // 8 % 2)
                        with builder.if_then(builder.icmp_signed(">", args[4], I64(j))):
                            store_pair(builder, builder.add(here, builder.mul(step, I64(j))), c[n : n + 2])
            return context.get_dummy_value()

        return types.void(tile, array, types.int64, types.int64, types.int64, rows, types.int64), codegen

    return store_panels


@cache
def make_store_turned(mq, nb):
    """Intrinsic (tile, array, first, stride, ncols, rows, first_row): what `make_store_panels` does, of a turned tile.

    `first` holds the lane's q.
    """
    tile = types.UniTuple(types.float64, 4 * mq * nb)

    @intrinsic
    def store_turned(typingctx, acc, array, first, stride, ncols, rows, first_row):
        def codegen(context, builder, signature, args):
            c = fields(builder, args[0], 4 * mq * nb)
            base = element_address(context, builder, signature.args[1], args[1], args[2])
            step = builder.mul(args[3], I64(8))
            for row, place in places(context, builder, signature, args, 5, turned_rows(nb)):
                with builder.if_then(is_place(builder, place)):
                    here = builder.add(base, builder.mul(builder.sext(place, I64), I64(64)))
                    for block in range(2 * mq):
                        value = c[4 * (block // 2 * nb + row // 8) + 2 * (block % 2) + row % 8]
                        room = builder.sub(args[4], I64(block))
                        store_below(builder, builder.add(here, builder.mul(step, I64(block))), value, room)
            return context.get_dummy_value()

        return types.void(tile, array, types.int64, types.int64, types.int64, rows, types.int64), codegen

    return store_turned


@cache
def make_store_columns(mt, nt):
    """Intrinsic that writes a tile of (ab|cd) element by element.

    (tile, array, first, column, ncol, group, s_group, s_column, s_row, nrow): column c of the matrix is column
    c % group of group c // group, at first + (c // group) s_group + (c % group) s_column; `column` is the lane's first,
    `ncol` their number in all, `first` holds the lane's row, `nrow` what is left from there on. Where rows are
    contiguous, 8 lanes store 64 contiguous bytes.
    """
    tile = types.UniTuple(types.float64, 4 * mt * nt)

    @intrinsic
    def store_columns(typingctx, acc, array, first, column, ncol, group, s_group, s_column, s_row, nrow):
        def codegen(context, builder, signature, args):
            c = fields(builder, args[0], 4 * mt * nt)
            column, ncol, group, s_group, s_column, s_row, nrow = args[3:]
            base = element_address(context, builder, signature.args[1], args[1], args[2])
            row_step = builder.mul(s_row, I64(64))
            for j in range(nt):
                for e in range(2):
                    this = builder.add(column, I64(8 * j + e))
                    with builder.if_then(builder.icmp_signed("<", this, ncol)):
                        place = grouped_offset(builder, this, group, s_group, s_column)
                        address = builder.add(base, builder.mul(place, I64(8)))
                        for i in range(2 * mt):
                            value = c[4 * ((i // 2) * nt + j) + 2 * (i % 2) + e]
                            store_below(builder, address, value, builder.sub(nrow, I64(8 * i)))
                            address = builder.add(address, row_step)
            return context.get_dummy_value()

        return types.void(tile, *[array if n == 0 else types.int64 for n in range(9)]), codegen

    return store_columns


@cache
def make_store_rows_turned(mq, nb):
    """Intrinsic that writes a turned tile of (ab|cd) element by element, rows by their table, for contiguous columns.

    (tile, array, first, column, ncol, group, s_group, s_column, s_row, rows, first_row), columns as in
    `make_store_columns`; row n is at `first` + n s_row.
    """
    tile, i64 = types.UniTuple(types.float64, 4 * mq * nb), types.int64

    @intrinsic
    def store_rows(typingctx, acc, array, first, column, ncol, group, s_group, s_column, s_row, rows, first_row):
        def codegen(context, builder, signature, args):
            c, (column, ncol, group, s_group, s_column, s_row) = fields(builder, args[0], 4 * mq * nb), args[3:9]
            base = element_address(context, builder, signature.args[1], args[1], args[2])
            columns = []
            for block in range(2 * mq):
                this = builder.add(column, I64(8 * block))
                place = grouped_offset(builder, this, group, s_group, s_column)
                columns.append((builder.add(base, builder.mul(place, I64(8))), builder.sub(ncol, this)))
            step = builder.mul(s_row, I64(8))
            for row, place in places(context, builder, signature, args, 9, turned_rows(nb)):
                with builder.if_then(is_place(builder, place)):
                    offset = builder.mul(builder.sext(place, I64), step)
                    for block, (address, room) in enumerate(columns):
                        value = c[4 * (block // 2 * nb + row // 8) + 2 * (block % 2) + row % 8]
                        store_below(builder, builder.add(address, offset), value, room)
            return context.get_dummy_value()

        return types.void(tile, array, *[i64] * 7, rows, i64), codegen

    return store_rows


def grouped_offset(builder, n, group, s_group, s_item):
    """(n // group) s_group + (n % group) s_item; n below 2^31, where division takes a third of the instructions."""
    quotient = builder.zext(builder.udiv(builder.trunc(n, I32), builder.trunc(group, I32)), I64)
    rest = builder.sub(n, builder.mul(quotient, group))
    return builder.add(builder.mul(quotient, s_group), builder.mul(rest, s_item))


@cache
def make_scale_columns(mt, nt):
    """Intrinsic (tile, array, first, step, room): each column times its weight.

    The lane's n-th column from its first on has array[first + n step], for n < room, the others 0.
    """
    tile = types.UniTuple(types.float64, 4 * mt * nt)

    @intrinsic
    def scale_columns(typingctx, acc, array, first, step, room):
        def codegen(context, builder, signature, args):
            c = fields(builder, args[0], 4 * mt * nt)
            base = element_address(context, builder, signature.args[1], args[1], args[2])
            step = builder.mul(args[3], I64(8))
            for j in range(nt):
                for e in range(2):
                    n = 8 * j + e
                    place = builder.add(base, builder.mul(step, I64(n)))
                    text = "mov.f64 $0, 0d0000000000000000; @p ld.global.nc.f64 $0, [$1];"
                    text = f"{{ .reg .pred p; setp.gt.s64 p, $2, {n}; {text} }}"
                    weight = call_asm(builder, DOUBLE, [place, args[4]], text, "=&d,l,l")
                    for i in range(2 * mt):
                        k = 4 * ((i // 2) * nt + j) + 2 * (i % 2) + e
                        c[k] = builder.fmul(c[k], weight)
            return aggregate(builder, context.get_value_type(tile), c)

        return tile(tile, array, types.int64, types.int64, types.int64), codegen

    return scale_columns


@cache
def make_stage_tile(mt, nt):
    """Intrinsic (tile, address, rows, first_row, row_stride, columns, first_column, col_stride): to shared memory.

    Element (row, column) of the tables goes to `address` + row row_stride + column col_stride, in bytes.
    """
    tile = types.UniTuple(types.float64, 4 * mt * nt)

    @intrinsic
    def stage_tile(typingctx, acc, address, rows, first_row, row_stride, columns, first_column, col_stride):
        def codegen(context, builder, signature, args):
            c, address, row_stride, col_stride = fields(builder, args[0], 4 * mt * nt), args[1], args[4], args[7]
            found = []
            for n, row in places(context, builder, signature, args, 2, range(0, 16 * mt, 8)):
                found.append((n, builder.add(address, builder.mul(row, row_stride)), row))
            lane_columns = [8 * j + e for j in range(nt) for e in range(2)]
            for n, column in places(context, builder, signature, args, 5, lane_columns):
                with builder.if_then(is_place(builder, column)):
                    offset = builder.mul(column, col_stride)
                    for i, place, row in found:
                        value = c[4 * (i // 16 * nt + n // 8) + 2 * (i // 8 % 2) + n % 8]
                        text = "{ .reg .pred p; setp.ge.s32 p, $2, 0; @p st.shared.f64 [$0], $1; }"
                        operands = [builder.add(place, offset), value, row]
                        call_asm(builder, ir.VoidType(), operands, text, "r,d,r", effects=True)
            return context.get_dummy_value()

        i32, i64 = types.int32, types.int64
        return types.void(tile, i32, rows, i64, i32, columns, i64, i32), codegen

    return stage_tile
