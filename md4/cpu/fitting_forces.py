"""Gradients of density fitting on the CPU: bra pairs with single shells, single shells with pairs and with each other.

For E = sum Gamma3[ab, P] (ab|P) + sum Gamma2[P, Q] (P|Q) with factors that are given, the sums of `md4.cpu.gradient`
are made with the elements of these in place of those of Gamma[ab, cd]. A single shell P is a pair with the unit
function. So the derivatives by the centres of a and b, and those by the centre of P, are two such sums with exchanged
roles of the lists, and a third one has single shells on both sides.
"""

from collections import namedtuple
from itertools import pairwise

import numpy as np

from md4.cpu.compile import Loop, bound, part
from md4.cpu.emit.vectors import LANES, integers
from md4.cpu.emit.zeros import zeros_of
from md4.cpu.forces import NO_MATRICES, HostForces, is_own
from md4.cpu.gradient import KET, add_to_z, reverse_lanes
from md4.cpu.groups import FIELD
from md4.cpu.run import THREAD_WORK, Lists, OwnList
from md4.support.locks import once

# Rows of a table whose squares are made together.
ROWS = 32


class Factors(namedtuple("Factors", "table norms highest steps")):
    """The table that Gamma is read from, and the norms of its blocks.

    The element of functions ab of a bra and cd of a ket is at the sum of `steps[0]` times the number of ab, `steps[1]`
    times that of cd and `steps[2]`; functions of pairs and of single shells are numbered each by themselves. The norm
    of the block of a bra and a ket is found in the same way with the other three steps and the numbers of the pairs.
    """

    __slots__ = ()


@part
def gamma_of_table(terms, places, first_c, first_d, sizes_ab, sizes_cd, weights, work):
    """Gamma of a bra and the kets in lanes; a lane without a ket has the weight 0. It replaces `make_gamma`."""
    table, _, _, steps = terms
    gamma, nab, ncd = work.gamma, sizes_ab[0] * sizes_ab[1], sizes_cd[0] * sizes_cd[1]
    of_bra, of_ket = steps[0], steps[1]
    for lane in range(LANES):
        first = places[0] * of_bra + first_c[lane] * of_ket + steps[2]
        for ab in range(nab):
            for cd in range(ncd):
                at = first + ab * of_bra + cd * of_ket
                gamma[(ab * ncd + cd) * LANES + lane] = weights[lane] * table[at]


@part
def no_gamma(terms, places, sizes, gamma):
    """In place of `gamma_of_bra`: all kets have functions."""


@part
def look_at_table(ket, items, bounds, g, a, b, terms, weights, first_c, first_d):
    """As `look_at_lanes`, with the norms of blocks of the table; `items` has the number of each pair."""
    _, norms, _, steps = terms
    order, places, width = integers(ket[FIELD.order], 1), integers(ket[FIELD.aos], 1), ket[FIELD.width]
    first, of_sum, of_squares, largest = g * (LANES // width), 0.0, 0.0, 0.0
    count = min(LANES // width, ket[FIELD.npair] - first)
    for lane in range(LANES):
        m = first + min(lane // width, count - 1)
        cd = order[m]
        first_c[lane] = places[2 * cd]
        weights[lane] = 1.0 if lane < count * width else 0.0
        if lane < count * width and lane % width == 0:
            size = norms[a * steps[3] + items[2 * cd] * steps[4] + steps[5]] * bounds[m]
            of_sum, of_squares, largest = of_sum + size, of_squares + size * size, max(largest, size)
    return of_sum, of_squares, largest, count


@part
def highest_beside(terms, a, b):
    """The largest norm of a block of a bra. It replaces `most_beside`."""
    return terms[2][a]


@once
def fitted_sums(kind):
    """`reverse_lanes` with a table, for one operator."""
    add = bound(add_to_z, make=part, zeros_of_lanes=zeros_of(kind))
    return Loop(
        reverse_lanes, f"fitted_{kind}", allocates=True, add_to_z=add, make_gamma=gamma_of_table, gamma_of_bra=no_gamma,
        look_at_lanes=look_at_table, most_beside=highest_beside,
    )  # fmt: skip


class HostFittingForces(HostForces):
    """Derivatives of sums of integrals over three and two centres by the centres of the shells.

    Parameters
    ----------
    backend : md4.cpu.backend.CpuBackend
        For 1/r.
    basis : md4.Basis
        From `Basis.joined`.
    pairs : list
        Objects with the attributes `prepared` and `exact` of `md4.contract.screening.PairList`, of pairs.
    blocks : list of list
        The same of single shells, in blocks.

    Attributes
    ----------
    columns, rows : ndarray of int64, shapes (npair + 1,) and (nsingle + 1,)
        Where the functions of each pair and of each single shell begin, and their numbers.
    edges : list of int
        Where the single shells of each block begin, and their number.
    found : list of ndarray, shapes (npair, 6)
        Sums that are made, for each list.
    left_out : ndarray, shape (2,)
        The sum of the bounds of what was left out, and the sum of their squares.
    """

    loop = staticmethod(fitted_sums)

    def __init__(self, backend, basis, pairs, blocks):
        singles = [this for block in blocks for this in block]
        super().__init__(backend, basis, [*pairs, *singles])
        of_pair, of_single = (max(this.prepared.facts.l for this in lists) for lists in (pairs, singles))
        self.degree = 1 + of_single + max(of_pair, of_single)
        self.numbers = list(range(len(pairs)))
        ends = np.cumsum([len(pairs), *map(len, blocks)]).tolist()
        self.blocks = [list(range(first, last)) for first, last in pairwise(ends)]
        self.columns, *of_pairs = numbered_items(self.lists[: len(pairs)])
        self.rows, *of_singles = numbered_items(self.lists[len(pairs) :])
        self.items, self.places = (one + other for one, other in zip(of_pairs, of_singles))
        counts = [sum(len(this.prepared) for this in block) for block in blocks]
        self.edges = np.cumsum([0, *counts]).tolist()
        same = [this.pairs.pairs[:, 0] == this.pairs.pairs[:, 1] for this in self.lists[: len(pairs)]]
        self.of_pairs = np.where(np.concatenate(same), 1.0, 2.0)  # factors that bounds of pairs contain
        self.found, self.left_out = [np.zeros((len(this.pairs), 6)) for this in self.lists], np.zeros(2)

    def add_three(self, backend, block, table, tolerance, response, part=0, parts=1):
        """Adds sum Gamma3[ab, P] d(ab|P) for a block of single shells.

        Parameters
        ----------
        backend : md4.cpu.backend.CpuBackend
            For the operator.
        block : int
        table : ndarray, shape (nrow, ncol)
            f_ab Gamma3 of the functions of the block and of all pairs; f_ab is 1 for pairs of a shell with itself, else
            2.
        tolerance : float
            Blocks whose bounds are smaller are left out.
        response : bool
            Whether the centres of single shells move.
        part, parts : int
            What is to be done is divided into so many parts.
        """
        first, last = self.edges[block : block + 2]
        norms = block_norms(table, self.rows[first : last + 1] - self.rows[first], self.columns)
        norms /= 2 * self.of_pairs  # 2: as single shells have in their bounds
        ncol, npair = table.shape[1], len(self.of_pairs)
        origin, of_norms = -self.rows[first] * ncol, -first * npair
        of_singles = np.zeros(len(self.rows) - 1)
        of_singles[first:last] = norms.max(axis=1)
        table, norms, of_pairs = table.reshape(-1), norms.reshape(-1), norms.max(axis=0)
        of_bra = np.array([1, ncol, origin, 1, npair, of_norms])
        of_ket = np.array([ncol, 1, origin, npair, 1, of_norms])
        options = tolerance, part, parts
        self.add(backend, self.numbers, self.blocks[block], Factors(table, norms, of_pairs, of_bra), *options)
        if response:
            self.add(backend, self.blocks[block], self.numbers, Factors(table, norms, of_singles, of_ket), *options)

    def add_two(self, backend, table, tolerance, part=0, parts=1):
        """Adds sum Gamma2[P, Q] d(P|Q) for a symmetric Gamma2, shape (naux, naux); arguments as for `add_three`."""
        norms = block_norms(table, self.rows, self.rows) / 2  # 2 of 4: derivatives by Q are those by P
        naux, count = table.shape[1], norms.shape[1]
        terms = Factors(
            2 * table.reshape(-1), norms.reshape(-1), norms.max(axis=1), np.array([naux, 1, 0, count, 1, 0])
        )
        singles = [number for block in self.blocks for number in block]
        self.add(backend, singles, singles, terms, tolerance, part, parts)

    def add(self, backend, bras, kets, terms, tolerance, part, parts):
        """Adds the derivatives of lists `bras` to `found`."""
        most, batches = self.divided_memory(backend, kets)
        for these in batches:
            lists = Lists()
            numbers, *tables = self.tables(lists, these)
            work = [self.work_of(this, these) if n in bras else np.zeros(len(this.pairs))
                    for n, this in enumerate(self.lists)]  # fmt: skip
            threads = int(max(1, min(most, sum(map(np.sum, work)) // THREAD_WORK)))
            tasks = [task for task in self.tasks(work, threads, part, parts) if task[1] in bras]
            arguments = *tables, numbers, tolerance, terms
            self.threads(backend, tasks, threads, arguments, self.found, self.left_out, None)

    def own_pairs(self, part, parts):
        """As that of `HostForces`, by the numbers of pairs and of single shells, whose lists depend on the memory."""
        own = []
        for number, (this, items) in enumerate(zip(self.lists, self.items)):
            count = len(self.columns if number < len(self.numbers) else self.rows) - 1
            own.append(is_own(items[this.groups.order, 0], count, part, parts))
        return own

    def tables(self, lists, these):
        """As those of `HostForces`, with numbers of pairs and places of their functions in place of shells and AOs."""
        kets = []
        for number, this in enumerate(self.lists):
            lists.number(this.prepared if number in these else OwnList(this.pairs, this.groups, NO_MATRICES))
            lists.rows[number] = (*lists.rows[number][:-1], lists.address(self.places[number]))
            kets.append([lists.address(array) for array in (self.items[number], this.bounds, *this.of_groups)])
        return np.array(these), lists.table(), np.array(kets, dtype=np.int64).reshape(-1, KET.size)

    def result(self):
        """The sums by the centre of each shell, shape (nshell, 3); H matrices are dropped."""
        self.drop()
        return self.by_centres(self.found)


def numbered_items(lists):
    """(where the functions of each pair begin, [numbers of the pairs], [places of their functions]) of some lists."""
    counts = [len(this.pairs) for this in lists]
    edges = np.cumsum([0, *np.repeat([this.pairs.nab for this in lists], counts)])
    ends = np.cumsum(counts)[:-1]

    def of_lists(numbers):
        return [np.ascontiguousarray(np.stack([part, part], axis=1)) for part in np.split(numbers, ends)]

    return edges, of_lists(np.arange(len(edges) - 1)), of_lists(edges[:-1])


def block_norms(table, rows, columns):
    """The norm of each block of a table, which begin at `rows` and `columns`, an array (nrow, ncolumn)."""
    squares = np.empty((len(table), len(columns) - 1))
    for first in range(0, len(table), ROWS):
        these = slice(first, first + ROWS)
        np.add.reduceat(table[these] ** 2, columns[:-1], axis=1, out=squares[these])
    return np.sqrt(np.add.reduceat(squares, rows[:-1], axis=0))
