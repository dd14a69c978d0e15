"""A stand-in for CuPy on the emulated device: NumPy on the device's memory, for `md4.gpu.algebra`.

Arrays lie in memory of the current allocator, as those of CuPy do, with a pointer and a stream-ordered `get` and `set`.
Everything is done at once, but copies of another stream than md4's only when they are waited for. Functions that md4
does not call are missing, so that a call of one is an error. So is the use of a stream, an event or an array while
another device than theirs is current.
"""

import ctypes
import sys
from contextlib import contextmanager, nullcontext
from itertools import count
from math import prod
from threading import local
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import numpy as np
from scipy.linalg import blas

from emulator.host import STREAMS
from md4.gpu import context

# Functions that CuPy has under the same names, with the same parameters.
SAME = (
    "add", "arange", "ascontiguousarray", "divide", "full", "matmul", "minimum", "sqrt", "tril", "vdot",
)  # fmt: skip
FACTORISATIONS = "cholesky", "eigh", "svd"
# Host memory that can be pinned.
PINNED_BYTES = 1 << 30


def plain(value):
    """An array of the device for NumPy, or a list of them."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value.view(np.ndarray) if isinstance(value, Array) else value


def ours(value):
    return value.view(Array) if isinstance(value, np.ndarray) else value


def current():
    """Number of the thread's current device."""
    return context.current_device()


def check_device(value):
    """DeviceFault for an array of another device than the current one, or a list with one."""
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, Array) and item.size:
            context.cuda.devices.check(item.ctypes.data)


class Pointer:
    """Device memory, of any device."""

    def __init__(self, ptr):
        self.ptr = ptr

    def copy_from_device_async(self, source, size, stream):
        stream.do(lambda: ctypes.memmove(self.ptr, source.ptr, size))


class Array(np.ndarray):
    """An array of the device."""

    @property
    def data(self):
        return Pointer(self.ctypes.data)

    @property
    def __cuda_array_interface__(self):
        interface = {"data": (self.ctypes.data, False), "shape": self.shape, "strides": None, "typestr": "<f8"}
        return {**interface, "version": 3, "stream": 1}

    def get(self, stream=None, order="C", out=None, blocking=True):
        if not blocking:
            stream.do(lambda: self.get(Stream(), order, out))
            return out
        stream.synchronize()
        found = np.array(np.asarray(self), order=order)
        if out is None:
            return found
        assert out.flags.c_contiguous
        assert (out.shape, out.dtype) == (self.shape, self.dtype)
        out[...] = found
        return out

    def set(self, array, stream=None):
        assert type(array) is np.ndarray
        assert (array.shape, array.dtype) == (self.shape, self.dtype)
        stream.do(lambda: self.__setitem__(..., array))


class Stream:
    """A stream. What is copied on one of CuPy's own is done when somebody waits for it, the latest moment there is."""

    known: ClassVar[dict] = {}
    numbers = count()

    def __init__(self, non_blocking=False):
        self.behind, self.work, self.ptr, self.device = non_blocking, [], next(self.numbers), current()
        self.known[self.ptr] = self

    def check(self):
        assert self.device == current(), f"a stream of device {self.device}, but {current()} is current"

    def do(self, task):
        self.check()
        self.work.append(task)
        if not self.behind:
            self.synchronize()

    @classmethod
    def from_external(cls, other):
        version, handle = other.__cuda_stream__()
        assert version == 0
        assert handle % STREAMS == 0
        return cls()

    def __enter__(self):
        self.check()
        return self

    def __exit__(self, *error):
        pass

    def record(self):
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event):
        event.stream.synchronize()

    def synchronize(self):
        while self.work:
            self.work.pop(0)()


class Event:
    """A mark in a stream."""

    def __init__(self, disable_timing=False):
        self.stream, self.device = None, current()

    def record(self, stream):
        assert isinstance(stream, Stream)
        assert self.device == stream.device
        self.stream = stream

    @property
    def done(self):
        return not self.stream.work

    def synchronize(self):
        self.stream.synchronize()


class Library:
    """The modules of CuPy that `md4.gpu.algebra` imports.

    Attributes
    ----------
    handles : list of int
        Of cuBLAS that were made, by their devices.
    """

    def __init__(self):
        self.own, self.idle_pinned, self.handles = local(), 0, []
        runtime = SimpleNamespace(memcpyDeviceToHost=2, memcpy2DAsync=self.copy_2d, CUDARuntimeError=RuntimeError)
        device = ModuleType("cupy.cuda.device")
        device.get_cublas_handle = self.handle
        cublas = ModuleType("cupy.cuda.cublas")
        cublas.dtrsm, cublas.dgemm, cublas.dgemv = self.dtrsm, self.dgemm, self.dgemv
        for n, name in enumerate(("SIDE_LEFT", "SIDE_RIGHT", "OP_N", "OP_T", "DIAG_NON_UNIT", "FILL_MODE_UPPER")):
            setattr(cublas, f"CUBLAS_{name}", n)
        self.constants = vars(cublas)
        cuda = ModuleType("cupy.cuda")
        vars(cuda).update(
            runtime=runtime, device=device, cublas=cublas, cusolver=None, Stream=Stream,
            Event=Event, Device=lambda number: context.cuda.gpus[number], using_allocator=self.using_allocator,
            PinnedMemory=self.pinned, alloc_pinned_memory=self.pinned,
            PinnedMemoryPointer=lambda memory, offset: memory,
            MemoryPointer=lambda memory, offset: memory,
            UnownedMemory=lambda pointer, size, owner: SimpleNamespace(pointer=pointer, size=size, owner=owner),
        )  # fmt: skip
        cupy, cupyx = ModuleType("cupy"), ModuleType("cupyx")
        vars(cupy).update(
            {name: self.named(getattr(np, name)) for name in SAME}, cuda=cuda, empty=self.empty, asarray=self.asarray,
            take=self.take, zeros=self.zeros,
            get_default_pinned_memory_pool=lambda: SimpleNamespace(free_all_blocks=self.free_pinned),
            linalg=SimpleNamespace(**{name: self.named(getattr(np.linalg, name)) for name in FACTORISATIONS}),
        )  # fmt: skip
        vars(cupyx).update(errstate=lambda linalg: nullcontext())
        self.modules = {
            "cupy": cupy, "cupyx": cupyx, "cupy.cuda": cuda, "cupy.cuda.cublas": cublas, "cupy.cuda.device": device,
        }  # fmt: skip

    def named(self, function):
        """A function of NumPy for arrays of the device alone."""

        def call(*args, **options):
            for arg in (*args, *options.values()):
                check_device(arg)
                on_host = isinstance(arg, np.ndarray) and not isinstance(arg, Array)
                assert not on_host, f"{function.__name__} of an array of the host"
            found = function(*(plain(arg) for arg in args), **{key: plain(arg) for key, arg in options.items()})
            return tuple(map(self.kept, found)) if isinstance(found, tuple) else self.kept(found)

        return call

    # memory

    def kept(self, found):
        """A result for md4; what is new lies in memory of the allocator."""
        if not isinstance(found, np.ndarray) or found.base is not None or found.dtype != float:
            return ours(found)
        made = self.empty(found.shape)
        made[...] = found
        return made

    @contextmanager
    def using_allocator(self, allocator):
        before = getattr(self.own, "allocator", None)
        self.own.allocator = allocator
        try:
            yield
        finally:
            self.own.allocator = before

    def empty(self, shape):
        assert getattr(self.own, "allocator", None) is not None, "memory that md4 does not count"
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        memory = self.own.allocator(8 * prod(shape))
        held = (ctypes.c_char * (8 * prod(shape))).from_address(memory.pointer)
        found = np.frombuffer(held, float).reshape(shape).view(Array)
        held.memory = memory  # as long as an array refers to it
        return found

    def pinned(self, size):
        if size > PINNED_BYTES:
            raise RuntimeError("cudaErrorMemoryAllocation")
        self.idle_pinned += size  # as soon as nobody uses it
        return bytearray(size)

    def free_pinned(self):
        self.idle_pinned = 0

    def zeros(self, shape):
        found = self.empty(shape)
        found[...] = 0.0
        return found

    def asarray(self, given):
        """An array of the device: of the host's, a copy; of another library's, a view."""
        if isinstance(given, Array):
            return given
        if hasattr(given, "__cuda_array_interface__"):
            interface = given.__cuda_array_interface__
            held = (ctypes.c_char * (8 * prod(interface["shape"]))).from_address(interface["data"][0])
            held.memory = given
            return np.frombuffer(held, float).reshape(interface["shape"]).view(Array)
        return np.array(given).view(Array)

    def take(self, array, indices, axis=None, out=None):
        assert isinstance(array, Array)
        assert isinstance(indices, Array)
        assert out.shape == (*array.shape[:axis], *indices.shape, *array.shape[axis + 1 :])
        out[...] = np.take(array, indices, axis=axis)
        return out

    def copy_2d(self, target, target_pitch, source, source_pitch, width, height, kind, stream):
        assert kind == 2

        def copy():
            for row in range(height):
                ctypes.memmove(target + row * target_pitch, source + row * source_pitch, width)

        Stream.known[stream].do(copy)

    # algebra

    def handle(self):
        """That of cuBLAS, which CuPy makes for each thread and device, and which takes long."""
        made = vars(self.own).setdefault("handles", set())
        if current() not in made:
            made.add(current())
            self.handles.append(current())
        return current()

    def check(self, handle, *pointers):
        """DeviceFault for a handle or matrices of another device than the current one."""
        assert handle == current()
        for pointer in pointers:
            context.cuda.devices.check(pointer)

    def dtrsm(self, handle, side, uplo, trans, diag, m, n, alpha, a, lda, b, ldb):
        """cuBLAS's, of matrices in Fortran's order."""
        self.check(handle, a, b)
        c = self.constants
        right, upper = side == c["CUBLAS_SIDE_RIGHT"], uplo == c["CUBLAS_FILL_MODE_UPPER"]
        order = n if right else m
        found = blas.dtrsm(
            number(alpha), matrix(a, order, order, lda), matrix(b, m, n, ldb), side=int(right), lower=int(not upper),
            trans_a=int(trans == c["CUBLAS_OP_T"]), diag=0,
        )  # fmt: skip
        matrix(b, m, n, ldb)[...] = found

    def dgemm(self, handle, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc):
        """cuBLAS's, of matrices in Fortran's order; without beta it does not read what it writes to."""
        self.check(handle, a, b, c)
        turned = self.constants["CUBLAS_OP_T"]
        one = matrix(a, k, m, lda).T if trans_a == turned else matrix(a, m, k, lda)
        other = matrix(b, n, k, ldb).T if trans_b == turned else matrix(b, k, n, ldb)
        out, before = matrix(c, m, n, ldc), number(beta)
        out[...] = number(alpha) * (one @ other) + (before * out if before else 0.0)

    def dgemv(self, handle, trans, m, n, alpha, a, lda, x, step_x, beta, y, step_y):
        """cuBLAS's, of a matrix in Fortran's order."""
        self.check(handle, a, x, y)
        given, turned = matrix(a, m, n, lda), trans == self.constants["CUBLAS_OP_T"]
        given = given.T if turned else given
        rows, columns = given.shape
        vector, out = matrix(x, 1, columns, step_x)[0], matrix(y, 1, rows, step_y)[0]
        out[...] = number(alpha) * (given @ vector) + number(beta) * out


def number(pointer):
    """A scalar of the host."""
    return ctypes.c_double.from_address(pointer).value


def matrix(pointer, rows, columns, step):
    """A matrix in Fortran's order whose columns are `step` numbers apart."""
    assert step >= max(1, rows)
    held = (ctypes.c_double * (step * columns)).from_address(pointer)
    return np.frombuffer(held, float).reshape(columns, step).T[:rows]


@contextmanager
def cupy():
    """`import cupy` finds the stand-in; yields its `Library`."""
    library = Library()
    before = {name: sys.modules.get(name) for name in library.modules}
    sys.modules.update(library.modules)  # what is imported meanwhile stays
    try:
        yield library
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
