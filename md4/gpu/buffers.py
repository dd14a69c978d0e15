"""Arrays in device memory and copies to and from them, in the order of a stream."""

import threading
from math import prod

import numpy as np
from cuda.bindings import driver

from md4.errors import DeviceError

# Copies from host memory up to this size are asynchronous, says the CUDA programming guide; longer ones may not be.
UNWAITED_BYTES = 64 << 10


class Transfers(threading.local):
    """How often this thread has copied to a device, or cleared memory there; whoever repeats launches needs to know."""

    count = 0


transfers = Transfers()


class Buffer:
    """A 1-D or 2-D C-contiguous array in device memory, as light as launches want it.

    Attributes
    ----------
    pointer : int
        Device address.
    shape : tuple of int
    itemsize : int
        Bytes.
    owner
        What keeps the memory alive.
    """

    __slots__ = ("itemsize", "owner", "pointer", "shape")

    def __init__(self, pointer, shape, itemsize, owner):
        self.pointer, self.shape, self.itemsize, self.owner = pointer, shape, itemsize, owner

    @property
    def size(self):
        return prod(self.shape)

    def part(self, first, shape):
        """The items from `first` on, in another shape."""
        return Buffer(self.pointer + first * self.itemsize, shape, self.itemsize, self.owner)


def words(nbytes):
    """8-byte items that hold so many bytes."""
    return -(-nbytes // 8)


def as_buffer(array):
    """A device array of any kind as one row of float64."""
    interface = array.__cuda_array_interface__
    return Buffer(interface["data"][0], (prod(interface["shape"]),), 8, array)


def copy_to_device(pointer, array, stream):
    """Copies a contiguous host array in stream order; the array may change once this returns."""
    transfers.count += 1
    if array.nbytes:
        (error,) = driver.cuMemcpyHtoDAsync(pointer, array.ctypes.data, array.nbytes, int(stream.handle))
        check(error, "copying to the device")


def clear(buffer, stream):
    """Sets all items of a buffer to zero, in stream order."""
    transfers.count += 1
    if buffer.size:
        (error,) = driver.cuMemsetD8Async(buffer.pointer, 0, buffer.size * buffer.itemsize, int(stream.handle))
        check(error, "clearing device memory")


def copy_in_pieces(pointer, array, stream):
    """As `copy_to_device`, in pieces so small that the driver does not wait for the stream to come to them."""
    rows = array.reshape(-1).view(np.uint8)
    for first in range(0, rows.size, UNWAITED_BYTES):
        copy_to_device(pointer + first, rows[first : first + UNWAITED_BYTES], stream)


def copy_on_device(target, source, nbytes, stream):
    """Copies between two addresses of a device, in stream order."""
    if nbytes:
        (error,) = driver.cuMemcpyDtoDAsync(target, source, nbytes, int(stream.handle))
        check(error, "copying on the device")


def copy_to_host(array, pointer, stream):
    """Fills a contiguous host array once the stream gets there, and waits for it."""
    (error,) = driver.cuMemcpyDtoHAsync(array.ctypes.data, pointer, array.nbytes, int(stream.handle))
    check(error, "copying from the device")
    stream.synchronize()


def written_array(shape):
    """Host memory that has been written: the system gives pages at the first write, which a copy would wait for."""
    array = np.empty(shape)
    array.fill(0.0)
    return array


def check(error, doing):
    """DeviceError if a driver call failed."""
    if error != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"{doing} failed: {driver.cuGetErrorName(error)[1].decode()}.")
