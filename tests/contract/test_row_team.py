"""Who makes which pieces, and what happens if a device fails. What is made of them: the tests of those who share it."""

import gc
import weakref
from threading import Thread, local

import numpy as np
import pytest
from emulator import running
from emulator.array_library import cupy
from hypothesis import given
from hypothesis import strategies as st
from molecules import HYDROGEN_FLUORIDE, molecule
from row_workers import engines

from md4.contract.pair_rows import PairRows
from md4.contract.row_team import RowTeam, divided
from md4.contract.transform import OneIndexOfEachSide
from md4.shells.basis import Basis


@pytest.fixture
def team():
    return RowTeam(engines(Basis.from_mol(molecule(HYDROGEN_FLUORIDE, "6-31g")), 3))


@given(costs=st.lists(st.integers(1, 1000), max_size=40), count=st.integers(1, 10))
def test_pieces_are_divided(costs, count):
    """Each goes to one device, in their order; none has more than the largest piece more than another."""
    pieces = [(n, n + 1) for n in range(len(costs))]
    found = divided(pieces, costs, count)
    assert sorted(piece for some in found for piece in some) == pieces
    assert all(some == sorted(some) for some in found)
    loads = [sum(costs[n] for n, _ in some) for some in found]
    assert max(loads) - min(loads) <= max(costs, default=0)


def test_the_same_shell_pairs(team):
    """What the first device has found, prepared on each."""
    first, *others = team.rows
    assert [rows.engine.backend for rows in team.rows] == [engine.backend for engine in team.engines]
    for rows in others:
        assert rows.lists is first.lists
        assert rows.prepared is not first.prepared


def test_the_least_memory_counts(team):
    team.engines[1].backend.memory.cap = 1e6
    assert team.memory_left() == team.algebras[1].memory_left() < team.algebra.memory_left()


def test_each_device_has_a_thread(team):
    """It stays: CuPy keeps handles for each thread, which take long to make."""
    own = local()
    own.calls = [0]
    for count in range(1, 5):
        for calls in team.each(lambda n: vars(own).setdefault("calls", [n])):
            calls.append(count)
    assert team.each(lambda n: own.calls) == [[n, 1, 2, 3, 4] for n in range(3)]


def test_handles_of_cublas():
    """The emulated devices have one each for all passes."""
    with running("fma", devices=2), cupy() as library:
        team = RowTeam(engines(Basis.from_mol(molecule("He 0 0 0; He 0 0 1", "sto-3g")), 2, "cuda"))
        for _ in range(3):
            OneIndexOfEachSide(team, np.eye(2), 1)
        assert sorted(library.handles) == [0, 1]


def test_shares(team):
    """Copies of an object, each with the rows and the algebra of its device; no device without a piece."""
    whole = type("Whole", (), {})()
    pieces = [(0, 1), (1, 2)]
    shares = team.deal(whole, pieces, [1, 2], lambda share, own: (share, own))
    assert [own for _, own in shares] == [[(1, 2)], [(0, 1)]]
    assert shares[0][0] is whole
    for (share, _), rows, algebra in zip(shares, team.rows, team.algebras):
        assert share.rows is rows
        assert share.algebra is algebra


def free(locks):
    """Whether another thread gets all of them."""
    found = []

    def take():
        for lock in locks:
            found.append(lock.acquire(timeout=5))
            lock.release()

    thread = Thread(target=take)
    thread.start()
    thread.join()
    return found == [True] * len(locks)


@pytest.mark.parametrize("fault", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("number", [0, 2])
def test_an_error_of_one_device(team, number, fault, monkeypatch):
    """It is raised when all have stopped; nothing stays locked, and the next pass is right."""
    orbitals, integrals = np.eye(11)[:, :2], PairRows.integrals
    want = OneIndexOfEachSide(team, orbitals, 1).x

    def fails(rows, *args):
        if rows.engine.backend is team.engines[number].backend:
            raise fault("in a worker")
        integrals(rows, *args)

    monkeypatch.setattr(PairRows, "integrals", fails)
    with pytest.raises(fault, match="in a worker"):
        OneIndexOfEachSide(team, orbitals, 1)
    assert free([engine.lock for engine in team.engines])
    monkeypatch.undo()
    np.testing.assert_array_equal(OneIndexOfEachSide(team, orbitals, 1).x, want)


def test_memory_is_freed(team):
    """What the other devices have made, at once."""
    one = OneIndexOfEachSide(team, np.eye(11)[:, :2], 1)
    held = [engine.backend.memory.held for engine in team.engines[1:]]
    kept = weakref.ref(one)
    del one
    assert kept() is None
    gc.collect()
    assert [engine.backend.memory.held for engine in team.engines[1:]] == held
    assert max(held) < 8 * (11 * 2) ** 2
