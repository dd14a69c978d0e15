"""Code that digests a small quartet by one thread; the equations are in `md4.method.digestion`.

Intrinsics that are unrolled while code is generated, for given numbers of functions b, c and d and one function a at a
time. The integrals (ab|cd) of one a are nb nc nd successive doubles in shared memory at `place`. What a thread keeps of
D and X for all b are rows over c and d, `pair_rows(nb, nc, nd)` numbers in the order [b][c, then d]. In a matrix, `row`
is where the row of AO a, or of the first AO b, begins; `c` and `d` are the first AOs of the ket shells.
"""

from functools import cache

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from md4.gpu.emit.instructions import (
    DOUBLE,
    I64,
    add_double,
    aggregate,
    element_address,
    fields,
    fma,
    global_double,
    shared_double,
)

i64, f64, i32 = types.int64, types.float64, types.int32


def pair_rows(nb, nc, nd):
    """Numbers in the rows of all b over c and d."""
    return nb * (nc + nd)


def row_addresses(context, builder, array_type, array, row, aos):
    """Addresses of array[row + ao] for each of `aos`."""
    return [element_address(context, builder, array_type, array, builder.add(row, ao)) for ao in aos]


@cache
def make_load_rows(nb, nc, nd):
    """Intrinsic (array, row, nao, c, d) -> the rows of all b, beginning with `row`."""
    kind = types.UniTuple(f64, pair_rows(nb, nc, nd))

    @intrinsic
    def load_rows(typingctx, array, row, nao, c, d):
        def codegen(context, builder, signature, args):
            values, step = [], builder.mul(args[2], I64(8))
            at_c, at_d = row_addresses(context, builder, signature.args[0], args[0], args[1], args[3:])
            for _ in range(nb):
                values += [global_double(builder, at_c, 8 * n) for n in range(nc)]
                values += [global_double(builder, at_d, 8 * n) for n in range(nd)]
                at_c, at_d = builder.add(at_c, step), builder.add(at_d, step)
            return aggregate(builder, context.get_value_type(kind), values)

        return kind(array, i64, i64, i64, i64), codegen

    return load_rows


@cache
def make_add_rows(nb, nc, nd):
    """Intrinsic (array, row, nao, c, d, values, scale): adds scale times the rows of all b, atomically."""
    kind = types.UniTuple(f64, pair_rows(nb, nc, nd))

    @intrinsic
    def add_rows(typingctx, array, row, nao, c, d, values, scale):
        def codegen(context, builder, signature, args):
            step = builder.mul(args[2], I64(8))
            at_c, at_d = row_addresses(context, builder, signature.args[0], args[0], args[1], args[3:5])
            values = iter(fields(builder, args[5], pair_rows(nb, nc, nd)))
            for _ in range(nb):
                for n in range(nc):
                    add_double(builder, at_c, builder.fmul(next(values), args[6]), 8 * n)
                for n in range(nd):
                    add_double(builder, at_d, builder.fmul(next(values), args[6]), 8 * n)
                at_c, at_d = builder.add(at_c, step), builder.add(at_d, step)
            return context.get_dummy_value()

        return types.void(array, i64, i64, i64, i64, kind, f64), codegen

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
