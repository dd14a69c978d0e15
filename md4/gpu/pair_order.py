"""The order of a list's primitive pairs in which J alone takes them (`md4.gpu.kernels.coulomb_threads`).

A warp takes 32 ket primitives at once, and all of them if one of them counts. Whether a pair counts depends on two
numbers, R and R f |D| (`md4.contract.screening`). So neighbours should be alike in both. A list is sorted by falling R.
It is cut into groups, and each group is sorted by falling R f |D|, to a factor of 2. With about as many groups as warps
in a group, both numbers vary as little within a warp.
"""

from math import isqrt

import numpy as np

from md4.gpu.buffers import Buffer, copy_in_pieces
from md4.gpu.kernels.coulomb_threads import launch_order

# Most groups of a list; a code for sorting has 6 bits for the group and 10 for the power of 2.
MOST_GROUPS, POWERS = 64, 1 << 10


def words(nbytes):
    """8-byte items that hold so many bytes."""
    return -(-nbytes // 8)


def group_edges(npair, nprim):
    """First pairs of the groups of a list, and the number of pairs at the end."""
    groups = max(1, min(MOST_GROUPS, npair, isqrt(nprim // 32)))
    return np.arange(groups + 1) * npair // groups


def powers_of_2(values):
    """Exponents of doubles >= 0, from 0 to POWERS - 1."""
    return np.clip((values.view(np.int64) >> 52) - 511, 0, POWERS - 1)


def sorted_pairs(edges, products):
    """The pairs in their order, from R f |D| of each, which have the order of R."""
    group = np.repeat(np.arange(len(edges) - 1), np.diff(edges))
    codes = group * POWERS + POWERS - 1 - powers_of_2(products)
    return np.argsort(codes.astype(np.uint16), kind="stable")


class PairOrder:
    """The order of a list in one build.

    Parameters
    ----------
    context : md4.gpu.context.DeviceContext
    prepared : md4.engine.PreparedPairs
        A whole list.
    bounds, own : ndarray, shape (npair,)
        R of its pairs, and f |D|.

    Attributes
    ----------
    pairs : ndarray of int64, shape (npair,)
        The pair at each place.
    places : ndarray of int64, shape (npair + 1,)
        Where the primitive pairs of each begin.
    on_device : tuple of Buffer
        The fields `order` and `reach` of `md4.gpu.kernels.coulomb_threads.OrderedSide`.
    """

    def __init__(self, context, prepared, bounds, own):
        start, products = prepared.pairs.start, bounds * own
        npair, nprim = len(bounds), int(start[-1])
        self.edges = group_edges(npair, nprim)
        self.pairs = sorted_pairs(self.edges, products)
        self.places = np.zeros(npair + 1, dtype=np.int64)
        np.cumsum(np.diff(start)[self.pairs], out=self.places[1:])
        with context.alone():
            self.send(context, prepared, npair, nprim, (self.pairs, self.places[:-1], bounds, products))

    def send(self, context, prepared, npair, nprim, tables):
        """Makes `on_device` from the pair and the first place at each place, and from R and R f |D| of each pair."""
        self.buffer = context.pool.get(max(1, 2 * nprim + words(4 * nprim) + 4 * npair))
        reach, order = self.buffer.part(0, (2 * nprim,)), self.buffer.part(2 * nprim, (words(4 * nprim),))
        self.on_device = Buffer(order.pointer, (nprim,), 4, order.owner), reach
        first = 2 * nprim + words(4 * nprim)
        parts = [self.buffer.part(first + n * npair, (npair,)) for n in range(4)]
        copy_in_pieces(parts[0].pointer, np.concatenate([x.view(np.int64) for x in tables]), context.stream)
        if nprim:
            launch_order(context, npair, parts, prepared.data.start, *self.on_device)

    def end(self, npair):
        """The place behind all groups that the first `npair` pairs of the list reach into."""
        return int(self.places[self.edges[np.searchsorted(self.edges, npair)]])
