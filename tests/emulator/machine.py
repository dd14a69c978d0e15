"""Threads, warps and memory of the emulated device.

Threads of a block run one at a time, each until it has to wait for others; who is next is drawn by lot. So whatever
does not wait where it must will sooner or later find nothing, which is NaN in all memory that nobody has written.
Asynchronous copies are done when they are waited for, the latest moment that the hardware allows.

A thread that waits keeps a thread of Python. There are no more of these than threads that have waited at the same time.
"""

import ctypes
from _thread import allocate_lock, start_new_thread
from bisect import bisect_right
from collections import deque
from random import Random

import numpy as np

# Where shared memory begins in its own window; what counts from 0 by mistake is found.
SHARED_BASE = 1024
STATIC_SHARED = 48 << 10
WARP = 32
KINDS = {
    "b8": ctypes.c_int8, "f32": ctypes.c_float, "f64": ctypes.c_double, "b64": ctypes.c_int64, "s64": ctypes.c_int64,
    "u64": ctypes.c_int64, "b32": ctypes.c_int32, "s32": ctypes.c_int32, "u32": ctypes.c_int32,
}  # fmt: skip


class DeviceFault(Exception):
    """What a kernel did wrong: an address that is not its own, or waiting for what does not come."""


class Ended(Exception):
    """Another thread of the block has failed."""


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


def closed():
    """A lock that somebody else will open once."""
    lock = allocate_lock()
    lock.acquire()
    return lock


class Worker:
    """A thread of Python, which runs one thread of a block after the other.

    Attributes
    ----------
    turn
        Opened when it may go on.
    thread : Thread or None
        The one that it runs; None to end.
    """

    def __init__(self, machine):
        self.machine, self.turn, self.thread = machine, closed(), None
        start_new_thread(self.work, ())

    def work(self):
        self.turn.acquire()
        while self.thread is not None:
            self.machine.run_thread(self)
            self.turn.acquire()


class Thread:
    """A thread of a block: where it is, and what it has started to copy."""

    def __init__(self, index):
        self.index, self.lane, self.warp = index, index % WARP, index // WARP
        self.worker = None
        self.done, self.found, self.arrays = False, None, 0
        self.copies, self.groups, self.local = [], deque(), Memory()


class Machine:
    """The device while it runs a kernel.

    Attributes
    ----------
    memory : Memory
        Global memory.
    thread : Thread
        The one that runs.
    kernels : set of str
        Factories of the kernels that have run.
    """

    def __init__(self, seed=0):
        self.memory, self.lot = Memory(), Random(seed)
        self.thread = self.block = None
        self.idle = []
        self.kernels = set()

    # blocks and their threads

    def launch(self, function, grid, threads, shared, args, room):
        """Runs all blocks of a kernel, which may have `room` bytes of shared memory each, its own arrays included."""
        self.grid, self.threads, self.dynamic = grid, threads, shared
        if threads % WARP:
            raise DeviceFault(f"{threads} threads are not whole warps")
        for block in range(grid):
            self.run_block(function, block, args)
        if self.used > room:
            raise DeviceFault(f"{self.used} bytes of shared memory of {function.__name__}, where there are {room}")

    def run_block(self, function, block, args):
        self.block, self.failed, self.finished = block, None, closed()
        self.window = aligned(self.dynamic + STATIC_SHARED)
        self.window[self.dynamic :] = 0xFF
        self.static, self.used = [], -(-self.dynamic // 16) * 16
        self.function, self.args = function, args
        self.all = [Thread(n) for n in range(self.threads)]
        self.ready, self.waiting, self.meeting = list(self.all), [], {}
        self.arrived, self.operation = {}, {}
        self.next()
        self.finished.acquire()
        if self.failed is not None:
            raise self.failed

    def run_thread(self, worker):
        """Runs a thread of the block; the worker is idle again before the next thread has its turn."""
        thread = worker.thread
        try:
            if self.failed is None:
                self.function(*self.args)
        except Ended:
            pass
        except BaseException as error:  # reported by `run_block`
            self.failed = self.failed or error
        thread.done = True
        self.idle.append(worker)
        self.after(thread)

    def close(self):
        """Ends the workers, all of which are idle."""
        while self.idle:
            worker = self.idle.pop()
            worker.thread = None
            worker.turn.release()

    def next(self):
        """Lets another thread run: one that is ready, by lot."""
        if self.ready:
            place = self.lot.randrange(len(self.ready))
            self.ready[place], self.ready[-1] = self.ready[-1], self.ready[place]
            self.thread = thread = self.ready.pop()
            if thread.worker is None:
                thread.worker = self.idle.pop() if self.idle else Worker(self)
                thread.worker.thread = thread
            thread.worker.turn.release()
        elif all(thread.done for thread in self.all):
            self.finished.release()
        else:
            self.failed = self.failed or DeviceFault("threads wait for others that do not come")
            self.ready = [thread for thread in self.all if not thread.done]
            self.waiting = []
            self.next()

    def after(self, thread):
        """What follows the end of a thread: the others may have waited for it alone."""
        if self.failed is not None:
            self.ready = [other for other in self.all if not other.done]
        elif self.waiting and len(self.waiting) == self.alive():
            self.pass_barrier()
        self.next()

    def alive(self):
        return sum(not thread.done for thread in self.all)

    def pause(self):
        """The running thread waits until it is made ready."""
        thread = self.thread
        self.next()
        thread.worker.turn.acquire()
        if self.failed is not None:
            raise Ended

    def pass_barrier(self):
        self.ready, self.waiting = self.ready + self.waiting, []

    def barrier(self):
        """All threads of the block wait for each other."""
        self.waiting.append(self.thread)
        if len(self.waiting) == self.alive():
            self.pass_barrier()
        self.pause()

    def meet(self, barrier, count):
        """So many threads wait for each other at a barrier of their own, 1 to 15."""
        if not 0 < barrier < 16:
            raise DeviceFault(f"barrier {barrier}")
        there = self.meeting.setdefault(barrier, [])
        there.append(self.thread)
        if len(there) == count:
            self.ready += self.meeting.pop(barrier)
        self.pause()

    def exchange(self, operation, value):
        """What all lanes of the warp bring to an operation, in their order."""
        thread = self.thread
        found = self.arrived.setdefault(thread.warp, {})
        if self.operation.setdefault(thread.warp, operation) != operation:
            raise DeviceFault(f"lanes of a warp meet at {operation} and {self.operation[thread.warp]}")
        found[thread.lane] = thread, value
        if len(found) == WARP:
            values = [found[lane][1] for lane in range(WARP)]
            for other, _ in found.values():
                other.found = values
                self.ready.append(other)
            del self.arrived[thread.warp], self.operation[thread.warp]
        self.pause()
        return thread.found

    # memory

    def host_address(self, space, address, size):
        """Address in the host's memory of `size` bytes of a space, which are the kernel's."""
        if space == "shared":
            return self.shared_pointer(address, size)
        first = self.window.ctypes.data
        if first <= address < first + self.window.size:
            return self.shared_pointer(self.shared_offset(address), size)
        (self.thread.local if self.thread.local.holds(address) else self.memory).check(address, size)
        return address

    def shared_pointer(self, address, size):
        if address < SHARED_BASE or address + size > SHARED_BASE + self.used:
            raise DeviceFault(f"{size} bytes at {address} are beyond {self.used} bytes of shared memory")
        if address % size:
            raise DeviceFault(f"{address} in shared memory is no multiple of {size}")
        return self.window.ctypes.data + address - SHARED_BASE

    def shared_offset(self, pointer):
        """Where a pointer points to within shared memory."""
        return pointer - self.window.ctypes.data + SHARED_BASE

    def load(self, space, kind, address, count):
        """Numbers of memory, as a tuple."""
        kind = KINDS[kind]
        size = ctypes.sizeof(kind)
        first = self.host_address(space, address, size * count)
        return tuple(kind.from_address(first + size * n).value for n in range(count))

    def store(self, space, kind, address, values):
        kind = KINDS[kind]
        size = ctypes.sizeof(kind)
        first = self.host_address(space, address, size * len(values))
        for n, value in enumerate(values):
            kind.from_address(first + size * n).value = value

    def add(self, address, value):
        """Atomic addition to a double in global memory."""
        self.store("global", "f64", address, (self.load("global", "f64", address, 1)[0] + value,))

    def copy(self, target, source, size, live=None):
        """Starts to copy bytes to shared memory, of which those from `live` on are zeros."""
        live = size if live is None else live
        assert 0 <= live <= size
        to = self.shared_pointer(target, size)
        if live:
            self.memory.check(source - source % size if live < size else source, live)
        self.thread.copies.append((to, source, size, live))

    def commit_copies(self):
        self.thread.groups.append(self.thread.copies)
        self.thread.copies = []

    def wait_copies(self, pending):
        """Waits until at most so many groups of copies are under way."""
        groups = self.thread.groups
        while len(groups) > pending:
            for to, source, size, live in groups.popleft():
                ctypes.memmove(to, source, live)
                ctypes.memset(to + live, 0, size - live)

    def shared_array(self, shape, dtype):
        """An array in shared memory: all that the launch asked for if `shape` is 0, else one of the kernel's own."""
        dtype = np.dtype(dtype.name)
        if shape == 0:
            return self.window[: self.dynamic // 8 * 8].view(dtype)
        n, self.thread.arrays = self.thread.arrays, self.thread.arrays + 1
        if n == len(self.static):
            count = int(np.prod(shape))
            self.static.append(self.window[self.used : self.used + count * dtype.itemsize].view(dtype).reshape(shape))
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
        return sum(1 << lane for lane, vote in enumerate(self.exchange("vote.ballot", flag)) if vote)

    def m8n8k4(self, a, b, c):
        """c + A B: the lane holds A[lane/4, lane%4], B[lane%4, lane/4] and C[lane/4, 2 (lane%4) + {0, 1}]."""
        values = self.exchange("mma.m8n8k4", (a, b))
        row, first = self.thread.lane // 4, self.thread.lane % 4 * 2
        left = [values[4 * row + k][0][0] for k in range(4)]
        return tuple(c[n] + sum(x * values[4 * (first + n) + k][1][0] for k, x in enumerate(left)) for n in range(2))

    def m16n8k8(self, a, b, c):
        """The same of 16 rows and 8 inner indices: a = rows lane/4 + {0, 8} at lane%4, then at lane%4 + 4."""
        values = self.exchange("mma.m16n8k8", (a, b))
        row, first = self.thread.lane // 4, self.thread.lane % 4 * 2
        out = []
        for half in range(2):
            left = [values[4 * row + k % 4][0][half + 2 * (k // 4)] for k in range(8)]
            for n in range(2):
                right = [values[4 * (first + n) + k % 4][1][k // 4] for k in range(8)]
                out.append(c[2 * half + n] + sum(x * y for x, y in zip(left, right)))
        return tuple(out)
