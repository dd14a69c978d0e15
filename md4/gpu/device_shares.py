"""Shares in the memory of devices that several processes use.

What is free on a device does not say how much of it the other processes are about to take. So ranks that share a device
agree on how much each of them may hold there (`md4.contract.team`), and all pools of a process on this device keep to
it together. Pools with a cap of their own do not; what they hold counts.
"""

import weakref
from collections import defaultdict
from typing import NamedTuple

from md4.support.locks import Lock


class Share(NamedTuple):
    """What all pools of this process may hold together of the memory of a device, and how many processes share it."""

    nbytes: int
    processes: int


# By the number of the device, as long as several processes share it.
shares = {}
_pools, _lock = defaultdict(weakref.WeakSet), Lock()


def take_share(device, share):
    """From now on this process keeps to its share of a device; None: the device is its own."""
    if share is None:
        shares.pop(device, None)
    else:
        shares[device] = share


def register(device, pool):
    """A pool of this process on a device."""
    with _lock:
        _pools[device].add(pool)


def pools_on(device):
    """All pools of this process on a device."""
    with _lock:
        return list(_pools[device])


def held_on(device):
    """Bytes of a device that all pools of this process hold."""
    return sum(pool.held_on_device for pool in pools_on(device))
