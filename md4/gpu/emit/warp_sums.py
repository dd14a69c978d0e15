"""Sums over the 32 lanes of a warp."""

from functools import cache

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from md4.gpu.emit.instructions import DOUBLE, I32, I64, fields, mma_8x8x4, shared_double

i64, f64 = types.int64, types.float64
PAIR = ir.VectorType(I32, 2)


@cache
def make_row_sums(count, row):
    """Intrinsic (address, factors, lane, n) -> the sum over 32 elements m of x[n, m] factors[m].

    Both are in shared memory, at most 8 rows of x, `row` bytes apart. A lane gets the sum of the row n, which must be
    lane/4 where that is below `count`. Tensor instructions do it: all 8 columns of the right operand are `factors`, so
    that every lane of a row gets its sum.
    """
    assert count <= 8

    @intrinsic
    def row_sums(typingctx, address, factors, lane, n):
        def codegen(context, builder, signature, args):
            address, factors, lane, n = args
            inner = builder.mul(builder.and_(lane, I32(3)), I32(8))
            left = builder.add(builder.add(address, inner), builder.mul(n, I32(row)))
            right, zero = builder.add(factors, inner), ir.Constant(DOUBLE, 0.0)
            parts = [[zero, zero], [zero, zero]]
            for k in range(8):
                a, b = shared_double(builder, left, 32 * k), shared_double(builder, right, 32 * k)
                parts[k % 2] = mma_8x8x4(builder, parts[k % 2], a, b)
            return builder.fadd(parts[0][0], parts[1][0])

        i32 = types.int32
        return f64(i32, i32, i32, i32), codegen

    return row_sums


def shuffle_xor(builder, value, mask):
    """The double of the lane whose number differs in the bit `mask`."""
    name, kind = "llvm.nvvm.shfl.sync.bfly.i32", ir.FunctionType(I32, [I32] * 4)
    shuffle = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    halves = builder.bitcast(value, PAIR)
    for n in range(2):
        half = builder.extract_element(halves, I32(n))
        other = builder.call(shuffle, [I32(-1), half, I32(mask), I32(31)])
        halves = builder.insert_element(halves, other, I32(n))
    return builder.bitcast(halves, DOUBLE)


def shuffle_from(builder, value, lane):
    """The i32 of the lane with the number `lane`, an i32."""
    name, kind = "llvm.nvvm.shfl.sync.idx.i32", ir.FunctionType(I32, [I32] * 4)
    shuffle = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(shuffle, [I32(-1), value, lane, I32(31)])


@intrinsic
def warp_place(typingctx, lane):
    """Which of up to 32 values a lane gets from `make_warp_sums`: its number with the five bits reversed."""

    def codegen(context, builder, signature, args):
        return builder.zext(emit_warp_place(builder, builder.trunc(args[0], I32)), I64)

    return i64(i64), codegen


def emit_warp_place(builder, lane):
    """The same of an i32."""
    return builder.lshr(builder.bitreverse(lane), I32(27))


def emit_warp_sum(builder, values, lane):
    """The warp's sum of one of up to 32 values; see `make_warp_sums`."""
    for mask in (16, 8, 4, 2, 1):
        upper = builder.icmp_signed("!=", builder.and_(lane, I32(mask)), I32(0))
        kept = []
        for n in range(0, len(values) - 1, 2):
            own = builder.select(upper, values[n + 1], values[n])
            other = builder.select(upper, values[n], values[n + 1])
            kept.append(builder.fadd(own, shuffle_xor(builder, other, mask)))
        if len(values) % 2:
            kept.append(builder.fadd(values[-1], shuffle_xor(builder, values[-1], mask)))
        values = kept
    return values[0]


@cache
def make_warp_sums(count):
    """Intrinsic (x, s, lane) -> the sum over the warp of s x_n with n = `warp_place` of the lane.

    Lanes for which that n is `count` or more get something else. Each of five rounds halves the number of values: a
    lane keeps one of two, gives the other to its partner and adds what it gets.
    """
    kind = types.UniTuple(f64, count)
    assert count <= 32

    @intrinsic
    def warp_sums(typingctx, x, s, lane):
        def codegen(context, builder, signature, args):
            values = [builder.fmul(x, args[1]) for x in fields(builder, args[0], count)]
            return emit_warp_sum(builder, values, builder.trunc(args[2], I32))

        return f64(kind, f64, i64), codegen

    return warp_sums
