"""Compiled kernel variants: made at first use, kept in memory, and on disk under a fingerprint.

A variant is a factory with a frozen tuple of compile-time facts. Files of the cache are
`<cache folder>/<fingerprint>/<variant>-sm_<cc>.kernel`; the fingerprint covers md4's own source and the versions of
everything that takes part in compiling, so a stale kernel is never loaded.
"""

import ctypes
import os
import pickle
import struct
import tempfile
import threading
from dataclasses import dataclass, field
from functools import cache

from cuda.bindings import driver

from md4.cache import cache_folder, fingerprint
from md4.device import Buffer, check, cuda, types


@dataclass(frozen=True)
class Kernel:
    """What a factory returns: a Python function and how to compile it.

    Attributes
    ----------
    function : callable
        The kernel's body.
    signature : tuple of numba types
    launch_bounds : tuple of int, optional
        Threads of a block, and blocks that a multiprocessor must hold at once.
    """

    function: object
    signature: tuple
    launch_bounds: tuple | None = None

    def options(self):
        return {} if self.launch_bounds is None else {"launch_bounds": self.launch_bounds}


@dataclass(frozen=True)
class Variant:
    """One kernel variant: a factory and its compile-time facts."""

    factory: object = field(repr=False)
    facts: tuple

    @property
    def name(self):
        facts = (".".join(map(str, f)) if isinstance(f, tuple) else str(f) for f in self.facts)
        return "-".join([self.factory.__name__, *facts])

    def kernel(self):
        """What the factory makes, under the variant's name, by which profilers call it."""
        kernel = self.factory(*self.facts)
        kernel.function.__name__ = kernel.function.__qualname__ = self.name.replace("-", "_").replace(".", "_")
        return kernel


def cached_variants():
    """Names of the variants on disk for this source and toolchain."""
    return sorted(p.stem for p in (cache_folder() / fingerprint()).glob("*.kernel"))


def load_kernel(path):
    """The compiled kernel in `path`, or None where there is none that can be read."""
    from numba.cuda.dispatcher import _Kernel

    try:
        return _Kernel._rebuild(**pickle.loads(path.read_bytes()))
    except OSError:
        return None  # not there, or not ours to read
    except (pickle.UnpicklingError, EOFError, TypeError, AttributeError, KeyError, ImportError):
        return None  # a torn or foreign file: compile again


def save_kernel(path, kernel):
    """Writes a compiled kernel in one step, so that no other process sees half of it."""
    from numba.cuda import serialize

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as f:
            f.write(serialize.dumps(kernel._reduce_states()))
        os.chmod(f.name, 0o644)  # others may share the folder
        os.replace(f.name, path)
    except OSError:
        pass  # a cache that cannot be written costs time, not results


compile_count = 0  # variants that this process compiled rather than loaded


class Launcher:
    """A compiled kernel of one device, launched by the driver with as little as possible in between.

    Numba's calling convention, flattened: an array is (meminfo, parent, size, itemsize, data, *shape, *strides), all in
    slots of 8 bytes.
    """

    def __init__(self, kernel, signature):
        self.kernel = kernel
        handle = int(kernel._codelibrary.get_cufunc().kernel.handle)
        self.library_kernel, self.function = driver.CUkernel(handle), driver.CUfunction(handle)
        self.shared = 48 << 10
        code = ["q" * (5 + 2 * t.ndim) if hasattr(t, "ndim") else "d" if t == types.float64 else "q" for t in signature]
        self.pack = struct.Struct("<" + "".join(code)).pack_into
        count = sum(map(len, code))
        self.slots = ctypes.create_string_buffer(8 * count)
        first = ctypes.addressof(self.slots)
        self.pointers = (ctypes.c_void_p * count)(*range(first, first + 8 * count, 8))
        self.lock = threading.Lock()

    def __call__(self, grid, block, stream, shared, args):
        values = []
        for arg in args:
            if isinstance(arg, Buffer):
                values += arg.words()
            else:
                values.append(arg)
        with self.lock:
            if shared > self.shared:
                self.allow_shared(shared)
            self.pack(self.slots, 0, *values)
            (error,) = driver.cuLaunchKernel(
                self.function, grid, 1, 1, block, 1, 1, shared, int(stream.handle), ctypes.addressof(self.pointers), 0
            )
        check(error, "launching a kernel")

    def allow_shared(self, size):
        """Raises the limit of dynamic shared memory to `size` bytes."""
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        device = cuda.current_context().device.id
        (error,) = driver.cuKernelSetAttribute(attribute, size, self.library_kernel, device)
        check(error, f"raising dynamic shared memory to {size} bytes")
        self.shared = size


def kernel_path(variant, capability):
    """File of a variant in the disk cache."""
    return cache_folder() / fingerprint() / f"{variant.name}-sm_{capability[0]}{capability[1]}.kernel"


@cache
def launcher(variant, capability, device):
    """`Launcher` of a variant, loaded from disk or compiled, for one device."""
    global compile_count  # noqa: PLW0603 a count for `md4 info` and the tests
    kernel = variant.kernel()
    path = kernel_path(variant, capability)
    compiled = load_kernel(path)
    if compiled is None:
        compiled = cuda.jit(**kernel.options())(kernel.function).compile(kernel.signature)
        compile_count += 1
        save_kernel(path, compiled)
    else:
        compiled.bind()
    return Launcher(compiled, kernel.signature)


@cache
def capability_of(device):
    """Compute capability (major, minor) of a device."""
    return tuple(cuda.gpus[device].compute_capability)


def launch(variant, grid, block, stream, shared, *args):
    """Launches `variant` with `shared` bytes of dynamic shared memory; arrays are `Buffer` objects."""
    device = current_device()
    launcher(variant, capability_of(device), device)(grid, block, stream, shared, args)


def current_device():
    """Number of the device of this thread's context, which is made where there is none."""
    error, device = driver.cuCtxGetDevice()
    return cuda.current_context().device.id if error else int(device)
