"""The GPU as md4 sees it: the one importer of numba.cuda's runtime, streams, and memory with a hard cap."""

import weakref
from functools import cache
from math import prod
from operator import index

import numpy as np
from cuda.bindings import driver
from numba import cuda
from numba.cuda import types

from md4.arguments import checked_stream
from md4.display import size_text
from md4.dlpack import DeviceArray
from md4.errors import DeviceError, MemoryLimitError

F64, F64_2D = types.float64[::1], types.float64[:, ::1]
I32 = types.int32[::1]
I64, I64_2D = types.int64[::1], types.int64[:, ::1]

# Copies from host memory up to this size are asynchronous, says the CUDA programming guide; longer ones may not be.
UNWAITED_BYTES = 64 << 10
# Left to the driver and to kernels' local memory when md4 may take all that is free.
RESERVE_BYTES = 512 << 20


def jit_device(function):
    """A device function from plain Python."""
    return cuda.jit(device=True)(function)


@cache
def gpu_available():
    """Whether a usable GPU and CUDA compiler are there."""
    try:
        return bool(cuda.is_available())
    except Exception:  # whatever a broken driver raises, there is no GPU
        return False


def require_gpu():
    """DeviceError where there is no usable GPU."""
    if not gpu_available():
        raise DeviceError(
            "backend='cuda' needs an NVIDIA GPU with its driver and CUDA toolkit wheels: pip install 'md4[cu13]' or "
            "'md4[cu12]'; `md4 info` shows what is found. backend='cpu' works without."
        )


def current_capability():
    """Compute capability (major, minor) of the current device."""
    return tuple(cuda.get_current_device().compute_capability)


def as_stream(stream):
    """Numba stream from None (a new one), an integer handle, or a Numba, CuPy or PyTorch stream.

    Raises
    ------
    ArgumentError
        Anything else.
    """
    if stream is None:
        return cuda.stream()
    if hasattr(checked_stream(stream), "auto_synchronize"):
        return stream
    handle = index(getattr(stream, "cuda_stream", getattr(stream, "ptr", stream)))
    return cuda.external_stream(handle) if handle else cuda.default_stream()


def urgent_stream():
    """A new stream whose kernels go before those that wait on others, and that no work on stream 0 holds up."""
    cuda.current_context()
    error, _, highest = driver.cuCtxGetStreamPriorityRange()
    check(error, "asking for the priorities of streams")
    flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value
    error, handle = driver.cuStreamCreateWithPriority(flags, highest)
    check(error, "making a stream")
    stream = cuda.external_stream(int(handle))
    weakref.finalize(stream, driver.cuStreamDestroy, handle)
    return stream


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

    def words(self):
        """What a kernel takes for it in Numba's calling convention; see `md4.dispatch.Launcher`."""
        shape, item = self.shape, self.itemsize
        if len(shape) == 1:
            return 0, 0, shape[0], item, self.pointer, shape[0], item
        return 0, 0, shape[0] * shape[1], item, self.pointer, *shape, shape[1] * item, item

    def part(self, first, shape):
        """The items from `first` on, in another shape."""
        return Buffer(self.pointer + first * self.itemsize, shape, self.itemsize, self.owner)


def as_buffer(array):
    """A device array of any kind as one row of float64."""
    interface = array.__cuda_array_interface__
    return Buffer(interface["data"][0], (prod(interface["shape"]),), 8, array)


def bucket(nbytes):
    """Size that a request is rounded up to: eight steps to the power of two."""
    step = max(512, 1 << max(0, nbytes.bit_length() - 4))
    return -(-max(1, nbytes) // step) * step


class Pool:
    """Device memory of one engine: buffers are reused in stream order, the sum never exceeds the cap.

    Parameters
    ----------
    max_memory : float, optional
        Cap in MB; by default what is free on the device when memory is asked for.
    """

    def __init__(self, max_memory=None):
        self.cap = None if max_memory is None else int(max_memory * 1e6)
        self.held = self.peak = 0
        self.idle = {}
        self.free = None

    def facts(self):
        """What there is to show of it, as (name, value)."""
        cap = "none" if self.cap is None else size_text(self.cap)
        return [("device memory held", size_text(self.held)), ("most held", size_text(self.peak)), ("memory cap", cap)]

    def left(self):
        """Bytes that can still be handed out, idle buffers included."""
        return self._room() + self._idle_bytes()

    def _room(self):
        """Bytes that can be allocated beside the idle buffers."""
        if self.free is None:
            self.free = max(0, cuda.current_context().get_memory_info()[0] - RESERVE_BYTES)
        return self.free if self.cap is None else min(self.free, self.cap - self.held)

    def _idle_bytes(self):
        return sum(size * len(blocks) for size, blocks in self.idle.items())

    def get(self, count):
        """A buffer of `count` 8-byte items, contents undefined.

        Raises
        ------
        MemoryLimitError
            It would exceed the cap or the memory there is.
        """
        size = bucket(8 * count)
        blocks = self.idle.get(size)
        memory = blocks.pop() if blocks else self._allocate(size)
        return Buffer(memory.device_pointer_value, (count,), 8, memory)

    def fresh(self, count):
        """A buffer that no earlier work may still use, as `get` gives otherwise."""
        memory = self._allocate(bucket(8 * count))
        return Buffer(memory.device_pointer_value, (count,), 8, memory)

    def _allocate(self, size):
        self.free = None  # others use the device too
        if size > self._room():
            self.trim()
        limit = self._room()
        if size > limit:
            raise MemoryLimitError(
                f"{size / 1e6:.1f} MB of device memory are needed, but {limit / 1e6:.1f} MB may be used; "
                "raise max_memory or compute less at once."
            )
        self.held += size
        self.free -= size
        self.peak = max(self.peak, self.held)
        return cuda.current_context().memalloc(size)

    def release(self, buffer):
        """Takes a buffer of `get` or `fresh` back; work already on the stream may still use it."""
        self.idle.setdefault(buffer.owner.size, []).append(buffer.owner)

    def trim(self):
        """Frees idle buffers."""
        self.held -= self._idle_bytes()
        self.idle, self.free = {}, None
        cuda.current_context().deallocations.clear()

    def array(self, shape, dtype=np.float64):
        """A device array, real or complex, for a caller to keep; its share of the cap returns when it is gone."""
        size = np.dtype(dtype).itemsize
        buffer = self.get(prod(shape) * size // 8)
        strides = tuple(size * prod(shape[n + 1 :]) for n in range(len(shape)))
        array = DeviceArray(shape, strides, dtype, gpu_data=buffer.owner)
        weakref.finalize(array, self._forget, buffer.owner.size)
        return array

    def _forget(self, size):
        self.held -= size
        self.free = None

    def upload(self, arrays, stream, fresh=False):
        """Host arrays of 8-byte items, one after the other in one buffer (see `fresh`), and where each begins."""
        rows = [np.ascontiguousarray(a).reshape(-1).view(np.int64) for a in arrays]
        packed = np.concatenate(rows)
        buffer = (self.fresh if fresh else self.get)(max(1, packed.size))
        copy_to_device(buffer.pointer, packed, stream)
        edges = np.cumsum([0, *(r.size for r in rows)]).tolist()
        return buffer, [buffer.part(e, np.shape(a)) for e, a in zip(edges, arrays)]


def copy_to_device(pointer, array, stream):
    """Copies a contiguous host array in stream order; the array may change once this returns."""
    if array.nbytes:
        (error,) = driver.cuMemcpyHtoDAsync(pointer, array.ctypes.data, array.nbytes, int(stream.handle))
        check(error, "copying to the device")


def copy_in_pieces(pointer, array, stream):
    """As `copy_to_device`, in pieces so small that the driver does not wait for the stream to come to them."""
    rows = array.reshape(-1).view(np.uint8)
    for first in range(0, rows.size, UNWAITED_BYTES):
        copy_to_device(pointer + first, rows[first : first + UNWAITED_BYTES], stream)


def copy_to_host(array, pointer, stream):
    """Fills a contiguous host array once the stream gets there, and waits for it."""
    (error,) = driver.cuMemcpyDtoHAsync(array.ctypes.data, pointer, array.nbytes, int(stream.handle))
    check(error, "copying from the device")
    stream.synchronize()


def check(error, doing):
    """DeviceError if a driver call failed."""
    if error != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"{doing} failed: {driver.cuGetErrorName(error)[1].decode()}.")


@cache
def table_on_device(make, *args):
    """A constant table made by `make(*args)`, on the current device once a process."""
    table = np.array(make(*args))
    array = cuda.to_device(table)
    cuda.default_stream().synchronize()  # streams of other libraries do not wait for the default stream
    return Buffer(array.device_ctypes_pointer.value, table.shape, table.itemsize, array)
