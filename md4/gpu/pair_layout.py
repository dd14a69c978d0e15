"""How the primitive pairs of a list lie in device memory: as records, and in slots side by side.

A record is [p, P, P - A, P - B, za, zb, coefficients of a times exp(-za zb/p |AB|^2), coefficients of b], vectors in
the order z, y, x (`md4.method.angular.AXES`). Records stand one after the other in the order of the list.

Slots are for kernels whose lanes take successive pairs: the n-th primitives of 32 successive pairs stand side by side,
so that a warp reads whole lines however long the contractions are. A group of 32 pairs takes as many rows of 32 slots
as its longest pair has primitives; slots that no primitive fills are not read. In slots are [p, P], and the H matrices
of `md4.gpu.h_layout.KET_ELEMENTS`.
"""

from dataclasses import dataclass

import numpy as np

# Numbers of a record before its coefficients, and where P, P - A, P - B and the exponents of a and b begin.
RECORD = 12
CENTRE, FROM_A, FROM_B, EXPONENTS = 1, 4, 7, 10
# Pairs whose primitives stand side by side.
SIDE_BY_SIDE = 32


def slot_starts(start):
    """(slot of each pair's first primitive, slots in all), from the pairs' ranges of primitives."""
    counts = np.diff(start)
    lengths = np.maximum.reduceat(counts, np.arange(0, len(counts), SIDE_BY_SIDE))
    edges = SIDE_BY_SIDE * np.concatenate([[0], np.cumsum(lengths)])
    n = np.arange(len(counts))
    return edges[n // SIDE_BY_SIDE] + n % SIDE_BY_SIDE, int(edges[-1])


@dataclass
class PairSlots:
    """Primitive pairs of a list in slots, on the device.

    Attributes
    ----------
    numbers : Buffer
        [p, P_z, P_y, P_x][slot].
    first, place : Buffer
        Slot of each pair's first primitive, and of each primitive.
    count : int
        Slots.
    """

    numbers: object
    first: object
    place: object
    count: int
