"""Single numbers of a thread: loads, stores, atomic additions, addresses and quotients of indices."""

from md4.gpu.emit.instructions import (
    GLOBAL,
    add_double,
    address_plus,
    global_number,
    in_tf32,
    load,
    shared_int,
    shared_real,
    store,
)
from md4.gpu.emit.values import FP32, INT, OPEN, f64, i32, i64, select, tuple_of, word

f32 = FP32.numba


@word(f64, i32)
def load_shared(address):
    """The double at a shared address."""
    return shared_real(address)


@word(i32, i32)
def load_shared_int(address):
    """The 32-bit integer at a shared address."""
    return shared_int(address)


@word(None, i32, i32)
def store_shared_int(address, value):
    """Writes the 32-bit integer at a shared address."""
    store(address, [value])


@word(f64, i64)
def load_at(address):
    """The double of global memory at an address, which no one writes meanwhile."""
    return global_number(address)


@word(tuple_of(INT, 2), i64)
def load_two_ints(address):
    """Both 32-bit integers of an 8-byte item of global memory, which no one writes meanwhile."""
    return load("global.nc", address, kind=INT, count=2)


@word(f64, OPEN, i64)
def load_global(array, index):
    """array[index] of an array that no one writes meanwhile."""
    return global_number(array.at(index))


@word(None, OPEN, i64, f64)
def add_global(array, index, value):
    """array[index] += value, atomically."""
    add_double(array.at(index), value)


@word(None, i64, f64)
def store_at(address, value):
    """Writes the double of global memory at an address."""
    store(address, [value], space=GLOBAL)


@word(None, i64, f64)
def add_at(address, value):
    """Atomic addition to the double of global memory at an address."""
    add_double(address, value)


@word(f32, i32)
def load_shared_float(address):
    """The float at a shared address."""
    return shared_real(address, 0, FP32)


@word(None, i64, f32, i32)
def store_tf32_at(address, value, last):
    """Writes a float to global memory at an address, rounded to TF32 if it is the `last` one (1, else 0) of a sum."""
    store(address, [select(last > 0, in_tf32(value), value)], space=GLOBAL)


@word(None, i64, f32, i32)
def add_tf32_at(address, value, last):
    """Adds a float to that of global memory at an address, which this thread has written; the rest as before."""
    total = load("global", address, kind=FP32)[0] + value
    store(address, [select(last > 0, in_tf32(total), total)], space=GLOBAL)


@word(f32, f64)
def round_to_tf32(value):
    """A double as a float that TF32 has."""
    return in_tf32(value)


@word(i64, i64, i32, i64)
def address_at(address, index, stride):
    """address + index stride, of 32-bit numbers: one instruction."""
    return address_plus(address, index, stride.i32)


@word(i64, i64, i64)
def quotient(n, by):
    """n // by of non-negative numbers below 2^32: in 64 bits the device divides by a long subroutine."""
    return (n.i32 // by.i32).u64
