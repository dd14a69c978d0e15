"""Code that digests a small quartet by one thread; the equations are in `md4.method.digestion`.

Intrinsics that are unrolled while code is generated, for given numbers of functions b, c and d and one function a at a
time. The integrals (ab|cd) of one a are nb nc nd successive doubles in shared memory at `place`. What a thread keeps of
D and X for all b are rows over c and d, `pair_rows(nb, nc, nd)` numbers in the order [b][c, then d]. In a matrix, `row`
is where the row of AO a, or of the first AO b, begins; `c` and `d` are the first AOs of the ket shells.

A warp goes through a row of D or X together. The numbers of its lanes over the functions of a ket shell are in a stage
in shared memory, [lane][function], and lanes take them in this order to and from the matrix. So neighbours have
neighbouring numbers, which memory loads or adds at once, where those of one lane would be as many requests.
"""

from functools import cache

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from md4.gpu.emit.instructions import (
    DOUBLE,
    I32,
    I64,
    add_double,
    aggregate,
    doubles_if,
    element_address,
    fields,
    fma,
    global_double,
    shared_double,
)
from md4.gpu.emit.scalars import add_double_if
from md4.gpu.emit.unrolled import store_doubles, warp_barrier
from md4.gpu.emit.warp_sums import shuffle_from

i64, f64, i32 = types.int64, types.float64, types.int32


def pair_rows(nb, nc, nd):
    """Numbers in the rows of all b over c and d."""
    return nb * (nc + nd)


def functions_of_ket(nc, nd):
    """(shell 0 or 1 of the ket, number n) of all functions of c and d."""
    return [(shell, n) for shell, functions in enumerate((nc, nd)) for n in range(functions)]


def stage_parts(nc, nd):
    """Where in the stage the numbers over c and over d begin, in doubles, None without any, and its size.

    A shell of one function has none: each lane's number is the one that it takes in turn.
    """
    parts, size = [], 0
    for functions in (nc, nd):
        parts.append(size if functions > 1 else None)
        size += 32 * functions if functions > 1 else 0
    return parts, size


@cache
def make_columns_in_turn(nc, nd):
    """Intrinsic (c, d, count, lane) -> in which columns of a matrix the numbers stand that a lane takes.

    In bytes from the row's begin, -1 for none. `c` and `d` are the first AOs of the lane's own ket pair, which it tells
    the others; the first `count` lanes have one.
    """
    kind = types.UniTuple(i32, nc + nd)

    @intrinsic
    def columns_in_turn(typingctx, c, d, count, lane):
        def codegen(context, builder, signature, args):
            *own, count, lane = (builder.trunc(arg, I32) for arg in args)
            columns = []
            for shell, n in functions_of_ket(nc, nd):
                functions, element = I32((nc, nd)[shell]), builder.add(lane, I32(32 * n))
                pair = builder.udiv(element, functions)
                ao = own[shell] if stage_parts(nc, nd)[0][shell] is None else shuffle_from(builder, own[shell], pair)
                ao = builder.add(ao, builder.sub(element, builder.mul(pair, functions)))
                live = builder.icmp_signed("<", pair, count)
                columns.append(builder.select(live, builder.mul(ao, I32(8)), I32(-1)))
            return aggregate(builder, context.get_value_type(kind), columns)

        return kind(i64, i64, i64, i64), codegen

    return columns_in_turn


class Stage:
    """The stage of a warp while code is generated: one row over c and d of each lane.

    Parameters
    ----------
    address, lane : LLVM value
        Where it begins in shared memory (i32), and the lane (i64).
    """

    def __init__(self, builder, address, lane, nc, nd):
        self.builder, lane = builder, builder.trunc(lane, I32)
        self.functions, (self.parts, _) = functions_of_ket(nc, nd), stage_parts(nc, nd)
        self.own = [builder.add(address, builder.mul(lane, I32(8 * n))) for n in (nc, nd)]
        self.in_turn = builder.add(address, builder.mul(lane, I32(8)))

    def exchanged(self, values, own_first):
        """Numbers that each lane takes in turn for those of its own, if `own_first`, or its own for those in turn."""
        if self.parts == [None, None]:
            return values
        found = []
        for value, (shell, n) in zip(values, self.functions):
            if self.parts[shell] is not None:
                place, offset = self.place(shell, n, own_first)
                store_doubles(self.builder, place, [value], offset)
        warp_barrier(self.builder)
        for value, (shell, n) in zip(values, self.functions):
            if self.parts[shell] is not None:
                place, offset = self.place(shell, n, not own_first)
                value = shared_double(self.builder, place, offset)  # noqa: PLW2901 the other lane's
            found.append(value)
        warp_barrier(self.builder)
        return found

    def place(self, shell, n, own):
        """(address, offset in bytes) of a lane's n-th number over the functions of a shell: its own, or in turn."""
        first = 8 * self.parts[shell]
        return (self.own[shell], first + 8 * n) if own else (self.in_turn, first + 256 * n)


@cache
def make_load_rows(nb, nc, nd):
    """Intrinsic (array, row, nao, columns, stage, lane) -> the rows of all b, beginning with `row`."""
    kind, places = types.UniTuple(f64, pair_rows(nb, nc, nd)), types.UniTuple(i32, nc + nd)

    @intrinsic
    def load_rows(typingctx, array, row, nao, columns, stage, lane):
        def codegen(context, builder, signature, args):
            address = element_address(context, builder, signature.args[0], *args[:2])
            values, stage = [], Stage(builder, *args[4:], nc, nd)
            for _ in range(nb):
                found = []
                for column in fields(builder, args[3], nc + nd):
                    here = builder.add(address, builder.sext(column, I64))
                    found += doubles_if(builder, here, (column, -1))
                values += stage.exchanged(found, own_first=False)
                address = builder.add(address, builder.mul(args[2], I64(8)))
            return aggregate(builder, context.get_value_type(kind), values)

        return kind(array, i64, i64, places, i32, i64), codegen

    return load_rows


@cache
def make_add_rows(nb, nc, nd):
    """Intrinsic (array, row, nao, columns, stage, lane, values, scale): adds scale times the rows of all b, atomically.

    Lanes of pairs that do not count may hold anything.
    """
    kind, places = types.UniTuple(f64, pair_rows(nb, nc, nd)), types.UniTuple(i32, nc + nd)

    @intrinsic
    def add_rows(typingctx, array, row, nao, columns, stage, lane, values, scale):
        def codegen(context, builder, signature, args):
            address = element_address(context, builder, signature.args[0], *args[:2])
            stage, columns, width = Stage(builder, *args[4:6], nc, nd), fields(builder, args[3], nc + nd), nc + nd
            values = [builder.fmul(value, args[7]) for value in fields(builder, args[6], nb * width)]
            for b in range(nb):
                found = stage.exchanged(values[b * width : (b + 1) * width], own_first=True)
                for value, column in zip(found, columns):
                    here = builder.add(address, builder.sext(column, I64))
                    add_double_if(builder, here, value, column, "gt", -1)
                address = builder.add(address, builder.mul(args[2], I64(8)))
            return context.get_dummy_value()

        return types.void(array, i64, i64, places, i32, i64, kind, f64), codegen

    return add_rows


@cache
def make_add_to_x(nb, nc, nd):
    """Intrinsic (x_b, place, d_b, d_a) -> X of one a, then X of all b with its part added.

    `d_b` are the density's rows of all b, `d_a` that of a; X of a is a row [c, then d].
    """
    rows = types.UniTuple(f64, pair_rows(nb, nc, nd))
    own = types.UniTuple(f64, nc + nd)
    result = types.UniTuple(f64, nc + nd + pair_rows(nb, nc, nd))

    @intrinsic
    def add_to_x(typingctx, x_b, place, d_b, d_a):
        def codegen(context, builder, signature, args):
            width = nc + nd
            x, d_b = fields(builder, args[0], nb * width), fields(builder, args[2], nb * width)
            d_a, x_a = fields(builder, args[3], width), [ir.Constant(DOUBLE, 0.0)] * width
            for n in range(nb * nc * nd):
                b, c, d = n // (nc * nd), n // nd % nc, nc + n % nd
                value = shared_double(builder, args[1], 8 * n)
                x_a[c] = fma(builder, value, d_b[b * width + d], x_a[c])
                x_a[d] = fma(builder, value, d_b[b * width + c], x_a[d])
                x[b * width + c] = fma(builder, value, d_a[d], x[b * width + c])
                x[b * width + d] = fma(builder, value, d_a[c], x[b * width + d])
            return aggregate(builder, context.get_value_type(result), x_a + x)

        return result(rows, i32, rows, own), codegen

    return add_to_x


@cache
def make_add_to_y(nb, nc, nd):
    """Intrinsic (y_cd, place, d_cd, array, row, weight) -> Y_ab of one a and all b, then Y_cd with its part added.

    `d_cd` are the lane's D + D^T of c and d; those of a and b are array[row:row + nb]. The weight is Y_cd's only.
    """
    block, result = types.UniTuple(f64, nc * nd), types.UniTuple(f64, nb + nc * nd)

    @intrinsic
    def add_to_y(typingctx, y_cd, place, d_cd, array, row, weight):
        def codegen(context, builder, signature, args):
            y, d_cd = fields(builder, args[0], nc * nd), fields(builder, args[2], nc * nd)
            address = element_address(context, builder, signature.args[3], args[3], args[4])
            d_ab = [builder.fmul(global_double(builder, address, 8 * n), args[5]) for n in range(nb)]
            y_ab = [ir.Constant(DOUBLE, 0.0)] * nb
            for n in range(nb * nc * nd):
                b, cd = n // (nc * nd), n % (nc * nd)
                value = shared_double(builder, args[1], 8 * n)
                y_ab[b] = fma(builder, value, d_cd[cd], y_ab[b])
                y[cd] = fma(builder, value, d_ab[b], y[cd])
            return aggregate(builder, context.get_value_type(result), y_ab + y)

        return result(block, i32, block, array, i64, f64), codegen

    return add_to_y


@cache
def make_load_block(nc, nd):
    """Intrinsic (array, first, nao) -> array[first + c nao + d] for all c and d."""
    kind = types.UniTuple(f64, nc * nd)

    @intrinsic
    def load_block(typingctx, array, first, nao):
        def codegen(context, builder, signature, args):
            address, values = element_address(context, builder, signature.args[0], args[0], args[1]), []
            for _ in range(nc):
                values += [global_double(builder, address, 8 * n) for n in range(nd)]
                address = builder.add(address, builder.mul(args[2], I64(8)))
            return aggregate(builder, context.get_value_type(kind), values)

        return kind(array, i64, i64), codegen

    return load_block


@cache
def make_add_block(nc, nd):
    """Intrinsic (array, first, nao, values): adds to array[first + c nao + d] for all c and d, atomically."""
    kind = types.UniTuple(f64, nc * nd)

    @intrinsic
    def add_block(typingctx, array, first, nao, values):
        def codegen(context, builder, signature, args):
            address = element_address(context, builder, signature.args[0], args[0], args[1])
            values = iter(fields(builder, args[3], nc * nd))
            for _ in range(nc):
                for n in range(nd):
                    add_double(builder, address, next(values), 8 * n)
                address = builder.add(address, builder.mul(args[2], I64(8)))
            return context.get_dummy_value()

        return types.void(array, i64, i64, kind), codegen

    return add_block
