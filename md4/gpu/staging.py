"""Copies between the memory of the host and that of the device, by way of pinned memory.

The device copies from and to pinned memory only. The way through the driver's own takes several times as long as the
copy itself, since one thread does it. Here some threads copy between pinned memory and arrays of the caller.

This memory counts against the cap of an engine. Where the cap or the host leaves little, copies go the driver's way.
What is no longer in use stays in CuPy's pool for the next copies, whichever engine makes them; but an engine with a
cap, which would not count it there, has CuPy give it back.
"""

import numpy as np

from md4.support.memory import host_memory
from md4.support.processes import processors
from md4.support.threads import Standing, run_each

# Bytes of arrays that are copied so: smaller ones take as long to divide, larger ones would hold much pinned memory.
LEAST, MOST = 1 << 20, 256 << 20
# Up to here the driver's own way to the device takes no longer.
LEAST_SENT = 10 << 20
THREADS = 3
# Of what the host and a cap leave: the most that a copy may take, so that the work beside it has memory.
SHARE = 0.125


class Staging:
    """Pinned memory, from CuPy's pool, and threads that copy.

    Parameters
    ----------
    xp : module
        CuPy.
    pool : md4.gpu.pool.Pool
        It counts what is in use.
    """

    def __init__(self, xp, pool):
        self.xp, self.pool, self.threads, self.used = xp, pool, Standing(), []

    def takes(self, array):
        """Whether an array, of the host or of the device, is copied so."""
        self.forget_done()
        usual = array.dtype == np.float64 and array.flags.c_contiguous and LEAST <= array.nbytes <= MOST
        return usual and pinned_bytes(array) <= SHARE * self.left()

    def left(self):
        """Bytes that the host leaves, and the cap if there is one."""
        return host_memory() if self.pool.cap is None else min(host_memory(), self.pool.below_cap())

    def forget_done(self):
        """Gives back the memory of copies that are done, which counts no longer."""
        before, self.used = len(self.used), [(copied, memory) for copied, memory in self.used if not copied.done]
        if len(self.used) < before and self.pool.cap is not None:
            self.xp.get_default_pinned_memory_pool().free_all_blocks()

    def pinned(self, array):
        """Host memory for an array of the same shape: pinned, or any where the system gives none, which is slower."""
        size = pinned_bytes(array)
        try:
            memory = np.ndarray(size // 8, buffer=self.xp.cuda.alloc_pinned_memory(size))
        except self.xp.cuda.runtime.CUDARuntimeError:
            memory = np.empty(array.size)
        return self.pool.watch(memory)[: array.size].reshape(array.shape)

    def mark(self, memory, stream):
        """The event after what a stream was given, until which CuPy's pool must not lend the memory to others."""
        copied = stream.record()
        self.used.append((copied, memory))
        return copied

    def send(self, array, out, stream):
        """`out`, to which an array of the host is copied on a stream; it may be changed at once."""
        if array.nbytes < LEAST_SENT:
            out.set(array, stream=stream)  # the driver has made a copy when this returns
            return out
        staged = self.pinned(array)
        self.copy(array, staged)
        out.set(staged, stream=stream)
        self.mark(staged, stream)
        return out

    def later(self, array, stream, out=None):
        """A function that waits for a copy of a device array to the host, which begins at once on a stream.

        It is in `out`, a C-contiguous array, if this is given.
        """
        if not self.takes(array):
            return lambda: self.fetched(array, stream, out)
        staged = self.pinned(array)
        array.get(stream=stream, out=staged, blocking=False)
        copied, found = self.mark(staged, stream), np.empty(array.shape) if out is None else out
        found.fill(0.0)  # while the device is at work, since the first write to new memory is slow

        def fetch(array=array):  # which is kept until then
            copied.synchronize()
            self.copy(staged, found)
            return found

        return fetch

    def fetched(self, array, stream, out):
        """A copy on the host."""
        found = array.get(stream=stream, out=out)
        stream.synchronize()
        return found

    def copy(self, source, target):
        """Copies an array of the host to another one."""
        source, target = source.reshape(-1), target.reshape(-1)
        count = max(1, min(THREADS, processors()))
        cuts = [source.size * n // count for n in range(count + 1)]

        def part(n):
            np.copyto(target[cuts[n] : cuts[n + 1]], source[cuts[n] : cuts[n + 1]])

        run_each(count, part, start=self.threads.start)


def pinned_bytes(array):
    """Bytes of the pinned memory for an array: CuPy's pool rounds up to a power of two."""
    return 1 << max(3, int(array.nbytes - 1).bit_length())
