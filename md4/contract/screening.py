"""Screening: Schwarz bounds of shell pairs, sorted lists, and the shell quartets that survive.

For a shell pair ab let

    R_ab = max( max_a sqrt(sum_b (ab|ab)), max_b sqrt(sum_a (ab|ab)) ).

By the Schwarz inequality, for integrals and then for sums, a shell quartet adds at most this to an element of K or J:

    K_ac:  R_ab R_cd |D_bd|                      (and its permutations)
    J_ab:  R_ab R_cd 2 sqrt(min(n_c, n_d)) |D_cd|

with |D| the Frobenius norm of a block of the density matrix. A quartet is left out only if all of these are below the
tolerance. Pair lists are sorted by falling R, so that the ket pairs that survive with a bra pair are the first of their
list.
"""

from dataclasses import dataclass, field
from functools import cached_property
from math import isqrt

import numpy as np

from md4.cpu.threads import in_threads
from md4.plan import ListPair
from md4.shells.shell_pairs import ShellPairs, shell_kinds

# Primitive pairs with a Schwarz bound smaller than this times the tolerance are left out of their pair.
PRIMITIVE_SHARE = 1e-5
# Largest number of pairs whose (ab|ab) are made together. The block has all pairs with all pairs, but only its diagonal
# is used. Limits of its size: in bytes, and as a share of the memory that may be used.
SCHWARZ_PAIRS = 64
SCHWARZ_BYTES = 64 << 20
SCHWARZ_SHARE = 0.15
# Rows of a density matrix whose norms are made together.
NORM_ROWS = 64
# A rectangle of quartets ends before the bra pairs with which more than this share of it would be computed in vain.
TILE_WASTE = 0.1
# Largest number of steps in which a list of bra pairs is cut.
TILE_STEPS = 24


@dataclass
class PairList:
    """Shell pairs of one class, sorted by falling bound.

    Attributes
    ----------
    prepared : md4.engine.PreparedPairs
    bound : ndarray, shape (npair,)
        R_ab, in Hartree^(1/2).
    kinds : tuple of int
        Kind of shell (see `shell_kinds`) of a and of b.
    """

    prepared: object
    bound: np.ndarray = field(repr=False)
    kinds: tuple

    @property
    def pairs(self):
        return self.prepared.pairs

    @cached_property
    def negative(self):
        """-bound, which ascends, as `numpy.searchsorted` needs it."""
        return -self.bound

    def __len__(self):
        return len(self.bound)


@dataclass
class Screened:
    """Two lists, some quartets of which survive.

    Attributes
    ----------
    bra, ket : PairList
    factor : ndarray, shape (len(bra),)
        The largest density norm beside each bra pair; see `DensityNorms.beside`.
    numbers : tuple of int
        Where bra and ket are among all lists.
    """

    bra: PairList
    ket: PairList
    factor: np.ndarray = field(repr=False)
    numbers: tuple

    @property
    def same(self):
        """Whether they are one list, of which each unordered quartet counts once."""
        return self.bra is self.ket

    def count(self, tolerance):
        """`survivors` of the two."""
        return survivors(self.bra, self.ket, self.factor, tolerance, self.same)

    def list_pair(self, lists, part, parts):
        """`ListPair` with the bounds, of another worker's `lists`; a part of it."""
        bra, ket = (lists[n].prepared for n in self.numbers)
        return ListPair(bra, ket, self.same, self.bra.bound * self.factor, self.ket.bound, part, parts)


@dataclass
class Statistics:
    """Statistics of a build.

    Attributes
    ----------
    computed : int
        Number of unique shell quartets that were evaluated.
    skipped : int
        Number of those that were left out.
    wanted : int
        Number of those that had to be evaluated. The others in `computed` fill up rectangles.
    seconds : float
        Wall time.
    busy : tuple of float
        Seconds of each worker, which is a device or a process, from its first quartet until it was done with its last.
    sums : float
        Seconds in which what the workers have summed was added up and fetched, after the last of them was done.
    """

    computed: int = 0
    skipped: int = 0
    wanted: int = 0
    seconds: float = field(default=0.0, compare=False)
    busy: tuple = field(default=(), compare=False, repr=False)
    sums: float = field(default=0.0, compare=False, repr=False)


def schwarz_bounds(engine, prepared):
    """R_ab of all pairs of a list, shape (npair,)."""
    pairs, backend = prepared.pairs, engine.backend
    bounds = backend.bounds(len(pairs))
    if hasattr(bounds, "take"):
        bounds.take(prepared)
        return bounds.result()
    room = min(SCHWARZ_BYTES, int(SCHWARZ_SHARE * max(0, backend.memory_left())))
    size = max(1, min(len(pairs), SCHWARZ_PAIRS, isqrt(room // 8) // pairs.nab))
    for first in range(0, len(pairs), size):
        piece = prepared[first : min(first + size, len(pairs))]
        block = backend.scratch((len(piece), len(piece), pairs.na, pairs.nb, pairs.na, pairs.nb))
        engine.evaluate(piece, piece, block)
        bounds.add(block, first)
        del block  # before the next one is allocated
    return bounds.result()


def pair_bounds(engine, every, tolerance, worker=0, workers=1):
    """R_ab of all lists in `every` (`pairs_by_kind`), or the part of one of several workers, as a list of arrays."""
    parts = [pairs[len(pairs) * worker // workers : len(pairs) * (worker + 1) // workers] for pairs in every]
    bounds, used = [np.zeros(len(pairs)) for pairs in parts], [n for n, pairs in enumerate(parts) if len(pairs)]
    lists = engine.prepare_lists([parts[n] for n in used], engine.bra_basis, PRIMITIVE_SHARE * tolerance)
    for n, prepared in zip(used, lists):
        if prepared.pairs.nprim:
            bounds[n] = schwarz_bounds(engine, prepared)
            prepared.drop()
    return bounds


def sorted_lists(engine, every, bounds, tolerance, hermite_bytes):
    """`PairList` of all lists, sorted by falling bound, without pairs that no quartet can need.

    Parameters
    ----------
    engine : md4.Engine
    every : list of ndarray
        The lists of the engine's basis by `pairs_by_kind`.
    bounds : list of ndarray
        Their R_ab by `pair_bounds`.
    tolerance : float
        The smallest tolerance for which the lists will be used.
    hermite_bytes : int
        Largest number of bytes of the H matrices of one list in one form; longer lists are cut.
    """
    basis = engine.bra_basis
    kind = shell_kinds(basis, engine.backend.sums.mixed_shells)
    largest = max((bound.max() for bound in bounds), default=0.0)
    chosen = []
    for pairs, bound in zip(every, bounds):
        order = np.argsort(-bound, kind="stable")
        order = order[bound[order] * largest > PRIMITIVE_SHARE * tolerance]
        chosen += [(pairs[order[piece]], bound[order[piece]]) for piece in cut(engine, pairs[order], hermite_bytes)]
    prepared = engine.prepare_lists([pairs for pairs, _ in chosen], basis, PRIMITIVE_SHARE * tolerance)
    return [PairList(one, bound, tuple(kind[pairs[0]].tolist())) for one, (pairs, bound) in zip(prepared, chosen)]


def cut(engine, pairs, hermite_bytes):
    """Slices of a list whose H matrices take at most `hermite_bytes`, by the pair with the most primitives."""
    if len(pairs) == 0:
        return []
    counts = np.multiply(*engine.bra_basis.nprims[pairs].T)
    most = int(np.argmax(counts))
    head = ShellPairs.of_basis(engine.bra_basis, pairs[most : most + 1], np.array([0, counts[most]]))
    size = max(1, hermite_bytes // max(1, engine.backend.hermite_bytes(head)))
    return [slice(n, n + size) for n in range(0, len(pairs), size)]


def largest_norms(basis, densities):
    """The largest Frobenius norm |D_ab| or |D_ba| of the blocks of some densities, shape (nshell, nshell)."""
    square, loc = np.zeros((basis.nshell, basis.nshell)), basis.ao_loc
    shells = -(-NORM_ROWS * basis.nshell // basis.nao)  # whose rows stay in a cache

    def rows(n):
        a, b = n * shells, min((n + 1) * shells, basis.nshell)
        for d in densities:
            part = d[loc[a] : loc[b]]
            of_rows = np.add.reduceat(part * part, loc[:-1], axis=1)
            np.maximum(square[a:b], np.add.reduceat(of_rows, loc[a:b] - loc[a], axis=0), out=square[a:b])

    in_threads(-(-basis.nshell // shells), rows, densities.size)
    return np.sqrt(np.maximum(square, square.T))


class DensityNorms:
    """Frobenius norms of the blocks of one or more density matrices, as screening needs them.

    Parameters
    ----------
    basis : Basis
    densities : ndarray, shape (n, nao, nao)
        Density matrices; the largest norm of all of them counts.
    with_j, with_k : bool
    mixed : int
        As in `shell_kinds`.
    """

    def __init__(self, basis, densities, with_j, with_k, mixed):
        norm = largest_norms(basis, densities)
        kind, width = shell_kinds(basis, mixed), np.sqrt(np.diff(basis.ao_loc))
        self.exchange = np.stack([norm[:, kind == k].max(axis=1) for k in range(kind.max() + 1)])
        self.coulomb = 2 * np.minimum(width[:, None], width) * norm
        if not with_k:
            self.exchange[:] = 0.0
        if not with_j:
            self.coulomb[:] = 0.0

    def of_pairs(self, pairs):
        """Norms for J of the density blocks of the pairs of a list, shape (npair,)."""
        return self.coulomb[pairs[:, 0], pairs[:, 1]]

    def beside(self, pairs, own, kinds, other):
        """The largest density norm by which the bounds of each bra pair and any ket pair of `kinds` are multiplied.

        `own` is `of_pairs(pairs)`, and `other` is the largest of these norms of the ket list. The result has the shape
        (npair,).
        """
        rows = np.maximum(self.exchange[kinds[0]], self.exchange[kinds[1]])
        exchange = np.maximum(rows[pairs[:, 0]], rows[pairs[:, 1]])
        return np.maximum(np.maximum(exchange, own), other)


def counts(screened, tolerance):
    """`Screened.count` of each, by several threads."""
    found = [None] * len(screened)

    def count(n):
        found[n] = screened[n].count(tolerance)

    in_threads(len(screened), count, 8 * sum(len(this.bra) for this in screened))
    return found


def list_pairs(lists, norms, tolerance, swapped):
    """List of `Screened` of all unordered pairs of lists that have survivors; `swapped` decides which is the ket."""
    own = [norms.of_pairs(this.pairs.pairs) for this in lists]
    top, found = [float(n.max()) for n in own], []
    for i, one in enumerate(lists):
        for k, two in enumerate(lists[: i + 1]):
            b, c = (k, i) if swapped(one.pairs, two.pairs) else (i, k)
            bra, ket = lists[b], lists[c]
            factor = norms.beside(bra.pairs.pairs, own[b], ket.kinds, top[c])
            if (bra.bound * factor).max() * ket.bound[0] >= tolerance:
                found.append(Screened(bra, ket, factor, (b, c)))
    return found


def survivors(bra, ket, factor, tolerance, triangle):
    """The number of ket pairs, counted from the first, that each bra pair needs, shape (len(bra),).

    A quartet survives if bound_ab bound_cd factor_ab >= tolerance. If `triangle` is true, bra and ket are the same
    list, and only ket pairs up to the bra pair itself count.
    """
    with np.errstate(divide="ignore", invalid="ignore"):  # 0 / 0, from a tolerance of 0, is sorted behind all bounds
        least = tolerance / (bra.bound * factor)
    n = np.searchsorted(ket.negative, -least, side="right")
    return np.minimum(n, np.arange(1, len(n) + 1)) if triangle else n


def tiles(n, most, least):
    """Rectangles (bra slice, ket slice) that cover the survivors `n` with little waste.

    Parameters
    ----------
    n : ndarray of int, shape (nbra,)
        The number of ket pairs, counted from the first, that each bra pair needs.
    most, least : int
        Largest number of quartets of a rectangle, and the number below which it does not end whatever it wastes.
    """
    used, least = n.nonzero()[0], max(1, least)
    if len(used) == 0:
        return []
    n = n[: used[-1] + 1]
    width, wanted = int(n.max()), int(n.sum())
    if wanted <= least or len(n) * width <= (1 + TILE_WASTE) * wanted:
        return split_tile(0, len(n), width, most)
    edges = np.arange(0, len(n), max(1, len(n) // TILE_STEPS))
    ends = [*edges[1:].tolist(), len(n)]
    out, first, width, inside = [], 0, 0, 0
    for start, end, widest, total in zip(edges.tolist(), ends, *band(n, edges)):
        if inside >= least and (end - first) * max(width, widest) > (1 + TILE_WASTE) * (inside + total):
            out += split_tile(first, start, width, most)
            first, width, inside = start, 0, 0
        width, inside = widest if widest > width else width, inside + total
    return out + split_tile(first, len(n), width, most)


def band(n, edges):
    """Maximum and sum of `n` from each edge to the next."""
    return np.maximum.reduceat(n, edges).tolist(), np.add.reduceat(n, edges).tolist()


def split_tile(first, last, width, most):
    """The rectangle of bra pairs first..last and `width` ket pairs, in parts of at most `most` quartets."""
    if (last - first) * width <= most:
        return [(slice(first, last), slice(0, width))]
    columns = min(width, most)
    rows = max(1, most // max(1, columns))
    return [
        (slice(i, min(i + rows, last)), slice(k, min(k + columns, width)))
        for i in range(first, last, rows)
        for k in range(0, width, columns)
    ]
