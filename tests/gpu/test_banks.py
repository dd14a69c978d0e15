"""The order of r for kernels that gather it."""

import numpy as np
import pytest

from md4.gpu.banks import BANKS, EVEN_TABLE, LARGEST, SMALLEST, TABLE, in_banks, places_of, r_places
from md4.gpu.gather_words import gather_words
from md4.gpu.tuning import RECURRENCE
from md4.method.angular import hermite_ordinal, hermite_triples, nherm
from md4.method.mirror import part_functions, r_count


def wavefronts(l_bra, l_ket, mirror=None):
    """Mean accesses to the busiest bank when 16 lanes gather [p|q]: with r in the order of ordinals, and as it is."""
    words, l = gather_words(l_bra, l_ket, mirror=mirror).view(np.uint32).reshape(-1, 2, 16), l_bra + l_ket
    kept = np.arange(nherm(l)) if mirror is None else part_functions(l, 0, 0)
    ordinal_of_place = np.argsort(places_of(l, True, mirror is not None)[kept])
    natural, banked = [], []
    for offsets in (words & 65535, words >> 16):
        for lanes in (offsets // 8).reshape(-1, 16):
            places = np.unique(lanes)
            natural.append(np.bincount(ordinal_of_place[places] % BANKS).max())
            banked.append(np.bincount(places % BANKS).max())
    return np.mean(natural), np.mean(banked)


def test_table():
    """It is a permutation for each L, for all L whose r is made by one thread."""
    assert list(TABLE) == list(range(SMALLEST, LARGEST + 1))
    assert RECURRENCE.banks_l <= RECURRENCE.axis_l
    for l in range(LARGEST + 3):
        assert np.array_equal(np.sort(places_of(l, True)), np.arange(nherm(l)))
        assert np.array_equal(places_of(l, False), np.arange(nherm(l)))
        assert in_banks(l) == (not np.array_equal(places_of(l, True), np.arange(nherm(l))))


def test_even_table():
    """It is a permutation of what is kept, up to the highest L that has even r."""
    assert max(EVEN_TABLE) == RECURRENCE.axis_l
    for l in range(RECURRENCE.axis_l + 1):
        places, even = places_of(l, True, even=True), hermite_triples(l)[:, 0] % 2 == 0
        assert np.array_equal(np.sort(places[even]), np.arange(r_count(l, True)))
        assert not places[~even].any()
        assert (l in EVEN_TABLE) == (not np.array_equal(places[even], np.arange(r_count(l, True))))


@pytest.mark.parametrize("axis", range(3))
@pytest.mark.parametrize("l", [0, 1, 6])
def test_places_by_axis(l, axis):
    """r[t] is where the kernel, which takes the mirror axis first, puts it."""
    t, places = hermite_triples(l), places_of(l, True, even=True)
    turned = [[(i, j, k), (j, i, k), (k, i, j)][axis] for i, j, k in t.tolist()]
    assert r_places(l, axis).tolist() == [places[hermite_ordinal(*one)] for one in turned]


@pytest.mark.parametrize("axis", [None, 0, 1, 2])
def test_no_even_order_above(axis):
    """Where a group of threads makes r, it is whole."""
    assert np.array_equal(r_places(RECURRENCE.axis_l + 1, axis), np.arange(nherm(RECURRENCE.axis_l + 1)))


@pytest.mark.parametrize(("l_bra", "l_ket"), [(2, 2), (3, 3), (4, 3), (2, 6), (6, 3)])
def test_fewer_conflicts(l_bra, l_ket):
    """At least a quarter of the accesses less than in natural order, and 1.4 at most."""
    natural, banked = wavefronts(l_bra, l_ket)
    assert banked < 0.75 * natural
    assert banked < 1.4


@pytest.mark.parametrize("parity", range(2))
@pytest.mark.parametrize(("l_bra", "l_ket"), [(3, 3), (4, 4), (6, 3), (6, 6), (8, 8)])
def test_fewer_conflicts_of_parts(l_bra, l_ket, parity):
    natural, banked = wavefronts(l_bra, l_ket, (0, parity))
    assert banked < 0.75 * natural
    assert banked < 1.4
