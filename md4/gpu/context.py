"""A device as an engine uses it: which one, on which stream, with which memory and unit."""

import os
from _thread import get_ident, interrupt_main
from copy import copy
from functools import cache, cached_property, partial
from operator import index

import numpy as np
from cuda.bindings import driver
from numba import cuda

from md4.errors import DeviceError
from md4.gpu.buffers import Buffer, check, clear, copy_in_pieces, copy_to_device, copy_to_host
from md4.gpu.compile import launcher
from md4.gpu.pool import Pool, TrackPool
from md4.gpu.recording import Recorder
from md4.gpu.tracks import Tracks, urgent_stream
from md4.support.arguments import checked_stream
from md4.support.environment import way_to_gpu
from md4.support.locks import Lock, once


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
            "backend='cuda' needs an NVIDIA GPU, its driver and the wheels of the CUDA toolkit; `md4 info` shows what "
            f"is found. For the wheels, {way_to_gpu()}. backend='cpu' works without."
        )


def device_count():
    """Number of GPUs that this process sees."""
    return len(cuda.gpus) if gpu_available() else 0


def current_capability():
    """Compute capability (major, minor) of the current device."""
    return tuple(cuda.get_current_device().compute_capability)


def current_block_shared():
    """Most bytes of shared memory of a block of threads on the current device."""
    return cuda.get_current_device().MAX_SHARED_MEMORY_PER_BLOCK_OPTIN


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
    if handle == 0:
        return cuda.default_stream()
    found = cuda.external_stream(handle)
    found.owner = stream  # its end would be that of the stream, on which arrays depend as long as they live
    return found


def arithmetic_unit(capability):
    """The unit that does the transforms on a device."""
    return "dmma16" if capability == (9, 0) or capability >= (10, 0) else "dmma8" if capability >= (8, 0) else "fma"


class Switch:
    """A thread's change to the device of a lock, undone when nobody refers to it any more.

    Parameters
    ----------
    lock : DeviceLock
    """

    __slots__ = ("lock", "token")

    def __init__(self, lock):
        self.lock, self.token = lock, object()
        lock.switched[get_ident()] = self.token  # first, so that what an interrupt leaves is known
        cuda.gpus[lock.device].__enter__()

    def __del__(self):
        try:
            if self.lock.switched.get(get_ident()) is self.token:
                self.lock.switch_back()
        except KeyboardInterrupt:  # Python passes on no exception from here
            interrupt_main()


class OfObject(property):
    """A property that the class does not have: `contextlib.ExitStack` would take a method from there."""

    def __get__(self, instance, owner=None):
        if instance is None:
            raise AttributeError("the lock of a device is held by a with statement only")
        return super().__get__(instance, owner)


class DeviceLock(Lock):
    """A lock of what works on one GPU, which is the current device of the thread that holds it.

    A process that was forked from one that used the GPU is refused.

    An interrupt never leaves the lock taken, since it is taken and released in C. `with` looks up both methods before
    it calls the first one, and forgets the second one after its call: that is when the device changes. Where an
    interrupt comes in between, the device of before is current again after the thread's next use of the lock.

    Parameters
    ----------
    device : int, optional
        Number of the device; by default the thread's current one stays.
    """

    def __init__(self, device=None):
        super().__init__()
        self.device = device
        # The token of the `Switch` of each thread that has one.
        self.switched = {}

    @OfObject
    def __exit__(self):  # noqa: PLE0302 what `with` calls is what this returns
        """That of C. If the thread did not hold the lock and another device was current, it also keeps a `Switch`."""
        check_not_forked()
        leave = super().__exit__
        if self.device is None or self._is_owned():
            return leave
        self.switch_back()
        if self.device != current_device():
            leave = partial(leave)
            leave.switch = Switch(self)
        return leave

    def switch_back(self):
        """Undoes the change of device of this thread, if there is one."""
        if get_ident() in self.switched:
            if self.device == current_device():
                cuda.gpus[self.device].__exit__(None, None, None)
            del self.switched[get_ident()]

    def __reduce__(self):
        return type(self), (self.device,)


def identity(device):
    """What tells a GPU, or an instance of one, from all others, of other machines, too: its UUID as text."""
    error, found = getattr(driver, "cuDeviceGetUuid_v2", driver.cuDeviceGetUuid)(device)  # the first has instances
    check(error, "asking for the UUID of a GPU")
    return bytes(found.bytes).hex()


def free_memory(device):
    """Bytes that are free on a GPU, on which this process has its context then."""
    with DeviceLock(device):
        return cuda.current_context().get_memory_info()[0]


class DeviceContext:
    """What belongs to one device, and must not be mixed with what belongs to another.

    Parameters
    ----------
    stream : optional
        As in `md4.Engine`.
    max_memory : float, optional
        Cap in MB on device memory.
    device : int, optional
        Number of the device; the thread's current one by default.

    Attributes
    ----------
    device : int
        Number of the device.
    capability : tuple of int
        Its compute capability (major, minor).
    unit : {'dmma16', 'dmma8', 'fma'}
        The unit that does the matrix products; see `md4.gpu.tiles.Tile`.
    stream : numba.cuda.cudadrv.driver.Stream
        All work is done in its order.
    handle : int
        The stream's, as the driver knows it.
    tracks : md4.gpu.tracks.Tracks
        This stream, and those that work beside it in builds.
    track : int
        Number of the stream among these.
    pool : md4.gpu.pool.Pool or md4.gpu.pool.TrackPool
        Device memory.
    recorder : md4.gpu.recording.Recorder
        Launches that builds of J and K repeat.
    lock : DeviceLock
        Held by the one thread that works here.

    Raises
    ------
    DeviceError
        No usable GPU.
    """

    dry = False  # whether launches are only noted (`md4.gpu.dry_run`), so that results mean nothing

    def __init__(self, stream=None, max_memory=None, device=None):
        require_gpu()
        self.device = current_device() if device is None else device
        self.lock = DeviceLock(self.device)
        with self.lock:
            self.capability = current_capability()
            self.unit = arithmetic_unit(self.capability)
            self.stream = as_stream(stream)
            self.tracks, self.track = Tracks(self.stream), 0
            self.pool = Pool(max_memory, self.tracks, self.device)
            self.recorder = Recorder(self.pool)
            self.handle, (self.kernels, self.known) = int(self.stream.handle), kept_on(self.device)

    @cached_property
    def block_shared(self):
        """Most bytes of shared memory of a block of threads on the device."""
        with self.lock:
            return current_block_shared()

    def on(self, stream):
        """The same with another stream."""
        other = copy(self)
        other.stream, other.handle = stream, int(stream.handle)
        return other

    @cached_property
    def beside(self):
        """The same on a stream that the engine's does not hold up: for short kernels, and copies of what is done."""
        return self.on(urgent_stream())

    def beside_now(self):
        """`beside`, for copies to memory that is had of the pool before anything is given back to it.

        What `beside` will be given comes after what this stream was given so far, and so after all that may still use
        such memory.
        """
        event = cuda.event(timing=False)
        event.record(self.stream)
        event.wait(self.beside.stream)
        return self.beside

    def on_track(self, track):
        """The same, of track 0, on another track: its stream, and rooms of its own."""
        other = self.on(self.tracks.stream(track))
        other.track, other.pool = track, TrackPool(self.pool, track)
        return other

    def alone(self):
        """Within it, what all tracks read is made; see `md4.gpu.tracks.Tracks.alone`."""
        return self.tracks.alone(self.track)

    def launch(self, variant, grid, block, shared, *args):
        """Launches a kernel on the stream.

        Parameters
        ----------
        variant : md4.gpu.compile.Variant
        grid, block : int
            Blocks, and threads of a block.
        shared : int
            Bytes of dynamic shared memory of a block.
        *args
            The kernel's arguments: `Buffer` objects and numbers, or tuples of them where the kernel takes a group.
        """
        kernel = self.kernels.get(variant)
        if kernel is None:
            kernel = self.kernels[variant] = launcher(variant, self.capability, self.device)
        kernel.launch(grid, block, self.handle, shared, args, self.recorder.launches)

    def copy_in(self, pointer, array):
        """Copies a contiguous host array to the device, in the order of the stream; it may change once this returns."""
        copy_to_device(pointer, array, self.stream)

    def copy_in_pieces(self, pointer, array):
        """As `copy_in`; the host does not wait for the stream to come to it."""
        copy_in_pieces(pointer, array, self.stream)

    def copy_out(self, array, pointer):
        """Fills a contiguous host array once the stream gets there, and waits for it."""
        copy_to_host(array, pointer, self.stream)

    def clear(self, buffer):
        """Sets all items of a buffer to zero, in the order of the stream."""
        clear(buffer, self.stream)

    def fixed(self, make, *args):
        """make(self, *args), made once for a device and its unit: what launches with the same `args` have in common."""
        key = make, self.unit, args
        try:
            return self.known[key]
        except KeyError:
            found = self.known[key] = make(self, *args)
            return found

    def table(self, make, *args):
        """A constant table made by `make(*args)`, in this device's memory, made once a process."""
        return table_on(self.device, make, *args)


@once
def kept_on(device):
    """What all contexts of a device share: launchers of variants, and what `DeviceContext.fixed` has made."""
    return {}, {}


@once
def table_on(device, make, *args):
    """The table on a device, which is the current one."""
    table = np.array(make(*args))
    array = cuda.to_device(table)
    cuda.default_stream().synchronize()  # streams of other libraries do not wait for the default stream
    return Buffer(array.device_ctypes_pointer.value, table.shape, table.itemsize, array)
