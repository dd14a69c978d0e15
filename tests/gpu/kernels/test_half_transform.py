"""Rows of pairs of AOs times orbitals, and rows added up in groups: on the emulated device and on a real one."""

from contextlib import contextmanager

import numpy as np
import pytest
from emulator import running
from emulator.array_library import cupy

import md4
from md4.gpu.algebra import DeviceAlgebra
from md4.gpu.kernels import half_transform
from md4.shells.basis import Basis

ONE_S = Basis.from_arrays([0], [[1.0]], [[[1.0]]], [[0.0, 0.0, 0.0]])


@contextmanager
def emulated():
    with running() as machine, cupy():
        algebra = DeviceAlgebra(md4.Engine(ONE_S, backend="cuda").backend)
        with algebra.working():
            yield algebra, machine.kernels


@contextmanager
def real():
    algebra = DeviceAlgebra(md4.Engine(ONE_S, backend="cuda").backend)
    with algebra.working():
        yield algebra, None


def filled(algebra, array):
    """A copy in memory whose ends the emulated device knows."""
    made = algebra.empty(array.shape)
    made[...] = algebra.send(array)
    return made


def check_half_transform(device, nao, count, turned, rows=3):
    rng = np.random.default_rng(nao)
    i, j = np.tril_indices(nao)
    places = np.zeros((nao, nao), dtype=np.int64)
    places[i, j] = places[j, i] = rng.permutation(len(i))
    table, orbitals = rng.normal(size=(rows, len(i) + 5)), rng.normal(size=(nao, count))
    with device() as (algebra, kernels):
        room = algebra.empty((rows, count + 1, nao) if turned else (rows, nao, count + 1))
        room[...] = np.nan
        out = (room.transpose(0, 2, 1) if turned else room)[:, :, :count]
        done = algebra.takes_rows(nao, count)
        if done:
            algebra.half_transform(filled(algebra, table), algebra.send(places), algebra.send(orbitals), out)
        found = algebra.fetch(algebra.xp.ascontiguousarray(room))
    if turned:
        found = found.transpose(0, 2, 1)
    found, rest = found[..., :-1], found[..., -1]
    assert done == (count <= 8 * half_transform.COLUMNS8[-1])
    assert np.isnan(rest).all()
    if done:
        assert kernels in (None, {"half_transform"})
        assert np.allclose(found, table[:, places] @ orbitals, rtol=0, atol=1e-13 * nao)


@pytest.mark.sample("5-3-orbitals last", "40-30-AOs last", "41-21-orbitals last")
@pytest.mark.races
@pytest.mark.parametrize("turned", [False, True], ids=["orbitals last", "AOs last"])
@pytest.mark.parametrize(("nao", "count"), [(1, 1), (5, 3), (32, 16), (70, 11), (40, 30), (41, 21), (33, 33)])
def test_rows_times_orbitals(nao, count, turned):
    """Tiles within the matrices and at their edges, several launches, both orders; nothing else is written."""
    check_half_transform(emulated, nao, count, turned)


@pytest.mark.gpu
@pytest.mark.parametrize("turned", [False, True], ids=["orbitals last", "AOs last"])
@pytest.mark.parametrize(("nao", "count"), [(1, 1), (264, 15), (510, 32), (876, 21), (900, 12), (130, 90)])
def test_on_a_gpu(nao, count, turned):
    check_half_transform(real, nao, count, turned, 300)


def test_no_room():
    """Where shared memory holds no row of W, or tensor cores are missing, matrices are made."""

    class Context:
        unit, block_shared = "dmma16", 227 << 10

    known = [(876, 15, 2), (1386, 15, 2), (4000, 15, None), (510, 27, 4), (876, 21, 3), (920, 32, None), (9, 33, None)]
    for nao, count, want in known:
        assert half_transform.columns_at_once(Context, nao, count) == want
    Context.unit = "fma"
    assert half_transform.columns_at_once(Context, 100, 4) is None


# groups ---------------------------------------------------------------------------------------------------------------


def check_groups(device, nao, count, width, sizes):
    """Groups of no rows at all have no target; what is behind the columns stays."""
    rng = np.random.default_rng(nao)
    targets = np.repeat(np.arange(0, 2 * len(sizes), 2), sizes)
    rows, sources = rng.integers(0, 30, len(targets)), rng.integers(0, nao, len(targets))
    array, factors = rng.normal(size=(30, width)), rng.normal(size=(nao, count))
    before = rng.normal(size=(2 * len(sizes), count, width + 3))
    want = before.copy()
    for target, row, source in zip(targets, rows, sources):
        want[target, :, :width] += np.outer(factors[source], array[row])
    with device() as (algebra, kernels):
        out = filled(algebra, before)
        algebra.add_groups(filled(algebra, array), rows, algebra.send(factors), sources, targets, out)
        found = algebra.fetch(out)
    assert kernels in (None, {"grouped_rows"})
    assert np.allclose(found, want, rtol=0, atol=1e-13 * max(1, len(rows)))


@pytest.mark.sample("3-1-1-*", "9-35-*")
@pytest.mark.races
@pytest.mark.parametrize(("nao", "count", "width", "sizes"), [
    (3, 1, 1, [1]), (5, 3, 70, [4, 0, 5]), (4, 11, 515, [3, 9]), (9, 35, 66, [2, 6, 1]),
])  # fmt: skip
def test_groups_of_rows(nao, count, width, sizes):
    """Whole fours of rows and others, columns of several blocks, factors of several launches."""
    check_groups(emulated, nao, count, width, sizes)


@pytest.mark.gpu
@pytest.mark.parametrize(("nao", "count", "width", "sizes"), [
    (3, 1, 1, [1]), (50, 15, 7650, [4, 0, 5, 31]), (40, 32, 1001, [7] * 40), (9, 70, 640, [2, 60, 1]),
])  # fmt: skip
def test_groups_on_a_gpu(nao, count, width, sizes):
    check_groups(real, nao, count, width, sizes)
