"""Vectors: short tuples of doubles that a thread keeps in registers, and what is done with a whole one.

Intrinsics in the manner of `md4.gpu.emit.instructions`, unrolled while code is generated.
"""

from functools import cache

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from md4.gpu.emit.instructions import (
    DOUBLE,
    FP64,
    I32,
    I64,
    aggregate,
    copy_async,
    doubles_if,
    element_address,
    fields,
    fma,
    shared_double,
    widened,
)
from md4.gpu.emit.scalars import add_double_if

i64, f64 = types.int64, types.float64


@cache
def make_load_vector(count):
    """Intrinsic (address, stride, limit) -> the doubles of global memory at address + n stride, n < count.

    No one writes them meanwhile; 0 from n = limit on.
    """
    kind = types.UniTuple(f64, count)

    @intrinsic
    def load_vector(typingctx, address, stride, limit):
        def codegen(context, builder, signature, args):
            address, step, limit = args
            values = []
            for n in range(count):
                values += doubles_if(builder, address, (limit, n))
                address = builder.add(address, step)
            return aggregate(builder, context.get_value_type(kind), values)

        return kind(i64, i64, types.int32), codegen

    return load_vector


@cache
def make_copy_vector(count, row):
    """Intrinsic (target, address, stride, limit): the lane starts to copy the doubles at address + n stride, n < count.

    To shared memory at target + n row; zeros from n = limit on.
    """

    @intrinsic
    def copy_vector(typingctx, target, address, stride, limit):
        def codegen(context, builder, signature, args):
            target, address, step, limit = args
            for n in range(count):
                filled = builder.select(builder.icmp_signed(">", limit, I32(n)), I32(8), I32(0))
                copy_async(builder, target, address, row * n, size=8, filled=filled)
                address = builder.add(address, step)
            return context.get_dummy_value()

        return types.void(types.int32, i64, i64, types.int32), codegen

    return copy_vector


@cache
def make_read_vector(count, stride):
    """Intrinsic address -> `count` doubles of shared memory, `stride` bytes apart."""
    kind = types.UniTuple(f64, count)

    @intrinsic
    def read_vector(typingctx, address):
        def codegen(context, builder, signature, args):
            values = [shared_double(builder, args[0], stride * n) for n in range(count)]
            return aggregate(builder, context.get_value_type(kind), values)

        return kind(types.int32), codegen

    return read_vector


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
def make_store_vector(count):
    """Intrinsic (x, scale, address, stride): scale x_n to shared memory at address + n stride, both in bytes."""
    kind = types.UniTuple(f64, count)

    @intrinsic
    def store_vector(typingctx, x, scale, address, stride):
        def codegen(context, builder, signature, args):
            address = args[2]
            for value in fields(builder, args[0], count):
                target = builder.inttoptr(address, ir.PointerType(DOUBLE, 3))
                builder.store(builder.fmul(value, args[1]), target, align=8)
                address = builder.add(address, args[3])
            return context.get_dummy_value()

        return types.void(kind, f64, types.int32, types.int32), codegen

    return store_vector


@cache
def make_add_vector(count, precision=FP64):
    """Intrinsic (x, array, first, stride, limit): array[first + n stride] += x_n atomically for n < limit.

    x is in a precision, the array in FP64.
    """
    kind = types.UniTuple(precision.numba, count)

    @intrinsic
    def add_vector(typingctx, x, array, first, stride, limit):
        def codegen(context, builder, signature, args):
            address = element_address(context, builder, signature.args[1], args[1], args[2])
            step, limit = builder.mul(args[3], I64(8)), builder.trunc(args[4], I32)
            for n, value in enumerate(fields(builder, args[0], count)):
                add_double_if(builder, address, widened(builder, value), limit, "gt", n)
                address = builder.add(address, step)
            return context.get_dummy_value()

        return types.void(kind, array, i64, i64, i64), codegen

    return add_vector
