"""Even and odd parts of integrals for J and K (`md4.method.mirror`): which classes are made so, and by which plans.

In a molecule in a plane the integrals of two lists fall into those of even ab and cd, those of odd ab and cd, and
zeros. Both products of a part have about half the rows, half the Hermite functions and half the columns of those of the
whole class, so that both parts together take about a quarter of its multiply-adds. A part runs in the kernels of
`md4.gpu.paths` whose tables describe its rows and Hermite functions. Both parts read the same r, which is made once.
"""

from functools import cache, lru_cache
from itertools import product

from md4.gpu import predicted_times
from md4.gpu.kernels.digest_in_place import MOST_INTEGRALS
from md4.gpu.paths import PATHS, Sides, build_time, is_long, timed_plans
from md4.gpu.predicted_times import Side, rounded_mean
from md4.plan import Plan
from md4.shells.shell_pairs import part_facts

# The highest l of a basis from which on planar molecules are turned into a plane of constant z for J and K.
PLANE_L = 3
# Fewest integrals of a quartet whose bytes the kernels of parts cannot count.
TOO_MANY = 1 << 28


def gains_by_plane(basis):
    """Whether a basis has shells whose pairs are worth being divided into even and odd functions."""
    return basis.lmax >= PLANE_L


def timed_part_plans(unit, bra, ket, mean_bra, mean_ket, axis):
    """As `md4.gpu.paths.timed_plans`, for the parts of two `ListFacts` with such mean numbers of primitive pairs.

    Neither list is one of s shells only, so that both parts of either have functions. r is made once for both.

    Returns
    -------
    list of (time, plans)
        A plan for the even and one for the odd part, with the same `swap`.
    """
    lists, found = ((bra, mean_bra), (ket, mean_ket)), []
    parts = [[Side(part_facts(facts, axis, n), mean) for facts, mean in lists] for n in range(2)]
    saved = predicted_times.r_time(*parts[0])
    for swap in (False, True):
        orders = [Sides(unit, *(sides[::-1] if swap else sides), swap, True, False, True) for sides in parts]
        for (even_time, even), (odd_time, odd) in product(*map(plans_in_order, orders)):
            found.append((even_time + odd_time - saved, (even, odd)))
    return sorted(found, key=lambda entry: entry[0])


def plans_in_order(sides):
    """(predicted time, plan) of the plans for a part whose order is that of `Sides`."""
    able = [path for path in PATHS if path.takes_parts and path.supports(sides)]
    return [(path.cost(sides), Plan(path, sides.swap, *path.forms(sides))) for path in able]


def build_ways(unit, bra, ket, mean_bra, mean_ket, long, axis):
    """How integrals of two `ListFacts` may be made that go into J and K: all together, or as an even and an odd part.

    There are parts if there is an axis, where kernels of both products make the integrals, of classes with more of them
    than a thread makes and digests, and fewer than `TOO_MANY`.

    Returns
    -------
    list of (time, way)
        Predicted ns a quartet, and a tuple of one plan, or of two as in `timed_part_plans`; the fastest first.
    """
    found = whole_ways(unit, bra, ket, mean_bra, mean_ket, long)
    fits = MOST_INTEGRALS < bra.nab * ket.nab < TOO_MANY
    if axis is None or not fits or not found[0][1][0].path.splits:
        return found
    return sorted([*found, *timed_part_plans(unit, bra, ket, mean_bra, mean_ket, axis)], key=lambda entry: entry[0])


@lru_cache(256)
def whole_ways(unit, bra, ket, mean_bra, mean_ket, long):
    """`build_ways` of all integrals together."""
    sides = Side(bra, mean_bra), Side(ket, mean_ket)
    return [(time, (plan,)) for time, plan in timed_plans(unit, *sides, long, limited=True)]


@cache
def fastest_way(unit, bra, ket, mean_bra, mean_ket, long, axis):
    """(time, way) of the first of `build_ways`."""
    return build_ways(unit, bra, ket, mean_bra, mean_ket, long, axis)[0]


def part_plans(unit, bra, ket, axis):
    """The plans of the even and the odd part of two prepared lists; none if their integrals are made all together."""
    if axis is None:
        return ()
    _, way = fastest_way(unit, bra.facts, ket.facts, rounded_mean(bra), rounded_mean(ket), is_long(bra, ket), axis)
    return way if len(way) > 1 else ()


def time_in_plane(unit, bra, ket, matrices, axis):
    """`md4.gpu.paths.build_time` of two `ShellPairs` or prepared lists of a molecule in a plane."""
    sides = Side.of(bra), Side.of(ket)
    time, way = fastest_way(unit, bra.facts, ket.facts, *(side.mean_prim for side in sides), True, axis)
    if len(way) == 1:
        return build_time(unit, *sides, matrices)
    return time + predicted_times.digest_time(*sides, matrices)
