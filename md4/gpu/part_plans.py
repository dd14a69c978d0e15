"""Even and odd parts of integrals for J and K (`md4.method.mirror`): which classes are made so, and by which plans.

In a molecule in a plane the integrals of two lists fall into those of even ab and cd, those of odd ab and cd, and
zeros. Both products of a part have about half the rows, half the Hermite functions and half the columns of those of the
whole class, so that both parts together take about a quarter of its multiply-adds. A part runs in the kernels of
`md4.gpu.paths` whose tables describe its rows and Hermite functions. Both parts read the same r, which is made once.
"""

from functools import cache
from itertools import product

from md4.gpu import predicted_times
from md4.gpu.kernels import digestion
from md4.gpu.paths import PATHS, Sides, build_time, is_long, timed_plans
from md4.gpu.predicted_times import Side, rounded_mean
from md4.plan import Plan
from md4.shells.shell_pairs import part_facts


def timed_part_plans(unit, bra, ket, mean_bra, mean_ket, axis):
    """As `timed_plans`, for the even and the odd part of two `ListFacts` with such mean numbers of primitive pairs.

    r is made once for both.

    Returns
    -------
    list of (time, plans)
        A plan for each parity, both with the same `swap`; None for a part without integrals.
    """
    found = []
    for swap in (False, True):
        parts = [part_sides(unit, bra, ket, mean_bra, mean_ket, axis, parity, swap) for parity in range(2)]
        for paths in product(*(paths_of_part(sides) for sides in parts)):
            work = [(path, sides) for path, sides in zip(paths, parts) if path]
            time = sum(path.cost(sides) for path, sides in work)
            time -= (len(work) - 1) * predicted_times.r_time(*work[0][1][1:3])
            plans = (path and Plan(path, swap, *path.forms(sides)) for path, sides in zip(paths, parts))
            found.append((time, tuple(plans)))
    return sorted(found, key=lambda entry: entry[0])


def part_sides(unit, bra, ket, mean_bra, mean_ket, axis, parity, swap):
    """`Sides` of the parts of one parity, or None where one of them has no functions."""
    lists = (bra, mean_bra), (ket, mean_ket)
    one, other = (Side.of_facts(part_facts(facts, axis, parity), mean) for facts, mean in lists)
    if not (one.nab and other.nab):
        return None
    return Sides(unit, *((other, one) if swap else (one, other)), swap, True, False)


def paths_of_part(sides):
    """The paths that can compute a part; None for one without integrals."""
    return [path for path in PATHS if path.takes_parts and path.supports(sides)] if sides else [None]


def build_ways(unit, bra, ket, mean_bra, mean_ket, long, axis):
    """How integrals of two `ListFacts` may be made that go into J and K: all together, or as an even and an odd part.

    There are parts if there is an axis (`md4.method.mirror`), where the kernels of both products make the integrals,
    and those digest them that go through rows ab.

    Returns
    -------
    list of (time, way)
        Predicted ns a quartet, and a tuple of one plan, or of one for each parity as `timed_part_plans` has them; the
        fastest first.
    """
    sides = Side.of_facts(bra, mean_bra), Side.of_facts(ket, mean_ket)
    found = [(time, (plan,)) for time, plan in timed_plans(unit, *sides, long)]
    if axis is not None and found[0][1][0].path.takes_parts and not digestion.by_quartets(bra, ket):
        found += timed_part_plans(unit, bra, ket, mean_bra, mean_ket, axis)
    return sorted(found, key=lambda entry: entry[0])


@cache
def fastest_way(unit, bra, ket, mean_bra, mean_ket, long, axis):
    """(time, way) of the first of `build_ways`."""
    return build_ways(unit, bra, ket, mean_bra, mean_ket, long, axis)[0]


def part_plans(unit, bra, ket, axis):
    """[(parity, plan)] of the parts in which integrals of two prepared lists are made; empty if all are made together.
    """
    if axis is None:
        return []
    _, way = fastest_way(unit, bra.facts, ket.facts, rounded_mean(bra), rounded_mean(ket), is_long(bra, ket), axis)
    return [(parity, plan) for parity, plan in enumerate(way) if plan] if len(way) > 1 else []


def time_in_plane(unit, bra, ket, matrices, axis):
    """`build_time` of two `ShellPairs` or prepared lists of a molecule in a plane.

    Where integrals are made in parts, those that are zero are not digested, which are half of all.
    """
    sides = Side.of(bra), Side.of(ket)
    time, way = fastest_way(unit, bra.facts, ket.facts, *(side.mean_prim for side in sides), True, axis)
    if len(way) == 1:
        return build_time(unit, *sides, matrices)
    return time + predicted_times.digest_time(*sides, matrices) / 2
