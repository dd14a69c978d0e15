"""Threads, warps and memory of the emulated device.

Threads of a block run one at a time, each until it has to wait for others; who is next is drawn by lot. So whatever
does not wait where it must will sooner or later find nothing, which is NaN in all memory that nobody has written.
Asynchronous copies are done when they are waited for, the latest moment that the hardware allows.

Each thread is a greenlet: it keeps its place in the Python code of the kernel while others run.
"""

import ctypes
from bisect import bisect_right
from collections import deque
from random import Random

import numpy as np

from emulator.races import ADD, READ, WRITE, Accesses, noted_array

try:
    from greenlet import getcurrent, greenlet
except ImportError:  # where tests run on a GPU only
    getcurrent = greenlet = None

# Where shared memory begins in its own window; what counts from 0 by mistake is found.
SHARED_BASE = 1024
STATIC_SHARED = 48 << 10
WARP = 32
WARP_BARRIER = "bar.warp.sync"
KINDS = {
    "b8": ctypes.c_int8, "f32": ctypes.c_float, "f64": ctypes.c_double, "b64": ctypes.c_int64, "s64": ctypes.c_int64,
    "u64": ctypes.c_int64, "b32": ctypes.c_int32, "s32": ctypes.c_int32, "u32": ctypes.c_int32,
}  # fmt: skip


class DeviceFault(Exception):
    """What a kernel did wrong: an address that is not its own, or waiting for what does not come."""


def aligned(nbytes):
    """Bytes at a multiple of 1024, all of them 0xFF, which makes no number."""
    raw = np.full(nbytes + 1024, 0xFF, dtype=np.uint8)
    first = -raw.ctypes.data % 1024
    return raw[first : first + nbytes]


class Memory:
    """Ranges of host memory that a kernel may use."""

    def __init__(self):
        self.first, self.last, self.kept = [], [], {}

    def allocate(self, nbytes):
        """A new range as an array of bytes, valid until `free`."""
        array = aligned(max(16, nbytes))
        address = array.ctypes.data
        place = bisect_right(self.first, address)
        self.first.insert(place, address)
        self.last.insert(place, address + array.size)
        self.kept[address] = array
        return array

    def free(self, address):
        place = self.first.index(address)
        del self.first[place], self.last[place], self.kept[address]

    def holds(self, address):
        """Whether an address lies in one of the ranges."""
        place = bisect_right(self.first, address) - 1
        return place >= 0 and address < self.last[place]

    def check(self, address, size):
        """DeviceFault unless these bytes lie in one range, the address a multiple of the size."""
        place = bisect_right(self.first, address) - 1
        if place < 0 or address + size > self.last[place]:
            raise DeviceFault(f"{size} bytes at {address:#x} are nobody's")
        if address % size:
            raise DeviceFault(f"{address:#x} is no multiple of {size}")


class Thread:
    """A thread of a block: where it is, and what it has started to copy."""

    def __init__(self, index, function):
        self.index, self.lane, self.warp = index, index % WARP, index // WARP
        self.code = greenlet(function)
        self.found, self.arrays = None, 0
        self.copies, self.groups, self.local = [], deque(), Memory()


class Machine:
    """The device while it runs a kernel.

    Attributes
    ----------
    memory : Memory
        Global memory.
    thread : Thread
        The one that runs.
    accesses : Accesses or None
        What threads read and write, if the machine looks for races.
    kernels : set of str
        Factories of the kernels that have run.
    """

    def __init__(self, seed=0, races=False):
        self.memory, self.lot = Memory(), Random(seed)
        self.accesses, self.noted_array = (Accesses(), noted_array(self)) if races else (None, np.ndarray)
        self.thread = self.block = None
        self.kernels = set()

    # blocks and their threads

    def launch(self, function, grid, threads, shared, args, room):
        """Runs all blocks of a kernel, which may have `room` bytes of shared memory each, its own arrays included."""
        self.grid, self.threads, self.dynamic = grid, threads, shared
        if threads % WARP:
            raise DeviceFault(f"{threads} threads are not whole warps")
        if self.accesses:
            self.accesses.next_launch()
        for block in self.blocks(grid):
            self.run_block(function, block, args)
        if self.used > room:
            raise DeviceFault(f"{self.used} bytes of shared memory of {function.__name__}, where there are {room}")

    def blocks(self, grid):
        """The blocks of a launch, in the order in which they run."""
        return range(grid)

    def run_block(self, function, block, args):
        self.block, self.host = block, getcurrent()
        self.window = aligned(self.dynamic + STATIC_SHARED)
        self.window[self.dynamic :] = 0xFF
        self.window_address = self.window.ctypes.data
        self.static, self.used = [], -(-self.dynamic // 16) * 16
        threads = [Thread(n, function) for n in range(self.threads)]
        self.alive, self.ready, self.waiting, self.meeting = len(threads), list(threads), [], {}
        self.arrived, self.operation = {}, {}
        if self.accesses:
            self.accesses.next_block(block, self.threads)
        try:
            while self.alive:
                self.run_thread(args)
        finally:
            for thread in threads:
                thread.code.throw()  # ends those that an error has left

    def run_thread(self, args):
        """Lets a thread run that is ready, by lot, until it waits or ends."""
        if not self.ready:
            raise DeviceFault("threads wait for others that do not come")
        place = int(self.lot.random() * len(self.ready))
        self.ready[place], self.ready[-1] = self.ready[-1], self.ready[place]
        self.thread = self.ready.pop()
        self.thread.code.switch(*(() if self.thread.code else args))
        if self.thread.code.dead:
            self.alive -= 1
            self.pass_barrier()  # the others may have waited for it alone

    def pause(self):
        """The running thread waits until it is made ready."""
        self.host.switch()

    def pass_barrier(self):
        """Makes those ready who wait for all threads of the block, if all are there."""
        if len(self.waiting) == self.alive:
            self.meet_all(self.waiting)
            self.waiting = []

    def barrier(self):
        """All threads of the block wait for each other."""
        self.waiting.append(self.thread)
        self.pass_barrier()
        self.pause()

    def meet(self, barrier, count):
        """So many threads wait for each other at a barrier of their own, 1 to 15."""
        if not 0 < barrier < 16:
            raise DeviceFault(f"barrier {barrier}")
        there = self.meeting.setdefault(barrier, [])
        there.append(self.thread)
        if len(there) == count:
            self.meet_all(self.meeting.pop(barrier))
        self.pause()

    def meet_all(self, threads):
        """These have waited for each other, and go on."""
        if self.accesses and threads:
            self.accesses.meet(threads)
        self.ready += threads

    def exchange(self, operation, value, combined=list):
        """What a function makes of all that the lanes of the warp bring to an operation, in their order."""
        thread = self.thread
        found = self.arrived.setdefault(thread.warp, {})
        if self.operation.setdefault(thread.warp, operation) != operation:
            raise DeviceFault(f"lanes of a warp meet at {operation} and {self.operation[thread.warp]}")
        found[thread.lane] = thread, value
        if len(found) == WARP:
            whole = combined([found[lane][1] for lane in range(WARP)])
            there = [other for other, _ in found.values()]
            for other in there:
                other.found = whole
            if operation == WARP_BARRIER:
                self.meet_all(there)
            else:
                self.ready += there
            del self.arrived[thread.warp], self.operation[thread.warp]
        self.pause()
        return thread.found

    # memory

    def note(self, kind, address, size):
        """The running thread reads, writes or adds to memory of the kernel, given by an address of the host."""
        if self.accesses and not self.thread.local.holds(address):
            shared = 0 <= address - self.window_address < self.window.size
            self.accesses.note(kind, self.thread.index, address, size, shared)

    def array(self, array):
        """An array as an argument of a kernel."""
        return array.view(self.noted_array)

    def host_address(self, space, address, size):
        """Address in the host's memory of `size` bytes of a space, which are the kernel's."""
        if space == "shared":
            return self.shared_pointer(address, size)
        first = self.window_address
        if first <= address < first + self.window.size:
            return self.shared_pointer(self.shared_offset(address), size)
        (self.thread.local if self.thread.local.holds(address) else self.memory).check(address, size)
        return address

    def shared_pointer(self, address, size):
        if address < SHARED_BASE or address + size > SHARED_BASE + self.used:
            raise DeviceFault(f"{size} bytes at {address} are beyond {self.used} bytes of shared memory")
        if address % size:
            raise DeviceFault(f"{address} in shared memory is no multiple of {size}")
        return self.window_address + address - SHARED_BASE

    def shared_offset(self, pointer):
        """Where a pointer points to within shared memory."""
        return pointer - self.window_address + SHARED_BASE

    def load(self, space, kind, address, count):
        """Numbers of memory, as a tuple."""
        kind = KINDS[kind]
        size = ctypes.sizeof(kind)
        first = self.host_address(space, address, size * count)
        if self.accesses:
            self.note(READ, first, size * count)
        if count == 1:
            return (kind.from_address(first).value,)
        return tuple((kind * count).from_address(first))

    def store(self, space, kind, address, values):
        kind = KINDS[kind]
        size = ctypes.sizeof(kind)
        first = self.host_address(space, address, size * len(values))
        if self.accesses:
            self.note(WRITE, first, size * len(values))
        for n, value in enumerate(values):
            kind.from_address(first + size * n).value = value

    def add(self, address, value):
        """Atomic addition to a double in global memory."""
        number = ctypes.c_double.from_address(self.host_address("global", address, 8))
        self.note(ADD, address, 8)
        number.value += value

    def add_integer(self, address, value):
        """The same to a 64-bit integer, which may overflow."""
        number = ctypes.c_int64.from_address(self.host_address("global", address, 8))
        self.note(ADD, address, 8)
        number.value += value

    def copy(self, target, source, size, live=None):
        """Starts to copy bytes to shared memory, of which those from `live` on are zeros."""
        live = size if live is None else live
        assert 0 <= live <= size
        to = self.shared_pointer(target, size)
        if live:
            self.memory.check(source - source % size if live < size else source, live)
        self.note_copy(to, source, size, live)
        if self.accesses:
            self.accesses.mark_copy(to, size, True)
        self.thread.copies.append((to, source, size, live))

    def note_copy(self, to, source, size, live):
        """A copy may be done at any moment from its start to where it is waited for."""
        self.note(WRITE, to, size)
        if live:
            self.note(READ, source, live)

    def commit_copies(self):
        self.thread.groups.append(self.thread.copies)
        self.thread.copies = []

    def wait_copies(self, pending):
        """Waits until at most so many groups of copies are under way."""
        groups = self.thread.groups
        while len(groups) > pending:
            for to, source, size, live in groups.popleft():
                if self.accesses:
                    self.accesses.mark_copy(to, size, False)
                self.note_copy(to, source, size, live)
                ctypes.memmove(to, source, live)
                ctypes.memset(to + live, 0, size - live)

    def shared_array(self, shape, dtype):
        """An array in shared memory: all that the launch asked for if `shape` is 0, else one of the kernel's own."""
        dtype = np.dtype(dtype.name)
        if shape == 0:
            return self.array(self.window[: self.dynamic // 8 * 8].view(dtype))
        n, self.thread.arrays = self.thread.arrays, self.thread.arrays + 1
        if n == len(self.static):
            count = int(np.prod(shape))
            array = self.window[self.used : self.used + count * dtype.itemsize].view(dtype).reshape(shape)
            self.static.append(self.array(array))
            self.used += -(-count * dtype.itemsize // 16) * 16
        return self.static[n]

    def local_array(self, shape, dtype):
        """A thread's own array."""
        dtype = np.dtype(dtype.name)
        count = int(np.prod(shape))
        return self.thread.local.allocate(count * dtype.itemsize)[: count * dtype.itemsize].view(dtype).reshape(shape)

    # what the lanes of a warp do together

    def shuffle_xor(self, value, mask):
        return self.exchange("shfl.bfly", value)[self.thread.lane ^ int(mask)]

    def shuffle_from(self, value, lane):
        return self.exchange("shfl.idx", value)[int(lane)]

    def shuffle_down(self, value, by):
        return self.exchange("shfl.down", value)[min(self.thread.lane + int(by), 31)]

    def ballot(self, flag):
        return self.exchange("vote.ballot", flag, flags)

    def m8n8k4(self, a, b, c):
        return self.add_product("mma.m8n8k4", a, b, c)

    def m16n8k8(self, a, b, c):
        return self.add_product("mma.m16n8k8", a, b, c)

    def single_m16n8k8(self, a, b, c):
        """In TF32: of a and b, bits of floats, the last 13 do not count."""
        a, b = (tuple(map(float, (np.array(x, dtype=np.int32) & -(2**13)).view(np.float32))) for x in (a, b))
        return tuple(map(float, np.float32(self.add_product("mma.single_m16n8k8", a, b, c))))

    def add_product(self, operation, a, b, c):
        """The lane's elements of C + A B."""
        products = self.exchange(operation, (a, b), products_by_lane)
        return tuple([x + y for x, y in zip(c, products[self.thread.lane], strict=True)])


def flags(votes):
    """A bit for each lane."""
    return sum(1 << lane for lane, vote in enumerate(votes) if vote)


def products_by_lane(factors):
    """A B of the elements of A and B that the lanes hold, as the elements that each lane gets.

    With n = 1 (m8n8k4) or 2 (m16n8k8), and i, j < n, a lane holds A[lane/4 + 8 i, lane%4 + 4 j] and
    B[lane%4 + 4 j, lane/4], i the faster index; it gets C[lane/4 + 8 i, 2 (lane%4) + {0, 1}].
    """
    left, right = (np.array(side) for side in zip(*factors))
    n = right.shape[1]
    left = left.reshape(8, 4, n, n).transpose(3, 0, 2, 1).reshape(8 * n, 4 * n)
    right = right.reshape(8, 4, n).transpose(0, 2, 1).reshape(8, 4 * n)
    with np.errstate(all="ignore"):  # what is not a number may be multiplied, too
        product = left @ right.T
    return product.reshape(n, 8, 4, 2).transpose(1, 2, 0, 3).reshape(WARP, 2 * n).tolist()
