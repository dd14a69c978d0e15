"""Rows of densities and of J in the Hermite basis."""

import pytest

from md4.gpu.hermite_rows import row_parts, row_places, row_width, row_words
from md4.method.angular import hermite_ordinal, hermite_triples, packed_hermite


@pytest.mark.parametrize("axis", [None, 0, 1, 2])
def test_rows(axis):
    """Each function has a place of its own; in a plane, those of one parity are together, whatever the axis."""
    for l in range(7):
        places, words = row_places(l, axis, l), row_words(l, axis is not None)
        assert len(places) % 8 == len(words) % 8 == 0
        assert len(words) == row_width(l, axis is not None)
        triples = hermite_triples(l).copy()
        assert (places[len(triples) :] == -1).all()
        if axis is not None:
            triples[:, [0, axis]] = triples[:, [axis, 0]]
        right = packed_hermite(l)[[hermite_ordinal(*triple) for triple in triples.tolist()]]
        assert words[places[: len(triples)]].tolist() == right.tolist()
        parts = row_parts(l, axis is not None)
        assert sorted(places[: len(triples)].tolist()) == [place for part in parts for place in part]
        for parity, part in enumerate(parts if axis is not None else ()):
            mine = [triple for triple, place in zip(triples, places) if place in part]
            assert all(triple[0] % 2 == parity for triple in mine)
