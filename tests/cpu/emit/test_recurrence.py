"""The compiled recurrence in vectors against the recurrence step by step, in rational numbers."""

from fractions import Fraction

import numpy as np
import pytest
from numba import njit
from plain_r import plain_r

from md4.cpu.emit.recurrence import STRAIGHT, cube_side, recur
from md4.cpu.emit.vectors import LANES, load
from md4.method.angular import hermite_triples


@njit
def compiled_r(l, side, zeros, r_z, r_y, r_x, work, r):
    recur(l, side, zeros, load(r_z, 0), load(r_y, 0), load(r_x, 0), work, r)


@pytest.mark.parametrize("l", [*range(STRAIGHT + 4), 12, 19, 32])
def test_recurrence_in_lanes(l):
    """Straight code for low orders, axis by axis for others; errors in units of the sum of the moduli of the terms."""
    rng = np.random.default_rng(l)
    zeros = rng.normal(size=(l + 1, LANES)) * (-1.4) ** np.arange(l + 1)[:, None]
    centre, side = rng.normal(size=(3, LANES)), cube_side(l)
    r = np.full((side**3, LANES), np.nan)
    compiled_r(l, side, zeros.ravel(), *centre, np.full(3 * (l + 1) ** 2 * LANES, np.nan), r.reshape(-1))
    z, y, x = hermite_triples(l).T
    found = r[(z * side + y) * side + x].T
    for lane in range(LANES) if l < 16 else (0, LANES - 1):
        numbers = zeros[:, lane].tolist(), centre[:, lane].tolist()
        exact = plain_r(l, *([Fraction(number) for number in these] for these in numbers))
        sizes = plain_r(l, *(abs(np.array(these)).tolist() for these in numbers))
        errors = [abs(float(Fraction(one) - two)) for one, two in zip(found[lane].tolist(), exact)]
        assert (np.array(errors) <= 2 * (l + 1) * np.finfo(float).eps * np.array(sizes)).all()


@pytest.mark.parametrize("l", range(33))
def test_places_in_a_cube_add_up(l):
    """The place of p + q is the sum of those of p and of q, and places differ."""
    side = cube_side(l)
    assert side > l
    assert side % 2 == 1
    places = [(i * side + j) * side + k for i in range(l + 1) for j in range(l + 1 - i) for k in range(l + 1 - i - j)]
    assert len(set(places)) == len(places)
    assert max(places) < side**3
