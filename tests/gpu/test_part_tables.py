"""Where parts of a class are written: all numbers of a quartet by one of both parts, each once."""

import numpy as np
import pytest

from md4.gpu.part_tables import places_and_zeros, quartet_words
from md4.method.mirror import part_rows

# (l_a, l_b, spherical, nctr_a, nctr_b, single): few functions of one parity, and many.
CLASSES = [
    (1, 0, True, 1, 1, False), (1, 0, False, 2, 1, False), (2, 0, False, 1, 2, False), (2, 1, True, 1, 1, False),
    (3, 3, True, 1, 1, False), (4, 0, False, 1, 1, False), (6, 5, True, 1, 1, False),
]  # fmt: skip


def rows_of(shells, axis, parity):
    return part_rows(*shells[:5], axis, parity)


def size_of(shells):
    return sum(len(rows_of(shells, 0, parity)) for parity in range(2))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("axis", range(3))
@pytest.mark.parametrize("ket", CLASSES[:5], ids=str)
@pytest.mark.parametrize("bra", CLASSES[:4], ids=str)
def test_quartets_by_words(bra, ket, axis, turned):
    """Each integral of a part is at its place in the whole quartet, and all else is zero."""
    expected = np.zeros((size_of(bra), size_of(ket)))
    found = np.full(expected.size, np.nan)
    for parity in range(2):
        ab, cd = rows_of(bra, axis, parity), rows_of(ket, axis, parity)
        part = np.random.default_rng(parity).normal(size=(len(ab), len(cd)))
        expected[np.ix_(ab, cd)] = part
        words = quartet_words((*bra, axis, parity), (*ket, axis, parity), turned, 128)
        assert words.dtype == np.int32
        assert len(words) % 128 == 0
        words = words[words >= 0]
        place, source = words >> 16, words & 0xFFFF
        assert (np.diff(place) > 0).all()
        assert np.isnan(found[place]).all()
        found[place] = np.append(0.0, part.T if turned else part)[source]
    np.testing.assert_array_equal(found, (expected.T if turned else expected).reshape(-1))


@pytest.mark.parametrize("axis", range(3))
@pytest.mark.parametrize("shells", CLASSES, ids=str)
def test_places_and_zeros(shells, axis):
    for parity in range(2):
        shells_of_part, rows = (*shells, axis, parity), rows_of(shells, axis, parity)
        places = places_and_zeros(shells_of_part)
        assert places[: len(rows)].tolist() == rows.tolist()
        assert sorted(places[places >= 0]) == list(range(size_of(shells)))
        order = np.append(np.random.default_rng(0).permutation(len(rows)), [-1] * 3)
        padded = places_and_zeros(shells_of_part, order).reshape(3, -1)
        np.testing.assert_array_equal(padded[:, :-3], places.reshape(3, -1)[:, order[:-3]])
        assert (padded[:, -3:] == -1).all()
