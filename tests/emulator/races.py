"""Races: accesses of two threads to the same memory, one of them a write, that nothing orders.

Barriers order what their threads did before with what they do after: those of a block, those that some of its warps
have for themselves, and that of a warp. Shuffles, votes and products of a warp order nothing, and the threads of two
blocks never wait for each other. Atomic additions may meet each other, but no plain access.

Each thread has a clock, which ticks at its barriers, and knows a time of each other thread: whatever that one did up to
then has happened before (vector clocks).
"""

import numpy as np

READ, WRITE, ADD = range(3)
NAMES = "reads", "writes", "adds to"
# Accesses that may not meet one of a kind.
FORBIDDEN = {READ: (WRITE, ADD), WRITE: (READ, WRITE, ADD), ADD: (READ, WRITE)}
WORD, ALL_BYTES = 8, 255


class Race(Exception):
    """Two accesses without order."""


class Accesses:
    """The accesses of a launch so far.

    Attributes
    ----------
    everywhere, here : dict
        Of global and of the block's shared memory, by words: for each kind of access its last time by
        (block, thread, bytes of the word as bits).
    times : list of int
        By threads of the block.
    known : list of list
        The times that a thread knows of all others. Threads that have met share a list.
    """

    def __init__(self):
        self.everywhere, self.here, self.block, self.times, self.known = {}, {}, None, [], []

    def next_launch(self):
        self.everywhere = {}

    def next_block(self, block, threads):
        """Begins a block, whose shared memory nobody has used."""
        self.here, self.block, self.coming = {}, block, {}
        self.times, self.known = [1] * threads, [[0] * threads] * threads

    def meet(self, threads):
        """All of these have waited for each other."""
        members = [thread.index for thread in threads]
        different = {id(self.known[n]): self.known[n] for n in members}.values()
        known = [max(times) for times in zip(*different)]
        for n in members:
            known[n] = self.times[n]
            self.times[n] += 1
            self.known[n] = known

    def note(self, kind, thread, first, size, shared):
        """A thread of the block reads, writes or adds to `size` bytes from an address of the host."""
        words, end = self.here if shared else self.everywhere, first + size
        while first < end:
            word, offset = divmod(first, WORD)
            past = words.get(word)
            if past is None:
                past = words[word] = {}, {}, {}
            count = min(end - first, WORD - offset)
            mask = ((1 << count) - 1) << offset
            if shared and mask & self.coming.get(word, 0):
                raise Race(
                    f"thread {thread} of block {self.block} {NAMES[kind]} shared memory to which a copy is under way"
                )
            self.note_word(kind, thread, past, mask, shared)
            first += count

    def mark_copy(self, first, size, begins):
        """A copy to shared memory begins, or was waited for: between, nobody knows what is there."""
        end = first + size
        while first < end:
            word, offset = divmod(first, WORD)
            count = min(end - first, WORD - offset)
            mask = ((1 << count) - 1) << offset
            self.coming[word] = self.coming.get(word, 0) | mask if begins else self.coming[word] & ~mask
            first += count

    def note_word(self, kind, thread, past, mask, shared):
        known = self.known[thread]
        for earlier in FORBIDDEN[kind]:
            if not past[earlier]:
                continue
            for (block, other, others_mask), time in past[earlier].items():
                ordered = block == self.block and (other == thread or known[other] >= time)
                if not ordered and mask & others_mask:
                    raise Race(
                        f"thread {thread} of block {self.block} {NAMES[kind]} {'shared' if shared else 'global'} "
                        f"memory that thread {other} of block {block} {NAMES[earlier]}, with no barrier between"
                    )
        if kind == WRITE and mask == ALL_BYTES:  # what is not before it will not be before what comes after it
            for earlier in past:
                earlier.clear()
        past[kind][self.block, thread, mask] = self.times[thread]


def noted_array(machine):
    """The type of arrays in kernels that tell a machine which elements are read and written."""

    class Noted(np.ndarray):
        def __array_finalize__(self, other):
            self.dimensions = None

        def note(self, kind, index):
            if self.dimensions is None:
                self.first, self.dimensions = self.ctypes.data, list(zip(self.shape, self.strides))
            place = self.first
            for i, (n, step) in zip(index if isinstance(index, tuple) else (index,), self.dimensions, strict=True):
                place += int(i) % n * step
            machine.note(kind, place, self.itemsize)

        def __getitem__(self, index):
            found = super().__getitem__(index)
            if not isinstance(found, np.ndarray):
                self.note(READ, index)
            return found

        def __setitem__(self, index, value):
            self.note(WRITE, index)
            super().__setitem__(index, value)

        def add(self, index, value):
            """An atomic addition; returns what was there before."""
            self.note(ADD, index)
            plain = self.view(np.ndarray)
            old = plain[index]
            plain[index] += value
            return old

    return Noted
