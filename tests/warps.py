"""A device of plain Python: kernels of warps run on host memory, a thread of Python for each of theirs.

For kernels that use no shared memory and no intrinsics but those listed in `Cuda` and `running`. It checks what they
compute and how memory is handed around, not that they compile (tests/test_offline.py) or are fast.
"""

import ctypes
import threading
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
from cuda.bindings import driver
from numba.cuda.cudadrv.driver import AutoFreePointer

from md4.gpu import buffers, pool
from md4.gpu import context as device
from md4.gpu import shell_pairs as device_pairs
from md4.gpu.buffers import Buffer
from md4.gpu.context import DeviceContext
from md4.gpu.kernels import digestion as digest
from md4.gpu.kernels import shell_pairs as pairs


class Context:
    """What `md4.gpu.pool.Pool` asks of Numba's: memory, full of NaN, behind Numba's own pointers to it."""

    deallocations, allocations = set(), {}

    def memalloc(self, size):
        array = np.full(size // 8, np.nan)
        address = array.ctypes.data
        free = partial(self.allocations.pop, address)
        memory = AutoFreePointer(None, driver.CUdeviceptr(address), size, finalizer=free)
        self.allocations[address] = memory, array
        return memory.own()

    def get_memory_info(self):
        return 1 << 40, 1 << 40


class Cuda:
    """What kernels ask of `numba.cuda`."""

    def __init__(self):
        self.local, self.votes, self.barriers = threading.local(), {}, {}

    threadIdx = property(lambda self: SimpleNamespace(x=self.local.thread))
    blockIdx = property(lambda self: SimpleNamespace(x=self.local.block))
    popc = staticmethod(lambda bits: int(bits).bit_count())
    current_context = Context

    def exchanged(self, value):
        """`value` of all lanes of the warp."""
        warp, lane = divmod(self.local.thread, 32)
        self.votes[warp][lane] = value
        self.barriers[warp].wait()
        values = list(self.votes[warp])
        self.barriers[warp].wait()
        return values

    def ballot_sync(self, mask, flag):
        return sum(1 << lane for lane, vote in enumerate(self.exchanged(flag)) if vote)

    def shfl_xor_sync(self, mask, value, other):
        return self.exchanged(value)[self.local.thread % 32 ^ other]

    def run(self, function, block, threads, args):
        """One block."""
        failed = []

        def body(thread):
            self.local.block, self.local.thread = block, thread
            try:
                function(*args)
            except Exception as error:  # or the others wait forever
                failed.append(error)
                self.barriers[thread // 32].abort()

        for warp in range(threads // 32):
            self.votes[warp], self.barriers[warp] = [None] * 32, threading.Barrier(32)
        work = [threading.Thread(target=body, args=(n,)) for n in range(threads)]
        for thread in work:
            thread.start()
        for thread in work:
            thread.join()
        if failed:
            raise next((e for e in failed if not isinstance(e, threading.BrokenBarrierError)), failed[0])

    def launch(self, variant, grid, block, shared, *args):
        """As `md4.gpu.context.DeviceContext.launch`."""
        kernel = variant.kernel()
        for n in range(grid):
            self.run(kernel.function, n, block, matched(args, kernel.types()))


def matched(args, kinds):
    """Arguments of a kernel, buffers as arrays of their types, also within groups."""
    out = []
    for arg, kind in zip(args, kinds, strict=True):
        if isinstance(arg, tuple):
            out.append(type(arg)(*matched(arg, kind.types)))
        else:
            out.append(host_array(arg, kind.dtype.name) if isinstance(arg, Buffer) else arg)
    return out


def host_array(buffer, dtype):
    """What a buffer of this device holds, as an array over its memory."""
    memory = (ctypes.c_char * (8 * buffer.size)).from_address(buffer.pointer)
    return np.frombuffer(memory, dtype).reshape(buffer.shape)


def copy_in(pointer, array, stream):
    ctypes.memmove(pointer, array.ctypes.data, array.nbytes)


def copy_out(array, pointer, stream):
    ctypes.memmove(array.ctypes.data, pointer, array.nbytes)


def new_context(stream, cap=None):
    """A device context on this device."""
    context = object.__new__(DeviceContext)
    context.stream, context.pool, context.unit, context.device = stream, pool.Pool(cap), "dmma16", 0
    return context


@contextmanager
def running():
    """Kernels of pairs and of their bounds run on host memory."""
    cuda = Cuda()
    stream = SimpleNamespace(handle=0, synchronize=lambda: None)
    stand_ins = {
        "cuda": cuda, "jit_device": lambda f: f, "quotient": lambda a, b: a // b, "i64": int,
        "copy_to_device": copy_in, "copy_to_host": copy_out, "urgent_stream": lambda: stream,
    }  # fmt: skip
    with ExitStack() as stack:
        for module in (buffers, device, device_pairs, digest, pairs, pool):
            for name, stand_in in stand_ins.items():
                if hasattr(module, name):
                    stack.enter_context(patch.object(module, name, stand_in))
        stack.enter_context(patch.object(DeviceContext, "launch", cuda.launch))
        yield stream
