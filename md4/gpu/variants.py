"""Which kernel variants a basis, or all classes up to an angular momentum, ask for; what `md4 warmup` compiles.

Kernels depend on the classes of a bra and a ket list, on the largest number of primitive pairs of a shell pair in each,
and, by the plan, on the mean numbers. Whole lists have one mean, but builds of J and K take slices of lists that are
sorted by their Schwarz bounds, and a slice has another mean. So plans are looked for in whole ranges of the means. A
predicted time is linear in either mean, so the difference of two of them on a rectangle is largest and smallest in its
corners: a plan that another one beats in all four corners is never taken inside.
"""

from functools import cache
from itertools import combinations_with_replacement, product
from typing import NamedTuple

import numpy as np

from md4.gpu.compile import Variant
from md4.gpu.kernels import digestion
from md4.gpu.kernels import hermite_coulomb as coulomb
from md4.gpu.kernels.bounds import pair_bounds
from md4.gpu.kernels.coulomb_threads import by_threads, expanded_order, in_single, threads_variants
from md4.gpu.kernels.h_matrices import h_variant
from md4.gpu.kernels.narrow import narrow_variant
from md4.gpu.kernels.recurrence import r_variant
from md4.gpu.kernels.scatter import scatter_variant
from md4.gpu.kernels.select_quartets import select_variant
from md4.gpu.kernels.shell_pairs import primitives_variant, slots_variant
from md4.gpu.kernels.unpack import unpack_variant
from md4.gpu.part_plans import build_ways, gains_by_plane
from md4.gpu.paths import digest_order, plan_variants, square_pairs, timed_plans
from md4.gpu.predicted_times import Side
from md4.gpu.tuning import FUSED, HERMITE_COULOMB, MIXED_SHELLS, SELECT, THREAD_QUARTET
from md4.method.digestion import digest_flags
from md4.method.scatter import EVERY_SYMMETRY, SYMMETRIES
from md4.plan import even_pieces
from md4.shells.basis import Basis, turned_basis
from md4.shells.shell_pairs import PRIMITIVE_CUTOFF, pairs_by_kind, part_facts, shell_pairs, unique_pairs_by_class

# Shells of general contractions in the correlation-consistent basis sets of the elements up to argon, as (l, nctr).
# Segmented basis sets, as those of Pople and of Ahlrichs, have none.
GENERAL_CONTRACTIONS = ((0, 2), (0, 3), (1, 2))
# Most primitive pairs of a shell pair in such basis sets: two shells of 21 primitives.
MOST_PRIMITIVES = 441
# Pairs of a list of a basis that are looked at.
SAMPLE = 1000
# J and K leave out more primitive pairs than a tensor; no tolerance that is of use leaves out more than this.
LOOSE_CUTOFF = 1e-15
# Ratio of two means of primitive pairs between which predicted times are compared at both ends only.
STEP = 4
# Operators of J and K, whose Schwarz bounds are those of Coulomb.
JK_KINDS = ("coulomb", "erf", "erfc")
# What `needed_variants` may be asked for, all builds of J and K included.
USES = ("tensor", "j", digest_flags(2, 1))


class ListKind(NamedTuple):
    """What decides on the kernels for a pair list.

    Attributes
    ----------
    shells : tuple
        (l_a, nctr_a), (l_b, nctr_b) of the pairs; None instead of the second for single shells.
    pure : bool
    fewest : int
        A lower bound on the mean number of primitive pairs of a shell pair in any slice.
    most : tuple of int
        What the largest number of primitive pairs of a shell pair in the list may be.
    """

    shells: tuple
    pure: bool
    fewest: int
    most: tuple


@cache
def sample_pairs(a, b, nprim, pure):
    """A list of one pair of shells a = (l, nctr) and b with `nprim` primitive pairs; of a single shell if b is None."""
    (la, _), (lb, _) = a, b or (0, 1)
    coefficients = [np.ones((n, nctr)) for n, (_, nctr) in ((nprim, a), (1, b or (0, 1)))]
    basis = Basis.from_arrays([la, lb], [np.ones(nprim), [1.0]], coefficients, np.zeros((2, 3)), pure=pure)
    return shell_pairs(basis, [[0, 1]], cutoff=0) if b else shell_pairs(basis.with_unit, [[0, 2]], cutoff=0)


# plans ----------------------------------------------------------------------------------------------------------------


def steps_between(fewest, most):
    """Means of primitive pairs from `fewest` to `most`, between which predicted times are compared."""
    inner, mean = [], max(1, fewest) * STEP
    while mean < most:
        inner.append(mean)
        mean *= STEP
    return sorted({fewest, *inner, most})


def possible_plans(unit, bra, ket, long, fewest, matrix=False):
    """The plans that slices of two lists may take, as a list.

    Parameters
    ----------
    unit, long, matrix
        As in `md4.gpu.paths.Sides`.
    bra, ket : ShellPairs
        Lists with the most primitive pairs that a pair may have.
    fewest : tuple of int
        The least mean numbers of primitive pairs of slices of bra and of ket.
    """
    sides = [Side.of(pairs) for pairs in (bra, ket)]

    def timed(*means):
        return timed_plans(unit, *(side._replace(mean_prim=n) for side, n in zip(sides, means)), long, matrix)

    return fastest_somewhere(timed, sides, fewest)


def possible_ways(unit, bra, ket, long, fewest, axis):
    """As `possible_plans`, the ways of `md4.gpu.part_plans.build_ways` that slices of two lists may take in J and K."""

    def timed(*means):
        return build_ways(unit, bra.facts, ket.facts, *means, long, axis)

    return fastest_somewhere(timed, (bra, ket), fewest)


def fastest_somewhere(timed, sides, fewest):
    """The plans that are the fastest for some mean numbers of primitive pairs of two sides, as a list.

    `timed` returns (time, plan) of all plans for two means, the fastest first.
    """
    ends = [sorted({min(n, side.max_prim), side.max_prim}) for n, side in zip(fewest, sides)]
    corners = {means: timed(*means) for means in product(*ends)}
    first = list(dict.fromkeys(plans[0][1] for plans in corners.values()))
    if all(plans[0][0] == 0.0 for plans in corners.values()):
        return first
    if len(corners) == 1:
        (plans,) = corners.values()
        return list(dict.fromkeys(plan for time, plan in plans if time == plans[0][0]))
    everywhere = set.intersection(*({plan for _, plan in plans} for plans in corners.values()))
    times = np.array([[dict(map(reversed, corners[m]))[plan] for m in product(*ends)] for plan in everywhere])
    grid = times_between(times.reshape(len(everywhere), *map(len, ends)), ends)
    return list(dict.fromkeys([*first, *(plan for plan, taken in zip(everywhere, least_somewhere(grid)) if taken)]))


def times_between(times, ends):
    """Times at all `steps_between`, shape (nplan, nbra, nket), from those at the ends: they are linear in either mean.

    Parameters
    ----------
    times : ndarray, shape (nplan, number of ends of bra, number of ends of ket)
    ends : list of list of int
        The one or two ends of bra and of ket.
    """
    for axis, end in enumerate(ends, start=1):
        weight = (np.array(steps_between(end[0], end[-1])) - end[0]) / max(1, end[-1] - end[0])
        low, high = np.take(times, 0, axis), np.take(times, -1, axis)
        times = np.stack([(1 - w) * low + w * high for w in weight], axis=axis)
    return times


def least_somewhere(grid):
    """Whether each plan can be the fastest in some rectangle of a grid of means, shape (nplan, nbra, nket)."""
    grid = np.pad(grid, [(0, 0), *((0, 1 if n == 1 else 0) for n in grid.shape[1:])], mode="edge")
    slower = (grid[:, None] > grid[None]).astype(bool)  # plan n than plan k
    everywhere = slower[..., :-1, :-1] & slower[..., 1:, :-1] & slower[..., :-1, 1:] & slower[..., 1:, 1:]
    return ~everywhere.any(axis=1).all(axis=(1, 2))


# lists ----------------------------------------------------------------------------------------------------------------


def prim_pairs(bra, ket):
    """Numbers of primitive pairs of two `ListKind` in which kernels may differ, the largest of each kind.

    A kernel asks whether the list of its bra, and of its ket, has contracted pairs, and the fused one whether a quartet
    of the most primitives has at most `FUSED.primitives`.
    """
    found = {}
    for n, k in product(bra.most, ket.most):
        found.setdefault((n > 1, k > 1, n * k <= FUSED.primitives), []).append((n, k))
    return [this for alike in found.values() for this in alike if not any(larger(other, this) for other in alike)]


def larger(one, other):
    """Whether a pair of numbers is not smaller than another one in any way, and not the same."""
    return one != other and one[0] >= other[0] and one[1] >= other[1]


def integral_variants(unit, kind, bra, ket, long, matrix=False):
    """Variants for the integrals of two `ListKind`, in this order; `long`, `matrix` as in `md4.gpu.paths.Sides`."""
    for counts in prim_pairs(bra, ket):
        lists = [sample_pairs(*side.shells, n, side.pure) for side, n in zip((bra, ket), counts)]
        for plan in possible_plans(unit, *lists, long, (bra.fewest, ket.fewest), matrix):
            yield from plan_variants(plan, unit, kind, *lists)


def build_variants(unit, kind, bra, ket, long, use, axis=None):
    """As `integral_variants`, for integrals that go into J and K, and variants that digest parts of them.

    `use` is a tuple of `md4.method.digestion.digest_flags`, `axis` that of a mirror (`Basis.mirror_axis`).
    """
    for counts in prim_pairs(bra, ket):
        lists = [sample_pairs(*side.shells, n, side.pure) for side, n in zip((bra, ket), counts)]
        for way in possible_ways(unit, *lists, long, (bra.fewest, ket.fewest), axis):
            if len(way) == 1:
                yield from plan_variants(*way, unit, kind, *lists, digested=True)
                continue
            yield from (digestion.mirrored_variant(lists[0], axis, *flags) for flags in use)
            for parity, plan in enumerate(way):
                sides = [part_facts(pairs.facts, axis, parity) for pairs in (lists[::-1] if plan.swap else lists)]
                yield from plan.path.variants(unit, kind, *sides, plan, True)


def bounds_variants(unit, side, count, cut):
    """Variants for the Schwarz bounds of `count` pairs of a `ListKind`; `cut` as in `needed_variants`."""
    one = Side.of(sample_pairs(*side.shells, side.most[-1], side.pure))
    lengths = {0} if cut else set()
    for mean in (max(1, side.fewest), one.max_prim):
        pieces = even_pieces(count, square_pairs(unit, one._replace(mean_prim=mean)))
        lengths |= {piece.stop - piece.start for piece in pieces}
    for long in {length**2 >= THREAD_QUARTET.fewest_quartets for length in lengths}:
        yield from integral_variants(unit, "coulomb", side, side, long)


def pair_of(side):
    """One pair of a `ListKind`."""
    return sample_pairs(*side.shells, 1, side.pure)


def coulomb_variants(kind, bra, ket, mirrored):
    """Variants of J alone for two `ListKind`; `mirrored`: all centres lie in a plane."""
    l_ket, l_bra = sorted(pair_of(side).l for side in (bra, ket))
    if not by_threads(l_bra, l_ket, mirrored):
        yield from (r_variant(l_bra + l_ket, kind), coulomb.correlation_variant(l_bra, l_ket, mirrored))
        return
    for single in {False, in_single(l_bra, l_ket)}:
        yield from threads_variants(l_bra, l_ket, kind, single, mirrored)


def common_variants(use, symmetries=SYMMETRIES):
    """Variants that do not depend on classes; `use` as in `needed_variants`, with the symmetries that tensors may have.
    """
    yield from (h_variant(), primitives_variant(), slots_variant())
    if SELECT.single_ratio and use not in ("tensor", "bounds", "j"):
        yield from (h_variant(single=True), narrow_variant())
    yield from map(scatter_variant, symmetries) if use == "tensor" else [Variant(pair_bounds, ())]
    if use == "j":
        yield from [Variant(f, ()) for f in (coulomb.hermite_densities, coulomb.hermite_sums, expanded_order)]
        yield from [narrow_variant()] if HERMITE_COULOMB.single_ratio else ()
    yield from () if use in ("tensor", "bounds", "j") else [select_variant()]


# what is asked of a basis ---------------------------------------------------------------------------------------------


def sample_of(basis, pairs):
    """Some of the pairs of a long list, that with most primitives among them."""
    if len(pairs) <= SAMPLE:
        return pairs
    most = np.argmax(np.multiply(*basis.nprims[pairs].T))
    return np.concatenate([pairs[:: 1 + len(pairs) // SAMPLE], pairs[most : most + 1]])


def list_kind(basis, pairs, cut):
    """`ListKind` of a list of a basis; `cut` as in `needed_variants`."""
    sample = sample_of(basis, pairs)
    most, fewest = shell_pairs(basis, sample, cutoff=PRIMITIVE_CUTOFF), shell_pairs(basis, sample, cutoff=LOOSE_CUTOFF)
    least = int(np.diff(fewest.start).min())
    found = {max(1, most.max_prim), max(1, fewest.max_prim)}
    if cut:
        largest = int(np.multiply(*basis.nprims[sample].T).max())
        found |= {largest, max(1, least), min(2, largest)}
    one, other = (tuple(shell) for shell in basis.classes[pairs[0]].tolist())
    shells = one, None if most.single else other
    return ListKind(shells, basis.pure, least, tuple(sorted(found)))


def needed_variants(unit, kind, basis, use, cut=False, few=None):
    """Variants for what is asked of a basis.

    Parameters
    ----------
    unit : {'dmma16', 'dmma8', 'fma'}
        Arithmetic; see `md4.gpu.tiles.Tile`.
    kind : str
        The operator's.
    basis : Basis
    use : {'tensor', 'j'} or tuple
        Integrals, J alone, or `md4.method.digestion.digest_flags` of a build of J and K.
    cut : bool
        Whether lists may be cut for want of memory, so that any of their pairs may be a list of its own.
    few : md4.contract.slices.FewPairs, optional
        The pair lists of a tensor that does not need all of the basis.
    """
    if few is not None:
        yield from tensor_variants(unit, kind, basis, *few)
        return
    found = unique_pairs_by_class(basis) if use == "tensor" else pairs_by_kind(basis, MIXED_SHELLS)
    lists = [list_kind(basis, pairs, cut) for pairs in found]
    yield from common_variants(use)
    for n, k in combinations_with_replacement(range(len(lists)), 2):
        bra, ket, long = lists[k], lists[n], len(found[n]) * len(found[k]) >= THREAD_QUARTET.fewest_quartets
        if use not in ("tensor", "j") and digest_order(unit, pair_of(bra), pair_of(ket), long):
            bra, ket = ket, bra
        if use != "tensor" and n == k:  # the bounds (ab|ab)
            yield from bounds_variants(unit, bra, len(found[n]), cut)
        if use == "j":
            yield from coulomb_variants(kind, bra, ket, basis.mirror_axis is not None)
            continue
        for many in {False, long}:
            if use == "tensor":
                yield from integral_variants(unit, kind, bra, ket, many)
            else:
                yield from build_variants(unit, kind, bra, ket, many, use, basis.mirror_axis)
        if use != "tensor":
            yield from (digestion.digest_variant(pair_of(bra), *flags) for flags in use)


def tensor_variants(unit, kind, basis, bra, ket, triangle, target, cut=False):
    """As `needed_variants`, for the integrals of some pair lists; see `md4.contract.slices.FewPairs`."""
    sides = [[(list_kind(basis, pairs, cut), len(pairs)) for pairs in lists] for lists in (bra, ket)]
    if target == "bounds":
        yield from common_variants("bounds")
        for side, count in sides[0]:
            yield from bounds_variants(unit, side, count, cut)
        return
    matrix = target == "matrix"
    yield from common_variants("tensor", () if matrix else [s for s in EVERY_SYMMETRY if s not in SYMMETRIES])
    yield from [unpack_variant(sums) for sums in (False, True)] if matrix else ()
    triangle = combinations_with_replacement(sides[0], 2) if triangle else ()
    # the bra is the earlier list where a matrix is made, the later one where a tensor is
    for (one, count), (other, partners) in [*product(*sides), *(two if matrix else two[::-1] for two in triangle)]:
        for many in {False, count * partners >= THREAD_QUARTET.fewest_quartets}:
            yield from integral_variants(unit, kind, one, other, many, matrix)


def fitting_variants(unit, kind, basis, auxiliary):
    """Variants of all integrals over three and two centres of two basis sets; arguments as in `needed_variants`."""
    joined = Basis.joined([part.segmented() for part in (basis, auxiliary)])
    orbital, shells = len(joined.parts[0]), np.arange(joined.unit)
    pairs = unique_pairs_by_class(joined, shells[:orbital], shells[:orbital])
    singles = unique_pairs_by_class(joined, shells[orbital:], [joined.unit])
    for target in ("tensor", "matrix"):
        yield from tensor_variants(unit, kind, joined, pairs, singles, False, target, cut=True)
        yield from tensor_variants(unit, kind, joined, singles, [], True, target, cut=True)
    if kind in JK_KINDS:
        yield from tensor_variants(unit, "coulomb", joined, [*pairs, *singles], [], False, "bounds", cut=True)


def basis_variants(unit, kind, basis):
    """Variants of all that can be asked of a basis, as a list without repeats; arguments as in `needed_variants`.

    J and K turn planar molecules.
    """
    found, of_builds = {}, basis.regrouped()[0]
    _, turned = turned_basis(of_builds) if gains_by_plane(of_builds) else (None, None)
    of_builds = of_builds if turned is None else turned
    for use in USES if kind in JK_KINDS else USES[:1]:
        part = basis.segmented() if use == "tensor" else of_builds
        found.update(dict.fromkeys(needed_variants(unit, kind, part, use, cut=True)))
    return list(found)


# all classes up to an angular momentum --------------------------------------------------------------------------------


def all_lists(lmax, pure):
    """`ListKind` of all pairs of shells up to `lmax`, also of the general contractions of common basis sets."""
    shells = [*((l, 1) for l in range(lmax + 1)), *(shell for shell in GENERAL_CONTRACTIONS if shell[0] <= lmax)]
    pairs = combinations_with_replacement(sorted(shells), 2)
    return [ListKind((b, a), pure, 1, (1, 2, FUSED.primitives, MOST_PRIMITIVES)) for a, b in pairs]


def all_variants(unit, kind="coulomb", lmax=6, pure=True):
    """Variants that classes up to (ll|ll), l = `lmax`, ask for, as a list without repeats.

    Parameters
    ----------
    unit, kind
        As in `needed_variants`.
    lmax : int
    pure : bool
        Spherical functions, else Cartesian ones.
    """
    lists, sums = all_lists(lmax, pure), kind in JK_KINDS
    found = dict.fromkeys(v for use in USES if sums or use == "tensor" for v in common_variants(use))
    for bra, ket in product(lists, lists):
        for long in (True, False):
            found.update(dict.fromkeys(integral_variants(unit, kind, bra, ket, long)))
        if sums:
            found.update(dict.fromkeys(jk_variants(unit, kind, bra, ket)))
    return list(found)


def jk_variants(unit, kind, bra, ket):
    """Variants for two `ListKind` that J and K need besides the integrals."""
    if bra is ket:
        for long in (True, False):
            yield from integral_variants(unit, "coulomb", bra, ket, long)
    one, other = pair_of(bra), pair_of(ket)
    for swapped in {digest_order(unit, one, other, long) for long in (True, False)}:
        yield from (digestion.digest_variant(other if swapped else one, *flags) for flags in USES[-1])
    if unit != "fma":  # such devices make no J and K
        for long, axis in ((True, None), (False, None), *((False, axis) for axis in range(3))):
            yield from build_variants(unit, kind, bra, ket, long, USES[-1], axis)
    for mirrored in (False, True):
        yield from coulomb_variants(kind, bra, ket, mirrored)
