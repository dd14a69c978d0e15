"""The GPU as md4 sees it: the one importer of numba.cuda's runtime, streams, and memory with a hard cap."""

import os
import weakref
from collections import deque
from functools import cache
from itertools import count
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
from md4.locks import Lock, locked, once

F64, F64_2D = types.float64[::1], types.float64[:, ::1]
I32 = types.int32[::1]
I64, I64_2D = types.int64[::1], types.int64[:, ::1]

# Copies from host memory up to this size are asynchronous, says the CUDA programming guide; longer ones may not be.
UNWAITED_BYTES = 64 << 10
# Of what is copied to the device.
ITEM_BYTES = 8
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


def note_fork():
    """Called in a child process: had the parent used the GPU, or asked for it?"""
    global forked_after_use  # noqa: PLW0603 what a fork finds concerns the whole process
    forked_after_use = forked_after_use or (gpu_available.cache_info().currsize > 0 and gpu_available())


forked_after_use = False
os.register_at_fork(after_in_child=note_fork)


def check_not_forked():
    """DeviceError in a process that was forked from one that had used the GPU: CUDA would fail or hang in it."""
    if forked_after_use:
        raise DeviceError(
            "this process was forked from one that had looked for the GPU, and CUDA does not work in such processes; "
            "start processes by multiprocessing.get_context('spawn'), fork before md4 is used, or take backend='cpu'."
        )


def require_gpu():
    """DeviceError where there is no usable GPU."""
    check_not_forked()
    if not gpu_available():
        raise DeviceError(
            "backend='cuda' needs an NVIDIA GPU with its driver and CUDA toolkit wheels: pip install 'md4[cu13]' or "
            "'md4[cu12]'; `md4 info` shows what is found. backend='cpu' works without."
        )


def current_capability():
    """Compute capability (major, minor) of the current device."""
    return tuple(cuda.get_current_device().compute_capability)


def current_device():
    """Number of the device of this thread's context, which is made where there is none."""
    error, device = driver.cuCtxGetDevice()
    return cuda.current_context().device.id if error else int(device)


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


class DeviceLock(Lock):
    """A lock of what works on a GPU, which a process that was forked from one that used it is refused."""

    def __enter__(self):
        check_not_forked()
        return super().__enter__()


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


class Loan:
    """Device memory on loan from a pool. It goes back when it is given back or when nobody refers to the loan any more.

    The second is for what an exception or an interrupt leaves behind. The loan does not hold the memory, the pool does:
    where garbage is collected in cycles, Numba would free memory that only the garbage refers to before `__del__` runs.

    Attributes
    ----------
    size : int
        Bytes.
    """

    __slots__ = ("__weakref__", "number", "returned", "size", "token")

    def __init__(self, number, token, size, returned):
        self.number, self.token, self.size, self.returned = number, token, size, returned

    def give_back(self):
        """Tells the pool, which takes a loan back once."""
        self.returned.append((self.number, self.token, True))


class FreshLoan(Loan):
    """A loan to another stream, which may still be at work on what nobody has given back: that is freed instead."""

    __slots__ = ()

    def __del__(self):
        self.returned.append((self.number, self.token, False))


class OrderedLoan(Loan):
    """A loan to the engine's stream: whoever has the memory next uses it later."""

    __slots__ = ()

    def __del__(self):
        self.returned.append((self.number, self.token, True))


def lifetime(memory):
    """What lives as long as device memory of Numba's is used; slices of an array are uses of the same."""
    return memory._mem.free.__self__


def forget(number, live, dropped):
    """Called when Numba is about to free memory. It knows nothing of the pool, which could not end otherwise."""
    size = live.pop(number, None)
    if size is not None:
        dropped.append(size)


class Pool:
    """Device memory of one engine: buffers are reused in stream order, the sum never exceeds the cap.

    What is allocated counts until the driver has it back: while a caller or another library refers to it, and then
    until Numba, which puts that off, has freed it.

    Parameters
    ----------
    max_memory : float, optional
        Cap in MB; by default what is free on the device when memory is asked for.
    """

    def __init__(self, max_memory=None):
        self.cap = None if max_memory is None else int(max_memory * 1e6)
        self.peak, self.free, self.lock = 0, None, Lock()
        # Memory by its number; numbers that are on loan, with the token of the loan; idle ones by their size.
        self.memory, self.lent, self.idle = {}, {}, {}
        # All three change whenever Python drops an object, in any thread: by single operations that cannot be torn.
        self.live, self.dropped, self.returned = {}, deque(), deque()
        self.numbers = count()

    def facts(self):
        """What there is to show of it, as (name, value)."""
        cap = "none" if self.cap is None else size_text(self.cap)
        return [("device memory held", size_text(self.held)), ("most held", size_text(self.peak)), ("memory cap", cap)]

    @property
    def held(self):
        """Bytes that are allocated."""
        return sum(list(self.live.values())) + sum(list(self.dropped))

    @locked
    def left(self):
        """Bytes that can still be handed out, idle buffers included."""
        return self._room() + self._idle_bytes() + sum(list(self.dropped))

    def _room(self):
        """Bytes that can be allocated at once."""
        if self.free is None:
            self.free = max(0, cuda.current_context().get_memory_info()[0] - RESERVE_BYTES)
        return self.free if self.cap is None else min(self.free, self.cap - self.held)

    def _idle_bytes(self):
        self._collect()
        return sum(size * len(numbers) for size, numbers in self.idle.items())

    def _collect(self):
        """Takes back what was returned: each loan once, however often it says so."""
        while self.returned:
            number, token, ordered = self.returned.popleft()
            if self.lent.get(number) == token:
                if ordered:
                    self.idle.setdefault(self.memory[number].size, {})[number] = None
                else:
                    self.memory.pop(number)
                del self.lent[number]

    @locked
    def get(self, items):
        """A buffer of 8-byte items, contents undefined.

        Raises
        ------
        MemoryLimitError
            It would exceed the cap or the memory there is.
        """
        self._collect()
        size = bucket(ITEM_BYTES * items)
        numbers = self.idle.setdefault(size, {})
        return self._lend(next(reversed(numbers)) if numbers else self._allocate(size), items, OrderedLoan)

    @locked
    def fresh(self, items):
        """A buffer that no earlier work may still use, for another stream; `get` gives any."""
        return self._lend(self._allocate(bucket(ITEM_BYTES * items)), items, FreshLoan)

    def _lend(self, number, items, kind):
        """The buffer of an idle number; an interrupt leaves it idle or returned."""
        token, memory = next(self.numbers), self.memory[number]
        try:
            self.lent[number] = token
            del self.idle[memory.size][number]
            loan = kind(number, token, memory.size, self.returned)
            return Buffer(memory.device_pointer_value, (items,), ITEM_BYTES, loan)
        except BaseException:
            self.returned.append((number, token, True))
            raise

    def _allocate(self, size):
        """The number of new memory, which is idle."""
        self.free = None  # others use the device too
        if size > self._room():
            self.trim()
        limit = self._room()
        if size > limit:
            raise MemoryLimitError(
                f"{size / 1e6:.1f} MB of device memory are needed, but {limit / 1e6:.1f} MB may be used; "
                "raise max_memory or compute less at once."
            )
        memory, number = cuda.current_context().memalloc(size), next(self.numbers)
        weakref.finalize(lifetime(memory), forget, number, self.live, self.dropped)
        self.live[number] = size  # an interrupt before it frees the memory, and nothing has been booked
        self.memory[number] = memory
        self.idle.setdefault(size, {})[number] = self.free = None
        self.peak = max(self.peak, self.held)
        return number

    def release(self, buffer):
        """Takes a buffer of `get` or `fresh` back; work already on the stream may still use it."""
        buffer.owner.give_back()

    @locked
    def trim(self):
        """Frees all that is not on loan, and what Numba has yet to free."""
        self._collect()
        self.idle, self.free = {}, None
        for number in [number for number in self.memory if number not in self.lent]:
            self.memory.pop(number)
        waiting = len(self.dropped)
        cuda.current_context().deallocations.clear()
        for _ in range(waiting):
            self.dropped.popleft()

    @locked
    def array(self, shape, dtype=np.float64):
        """A device array, real or complex, for a caller to keep; its share of the cap returns when it is gone."""
        size = np.dtype(dtype).itemsize
        loan = self.get(max(1, prod(shape) * size // ITEM_BYTES)).owner
        strides = tuple(size * prod(shape[n + 1 :]) for n in range(len(shape)))
        memory = self.memory.pop(loan.number)
        del self.lent[loan.number]  # never lent again: a caller's work on it is in no order with ours
        return DeviceArray(shape, strides, dtype, gpu_data=memory)

    def watch(self, host):
        """Counts an array in host memory against the cap, too, for as long as it is there."""
        number = next(self.numbers)
        weakref.finalize(host, self.live.pop, number, None)
        self.live[number] = host.nbytes
        return host

    def upload(self, arrays, stream, fresh=False):
        """Host arrays of 8-byte items, one after the other in one buffer (see `fresh`), and where each begins.

        Raises
        ------
        TypeError
            Items of another size, whose bytes a kernel would misread.
        """
        arrays = [np.ascontiguousarray(a) for a in arrays]
        for array in arrays:
            if array.dtype.itemsize != ITEM_BYTES:
                raise TypeError(f"items of {array.dtype} are not of {ITEM_BYTES} bytes.")
        packed = np.concatenate([a.reshape(-1).view(np.int64) for a in arrays])
        buffer = (self.fresh if fresh else self.get)(max(1, packed.size))
        copy_to_device(buffer.pointer, packed, stream)
        edges = np.cumsum([0, *(a.size for a in arrays)]).tolist()
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


def table_on_device(make, *args):
    """A constant table made by `make(*args)`, on the current device once a process."""
    return table_on(current_device(), make, *args)


@once
def table_on(device, make, *args):
    """The table on a device, which is the current one."""
    table = np.array(make(*args))
    array = cuda.to_device(table)
    cuda.default_stream().synchronize()  # streams of other libraries do not wait for the default stream
    return Buffer(array.device_ctypes_pointer.value, table.shape, table.itemsize, array)
