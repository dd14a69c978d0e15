"""Rows of pairs of AOs times orbitals on the emulated device."""

import numpy as np
import pytest
from emulator import running
from emulator.array_library import cupy

import md4
from md4.gpu.algebra import DeviceAlgebra
from md4.gpu.kernels import half_transform
from md4.shells.basis import Basis

ONE_S = Basis.from_arrays([0], [[1.0]], [[[1.0]]], [[0.0, 0.0, 0.0]])


@pytest.mark.sample("5-3-orbitals last", "40-70-AOs last")
@pytest.mark.races
@pytest.mark.parametrize("turned", [False, True], ids=["orbitals last", "AOs last"])
@pytest.mark.parametrize(("nao", "count"), [(1, 1), (5, 3), (32, 8), (70, 11), (40, 70)])
def test_rows_times_orbitals(nao, count, turned):
    """Tiles within the matrices and at their edges, several launches, both orders; nothing else is written."""
    rng = np.random.default_rng(nao)
    i, j = np.tril_indices(nao)
    places = np.zeros((nao, nao), dtype=np.int64)
    places[i, j] = places[j, i] = rng.permutation(len(i))
    table, orbitals = rng.normal(size=(3, len(i) + 5)), rng.normal(size=(nao, count))
    with running() as machine, cupy():
        algebra = DeviceAlgebra(md4.Engine(ONE_S, backend="cuda").backend)
        with algebra.working():
            room = algebra.empty((3, count + 1, nao) if turned else (3, nao, count + 1))
            room[...] = np.nan
            out = (room.transpose(0, 2, 1) if turned else room)[:, :, :count]
            given = algebra.empty(table.shape)  # in memory whose ends the device knows
            given[...] = table
            done = algebra.half_transform(given, algebra.send(places), algebra.send(orbitals), out)
            found, rest = algebra.fetch(out), algebra.fetch(room)
    assert done == (count <= 8 * half_transform.MOST_COLUMNS8 * half_transform.MOST_PASSES)
    assert np.isnan(rest[:, count] if turned else rest[:, :, count]).all()
    if done:
        assert machine.kernels == {"half_transform"}
        assert np.allclose(found, table[:, places] @ orbitals, rtol=0, atol=1e-13 * nao)


def test_no_room():
    """Where shared memory holds no row of W, or tensor cores are missing, matrices are made."""

    class Context:
        unit, block_shared = "dmma16", 227 << 10

    assert half_transform.columns_at_once(Context, 876, 15) == 2
    assert half_transform.columns_at_once(Context, 1386, 15) == 1
    assert half_transform.columns_at_once(Context, 4000, 15) is None
    assert half_transform.columns_at_once(Context, 100, 97) is None
    Context.unit = "fma"
    assert half_transform.columns_at_once(Context, 100, 4) is None
