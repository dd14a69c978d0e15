"""Gradients of density fitting on the GPU: bra pairs with single shells, single shells with pairs and with each other.

For E = sum Gamma3[ab, P] (ab|P) + sum Gamma2[P, Q] (P|Q) the steps are those of `md4.gpu.forces`, with elements of
given tables in place of those of Gamma[ab, cd]. A single shell P is a pair with the unit function, as in
`md4.cpu.fitting_forces`, which has the same methods.
"""

from itertools import accumulate, pairwise, product
from typing import Any, NamedTuple

import numpy as np

from md4.gpu.buffers import as_buffer
from md4.gpu.forces import DeviceForces
from md4.gpu.kernels.gamma_table import launch_norms
from md4.gpu.tracks import in_turn
from md4.plan import own_ranges


class FittedList(NamedTuple):
    """A prepared list of pairs or of single shells.

    Attributes
    ----------
    prepared : md4.engine.PreparedPairs
    first, first_function : int
        The numbers of its first pair and of its first function, among all pairs or among all single shells.
    """

    prepared: Any
    first: int
    first_function: int

    @property
    def pairs(self):
        return self.prepared.pairs

    def __len__(self):
        return len(self.prepared)


class PlainBounds(NamedTuple):
    """`md4.shells.schwarz.GradientBounds` without the factors f, which are in the tables."""

    own: np.ndarray
    derivative: np.ndarray

    @classmethod
    def of(cls, bounds):
        return cls(bounds.own / bounds.factor, bounds.derivative / bounds.factor)


class TableTerms(NamedTuple):
    """In place of `md4.gpu.forces.Terms`: a table of Gamma, and the norms of its blocks.

    Attributes
    ----------
    table, of_blocks : Buffer
    tolerance : float
    places : dict
        Of each list, by its number, (first function, first pair) in the table.
    steps, norm_steps : tuple of int
        From one function of the bra, and of the ket, to the next in the table; and from one pair to the next.
    first : int
        Where the norm of the first one of the pairs of all lists with itself would be.
    """

    table: Any
    of_blocks: Any
    tolerance: float
    places: dict
    steps: tuple
    norm_steps: tuple
    first: int

    by_table, with_j, plane, single = True, False, None, 0.0

    def gamma_of(self, bra, ket):
        """Fields of `md4.gpu.kernels.gamma_table.GammaTable`."""
        first = self.places[bra][0] * self.steps[0] + self.places[ket][0] * self.steps[1]
        return self.table, first, *self.steps

    def norms_of(self, bra, ket):
        """Fields of `md4.gpu.kernels.gamma_table.TableNorms`."""
        first = self.places[bra][1] * self.norm_steps[0] + self.places[ket][1] * self.norm_steps[1]
        return self.of_blocks, first, *self.norm_steps, self.tolerance

    @property
    def norms(self):
        """The same of all lists, whose pairs are counted through."""
        return self.of_blocks, self.first, *self.norm_steps, self.tolerance

    @property
    def of_pairs(self):
        """Nothing: no bound is made of norms of pairs."""
        return self.of_blocks.part(0, (0,))

    def turned(self):
        """The same for exchanged bra and ket."""
        return self._replace(steps=self.steps[::-1], norm_steps=self.norm_steps[::-1])


class DeviceFittingForces(DeviceForces):
    """Derivatives of sums of integrals over three and two centres by the centres of the shells.

    Parameters
    ----------
    basis, pairs, blocks
        As of `md4.cpu.fitting_forces.HostFittingForces`, whose `rows`, `edges` and `left_out` it has, too.
    bounds, of_prims : list of md4.shells.schwarz.GradientBounds
        Those of all pairs and all single shells, and of their primitive pairs.

    Attributes
    ----------
    blocks : list of range
        Numbers of the lists of single shells of each block.
    found : ndarray, shape (nshell, 3)
        Derivatives by the centres of the shells.
    """

    extent = None

    def __init__(self, basis, pairs, blocks, bounds, of_prims):
        singles = [this for block in blocks for this in block]
        lists = [*numbered(pairs), *numbered(singles)]
        super().__init__(basis, lists, *(list(map(PlainBounds.of, these)) for these in (bounds, of_prims)))
        self.numbers, self.npair = range(len(pairs)), sum(map(len, lists[: len(pairs)]))
        self.blocks = [range(*ends) for ends in pairwise(accumulate(map(len, blocks), initial=len(pairs)))]
        sizes, counts = zip(*((this.pairs.nab, len(this)) for this in lists[len(pairs) :]))
        self.rows = np.cumsum([0, *np.repeat(sizes, counts)])
        self.edges = [0, *accumulate(sum(len(lists[n]) for n in block) for block in self.blocks)]
        self.found, self.left_out = np.zeros((basis.nshell, 3)), np.zeros(2)

    def add_three(self, backend, block, table, tolerance, response, part=0, parts=1):
        """Adds sum Gamma3[ab, P] d(ab|P) for a block of single shells; as for the CPU, with a table on the device."""
        singles, first = self.blocks[block], self.edges[block]
        places = {n: (self.lists[n].first_function, self.lists[n].first) for n in self.numbers}
        places |= {n: (int(self.lists[n].first_function - self.rows[first]), self.lists[n].first - first)
                   for n in singles}  # fmt: skip
        count = self.edges[block + 1] - first
        ways = [(self.numbers, singles), (singles, self.numbers)] if response else [(self.numbers, singles)]
        self.add_table(backend, table, places, (self.npair, count), ways, tolerance, (part, parts))

    def add_two(self, backend, table, tolerance, part=0, parts=1):
        """Adds sum Gamma2[P, Q] d(P|Q) for a symmetric Gamma2, shape (naux, naux); arguments as for `add_three`."""
        singles, found, left_out = range(len(self.numbers), len(self.lists)), self.found, self.left_out
        places = {n: (self.lists[n].first_function, self.lists[n].first) for n in singles}
        # derivatives by Q are those by P
        self.found, self.left_out = np.zeros_like(found), np.zeros(2)
        count = len(self.rows) - 1
        self.add_table(backend, table, places, (count, count), [(singles, singles)], tolerance / 2, (part, parts))
        self.found, self.left_out = found + 2 * self.found, left_out + (2, 4) * self.left_out

    def add_table(self, backend, table, places, counts, ways, tolerance, part):
        """Adds what a table gives derivatives by the first ones of lists (bras, kets) of some `ways`.

        Parameters
        ----------
        places : dict
            As of `TableTerms`.
        counts : tuple of int
            Pairs in a row of the table, and in a column.
        ways : list
            One, or two with exchanged lists; in the first one the bras are in a row of the table.
        part : tuple of int
            Part and parts.
        """
        context = backend.context
        for bras, kets in ways:
            self.check_lists(backend, bras, kets, {"norms of Gamma": 8 * counts[0] * counts[1]})
        norms = context.pool.get(max(1, counts[0] * counts[1]))
        steps, norm_steps = (1, table.shape[1]), (1, counts[0])
        sides = ((places[numbers[0]][1] - self.begin[numbers[0]]) * step for numbers, step in zip(ways[0], norm_steps))
        terms = TableTerms(as_buffer(table), norms, tolerance, places, steps, norm_steps, sum(sides))
        with in_turn(backend.tracks()) as contexts:
            for here, (bra, ket) in zip(contexts, product(*ways[0])):
                pair = self.lists[bra].prepared, self.lists[ket].prepared
                launch_norms(here, terms.gamma_of(bra, ket), *pair, terms.norms_of(bra, ket))
        for (bras, kets), of_way in zip(ways, (terms, terms.turned())):
            self.left_out += self.add(backend, bras, kets, of_way, self.found, *part)[1]
        context.pool.release(norms)

    def own_pairs(self, number, part, parts):
        """By the numbers among all pairs or single shells, whose lists depend on the memory."""
        this, count = self.lists[number], self.npair if number in self.numbers else len(self.rows) - 1
        cuts = (np.clip((own.start, own.stop), this.first, this.first + len(this)) - this.first
                for own in own_ranges(count, part, parts))  # fmt: skip
        return [slice(first, last) for first, last in (cut.tolist() for cut in cuts) if first < last]

    def result(self):
        """The sums by the centre of each shell, shape (nshell, 3); H matrices are dropped."""
        self.drop()
        return self.found


def numbered(lists):
    """The `FittedList` of each of some lists."""
    found, first, function = [], 0, 0
    for this in lists:
        found.append(FittedList(this.prepared, first, function))
        first, function = first + len(found[-1]), function + len(found[-1]) * this.prepared.facts.nab
    return found
