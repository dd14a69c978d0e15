"""Device memory with a hard cap, reused in the order of a stream."""

import weakref
from collections import defaultdict, deque
from functools import lru_cache
from itertools import count
from math import prod

import numpy as np
from numba import cuda
from numba.cuda.cudadrv import driver

from md4.errors import MemoryLimitError
from md4.gpu.buffers import Buffer, copy_in_pieces
from md4.gpu.device_shares import held_on, pools_on, register, shares
from md4.gpu.dlpack import DeviceArray
from md4.gpu.tuning import TRACK_BYTES
from md4.support.display import size_text
from md4.support.locks import Lock, locked
from md4.support.log import log

# The driver's CUDA_ERROR_OUT_OF_MEMORY.
OUT_OF_MEMORY = 2
# Of what is copied to the device.
ITEM_BYTES = 8

# Left to the driver and to kernels' local memory when md4 may take all that is free.
RESERVE_BYTES = 512 << 20


@lru_cache(maxsize=1 << 14)
def bucket(nbytes):
    """Size that a request is rounded up to: eight steps to the power of two."""
    step = 1 << max(9, nbytes.bit_length() - 4)
    return int(-(-max(1, nbytes) // step) * step)


# Is told, and keeps nothing.
NOBODY = deque(maxlen=0)


class Loan(Buffer):
    """A buffer on loan from a pool. It goes back when it is given back or when nobody refers to it or a part any more.

    The second is for what an exception or an interrupt leaves behind. The loan does not hold the memory, the pool does:
    where garbage is collected in cycles, Numba would free memory that only the garbage refers to before `__del__` runs.

    Attributes
    ----------
    nbytes : int
        Of the memory, which may be larger than the buffer.
    ordered : bool
        Whether whoever has the memory next uses it later, since it is for the engine's stream. Another stream may still
        be at work on what nobody has given back: that is freed instead.
    """

    __slots__ = ("__weakref__", "nbytes", "number", "ordered", "returned", "token")

    def __init__(self, number, token, place, items, ordered, returned):
        self.pointer, self.nbytes = place
        self.shape, self.itemsize = (items,), ITEM_BYTES
        self.number, self.token, self.ordered, self.returned = number, token, ordered, returned

    @property
    def owner(self):
        """What keeps the memory on loan, for parts of the buffer."""
        return self

    def give_back(self):
        """Tells the pool, which takes a loan back once."""
        self.returned.append((self.number, self.token, True))
        self.returned = NOBODY  # the pool need not hear it again

    def __del__(self):
        self.returned.append((self.number, self.token, self.ordered))


def lifetime(memory):
    """What lives as long as device memory of Numba's is used; slices of an array are uses of the same."""
    return memory._mem.free.__self__


def forget(number, live, dropped):
    """Called when Numba is about to free memory. It knows nothing of the pool, which could not end otherwise."""
    size = live.pop(number, None)
    if size is not None:
        dropped[number] = size


class Pool:
    """Device memory of one engine: buffers are reused in stream order, the sum never exceeds the cap.

    What is allocated counts until the driver has it back: while a caller or another library refers to it, and then
    until Numba, which puts that off, has freed it.

    Parameters
    ----------
    max_memory : float, optional
        Cap in MB; by default what is free on the device when memory is asked for.
    tracks : md4.gpu.tracks.Tracks, optional
        The streams that use the memory; by default a single one.
    device : int, optional
        Number of the device, of which other processes may have shares.
    """

    def __init__(self, max_memory=None, tracks=None, device=None):
        self.tracks, self.device = tracks, device
        self.cap = None if max_memory is None else int(max_memory * 1e6)
        self.peak, self.free, self.lock = 0, None, Lock()
        # Memory by its number, and its address and size; numbers that are on loan, with the token of the loan; idle
        # ones by their size.
        self.memory, self.places, self.lent, self.idle = {}, {}, {}, defaultdict(dict)
        self.rooms = {}  # loans of `room`, by the names of what they are for
        # How often memory was asked for, and the most bytes of each room that were, while somebody notes them.
        self.requests, self.noted = 0, None
        # All four change whenever Python drops an object, in any thread: by single operations that cannot be torn.
        self.live, self.on_host, self.dropped, self.returned = {}, {}, {}, deque()
        self.numbers = count()
        register(device, self)

    def facts(self):
        """What there is to show of it, as (name, value)."""
        cap = "none" if self.cap is None else size_text(self.cap)
        return [("device memory held", size_text(self.held)), ("most held", size_text(self.peak)), ("memory cap", cap)]

    @property
    def held(self):
        """Bytes that are allocated, on the device and on the host."""
        return self.held_on_device + sum(list(self.on_host.values()))

    @property
    def held_on_device(self):
        """Bytes of the device that are allocated."""
        return sum(list(self.live.values())) + self.dropped_bytes

    @property
    def dropped_bytes(self):
        """Bytes that Numba has yet to free."""
        return sum(list(self.dropped.values()))

    @locked
    def left(self):
        """Bytes that can still be handed out, idle buffers and rooms that nobody uses included."""
        pools = pools_on(self.device) if self.cap is None and self.device in shares else [self]
        return max(0, self._room() + self._unused_bytes() + sum(pool.dropped_bytes for pool in pools))

    @locked
    def below_cap(self):
        """Bytes that the cap leaves, on the device and on the host together; idle buffers count as free."""
        return self.cap - self.held + self._unused_bytes() + self.dropped_bytes

    def share(self, most):
        """Half of the bytes that can still be handed out, `most` at most; quick where there is plenty."""
        if self._room() >= 2 * most:
            return most
        with self.lock:
            plenty = self._room() + self._idle_bytes() >= 2 * most
        return most if plenty else min(most, self.left() // 2)

    def _room(self):
        """Bytes that can be allocated at once."""
        if self.free is None:
            self.free = max(0, cuda.current_context().get_memory_info()[0] - RESERVE_BYTES)
        if self.cap is not None:
            return min(self.free, self.cap - self.held)
        share = shares.get(self.device)
        return self.free if share is None else min(self.free, share.nbytes - held_on(self.device))

    def _idle_bytes(self):
        self._collect()
        return sum(size * len(numbers) for size, numbers in self.idle.items())

    def _unused_bytes(self):
        """Bytes of idle buffers and of rooms that nobody uses."""
        return sum(self.rooms[name].nbytes for name in self._unused_rooms()) + self._idle_bytes()

    def _unused_rooms(self):
        """Names of the rooms that nobody uses; they stay where they are."""
        known = [(name, loan.number, weakref.ref(loan)) for name, loan in self.rooms.items() if loan is not None]
        self.rooms.clear()
        self._collect()
        unused = []
        for name, number, used in known:
            self.rooms[name] = used()
            if self.rooms[name] is None:
                unused.append(name)
                self.rooms[name] = self._lend(number, self.places[number][1] // ITEM_BYTES)
        return unused

    def _collect(self):
        """Takes back what was returned: each loan once, however often it says so."""
        returned, lent, places, idle = self.returned, self.lent, self.places, self.idle
        while returned:
            number, token, ordered = returned.popleft()
            if lent.get(number) == token:
                if ordered:
                    idle[places[number][1]][number] = None
                else:
                    del self.memory[number], places[number]
                del lent[number]

    def get(self, items, track=0):
        """A buffer of 8-byte items, contents undefined, for a track; it may be used on others after it was written.

        Raises
        ------
        MemoryLimitError
            It would exceed the cap or the memory there is.
        """
        with self.lock:
            self.requests += 1
            if self.returned:
                self._collect()
            size = bucket(ITEM_BYTES * items)
            numbers = self.idle[size]
            loan = self._lend(next(reversed(numbers)) if numbers else self._allocate(size), items)
        if self.tracks is not None:
            self.tracks.follow(track)  # others may still use what they have given back
        return loan

    def room(self, name, items, track=0):
        """A buffer of 8-byte items, contents undefined, in the same memory at every call with a name, where it fits.

        It is for what is used up before the next call, in the order of a track's stream, by the one thread that
        holds the engine's lock: there is nothing to give back. The memory stays on loan until it is too small or needed
        for something else, and as long as a buffer of it is used. Each track has other rooms.
        """
        name = (track, name) if track else name
        loan = self.rooms.get(name)
        if loan is None or loan.nbytes < ITEM_BYTES * items:
            loan = self.rooms[name] = None  # the memory may be had by others first
            loan = self.rooms[name] = self.get(items, track)
        if self.noted is not None:
            self.noted[name] = max(self.noted.get(name, 0), ITEM_BYTES * items)
        return Buffer(loan.pointer, (items,), ITEM_BYTES, loan)

    @locked
    def own_room(self, name, items):
        """As `room`, but its memory may be used beyond the next call, which gives other memory then."""
        if name not in self._unused_rooms():
            self.rooms.pop(name, None)
        return self.room(name, items)

    def room_places(self, sizes):
        """(name, address, bytes) of rooms that hold so many bytes; None where there is none of a name."""
        loans = [(name, self.rooms.get(name), size) for name, size in sizes.items()]
        return None if any(loan is None for _, loan, _ in loans) else [(n, loan.pointer, s) for n, loan, s in loans]

    def rooms_at(self, places):
        """The loans of rooms, which keep them, if they are at these `places` and large enough; else None."""
        found = []
        for name, pointer, size in places:
            loan = self.rooms.get(name)
            if loan is None or loan.pointer != pointer or loan.nbytes < size:
                return None
            found.append(loan)
        return found

    @locked
    def fresh(self, items):
        """A buffer that no earlier work may still use, for another stream; `get` gives any."""
        self.requests += 1
        return self._lend(self._allocate(bucket(ITEM_BYTES * items)), items, ordered=False)

    def _lend(self, number, items, ordered=True):
        """The buffer of an idle number; an interrupt leaves it idle or returned."""
        token, place = next(self.numbers), self.places[number]
        try:
            self.lent[number] = token
            del self.idle[place[1]][number]
            return Loan(number, token, place, items, ordered, self.returned)
        except BaseException:
            self.returned.append((number, token, True))
            raise

    def _allocate(self, size):
        """The number of new memory, which is idle."""
        self.free = None  # others use the device too
        if size > self._room():
            self.trim()
        limit = self._room()
        if size > limit:
            share = shares.get(self.device) if self.cap is None else None
            remedy = f"{share.processes} processes share this GPU, start fewer," if share else "raise max_memory"
            raise MemoryLimitError(
                f"{size_text(size)} of device memory are needed, but {size_text(max(0, limit))} may be used; "
                f"{remedy} or compute less at once."
            )
        try:
            memory, number = cuda.current_context().memalloc(size), next(self.numbers)
        except driver.CudaAPIError as error:  # another process was quicker
            if error.code != OUT_OF_MEMORY:
                raise
            raise MemoryLimitError(
                f"{size_text(size)} of device memory are needed, which the driver refuses, as others use this GPU; set "
                "max_memory below what they leave, or compute less at once."
            ) from error
        weakref.finalize(lifetime(memory), forget, number, self.live, self.dropped)
        self.live[number] = size  # an interrupt before it frees the memory, and nothing has been booked
        self.places[number] = memory.device_pointer_value, memory.size
        self.memory[number] = memory
        self.idle[size][number] = self.free = None
        self.peak = max(self.peak, self.held)
        return number

    def release(self, buffer):
        """Takes a buffer of `get` or `fresh` back; work already on the stream may still use it."""
        buffer.give_back()

    @locked
    def trim(self):
        """Frees all that is not on loan, rooms that nobody uses, and what Numba has yet to free."""
        self.rooms.clear()
        self._collect()
        log.debug("device memory: what is idle of %s is given back", size_text(self.held))
        self.idle, self.free = defaultdict(dict), None
        for number in [number for number in self.memory if number not in self.lent]:
            del self.memory[number], self.places[number]
        waiting = [(pool.dropped, list(pool.dropped)) for pool in pools_on(self.device)]
        cuda.current_context().deallocations.clear()  # also what other pools of the device have dropped
        for dropped, numbers in waiting:
            for number in numbers:
                dropped.pop(number, None)

    @locked
    def array(self, shape, dtype=np.float64):
        """A device array, real or complex, for a caller to keep; its share of the cap returns when it is gone."""
        size = np.dtype(dtype).itemsize
        loan = self.get(max(1, int(prod(shape)) * size // ITEM_BYTES))
        strides = tuple(size * prod(shape[n + 1 :]) for n in range(len(shape)))
        memory, _ = self.memory.pop(loan.number), self.places.pop(loan.number)
        del self.lent[loan.number]  # never lent again: a caller's work on it is in no order with ours
        lifetime(memory).made_on = self.tracks and self.tracks.stream(0)
        return DeviceArray(shape, strides, dtype, gpu_data=memory)

    def watch(self, host):
        """Counts an array in host memory against the cap, too, for as long as it is there."""
        number = next(self.numbers)
        weakref.finalize(host, self.on_host.pop, number, None)
        self.on_host[number] = host.nbytes
        return host

    def upload(self, arrays, stream, fresh=False, track=0):
        """Host arrays of 8-byte items, one after the other in one buffer (see `get`, `fresh`), and where each begins.

        Raises
        ------
        TypeError
            Items of another size, whose bytes a kernel would misread.
        """
        arrays = [np.ascontiguousarray(a) for a in arrays]
        for array in arrays:
            if array.dtype.itemsize != ITEM_BYTES:
                raise TypeError(f"items of {array.dtype} are not of {ITEM_BYTES} bytes.")
        packed = np.concatenate([a.reshape(-1).view(np.int64) for a in arrays])
        items = max(1, packed.size)
        buffer = self.fresh(items) if fresh else self.get(items, track)
        copy_in_pieces(buffer.pointer, packed, stream)
        edges = np.cumsum([0, *(a.size for a in arrays)]).tolist()
        return buffer, [buffer.part(e, np.shape(a)) for e, a in zip(edges, arrays)]


class TrackPool:
    """A pool as a track uses it, but track 0.

    Parameters
    ----------
    pool : Pool
    track : int
    """

    def __init__(self, pool, track):
        self.pool, self.track, self.release = pool, track, pool.release

    def get(self, items):
        """See `Pool.get`."""
        return self.pool.get(items, self.track)

    def room(self, name, items):
        """See `Pool.room`."""
        return self.pool.room(name, items, self.track)

    def trim(self):
        """See `Pool.trim`."""
        self.pool.trim()

    def upload(self, arrays, stream):
        """See `Pool.upload`."""
        return self.pool.upload(arrays, stream, track=self.track)

    def share(self, most):
        """See `Pool.share`; the tasks of these tracks are short, and need less."""
        return self.pool.share(min(most, TRACK_BYTES))
