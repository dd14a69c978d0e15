"""Pair lists on the GPU, made there: which primitive pairs count, and what the kernels read of them.

How many primitive pairs count must come to the host, which allocates and divides work by it, and the host must not wait
for all that is queued on the engine's stream. So they are counted on a stream beside it (`DeviceContext.beside`), in
memory that the engine's stream never writes, and waited for at once; all else is done on the engine's stream, in memory
of the pool, in order.
"""

import weakref
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from md4.errors import MemoryLimitError
from md4.gpu.kernels.shell_pairs import launch_primitives, launch_slots
from md4.gpu.pair_layout import RECORD, PairSlots, slot_starts
from md4.method.angular import AXES
from md4.shells.shell_pairs import ShellPairs, log_cutoff, starts_of

# Pairs that the memory for counting holds at least.
LEAST_PAIRS = 1024
# Slots of a list, at most: the bytes of a row of them are an unsigned 32-bit number (`make_thread_quartet`).
MOST_SLOTS = (1 << 29) - 1


@dataclass(eq=False)
class DevicePairs:
    """A pair list on the device.

    Attributes
    ----------
    records : Buffer, shape (nprim width,)
        See `md4.gpu.pair_layout`.
    width : int
        Numbers of a record.
    owner : Buffer, shape (nprim,)
        The pair of each primitive pair.
    start : Buffer, shape (npair + 1,)
        Range of each pair in the primitive pairs.
    slots : md4.gpu.pair_layout.PairSlots
        None before they are used.
    first_aos : Buffer, shape (npair, 2)
        First AOs of the shells of each pair; None before they are used.
    number : int
        No other list of the process ever has the same.
    """

    records: object
    width: int
    owner: object
    start: object
    slots: object = None
    first_aos: object = None
    number: int = field(default_factory=count().__next__)

    @property
    def nbytes(self):
        """Bytes of all but the slots."""
        return 8 * (self.records.size + self.owner.size + self.start.size)


@dataclass(eq=False)
class DeviceBasis:
    """`basis_arrays` on the device."""

    arrays: list


def basis_arrays(basis):
    """What the kernel reads of a basis, all of 8-byte items."""
    return [
        basis.exponents, basis.log_coefficients, basis.coefficients, basis.coef_loc, basis.prim_loc, basis.nprims,
        basis.centres[:, AXES].reshape(-1),
    ]  # fmt: skip


class PairMaker:
    """Makes the pair lists of an engine.

    Parameters
    ----------
    context : md4.gpu.context.DeviceContext
        The engine's.
    """

    def __init__(self, context):
        self.context, self.pool = context, context.pool
        self.bases, self.scratch = weakref.WeakKeyDictionary(), None

    def prepare(self, basis, pairs, cutoff):
        """(`ShellPairs`, `DevicePairs`) of a checked list, ready once the engine's stream gets there."""
        task = self.task(basis, pairs, cutoff)
        start = starts_of(self.count(task, pairs))
        return ShellPairs.of_basis(basis, pairs, start), self.write(task, pairs, start)

    def task(self, basis, pairs, cutoff):
        """What all launches for a list have in common: (l_a, l_b, nctr_a, nctr_b), arrays of the basis, the cutoff."""
        (la, nctr_a), (lb, nctr_b) = basis.classes[pairs[0]].tolist()
        return (la, lb, nctr_a, nctr_b), self.basis(basis).arrays, log_cutoff(cutoff)

    def basis(self, basis):
        """`DeviceBasis` of a basis, uploaded once; its memory goes back to the pool with the basis."""
        if basis not in self.bases:
            buffer, arrays = self.pool.upload(basis_arrays(basis), self.context.beside.stream, fresh=True)
            self.context.beside.stream.synchronize()  # the engine's stream will read it, too
            self.bases[basis] = DeviceBasis(arrays)
            finalizer = weakref.finalize(self.bases[basis], self.pool.release, buffer)
            finalizer.atexit = False  # goes with the process
        return self.bases[basis]

    def count(self, task, pairs):
        """Primitive pairs of each pair that count, on the host."""
        npair = len(pairs)
        scratch = self.counting_memory(3 * npair)
        counts = np.empty(npair, dtype=np.int64)
        self.context.beside.copy_in(scratch.pointer, pairs)
        on_device = scratch.part(2 * npair, (npair,))
        launch_primitives(self.context.beside, *task, scratch.part(0, (npair, 2)), on_device, None)
        self.context.beside.copy_out(counts, on_device.pointer)
        return counts

    def counting_memory(self, count):
        """Memory of `count` items for the stream that counts; nothing is at work there between two lists."""
        if self.scratch is None or self.scratch.size < count:
            if self.scratch is not None:
                self.pool.release(self.scratch)
            self.scratch = None  # where the next line refuses
            self.scratch = self.pool.fresh(max(count, 3 * LEAST_PAIRS))
        return self.scratch

    def write(self, task, pairs, start):
        """`DevicePairs` of a list whose counts are known."""
        (_, _, nctr_a, nctr_b), *_ = task
        npair, nprim, width = len(pairs), int(start[-1]), RECORD + nctr_a + nctr_b
        buffer = self.pool.get(nprim * (width + 1) + 3 * npair + 1)
        records, owner = buffer.part(0, (nprim * width,)), buffer.part(nprim * width, (nprim,))
        shells = buffer.part(nprim * (width + 1), (npair, 2))
        data = DevicePairs(records, width, owner, shells.part(2 * npair, (npair + 1,)))
        self.context.copy_in_pieces(shells.pointer, np.concatenate([pairs.reshape(-1), start]))
        if nprim:
            launch_primitives(self.context, *task, shells, data.start, (records, owner))
        return data

    def slots(self, pairs, data):
        """`PairSlots` of a whole list, made at the first call."""
        if data.slots is None:
            first, count = slot_starts(pairs.start)
            if count > MOST_SLOTS:
                raise MemoryLimitError(
                    f"a list of {len(pairs)} shell pairs takes {count} places of primitive pairs, but a GPU takes "
                    f"{MOST_SLOTS} at once; compute fewer pairs at once, or use backend='cpu'."
                )
            buffer = self.pool.get(4 * count + pairs.nprim + len(pairs))
            place = buffer.part(4 * count, (pairs.nprim,))
            slots = PairSlots(buffer.part(0, (4 * count,)), place.part(pairs.nprim, (len(pairs),)), place, count)
            self.context.copy_in_pieces(slots.first.pointer, first)
            if pairs.nprim:
                launch_slots(self.context, data, pairs.nprim, slots)
            data.slots = slots  # last, since an interrupt may come in between
        return data.slots
