"""Compiled kernel variants: made at first use, kept in memory, and on disk under a fingerprint.

A variant is a factory with a frozen tuple of compile-time facts. Files of the cache (`md4.support.cache`) are
`<cache folder>/<fingerprint>/<variant>-sm_<cc>.kernel`; the fingerprint covers md4's own source and the versions of
everything that takes part in compiling, so a stale kernel is never loaded. What they hold is machine code for the GPU,
nothing that the host would execute. What the cache lacks may be in the package md4-kernels (`md4.support.bundle`).
"""

import ctypes
import struct
import threading
import weakref
from dataclasses import dataclass
from inspect import get_annotations
from itertools import count
from time import perf_counter
from typing import ClassVar, NamedTuple

from cuda.bindings import driver

from md4.errors import DeviceError
from md4.gpu.buffers import check
from md4.gpu.device_code import cuda, describing, types
from md4.gpu.machine_code import entry_name, machine_code
from md4.support import bundle
from md4.support.cache import entry_path, load, store
from md4.support.locks import once
from md4.support.log import log
from md4.support.progress import compiling_one


def numba_type(declared):
    """The Numba type of a declared parameter: itself, or that of a group, a NamedTuple whose fields declare theirs."""
    if isinstance(declared, type) and issubclass(declared, tuple):
        return types.NamedTuple([numba_type(field) for field in get_annotations(declared).values()], declared)
    return declared


@dataclass(frozen=True)
class Kernel:
    """What a factory returns: a Python function and how to compile it.

    Attributes
    ----------
    function : callable
        The kernel's body. The annotation of each parameter is its Numba type, or a group of parameters: a NamedTuple
        whose annotations are such in turn.
    launch_bounds : tuple of int, optional
        Threads of a block, and blocks that a multiprocessor must hold at once.
    registers : int, optional
        In place of these: most registers of a thread.
    """

    function: object
    launch_bounds: tuple | None = None
    registers: int | None = None

    def types(self):
        """Numba types of the parameters."""
        return tuple(map(numba_type, get_annotations(self.function).values()))

    def options(self):
        return {} if self.launch_bounds is None else {"launch_bounds": self.launch_bounds}


class Variant:
    """One kernel variant: a factory and its compile-time facts. The same ones are one object, which is a quick key.

    Attributes
    ----------
    factory : callable
        Makes a `Kernel`.
    facts : tuple
        Its arguments.
    """

    __slots__ = ("factory", "facts")
    known: ClassVar[dict] = {}

    def __new__(cls, factory, facts):
        key = factory, facts
        found = cls.known.get(key)
        if found is None:
            found = object.__new__(cls)
            found.factory, found.facts = key
            found = cls.known.setdefault(key, found)
        return found

    def __reduce__(self):
        return Variant, (self.factory, self.facts)

    def __repr__(self):
        return f"Variant({self.name!r})"

    @property
    def name(self):
        facts = (".".join(map(str, f)) if isinstance(f, tuple) else str(f) for f in self.facts)
        return "-".join([self.factory.__name__, *facts])

    def kernel(self):
        """What the factory makes, under the variant's name, by which profilers call it."""
        kernel = self.factory(*self.facts)
        kernel.function.__name__ = kernel.function.__qualname__ = self.name.replace("-", "_").replace(".", "_")
        return kernel

    def types(self):
        """Numba types of the kernel's parameters, without the device functions that take longest to make."""
        before = describing.set(True)
        try:
            return self.factory(*self.facts).types()
        finally:
            describing.reset(before)


class Loaded(NamedTuple):
    """A kernel on a device: its CUkernel as a number, and what keeps it loaded."""

    handle: int
    owner: object


def sm(capability):
    """The architecture of a compute capability, such as 'sm_90'."""
    return f"sm_{capability[0]}{capability[1]}"


def kernel_entry(name, architecture):
    """(file in the disk cache, what it says that it holds) of the variant with a name."""
    capability = [int(architecture[3:-1]), int(architecture[-1])]
    return entry_path(f"{name}-{architecture}.kernel"), {"kernel": name, "capability": capability}


def kept_kernels(variant, capability):
    """The code of a variant, as `save_kernel` stores it: of the disk cache and of md4-kernels, if it is there."""
    for find in (lambda *key: load(*kernel_entry(*key)), bundle.installed_kernel):
        found = find(variant.name, sm(capability))
        if found is not None:
            yield found


def is_kept(variant, capability):
    """Whether the disk cache or md4-kernels has a variant, as far as one sees without reading its code."""
    return kernel_entry(variant.name, sm(capability))[0].exists() or bundle.is_installed(variant.name, sm(capability))


def load_kernel(variant, capability):
    """The kernel of a variant on the current device; None where none is kept that can be relied on."""
    for found in kept_kernels(variant, capability):
        entry, _, cubin = found.partition(b"\n")
        loaded = kernel_in(cubin, entry)
        if loaded is not None:
            return loaded
        log.debug("the driver refuses the machine code of %s that was kept", variant.name)
    return None


def kernel_in(cubin, entry):
    """The kernel of machine code with the name `entry`, both bytes, on the current device; None if it is refused."""
    error, library = driver.cuLibraryLoadData(cubin, None, None, 0, None, None, 0)
    if error != driver.CUresult.CUDA_SUCCESS:
        return None
    error, handle = driver.cuLibraryGetKernel(library, entry)
    return None if error != driver.CUresult.CUDA_SUCCESS else Loaded(int(handle), library)


def save_kernel(variant, capability, entry, cubin):
    """Writes machine code to the cache: the name of its entry point in one line, then the cubin."""
    store(*kernel_entry(variant.name, sm(capability)), entry + b"\n" + cubin)


compile_count = 0  # variants that this process compiled rather than loaded


class Packing:
    """How the arguments of a kernel are written to memory, where the driver finds them.

    Numba's calling convention, flattened: an array is (meminfo, parent, size, itemsize, data, *shape, *strides), all in
    slots of 8 bytes; a tuple is its members one after the other. The driver is told where each slot is. Slots that are
    always the same number share one place, and what never changes is written once.

    Parameters
    ----------
    signature : sequence of Numba types
        Of the parameters.
    """

    def __init__(self, signature):
        # Places of the slots, by their order; in the memory there are the constants first, then the variables.
        self.constants, self.variables, self.code, self.slots, self.names = [0], [], "", [], count()
        names = self.add_all(signature)
        first = len(self.constants)
        self.memory = ctypes.create_string_buffer(8 * (first + len(self.variables)))
        struct.pack_into(f"<{first}q", self.memory, 0, *self.constants)
        base = ctypes.addressof(self.memory)
        # Addresses of the slots.
        places = [8 * (first + n if variable else n) for variable, n in self.slots]
        self.pointers = (ctypes.c_void_p * len(places))(*(base + place for place in places))
        # A function of its own for each signature, since arguments are packed at every launch.
        made = {"pack": struct.Struct("<" + self.code).pack_into, "memory": self.memory}
        packed = ", ".join(["memory", str(8 * first), *self.variables])
        exec(f"def write(args):\n    {names} = args\n    pack({packed})", made)
        self.write = made["write"]

    def add_all(self, kinds):
        """Adds the slots of several parameters; returns names for them, to which a tuple of them can be assigned."""
        return "[" + ", ".join(map(self.add, kinds)) + "]"

    def add(self, kind):
        """Adds the slots of a parameter; returns a name for it, or names for its members."""
        if isinstance(kind, types.BaseTuple):
            return self.add_all(kind)
        name = f"arg{next(self.names)}"
        if hasattr(kind, "ndim"):
            self.add_array(kind, name)
        else:
            self.slots.append(self.variable(name, "d" if kind == types.float64 else "q"))
        return name

    def add_array(self, kind, name):
        """Adds the slots of a `Buffer` of one or two axes."""
        nothing, item = self.constant(0), self.constant(kind.dtype.bitwidth // 8)
        data = self.variable(f"{name}.pointer")
        shape = [self.variable(f"{name}.shape[{axis}]") for axis in range(kind.ndim)]
        size, strides = shape[0], [item]
        if kind.ndim == 2:
            size = self.variable(f"{name}.shape[0] * {name}.shape[1]")
            strides = [self.variable(f"{name}.shape[1] * {kind.dtype.bitwidth // 8}"), item]
        self.slots += [nothing, nothing, size, item, data, *shape, *strides]

    def variable(self, expression, code="q"):
        """A new place, into which every launch writes."""
        self.variables.append(expression)
        self.code += code
        return True, len(self.variables) - 1

    def constant(self, value):
        """The place of a constant."""
        if value not in self.constants:
            self.constants.append(value)
        return False, self.constants.index(value)


# Dynamic shared memory of a block that every kernel may have: 48 kB are allowed, static shared memory included.
UNASKED_SHARED = 32 << 10


class Launcher:
    """A compiled kernel of one device, launched by the driver with as little as possible in between."""

    def __init__(self, loaded, signature):
        self.loaded = loaded
        self.library_kernel, self.function = driver.CUkernel(loaded.handle), driver.CUfunction(loaded.handle)
        self.shared, packing = UNASKED_SHARED, Packing(signature)
        self.write, self.packing, self.pointers = packing.write, packing, ctypes.addressof(packing.pointers)
        # Launches are refused in forked processes, so that this lock needs no care of them.
        self.lock = threading.Lock()

    def launch(self, grid, block, stream, shared, args, noted=None):
        """Launches it on the stream with the handle `stream`; see `md4.gpu.context.DeviceContext.launch`.

        To `noted`, a deque, it appends the `Launch`.
        """
        with self.lock:
            if shared > self.shared:
                self.allow_shared(shared)
            self.write(args)
            (error,) = driver.cuLaunchKernel(
                self.function, grid, 1, 1, block, 1, 1, shared, stream, self.pointers, 0
            )  # fmt: skip
            if noted is not None:
                noted.append(Launch(self, grid, block, shared, self.packing.memory.raw))
        if error:
            check(error, "launching a kernel")

    def launch_packed(self, grid, block, stream, shared, arguments):
        """As `launch`, with arguments that are packed already, as those of a `Launch`."""
        with self.lock:
            self.packing.memory.raw = arguments
            (error,) = driver.cuLaunchKernel(
                self.function, grid, 1, 1, block, 1, 1, shared, stream, self.pointers, 0
            )  # fmt: skip
        check(error, "launching a kernel")

    def allow_shared(self, size):
        """Raises the limit of dynamic shared memory to `size` bytes."""
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        device = cuda.current_context().device.id
        (error,) = driver.cuKernelSetAttribute(attribute, size, self.library_kernel, device)
        check(error, f"raising dynamic shared memory to {size} bytes")
        self.shared = size


class Launch(NamedTuple):
    """A launch that may be repeated.

    Attributes
    ----------
    launcher : Launcher
    grid, block, shared : int
        As in `Launcher.launch`.
    arguments : bytes
        The memory of its `Packing`.
    """

    launcher: Launcher
    grid: int
    block: int
    shared: int
    arguments: bytes


class Graph:
    """Launches that are repeated in their order, as one: a CUDA graph, whose launch takes the host as long as one.

    Parameters
    ----------
    launches : sequence of Launch
    stream : numba.cuda.cudadrv.driver.Stream
        Takes them down; nothing is at work on it, and its priority is that with which the kernels will run.
    """

    def __init__(self, launches, stream):
        self.count = len(launches)
        capture = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        (error,) = driver.cuStreamBeginCapture(stream.handle, capture)
        check(error, "recording launches")
        try:
            for one in launches:
                one.launcher.launch_packed(one.grid, one.block, stream.handle, one.shared, one.arguments)
        finally:
            error, graph = driver.cuStreamEndCapture(stream.handle)
        check(error, "recording launches")
        error, self.handle = driver.cuGraphInstantiate(graph, 0)
        driver.cuGraphDestroy(graph)
        check(error, "recording launches")
        weakref.finalize(self, driver.cuGraphExecDestroy, self.handle).atexit = False

    def launch(self, stream):
        """Launches its kernels on the stream with the handle `stream`."""
        (error,) = driver.cuGraphLaunch(self.handle, stream)
        check(error, "launching kernels again")


def compile_kernel(variant, capability, kernel):
    """(machine code, name of its entry point) of the kernel of a variant, both bytes, compiled and saved."""
    global compile_count  # noqa: PLW0603 a count for the tests
    start = perf_counter()
    with compiling_one(compile_count + 1):
        cubin = machine_code(kernel, capability)
    entry = entry_name(cubin).encode()
    compile_count += 1
    log.debug("compiled %s in %.2f s", variant.name, perf_counter() - start)
    save_kernel(variant, capability, entry, cubin)
    return cubin, entry


@once
def launcher(variant, capability, device):
    """`Launcher` of a variant, loaded from disk or compiled, for one device, which is the current one."""
    loaded = load_kernel(variant, capability) or kernel_in(*compile_kernel(variant, capability, variant.kernel()))
    if loaded is None:
        raise DeviceError(f"the driver refuses the machine code of the kernel {variant.name}.")
    return Launcher(loaded, variant.types())
