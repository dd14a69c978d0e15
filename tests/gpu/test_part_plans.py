"""Which classes of planar molecules are made in parts, and J and K of such molecules on a GPU."""

from itertools import product

import numpy as np
import pytest
from molecules import molecule

import md4
from md4.gpu.part_plans import build_ways, part_plans, time_in_plane, timed_part_plans
from md4.gpu.paths import Sides, build_time
from md4.gpu.predicted_times import Side, r_time
from md4.shells.shell_pairs import part_facts, shell_pairs

# In the plane z = 0, where no other axis is common to all.
WATER = "O 0.1 0.2 0; H 0.85 0.79 0; H -0.65 0.81 0"


def list_of(la, lb, nprim=1, count=1):
    """`count` times the pair of two shells on different centres."""
    basis = md4.Basis.from_arrays([la, lb], [np.ones(nprim), [1.0]], [np.ones(nprim), [1.0]], [[0, 0, 0], [1, 1, 0]])
    return shell_pairs(basis, [[0, 1]] * count)


MADE_IN_PARTS = [((2, 2), (2, 2)), ((4, 3), (5, 2)), ((6, 6), (6, 6)), ((3, 1), (3, 2))]


@pytest.mark.parametrize("axis", range(3))
@pytest.mark.parametrize(("bra", "ket"), MADE_IN_PARTS)
def test_large_classes_are_made_in_parts(bra, ket, axis):
    bra, ket = list_of(*bra, count=300), list_of(*ket, count=300)
    even, odd = part_plans("dmma16", bra, ket, axis)
    assert even.swap == odd.swap
    assert even.path.takes_parts
    assert odd.path.takes_parts
    assert part_plans("dmma16", bra, ket, None) == ()
    sides = Side.of(bra), Side.of(ket)
    assert time_in_plane("dmma16", bra, ket, 2, axis) < build_time("dmma16", *sides, 2)


@pytest.mark.parametrize("axis", range(3))
@pytest.mark.parametrize(("bra", "ket"), [
    ((0, 0), (0, 0)), ((4, 4), (0, 0)), ((1, 0), (1, 0)), ((1, 1), (1, 1)), ((2, 1), (1, 1)),
])  # fmt: skip
def test_small_classes_are_not(bra, ket, axis):
    """A thread makes or digests a quartet of them, or a list has one Hermite function."""
    bra, ket = list_of(*bra, count=300), list_of(*ket, count=300)
    for one, other in ((bra, ket), (ket, bra)):
        assert part_plans("dmma16", one, other, axis) == ()
        sides = Side.of(one), Side.of(other)
        assert time_in_plane("dmma16", one, other, 2, axis) == build_time("dmma16", *sides, 2)


def test_quartets_of_many_contracted_functions_are_not():
    """Kernels of parts know the bytes of a quartet as 32-bit integers: those of up to 2^28 - 1 integrals."""
    def pairs(*functions):
        shells = [np.ones((1, count)) for count in functions]
        return shell_pairs(md4.Basis.from_arrays([3, 3], [[1.0]] * 2, shells, [[0, 0, 0], [1, 1, 0]]), [[0, 1]])

    ket = pairs(16, 16)  # of 12544 function pairs
    for functions, parts in ((18, 2), (19, 0)):
        bra = pairs(23, functions)
        assert (bra.nab * ket.nab < 1 << 28) == (parts > 0)
        assert len(part_plans("dmma16", bra, ket, 2)) == parts


def test_the_fastest_is_taken():
    """Of all pairs of plans of the same order, and of the plans of the whole; r counts once."""
    for classes, nprim in product(MADE_IN_PARTS, (1, 3)):
        bra, ket = (list_of(*ls, nprim) for ls in classes)
        means = float(nprim), float(nprim)
        found = timed_part_plans("dmma16", bra.facts, ket.facts, *means, 0)
        ways = build_ways("dmma16", bra.facts, ket.facts, *means, True, 0)
        for times in ([time for time, _ in found], [time for time, _ in ways]):
            assert times == sorted(times)
        assert {entry for entry in ways if len(entry[1]) == 2} == set(found)
        sides = [
            [Side(part_facts(pairs.facts, 0, parity), mean) for pairs, mean in zip((bra, ket), means)]
            for parity in range(2)
        ]
        for time, plans in found:
            orders = [
                Sides("dmma16", *(one[::-1] if plan.swap else one), plan.swap, True, False, True)
                for plan, one in zip(plans, sides)
            ]
            costs = [plan.path.cost(order) for plan, order in zip(plans, orders)]
            assert time == pytest.approx(sum(costs) - r_time(*sides[0]))


# Which coordinates are x, y and z of `WATER`, by the axis on which all then have the same.
PLANES = {0: [0, 1, 2], 1: [1, 2, 0], 2: [2, 0, 1]}


@pytest.mark.gpu
@pytest.mark.parametrize("axis", PLANES)
@pytest.mark.parametrize("basis", ["cc-pvqz", "cc-pv5z"])
def test_j_and_k_of_a_planar_molecule(gpu, basis, axis):
    """Beside the CPU, by density matrices that know nothing of the plane; the third build repeats the second."""
    lines = map(str.split, WATER.split(";"))
    atoms = [(symbol, [float(place[n]) for n in PLANES[axis]]) for symbol, *place in lines]
    mol = molecule(atoms, basis)
    jk, right = (md4.JK(mol, backend=name, direct_scf_tol=1e-14) for name in ("cuda", "cpu"))
    assert jk.basis.mirror_axis == axis
    dm = np.random.default_rng(axis).normal(size=(2, mol.nao, mol.nao))
    for hermi, given in ((0, dm), (1, dm + dm.swapaxes(1, 2))):
        theirs = right.get_jk(given, hermi=hermi)
        for _ in range(3):
            for ours, other in zip(jk.get_jk(given, hermi=hermi), theirs):
                assert abs(ours - other).max() < 1e-11 * abs(other).max()
