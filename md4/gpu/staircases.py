"""Staircases: orders of rows and of Hermite functions in which the zeros of H stand together.

H[ab, p] vanishes unless some monomial of a times one of b has all the powers of p. A solid harmonic of order m has z to
the power l - |m| at most, so that row (m_a, m_b) ends at p_z = l_a + l_b - |m_a| - |m_b|. With Hermite functions by
rising p_z and rows by falling reach in z, what does not vanish is a staircase: of each block of 8 Hermite functions,
only the first blocks of rows count. The tensor-core kernels leave out the others, up to a quarter of all ((ii| 20%,
(ff| 22%): in the first product, and in the second one unless its rows must be contiguous in the result. Cartesian
functions and general contractions have staircases, too.

A class is (l_a, l_b, pure, nctr_a, nctr_b). Orders are padded by -1.
"""

from functools import cache

import numpy as np

from md4.gpu.tuning import TILES, reach_levels
from md4.method.angular import hermite_triples
from md4.method.hermite import structure


def class_of(pairs):
    """The class of a list of shell pairs."""
    return pairs.la, pairs.lb, pairs.pure, pairs.nctr_a, pairs.nctr_b


def padded(order, count):
    """An order as an array of `count`."""
    return np.pad(order, (0, count - len(order)), constant_values=-1).astype(np.int32)


@cache
def hermite_order(l):
    """Hermite functions by rising z, in blocks of 8."""
    order = np.argsort(hermite_triples(l)[:, 0], kind="stable")
    return padded(order, -(-len(order) // 8) * 8)


@cache
def gather_order(l):
    """The same with each block of 8 as p_0 p_4 p_1 p_5 p_2 p_6 p_3 p_7.

    A lane gathers two neighbours, the first of which four lanes read together: r[p+q] of successive p, so that more of
    them are one number, and fewer of the rest share banks of shared memory (1.3 accesses to a bank against 1.8, by
    count, in natural order).
    """
    return hermite_order(l).reshape(-1, 2, 4).swapaxes(1, 2).reshape(-1)


@cache
def row_order(shells):
    """Rows of H of a class by falling reach in z; shape (nab,)."""
    row, p = np.array(structure(*shells)).T
    furthest = np.zeros(row.max() + 1, dtype=int)
    np.maximum.at(furthest, row, hermite_triples(shells[0] + shells[1])[p, 0])
    return np.argsort(-furthest, kind="stable")


@cache
def reach(shells):
    """Of each block of 8 Hermite functions, the number of blocks of 8 rows that count; shape (nblock,), int32."""
    rows, order = row_order(shells), hermite_order(shells[0] + shells[1])
    row, p = np.array(structure(*shells)).T
    inverse = [np.argsort(o[o >= 0]) for o in (rows, order)]
    out = np.zeros(len(order) // 8, dtype=np.int32)
    np.maximum.at(out, inverse[1][p] // 8, inverse[0][row] // 8 + 1)
    return np.maximum.accumulate(out[::-1])[::-1]


def depths(shells, rows8, row_blocks):
    """Blocks of 8 Hermite functions that count of each of `row_blocks` blocks of `rows8` blocks of 8 rows, int32.

    At least as many as a ring of copies is ahead, so that what was fetched with the first step of a primitive is there
    when the next one begins.
    """
    found = np.sum(reach(shells) > rows8 * np.arange(row_blocks)[:, None], axis=1, dtype=np.int32)
    return np.maximum(found, min(TILES.stages - 1, len(reach(shells)))).astype(np.int32)


def level_ends(shells, blocks, size):
    """Steps of 8 Hermite functions up to which each of `reach_levels` is needed, int32; `size` blocks of 8 a level."""
    needed = -(-reach(shells) // size)
    lower = [*reach_levels(blocks)[1:], 0]
    return np.array([np.sum(needed > n) for n in lower], dtype=np.int32)


def row_table(shells, rows8):
    """`row_order` padded to `rows8` blocks of 8."""
    return padded(row_order(shells), 8 * rows8)


# The same for rows in their own order, all of which count everywhere.


def full_reach(shells):
    """`reach` of them."""
    return np.full(len(reach(shells)), 1 << 20, dtype=np.int32)


def full_depths(shells, rows8, row_blocks):
    """`depths` of them."""
    return np.full(row_blocks, len(reach(shells)), dtype=np.int32)
