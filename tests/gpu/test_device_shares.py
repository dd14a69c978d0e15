"""A share of a device that several processes share: what all pools of this process keep to."""

import gc

import numpy as np
import pytest
from emulator import running

from md4.errors import MemoryLimitError
from md4.gpu import devices
from md4.gpu.device_shares import Share, held_on, shares, take_share
from md4.gpu.pool import RESERVE_BYTES, Pool

MEGABYTE = 1 << 17  # items


@pytest.fixture
def share():
    """8 MiB of device 0, which three processes share."""
    with running():
        gc.collect()
        take_share(0, Share(held_on(0) + (8 << 20), 3))
        yield shares[0]
        take_share(0, None)


def test_pools_share_a_part(share):
    one, other, elsewhere = Pool(device=0), Pool(device=0), Pool(device=1)
    assert one.left() == other.left() == 8 << 20
    assert elsewhere.left() > 1 << 30
    kept = one.get(4 * MEGABYTE)
    assert one.left() == other.left() == 4 << 20
    with pytest.raises(MemoryLimitError, match=r"but 4\.19 MB may be used; 3 processes share this GPU, start fewer"):
        other.get(5 * MEGABYTE)
    beside = other.get(4 * MEGABYTE)
    with pytest.raises(MemoryLimitError, match=r" 0 B may be used"):
        one.get(1)
    assert held_on(0) == share.nbytes
    one.release(kept)  # idle memory may be lent again, but by its own pool only
    assert (one.left(), other.left()) == (4 << 20, 0)
    one.trim()
    assert other.left() == 4 << 20
    del beside, other
    gc.collect()
    assert one.left() >= 4 << 20


def test_what_another_pool_has_dropped(share):
    """It is free as soon as Numba has freed it, which whoever needs memory asks for."""
    one, other = Pool(device=0), Pool(device=0)
    dropped = one.array((6 * MEGABYTE,))
    assert other.left() == 2 << 20
    del dropped
    gc.collect()
    assert one.held_on_device == 6 << 20
    assert one.left() == other.left() == 8 << 20
    kept = other.get(4 * MEGABYTE)
    assert (one.held_on_device, held_on(0)) == (0, share.nbytes - (4 << 20))
    del kept


def test_more_is_held_than_the_part(share):
    """Then nothing is left, and what becomes idle leaves no more than the rest of the part."""
    pool = Pool(device=0)
    kept = [pool.get(2 * MEGABYTE) for _ in range(4)]
    take_share(0, Share(held_on(0) - (3 << 20), 2))
    pool.release(kept.pop())
    assert pool.left() == 0
    pool.release(kept.pop())
    assert pool.left() == 1 << 20
    pool.get(MEGABYTE)


def test_memory_of_the_host_is_no_part_of_the_device(share):
    pool = Pool(device=0)
    kept = pool.watch(np.empty(16 * MEGABYTE))
    assert pool.held == kept.nbytes
    assert pool.held_on_device == 0
    assert pool.left() == 8 << 20


def test_a_cap_takes_the_place_of_the_part(share):
    """It may be larger; what is held under it is held by the process."""
    capped, other = Pool(max_memory=30, device=0), Pool(device=0)
    kept = capped.get(9 * MEGABYTE)
    assert capped.left() == 30_000_000 - kept.nbytes
    assert other.left() == 0
    with pytest.raises(MemoryLimitError, match="raise max_memory"):
        capped.get(32 * MEGABYTE)


def test_parts_of_what_is_free():
    """As much is left to the driver as by a process alone; never less than nothing."""
    try:
        devices.take_shares({5: (4 * RESERVE_BYTES, 2), 6: (RESERVE_BYTES, 2), 7: None})
        assert (shares[5], shares[6]) == (Share(RESERVE_BYTES, 2), Share(0, 2))
        assert 7 not in shares
        devices.take_shares({5: None})
        assert 5 not in shares
        assert 6 in shares  # of which nothing was said
    finally:
        for device in (5, 6, 7):
            take_share(device, None)
