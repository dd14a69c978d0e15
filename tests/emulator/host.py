"""What md4's host code asks of CUDA and of Numba, answered by the emulated device."""

import ctypes
import pkgutil
import sys
from collections import Counter, defaultdict, deque
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from itertools import count
from math import prod
from threading import RLock, local
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
from cuda.bindings import driver
from numba import cuda
from numba.cuda.cudadrv.driver import AutoFreePointer
from numba.cuda.dispatcher import CUDADispatcher
from numba.cuda.extending import _Intrinsic

import md4.gpu
from emulator.intrinsics import called
from emulator.machine import WARP_BARRIER, DeviceFault, Machine, Memory
from md4.gpu import compile, context, hermite_coulomb
from md4.gpu.backend import GpuBackend
from md4.gpu.buffers import Buffer
from md4.gpu.device_code import types
from md4.gpu.dlpack import DeviceArray
from md4.gpu.kernels import hermite_scales

SUCCESS = driver.CUresult.CUDA_SUCCESS
# A capability that takes each arithmetic unit.
CAPABILITIES = {"fma": (7, 0), "dmma8": (8, 0), "dmma16": (9, 0)}
# What these devices grant: blocks of a launch, bytes of its parameters, shared memory of a block, unasked and asked.
MOST_BLOCKS, PARAMETER_BYTES, UNASKED_SHARED = (1 << 31) - 1, 4096, 48 << 10
MOST_SHARED = {(7, 0): 96 << 10, (8, 0): 163 << 10, (9, 0): 227 << 10}
# Threads of a block that have registers for any kernel.
UNBOUNDED_THREADS = 256
# Handles of the streams of a device begin at its number times this.
STREAMS = 1000
# Blocks that share a sum over all Hermite functions of a degree. A GPU has 128: nearly all would be idle here, and take
# most of the time of J.
NORM_BLOCKS = 3
# Whether a race is an error, which makes kernels three times as slow (see tests/conftest.py).
RACES = False


class Devices(local):
    """All devices, and those that a thread has made current, one after the other, the last of which is.

    Parameters
    ----------
    memories : list of Memory
        That of each device.
    """

    def __init__(self, memories):
        self.memories, self.stack = memories, (0,)

    @property
    def current(self):
        return self.stack[-1]

    def check(self, address):
        """DeviceFault for an address in the memory of another device than the current one."""
        for device, memory in enumerate(self.memories):
            if device != self.current and memory.holds(address):
                raise DeviceFault(f"{address:#x} belongs to device {device}, but {self.current} is current")


class Gpu:
    """A device, current within a context as those of `numba.cuda.gpus` are."""

    def __init__(self, devices, number, capability):
        self.devices, self.id, self.compute_capability = devices, number, capability
        self.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = MOST_SHARED[capability]

    def __enter__(self):
        self.devices.stack += (self.id,)

    def __exit__(self, *error):
        if self.devices.current != self.id:
            raise DeviceFault(f"device {self.id} is left, but {self.devices.current} is current")
        self.devices.stack = self.devices.stack[:-1]


def alone(method):
    """A method of `Queues` for one thread at a time."""

    def call(queues, *args):
        with queues.lock:
            return method(queues, *args)

    return call


class Queues:
    """What streams were given and have not done yet. Several threads may give it.

    A stream that is late does nothing before somebody waits for it, the host or another stream, and then no more than
    that takes. All others work at once. So work that does not wait for what it needs finds that it is not done.

    Parameters
    ----------
    late : collection of int
        Handles of streams.
    devices : Devices
        Work is given to streams of the current one.

    Attributes
    ----------
    waiting : dict of deque
        By the handles of streams.
    given, done : dict of int
        Numbers of pieces of work.
    """

    def __init__(self, late, devices):
        self.late, self.running, self.last, self.devices, self.lock = late, False, [], devices, RLock()
        self.waiting, self.given, self.done = defaultdict(deque), Counter(), Counter()

    @alone
    def give(self, stream, work):
        """Work for a stream."""
        if int(stream) // STREAMS != self.devices.current:
            raise DeviceFault(f"work for stream {int(stream)}, but device {self.devices.current} is current")
        self.given[int(stream)] += 1
        self.waiting[int(stream)].append(work)
        if int(stream) not in self.late:
            self.reach(*self.place(stream))

    def place(self, stream):
        """What `reach` needs to come to where a stream is now."""
        return int(stream), self.given[int(stream)]

    @alone
    def reach(self, stream, count):
        """A stream does what it was given up to a place."""
        running, self.running = self.running, True
        try:
            while self.done[stream] < count:
                work = self.waiting[stream].popleft()
                self.done[stream] += 1  # also if it fails
                work()
        finally:
            self.running = running
        while self.last and not self.running:
            self.at_the_end(self.last.pop())

    @alone
    def at_the_end(self, free):
        """Frees memory after all that all streams were given; Python may ask for it while a stream is at work."""
        if self.running:
            self.last.append(free)
            return
        for stream in list(self.waiting):
            self.reach(*self.place(stream))
        free()

    def forget(self):
        """Nothing of what streams were given will be done."""
        self.waiting.clear()
        self.given.clear()
        self.done.clear()


class Stream:
    """A stream."""

    auto_synchronize = 0

    def __init__(self, queues, handle):
        self.queues, self.handle = queues, handle

    def synchronize(self):
        self.queues.reach(*self.queues.place(self.handle))


class Event:
    """A mark in a stream."""

    def __init__(self, queues):
        self.queues = queues

    def record(self, stream):
        self.place = self.queues.place(stream.handle)

    def wait(self, stream):
        self.queues.give(stream.handle, partial(self.queues.reach, *self.place))

    def synchronize(self):
        self.queues.reach(*self.place)


class Context:
    """What `md4.gpu.pool.Pool` asks of Numba's: memory behind Numba's own pointers to it."""

    def __init__(self, memory, queues, device):
        self.memory, self.queues, self.deallocations, self.allocations = memory, queues, set(), {}
        self.device = device

    def memalloc(self, size):
        address = self.memory.allocate(size).ctypes.data
        memory = AutoFreePointer(self, driver.CUdeviceptr(address), size, finalizer=partial(self.freed, address))
        self.allocations[address] = memory
        return memory.own()

    def freed(self, address):
        self.queues.at_the_end(partial(self.memory.free, address))
        del self.allocations[address]

    def get_memory_info(self):
        return 1 << 40, 1 << 40


class Driver:
    """What `md4.gpu` asks of CUDA's driver.

    Attributes
    ----------
    variants : list of md4.gpu.compile.Variant
        Those that are loaded; the handle of a kernel is its place here.
    """

    CUresult, CUstream_flags = driver.CUresult, driver.CUstream_flags
    CUfunction_attribute, CUstreamCaptureMode = driver.CUfunction_attribute, driver.CUstreamCaptureMode
    CUkernel = CUfunction = int

    def __init__(self, machine, queues, capability):
        self.machine, self.queues, self.variants, self.streams = machine, queues, [], 0
        self.devices = queues.devices
        self.captured = {}  # launches by the stream on which they are taken down
        self.most_shared, self.granted = MOST_SHARED[capability], {}

    def load(self, variant):
        """The launcher of a variant, as `md4.gpu.compile.launcher` makes it."""
        self.variants.append(variant)
        made = compile.Launcher(compile.Loaded(len(self.variants) - 1, None), variant.types())
        if 8 * len(made.packing.slots) > PARAMETER_BYTES:
            raise DeviceFault(f"{8 * len(made.packing.slots)} bytes of parameters of {variant.name}")
        return made

    def cuKernelSetAttribute(self, attribute, value, kernel, device):
        self.granted[kernel] = value
        return (SUCCESS,)

    def check_launch(self, function, kernel, grid, block, shared):
        """DeviceFault for a launch that a GPU refuses; returns the bytes of shared memory that a block may have."""
        name, most = self.variants[function].name, (kernel.launch_bounds or [UNBOUNDED_THREADS])[0]
        if not 1 <= grid <= MOST_BLOCKS:
            raise DeviceFault(f"{grid} blocks of {name}")
        if not 1 <= block <= most:
            raise DeviceFault(f"{block} threads of {name}, which has {most} at most")
        if shared > self.granted.get(function, UNASKED_SHARED):
            raise DeviceFault(f"{shared} bytes of shared memory of {name} without asking")
        return self.most_shared if function in self.granted else UNASKED_SHARED

    def cuLaunchKernel(self, function, grid, gy, gz, block, by, bz, shared, stream, pointers, extra):
        """Runs the function of a kernel with what it finds at the addresses of its arguments."""
        variant = self.variants[function]
        kernel = variant.kernel()
        room = self.check_launch(function, kernel, grid, block, shared)
        self.machine.kernels.add(variant.factory.__name__)
        slots = map(ctypes.c_void_p.from_address, count(pointers, 8))
        args = [argument(kind, slots, self.machine, self.devices) for kind in kernel.types()]
        launch = partial(self.run, self.devices.current, kernel.function, grid, block, shared, args, room)
        if stream in self.captured:
            self.captured[stream].append(launch)
        else:
            self.queues.give(stream, launch)
        return (SUCCESS,)

    def run(self, device, function, *launch):
        """A launch on a device, which has its own memory."""
        self.machine.memory = self.devices.memories[device]
        self.machine.launch(function, *launch)

    def cuStreamBeginCapture(self, stream, mode):
        if stream % STREAMS == 0 or stream in self.captured:
            raise DeviceFault(f"launches cannot be taken down on stream {stream}")
        self.captured[stream] = []
        return (SUCCESS,)

    def cuStreamEndCapture(self, stream):
        return SUCCESS, self.captured.pop(stream)

    @staticmethod
    def cuGraphInstantiate(graph, flags):
        return SUCCESS, graph

    def cuGraphLaunch(self, graph, stream):
        for launch in graph:
            self.queues.give(stream, launch)
        return (SUCCESS,)

    @staticmethod
    def cuGraphDestroy(graph):
        return (SUCCESS,)

    cuGraphExecDestroy = cuGraphDestroy

    @staticmethod
    def cuStreamGetPriority(stream):
        return SUCCESS, 0

    @staticmethod
    def cuCtxGetStreamPriorityRange():
        return SUCCESS, 0, 0

    def cuStreamCreateWithPriority(self, flags, priority):
        self.streams += 1
        return SUCCESS, STREAMS * self.devices.current + self.streams

    @staticmethod
    def cuStreamDestroy(handle):
        return (SUCCESS,)

    def cuMemsetD8Async(self, pointer, value, nbytes, stream):
        self.queues.give(stream, partial(ctypes.memset, int(pointer), value, nbytes))
        return (SUCCESS,)

    def cuMemcpyHtoDAsync(self, pointer, source, nbytes, stream):
        copied = ctypes.string_at(source, nbytes)  # the host may change it meanwhile
        self.queues.give(stream, partial(ctypes.memmove, int(pointer), copied, nbytes))
        return (SUCCESS,)

    def cuMemcpyDtoDAsync(self, target, source, nbytes, stream):
        self.queues.give(stream, partial(ctypes.memmove, int(target), int(source), nbytes))
        return (SUCCESS,)

    def cuMemcpyDtoHAsync(self, target, pointer, nbytes, stream):
        self.queues.give(stream, partial(ctypes.memmove, target, int(pointer), nbytes))
        return (SUCCESS,)

    def cuCtxGetDevice(self):
        return SUCCESS, self.devices.current

    def cuDeviceGetUuid(self, device):
        return SUCCESS, SimpleNamespace(bytes=b"emulated device" + bytes([device]))


class Cuda:
    """What kernels and host code ask of `numba.cuda`."""

    jit = staticmethod(cuda.jit)

    def __init__(self, machine, queues, capability):
        self.machine, self.queues, self.devices, self.waits = machine, queues, queues.devices, []
        self.gpus = [Gpu(self.devices, n, capability) for n in range(len(self.devices.memories))]
        self.contexts = [Context(memory, queues, gpu) for memory, gpu in zip(self.devices.memories, self.gpus)]
        self.shared = SimpleNamespace(array=machine.shared_array)
        self.local = SimpleNamespace(array=machine.local_array)
        self.atomic = SimpleNamespace(add=self.add)

    threadIdx = property(lambda self: SimpleNamespace(x=self.machine.thread.index))
    blockIdx = property(lambda self: SimpleNamespace(x=self.machine.block))
    blockDim = property(lambda self: SimpleNamespace(x=self.machine.threads))
    gridDim = property(lambda self: SimpleNamespace(x=self.machine.grid))

    def syncthreads(self):
        self.machine.barrier()

    def syncwarp(self, mask=-1):
        self.machine.exchange(WARP_BARRIER, None)

    def ballot_sync(self, mask, flag):
        return self.machine.ballot(flag)

    def shfl_xor_sync(self, mask, value, other):
        return self.machine.shuffle_xor(value, other)

    def shfl_up_sync(self, mask, value, step):
        lane = self.machine.thread.lane
        return self.machine.shuffle_from(value, lane - step if lane >= step else lane)

    def shfl_sync(self, mask, value, lane):
        return self.machine.shuffle_from(value, lane)

    def add(self, array, index, value):
        if self.machine.accesses:
            return array.add(index, value)
        old = array[index]
        array[index] += value
        return old

    @staticmethod
    def popc(bits):
        return int(bits).bit_count()

    # the host

    def as_cuda_array(self, array, sync=True):
        """An array of another library; it is C-contiguous here. Waiting for its stream is noted."""
        interface = array.__cuda_array_interface__
        if sync and interface.get("stream") is not None:
            self.waits.append(interface["stream"])
        return SimpleNamespace(
            shape=interface["shape"], dtype=np.dtype(interface["typestr"]), is_c_contiguous=lambda: True, owner=array,
            __cuda_array_interface__=interface,
        )  # fmt: skip

    @property
    def context(self):
        return self.contexts[self.devices.current]

    def current_context(self):
        return self.context

    def get_current_device(self):
        return self.gpus[self.devices.current]

    def stream(self):
        return self.external_stream(STREAMS * self.devices.current)

    default_stream = stream

    def external_stream(self, handle):
        return Stream(self.queues, handle)

    def event(self, timing=True):
        return Event(self.queues)


def argument(kind, slots, machine, devices):
    """An argument of a kernel for Python, an array for a buffer, from the next addresses of its slots."""

    def next_slot(form=ctypes.c_int64):
        return form.from_address(next(slots).value).value

    if isinstance(kind, types.BaseTuple):
        group = [argument(member, slots, machine, devices) for member in kind.types]
        return kind.instance_class(*group) if hasattr(kind, "instance_class") else tuple(group)
    if isinstance(kind, types.Array):
        _, _, size, itemsize, pointer, *shape_and_strides = (next_slot() for _ in range(5 + 2 * kind.ndim))
        shape, strides = shape_and_strides[: kind.ndim], shape_and_strides[kind.ndim :]
        contiguous = [itemsize * prod(shape[n + 1 :]) for n in range(kind.ndim)]
        assert (size, itemsize, strides) == (prod(shape), kind.dtype.bitwidth // 8, contiguous)
        devices.check(pointer)
        return machine.array(host_array(Buffer(pointer, tuple(shape), itemsize, None), kind.dtype.name))
    if kind == types.boolean:
        return next_slot(ctypes.c_bool)
    return next_slot(ctypes.c_double if kind == types.float64 else ctypes.c_int64)


def host_array(buffer, dtype):
    """What a buffer of this device holds, as an array over its memory."""
    memory = (ctypes.c_char * (np.dtype(dtype).itemsize * prod(buffer.shape))).from_address(buffer.pointer)
    return np.frombuffer(memory, dtype).reshape(buffer.shape)


def device_table(memories, made, number, make, *args):
    """As `md4.gpu.context.table_on`."""
    key = number, make, args
    if key not in made:
        table = np.array(make(*args))
        array = memories[number].allocate(table.nbytes)
        array[: table.nbytes] = np.ascontiguousarray(table).reshape(-1).view(np.uint8)
        made[key] = Buffer(array.ctypes.data, table.shape, table.itemsize, array)
    return made[key]


def copied_to_host(queues):
    """As the method of Numba's device arrays: it waits only if it is given no stream."""

    def copy_to_host(array, out=None, stream=0):
        out = np.empty(array.shape, array.dtype) if out is None else out
        source = array.__cuda_array_interface__["data"][0]
        handle = getattr(stream, "handle", stream) or STREAMS * queues.devices.current
        queues.give(handle, partial(ctypes.memmove, out.ctypes.data, source, out.nbytes))
        if stream == 0:
            queues.reach(*queues.place(handle))
        return out

    return copy_to_host


def holders(value):
    """(module, name) of what the modules of md4 and the tests have imported under any name."""
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").partition(".")[0] == "md4":
            for name, held in list(vars(module).items()):
                if held is value:
                    yield module, name


def launchers(driver):
    """In place of `md4.gpu.compile.launcher`: it keeps nothing."""

    def launcher(variant, *_):
        return driver.load(variant)

    launcher.made = {}
    return launcher


@contextmanager
def running(unit="dmma16", late=(), devices=1):
    """md4 finds GPUs of this arithmetic unit, which are emulated ones with one `Machine`; yields it.

    Each device has memory and streams of its own, which are used where it is the current one of the thread only.

    `late`: handles of streams that work as late as they may, see `Queues`. 0 is that of an engine, 1, 2, ... are those
    that are made, in their order; those of device n begin at n times `STREAMS`.
    """
    for module in pkgutil.walk_packages(md4.gpu.__path__, "md4.gpu."):
        import_module(module.name)
    machine = Machine(races=RACES)
    memories = [machine.memory, *(Memory() for _ in range(devices - 1))]
    queues = Queues(late, Devices(memories))
    here, its_driver = (kind(machine, queues, CAPABILITIES[unit]) for kind in (Cuda, Driver))
    python = {
        cuda: here, driver: its_driver, context.table_on: partial(device_table, memories, {}),
        context.kept_on: lambda device: ({}, {}),
        context.gpu_available: lambda: True, compile.launcher: launchers(its_driver),
    }  # fmt: skip
    with ExitStack() as stack:
        stack.callback(queues.forget)
        for value, stand_in in python.items():
            for module, name in holders(value):
                stack.enter_context(patch.object(module, name, stand_in))
        for module in (hermite_coulomb, hermite_scales):
            stack.enter_context(patch.object(module, "BLOCKS", NORM_BLOCKS))
        stack.enter_context(patch.object(DeviceArray, "copy_to_host", copied_to_host(queues), create=True))
        stack.enter_context(patch.object(GpuBackend, "compile_ahead", lambda *_, **__: None))
        stack.enter_context(patch.object(_Intrinsic, "__call__", lambda self, *args: called(self, machine, args)))
        stack.enter_context(patch.object(CUDADispatcher, "__call__", lambda self, *args: self.py_func(*args)))
        yield machine
