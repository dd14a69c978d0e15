"""Vectors: short tuples of doubles that a thread keeps in registers, and what is done with a whole one.

Words that are unrolled while code is generated.
"""

from functools import cache

from md4.gpu.emit.instructions import add_scaled, load_if, store
from md4.gpu.emit.values import FP64, OPEN, i32, i64, tuple_of, word


@cache
def make_load_vector(count):
    """Intrinsic (address, stride, limit) -> the doubles of global memory at address + n stride, n < count.

    No one writes them meanwhile; 0 from n = limit on.
    """

    @word(tuple_of(FP64, count), i64, i64, i32)
    def load_vector(address, step, limit):
        values = []
        for n in range(count):
            values += load_if(address, (limit, n))
            address = address + step
        return values

    return load_vector


@cache
def make_store_vector(count, stride):
    """Intrinsic (x, address): x_n to shared memory at address + n stride, in bytes."""

    @word(None, tuple_of(FP64, count), i32)
    def store_vector(x, address):
        for n, value in enumerate(x):
            store(address, [value], stride * n)

    return store_vector


@cache
def make_add_vector(count):
    """Intrinsic (x, sums, scales, first, stride, limit): x_n to sums[first + n stride] for n < limit.

    Sums are in fixed point and have scales; see `add_scaled`.
    """

    @word(None, tuple_of(FP64, count), OPEN, OPEN, i64, i64, i64)
    def add_vector(x, sums, scales, first, stride, limit):
        address, scale, step, limit = sums.at(first), scales.at(first), stride * 8, limit.i32
        for n, value in enumerate(x):
            add_scaled(address, scale, value, live=(limit, "gt", n))
            address, scale = address + step, scale + step

    return add_vector
