"""Memory for work on many blocks: H matrices that are kept between blocks, and the least workspace of any block."""

from collections import OrderedDict

import numpy as np

from md4.shells.shell_pairs import ShellPairs
from md4.support.display import size_text
from md4.support.log import log


class HermiteStore:
    """Keeps the H matrices of pieces, each in up to `forms` forms. Beyond `limit` bytes it drops the oldest."""

    def __init__(self, limit, backend, forms=2):
        self.most = self.limit = limit
        self.backend, self.forms = backend, min(forms, backend.forms)
        # The oldest first.
        self.held, self.total = OrderedDict(), 0

    def holds(self, pieces):
        """Whether the H matrices of all pieces fit the limit."""
        return sum(map(self.size, pieces)) <= self.limit

    def touch(self, piece, keep):
        """Notes that `piece` is used now. `keep`, the other side of the block, is not dropped."""
        self.note(piece)
        self.shrink(piece, keep)

    def note(self, piece):
        """Makes `piece` the newest."""
        if piece in self.held:
            self.held.move_to_end(piece)
        else:
            self.held[piece] = None
            self.total += self.size(piece)

    def shrink(self, *keep):
        """Drops the oldest pieces, but none of `keep`, until the rest fits the limit."""
        kept = set(map(id, keep))
        for old in list(self.held) if self.total > self.limit else ():
            if self.total <= self.limit or id(old) in kept:
                continue
            self.total -= self.size(old)
            log.debug("H matrices beyond %s: those of %r are given up", size_text(self.limit), old.pairs)
            old.drop()
            del self.held[old]

    def fit(self, share):
        """Lowers the limit to a share of the memory that is free now, including that of kept H matrices."""
        memory = self.backend.memory_left() + sum(piece.h_bytes for piece in self.held)
        self.limit = min(self.most, int(share * memory))
        self.total = sum(map(self.size, self.held))  # computed again, since an interrupt may have come between the two
        self.shrink()

    def batches(self, pairs):
        """Yields lists of `md4.plan.ListPair`, each small enough for the limit; notes that their pieces are used."""
        every = {id(side): side for pair in pairs for side in pair[:2]}
        if sum(map(self.size, every.values())) <= self.limit:
            if pairs:
                yield self.used(pairs, every)
            return
        batch, held, total = [], {}, 0
        for pair in pairs:
            new = {id(side): side for side in pair[:2] if id(side) not in held}
            if new:
                size = sum(map(self.size, new.values()))
                if batch and total + size > self.limit:
                    yield self.used(batch, held)
                    batch, held, total, new = [], {}, 0, {id(side): side for side in pair[:2]}
                    size = sum(map(self.size, new.values()))
                held |= new
                total += size
            batch.append(pair)
        if batch:
            yield self.used(batch, held)

    def used(self, batch, held):
        """Notes that all of `held` are used, and none of these is dropped; returns `batch`."""
        for piece in held.values():
            self.note(piece)
        self.shrink(*held.values())
        return batch

    def clear(self):
        """Drops the H matrices of all pieces."""
        for piece in self.held:
            piece.drop()
        self.held, self.total = OrderedDict(), 0

    def size(self, piece):
        """Largest number of bytes of the H matrices of a piece."""
        return self.forms * self.backend.hermite_bytes(piece.pairs)


def least_block(engine, *ranges, derivatives=()):
    """Bytes of one quartet of the largest class with its least workspace.

    Parameters
    ----------
    engine : md4.engine.Engine
    ranges : tuple of int
        Ranges (first, last + 1) of shells: of all indices, of those of bra and ket (4), or one for all of them.
    derivatives : tuple of int
        Those of the bra; see `ListFacts`.
    """
    basis, sides = engine.bra_basis, [ranges[:2], ranges[2:]] if len(ranges) == 4 else [ranges * 2] * 2
    bra = ket = largest_pair(basis, [largest_shell(basis, *r) for r in sides[0]])
    if sides[1] != sides[0]:
        ket = largest_pair(basis, [largest_shell(basis, *r) for r in sides[1]])
    if derivatives:
        bra = bra.derived(derivatives)
    return 8 * bra.nab * ket.nab + engine.backend.least_workspace(bra, ket)


def largest_shell(basis, first, last):
    """The shell of most AOs in a range, of the highest class if there are several."""
    return first + int(np.lexsort((basis.class_keys[first:last], np.diff(basis.ao_loc)[first:last]))[-1])


def largest_pair(basis, shells):
    """`ShellPairs` of one pair as if all of its primitive pairs counted, as they do unless a coefficient vanishes."""
    a, b = sorted(shells, key=lambda shell: -basis.class_keys[shell])
    return ShellPairs.of_basis(basis, np.array([[a, b]]), np.array([0, basis.nprims[a] * basis.nprims[b]]))
