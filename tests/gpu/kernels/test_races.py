"""The emulated GPU finds two threads that use the same memory without order; md4's kernels are right by their barriers.

Tests with the marker `races` have kernels checked so, all of them together.
"""

from functools import partial

import numpy as np
import pytest
from emulator import running
from emulator.machine import SHARED_BASE, WARP_BARRIER, Machine
from emulator.races import Accesses, Race
from gpu.kernels.test_plain_python import assert_same, basis_of

import md4
from md4.gpu.paths import plans

THREADS = 64


@pytest.fixture
def machine():
    made = Machine(races=True)
    made.place = made.memory.allocate(8 * THREADS).ctypes.data
    return made


def run(machine, kernel, blocks=1, args=()):
    machine.launch(kernel, blocks, THREADS, 8 * THREADS, args, 48 << 10)


def shared(n, size=8):
    """Address of a number in shared memory."""
    return SHARED_BASE + size * n


ORDERS = {
    "block": lambda machine: machine.barrier(),
    "named": lambda machine: machine.meet(1, THREADS),
    "named, of a warp": lambda machine: machine.meet(1 + machine.thread.warp, 32),
    "warp": lambda machine: machine.exchange(WARP_BARRIER, None),
    "shuffle": lambda machine: machine.shuffle_xor(0, 1),
    "none": lambda machine: None,
}


@pytest.mark.parametrize("by", [1, 32])
@pytest.mark.parametrize("order", ORDERS)
def test_what_a_neighbour_has_written(machine, order, by):
    """It may be read after a barrier of both, which a shuffle is not."""

    def kernel():
        me = machine.thread.index
        machine.store("shared", "f64", shared(me), (1.0,))
        ORDERS[order](machine)
        machine.load("shared", "f64", shared(me ^ by), 1)

    if order in ("block", "named") or (by == 1 and order in ("named, of a warp", "warp")):
        run(machine, kernel)
    else:
        with pytest.raises(Race, match="shared memory"):
            run(machine, kernel)


@pytest.mark.parametrize("rounds", [1, 2])
def test_what_a_neighbour_still_reads(machine, rounds):
    """A loop needs a barrier before its next round, too."""

    def kernel():
        me = machine.thread.index
        for _ in range(rounds):
            machine.store("shared", "f64", shared(me), (1.0,))
            machine.barrier()
            machine.load("shared", "f64", shared(THREADS - 1 - me), 1)

    if rounds == 1:
        run(machine, kernel)
    else:
        with pytest.raises(Race):
            run(machine, kernel)


@pytest.mark.parametrize(("order", "right"), [("block", True), ("warp", False)])
def test_knowledge_is_passed_on(machine, order, right):
    """From the first warp to one of its lanes, and from that by a second barrier to the other warp."""

    def kernel():
        me = machine.thread.index
        if me < 32:
            if me == 3:
                machine.store("shared", "f64", shared(0), (1.0,))
            machine.exchange(WARP_BARRIER, None)
        ORDERS[order](machine)
        if me == 40:
            machine.load("shared", "f64", shared(0), 1)

    if right:
        run(machine, kernel)
    else:
        with pytest.raises(Race):
            run(machine, kernel)


@pytest.mark.parametrize(("one", "other", "right"), [
    ("add", "add", True), ("add", "load", False), ("load", "add", False), ("load", "load", True),
    ("store", "store", False), ("store", "load", False), ("load", "store", False), ("add", "store", False),
])  # fmt: skip
def test_two_blocks(machine, one, other, right):
    """Nothing orders them; only what is atomic, and what is read, is done together."""
    do = {
        "add": lambda: machine.add(machine.place, 1.0),
        "store": lambda: machine.store("global", "f64", machine.place, (1.0,)),
        "load": lambda: machine.load("global", "f64", machine.place, 1),
    }

    def kernel():
        if machine.thread.index == 0:
            do[one if machine.block == 0 else other]()

    if right:
        run(machine, kernel, blocks=2)
    else:
        with pytest.raises(Race, match=r"thread 0 of block 1 .* global memory that thread 0 of block 0"):
            run(machine, kernel, blocks=2)


def test_launches_follow_each_other(machine):
    """What one has written the next one reads."""
    run(machine, lambda: machine.store("global", "f64", machine.place + 8 * machine.thread.index, (1.0,)))
    run(machine, lambda: machine.load("global", "f64", machine.place, 1), blocks=2)


@pytest.mark.parametrize(("whole", "right"), [(False, True), (True, False)])
def test_halves_of_a_word(machine, whole, right):
    """Two floats in the place of a double are two numbers, but not for who reads the double."""

    def kernel():
        me = machine.thread.index
        if me < 2:
            machine.store("shared", "f32", shared(me, 4), (1.0,))
        if me == 1 and whole:
            machine.load("shared", "f64", shared(0), 1)

    if right:
        run(machine, kernel)
    else:
        with pytest.raises(Race):
            run(machine, kernel)


@pytest.mark.parametrize(("before", "after", "right"), [(True, True, True), (False, True, False), (True, False, False)])
def test_copies(machine, before, after, right):
    """Nobody uses the target of a copy between its start and a barrier after it was waited for."""

    def kernel():
        me = machine.thread.index
        machine.store("shared", "f64", shared(me), (1.0,))
        if before:
            machine.barrier()
        machine.copy(shared(me ^ 1), machine.place + 8 * me, 8)
        machine.commit_copies()
        machine.wait_copies(0)
        if after:
            machine.barrier()
        machine.load("shared", "f64", shared(me), 1)

    if right:
        run(machine, kernel)
    else:
        with pytest.raises(Race):
            run(machine, kernel)


@pytest.mark.parametrize("barriers", [False, True])
@pytest.mark.parametrize("use", ["load", "store"])
def test_copies_under_way(machine, use, barriers):
    """They may be done at any moment; so not even their own thread uses the target, whatever barriers there are."""

    def kernel():
        me = machine.thread.index
        machine.copy(shared(me), machine.place + 8 * me, 8)
        machine.commit_copies()
        if barriers:
            machine.barrier()
        if use == "load":
            machine.load("shared", "f64", shared(me), 1)
        else:
            machine.store("shared", "f64", shared(me), (1.0,))
        if barriers:
            machine.barrier()
        machine.wait_copies(0)

    with pytest.raises(Race, match="under way"):
        run(machine, kernel)


@pytest.mark.parametrize(("access", "right"), [
    (lambda array, me: array[0, me], True), (lambda array, me: array[0][me], True),
    (lambda array, me: array.__setitem__((1, me), 0.0), True), (lambda array, me: array.add((1, 3), 1.0), True),
    (lambda array, me: array.__setitem__((1, me // 2), 0.0), False),
    (lambda array, me: array[1].__setitem__(-1, 0.0), False),
])  # fmt: skip
def test_elements_of_arrays(machine, access, right):
    whole = machine.array(machine.memory.allocate(16 * THREADS)[: 16 * THREADS].view(np.float64).reshape(2, THREADS))

    def kernel(array):
        access(array, machine.thread.index)

    start = partial(run, machine, kernel, args=(whole,))
    if right:
        start()
    else:
        with pytest.raises(Race):
            start()


@pytest.mark.races
@pytest.mark.parametrize(("ls", "path"), [
    ((1, 0, 0, 0), "fused"), ((1, 1, 1, 0), "two_products"), ((2, 1, 2, 2), "fused"),
])  # fmt: skip
def test_kernels_without_their_barriers(ls, path, monkeypatch):
    """Right with them, and races as soon as their barriers order nothing."""
    basis, pairs = basis_of(ls), ([[0, 1]] * 3, [[2, 3]] * 2)
    right = md4.Engine(basis, backend="cpu").compute(*pairs)
    with running():
        engine = md4.Engine(basis, backend="cuda")
        sides = [engine.prepare(side).pairs for side in pairs]
        plan = next(p for p in plans("dmma16", *sides) if p.path.name == path)
        engine.backend.plan = lambda *_: plan
        assert_same(engine.compute(*pairs).copy_to_host(), right)
        monkeypatch.setattr(Accesses, "meet", lambda self, threads: None)
        with pytest.raises(Race, match="shared memory"):
            engine.compute(*pairs)
