"""Storing register tiles: as an operand of the next product, into results with any strides, to shared memory.

Intrinsics in the manner of `md4.ptx`, whose tiles these are.
"""

from functools import cache

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from md4.ptx import DOUBLE, I32, I64, aggregate, call_asm, element_address, fields


def store_pair(builder, address, values):
    """16 bytes to global memory."""
    operands = [address, *values]
    call_asm(builder, ir.VoidType(), operands, "st.global.v2.f64 [$0], {$1, $2};", "l,d,d", effects=True)


def store_below(builder, address, value, room):
    """A double to global memory if `room` > 0."""
    text = "{ .reg .pred p; setp.gt.s64 p, $2, 0; @p st.global.f64 [$0], $1; }"
    call_asm(builder, ir.VoidType(), [address, value, room], text, "l,d,l", effects=True)


@cache
def make_store_panels(mt, nt):
    """Intrinsic (tile, array, first, stride, ncols, nrows): the tile as left operand of the next product, row by row.

    Row n of column fragment j goes to the 8 doubles array[first + j stride + 8 n:], for j < ncols; `first` holds the
    lane's offset 2 lane, and `nrows` what is left from the lane's row on.
    """
    tile = types.UniTuple(types.float64, 4 * mt * nt)

    @intrinsic
    def store_panels(typingctx, acc, array, first, stride, ncols, nrows):
        def codegen(context, builder, signature, args):
            c = fields(builder, args[0], 4 * mt * nt)
            base = element_address(context, builder, signature.args[1], args[1], args[2])
            step = builder.mul(args[3], I64(8))
            for j in range(nt):
                with builder.if_then(builder.icmp_signed(">", args[4], I64(j))):
                    column = builder.add(base, builder.mul(step, I64(j)))
                    for i in range(2 * mt):
                        n = 4 * ((i // 2) * nt + j) + 2 * (i % 2)
                        with builder.if_then(builder.icmp_signed(">", args[5], I64(8 * i))):
                            store_pair(builder, builder.add(column, I64(512 * i)), c[n : n + 2])
            return context.get_dummy_value()

        return types.void(tile, array, types.int64, types.int64, types.int64, types.int64), codegen

    return store_panels


@cache
def make_store_turned(mq, nb):
    """Intrinsic (tile, array, first, stride, ncols, nrows): what `make_store_panels` does, of a turned tile.

    `first` holds the lane's offset 8 ab + q, and `nrows` what is left from the lane's ab on.
    """
    tile = types.UniTuple(types.float64, 4 * mq * nb)

    @intrinsic
    def store_turned(typingctx, acc, array, first, stride, ncols, nrows):
        def codegen(context, builder, signature, args):
            c = fields(builder, args[0], 4 * mq * nb)
            base = element_address(context, builder, signature.args[1], args[1], args[2])
            step = builder.mul(args[3], I64(8))
            for block in range(2 * mq):
                with builder.if_then(builder.icmp_signed(">", args[4], I64(block))):
                    column = builder.add(base, builder.mul(step, I64(block)))
                    for row in (8 * j + e for j in range(nb) for e in range(2)):
                        value = c[4 * (block // 2 * nb + row // 8) + 2 * (block % 2) + row % 8]
                        place = builder.add(column, I64(64 * row))
                        store_below(builder, place, value, builder.sub(args[5], I64(row)))
            return context.get_dummy_value()

        return types.void(tile, array, types.int64, types.int64, types.int64, types.int64), codegen

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
def make_store_columns_turned(mq, nb):
    """Intrinsic that does what `make_store_columns` does, of a turned tile, for contiguous columns."""
    tile = types.UniTuple(types.float64, 4 * mq * nb)

    @intrinsic
    def store_columns(typingctx, acc, array, first, column, ncol, group, s_group, s_column, s_row, nrow):
        def codegen(context, builder, signature, args):
            c = fields(builder, args[0], 4 * mq * nb)
            column, ncol, group, s_group, s_column, s_row, nrow = args[3:]
            base = element_address(context, builder, signature.args[1], args[1], args[2])
            step, far = builder.mul(s_row, I64(8)), builder.mul(s_row, I64(56))
            for block in range(2 * mq):
                this = builder.add(column, I64(8 * block))
                with builder.if_then(builder.icmp_signed("<", this, ncol)):
                    place = grouped_offset(builder, this, group, s_group, s_column)
                    address = builder.add(base, builder.mul(place, I64(8)))
                    for row in (8 * j + e for j in range(nb) for e in range(2)):
                        value = c[4 * (block // 2 * nb + row // 8) + 2 * (block % 2) + row % 8]
                        store_below(builder, address, value, builder.sub(nrow, I64(row)))
                        address = builder.add(address, far if row % 8 else step)
            return context.get_dummy_value()

        return types.void(tile, *[array if n == 0 else types.int64 for n in range(9)]), codegen

    return store_columns


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
    """Intrinsic (tile, address, nrow, ncol, row_stride, col_stride): the tile to shared memory, strides in bytes.

    The lane's first element goes to `address`; `nrow` and `ncol` are what is left from its row and column on.
    """
    tile = types.UniTuple(types.float64, 4 * mt * nt)

    @intrinsic
    def stage_tile(typingctx, acc, address, nrow, ncol, row_stride, col_stride):
        def codegen(context, builder, signature, args):
            c, (address, nrow, ncol, row_stride, col_stride) = fields(builder, args[0], 4 * mt * nt), args[1:]
            for j in range(nt):
                for e in range(2):
                    n = 8 * j + e
                    with builder.if_then(builder.icmp_signed(">", ncol, I32(n))):
                        place = builder.add(address, builder.mul(col_stride, I32(n)))
                        for i in range(2 * mt):
                            value = c[4 * ((i // 2) * nt + j) + 2 * (i % 2) + e]
                            text = "{ .reg .pred p; setp.gt.s32 p, $2, 0; @p st.shared.f64 [$0], $1; }"
                            operands = [place, value, builder.sub(nrow, I32(8 * i))]
                            call_asm(builder, ir.VoidType(), operands, text, "r,d,r", effects=True)
                            place = builder.add(place, builder.mul(row_stride, I32(8)))
            return context.get_dummy_value()

        return types.void(tile, *[types.int32] * 5), codegen

    return stage_tile
