"""The order of r for kernels that gather it."""

import numpy as np
import pytest

from md4.gpu.banks import BANKS, LARGEST, SMALLEST, TABLE, in_banks, places_of
from md4.gpu.gather_words import gather_words
from md4.gpu.tuning import RECURRENCE
from md4.method.angular import nherm


def wavefronts(places, l_bra, l_ket):
    """Mean accesses to the busiest bank when 16 lanes gather [p|q], with r in some order."""
    words = gather_words(l_bra, l_ket).view(np.uint32).reshape(-1, 2, 16)
    natural = np.argsort(places_of(l_bra + l_ket, True))
    counts = []
    for offsets in (words & 65535, words >> 16):
        for lanes in places[natural[offsets // 8]].reshape(-1, 16):
            counts.append(np.bincount(np.unique(lanes) % BANKS).max())
    return np.mean(counts)


def test_table():
    """It is a permutation for each L, for all L whose r is made by one thread."""
    assert list(TABLE) == list(range(SMALLEST, LARGEST + 1))
    assert RECURRENCE.banks_l <= RECURRENCE.axis_l
    for l in range(LARGEST + 3):
        assert np.array_equal(np.sort(places_of(l, True)), np.arange(nherm(l)))
        assert np.array_equal(places_of(l, False), np.arange(nherm(l)))
        assert in_banks(l) == (not np.array_equal(places_of(l, True), np.arange(nherm(l))))


@pytest.mark.parametrize(("l_bra", "l_ket"), [(2, 2), (3, 3), (4, 3), (2, 6), (6, 3)])
def test_fewer_conflicts(l_bra, l_ket):
    """At least a quarter of the accesses less than in natural order, and 1.4 at most."""
    l = l_bra + l_ket
    natural, banked = (wavefronts(places_of(l, banks), l_bra, l_ket) for banks in (False, True))
    assert banked < 0.75 * natural
    assert banked < 1.4
