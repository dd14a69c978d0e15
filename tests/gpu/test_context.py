"""The lock of a device: which device is current, and what interrupts leave behind; shared memory of a block."""

import threading
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from emulator import running
from interrupts import interrupted

from md4.gpu import context
from md4.gpu.context import DeviceContext, DeviceLock
from md4.gpu.kernels.select_quartets import selects


class Device:
    """A device that can be made current, on a stack as CUDA's."""

    def __init__(self, number, stack):
        self.number, self.stack = number, stack

    def __enter__(self):
        self.stack.append(self.number)

    def __exit__(self, *error):
        assert self.stack.pop() == self.number


@pytest.fixture
def stack(monkeypatch):
    """The current devices of three, of which device 0 is current."""
    stack = [0]
    monkeypatch.setattr(context, "current_device", lambda: stack[-1])
    monkeypatch.setattr(context, "cuda", SimpleNamespace(gpus=[Device(n, stack) for n in range(3)]))
    return stack


def is_free(lock):
    """Whether another thread can take a lock."""
    found = []

    def take():
        found.append(lock.acquire(blocking=False))
        if found[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return found[0]


def test_the_device_of_a_lock_is_current(stack):
    one, two = DeviceLock(1), DeviceLock(2)
    with one:
        assert stack == [0, 1]
        assert not is_free(one)
        with one, two, two:
            assert stack == [0, 1, 2]
        assert stack == [0, 1]
    assert stack == [0]
    with DeviceLock(0), DeviceLock():
        assert stack == [0]
    with pytest.raises(ValueError, match="of mine"), one:
        raise ValueError("of mine")
    assert stack == [0]
    assert is_free(one)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of an interrupt within __del__
def test_interrupts_leave_neither_the_lock_nor_the_device(stack):
    """At any line: the lock is free at once, and after the next use the device is the one that was current before."""
    lock, number = DeviceLock(1), 0

    def work():
        with lock, lock:
            assert stack[-1] == 1

    while interrupted(work, context.__file__, number):
        assert is_free(lock)
        work()
        assert stack == [0]
        number += 1
    assert number > 15


def test_an_exit_stack_is_refused(stack):
    """It would take the lock without a change of device."""
    lock = DeviceLock(1)
    with ExitStack() as held, pytest.raises((TypeError, AttributeError)):
        held.enter_context(lock)
    assert is_free(lock)


def test_a_switch_of_a_thread_is_undone_by_that_thread(stack):
    """An object that another thread drops later does not change the device of that thread."""
    lock = DeviceLock(1)
    kept = lock.__exit__
    assert stack == [0, 1]
    thread = threading.Thread(target=kept.__dict__.clear)
    thread.start()
    thread.join()
    assert stack == [0, 1]
    with lock:
        assert stack == [0, 1]
    assert stack == [0]


@pytest.mark.parametrize("block_kib, fits", [(99, False), (163, True), (227, True)])
def test_quartets_are_selected_where_a_block_has_the_shared_memory(block_kib, fits):
    """|D| of 20000 and 10000 shells take 120000 bytes; devices of capability 8.6 and 8.9 have less."""
    context = SimpleNamespace(block_shared=block_kib << 10)
    assert selects(context, (0, 20000, 0, 10000)) is fits
    assert not selects(context, (0, 30000, 0, 30000))  # which no other device is asked for, either
    assert not selects(context, (0, block_kib << 8, 0, 0))  # the kernel has some bytes besides


@pytest.mark.parametrize("unit", ["dmma8", "dmma16"])
def test_shared_memory_of_a_block(unit):
    """As the device says."""
    with running(unit):
        assert DeviceContext().block_shared == {"dmma8": 163 << 10, "dmma16": 227 << 10}[unit]
