"""A GPU backend without a device: it takes work as any other does, and notes the kernels that it would launch.

So what is compiled ahead of a first call is what the call itself will ask for, and there is no list beside the
launchers. Nothing is computed, and results mean nothing. Only what decides on kernels is as on a device: the primitive
pairs of shell pairs, some of which are counted on the host, and rough Schwarz bounds, which sort and cut the lists.
"""

from copy import copy
from math import prod
from weakref import WeakKeyDictionary

import numpy as np

from md4.gpu.buffers import Buffer
from md4.gpu.context import DeviceContext, arithmetic_unit
from md4.gpu.shell_pairs import PairMaker
from md4.gpu.sums import DeviceBounds
from md4.gpu.targets import DeviceTensor
from md4.gpu.tracks import Tracks
from md4.shells.shell_pairs import ShellPairs, shell_pair_lists, starts_of
from md4.support.locks import Lock

# Pairs of a list whose primitive pairs are counted, at most; the others are as their neighbours.
SAMPLE = 1000
# Bytes of shared memory that a block of threads may have, by compute capability (CUDA programming guide). Of newer ones
# it is assumed to be the least of those with copies that are asynchronous.
BLOCK_SHARED = {
    (7, 0): 96 << 10, (7, 5): 64 << 10, (8, 0): 163 << 10, (8, 6): 99 << 10, (8, 7): 163 << 10, (8, 9): 99 << 10,
    (9, 0): 227 << 10, (10, 0): 227 << 10, (10, 3): 227 << 10, (11, 0): 227 << 10,
}  # fmt: skip
LEAST_SHARED = 99 << 10


class NoMemory:
    """In place of `md4.gpu.pool.Pool`: buffers at no address, of which there are as many as one wants.

    Parameters
    ----------
    left : int
        The bytes that seem to be free.
    """

    cap, requests, noted = None, 0, None

    def __init__(self, left):
        self._left = left

    def left(self):
        return self._left

    def share(self, most):
        return min(most, self._left // 2)

    def get(self, items, track=0):
        return Buffer(0, (items,), 8, None)

    fresh = get

    def room(self, name, items, track=0):
        return self.get(items)

    own_room = room

    def array(self, shape, dtype=np.float64):
        return NoArray(shape)

    def upload(self, arrays, stream, fresh=False, track=0):
        return self.get(1), [Buffer(0, np.shape(array), 8, None) for array in arrays]

    def release(self, buffer):
        pass

    def watch(self, array):
        return array


class NoArray:
    """In place of a device array for results."""

    def __init__(self, shape):
        self.shape, self.size = tuple(shape), prod(shape)
        self.__cuda_array_interface__ = {"data": (0, False), "shape": self.shape}


class NoStream:
    """In place of a stream."""

    handle = 0

    def synchronize(self):
        pass


class NoTracks(Tracks):
    """`md4.gpu.tracks.Tracks` whose streams do nothing."""

    def stream(self, track):
        return self.streams[0]

    def join(self, first, second):
        pass

    def mark(self):
        return lambda: None


class NoRecorder:
    """In place of `md4.gpu.recording.Recorder`: nothing is repeated."""

    launches = None

    def next_build(self):
        pass

    def repeat(self, key, bra, ket, stream):
        return False


class DryContext(DeviceContext):
    """A `md4.gpu.context.DeviceContext` that notes kernels instead of launching them.

    Parameters
    ----------
    capability : tuple of int
        As in `DeviceContext`.
    left : int
        The bytes of device memory that seem to be free.
    block_shared : int, optional
        Bytes of shared memory of a block, by default by the capability.

    Attributes
    ----------
    asked : dict
        Each `md4.gpu.compile.Variant` that a launch asked for, with the most bytes of dynamic shared memory.
    """

    dry = True
    block_shared = None  # rather than what the device would be asked

    def __init__(self, capability, left, block_shared=None):
        self.capability, self.unit, self.device = capability, arithmetic_unit(capability), None
        self.block_shared = block_shared or BLOCK_SHARED.get(capability, LEAST_SHARED)
        self.lock, self.stream, self.handle = Lock(), NoStream(), 0
        self.tracks, self.track = NoTracks(self.stream), 0
        self.pool, self.recorder, self.known, self.asked = NoMemory(left), NoRecorder(), {}, {}

    @property
    def beside(self):
        return self

    def beside_now(self):
        return self

    def launch(self, variant, grid, block, shared, *args):
        self.asked[variant] = max(shared, self.asked.get(variant, 0))

    def table(self, make, *args):
        return Buffer(0, (1, 1), 8, None)

    def copy_in(self, pointer, array):
        pass

    copy_in_pieces = copy_in

    def copy_out(self, array, pointer):
        array.fill(0)

    def clear(self, buffer):
        pass


class HostCounts(PairMaker):
    """`md4.gpu.shell_pairs.PairMaker` of a `DryContext`."""

    def __init__(self, context):
        super().__init__(context)
        self.samples = WeakKeyDictionary()

    def prepare(self, basis, pairs, cutoff):
        """As `PairMaker.prepare`; the data have rough bounds as well."""
        task = self.task(basis, pairs, cutoff)
        counts, bounds = self.sampled(basis, pairs, cutoff)
        self.count(task, pairs)
        start = starts_of(counts)
        data = self.write(task, pairs, start)
        data.rough = bounds
        return ShellPairs.of_basis(basis, pairs, start), data

    def sampled(self, basis, pairs, cutoff):
        """`sampled`, remembered: the tensors and builds of a warm-up have many lists in common."""
        known, key = self.samples.setdefault(basis, {}), (cutoff, pairs.tobytes())
        if key not in known:
            known[key] = sampled(basis, pairs, cutoff)
        return known[key]


def sampled(basis, pairs, cutoff):
    """Numbers of primitive pairs, and rough Schwarz bounds, of all pairs of a list, by some of them; shape (npair,).

    The pair with the most primitives is among these, since the largest number counts for a list.
    """
    step = -(-len(pairs) // SAMPLE)
    most = int(np.argmax(basis.nprims[pairs].prod(axis=1)))
    (made,) = shell_pair_lists(basis, [np.concatenate([pairs[::step], pairs[most : most + 1]])], cutoff)
    found = [np.diff(made.start), rough_bounds(made)]
    for n, numbers in enumerate(found):
        found[n] = np.repeat(numbers[:-1], step)[: len(pairs)]
        found[n][most] = numbers[-1]
    return found


def rough_bounds(pairs):
    """Numbers that fall with distance and exponents as the Schwarz bounds of `ShellPairs` do, shape (npair,)."""
    of = pairs.primitives
    sizes = np.append(abs(of.coef_a).max(axis=1) * abs(of.coef_b).max(axis=1) * of.exponent**-1.25, 0.0)
    largest = np.maximum.reduceat(sizes, np.minimum(pairs.start[:-1], len(sizes) - 1))
    return np.where(np.diff(pairs.start) > 0, largest, 0.0)


class RoughBounds(DeviceBounds):
    """`md4.gpu.sums.DeviceBounds` whose result are the rough bounds of lists."""

    def __init__(self, engine, count, room):
        super().__init__(engine, count, room)
        self.found = np.zeros(count)

    def take(self, prepared, first):
        super().take(prepared, first)
        self.found[first : first + len(prepared)] = prepared.data.rough

    def result(self):
        return self.found


def without_device(backend, context):
    """A `md4.gpu.backend.GpuBackend` like another one, on a `DryContext`."""
    dry = copy(backend)
    dry.context, dry.pair_maker, dry.bounds_kind = context, HostCounts(context), RoughBounds
    dry.tensor = lambda engine, layout, *_: DeviceTensor(engine, layout, NoArray(layout.shape), None)
    return dry
