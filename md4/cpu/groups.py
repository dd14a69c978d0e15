"""Shell pairs in groups of LANES, side by side in vectors, and the tables by which compiled loops find their data.

A pair list is sorted by falling number of primitive pairs K, and cut into groups. As a ket, the pairs of a group go
through steps 2 to 5 together, one lane each. A group has as many vectors of primitives as its first pair has primitive
pairs; what is missing in other lanes is filled up by primitives whose H matrices are zero. Where there are few pairs of
many primitives, a pair takes several lanes, and its integrals are summed over them at the end.
"""

from dataclasses import dataclass
from functools import cache
from math import prod
from types import ModuleType
from typing import NamedTuple

import numpy as np

from md4.cpu.emit.vectors import LANES
from md4.method.angular import hermite_triples, nherm
from md4.method.derivatives import derived_elements
from md4.method.hermite import component_table, nonzero_elements
from md4.shells.shell_pairs import slices, spans, starts_of
from md4.support.locks import once


def numbered(name, fields):
    """The numbers 0, 1, 2, ..., the columns of a table, by their names, and their count as `size`.

    Compiled loops take them from a module one by one; of a named tuple, Numba would make all of them at each use.
    """
    names, made = fields.split(), ModuleType(name)
    vars(made).update(zip([*names, "size"], range(len(names) + 1)))
    return made


# Columns of the table of lists; `most` is the largest number of primitive pairs, and `width` the lanes of a pair. Where
# blocks are copied to an array, (ab|cd) goes to the sum of the places of ab and of cd; that of ab of pair n is `first`
# + n `of_pair` + ab `of_function`. From `order` on they are addresses of arrays.
FIELD = numbered(
    "Field",
    "l nab nherm elements npair ngroup na nb most width first of_pair of_function "
    "order start vectors primitives lane_primitives sequence columns rows triples h lane_h aos",
)
# Columns of the table of tasks: lists of bra and ket, places of the first bra pair and after the last one, which
# unordered quartets there are, addresses of the bounds (0: none), and whether the lists have changed places.
TASK = numbered("Task", "bra ket first last same bra_bound ket_bound swapped")
# Values of `same`: two different lists; the same list, of which unordered pairs of pairs count; each group of pairs of
# a list as bra and ket of itself.
DIFFERENT, SAME, DIAGONAL = range(3)
# Where a thread has stopped, and how many quartets it has made.
STATE = numbered("State", "task bra group quartets")
# Hermite functions whose elements of H are neighbours; see `h_structure`.
BLOCK = 64
# Rows of H that a product takes at a time.
ROWS_OF_TILE = 2
# Lanes that a pair may take.
LANE_NUMBERS = np.arange(LANES)
WIDTHS = tuple(1 << n for n in range(LANES.bit_length()))
# Numbers of a primitive pair: its exponent and its centre.
PRIMITIVE = numbered("Primitive", "exponent z y x")


def aligned(array):
    """A copy of an array of doubles that begins on a line of the cache."""
    place = aligned_empty(array.shape)
    place[...] = array
    return place


def aligned_empty(shape):
    """An array of doubles that begins on a line of the cache."""
    size = prod(shape)
    room = np.empty(size + 8)
    first = -room.ctypes.data % 64 // 8
    return room[first : first + size].reshape(shape)


def every_reach(la, lb, pure, single, derivatives):
    """Which of all Hermite functions the rows of H reach that belong to each pair of angular components of a and b.

    The rows are in blocks: one, or one for each derivative; shape (nblock, na, nb, nherm).
    """
    sizes = max(1, len(derivatives)), *(len(component_table(l, pure)[0]) - 1 for l in (la, lb))
    if derivatives:
        elements = derived_elements(la, lb, pure, 1, 1, single, derivatives)
    else:
        elements = nonzero_elements(la, lb, pure, single=single)
    found = np.zeros((prod(sizes), nherm(la + lb + bool(derivatives))), dtype=bool)
    found[tuple(elements.T)] = True
    return found.reshape(*sizes, -1)


@cache
def hermite_ordinals(l):
    """The ordinal of each Hermite triple up to degree l, shape (l + 1, l + 1, l + 1)."""
    triples, ordinals = hermite_triples(l), np.zeros((l + 1,) * 3, dtype=np.int64)
    ordinals[tuple(triples.T)] = np.arange(len(triples))
    return ordinals


@once  # compiled loops get its address, so there must not be a second one that another thread made
def hermite_functions(la, lb, pure, single, derivatives=()):
    """Ordinals of the Hermite functions that a class of pairs reaches, and their triples; arrays of int64.

    Pairs reach all up to |p| = l_a + l_b, spherical single shells those of |p| = l only. On the CPU, no other ones are
    computed, and p and q count these.

    Returns
    -------
    ordinals : ndarray, shape (nherm,)
    triples : ndarray, shape (3 nherm,)
    """
    ordinals = np.flatnonzero(every_reach(la, lb, pure, single, derivatives).any(axis=(0, 1, 2)))
    triples = hermite_triples(la + lb + bool(derivatives))
    return ordinals, np.ascontiguousarray(triples[ordinals]).reshape(-1)


@once  # as `hermite_functions`
def h_structure(la, lb, pure, nctr_a, nctr_b, single, derivatives=()):
    """The elements of H that can be nonzero by their powers of z, y and x: `md4.method.hermite.structure` as arrays.

    Elements are ordered by blocks of BLOCK functions p, and in a block by rows: what a product needs of r or of (ab|q]
    for a block stays in the first cache. Products take ROWS_OF_TILE rows at a time, so rows with similar zeros are made
    neighbours, and all rows of a tile have the elements that one of them needs.

    Returns
    -------
    sequence : ndarray of int64, shape (nab,)
        The rows ab in the order in which they are stored.
    rows : ndarray of int32, shape (nblock * nab + 1,)
        Where the elements of each stored row of each block begin.
    columns : ndarray of int32
        p of each element, counted among `hermite_functions`.
    """
    functions = hermite_functions(la, lb, pure, single, derivatives)[0]
    per_row = every_reach(la, lb, pure, single, derivatives)[..., functions]
    nblock, na, nb, count = per_row.shape
    every = np.broadcast_to(per_row[:, None, :, None], (nblock, nctr_a, na, nctr_b, nb, count))
    flat = every.reshape(-1, count)
    sequence = np.lexsort(flat.T[::-1])
    flat = flat[sequence]
    for first in range(0, len(flat) - ROWS_OF_TILE + 1, ROWS_OF_TILE):
        flat[first : first + ROWS_OF_TILE] = flat[first : first + ROWS_OF_TILE].any(axis=0)
    counts, columns = [], []
    for first in range(0, count, BLOCK):
        block = flat[:, first : first + BLOCK]
        counts.append(block.sum(axis=1))
        columns.append(np.nonzero(block)[1] + first)
    rows = np.concatenate([[0], np.cumsum(np.concatenate(counts))])
    return sequence, rows.astype(np.int32), np.concatenate(columns).astype(np.int32)


class LaneLayout(NamedTuple):
    """How the pairs of a list share the lanes.

    Attributes
    ----------
    width : int
        Lanes of a pair, 1, 2, ... or LANES, among which its primitive pairs are divided.
    ngroup : int
        Number of groups, each of LANES / width pairs.
    vectors : int
        Number of vectors of primitives.
    """

    width: int
    ngroup: int
    vectors: int


# What a group costs in comparison with a vector of primitives.
GROUP_COST = 0.25


class Ranking:
    """The shell pairs of some lists, list after list, and in a list by falling number of primitive pairs.

    Attributes
    ----------
    sizes, first : ndarray of int64, shapes (nlist,) and (nlist + 1,)
        Number of pairs of each list, and the place where they begin.
    owner, order, counts : ndarray of int64, shape (npair,)
        For each place: the number of the list, the pair by its number among those of all lists, and how many primitive
        pairs it has. Pairs of equal number stay in their order.
    """

    def __init__(self, lists):
        self.sizes = np.array([len(pairs) for pairs in lists])
        self.first = starts_of(self.sizes)
        self.owner = np.repeat(np.arange(len(lists)), self.sizes)
        counts = np.concatenate([pairs.start[1:] - pairs.start[:-1] for pairs in lists])
        self.order = np.lexsort((-counts, self.owner))
        self.counts = counts[self.order]

    def layouts(self, widths=WIDTHS):
        """The `LaneLayout` of each list with the least work.

        A pair of many primitives takes several lanes where there are too few pairs to fill them.
        """
        widths = np.array(widths)
        per_group = LANES // widths
        begins = (np.arange(len(self.owner)) - self.first[self.owner])[:, None] % per_group == 0
        of_groups = np.where(begins, -(-self.counts[:, None] // widths), 0)
        vectors = np.add.reduceat(of_groups, self.first[:-1])
        ngroup = -(-self.sizes[:, None] // per_group)
        every, best = np.arange(len(vectors)), np.argmin(vectors + GROUP_COST * ngroup, axis=1)
        columns = widths[best], ngroup[every, best], vectors[every, best]
        return [LaneLayout(*numbers) for numbers in np.stack(columns, axis=1).tolist()]

    def members(self, layouts, first):
        """Which primitive pair of its list each lane has, for the groups of all lists.

        Parameters
        ----------
        layouts : list of LaneLayout
        first : ndarray of int64, shape (npair,)
            The first primitive pair of the shell pair at each place.

        Returns
        -------
        most : ndarray of int64, shape (ngroup,)
            Vectors of each group.
        owner : ndarray of int64, shape (nvector, 1)
            The list of each vector.
        members : ndarray of int64, shape (nvector, LANES)
            As in `Groups`.
        """
        widths, ngroup, _ = np.array(layouts).T
        # of each group: its list, and the place of its first pair
        of_group = np.repeat(np.arange(len(ngroup)), ngroup)
        head = self.first[of_group] + spans(np.zeros_like(ngroup), ngroup) * (LANES // widths)[of_group]
        most = -(-self.counts[head] // widths[of_group])
        # of each vector, as columns: its group, its list, the lanes of a pair, and which vector of the group it is
        group = np.repeat(np.arange(len(most)), most)[:, None]
        owner, step = of_group[group], spans(np.zeros_like(most), most)[:, None]
        width = widths[owner]
        # of each lane: the place of its pair, and which primitive pair of that it has
        place, rank = head[group] + LANE_NUMBERS // width, step * width + LANE_NUMBERS % width
        inside = place < self.first[owner + 1]
        place[~inside] = 0
        return most, owner, np.where(inside & (rank < self.counts[place]), first[place] + rank, -1)


def lane_layout(pairs):
    """The `LaneLayout` of `ShellPairs` with the least work; they keep it."""
    if "lanes" not in pairs.__dict__:
        pairs.__dict__["lanes"] = Ranking([pairs]).layouts()[0]
    return pairs.__dict__["lanes"]


def plain_layout(pairs):
    """The `LaneLayout` with a lane for each pair."""
    return Ranking([pairs]).layouts(widths=(1,))[0]


@dataclass(frozen=True, eq=False)
class Groups:
    """The groups of a list of shell pairs, with the data of their primitives.

    Attributes
    ----------
    width, ngroup : int
        Lanes of a pair, and number of groups.
    order : ndarray of int64, shape (npair,)
        The pairs by falling number of primitive pairs; those of equal number stay in their order.
    vectors : ndarray of int64, shape (ngroup + 1,)
        Where the vectors of primitives of each group begin.
    members : ndarray of int64, shape (nvector, LANES)
        The primitive pair of each lane; -1 where there is none.
    primitives : ndarray, shape (nprim, 4)
        Exponent and centre (z, y, x) of each primitive pair.
    lane_primitives : ndarray, shape (nvector, 4, LANES)
        The same in lanes. Those without a primitive repeat the first lane's, which there always is.
    """

    width: int
    ngroup: int
    order: np.ndarray
    vectors: np.ndarray
    members: np.ndarray
    primitives: np.ndarray
    lane_primitives: np.ndarray

    @classmethod
    def of(cls, pairs, layout=None):
        """The groups of `ShellPairs`, by default in the layout with the least work."""
        return make_groups([pairs], None if layout is None else [layout])[0]

    @property
    def per_group(self):
        """Pairs of a group."""
        return LANES // self.width

    def primitives_of(self, start, first, last):
        """The primitive pairs of the pairs at places first to last in order; `start` is that of the list."""
        begin, end = start[self.order[first:last]], start[self.order[first:last] + 1]
        return spans(begin, end - begin)

    @property
    def nbytes(self):
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.__dict__.values() if isinstance(array, np.ndarray))


def make_groups(lists, layouts=None):
    """`Groups` of several lists of `ShellPairs`, which are made together; their arrays are slices.

    Without `layouts` they have those with the least work, which the lists keep.
    """
    ranking = Ranking(lists)
    if layouts is None:
        layouts = ranking.layouts()
        for pairs, layout in zip(lists, layouts):
            pairs.__dict__["lanes"] = layout
    first_prim = starts_of([pairs.nprim for pairs in lists])
    primitives = np.empty((first_prim[-1], PRIMITIVE.size))
    primitives[:, 0] = np.concatenate([pairs.primitives.exponent for pairs in lists])
    primitives[:, 1:] = np.concatenate([pairs.primitives.centre for pairs in lists])
    first = np.concatenate([pairs.start[:-1] for pairs in lists])[ranking.order]
    most, owner, members = ranking.members(layouts, first)
    chosen = np.where(members >= 0, members, members[:, :1]) + first_prim[owner]
    lane_primitives = aligned(primitives[chosen].transpose(0, 2, 1))
    orders = ranking.order - ranking.first[ranking.owner]
    vectors, (_, ngroup, nvector) = starts_of(most), zip(*layouts)
    places = zip(*map(slices, (ranking.first, starts_of(ngroup), starts_of(nvector), first_prim)))
    made = []
    for layout, (of_pairs, of_groups, of_vectors, of_prims) in zip(layouts, places):
        begins = vectors[of_groups.start : of_groups.stop + 1] - of_vectors.start
        made.append(Groups(
            layout.width, layout.ngroup, orders[of_pairs], begins, members[of_vectors], primitives[of_prims],
            lane_primitives[of_vectors],
        ))  # fmt: skip
    return made


def structure_of(pairs):
    """The `h_structure` of `ShellPairs`."""
    return h_structure(*pairs.shell_class, pairs.single, pairs.derivatives)


def functions_of(pairs):
    """The `hermite_functions` of `ShellPairs`."""
    return hermite_functions(pairs.la, pairs.lb, pairs.pure, pairs.single, pairs.derivatives)


def h_elements(pairs):
    """Number of elements of H of one primitive pair that are stored."""
    return len(structure_of(pairs)[2])
