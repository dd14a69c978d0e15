"""Compiled kernel variants: made at first use, kept in memory, and on disk under a fingerprint.

A variant is a factory with a frozen tuple of compile-time facts. Files of the cache (`md4.cache`) are
`<cache folder>/<fingerprint>/<variant>-sm_<cc>.kernel`; the fingerprint covers md4's own source and the versions of
everything that takes part in compiling, so a stale kernel is never loaded. What they hold is machine code for the GPU,
nothing that the host would execute.
"""

import ctypes
import struct
from dataclasses import dataclass, field
from functools import cache

from cuda.bindings import driver

from md4.cache import cache_folder, entry_path, fingerprint, load, store
from md4.device import Buffer, check, cuda, current_device, types
from md4.locks import Lock, once


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


@dataclass(frozen=True)
class Loaded:
    """A kernel on a device.

    Attributes
    ----------
    handle : int
        Its CUkernel.
    owner
        What keeps it loaded.
    """

    handle: int
    owner: object = field(repr=False)


def kernel_facts(variant, capability):
    """What the cache's file of a kernel says that it holds."""
    return {"kernel": variant.name, "capability": list(capability)}


def load_kernel(variant, capability):
    """The kernel that `save_kernel` saved, on the current device; None where there is none that can be relied on."""
    data = load(kernel_path(variant, capability), kernel_facts(variant, capability))
    if data is None:
        return None
    entry, _, cubin = data.partition(b"\n")
    error, library = driver.cuLibraryLoadData(cubin, None, None, 0, None, None, 0)
    if error != driver.CUresult.CUDA_SUCCESS:
        return None
    error, handle = driver.cuLibraryGetKernel(library, entry)
    return None if error != driver.CUresult.CUDA_SUCCESS else Loaded(int(handle), library)


def save_kernel(variant, capability, entry, cubin):
    """Writes machine code to the cache: the name of its entry point in one line, then the cubin."""
    store(kernel_path(variant, capability), kernel_facts(variant, capability), entry.encode() + b"\n" + cubin)


compile_count = 0  # variants that this process compiled rather than loaded


class Launcher:
    """A compiled kernel of one device, launched by the driver with as little as possible in between.

    Numba's calling convention, flattened: an array is (meminfo, parent, size, itemsize, data, *shape, *strides), all in
    slots of 8 bytes.
    """

    def __init__(self, loaded, signature):
        self.loaded = loaded
        self.library_kernel, self.function = driver.CUkernel(loaded.handle), driver.CUfunction(loaded.handle)
        self.shared = 48 << 10
        code = ["q" * (5 + 2 * t.ndim) if hasattr(t, "ndim") else "d" if t == types.float64 else "q" for t in signature]
        self.pack = struct.Struct("<" + "".join(code)).pack_into
        count = sum(map(len, code))
        self.slots = ctypes.create_string_buffer(8 * count)
        first = ctypes.addressof(self.slots)
        self.pointers = (ctypes.c_void_p * count)(*range(first, first + 8 * count, 8))
        self.lock = Lock()

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
    return entry_path(f"{variant.name}-sm_{capability[0]}{capability[1]}.kernel")


def compile_kernel(variant, capability, kernel):
    """Compiles a kernel for the current device, and saves it."""
    global compile_count  # noqa: PLW0603 a count for `md4 info` and the tests
    compiled = cuda.jit(**kernel.options())(kernel.function).compile(kernel.signature)
    compile_count += 1
    code = compiled._codelibrary
    save_kernel(variant, capability, code._entry_name, bytes(code.get_cubin().code))
    return Loaded(int(code.get_cufunc().kernel.handle), compiled)


@once
def launcher(variant, capability, device):
    """`Launcher` of a variant, loaded from disk or compiled, for one device, which is the current one."""
    kernel = variant.kernel()
    loaded = load_kernel(variant, capability) or compile_kernel(variant, capability, kernel)
    return Launcher(loaded, kernel.signature)


@cache
def capability_of(device):
    """Compute capability (major, minor) of a device."""
    return tuple(cuda.gpus[device].compute_capability)


def launch(variant, grid, block, stream, shared, *args):
    """Launches `variant` with `shared` bytes of dynamic shared memory; arrays are `Buffer` objects."""
    device = current_device()
    launcher(variant, capability_of(device), device)(grid, block, stream, shared, args)

