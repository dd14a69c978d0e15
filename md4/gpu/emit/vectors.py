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
    doubles_if,
    element_address,
    fields,
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
def make_store_vector(count, stride):
    """Intrinsic (x, address): x_n to shared memory at address + n stride, in bytes."""
    kind = types.UniTuple(f64, count)

    @intrinsic
    def store_vector(typingctx, x, address):
        def codegen(context, builder, signature, args):
            for n, value in enumerate(fields(builder, args[0], count)):
                address = builder.add(args[1], I32(stride * n))
                builder.store(value, builder.inttoptr(address, ir.PointerType(DOUBLE, 3)), align=8)
            return context.get_dummy_value()

        return types.void(kind, types.int32), codegen

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
