"""Sums over the 32 lanes of a warp, and over runs of them."""

from functools import cache

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from md4.gpu.emit.instructions import DOUBLE, FLOAT, FP64, I32, I64, fields

i64, f64 = types.int64, types.float64
PAIR = ir.VectorType(I32, 2)


def shuffled(builder, value, how, by):
    """The double, or the float, of another lane: `how` and `by` are those of PTX's shfl."""
    name, kind = f"llvm.nvvm.shfl.sync.{how}.i32", ir.FunctionType(I32, [I32] * 4)
    shuffle = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    if value.type == FLOAT:
        other = builder.call(shuffle, [I32(-1), builder.bitcast(value, I32), I32(by), I32(31)])
        return builder.bitcast(other, FLOAT)
    halves = builder.bitcast(value, PAIR)
    for n in range(2):
        half = builder.extract_element(halves, I32(n))
        other = builder.call(shuffle, [I32(-1), half, I32(by), I32(31)])
        halves = builder.insert_element(halves, other, I32(n))
    return builder.bitcast(halves, DOUBLE)


def shuffle_xor(builder, value, mask):
    """The double, or the float, of the lane whose number differs in the bit `mask`."""
    return shuffled(builder, value, "bfly", mask)


def emit_run_sum(builder, value, left, most):
    """The first lane of each run of lanes gets the sum of the run's values; others get something else.

    `left` are the lanes from a lane up to the end of its run, itself included (i32), at most `most`. Values of lanes
    in no run may be anything.
    """
    step = 1
    while step < most:
        other = shuffled(builder, value, "down", step)
        zero = ir.Constant(value.type, 0.0)
        there = builder.icmp_signed(">", left, I32(step))
        value = builder.fadd(value, builder.select(there, other, zero))
        step *= 2
    return value


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
        values = emit_halved(builder, values, lane, mask)
    return values[0]


def emit_halved(builder, values, lane, mask):
    """Sums of the values of two lanes whose numbers differ in the bit `mask`: each keeps one of two values.

    The lane with the bit keeps the second. Both keep the last of an odd number.
    """
    upper = builder.icmp_signed("!=", builder.and_(lane, I32(mask)), I32(0))
    kept = []
    for n in range(0, len(values) - 1, 2):
        own = builder.select(upper, values[n + 1], values[n])
        other = builder.select(upper, values[n], values[n + 1])
        kept.append(builder.fadd(own, shuffle_xor(builder, other, mask)))
    if len(values) % 2:
        kept.append(builder.fadd(values[-1], shuffle_xor(builder, values[-1], mask)))
    return kept


@cache
def make_warp_sums(count, precision=FP64):
    """Intrinsic (x, s, lane) -> the sum over the warp of s x_n with n = `warp_place` of the lane.

    Lanes for which that n is `count` or more get something else. Each of five rounds halves the number of values: a
    lane keeps one of two, gives the other to its partner and adds what it gets.
    """
    real = precision.numba
    kind = types.UniTuple(real, count)
    assert count <= 32

    @intrinsic
    def warp_sums(typingctx, x, s, lane):
        def codegen(context, builder, signature, args):
            values = [builder.fmul(x, args[1]) for x in fields(builder, args[0], count)]
            return emit_warp_sum(builder, values, builder.trunc(args[2], I32))

        return real(kind, real, i64), codegen

    return warp_sums
