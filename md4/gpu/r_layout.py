"""How Hermite integrals r lie in memory: which of them are kept, where, and how far those of two quartets are apart."""

from functools import cache

import numpy as np

from md4.method.angular import hermite_ordinal, hermite_triples, nherm
from md4.method.mirror import part_functions, r_count

AXIS_L = 18  # highest L whose r a lane makes axis by axis (`md4.gpu.kernels.recurrence`)


def r_stride(l, even=False, single=False):
    """Numbers from one quartet's r to the next: even, and a multiple of four floats, for 16-byte copies.

    The arguments are those of `r_count`, and whether the numbers are floats, as `single` says.
    """
    together = 4 if single else 2
    return -(-r_count(l, even) // together) * together


def even_r(bra, ket):
    """Whether r of two `ListFacts` is without r[t] of odd t on the mirror axis, which are zero.

    It is so for parts of classes (`md4.method.mirror`) up to the highest L that a lane makes axis by axis.
    """
    return bra.mirror is not None and ket.mirror is not None and bra.l + ket.l <= AXIS_L


def r_stride_of(bra, ket, single=False):
    """`r_stride` of two `ListFacts`."""
    return r_stride(bra.l + ket.l, even_r(bra, ket), single)


@cache
def r_places(l, axis=None):
    """Place of each r[t] of a quartet, shape (nherm(l),); `axis` is the mirror axis of two parts of classes.

    r is in the order of its ordinals. Even r is made with the mirror axis as axis 0, and the other two in their order
    behind it. The place of what is left out is 0: who reads it multiplies it by zero.
    """
    if axis is None or l > AXIS_L:
        return np.arange(nherm(l))
    places, kept = np.zeros(nherm(l), dtype=np.int64), part_functions(l, 0, 0)
    places[kept] = np.arange(len(kept))
    others = [other for other in range(3) if other != axis]
    return places[hermite_ordinal(*hermite_triples(l)[:, [axis, *others]].T)]
