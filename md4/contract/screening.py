"""Screening: Schwarz bounds of shell pairs, and lists that are sorted by them.

For a shell pair ab let

    R_ab = max( max_a sqrt(sum_b (ab|ab)), max_b sqrt(sum_a (ab|ab)) ).

By the Schwarz inequality, for integrals and then for sums, a shell quartet adds at most this to an element of K or J:

    K_ac:  R_ab R_cd |D_bd|                      (and its permutations)
    J_ab:  R_ab R_cd 2 sqrt(min(n_c, n_d)) |D_cd|

with |D| the Frobenius norm of a block of the density matrix. A quartet is left out only if all of these are below the
tolerance:

    R_ab R_cd max( |D_ac|, |D_ad|, |D_bc|, |D_bd|, f_ab |D_ab|, f_cd |D_cd| ) < tolerance,  f_ab = 2 sqrt(min(n_a, n_b))

Pair lists are sorted by falling R, or by falling upper bounds of R that many pairs share: these are sorted by their
shells, so that neighbours add to the same rows of J and K (`md4.backends.Sums.bound_step`). With the largest |D| of a
and b with all shells of the kinds of c and d, the ket pairs that survive with a bra pair are the first of their list.
`md4.contract.survivors` counts them. Where a GPU digests integrals in the kernel that makes them, each quartet of these
is asked by its own blocks (`md4.gpu.kernels.select_quartets`). Else rectangles that cover them are computed.

Where contraction coefficients have both signs, primitives cancel, and the rounding error of a sum goes with the moduli
of its terms. A measure of these is T_ab: R_ab of the same shells with the moduli of their coefficients. The error also
grows with the square root of the number of terms, as rounding is about as often up as down. So T_ab is multiplied by
sqrt(n / 32) for n > 32 primitive pairs. Quartets are computed in single precision where T T |D| is small enough. R_ab
contains the rounding error that T_ab allows it, so that cancellation in (ab|ab) hides no quartet.
"""

from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from math import hypot, sqrt

import numpy as np

from md4.plan import SQUARE_BYTES
from md4.shells.schwarz import ROUNDING, term_growth
from md4.shells.shell_pairs import PRIMITIVE_CUTOFF, ShellPairs, shell_kinds

# Primitive pairs with a Schwarz bound smaller than this times the tolerance are left out of their pair.
PRIMITIVE_SHARE = 1e-5
# Pairs of the longest kind by which lists are cut: no backend has more of them side by side.
HEAD = 32
# The (ab|ab) of some pairs are the diagonal of a block that has all of these pairs with all of them. Besides
# `SQUARE_BYTES`, this share of the memory that may be used limits its size.
SCHWARZ_SHARE = 0.15


@dataclass
class PairList:
    """Shell pairs of one class, sorted by falling bound.

    Attributes
    ----------
    prepared : md4.engine.PreparedPairs
    exact, terms : ndarray, shape (npair,)
        R_ab and T_ab, in Hartree^(1/2).
    bound : ndarray, shape (npair,)
        Upper bounds of R_ab that fall.
    kinds : tuple of int
        Kind of shell (see `shell_kinds`) of a and of b.
    """

    prepared: object
    exact: np.ndarray = field(repr=False)
    terms: np.ndarray = field(repr=False)
    bound: np.ndarray = field(repr=False)
    kinds: tuple

    @property
    def pairs(self):
        return self.prepared.pairs

    def __len__(self):
        return len(self.bound)


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
        Number of those that had to be evaluated. The others in `computed` fill up rectangles. Where quartets are
        selected one by one, those count that were.
    seconds : float
        Wall time.
    busy : tuple of float
        Seconds of each worker, which is a device or a process, from its first quartet until it was done with its last.
    sums : float
        Seconds in which what the workers have summed was added up and fetched, after the last of them was done.
    error_bound, error_estimate : float
        Of a gradient, in Hartree/Bohr: the sum of the bounds of all that was left out, which the error of no component
        by this can exceed, and the root of the sum of their squares, about the error to expect; see the page "Theory".
        There a quartet of two different pairs counts twice, once for the derivatives of each.
    """

    computed: int = 0
    skipped: int = 0
    wanted: int = 0
    seconds: float = field(default=0.0, compare=False)
    busy: tuple = field(default=(), compare=False, repr=False)
    sums: float = field(default=0.0, compare=False, repr=False)
    error_bound: float = field(default=0.0, compare=False, repr=False)
    error_estimate: float = field(default=0.0, compare=False, repr=False)

    def add(self, other):
        """Adds what another part of a gradient has to it."""
        for name in ("computed", "skipped", "wanted", "seconds", "error_bound"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.error_estimate = hypot(self.error_estimate, other.error_estimate)
        self.busy = tuple(map(sum, zip_longest(self.busy, other.busy, fillvalue=0.0)))


def schwarz_bounds(engine, lists, cutoff=PRIMITIVE_CUTOFF):
    """R_ab and T_ab of all pairs of some lists, which are those of `Engine.prepare_lists`, as arrays (2, npair).

    A pair without primitive pairs above `cutoff` has R_ab = 0.
    """
    basis = engine.bra_basis
    alternating = [np.flatnonzero(basis.alternating[pairs].any(axis=1)) for pairs in lists]
    found = [np.stack([exact, exact]) for exact in diagonal_norms(engine, basis, lists, cutoff)]
    if any(map(len, alternating)):
        signless = [pairs[where] for pairs, where in zip(lists, alternating)]
        for both, where, norms in zip(found, alternating, diagonal_norms(engine, basis.absolute, signless, cutoff)):
            exact = np.hypot(both[0, where], sqrt(ROUNDING) * norms)
            both[:, where] = exact, np.maximum(exact, norms)
    for both, pairs in zip(found, lists):
        both[1] *= term_growth(basis.nprims[pairs].prod(axis=1))
    return found


def diagonal_norms(engine, basis, lists, cutoff):
    """R_ab of all pairs of some lists of a basis of the engine's shells, as a list of arrays (npair,).

    The device is asked for them once, after the last list.
    """
    edges = np.cumsum([0, *map(len, lists)]).tolist()
    used = [(pairs, first) for pairs, first in zip(lists, edges) if len(pairs)]
    if not used:
        return [np.zeros(0) for _ in lists]
    bounds = engine.backend.bounds(engine, edges[-1], block_room(engine, [pairs for pairs, _ in used]))
    for (_, first), prepared in zip(used, engine.prepare_lists([pairs for pairs, _ in used], basis, cutoff)):
        if prepared.nprim:
            bounds.take(prepared, first)
            prepared.drop()
    return np.split(bounds.result(), edges[1:-1])


def block_room(engine, lists):
    """Bytes of the largest block of the pairs of any of the lists with themselves, within the limits."""
    counts = np.diff(engine.bra_basis.ao_loc)
    sizes = [int(np.prod(counts[pairs[0]])) for pairs in lists]
    most = max(8 * (size * len(pairs)) ** 2 for size, pairs in zip(sizes, lists))
    share = int(SCHWARZ_SHARE * max(0, engine.backend.memory_left()))
    return max(8 * max(sizes) ** 2, min(most, SQUARE_BYTES, share))


def pair_bounds(engine, every, tolerance, worker=0, workers=1):
    """`schwarz_bounds` of all lists in `every` (`pairs_by_kind`), or the part of one of several workers."""
    parts = [pairs[len(pairs) * worker // workers : len(pairs) * (worker + 1) // workers] for pairs in every]
    return schwarz_bounds(engine, parts, PRIMITIVE_SHARE * tolerance)


def sorted_lists(engine, every, bounds, tolerance, hermite_bytes):
    """`PairList` of all lists, sorted by falling bound, without pairs that no quartet can need.

    Parameters
    ----------
    engine : md4.Engine
    every : list of ndarray
        The lists of the engine's basis by `pairs_by_kind`.
    bounds : list of ndarray
        Their R_ab and T_ab by `pair_bounds`.
    tolerance : float
        The smallest tolerance for which the lists will be used.
    hermite_bytes : int
        Largest number of bytes of the H matrices of one list in one form; longer lists are cut.
    """
    basis = engine.bra_basis
    sums = engine.backend.sums
    kind, functions = shell_kinds(basis, sums.mixed_shells), np.diff(basis.ao_loc)
    largest = max((bound.max() for bound, _ in bounds), default=0.0)
    chosen = []
    for pairs, (bound, terms) in zip(every, bounds):
        upper = raised(bound, sums.bound_step(int(functions[pairs[:1]].prod())))
        order = np.lexsort((pairs[:, 1], pairs[:, 0], -upper) if upper is not bound else (-bound,))
        order = order[bound[order] * largest > PRIMITIVE_SHARE * tolerance]
        for piece in cut(engine, pairs[order], hermite_bytes):
            chosen.append([array[order[piece]] for array in (pairs, bound, terms, upper)])
    prepared = engine.prepare_lists([pairs for pairs, *_ in chosen], basis, PRIMITIVE_SHARE * tolerance)
    return [PairList(one, *found, tuple(kind[pairs[0]].tolist())) for one, (pairs, *found) in zip(prepared, chosen)]


def merged_lists(engine, lists, tolerance, hermite_bytes):
    """`PairList` of each class of some `sorted_lists`, whatever the kinds of their shells; arguments as there.

    The lists themselves, if all of a class are of one kind.
    """
    of_classes = {}
    for this in lists:
        of_classes.setdefault(this.pairs.shell_class, []).append(this)
    if all(len({this.kinds for this in these}) == 1 for these in of_classes.values()):
        return lists
    every = [np.concatenate([this.pairs.pairs for this in these]) for these in of_classes.values()]
    bounds = [np.concatenate([(this.exact, this.terms) for this in these], axis=1) for these in of_classes.values()]
    return sorted_lists(engine, every, bounds, tolerance, hermite_bytes)


def raised(bounds, step):
    """Bounds raised to the next powers of 2^step, so that many are the same; themselves for step 0."""
    if step == 0:
        return bounds
    _, exponents = np.frexp(bounds)
    return np.where(bounds > 0, np.ldexp(1.0, -(-exponents // step) * step), 0.0)


def cut(engine, pairs, hermite_bytes):
    """Slices of a list whose H matrices take at most `hermite_bytes`, by what primitives of the longest pair take."""
    if len(pairs) == 0:
        return []
    counts = np.multiply(*engine.bra_basis.nprims[pairs].T)
    most = int(np.argmax(counts))
    head = ShellPairs.of_basis(engine.bra_basis, pairs[[most] * HEAD], counts[most] * np.arange(HEAD + 1))
    prims = hermite_bytes * HEAD * int(counts[most]) // max(1, engine.backend.hermite_bytes(head))
    ends, edges = np.cumsum(counts), [0]
    while edges[-1] < len(pairs):
        before = ends[edges[-1] - 1] if edges[-1] else 0
        end = int(np.searchsorted(ends, before + prims, side="right"))
        edges.append(max(end, edges[-1] + 1))
    return [slice(*both) for both in pairwise(edges)]
