"""Tasks of gradients on GPUs (`md4.gpu.forces`): how they are divided, what they take, and what memory they need."""

from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from md4.errors import MemoryLimitError
from md4.gpu.hermite_rows import row_width
from md4.gpu.kernels.select_kets import OTHER_BYTES, ROW_BYTES, WARPS
from md4.gpu.reverse_ways import hermite_of, least_bytes, listed_numbers, z_bytes
from md4.method.angular import nherm
from md4.plan import groups_within, own_ranges
from md4.support.display import size_text

# Forms in which there may be H of a ket list at the same time.
H_FORMS = 4
# Shares of the memory that may be used: of H of the ket lists, and of Z of a task.
H_SHARE, Z_SHARE = 0.4, 0.2
# Most bytes of Z of a task; that of one bra pair may be larger.
Z_BYTES = 1 << 30
# Primitive quartets, or elements of Gamma, of a bra pair with a ket list, at most: their numbers are int32, and blocks
# of threads count beyond the last one by less than 1024.
MOST_NUMBERS = (1 << 31) - 1024
# Predicted seconds of a floating-point operation, and of what a task and two lists take besides.
OPERATION, TASK, TWO_LISTS = 1 / 20e12, 1e-4, 5e-5
# A list whose part of all work is smaller than 1 / (so many times the number of devices) belongs to one of them.
WHOLE_LISTS = 8
# Tracks (`md4.gpu.tracks`) that make derivatives, where all of them count. Bytes that must be free beside H for each of
# these but the first, or four times what a shell pair takes.
TRACKS, TRACK_ROOM = 3, 8 << 30


class Task(NamedTuple):
    """Bra pairs from `first` to `last` of a list, whose number it has, and their predicted seconds."""

    seconds: float
    number: int
    first: int
    last: int


def operations(bra, ket, prims):
    """Of steps 1 and 2, for a primitive pair of a bra list with `prims` of a ket list, without screening."""
    ket, hermite = ket.pairs, hermite_of(bra.prepared.facts)
    products = prims * (ket.nherm * ket.nab + 20 * nherm(ket.l + hermite.l)) + bra.pairs.nab * ket.nab * len(ket)
    return 2 * hermite.nherm * products


class ForceTasks:
    """The tasks of sums over all quartets of lists: who makes which, and whether there is memory for them.

    Parameters
    ----------
    basis : md4.Basis
    lists : list of md4.contract.screening.PairList
    beside : list of md4.contract.screening.PairList
        Of builds, which may have H matrices as well.
    """

    def __init__(self, basis, lists, beside=()):
        self.basis, self.lists, self.beside, self.predicted, self.divided = basis, lists, beside, {}, {}
        self.least, self.most = {}, {}

    def working_tracks(self, tracks, bras, kets, plane):
        """The first of the tracks of a device, as many as have room for the lists `bras` with the lists `kets`."""
        room, left = max(TRACK_ROOM, 4 * self.least[tuple(bras), tuple(kets), plane]), tracks[0].context.pool.left()
        return tracks[: 1 + min(TRACKS - 1, int((1 - H_SHARE) * left) // room)]

    def batches(self, backend, kets):
        """Those of the lists `kets` whose H matrices fit the memory at the same time, a batch after the other."""
        needs = [self.h_bytes(backend, self.lists[number]) for number in kets]
        for group in groups_within(needs, H_SHARE * backend.memory_left()):
            yield [kets[n] for n in group]
            for n in group if group.stop < len(needs) else ():
                self.lists[kets[n]].prepared.drop()

    @staticmethod
    def h_bytes(backend, this):
        """Bytes of the H matrices of a ket list, in all forms that kernels take."""
        return H_FORMS * backend.hermite_bytes(this.pairs)

    @staticmethod
    def with_room_for_h(backend, lists):
        """The lists, one after the other; H of the others is dropped where that of the next would not fit."""
        for this in lists:
            if backend.hermite_bytes(this.pairs) > H_SHARE * backend.memory_left():
                for other in lists:
                    if other is not this:
                        other.drop()
            yield this

    def own_pairs(self, number, part, parts):
        """Ranges of the pairs of a list that belong to a part."""
        count, owner = len(self.lists[number]), self.owners(parts)[number]
        if owner is None:
            return own_ranges(count, (part + number) % parts, parts)
        return [slice(0, count)] if owner == part else []

    def owners(self, parts):
        """The part to which each list belongs, or None where it is divided among all.

        Each range is a task, which takes the host as long as that of a whole list, so only lists of much work are
        divided. It depends on nothing else than the basis and the lists, which are the same in all processes.
        """
        if parts not in self.divided:
            prims = [int(self.basis.nprims[this.pairs.pairs].prod(axis=1).sum()) for this in self.lists]
            costs = [
                count * sum(map(partial(operations, this), self.lists, prims)) for this, count in zip(self.lists, prims)
            ]  # fmt: skip
            loads, owners = [0.0] * parts, [None] * len(costs)
            for number in sorted(range(len(costs)), key=lambda n: (-costs[n], n)):
                if costs[number] * parts * WHOLE_LISTS < sum(costs):
                    owners[number] = loads.index(min(loads))
                    loads[owners[number]] += costs[number]
            self.divided[parts] = owners
        return self.divided[parts]

    def tasks(self, backend, bras, batch, part=0, parts=1, plane=None):
        """Every `Task` of a part, with pairs of lists `bras`, those of most work first; `plane` as of `Terms`.

        Which pairs belong to a part does not depend on memory, which may differ between processes.
        """
        room, found = min(Z_BYTES, Z_SHARE * backend.memory_left()), []
        for number in bras:
            this = self.lists[number].prepared
            start, per_prim = this.pairs.start, z_bytes(this, plane)
            seconds = self.seconds_of(number, batch) / max(1, len(this))
            for own in self.own_pairs(number, part, parts):
                edges = [own.start]
                while edges[-1] < own.stop:
                    end = start[edges[-1]] + max(1, room // per_prim)
                    end = int(np.searchsorted(start, end, side="right")) - 1
                    edges.append(min(max(end, edges[-1] + 1), own.stop))
                found += [Task((last - first) * seconds, number, first, last) for first, last in pairwise(edges)]
        return sorted(found, reverse=True)

    def seconds_of(self, number, batch):
        """Predicted seconds of a bra list with some ket lists, without screening."""
        key = number, tuple(batch)
        if key not in self.predicted:
            bra, kets = self.lists[number], [self.lists[n] for n in batch]
            count = bra.pairs.nprim * sum(operations(bra, ket, ket.pairs.nprim) for ket in kets)
            self.predicted[key] = TASK + TWO_LISTS * len(kets) + OPERATION * count
        return self.predicted[key]

    def seconds(self):
        """Predicted seconds, without screening."""
        every = range(len(self.lists))
        return sum(self.seconds_of(number, every) for number in every)

    def check_memory(self, backend, densities, plane):
        """MemoryLimitError, before anything is allocated, if there is no room for one shell pair with any list."""
        tables = 4 * densities.nbytes + (40 + 8 * len(densities)) * sum(map(len, self.lists))
        tables += 16 * sum(this.pairs.nprim for this in self.lists)
        every = range(len(self.lists))
        self.check_lists(backend, every, every, {"densities and bounds": tables}, plane)

    def check_lists(self, backend, bras, kets, beside, plane=None):
        """As `check_memory` for lists `bras` with lists `kets`, and what is needed `beside`, as for `require`."""
        key, context = (tuple(bras), tuple(kets), plane), backend.context
        bras, kets = ([self.lists[number].prepared for number in numbers] for numbers in key[:2])
        if key not in self.most:
            self.most[key] = max(listed_numbers(context, bra, ket, plane) for bra in bras for ket in kets)
        most = self.most[key]
        if most > MOST_NUMBERS:
            raise MemoryLimitError(
                f"a shell pair of {self.basis!r} may have {most} primitive quartets, or elements of Gamma, with a list "
                f"of shell pairs, but gradients on a GPU take {MOST_NUMBERS} at once; use backend='cpu'."
            )
        longest, room = max(this.pairs.max_prim for this in (*bras, *kets)), context.block_shared - ROW_BYTES
        most = (room - OTHER_BYTES) // (8 * WARPS) - 1
        if longest > most:
            raise MemoryLimitError(
                f"a shell pair of {self.basis!r} may have {longest} primitive pairs, but gradients on this GPU take "
                f"{most}; use backend='cpu'."
            )
        h = max(self.h_bytes(backend, this) for this in kets)
        if key not in self.least:
            self.least[key] = max(least_bytes(context, bra, ket, plane) for bra in bras for ket in kets)
        self.require(backend, beside | {"the H matrices of one list": h, "a shell pair": self.least[key]})

    def check_memory_for_coulomb(self, backend, of_densities=0):
        """As `check_memory`, of J alone; `of_densities`: the bytes of densities, unless these have been allocated."""
        of_rows = self.coulomb_bytes(1)
        h = max(backend.hermite_bytes(this.pairs) for this in self.lists)
        z = max(this.prepared.facts.max_prim * z_bytes(this.prepared) for this in self.lists)
        out = 96 * sum(this.pairs.nprim for this in self.lists)  # of two densities, before they are taken
        of = {"densities": of_densities, "Hermite functions": of_rows, "derivatives": out}
        of |= {"the H matrices of one list": h, "a shell pair": z}
        self.require(backend, of)

    def coulomb_bytes(self, densities):
        """Bytes of D, J and its scales of so many densities in the Hermite basis, one degree higher than pairs are."""
        every = [this.pairs for this in self.lists]
        return sum(p.nprim * (28 * densities * row_width(p.l + 1, True) + 60) + 32 * len(p) for p in every)

    def drop(self):
        """Gives back the H matrices of the lists."""
        for this in self.lists:
            this.prepared.drop()

    def require(self, backend, sizes, made="gradients"):
        """MemoryLimitError if bytes, by what they are of, do not fit when H of all lists has been given back."""
        need = sum(sizes.values())
        if need > backend.memory_left():
            for this in (*self.lists, *self.beside):
                this.prepared.drop()
        if need > backend.memory_left():
            parts = ", ".join(f"{size_text(size)} of {what}" for what, size in sizes.items())
            raise MemoryLimitError(
                f"{made} of {self.basis!r} take at least {size_text(need)} ({parts}), but "
                f"{size_text(backend.memory_left())} may be used; raise max_memory."
            )
