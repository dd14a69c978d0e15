"""Rectangles of quartets that there is no memory for."""

import weakref

import numpy as np

from md4.errors import MemoryLimitError
from md4.gpu.digest import DeviceDigest


class WithPairs(np.ndarray):
    """Numbers in place of prepared pairs."""

    pairs = property(len)


class Block:
    """What takes memory."""


def test_a_block_without_room_is_gone_before_its_halves_are_made():
    """Its memory may be all that there is."""
    pairs, refused, made = np.arange(4).view(WithPairs), [], []
    sums = object.__new__(DeviceDigest)
    sums.kept = {}

    def add_block(ab, cd, same, limits):
        assert not [block for block in refused if block() is not None]
        block = Block()
        if len(ab) * len(cd) > 4:
            refused.append(weakref.ref(block))
            raise MemoryLimitError("no room")
        made.extend((i, k) for i in ab.tolist() for k in cd.tolist())

    sums.add_block = add_block
    sums.add_rectangle(pairs, pairs, False)
    assert len(refused) == 3
    assert sorted(made) == [(i, k) for i in range(4) for k in range(4)]
