"""Staircases: orders of rows and of Hermite functions in which the zeros of H stand together.

H[ab, p] is zero unless some monomial of a times one of b has all the powers of p. A solid harmonic of order m has z to
the power l - |m| at most, so row (m_a, m_b) of H is zero beyond p_z = l_a + l_b - |m_a| - |m_b|: the row's reach. Let
Hermite functions be ordered by rising p_z, and rows by falling reach. What is not zero then has the shape of a
staircase: of each block of 8 Hermite functions, only the first blocks of rows count. The kernels for tensor cores leave
out the other blocks, which are 20% of all for (ii| and 22% for (ff|. They do so in the first product, and in the second
one unless its rows must be contiguous in the result. Cartesian functions and general contractions have staircases, too.

A class is given by the `h_class` of its `md4.shells.shell_pairs.ListFacts`. Spherical single shells have Hermite
functions of degree l only: `first` is the ordinal of the first that counts. An even or an odd part
(`md4.method.mirror`) has the rows and the Hermite functions of that parity only, derivatives
(`md4.method.derivatives`) a block of rows each. An order is a list of indices, padded by -1.
"""

from functools import cache

import numpy as np

from md4.gpu.tiles import STAGES, reach_levels
from md4.method.angular import hermite_triples, nherm
from md4.method.mirror import class_elements, part_functions, part_rows


def padded(order, count):
    """An order as an array of `count`."""
    return np.pad(order, (0, count - len(order)), constant_values=-1).astype(np.int32)


@cache
def hermite_order(l, first=0, mirror=None):
    """Hermite functions from `first` on up to degree l, or those of a part, by rising z, in blocks of 8."""
    functions = np.arange(first, nherm(l)) if mirror is None else part_functions(l, *mirror)
    order = functions[np.argsort(hermite_triples(l)[functions, 0], kind="stable")]
    return padded(order, -(-len(order) // 8) * 8)


@cache
def gather_order(l, first=0, mirror=None):
    """The same order, but with each block of 8 as p_0 p_4 p_1 p_5 p_2 p_6 p_3 p_7.

    A lane gathers r[p+q] of two neighbours of this order, and four lanes gather at the same time those of successive p.
    For successive p, more of these are one and the same number, and fewer of the others share a bank of shared memory.
    """
    return hermite_order(l, first, mirror).reshape(-1, 2, 4).swapaxes(1, 2).reshape(-1)


@cache
def row_order(facts):
    """Rows of H of a class by falling reach; shape (nab,)."""
    row, p = class_elements(facts).T
    furthest = np.zeros(row.max() + 1, dtype=int)
    np.maximum.at(furthest, row, hermite_triples(facts.l)[p, 0])
    return np.argsort(-furthest, kind="stable")


@cache
def reach(facts):
    """For each block of 8 Hermite functions, how many blocks of 8 rows count; shape (nblock,), int32."""
    rows, order = row_order(facts), hermite_order(facts.l, facts.first, facts.mirror)
    row, p = class_elements(facts).T
    place = np.empty(nherm(facts.l), dtype=int)  # in the order, of each Hermite function that is there
    place[order[order >= 0]] = np.arange(np.count_nonzero(order >= 0))
    out = np.zeros(len(order) // 8, dtype=np.int32)
    np.maximum.at(out, place[p] // 8, np.argsort(rows)[row] // 8 + 1)
    return np.maximum.accumulate(out[::-1])[::-1]


def depths(facts, rows8, row_blocks):
    """For each of `row_blocks` tiles of `rows8` blocks of 8 rows, how many blocks of 8 Hermite functions count, int32.

    At least `STAGES` - 1, the steps by which copies are ahead: then the next primitive's r, whose copy is
    started with the first step of a primitive, has arrived when that primitive begins.
    """
    found = np.sum(reach(facts) > rows8 * np.arange(row_blocks)[:, None], axis=1, dtype=np.int32)
    return np.maximum(found, min(STAGES - 1, len(reach(facts)))).astype(np.int32)


def level_ends(facts, blocks, size):
    """For each of `reach_levels`, the block of 8 Hermite functions up to which so many rows are needed, int32.

    Levels count units of `size` blocks of 8 rows, of which there are `blocks`.
    """
    needed = -(-reach(facts) // size)
    lower = [*reach_levels(blocks)[1:], 0]
    return np.array([np.sum(needed > n) for n in lower], dtype=np.int32)


def row_table(facts, rows8):
    """`row_order`, padded to `rows8` blocks of 8 rows."""
    return padded(row_order(facts), 8 * rows8)


@cache
def whole_rows(facts):
    """Of each row of a class or of a part, its number among all rows, a nb + b; shape (nab,), int32."""
    rows = part_rows(*facts.shell_class, *facts.mirror) if facts.mirror else np.arange(facts.nab)
    return rows.astype(np.int32)


def whole_row_table(facts, rows8):
    """`row_table` with these numbers."""
    order = row_table(facts, rows8)
    return np.where(order < 0, -1, whole_rows(facts)[order])


# For a tile whose fragments of 16 rows are those of several warps in turn: warp n has fragments n, n + warps, ...


def shared_out(count, warps):
    """How many of `count` fragments each warp has."""
    return tuple(-(-(count - n) // warps) for n in range(warps))


def shared_rows(facts, mt, warps):
    """`row_table` of the fragments of each warp, one warp after the other."""
    return row_table(facts, 2 * mt * warps).reshape(mt, warps, 16).swapaxes(0, 1).reshape(-1)


# For rows in their natural order, all of which count for every Hermite function.


def full_reach(facts):
    """`reach` of such rows: a number that no tile exceeds."""
    return np.full(len(reach(facts)), 1 << 20, dtype=np.int32)


def full_depths(facts, rows8, row_blocks):
    """`depths` of such rows."""
    return np.full(row_blocks, len(reach(facts)), dtype=np.int32)
