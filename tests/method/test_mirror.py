"""Even and odd functions of planar molecules: every integral that the module calls zero is zero."""

import numpy as np
import pytest
from plain_h import plain_h

import md4
from md4.method.angular import hermite_triples
from md4.method.hermite import structure
from md4.method.mirror import (
    function_counts,
    function_parities,
    mirror_axis,
    part_elements,
    part_functions,
    part_rows,
)

PLANES = {0: [[0.3, -1.0, 0.5], [1.1, 0.4, 0.5], [-0.7, 0.9, 0.5]]}
PLANES[1] = [[x, z, y] for x, y, z in PLANES[0]]
PLANES[2] = [[z, x, y] for x, y, z in PLANES[0]]


@pytest.mark.parametrize("pure", [True, False])
@pytest.mark.parametrize("axis", range(3))
def test_integrals_of_other_parity_are_zero(axis, pure):
    basis = md4.Basis.from_arrays(
        [3, 2, 1], [[0.7, 0.3], [1.3], [0.9]], [[0.4, 0.2], [1.0], [1.0]], PLANES[axis], pure=pure
    )
    assert mirror_axis(np.array(PLANES[axis])) == axis
    engine = md4.Engine(basis, backend="cpu")
    parities = [function_parities(l, pure, 1, axis) for l in (3, 2, 1)]
    for a, b in [(0, 1), (0, 2)]:
        block = engine.compute([[a, b]], [[1, 2]])[0, 0]
        total = sum(np.ix_(parities[a], parities[b], parities[1], parities[2])) % 2
        assert abs(block[total == 1]).max() < 1e-15 < abs(block[total == 0]).max()


@pytest.mark.parametrize("pure", [True, False])
@pytest.mark.parametrize("axis", range(3))
def test_parts_hold_every_row_and_function_once(axis, pure):
    for la, lb, nctr in [(0, 0, 1), (1, 0, 2), (3, 2, 1), (4, 4, 2)]:
        a, b = function_parities(la, pure, nctr, axis), function_parities(lb, pure, 1, axis)
        rows = [part_rows(la, lb, pure, nctr, 1, axis, parity) for parity in range(2)]
        assert sorted(np.concatenate(rows)) == list(range(len(a) * len(b)))
        for parity, part in enumerate(rows):
            of_a, of_b = a[part // len(b)], b[part % len(b)]
            assert (of_a ^ of_b == parity).all()
            assert (np.diff(of_a) >= 0).all()
            even = part[of_a == 0]
            assert (np.diff(even) > 0).all()
            assert (np.diff(part[of_a == 1]) > 0).all()
        functions = [part_functions(la + lb, axis, parity) for parity in range(2)]
        assert sorted(np.concatenate(functions)) == list(range(len(hermite_triples(la + lb))))
        assert function_counts(la, pure, nctr, axis) == (int((a == 0).sum()), int((a == 1).sum()))


def test_no_plane():
    assert mirror_axis(np.array([[0.0, 0, 0], [1, 2, 1e-16]])) is None
    assert mirror_axis(np.array([[1.0, 2, 3]])) == 0


@pytest.mark.parametrize("pure", [True, False])
@pytest.mark.parametrize("axis", range(3))
def test_h_of_a_pair_in_the_plane_is_zero_but_in_the_parts(axis, pure):
    pa, pb = np.random.default_rng(axis).normal(size=(2, 3))
    pa[axis] = pb[axis] = 0.0
    for la, lb in [(1, 0), (2, 1), (3, 3)]:
        shells, held = (la, lb, pure, 1, 1), set()
        for parity in range(2):
            rows, elements = part_rows(*shells, axis, parity), part_elements(*shells, axis, parity)
            assert {row for row, _ in elements} == set(range(len(rows)))
            held |= {(int(rows[row]), p) for row, p in elements}
        left_out = sorted(set(structure(*shells)) - held)
        assert len(left_out) == len(structure(*shells)) - len(held) > 0
        assert not plain_h(la, lb, pure, 1.3, pa, pb, left_out).any()


def test_axis_of_a_basis():
    """One atom lies in every plane; the unit function is nowhere."""
    shells = [1, 2], [[1.0]] * 2, [[1.0]] * 2
    assert md4.Basis.from_arrays(*shells, np.ones((2, 3))).mirror_axis == 0
    for axis, centres in PLANES.items():
        assert md4.Basis.from_arrays(*shells, centres[:2]).mirror_axis == axis
    basis = md4.Basis.from_arrays(*shells, [[0.0, 0.0, 0.0], [1.0, 1.0, 1e-16]])
    assert basis.mirror_axis is None
    assert md4.Basis.from_arrays(*shells, np.ones((2, 3))).with_unit.mirror_axis is None
