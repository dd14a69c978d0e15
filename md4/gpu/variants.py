"""Which kernel variants the classes up to an angular momentum, or of a basis, ask for; what `md4 warmup` compiles."""

from itertools import combinations_with_replacement, product

import numpy as np

from md4.gpu.compile import Variant
from md4.gpu.kernels import digestion
from md4.gpu.kernels import hermite_coulomb as coulomb
from md4.gpu.kernels.bounds import pair_bounds
from md4.gpu.kernels.h_matrices import h_variant
from md4.gpu.kernels.recurrence import r_variant
from md4.gpu.kernels.scatter import scatter_variant
from md4.gpu.kernels.shell_pairs import primitives_variant, slots_variant
from md4.gpu.paths import plan_variants
from md4.gpu.tuning import MIXED_SHELLS, THREAD_QUARTET
from md4.method.scatter import SYMMETRIES
from md4.shells.basis import Basis
from md4.shells.shell_pairs import pairs_by_kind, shell_pairs, unique_pairs_by_class

# Primitive pairs of a bra and a ket: how many there are decides on kernels, and on the side that goes first.
PRIMITIVES = (1, 2, 30)
# Pairs of a list of a basis that are looked at.
SAMPLE = 1000


def sample_pairs(la, lb, nprim, pure):
    """A list of one pair (la, lb) with `nprim` primitive pairs."""
    one = np.ones(nprim)
    basis = Basis.from_arrays([la, lb], [one, [1.0]], [one, [1.0]], np.zeros((2, 3)), pure=pure)
    return shell_pairs(basis, [[0, 1]])


def list_variants(unit, kind, bra, ket):
    """Variants for a bra and a ket list, short or long, whatever is asked of them."""
    for long in (True, False):
        yield from plan_variants(unit, kind, bra, ket, long)
    order = (ket, bra) if digestion.digest_swapped(bra, ket) else (bra, ket)
    for with_j in (True, False):
        yield digestion.digest_variant(*order, with_j=with_j)
    yield from coulomb_variants(bra, ket, kind)


def coulomb_variants(bra, ket, kind):
    """Variants of J alone."""
    if not coulomb.by_threads(bra.l, ket.l):
        yield r_variant(bra.l + ket.l, kind)
    yield coulomb.correlation_variant(*((ket, bra) if bra.l < ket.l else (bra, ket)), kind)


def all_variants(unit, kind="coulomb", lmax=6, pure=True):
    """Variants that classes up to (ll|ll), l = `lmax`, ask for, as a list without repeats.

    Parameters
    ----------
    unit : {'dmma16', 'dmma8', 'fma'}
        Arithmetic; see `md4.gpu.tuning.Tile`.
    kind : str
        The operator's.
    lmax : int
    pure : bool
        Spherical functions, else Cartesian ones.
    """
    sides = [(la, lb) for la in range(lmax + 1) for lb in range(la + 1)]
    return lists_variants(unit, kind, [sample_pairs(*side, nprim, pure) for side, nprim in product(sides, PRIMITIVES)])


def basis_variants(unit, kind, basis):
    """Variants that tensors, J and K of a basis ask for, general contractions included; arguments as `all_variants`."""
    lists = [*unique_pairs_by_class(basis), *pairs_by_kind(basis, MIXED_SHELLS)]
    return lists_variants(unit, kind, [shell_pairs(basis, sample_of(basis, pairs)) for pairs in lists])


def sample_of(basis, pairs):
    """Some of the pairs of a long list, that with most primitives among them."""
    if len(pairs) <= SAMPLE:
        return pairs
    most = np.argmax(np.multiply(*basis.nprims[pairs].T))
    return np.concatenate([pairs[:: 1 + len(pairs) // SAMPLE], pairs[most : most + 1]])


def needed_variants(unit, kind, basis, use):
    """Variants for what is now asked of a basis.

    `use` is 'tensor' (integrals), 'j' for J alone, or `md4.method.digestion.digest_flags` of the build.
    """
    found = unique_pairs_by_class(basis) if use == "tensor" else pairs_by_kind(basis, MIXED_SHELLS)
    lists = [shell_pairs(basis, sample_of(basis, pairs)) for pairs in found]
    yield from (h_variant(), primitives_variant())
    yield from map(scatter_variant, SYMMETRIES) if use == "tensor" else [Variant(pair_bounds, ())]
    yield from [slots_variant()] if use != "j" else ()
    yield from [Variant(f, ()) for f in (coulomb.hermite_densities, coulomb.hermite_sums)] if use == "j" else ()
    for n, k in combinations_with_replacement(range(len(lists)), 2):
        bra, ket, long = lists[k], lists[n], len(found[n]) * len(found[k]) >= THREAD_QUARTET.fewest_quartets
        if use not in ("tensor", "j") and digestion.digest_swapped(bra, ket):
            bra, ket = ket, bra
        if use == "j":
            yield from coulomb_variants(bra, ket, kind)
        if use != "j" or n == k:  # of J alone the bounds (ab|ab)
            for many in {False, long and use != "j"}:
                yield from plan_variants(unit, kind, bra, ket, many)
        if use not in ("tensor", "j"):
            yield from (digestion.digest_variant(bra, ket, *flags) for flags in use)


def lists_variants(unit, kind, lists):
    """Variants for any two of some pair lists, as a list without repeats."""
    of_matrices = (Variant(f, ()) for f in (pair_bounds, coulomb.hermite_densities, coulomb.hermite_sums))
    of_pairs = h_variant(), primitives_variant(), slots_variant()
    found = dict.fromkeys([*of_pairs, *of_matrices, *map(scatter_variant, SYMMETRIES)])
    for bra, ket in product(lists, lists):
        found.update(dict.fromkeys(list_variants(unit, kind, bra, ket)))
    return list(found)
