"""(pq|rs) over four sets of orbitals beside md4's tensor transformed by NumPy."""

from itertools import pairwise

import numpy as np
import pytest
from emulator import running
from emulator.array_library import cupy
from molecules import CENTRES, HYDROGEN_FLUORIDE, joined, molecule
from row_workers import divided, engines

import md4
from md4.contract import four_index
from md4.contract.four_index import FourIndex, Side
from md4.contract.row_team import RowTeam
from md4.contract.tensor import ao_tensor
from md4.cpu.algebra import HostAlgebra
from md4.errors import MemoryLimitError
from md4.shells.basis import Basis
from md4.shells.shell import Shell


def sets(nao, *counts):
    """Sets of neighbouring orthonormal columns, which begin again if there are too few."""
    every = np.linalg.qr(np.random.default_rng(0).normal(size=(nao, nao)))[0]
    ends = np.cumsum([0, *counts])
    return [every[:, np.arange(first, last) % nao] for first, last in pairwise(ends)]


def integrals(engine, bra, ket, beside=()):
    """By md4, shape (pairs, pairs)."""
    found, four = np.full((bra.pairs, ket.pairs), np.nan), FourIndex(RowTeam([engine, *beside]), bra, ket)

    def put(algebra, first, block):
        found[first : first + len(block)] = algebra.fetch(algebra.xp.ascontiguousarray(block))

    four.integrals(put)
    return found


def by_numpy(engine, *sides):
    found = ao_tensor(engine, "s1")
    found = found.copy_to_host() if hasattr(found, "copy_to_host") else found
    for side in sides:
        for matrix in (side.one, side.other):
            found = np.tensordot(found, matrix, axes=(0, 0))
    n, m, k, l = found.shape
    bra, ket = (np.flatnonzero(places(side)) for side in sides)
    return found.reshape(n * m, k * l)[bra][:, ket]


def places(side):
    """Which of [p][q] are pairs."""
    shape = side.one.shape[1], side.other.shape[1]
    return np.tri(*shape, dtype=bool) if side.compact else np.ones(shape, dtype=bool)


def compare(engine, *sides):
    found, want = integrals(engine, *sides), by_numpy(engine, *sides)
    assert found.shape == want.shape
    assert abs(found - want).max(initial=0) < 1e-12 * max(1, abs(want).max(initial=0))


@pytest.fixture(scope="module")
def contracted():
    return Basis.from_mol(molecule(HYDROGEN_FLUORIDE, joined("cc-pvdz", "HF")))


@pytest.mark.parametrize("counts", [(3, 5, 7, 2), (5, 3, 2, 7), (1, 1, 1, 1), (4, 0, 3, 3), (3, 3, 0, 1)], ids=str)
def test_four_sets(backend, contracted, counts):
    p, q, r, s = sets(contracted.nao, *counts)
    compare(md4.Engine(contracted, backend=backend), Side(p, q), Side(r, s))


def test_compact(backend, contracted):
    p, q, r = sets(contracted.nao, 4, 3, 5)
    engine = md4.Engine(contracted, backend=backend)
    compare(engine, Side(p, p, compact=True), Side(r, r, compact=True))
    compare(engine, Side(p, q), Side(r, r, compact=True))


@pytest.mark.parametrize("pure", [True, False])
def test_high_angular_momenta(backend, pure):
    shells = [(0, 0), (4, 1), (5, 2), (6, 3)] if pure else [(0, 0), (2, 1), (4, 2)]
    basis = Basis([Shell(l, [1.3 + 0.2 * l, 0.4], [[0.6], [0.5]], CENTRES[n]) for l, n in shells], pure=pure)
    p, q, r = sets(basis.nao, 3, 6, 4)
    compare(md4.Engine(basis, operator=("erfc", 0.3), backend=backend), Side(p, q), Side(r, r, compact=True))


def test_memory_that_nobody_has_written(monkeypatch):
    """Pairs of distant shells are left out: there are zeros, whatever was in the memory before."""
    empty = HostAlgebra.empty

    def poisoned(algebra, shape):
        array = empty(algebra, shape)
        array[...] = np.nan
        return array

    engine = md4.Engine(Basis.from_mol(molecule("He 0 0 0; He 0 0 40", "6-31g")), backend="cpu")
    for name in ("empty", "host_table"):
        monkeypatch.setattr(HostAlgebra, name, poisoned)
    one, two, three, four = sets(4, 2, 1, 2, 3)
    compare(engine, Side(one, two), Side(three, four))


@pytest.mark.parametrize("compact", [False, True])
def test_several_passes(contracted, compact, monkeypatch):
    """Ranges of p one after the other, a few matrices at a time."""
    monkeypatch.setattr(four_index, "DEVICE_SHARE", 1e-9)
    monkeypatch.setattr(four_index, "WORK_SHARE", 1e-9)
    p, q, r = sets(contracted.nao, 5, 5, 3)
    bra = Side(p, p, compact=True) if compact else Side(p, q)
    four = FourIndex(RowTeam([md4.Engine(contracted, backend="cpu")]), bra)
    with four.team.engine.lock, four.algebra.working():
        ranges = [(first, last) for first, last, _ in four.passes()]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == 5
    assert len(ranges) > 2
    compare(four.team.engine, bra, Side(q, r))


def test_least_memory(contracted):
    p, q, r = sets(contracted.nao, 5, 5, 3)
    bra, ket, refused = Side(p, q), Side(r, r, compact=True), []
    want = integrals(md4.Engine(contracted, backend="cpu"), bra, ket)
    for cap in np.arange(0.1, 3, 0.05):
        try:
            found = integrals(md4.Engine(contracted, backend="cpu", max_memory=cap), bra, ket)
            break
        except MemoryLimitError as error:
            refused.append(str(error))
    assert "integrals over 25 pairs of orbitals and 209 of AOs" in refused[-1]
    assert "raise max_memory" in refused[-1]
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-13)


@pytest.mark.parametrize("count", [2, 3])
def test_several_devices(backend, contracted, count, monkeypatch):
    """Each makes rows P, and then (pq|rs) of some pairs pq; the numbers are those of one."""
    p, q, r = sets(contracted.nao, 4, 3, 5)
    (first, *beside), sides = engines(contracted, count, backend), (Side(p, q), Side(r, r, compact=True))
    want, put, blocks = integrals(first, *sides), FourIndex._put, {}

    def watched(four, begin, table, cuts, *args):
        blocks[four.algebra] = cuts.copy()
        put(four, begin, table, cuts, *args)

    monkeypatch.setattr(FourIndex, "_put", watched)
    with divided(count):
        found = integrals(first, *sides, beside=beside)
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-13)
    assert len(blocks) == count
    assert sorted(pair for cuts in blocks.values() for cut in cuts for pair in range(*cut)) == list(range(12))


def test_an_error_of_one_device(contracted, monkeypatch):
    """That puts its integrals somewhere: it is raised in the caller."""
    p, q, r = sets(contracted.nao, 4, 3, 5)
    four = FourIndex(team := RowTeam(engines(contracted, 2)), Side(p, q), Side(r, r))

    def put(algebra, *args):
        if algebra is team.algebras[1]:
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        four.integrals(put)


@pytest.mark.sample("device", "two")
@pytest.mark.parametrize("share, count", [(0.4, 1), (0.0, 1), (0.4, 2)], ids=["device", "host", "two"])
def test_emulated_gpu(share, count, monkeypatch):
    """With (pq|P) on the emulated device, in memory of the host, and there by two devices."""
    basis = Basis([Shell(l, [1.1, 0.3], [[0.6], [0.5]], CENTRES[n]) for l, n in ((0, 0), (1, 1))])
    p, q, r = sets(basis.nao, 2, 1, 3)
    sides = Side(p, q), Side(r, r, compact=True)
    want = integrals(md4.Engine(basis, backend="cpu"), *sides)
    monkeypatch.setattr(four_index, "DEVICE_SHARE", share)
    with running("dmma16", devices=count), cupy():
        gpu, *beside = engines(basis, count, "cuda")
        found = integrals(gpu, *sides, beside=beside)
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-12)
