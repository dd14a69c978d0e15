"""The shell quartets that survive screening (`md4.contract.screening`), counted, and the rectangles that cover them.

What does not depend on the density is made once for all builds: flat tables of all lists, the pairs of lists, and the
times that are predicted for their quartets. The loops over bra pairs are compiled (`md4.cpu.screening`).
"""

from functools import cached_property
from typing import NamedTuple

import numpy as np

from md4.cpu.screening import (
    FOUND,
    LIST,
    PAIR,
    codes_of,
    covering,
    norms_of_density,
    raise_norms,
    survivors,
)
from md4.cpu.threads import in_threads
from md4.plan import EACH, ListPair, QuartetRows, QuartetRule

# Bra pairs whose survivors are counted together.
COUNT_ROWS = 1 << 15
# Steps in which the rows of a pair of lists are cut, at least.
TILE_STEPS = 96


class Norms(NamedTuple):
    """Norms of density matrices, as the bounds of quartets need them.

    Attributes
    ----------
    exchange : ndarray, shape (nkind, nshell)
        The largest |D_ab| of a shell with all shells of a kind, for K.
    own : ndarray, shape (npair,)
        2 sqrt(min(n_a, n_b)) |D_ab| of each pair of all lists, for J.
    beyond : ndarray, shape (npair,)
        The largest of these numbers times bounds R, of a pair and all that follow it in its list.
    blocks : ndarray, shape (nshell, nshell)
        |D_ab| of all shells, for K; symmetric.
    """

    exchange: np.ndarray
    own: np.ndarray
    beyond: np.ndarray
    blocks: np.ndarray


class ListPairs:
    """All unordered pairs of some lists.

    Parameters
    ----------
    lists : list of md4.contract.screening.PairList
    basis : Basis
    swapped : callable
        Decides which of two lists is the ket.
    key : callable, optional
        Pairs of lists of the same key are one task. By default each is a task of its own.

    Attributes
    ----------
    lists : list of md4.contract.screening.PairList
    numbers : list of tuple of int
        Bra and ket list of each pair.
    """

    def __init__(self, lists, basis, swapped, key=None):
        self.lists, self.basis, self._seconds = lists, basis, {}
        ordered = ((i, k) for i in range(len(lists)) for k in range(i + 1))
        self.numbers = [(k, i) if swapped(lists[i].pairs, lists[k].pairs) else (i, k) for i, k in ordered]
        self.shells = np.concatenate([np.zeros((0, 2), np.int64), *(this.pairs.pairs for this in lists)])
        self.bounds = np.concatenate([np.zeros(0), *(this.bound for this in lists)])
        self.exact = np.concatenate([np.zeros(0), *(this.exact for this in lists)])
        self.terms = np.concatenate([np.zeros(0), *(this.terms for this in lists)])
        self.rows = np.array([len(lists[bra]) for bra, _ in self.numbers], dtype=np.int64)
        tasks = [key(lists[bra].pairs, lists[ket].pairs) for bra, ket in self.numbers] if key else self.numbers
        first = {}
        # The first of the pairs of lists that are one task with each: the task has its number.
        self.first = np.array([first.setdefault(task, n) for n, task in enumerate(tasks)], dtype=np.int64)

    @cached_property
    def kind(self):
        """Kind of each shell; those that no pair has do not count."""
        kind = np.zeros(self.basis.nshell, dtype=np.int64)
        for this in self.lists:
            kind[this.pairs.pairs] = this.kinds
        return kind

    @cached_property
    def ranges(self):
        """(first shell a, number of shells a, first shell b, number of shells b) among which those of a list are."""
        ends = [(this.pairs.pairs.min(axis=0), this.pairs.pairs.max(axis=0) + 1) for this in self.lists]
        return [tuple(np.stack([first, last - first], axis=1).reshape(-1).tolist()) for first, last in ends]

    @cached_property
    def table(self):
        """(lists, places) for the loops: rows of `LIST` and one more, and how many bounds have each code or more."""
        table, places, first = np.zeros((len(self.lists) + 1, LIST.size), dtype=np.int64), [], 0
        for row, this in zip(table, self.lists):
            codes, shift = codes_of(this.bound)
            highest = int(codes[0])
            found = np.searchsorted(highest - codes, np.arange(highest - int(codes[-1]) + 2))
            row[:] = first, first + len(this), *this.kinds, sum(map(len, places)), highest, shift
            first += len(this)
            places.append(found.astype(np.int32))
        table[-1, LIST.places] = sum(map(len, places))
        return table, np.concatenate([np.zeros(0, np.int32), *places])

    @cached_property
    def pairs(self):
        """Rows of `PAIR` for the loops."""
        pairs = np.zeros((len(self.numbers), PAIR.size), dtype=np.int64)
        pairs[:, : PAIR.first] = np.reshape(self.numbers, (-1, 2))
        np.cumsum(self.rows[:-1], out=pairs[1:, PAIR.first])
        return pairs

    def norms(self, densities, with_j, with_k):
        """`Norms` of density matrices, shape (n, nao, nao); those that J or K alone do not need are zero."""
        basis, kind, (lists, _) = self.basis, self.kind, self.table
        norms, width = np.zeros((basis.nshell, basis.nshell)), np.sqrt(np.diff(basis.ao_loc))
        exchange, own = np.zeros((kind.max() + 1, basis.nshell)), np.zeros(len(self.bounds))
        beyond = np.zeros(len(self.bounds))
        raise_norms([norms] * len(densities), densities, basis)
        norms_of_density()(norms, kind, width, lists[:-1], self.shells, self.exact, exchange, own, beyond)
        for unused, arrays in ((not with_j, (own, beyond)), (not with_k, (exchange, norms))):
            for array in arrays if unused else ():
                array[:] = 0.0
        return Norms(exchange, own, beyond, norms)

    def survivors(self, norms, tolerance, bounded):
        """`Survivors` of a tolerance; `bounded`: they have `Survivors.bounded`."""
        (lists, places), pairs, rows = self.table, self.pairs, int(self.rows.sum())
        products = np.empty(rows if bounded else 0)
        found, counts = np.zeros((len(pairs), FOUND.size), dtype=np.int64), np.empty(rows, dtype=np.int32)
        cuts = np.arange(1, -(-rows // COUNT_ROWS)) * COUNT_ROWS
        ends = [0, *np.searchsorted(pairs[:, PAIR.first], cuts).tolist(), len(pairs)]

        def count(n):
            survivors()(
                lists, pairs, ends[n], ends[n + 1], self.shells, self.bounds, self.exact, places, *norms[:3], tolerance,
                counts, found, products,
            )  # fmt: skip

        in_threads(len(ends) - 1, count, 8 * rows)
        rule = QuartetRule(tolerance, self.shells, self.exact, self.terms, norms.own, norms.blocks, counts)
        return Survivors(self, found, products, rule)

    def seconds(self, predicted, matrices):
        """Predicted seconds of a quartet of each pair of lists, shape (number of pairs,), kept.

        `predicted` is one of the functions of `md4.backends.Sums`.
        """
        key = predicted.__name__, matrices
        if key not in self._seconds:
            lists = self.lists
            axis = self.basis.mirror_axis
            times = [predicted(lists[bra].pairs, lists[ket].pairs, matrices, axis) for bra, ket in self.numbers]
            self._seconds[key] = np.array(times)
        return self._seconds[key]


class Survivors:
    """The quartets that survive in one build.

    Attributes
    ----------
    pairs : ListPairs
    quartets : list of int
        How many survive of each pair of lists.
    total : int
        How many survive of all.
    rule : md4.plan.QuartetRule
        By which some of these can be left out, too.
    """

    def __init__(self, pairs, found, products, rule):
        self.pairs, self._products, self.rule = pairs, products, rule
        self.quartets, self.used, self.widths = found.T.tolist()
        self.total = sum(self.quartets)

    def __len__(self):
        return len(self.quartets)

    def _of(self, array, n):
        """The part of an array that belongs to a pair of lists."""
        first = self.pairs.pairs[n, PAIR.first]
        return array[first : first + self.pairs.rows[n]]

    def by_task(self, numbers):
        """Numbers of all pairs of lists added up at the first pair of each task, a list; they are 0 at the others."""
        sums = np.zeros(len(self), dtype=np.asarray(numbers).dtype)
        np.add.at(sums, self.pairs.first, numbers)
        return sums.tolist()

    @cached_property
    def task_quartets(self):
        """`quartets` by task."""
        return self.by_task(self.quartets)

    def counts(self, n):
        """How many ket pairs survive with each bra pair of a pair of lists, those of the largest bounds."""
        return self._of(self.rule.counts, n)

    def place(self, n):
        """Where the `counts` of a pair of lists begin in those of the rule."""
        return int(self.pairs.pairs[n, PAIR.first])

    def list_pair(self, lists, task):
        """`ListPair` of a task, of a worker's `lists`."""
        bra, ket = self.pairs.numbers[task.pair]
        of_task = task.part, task.parts, task.pair, task.seconds - EACH
        return ListPair(lists[bra].prepared, lists[ket].prepared, bra == ket, None, None, *of_task)

    def bounded(self, pair):
        """A `ListPair` with bounds, by which the same quartets survive."""
        _, ket = self.pairs.numbers[pair.number]
        return pair._replace(bra_bound=self._of(self._products, pair.number), ket_bound=self.pairs.lists[ket].bound)

    def rows(self, pair, first, end):
        """`QuartetRows` of the rows from `first` to `end` of a `ListPair`."""
        bra, ket = self.pairs.numbers[pair.number]
        (table, _), end = self.pairs.table, min(end, self.used[pair.number])
        places, shells = (int(table[bra, LIST.first]), int(table[ket, LIST.first])), self.pairs.ranges[ket]
        return QuartetRows(*pair[:3], first, self.counts(pair.number)[first:end], places, shells)

    def tiles(self, n, first, end, most, price):
        """`tiles` of the rows from `first` to `end` of a pair of lists."""
        rows, width, counts = self.used[n], self.widths[n], self.counts(n)[first:end]
        if (first, end) == (0, self.pairs.rows[n]) and rows * width - self.quartets[n] <= price:
            return split_tile(0, rows, width, most, counts) if width else []
        return tiles(counts, most, price)


def tiles(n, most, price):
    """Rectangles (bra slice, ket slice) that cover the survivors `n` with little waste.

    Parameters
    ----------
    n : ndarray of int32, shape (nbra,)
        The number of ket pairs, counted from the first, that each bra pair needs.
    most : int
        Largest number of quartets of a rectangle.
    price : float
        So many quartets are worth a rectangle: it ends where that saves more of them.
    """
    found = np.empty((2 * TILE_STEPS, 3), dtype=np.int64)
    count = covering()(n, price, TILE_STEPS, found)
    return [tile for rows in found[:count].tolist() for tile in split_tile(*rows, most, n)]


def split_tile(first, last, width, most, n):
    """The rectangle of bra pairs first..last and `width` ket pairs, in parts of at most `most` quartets.

    Parts end with the last of the survivors `n`, as in `tiles`, of their bra pairs.
    """
    if (last - first) * width <= most:
        return [(slice(first, last), slice(0, width))]
    columns = min(width, most)
    rows, parts = max(1, most // max(1, columns)), []
    for i in range(first, last, rows):
        end = min(i + rows, last)
        reached = int(n[i:end].max())
        parts += [(slice(i, end), slice(k, min(k + columns, reached))) for k in range(0, reached, columns)]
    return parts
