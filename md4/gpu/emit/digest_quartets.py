"""Code that digests a small quartet by one thread; the equations are in `md4.method.digestion`.

Intrinsics that are unrolled while code is generated, for given numbers of functions b, c and d and one function a at a
time. The integrals (ab|cd) of one a are nb nc nd successive doubles in shared memory at `place`. What a thread keeps of
D and X for all b are rows over c and d, `pair_rows(nb, nc, nd)` numbers in the order [b][c, then d]. In a matrix, `row`
is where the row of AO a, or of the first AO b, begins; `c` and `d` are the first AOs of the ket shells.

A warp goes through a row of D or X together. The numbers of its lanes over the functions of a ket shell are in a stage
in shared memory, [lane][function], and lanes take them in this order to and from the matrix. So neighbours have
neighbouring numbers, which memory loads or adds at once, where those of one lane would be as many requests.

`precision` is that of the integrals, the stage, densities, and of all that a thread keeps. X and Y are of doubles: sums
are converted before they are added.
"""

from functools import cache

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from md4.gpu.emit.instructions import (
    FP64,
    I32,
    I64,
    aggregate,
    element_address,
    fields,
    fma,
    global_real,
    real_if,
    shared_real,
    widened,
)
from md4.gpu.emit.scalars import add_double_if
from md4.gpu.emit.unrolled import store_doubles, warp_barrier
from md4.gpu.emit.warp_sums import emit_run_sum, shuffle_from

i64, i32 = types.int64, types.int32


def pair_rows(nb, nc, nd):
    """Numbers in the rows of all b over c and d."""
    return nb * (nc + nd)


def functions_of_ket(nc, nd):
    """(shell 0 or 1 of the ket, number n) of all functions of c and d."""
    return [(shell, n) for shell, functions in enumerate((nc, nd)) for n in range(functions)]


def stage_parts(nc, nd):
    """Where in the stage the numbers over c and over d begin, counted in numbers, None without any, and its size.

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
    precision : Precision
        Of its numbers.
    """

    def __init__(self, builder, address, lane, nc, nd, precision):
        self.builder, self.precision, lane = builder, precision, builder.trunc(lane, I32)
        self.functions, (self.parts, _) = functions_of_ket(nc, nd), stage_parts(nc, nd)
        self.own = [builder.add(address, builder.mul(lane, I32(precision.bytes * n))) for n in (nc, nd)]
        self.in_turn = builder.add(address, builder.mul(lane, I32(precision.bytes)))

    def exchanged(self, values, own_first):
        """Numbers that each lane takes in turn for those of its own, if `own_first`, or its own for those in turn.

        `values` are those over c and d, or over c alone.
        """
        if all(self.parts[shell] is None for _, (shell, _) in zip(values, self.functions)):
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
                value = shared_real(self.builder, place, offset, self.precision)  # noqa: PLW2901 the other lane's
            found.append(value)
        warp_barrier(self.builder)
        return found

    def place(self, shell, n, own):
        """(address, offset in bytes) of a lane's n-th number over the functions of a shell: its own, or in turn."""
        size = self.precision.bytes
        first = size * self.parts[shell]
        return (self.own[shell], first + size * n) if own else (self.in_turn, first + 32 * size * n)


@cache
def make_load_rows(nb, nc, nd, precision=FP64):
    """Intrinsic (array, row, nao, columns, stage, lane) -> the rows of all b, beginning with `row`."""
    kind, places = types.UniTuple(precision.numba, pair_rows(nb, nc, nd)), types.UniTuple(i32, nc + nd)

    @intrinsic
    def load_rows(typingctx, array, row, nao, columns, stage, lane):
        def codegen(context, builder, signature, args):
            address = element_address(context, builder, signature.args[0], *args[:2], precision.bytes)
            values, stage = [], Stage(builder, *args[4:], nc, nd, precision)
            for _ in range(nb):
                found = []
                for column in fields(builder, args[3], nc + nd):
                    place = column if precision is FP64 else builder.ashr(column, I32(1))
                    here = builder.add(address, builder.sext(place, I64))
                    found.append(real_if(builder, here, (column, -1), precision))
                values += stage.exchanged(found, own_first=False)
                address = builder.add(address, builder.mul(args[2], I64(precision.bytes)))
            return aggregate(builder, context.get_value_type(kind), values)

        return kind(array, i64, i64, places, i32, i64), codegen

    return load_rows


@cache
def make_add_rows(nb, nc, nd, most, precision=FP64):
    """Intrinsic (array, row, nao, columns, left, firsts, stage, lane, values, scale) that adds to the rows of all b.

    It adds the values times `scale`, atomically; those over c of a run of lanes are summed up first. `left` and
    `firsts` are those of `md4.gpu.kernels.digest_in_place.Runs`, of at most `most` lanes; with 1 they are not asked.
    Lanes of pairs that do not count may hold anything.
    """
    kind, places = types.UniTuple(precision.numba, pair_rows(nb, nc, nd)), types.UniTuple(i32, nc + nd)

    @intrinsic
    def add_rows(typingctx, array, row, nao, columns, left, firsts, stage, lane, values, scale):
        def codegen(context, builder, signature, args):
            address = element_address(context, builder, signature.args[0], *args[:2])
            stage, width = Stage(builder, *args[6:8], nc, nd, precision), nc + nd
            columns, left, firsts = fields(builder, args[3], width), args[4], args[5]
            values = [builder.fmul(value, args[9]) for value in fields(builder, args[8], nb * width)]
            for b in range(nb):
                over_c, over_d = values[b * width : b * width + nc], values[b * width + nc : (b + 1) * width]
                over_c = [emit_run_sum(builder, value, left, most) for value in over_c]
                found = stage.exchanged(over_c + over_d, own_first=True)
                for n, (value, column) in enumerate(zip(found, columns)):
                    here, value = builder.add(address, builder.sext(column, I64)), widened(builder, value)  # noqa: PLW2901
                    if n < nc and most > 1:
                        add_double_if(builder, here, value, builder.and_(firsts, I32(1 << n)), "ne", 0)
                    else:
                        add_double_if(builder, here, value, column, "gt", -1)
                address = builder.add(address, builder.mul(args[2], I64(8)))
            return context.get_dummy_value()

        return types.void(array, i64, i64, places, i32, i32, i32, i64, kind, precision.numba), codegen

    return add_rows


@cache
def make_add_to_x(nb, nc, nd, precision=FP64):
    """Intrinsic (x_b, place, d_b, d_a) -> X of one a, then X of all b with its part added.

    `d_b` are the density's rows of all b, `d_a` that of a; X of a is a row [c, then d].
    """
    rows = types.UniTuple(precision.numba, pair_rows(nb, nc, nd))
    own = types.UniTuple(precision.numba, nc + nd)
    result = types.UniTuple(precision.numba, nc + nd + pair_rows(nb, nc, nd))

    @intrinsic
    def add_to_x(typingctx, x_b, place, d_b, d_a):
        def codegen(context, builder, signature, args):
            width = nc + nd
            x, d_b = fields(builder, args[0], nb * width), fields(builder, args[2], nb * width)
            d_a, x_a = fields(builder, args[3], width), [ir.Constant(precision.llvm, 0.0)] * width
            for n in range(nb * nc * nd):
                b, c, d = n // (nc * nd), n // nd % nc, nc + n % nd
                value = shared_real(builder, args[1], precision.bytes * n, precision)
                x_a[c] = fma(builder, value, d_b[b * width + d], x_a[c])
                x_a[d] = fma(builder, value, d_b[b * width + c], x_a[d])
                x[b * width + c] = fma(builder, value, d_a[d], x[b * width + c])
                x[b * width + d] = fma(builder, value, d_a[c], x[b * width + d])
            return aggregate(builder, context.get_value_type(result), x_a + x)

        return result(rows, i32, rows, own), codegen

    return add_to_x


@cache
def make_add_to_y(nb, nc, nd, precision=FP64):
    """Intrinsic (y_cd, place, d_cd, array, row, weight) -> Y_ab of one a and all b, then Y_cd with its part added.

    `d_cd` are the lane's D + D^T of c and d; those of a and b are array[row:row + nb]. The weight is Y_cd's only.
    """
    block, result = types.UniTuple(precision.numba, nc * nd), types.UniTuple(precision.numba, nb + nc * nd)

    @intrinsic
    def add_to_y(typingctx, y_cd, place, d_cd, array, row, weight):
        def codegen(context, builder, signature, args):
            y, d_cd = fields(builder, args[0], nc * nd), fields(builder, args[2], nc * nd)
            address = element_address(context, builder, signature.args[3], args[3], args[4], precision.bytes)
            d_ab = []
            for n in range(nb):
                value = global_real(builder, address, precision.bytes * n, precision)
                d_ab.append(builder.fmul(value, args[5]))
            y_ab = [ir.Constant(precision.llvm, 0.0)] * nb
            for n in range(nb * nc * nd):
                b, cd = n // (nc * nd), n % (nc * nd)
                value = shared_real(builder, args[1], precision.bytes * n, precision)
                y_ab[b] = fma(builder, value, d_cd[cd], y_ab[b])
                y[cd] = fma(builder, value, d_ab[b], y[cd])
            return aggregate(builder, context.get_value_type(result), y_ab + y)

        return result(block, i32, block, array, i64, precision.numba), codegen

    return add_to_y


@cache
def make_rows_in_turn(nc):
    """Intrinsic (d, lane) -> first AOs of the shells d in whose rows those numbers over c stand that a lane takes."""
    kind = types.UniTuple(i32, nc)

    @intrinsic
    def rows_in_turn(typingctx, d, lane):
        def codegen(context, builder, signature, args):
            d, lane = (builder.trunc(arg, I32) for arg in args)
            pairs = [builder.udiv(builder.add(lane, I32(32 * n)), I32(nc)) for n in range(nc)]
            rows = [d] if nc == 1 else [shuffle_from(builder, d, pair) for pair in pairs]
            return aggregate(builder, context.get_value_type(kind), rows)

        return kind(i64, i64), codegen

    return rows_in_turn


def places_in_turn(builder, array, rows, columns, nao, nbytes):
    """Addresses of the numbers over c that a lane takes, in the rows of the first functions d, of `nbytes` each."""
    places = []
    for row, column in zip(rows, columns):
        start = builder.mul(builder.mul(builder.sext(row, I64), nao), I64(nbytes))
        column = builder.sext(column if nbytes == 8 else builder.ashr(column, I32(1)), I64)  # noqa: PLW2901
        places.append(builder.add(array, builder.add(start, column)))
    return places


@cache
def make_load_block(nc, nd, precision=FP64):
    """Intrinsic (array, first, nao, columns, rows, stage, lane) -> the lane's block of a symmetric matrix.

    The matrix begins with array[first]. The block has all c and d in the order [c][d]; it is taken from rows d.
    """
    kind, places = types.UniTuple(precision.numba, nc * nd), types.UniTuple(i32, nc + nd)

    @intrinsic
    def load_block(typingctx, array, first, nao, columns, rows, stage, lane):
        def codegen(context, builder, signature, args):
            address = element_address(context, builder, signature.args[0], *args[:2], precision.bytes)
            nao, columns, rows = args[2], fields(builder, args[3], nc + nd)[:nc], fields(builder, args[4], nc)
            here = places_in_turn(builder, address, rows, columns, nao, precision.bytes)
            stage, values = Stage(builder, *args[5:], nc, nd, precision), []
            step = builder.mul(nao, I64(precision.bytes))
            for _ in range(nd):
                found = [real_if(builder, at, (column, -1), precision) for at, column in zip(here, columns)]
                values.append(stage.exchanged(found, own_first=False))
                here = [builder.add(at, step) for at in here]
            in_order = [values[d][c] for c in range(nc) for d in range(nd)]
            return aggregate(builder, context.get_value_type(kind), in_order)

        return kind(array, i64, i64, places, types.UniTuple(i32, nc), i32, i64), codegen

    return load_block


@cache
def make_add_block(nc, nd, precision=FP64):
    """Intrinsic (array, first, nao, columns, rows, stage, lane, values): adds the lane's block, atomically.

    As `make_load_block` loads it, to rows d. Lanes of pairs that do not count may hold anything.
    """
    kind, places = types.UniTuple(precision.numba, nc * nd), types.UniTuple(i32, nc + nd)

    @intrinsic
    def add_block(typingctx, array, first, nao, columns, rows, stage, lane, values):
        def codegen(context, builder, signature, args):
            address = element_address(context, builder, signature.args[0], *args[:2])
            nao, columns, rows = args[2], fields(builder, args[3], nc + nd)[:nc], fields(builder, args[4], nc)
            here = places_in_turn(builder, address, rows, columns, nao, 8)
            stage, values = Stage(builder, *args[5:7], nc, nd, precision), fields(builder, args[7], nc * nd)
            for d in range(nd):
                found = stage.exchanged(values[d::nd], own_first=True)
                for at, value, column in zip(here, found, columns):
                    add_double_if(builder, at, widened(builder, value), column, "gt", -1)
                here = [builder.add(at, builder.mul(nao, I64(8))) for at in here]
            return context.get_dummy_value()

        return types.void(array, i64, i64, places, types.UniTuple(i32, nc), i32, i64, kind), codegen

    return add_block
