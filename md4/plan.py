"""How two lists of shell pairs are computed: by which path, which side first, with H matrices in which form."""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

# Bytes of the integrals of some pairs with each other, of which only the diagonal (ab|ab) is used.
SQUARE_BYTES = 128 << 20
# Slices of what several parts share, for each part.
PIECES = 4
# Seconds that any `ListPair` of a build costs beside its quartets, about.
EACH = 1e-4


@dataclass(frozen=True)
class Plan:
    """What a backend decides for a bra and a ket list.

    Attributes
    ----------
    path : md4.backends.Path
        The way through steps 2 to 5.
    swap : bool
        Whether the ket is transformed first. Then bra and ket change names, which (ab|cd) = (cd|ab) allows.
    bra_form, ket_form
        Forms of the H matrices of the side transformed first and second, as the backend knows them.
    matrix : bool
        Whether the integrals are a part of a matrix, so that those of a quartet are not contiguous.
    """

    path: object
    swap: bool
    bra_form: object
    ket_form: object
    matrix: bool = False

    def __str__(self):
        return self.path.name + (", ket first" if self.swap else "")


class ListParts(NamedTuple):
    """The even or the odd part of two lists (`md4.method.mirror`), and how its integrals are computed.

    Attributes
    ----------
    bra, ket : md4.engine.PreparedPairs
    plan : Plan
        Of both parts, it has the same `swap`.
    """

    bra: object
    ket: object
    plan: Plan


class ListPair(NamedTuple):
    """All quartets of a bra list and a ket list, or those that survive screening.

    Attributes
    ----------
    bra, ket : md4.engine.PreparedPairs
    same : bool
        Whether they are one list, of which each unordered quartet counts once.
    bra_bound, ket_bound : ndarray, optional
        A quartet survives if the bounds of its pairs multiply to the tolerance or more. Without bounds all survive.
    part, parts : int
        Only one of so many parts is meant, which are bra pairs of about the same work; 0 of 1 are all.
    number : int
        Of the pair in `md4.contract.survivors.Survivors`, in builds of J and K. For J alone, a pair stands for all that
        are taken together with it (`md4.backends.Sums.coulomb_key`).
    seconds : float
        Predicted time of its quartets, if somebody wants to know.
    """

    bra: object
    ket: object
    same: bool
    bra_bound: np.ndarray | None = None
    ket_bound: np.ndarray | None = None
    part: int = 0
    parts: int = 1
    number: int = 0
    seconds: float = 0.0


@dataclass(eq=False)
class QuartetRule:
    """Which quartets survive screening one by one; see `md4.contract.screening`.

    Attributes
    ----------
    tolerance : float
    shells : ndarray of int64, shape (npair, 2)
        Shells of all pairs of all lists, one list after the other.
    bounds, terms, own : ndarray, shape (npair,)
        R and T of each pair, and 2 sqrt(min(n, n)) |D|.
    norms : ndarray, shape (nshell, nshell)
        |D| of all pairs of shells, symmetric.
    counts : ndarray of int32
        Numbers of ket pairs that may survive, the first ones of their list, of the bra pairs of all pairs of lists.
    """

    tolerance: float
    shells: np.ndarray
    bounds: np.ndarray
    terms: np.ndarray
    own: np.ndarray
    norms: np.ndarray
    counts: np.ndarray


class QuartetRows(NamedTuple):
    """Bra pairs of a list with the ket pairs of another one, or of the same one, that may survive with them.

    Attributes
    ----------
    bra, ket : md4.engine.PreparedPairs
        The whole lists.
    same : bool
        Whether they are one list, of which each unordered quartet counts once.
    first : int
        Number of the first bra pair.
    counts : ndarray of int32
        Numbers of ket pairs that may survive, the first ones of their list, for each bra pair from `first` on.
    places : tuple of int
        Where both lists begin in the tables of the rule.
    shells : tuple of int
        (first c, number of c, first d, number of d): among so many shells are those of the ket pairs.
    """

    bra: object
    ket: object
    same: bool
    first: int
    counts: np.ndarray
    places: tuple
    shells: tuple


def chunks(nbra, nket, chunk_bra, chunk_ket):
    """Slices of bra and ket pairs that cover nbra x nket."""
    for i in range(0, nbra, chunk_bra):
        for k in range(0, nket, chunk_ket):
            yield slice(i, min(i + chunk_bra, nbra)), slice(k, min(k + chunk_ket, nket))


def own_ranges(count, part, parts):
    """Slices of `count` items that belong to one of several parts: a part has some of equal size, one here, one there.

    Parts follow each other in turn forwards and backwards, so that all have as much of what falls along the items. They
    depend on nothing else, so that processes on unlike machines divide the items alike.
    """
    slices = PIECES * parts if parts > 1 else 1
    edges = [count * n // slices for n in range(slices + 1)]
    found = []
    for n, (first, last) in enumerate(pairwise(edges)):
        if (part, parts - 1 - part)[n // parts % 2] == n % parts and first < last:
            begin = found.pop().start if found and found[-1].stop == first else first
            found.append(slice(begin, last))
    return found


def groups_within(sizes, most):
    """Ranges of successive items whose sizes add up to at most `most`; an item that is larger is alone."""
    first, used = 0, 0
    for n, size in enumerate(sizes):
        if n > first and used + size > most:
            yield range(first, n)
            first, used = n, 0
        used += size
    if len(sizes) > 0:
        yield range(first, len(sizes))


def even_pieces(count, most):
    """As few slices as possible of at most `most` items that cover 0 to count - 1; lengths differ by 1 at most."""
    pieces = -(-count // most)
    return [slice(count * n // pieces, count * (n + 1) // pieces) for n in range(pieces)]


def part_of(weights, part, parts):
    """(first, last + 1) of the rows of a part. The parts are disjoint and together all rows; some may be empty.

    `weights` are integers that are not negative, one for each row. Their sums are the same for all parts, about.
    """
    if parts == 1:
        return 0, len(weights)
    ends = np.cumsum(weights, dtype=np.int64)
    total = int(ends[-1])
    inner = [int(np.searchsorted(ends, total * k // parts, side="left")) for k in (part, part + 1)]
    return (0 if part == 0 else inner[0]), (len(weights) if part == parts - 1 else inner[1])
