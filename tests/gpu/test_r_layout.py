"""Where r[t] lies in memory."""

import numpy as np
import pytest

from md4.gpu.r_layout import AXIS_L, r_places
from md4.method.angular import hermite_triples, nherm
from md4.method.mirror import r_count


@pytest.mark.parametrize("axis", range(3))
@pytest.mark.parametrize("l", [0, 1, 6, AXIS_L])
def test_places_of_even_r(l, axis):
    """Those that are kept are in the order of their triples with the mirror axis first; the others are at 0."""
    places, triples = r_places(l, axis), hermite_triples(l)
    turned = [(t[axis], *np.delete(t, axis)) for t in triples]
    kept = [n for n, t in enumerate(turned) if t[0] % 2 == 0]
    ordinals = {tuple(t): n for n, t in enumerate(triples.tolist())}
    order = sorted(kept, key=lambda n: ordinals[tuple(turned[n])])
    assert places[order].tolist() == list(range(r_count(l, True)))
    assert not np.delete(places, kept).any()


@pytest.mark.parametrize("axis", [None, 0, 1, 2])
def test_whole_r(axis):
    """It has its own order, and above the highest L of a lane r is whole in a plane, too."""
    l = AXIS_L + (axis is not None)
    assert np.array_equal(r_places(l, axis), np.arange(nherm(l)))
