"""Register columns for the digestion: short tuples of doubles that a thread keeps, and what is done with a whole one.

Intrinsics in the manner of `md4.ptx`, unrolled while code is generated.
"""

from functools import cache

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from md4.ptx import DOUBLE, I32, I64, aggregate, call_asm, element_address, fields

i64, f64 = types.int64, types.float64


def fma(builder, a, b, c):
    """a b + c, rounded once."""
    kind = ir.FunctionType(DOUBLE, [DOUBLE] * 3)
    function = builder.module.globals.get("llvm.fma.f64") or ir.Function(builder.module, kind, "llvm.fma.f64")
    return builder.call(function, [a, b, c])


@intrinsic
def load_shared(typingctx, address):
    """The double at a shared address."""

    def codegen(context, builder, signature, args):
        return call_asm(builder, DOUBLE, args, "ld.shared.f64 $0, [$1];", "=d,r", effects=True)

    return f64(types.int32), codegen


@intrinsic
def load_global(typingctx, array, index):
    """array[index] of an array that no one writes meanwhile."""

    def codegen(context, builder, signature, args):
        address = element_address(context, builder, signature.args[0], *args)
        return call_asm(builder, DOUBLE, [address], "ld.global.nc.f64 $0, [$1];", "=d,l")

    return f64(array, i64), codegen


@intrinsic
def add_global(typingctx, array, index, value):
    """array[index] += value, atomically."""

    def codegen(context, builder, signature, args):
        address = element_address(context, builder, signature.args[0], *args[:2])
        call_asm(builder, ir.VoidType(), [address, args[2]], "red.global.add.f64 [$0], $1;", "l,d", effects=True)
        return context.get_dummy_value()

    return types.void(array, i64, f64), codegen


@intrinsic
def quotient(typingctx, n, by):
    """n // by of non-negative numbers below 2^31: in 64 bits the device divides by a long subroutine."""

    def codegen(context, builder, signature, args):
        return builder.zext(builder.udiv(*(builder.trunc(x, I32) for x in args)), I64)

    return i64(i64, i64), codegen


@cache
def make_load_column(count):
    """Intrinsic (array, first, stride, limit) -> array[first + n stride] for n < count, 0 from n = limit on."""
    kind = types.UniTuple(f64, count)

    @intrinsic
    def load_column(typingctx, array, first, stride, limit):
        def codegen(context, builder, signature, args):
            address = element_address(context, builder, signature.args[0], args[0], args[1])
            step, limit, values = builder.mul(args[2], I64(8)), builder.trunc(args[3], I32), []
            for n in range(count):
                text = (
                    f"{{ .reg .pred p; setp.gt.s32 p, $2, {n}; mov.f64 $0, 0d0000000000000000; "
                    "@p ld.global.nc.f64 $0, [$1]; }"
                )
                values.append(call_asm(builder, DOUBLE, [address, limit], text, "=&d,l,r"))
                address = builder.add(address, step)
            return aggregate(builder, context.get_value_type(kind), values)

        return kind(array, i64, i64, i64), codegen

    return load_column


@cache
def make_add_scaled(count):
    """Intrinsic (x, y, s) -> x + s y."""
    kind = types.UniTuple(f64, count)

    @intrinsic
    def add_scaled(typingctx, x, y, s):
        def codegen(context, builder, signature, args):
            pairs = zip(fields(builder, args[1], count), fields(builder, args[0], count))
            values = [fma(builder, term, args[2], start) for term, start in pairs]
            return aggregate(builder, context.get_value_type(kind), values)

        return kind(kind, kind, f64), codegen

    return add_scaled


@cache
def make_dot(count):
    """Intrinsic (x, y, start) -> start + sum_n x_n y_n."""
    kind = types.UniTuple(f64, count)

    @intrinsic
    def dot(typingctx, x, y, start):
        def codegen(context, builder, signature, args):
            total = args[2]
            for left, right in zip(fields(builder, args[0], count), fields(builder, args[1], count)):
                total = fma(builder, left, right, total)
            return total

        return f64(kind, kind, f64), codegen

    return dot


@cache
def make_store_column(count):
    """Intrinsic (x, scale, address, stride): scale x_n to shared memory at address + n stride, both in bytes."""
    kind = types.UniTuple(f64, count)

    @intrinsic
    def store_column(typingctx, x, scale, address, stride):
        def codegen(context, builder, signature, args):
            address = args[2]
            for value in fields(builder, args[0], count):
                operands = [address, builder.fmul(value, args[1])]
                call_asm(builder, ir.VoidType(), operands, "st.shared.f64 [$0], $1;", "r,d", effects=True)
                address = builder.add(address, args[3])
            return context.get_dummy_value()

        return types.void(kind, f64, types.int32, types.int32), codegen

    return store_column


def shuffle_xor(builder, value, mask):
    """The double of the lane whose number differs in the bit `mask`."""
    text = (
        "{ .reg .b32 lo, hi; mov.b64 {lo, hi}, $1; "
        f"shfl.sync.bfly.b32 lo, lo, {mask}, 31, -1; shfl.sync.bfly.b32 hi, hi, {mask}, 31, -1; "
        "mov.b64 $0, {lo, hi}; }"
    )
    return call_asm(builder, DOUBLE, [value], text, "=d,d", effects=True)


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
    """Intrinsic (x, s, lane) -> the sum over the warp of s x_n, n the lane's number with its five bits reversed.

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
