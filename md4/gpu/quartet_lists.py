"""Lists of the quartets that survive screening one by one, made on the device for one build of J and K.

`md4.gpu.kernels.select_quartets` makes the lists of some bra pairs at a time, so many that their candidates fit the
room for entries.
"""

import numpy as np

from md4.errors import MemoryLimitError
from md4.gpu.buffers import Buffer, words
from md4.gpu.kernels.select_quartets import Selected, launch_select
from md4.gpu.tuning import SELECT

# The smallest normal number in single precision; and with this factor a number is not less after it has been rounded.
TINY, ABOVE_ONE = float(np.finfo(np.float32).tiny), 1 + 2.0**-23


def rounded_up(values):
    """Numbers >= 0 in single precision, none of them smaller than it was; infinite where they are too large."""
    with np.errstate(over="ignore"):
        return np.where(values > 0, np.maximum(values * ABOVE_ONE, TINY), 0.0).astype(np.float32)


class QuartetLists:
    """Makes lists of quartets by the rule of a build.

    Parameters
    ----------
    context : md4.gpu.context.DeviceContext
    rule : md4.plan.QuartetRule

    Raises
    ------
    MemoryLimitError
        There is no room for the rule's tables.

    Attributes
    ----------
    largest : float
        The largest norm of a block of the densities, as the rule has it.
    """

    def __init__(self, context, rule):
        self.context, self.rule = context, rule
        self.largest = max(rule.own.max(initial=0.0), rule.norms.max(initial=0.0))
        shells = (rule.shells[:, 0] | rule.shells[:, 1] << 16).astype(np.uint32)
        tables = [shells, *map(rounded_up, (rule.bounds, rule.terms, rule.own, rule.norms.reshape(-1)))]
        self.buffer = context.pool.get(1 + sum(words(table.nbytes) for table in tables))
        self.survivors = self.buffer.part(0, (1,))
        context.clear(self.survivors)
        first, parts = 1, []
        for table in tables:
            part = self.buffer.part(first, (words(table.nbytes),))
            context.copy_in_pieces(part.pointer, table)
            parts.append(Buffer(part.pointer, table.shape, table.itemsize, part.owner))
            first += words(table.nbytes)
        self.candidates = *parts, len(rule.norms)

    def selected(self, rows, size, with_single):
        """Yields the `Selected` of parts of a `md4.plan.QuartetRows`, each valid until the next one.

        Items have at most `size` entries. All memory is there before the first part. `with_single`: quartets may be
        computed in single precision.
        """
        starts = np.zeros(len(rows.counts) + 1, dtype=np.int64)
        np.cumsum(rows.counts, out=starts[1:])
        on_device, counts = (self.context.pool.room(*room) for room in (("quartet rows", len(starts)), ("counts", 2)))
        # Held until the last part is made: memory that was refused between two parts would leave a task half done.
        most, (entries, items) = self.room(starts, int(rows.counts.max(initial=0)), size)
        self.context.copy_in_pieces(on_device.pointer, starts)
        rule = self.rule.tolerance, SELECT.single_ratio * self.rule.tolerance if with_single else 0.0
        for first, end in pieces(starts, most):
            count = int(starts[end] - starts[first])
            out = Selected(entries, items, counts, self.survivors, count // size + end - first, size)
            self.context.clear(counts)
            part = on_device.part(first, (end - first + 1,))
            launch_select(self.context, self.candidates, part, rows.first + first, rows.places, rows.shells, rule, out)
            yield out

    def room(self, starts, longest, size):
        """How many entries there is room for, at least those of the longest row, and the `lists` in this room."""
        total = int(starts[-1])
        most = max(longest, min(total, SELECT.entries, self.context.pool.share(4 * SELECT.entries) // 4))
        while True:
            try:
                return most, self.lists(most, most // size + len(starts))
            except MemoryLimitError:
                if most == longest:
                    raise
                most = max(longest, most // 2)

    def lists(self, entries, items):
        """Entries, and items in double and in single precision, in device memory."""
        room = self.context.pool.room
        counts = {"entries": entries, "items": 3 * items, "items in single precision": 3 * items}
        parts = [(room(name, words(4 * count)), count) for name, count in counts.items()]
        found, *both = (Buffer(part.pointer, (count,), 4, part.owner) for part, count in parts)
        return found, tuple(both)

    def count(self):
        """Number of quartets that have been selected; waits for the device."""
        found = np.zeros(1, dtype=np.int64)
        self.context.copy_out(found, self.survivors.pointer)
        return int(found[0])


def pieces(starts, most):
    """(first, last + 1) of rows, one piece after the other, that together have at most `most` candidates."""
    first, last = 0, int(np.searchsorted(starts, starts[-1]))  # without rows at the end that have none
    while first < last:
        end = min(last, max(first + 1, int(np.searchsorted(starts, starts[first] + most, side="right")) - 1))
        yield first, end
        first = end
