"""H matrices on the CPU: a flat array with one matrix (nab, K N_p) for each shell pair, which has K primitive pairs.

So the sum over primitives is part of the inner dimension of each product.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np


@dataclass(frozen=True)
class FlatH:
    """The form of H matrices on the CPU.

    Attributes
    ----------
    sign : bool
        Whether elements include the sign (-1)^|q|, as those of a ket do.
    """

    sign: bool

    def __str__(self):
        return "flat, sign" if self.sign else "flat"


UNSIGNED, SIGNED = FlatH(False), FlatH(True)


def h_runs(h, prepared):
    """Yields runs of pairs with the same number K of primitive pairs.

    A run is a slice of pairs, a slice of inner indices, and H of the shape (pairs, nab, K N_p).
    """
    pairs = prepared.pairs
    size, start = pairs.nab * pairs.nherm, pairs.start
    counts = start[1:] - start[:-1]
    edges = [0, *(np.flatnonzero(counts[1:] != counts[:-1]) + 1).tolist(), len(pairs)]
    for first, last in pairwise(edges):
        a, b = int(start[first]), int(start[last])
        block = h[(prepared.first_prim + a) * size : (prepared.first_prim + b) * size]
        inner = slice(a * pairs.nherm, b * pairs.nherm)
        yield slice(first, last), inner, block.reshape(last - first, pairs.nab, int(counts[first]) * pairs.nherm)
