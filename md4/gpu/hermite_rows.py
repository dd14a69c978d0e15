"""The order of Hermite functions in the rows of D and J that J alone keeps of primitive pairs, and of r in it.

In general it is that of their ordinals. Where all centres lie in a plane (`md4.method.mirror`), r[p+q] is zero unless p
and q are both even or both odd along the normal of the plane, so the even functions come first and the odd ones behind
them, each from a multiple of 8 on. Kernels know one such plane only: coordinates and powers change places such that its
normal is axis 0.
"""

from functools import cache

import numpy as np

from md4.gpu.tiles import blocks_of_8
from md4.method.angular import hermite_ordinal, hermite_triples, nherm, packed_hermite
from md4.method.mirror import part_functions


@cache
def row_ordinals(l, mirrored):
    """Ordinal of the function at each place of a row, -1 where there is none; shape (width,)."""
    parts = [part_functions(l, 0, parity) for parity in range(2)] if mirrored else [np.arange(nherm(l))]
    return np.concatenate([np.pad(part, (0, -len(part) % 8), constant_values=-1) for part in parts])


def row_width(l, mirrored):
    """Numbers of a row."""
    return len(row_ordinals(l, mirrored))


@cache
def row_words(l, mirrored):
    """`packed_hermite` of the function at each place of a row, 0 where there is none; shape (width,), int32."""
    ordinals = row_ordinals(l, mirrored)
    return np.where(ordinals < 0, 0, packed_hermite(l)[ordinals]).astype(np.int32)


@cache
def row_parts(l, mirrored):
    """Ranges of the places of a row that have functions: all, or those of even and those of odd functions."""
    if not mirrored:
        return [range(nherm(l))]
    even = len(part_functions(l, 0, 0))
    first = 8 * blocks_of_8(even)
    return [range(even), range(first, first + nherm(l) - even)]


@cache
def r_numbers(l, mirrored):
    """{ordinal of t: number of r[t]} of all r[t] that are made: if `mirrored` those of even t_0."""
    ordinals = part_functions(l, 0, 0).tolist() if mirrored else range(nherm(l))
    return {t: n for n, t in enumerate(ordinals)}


@cache
def row_places(l, axis, degree):
    """Place in a row of each Hermite function of a pair, -1 for those that fill H up; int32, a multiple of 8.

    `axis`: along which all centres have the same coordinate (0, 1, 2 for z, y, x), or None. The row has the functions
    up to l or a higher `degree`.
    """
    triples, mirrored = hermite_triples(l), axis is not None
    if mirrored:
        order = [0, 1, 2]
        order[0], order[axis] = axis, 0
        triples = triples[:, order]
    place_of = np.empty(nherm(degree), dtype=np.int32)
    ordinals = row_ordinals(degree, mirrored)
    place_of[ordinals[ordinals >= 0]] = np.flatnonzero(ordinals >= 0)
    places = np.full(8 * blocks_of_8(nherm(l)), -1, dtype=np.int32)
    places[: nherm(l)] = place_of[[hermite_ordinal(*triple) for triple in triples.tolist()]]
    return places
