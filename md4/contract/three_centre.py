"""Integrals over three and two centres, (ij|P) and (P|Q), of the shells of a basis and of an auxiliary basis.

A single shell P is a shell pair of P with the unit function (`md4.shells.basis.Basis.joined`), so that they are blocks
of pairs like all others, only with fewer indices. `tensor_request` is for tensors in PySCF's order. `ThreeCentre` is
for density fitting: it makes a matrix whose columns are in the order of the blocks, so that kernels write them there.
"""

from copy import copy
from functools import cached_property
from itertools import combinations_with_replacement, pairwise, product

import numpy as np

from md4.contract.screening import schwarz_bounds
from md4.contract.tensor import Request, shell_numbers
from md4.contract.workspace import HermiteStore, least_block
from md4.engine import Engine, check_basis
from md4.errors import ArgumentError
from md4.method.operators import check_order
from md4.method.scatter import THREE_CENTRE, TWO_CENTRE
from md4.plan import ListPair
from md4.shells.basis import Basis
from md4.shells.shell_pairs import unique_pairs_by_class
from md4.support.arguments import checked_choice, checked_real

# Kernels are compiled ahead for all columns, and for one part of so many: short lists may take others.
SHARE_OF_COLUMNS = 16
# Share of the memory that may be used which the H matrices that are kept between blocks may take.
HERMITE_SHARE = 0.2
# Operators whose integrals are bounded by those of 1/r.
BELOW_COULOMB = ("coulomb", "erf", "erfc")


def tensor_request(basis, aosym, shls_slice, ranges):
    """The `Request` for (ij|k), or for (i|k), over a basis from `Basis.joined`.

    Parameters
    ----------
    basis : Basis
    aosym : str
        's1' or 's2ij'; only 's1' for two centres.
    shls_slice : sequence of int or None
        Ranges (i0, i1, j0, j1, k0, k1) of shells, or (i0, i1, k0, k1).
    ranges : tuple
        The shells (first, last + 1) that each index may have, from the first of which a slice counts.

    Raises
    ------
    ArgumentError, UnsupportedError
        As `md4.contract.tensor.Request.checked`.
    """
    two = len(ranges) == 2
    aosym = checked_choice("aosym", aosym, ("s1",) if two else tuple(THREE_CENTRE))
    if shls_slice is not None:
        ranges = checked_ranges(shls_slice, ranges)
    check_order(sum(int(basis.classes[first:last, 0].max()) for first, last in ranges))
    unit, ends = (basis.unit, basis.unit + 1), None
    if two:
        return Request(TWO_CENTRE, (ranges[0], unit, ranges[1], unit))
    if aosym == "s2ij" and ranges[0] != ranges[1]:
        (first, last), whole = ranges[0], (0, ranges[0][1])
        if ranges[1][0] > 0 or ranges[1][1] < last:
            raise ArgumentError("aosym 's2ij' needs a range of j that is that of i, or all j <= i; use 's1' otherwise.")
        ranges, ends = (whole, *ranges[1:]), tuple(basis.ao_loc[[first, last]].tolist())
    return Request(THREE_CENTRE[aosym], (*ranges, unit), ends)


def checked_ranges(shls_slice, ranges):
    """The ranges of a slice of a tensor whose indices have these ranges; ArgumentError if it is something else."""
    ends = shell_numbers(shls_slice, 2 * len(ranges))
    asked, shells = list(zip(ends[::2], ends[1::2])), [last - first for first, last in ranges]
    if not all(0 <= first < last <= most for (first, last), most in zip(asked, shells)):
        raise ArgumentError(
            f"shls_slice {tuple(ends)} must hold non-empty ranges; the indices have "
            f"{', '.join(map(str, shells))} shells."
        )
    return tuple((begin + first, begin + last) for (begin, _), (first, last) in zip(ranges, asked))


class ThreeCentre:
    """(P|ij) as a matrix: a row for each auxiliary function P, a column for each product of AOs i and j.

    Parameters
    ----------
    basis, auxiliary : Basis
        Both spherical, or both Cartesian.
    operator, backend, stream, max_memory, device
        As those of `md4.Engine`.
    cutoff : float
        Shell pairs ij are left out if no |(ij|P)| can reach it, by the Schwarz inequality; of 1/r, erf and erfc.
    pairs : list of ndarray, optional
        The attribute `pairs` of another one, whose pairs are taken instead of those of the cutoff.

    Attributes
    ----------
    engine : Engine
        Over the joined basis; its lock is held by calls.
    naux, ncol : int
        Numbers of rows and of columns.
    pairs : list of ndarray of int64, shapes (n, 2)
        The shell pairs of each class.
    rows, cols : ndarray of int64, shape (ncol,)
        AO indices i and j of each column. Columns run shell pair by shell pair, in a pair as [a][b]. A pair of two
        shells is there once, all products of a shell with itself are, so (i, j) and (j, i) both.
    weights : ndarray, shape (ncol,)
        1 for a column of a shell with itself, else 2: sum_ij D_ij (ij|P) = sum_c weights[c] D[rows[c], cols[c]] T[P, c]
        for a symmetric D.
    auxiliary_order : ndarray of int64, shape (naux,)
        The auxiliary function of each row.
    edges : ndarray of int64, shape (npair + 1,)
        First column of each shell pair, and the number of columns.

    Raises
    ------
    ArgumentError
        Basis sets that do not go together, or a cutoff with another operator.
    UnsupportedError
        Angular momenta that add up to more than 32.
    """

    def __init__(
        self, basis, auxiliary, operator=None, backend="auto", stream=None, max_memory=None, device=None, cutoff=0.0,
        pairs=None,
    ):  # fmt: skip
        joined = Basis.joined([check_basis(this).segmented() for this in (basis, auxiliary)])
        self.engine = Engine(joined, None, operator, backend, stream, max_memory, device)
        check_order(2 * max(2 * joined.parts[0].lmax, joined.parts[1].lmax) if cutoff else self.order)
        self.basis, self.nao, self.naux = joined, basis.nao, auxiliary.nao
        shells, orbital = np.arange(joined.unit), np.arange(len(joined.parts[0]))
        self.single = unique_pairs_by_class(joined, shells[len(orbital) :], [joined.unit])
        self.pairs = unique_pairs_by_class(joined, orbital, orbital) if pairs is None else pairs
        if checked_real("cutoff", cutoff, 0) and pairs is None:
            self.screen(cutoff)
        self.edges, different = columns_of(joined, self.pairs)
        self.weights = np.where(different, 2.0, 1.0)
        self.ncol = int(self.edges[-1])
        self.auxiliary_order = aos_of(joined, [pairs[:, :1] for pairs in self.single])[0] - self.nao
        self.rows, self.cols = aos_of(joined, self.pairs)

    def with_operator(self, operator):
        """The same pairs with another operator; with a cutoff it is one that the bounds of 1/r hold for."""
        other = copy(self)
        other.engine = self.engine.with_operator(operator)
        return other

    def with_engine(self, engine):
        """The same pairs with another engine over the joined basis, for which nothing is prepared."""
        other = copy(self)
        other.engine = engine
        for made in ("prepared", "store", "single_rows"):
            other.__dict__.pop(made, None)
        return other

    @property
    def ranges(self):
        """Shells (first, last + 1) of the basis, of the auxiliary basis, and the unit function."""
        one, other = (len(part) for part in self.basis.parts)
        return (0, one), (one, one + other), (self.basis.unit, self.basis.unit + 1)

    @property
    def order(self):
        """Largest sum of angular momenta."""
        one, other = self.engine.bra_basis.parts
        return max(2 * one.lmax + other.lmax, 2 * other.lmax)

    def screen(self, cutoff):
        """Leaves out shell pairs whose integrals are all below the cutoff."""
        kind = self.engine.operator.kind
        if kind not in BELOW_COULOMB:
            raise ArgumentError(f"a cutoff needs one of the operators {', '.join(BELOW_COULOMB)}, not {kind}.")
        engine = self.engine.with_operator("coulomb")
        with engine.lock:
            orbital, auxiliary, unit = self.ranges
            need = max(least_block(engine, orbital), least_block(engine, *[auxiliary, unit] * 2))
            engine.backend.check_fits(need, "the Schwarz bound of one pair of shells takes")
            self.pairs = screened(engine, self.pairs, cutoff, "bounds", self.single)

    @cached_property
    def prepared(self):
        """`PreparedPairs` of all lists: of pairs, and of single shells."""
        return [list(self.engine.prepare_lists(lists, self.basis)) for lists in (self.pairs, self.single)]

    @cached_property
    def store(self):
        """Keeps H matrices between blocks."""
        return HermiteStore(int(HERMITE_SHARE * self.engine.backend.memory_left()), self.engine.backend)

    def compile_ahead(self, progress=None):
        """Compiles what is missing for `integrals` and `metric`."""

        def work(backend):
            self.with_engine(self.engine.with_backend(backend)).rehearse()

        self.engine.backend.compile_ahead("tensor", self.basis, work, progress, part="matrix")

    def rehearse(self):
        """Makes all integrals, and some columns only."""
        self.metric()
        for last in (self.ncol, int(self.edges[len(self.edges) // SHARE_OF_COLUMNS])):
            self.integrals(0, last)

    def integrals(self, first=0, last=None, out=None):
        """(P|ij) of the columns first to last - 1, both of which must be among `edges`.

        Parameters
        ----------
        first, last : int
        out : array, optional
            Where they are written: C-contiguous float64 of the result's shape, as that of `md4.Engine.compute`.

        Returns
        -------
        array, shape (naux, last - first), in Hartree
            On the GPU a device array, ready once the engine's stream has reached that point.

        Raises
        ------
        ArgumentError
            Columns that are no edges.
        MemoryLimitError
            The result and the least workspace exceed the memory that may be used.
        """
        last = self.ncol if last is None else last
        place = np.searchsorted(self.edges, (first, last))
        if not 0 <= first <= last <= self.ncol or (self.edges[place] != (first, last)).any():
            raise ArgumentError(f"columns {first} to {last} must be edges of shell pairs, from 0 to {self.ncol}.")
        with self.engine.lock:
            out = self.result((self.naux, last - first), out)
            parts = {part.whole: (part, column) for part, column in slices_of(self.prepared[0], *place.tolist())}
            pairs = [ListPair(bra, ket, same=False) for bra, ket in product(parts, self.single_rows)]
            for batch in self.store.batches(pairs):
                some = [pair._replace(bra=parts[pair.bra][0]) for pair in batch]
                self.engine.backend.fill_matrix(self.engine, out, some, dict(parts.values()), self.single_rows)
        return out

    @cached_property
    def single_rows(self):
        """The first row of each prepared list of single shells, a dict."""
        lists = self.prepared[1]
        return dict(zip(lists, np.cumsum([0, *(len(this) * this.facts.nab for this in lists)]).tolist()))

    def metric(self):
        """(P|Q), an array of shape (naux, naux) as from `integrals`; rows and columns are in `auxiliary_order`.

        Only the lower triangle, row >= column, is meant: blocks above it are not written.
        """
        backend = self.engine.backend
        with self.engine.lock:
            out = self.result((self.naux, self.naux), None)
            for (bra, column), (ket, row) in combinations_with_replacement(self.single_rows.items(), 2):
                self.store.touch(ket, bra)
                self.store.touch(bra, ket)
                self.engine.evaluate(bra, ket, backend.matrix_block(out, row, column, block_shape(bra, ket)))
        return out

    def result(self, shape, out):
        """`out`, which is checked, or a new array; MemoryLimitError if it does not fit."""
        backend = self.engine.backend
        if out is not None:
            return backend.result(shape, out)
        orbital, *single = self.ranges
        workspace = least_block(self.engine, orbital, orbital, *single)
        backend.check_fits(
            8 * shape[0] * shape[1] + workspace,
            f"{shape[0]} x {shape[1]} integrals over three centres and the least workspace take",
            "ask for fewer columns or raise max_memory",
        )  # fmt: skip
        return backend.result(shape)


def columns_of(basis, lists):
    """(first column of each shell pair, and their number; whether the pair of each column has two shells)."""
    counts = np.diff(basis.ao_loc)
    sizes = [int(counts[pairs[0]].prod()) for pairs in lists]
    edges = np.cumsum([0, *np.repeat(sizes, [len(pairs) for pairs in lists])])
    different = [np.repeat(pairs[:, 0] != pairs[:, 1], size) for pairs, size in zip(lists, sizes)]
    return edges, np.concatenate([np.zeros(0, dtype=bool), *different])


def ranges_between(edges, first, last, most):
    """(first, last) of ranges that follow one another, between edges: of at most `most`, or of one shell pair."""
    cuts = [first]
    while cuts[-1] < last:
        after = np.searchsorted(edges, cuts[-1], side="right")
        furthest = np.searchsorted(edges, cuts[-1] + most, side="right") - 1
        cuts.append(min(last, int(edges[max(after, furthest)])))
    return list(pairwise(cuts))


def screened(engine, lists, cutoff, part, partners=()):
    """Lists without the pairs whose integrals are all below the cutoff, by bounds of 1/r; the engine's lock is held.

    The integrals are those with `partners`, or with each other. `part` is what is compiled ahead.
    """
    engine, every = engine.with_operator("coulomb"), [*partners, *lists]
    engine.backend.compile_ahead(
        "tensor", engine.bra_basis, lambda dry: schwarz_bounds(engine.with_backend(dry), every), part=part
    )
    bounds = [exact for exact, _ in schwarz_bounds(engine, every)]
    largest = max((one.max() for one in bounds[: len(partners) or None]), default=0.0)
    kept = [pairs[one * largest >= cutoff] for pairs, one in zip(lists, bounds[len(partners) :])]
    return [pairs for pairs in kept if len(pairs)]


def block_shape(bra, ket):
    """Shape (n_ij, n_kl, n_a, n_b, n_c, n_d) of the integrals of two lists."""
    return len(bra), len(ket), bra.facts.na, bra.facts.nb, ket.facts.na, ket.facts.nb


def aos_of(basis, lists):
    """The AOs of each index of all function products of pair lists, or of functions of shells: shape (n, count)."""
    loc, found = basis.ao_loc, []
    for shells in lists:
        sizes = [int(loc[shell + 1] - loc[shell]) for shell in shells[0].tolist()]
        places = np.stack([place.ravel() for place in np.indices(sizes)])
        found.append((loc[shells].T[:, :, None] + places[:, None]).reshape(len(sizes), -1))
    return np.concatenate(found, axis=1) if found else np.zeros((2, 0), dtype=np.int64)


def slices_of(lists, first, last):
    """(slice of a prepared list, its first column) of the shell pairs first to last - 1, counted over all lists."""
    begin, column = 0, 0
    for prepared in lists:
        here, end = max(first - begin, 0), min(last - begin, len(prepared))
        if here < end:
            yield prepared[here:end], column
            column += (end - here) * prepared.facts.nab
        begin += len(prepared)
