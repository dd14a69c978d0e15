"""The primitive pairs of one degree, in the order in which J alone takes them (`md4.gpu.hermite_coulomb`).

In J alone, pairs of shells matter only for their densities of Hermite functions, and their classes not at all. So the
primitive pairs of all lists of one degree l_a + l_b are taken together, as one list in an order of its own.

A warp takes 32 ket primitives at once, and all of them if one of them counts. Whether a pair counts depends on two
numbers, R and R f |D| (`md4.contract.screening`). So neighbours should be alike in both. Pairs are cut into groups by
falling powers of 2 of R, and each group is sorted by falling R f |D|, to a factor of 2. With about as many groups as
warps in a group, both numbers vary as little within a warp.
"""

from math import isqrt
from typing import NamedTuple

import numpy as np

# Most groups of an order; a code for sorting has 6 bits for the group and 10 for the power of 2.
MOST_GROUPS, POWERS = 64, 1 << 10


def powers_of_2(values):
    """Exponents of doubles >= 0, from 0 to POWERS - 1."""
    return np.clip((values.view(np.int64) >> 52) - 511, 0, POWERS - 1)


def groups_of(bounds, nprim):
    """The group of each pair, by falling powers of 2 of its R; pairs of one power are in one group."""
    powers = powers_of_2(bounds)
    larger = len(bounds) - np.cumsum(np.bincount(powers, minlength=POWERS))  # pairs that are above each power
    groups = max(1, min(MOST_GROUPS, isqrt(nprim // 32)))
    return (larger * groups // max(1, len(bounds)))[powers]


class PairOrder:
    """The order of the primitive pairs of some lists, all of one degree, in one build.

    Parameters
    ----------
    l : int
        The degree.
    counts : ndarray of int64, shape (npair,)
        Primitive pairs of each pair, one list after the other.
    bounds, products : ndarray, shape (npair,)
        R of each pair, and R f |D|.

    Attributes
    ----------
    nprim : int
    first : ndarray of int64, shape (npair,)
        The place of the first primitive pair of each pair.
    edges : ndarray of int64, shape (ngroup + 1,)
        Places where groups begin, and the number of places.
    bounds, products : ndarray, shape (ngroup,)
        The largest of each group.
    """

    def __init__(self, l, counts, bounds, products):
        self.l, self.nprim = l, int(counts.sum())
        group = groups_of(bounds, self.nprim)
        codes = group * POWERS + POWERS - 1 - powers_of_2(products)
        order = np.argsort(codes.astype(np.uint16), kind="stable")
        places = np.zeros(len(order) + 1, dtype=np.int64)
        np.cumsum(counts[order], out=places[1:])
        self.first = np.empty(len(order), dtype=np.int64)
        self.first[order] = places[:-1]
        starts = np.flatnonzero(np.diff(group[order], prepend=-1))
        self.edges = np.append(places[starts], self.nprim)
        self.bounds, self.products = (np.maximum.reduceat(x[order], starts) for x in (bounds, products))


class Overlap(NamedTuple):
    """What of two orders counts together.

    Attributes
    ----------
    used, width : int
        Places of the first and of the second order from which on nothing counts.
    widths : ndarray of int64, shape (ngroup,)
        The same of the second order for each group of the first.
    filled : float
        Part of the quartets below `used` and `width` that may count.
    work : ndarray of int64, shape (ngroup + 1,)
        Quartets of the groups of the first order up to each that may count.
    """

    used: int
    width: int
    widths: np.ndarray
    filled: float
    work: np.ndarray


def overlap(bra, ket, least):
    """`Overlap` of two `PairOrder`: products of bounds below `least` do not count."""
    with np.errstate(over="ignore", invalid="ignore"):
        one, two = bra.bounds[:, None] * ket.products, bra.products[:, None] * ket.bounds
    counts = ~((one < least) & (two < least))
    widths = (counts * ket.edges[1:]).max(axis=1)
    used, width = int((counts.any(axis=1) * bra.edges[1:]).max()), int(widths.max())
    work = np.concatenate([[0], np.cumsum(np.diff(bra.edges) * (counts @ np.diff(ket.edges)))])
    return Overlap(used, width, widths, float(work[-1]) / max(1, used * width), work)


def part_of_order(bra, found, part, parts):
    """First place and the one behind the last of a part of the bra's places; parts have about the same work."""
    ends = (np.interp(found.work[-1] * (n / parts), found.work, bra.edges) for n in (part, part + 1))
    first, last = (min(found.used, int(end)) for end in ends)
    return first if part else 0, last if part + 1 < parts else found.used


def rows_together(bra, found, first, last, most):
    """Ranges of the bra's places from `first` to `last`, with the places of the ket that each needs.

    Yields (first, end, width). Groups are in one range as long as it has at most `most` quartets.
    """
    start = end = first
    width = 0
    edges = np.clip(bra.edges, first, last).tolist()
    for low, high, wide in zip(edges, edges[1:], found.widths.tolist()):
        if low == high or wide == 0:
            continue
        if (high - start) * max(width, wide) > most and start < end:
            yield start, end, width
            start, width = low, 0
        end, width = high, max(width, wide)
    if start < end:
        yield start, end, width
