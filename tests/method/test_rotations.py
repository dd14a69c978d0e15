"""Rotations of functions, by their values and by what rotations do not change, and planes of centres."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from molecules import monomials

from md4.method.angular import component_coefficients
from md4.method.mirror import mirror_axis
from md4.method.rotations import PLANAR, component_rotation, rotation_to_z, turned_to_plane

EPSILON = np.finfo(float).eps
SHAPES = {
    "three atoms": [[0, 0], [1.4, 0.3], [-0.4, 1.5]],
    "benzene": [[r * np.cos(k * np.pi / 3), r * np.sin(k * np.pi / 3)] for r in (2.6, 4.7) for k in range(6)],
    "two atoms": [[0, 0], [1.1, 0]],
    "a line": [[0, 0], [2.2, 0], [-2.2, 0], [5.0, 0]],
    "shells of one atom": [[0.3, 0.1], [0.3, 0.1], [1.3, 0.9], [0.3, 0.1]],
}


def random_rotation(seed):
    q, r = np.linalg.qr(np.random.default_rng(seed).normal(size=(3, 3)))
    q *= np.sign(np.diag(r))
    return q * np.linalg.det(q)


def askew(shape, seed, centre=(0.0, 0.0, 0.0)):
    """The points of a shape in a random plane, whose rotation and shift have rounded them."""
    points = np.array([[x, y, 0.0] for x, y in SHAPES[shape]])
    return points @ random_rotation(seed).T + np.array(centre)


# functions ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pure", [True, False])
@pytest.mark.parametrize("l", range(9))
def test_values_of_functions(l, pure):
    """S_m(R r) = sum_n T_mn S_n(r)"""
    rotation, points = random_rotation(l), np.random.default_rng(l).normal(size=(50, 3))
    points /= np.linalg.norm(points, axis=1)[:, None]
    c = component_coefficients(l, pure)
    turn = component_rotation(l, pure, rotation)
    np.testing.assert_allclose(
        monomials(l, points @ rotation.T) @ c, monomials(l, points) @ c @ turn.T, rtol=0, atol=2e-14
    )


@pytest.mark.parametrize("l", range(9))
@pytest.mark.parametrize("seed", range(3))
def test_spherical_functions_turn_by_orthogonal_matrices(l, seed):
    """To a few units of rounding, if R itself is orthogonal to rounding."""
    normal = random_rotation(seed)[2]
    normal *= np.sign(normal[2]) / np.sqrt((normal**2).sum())
    turn = component_rotation(l, True, rotation_to_z(normal))
    np.testing.assert_allclose(turn @ turn.T, np.eye(2 * l + 1), rtol=0, atol=16 * EPSILON)


@pytest.mark.parametrize("pure", [True, False])
@pytest.mark.parametrize("l", range(9))
def test_rotations_are_a_group(l, pure):
    one, two = random_rotation(1), random_rotation(2)
    first, second, both = (component_rotation(l, pure, rotation) for rotation in (one, two, one @ two))
    error = 64 * EPSILON * abs(first).max() * abs(second).sum(axis=0).max()
    np.testing.assert_allclose(first @ second, both, rtol=0, atol=error)
    np.testing.assert_allclose(component_rotation(l, pure, np.eye(3)), np.eye(len(first)), rtol=0, atol=4 * EPSILON)


def test_s_functions_stay_exactly():
    assert component_rotation(0, True, random_rotation(0)) == component_rotation(0, False, random_rotation(0)) == 1.0


# planes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("shape", SHAPES)
def test_planar_molecules_are_turned(shape, seed):
    """All distances stay, and z is exactly the same."""
    centres = askew(shape, seed)
    assert mirror_axis(centres) is None
    rotation, turned = turned_to_plane(centres)
    assert mirror_axis(turned) == 0
    assert not turned[:, 2].any()
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(3), rtol=0, atol=4 * EPSILON)
    assert np.linalg.det(rotation) > 0
    for first, moved in zip(centres, turned):
        before, after = np.linalg.norm(centres - first, axis=1), np.linalg.norm(turned - moved, axis=1)
        np.testing.assert_allclose(after, before, rtol=0, atol=8 * EPSILON * before.max())
    np.testing.assert_allclose((centres - centres[0]) @ rotation.T, turned, rtol=0, atol=PLANAR * 10)


def test_shells_of_an_atom_stay_together():
    _, turned = turned_to_plane(askew("shells of one atom", 3))
    assert (turned[[1, 3]] == turned[0]).all()


@given(power=st.floats(-14, 0), seed=st.integers(0, 100))
def test_a_molecule_that_is_nearly_planar_is_not_planar(power, seed):
    """One atom of benzene is above the plane by more than rounding."""
    centres = askew("benzene", seed)
    normal = np.cross(centres[1] - centres[0], centres[2] - centres[0])
    centres[8] += 10 * 10**power * normal / np.linalg.norm(normal)
    rotation, turned = turned_to_plane(centres)
    assert rotation is turned is None


@pytest.mark.parametrize("seed", range(10))
def test_rounding_does_not_hide_a_plane(seed):
    """That of a shift, and of a change of the unit."""
    for unit in (1.0, 1 / 0.52917721092):
        assert turned_to_plane(askew("benzene", seed, (3.0, -2.0, 4.0)) * unit)[0] is not None


@pytest.mark.parametrize("vector", [(0, 0, 1), (1, 0, 0), (0.6, 0.8, 0), (1e-9, 0, 1), (0.6, -0.64, 0.48)])
def test_rotation_to_z(vector):
    vector = np.array(vector) / np.linalg.norm(vector)
    rotation = rotation_to_z(vector)
    np.testing.assert_allclose(rotation @ vector, [0, 0, 1], rtol=0, atol=2 * EPSILON)
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(3), rtol=0, atol=4 * EPSILON)
