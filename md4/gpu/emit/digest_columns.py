"""Register columns for the digestion: short tuples of doubles that a thread keeps, and what is done with a whole one.

Intrinsics in the manner of `md4.gpu.emit.instructions`, unrolled while code is generated.
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
    call_asm,
    element_address,
    fields,
    fma,
    global_double,
    mma_8x8x4,
    shared_double,
)

i64, f64 = types.int64, types.float64


@intrinsic
def load_shared(typingctx, address):
    """The double at a shared address."""

    def codegen(context, builder, signature, args):
        return shared_double(builder, args[0])

    return f64(types.int32), codegen


@intrinsic
def load_global(typingctx, array, index):
    """array[index] of an array that no one writes meanwhile."""

    def codegen(context, builder, signature, args):
        address = element_address(context, builder, signature.args[0], *args)
        return global_double(builder, address)

    return f64(array, i64), codegen


@intrinsic
def add_global(typingctx, array, index, value):
    """array[index] += value, atomically."""

    def codegen(context, builder, signature, args):
        address = element_address(context, builder, signature.args[0], *args[:2])
        add_double(builder, address, args[2])
        return context.get_dummy_value()

    return types.void(array, i64, f64), codegen


@intrinsic
def quotient(typingctx, n, by):
    """n // by of non-negative numbers below 2^31: in 64 bits the device divides by a long subroutine."""

    def codegen(context, builder, signature, args):
        return builder.zext(builder.udiv(*(builder.trunc(x, I32) for x in args)), I64)

    return i64(i64, i64), codegen


@intrinsic
def address_at(typingctx, address, index, stride):
    """address + index stride, of 32-bit numbers: one instruction."""

    def codegen(context, builder, signature, args):
        text = "mad.wide.s32 $0, $1, $2, $3;"
        return call_asm(builder, I64, [args[1], builder.trunc(args[2], I32), args[0]], text, "=l,r,r,l")

    return i64(i64, types.int32, i64), codegen


@intrinsic
def add_at(typingctx, address, value):
    """Atomic addition to the double of global memory at an address."""

    def codegen(context, builder, signature, args):
        add_double(builder, *args)
        return context.get_dummy_value()

    return types.void(i64, f64), codegen


@cache
def make_load_column(count):
    """Intrinsic (address, stride, limit) -> the doubles of global memory at address + n stride, n < count.

    No one writes them meanwhile; 0 from n = limit on.
    """
    kind = types.UniTuple(f64, count)

    @intrinsic
    def load_column(typingctx, address, stride, limit):
        def codegen(context, builder, signature, args):
            address, step, limit = args
            values = []
            for n in range(count):
                text = (
                    f"{{ .reg .pred p; setp.gt.s32 p, $2, {n}; mov.f64 $0, 0d0000000000000000; "
                    "@p ld.global.nc.f64 $0, [$1]; }"
                )
                values.append(call_asm(builder, DOUBLE, [address, limit], text, "=&d,l,r"))
                address = builder.add(address, step)
            return aggregate(builder, context.get_value_type(kind), values)

        return kind(i64, i64, types.int32), codegen

    return load_column


@cache
def make_copy_column(count, row):
    """Intrinsic (target, address, stride, limit): the lane starts to copy the doubles at address + n stride, n < count.

    To shared memory at target + n row; zeros from n = limit on.
    """

    @intrinsic
    def copy_column(typingctx, target, address, stride, limit):
        def codegen(context, builder, signature, args):
            target, address, step, limit = args
            for n in range(count):
                text = (
                    f"{{ .reg .pred p; .reg .b32 size; setp.gt.s32 p, $2, {n}; selp.b32 size, 8, 0, p; "
                    f"cp.async.ca.shared.global [$0+{row * n}], [$1], 8, size; }}"
                )
                call_asm(builder, ir.VoidType(), [target, address, limit], text, "r,l,r", effects=True)
                address = builder.add(address, step)
            return context.get_dummy_value()

        return types.void(types.int32, i64, i64, types.int32), codegen

    return copy_column


@cache
def make_take_column(count, stride):
    """Intrinsic address -> `count` doubles of shared memory, `stride` bytes apart."""
    kind = types.UniTuple(f64, count)

    @intrinsic
    def take_column(typingctx, address):
        def codegen(context, builder, signature, args):
            values = [shared_double(builder, args[0], stride * n) for n in range(count)]
            return aggregate(builder, context.get_value_type(kind), values)

        return kind(types.int32), codegen

    return take_column


@cache
def make_column_sums(count, row):
    """Intrinsic (address, factors, lane, n) -> sum over 32 columns of x[n, column] factors[column].

    x is in shared memory, rows `row` bytes apart, at most 8 of them; a lane gets the sum of its n, which must be lane/4
    where that is below `count`. The tensor cores do it: the 8 columns of the product are all the same.
    """
    assert count <= 8

    @intrinsic
    def column_sums(typingctx, address, factors, lane, n):
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

    return column_sums


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
            parts = [args[2], ir.Constant(DOUBLE, 0.0)]  # two chains, for the latency of one
            for n, (left, right) in enumerate(zip(fields(builder, args[0], count), fields(builder, args[1], count))):
                parts[n % 2] = fma(builder, left, right, parts[n % 2])
            return builder.fadd(*parts) if count > 1 else parts[0]

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


@intrinsic
def warp_place(typingctx, lane):
    """Which of up to 32 values a lane gets from `make_warp_sums`: its number with the five bits reversed."""

    def codegen(context, builder, signature, args):
        return builder.zext(emit_warp_place(builder, builder.trunc(args[0], I32)), I64)

    return i64(i64), codegen


def emit_warp_place(builder, lane):
    """The same of an i32."""
    return builder.lshr(call_asm(builder, I32, [lane], "brev.b32 $0, $1;", "=r,r"), I32(27))


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
