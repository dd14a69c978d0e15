"""Primitive pairs in slots side by side."""

import numpy as np

from md4.gpu.pair_layout import SIDE_BY_SIDE, slot_starts


def test_slots():
    """32 pairs side by side, no two primitives in one slot, those of a pair 32 apart."""
    counts = np.random.default_rng(0).integers(1, 5, 72)
    first, slots = slot_starts(np.concatenate([[0], np.cumsum(counts)]))
    place = np.concatenate([first[n] + SIDE_BY_SIDE * np.arange(k) for n, k in enumerate(counts)])
    assert slots % SIDE_BY_SIDE == 0
    assert len(set(place.tolist())) == counts.sum()
    assert place.max() < slots
    np.testing.assert_array_equal(first[:SIDE_BY_SIDE], np.arange(SIDE_BY_SIDE))
