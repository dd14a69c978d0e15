"""The GPU as md4 sees it: the one importer of numba.cuda's runtime, streams, and memory with a hard cap."""

from functools import cache

import numpy as np
from numba import cuda
from numba.cuda import types

from md4.errors import ArgumentError, DeviceError, MemoryLimitError

__all__ = ["F64", "I32", "I64", "Pool", "as_stream", "cuda", "gpu_available", "jit_device", "types"]

F64, F64_2D = types.float64[::1], types.float64[:, ::1]
I32, I32_2D = types.int32[::1], types.int32[:, ::1]
I64, I64_2D = types.int64[::1], types.int64[:, ::1]

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
    if hasattr(stream, "auto_synchronize"):
        return stream
    handle = getattr(stream, "cuda_stream", getattr(stream, "ptr", stream))
    if isinstance(handle, int):
        return cuda.external_stream(handle) if handle else cuda.default_stream()
    raise ArgumentError(f"stream must be an integer handle or a Numba, CuPy or PyTorch stream, not {stream!r}.")


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
        self.held = 0
        self.idle = {}

    def left(self):
        """Bytes that can still be handed out, idle buffers included."""
        idle = sum(size * len(buffers) for size, buffers in self.idle.items())
        free = max(0, cuda.current_context().get_memory_info()[0] - RESERVE_BYTES) + idle
        return free if self.cap is None else min(free, self.cap - self.held + idle)

    def get(self, count, dtype=np.float64):
        """A 1-D device array of at least `count` items, contents undefined.

        Raises
        ------
        MemoryLimitError
            It would exceed the cap or the memory there is.
        """
        itemsize = np.dtype(dtype).itemsize
        size = bucket(int(count) * itemsize)
        buffers = self.idle.get(size)
        if buffers:
            raw = buffers.pop()
        else:
            raw = self._allocate(size)
        return raw.view(dtype)

    def _allocate(self, size):
        if self.cap is not None and self.held + size > self.cap:
            self.trim()
        limit = self.left()
        if size > limit:
            raise MemoryLimitError(
                f"{size / 1e6:.1f} MB of device memory are needed, but {limit / 1e6:.1f} MB may be used; "
                "raise max_memory or compute less at once."
            )
        self.held += size
        return cuda.device_array(size, np.uint8)

    def release(self, array):
        """Gives a buffer of `get` back; work already on the stream may still use it."""
        raw = array.view(np.uint8)
        self.idle.setdefault(raw.size, []).append(raw)

    def trim(self):
        """Frees idle buffers."""
        self.held -= sum(size * len(buffers) for size, buffers in self.idle.items())
        self.idle = {}
        cuda.current_context().deallocations.clear()

    def upload(self, array, stream):
        """A host array in a pool buffer."""
        array = np.ascontiguousarray(array).reshape(-1)
        buffer = self.get(max(1, array.size), array.dtype)
        if array.size:
            buffer[: array.size].copy_to_device(array, stream=stream)
        return buffer


@cache
def table_on_device(make, *args):
    """A constant table made by `make(*args)` as a device array, once a process."""
    return cuda.to_device(np.ascontiguousarray(make(*args)))
