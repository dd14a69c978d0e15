"""One index of each side over orbitals, beside md4's tensor transformed by NumPy."""

import numpy as np
import pytest
from emulator import running
from emulator.array_library import cupy
from molecules import CENTRES, HYDROGEN_FLUORIDE, joined, molecule
from row_workers import divided, engines

import md4
from md4.contract import pair_rows
from md4.contract.row_team import RowTeam
from md4.contract.tensor import ao_tensor
from md4.contract.transform import OneIndexOfEachSide
from md4.errors import MemoryLimitError
from md4.shells.basis import Basis
from md4.shells.shell import Shell
from md4.support.memory import HostMemory


def orbitals(nao, count, seed=0):
    """Orthonormal columns."""
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(nao, nao)))[0][:, :count]


def high_shells(pure=True):
    """s, p, g, h and i functions, two shells of one class, on four centres."""
    places = [(0, 0), (1, 1), (4, 1), (5, 2), (6, 3), (4, 0)] if pure else [(0, 0), (2, 1), (4, 2), (4, 3)]
    return Basis([Shell(l, [1.3 + 0.2 * l, 0.4], [[0.6], [0.5]], CENTRES[n]) for l, n in places], pure=pure)


def integrals(engine, occupied, first, second, beside=()):
    """(ia|jb) by md4, shape (i, a, j, b)."""
    one = OneIndexOfEachSide(RowTeam([engine, *beside]), occupied, max(first.shape[1], second.shape[1]))
    count = occupied.shape[1]
    found = np.zeros((count, first.shape[1], count, second.shape[1]))
    with engine.lock, one.algebra.working():
        for pairs, made in one.blocks(np.indices((count, count)).reshape(2, -1).T, *map(one.sorted, (first, second))):
            blocks = one.algebra.fetch(made)
            for n, (i, j) in enumerate(pairs):
                found[i, :, j] = blocks[:, n]
    return found


def transformed(engine, occupied, first, second):
    """The same by NumPy."""
    tensor = ao_tensor(engine, "s1")
    tensor = tensor.copy_to_host() if hasattr(tensor, "copy_to_host") else tensor
    for matrix in (occupied, first, occupied, second):
        tensor = np.tensordot(tensor, matrix, axes=(0, 0))
    return tensor


def compare(engine, count, virtual, tolerance=1e-12):
    nao = engine.bra_basis.nao
    every = orbitals(nao, nao)
    parts = every[:, :count], every[:, count : count + virtual], every[:, nao - 2 * virtual : nao]
    want = transformed(engine, *parts)
    assert abs(integrals(engine, *parts) - want).max() < tolerance * abs(want).max()


@pytest.mark.parametrize("operator", ["coulomb", ("erf", 0.4), ("slater", 1.1)], ids=str)
def test_high_angular_momenta(backend, operator):
    """g, h and i functions."""
    compare(md4.Engine(high_shells(), operator=operator, backend=backend), 3, 7)


def test_cartesian(backend):
    compare(md4.Engine(high_shells(pure=False), backend=backend), 2, 5)


def test_general_contractions_in_short_pieces(backend, monkeypatch):
    """Pieces of one shell pair each, matrices one at a time, H matrices made again: the same numbers."""
    monkeypatch.setattr(pair_rows, "SHARE_OF_ROWS", 10**6)
    monkeypatch.setattr(pair_rows, "HERMITE_SHARE", 1e-12)
    monkeypatch.setattr("md4.contract.transform.WORK_SHARE", 1e-9)
    basis = Basis.from_mol(molecule(HYDROGEN_FLUORIDE, joined("cc-pvdz", "HF")))
    compare(md4.Engine(basis, backend=backend), 4, 6)


def test_two_threads(two_threads):
    compare(md4.Engine(high_shells(), backend="cpu"), 3, 7)


@pytest.mark.parametrize("count, virtual", [(1, 1), (0, 3), (3, 0)])
def test_few_orbitals(count, virtual):
    engine = md4.Engine(high_shells(pure=False), backend="cpu")
    parts = (orbitals(engine.bra_basis.nao, n, n) for n in (count, virtual, virtual))
    occupied, first, second = parts
    found = integrals(engine, occupied, first, second)
    assert found.shape == (count, virtual, count, virtual)
    if found.size:
        np.testing.assert_allclose(found, transformed(engine, occupied, first, second), rtol=0, atol=1e-13)


def test_least_memory(monkeypatch):
    """What does not fit is refused before the first integral; with little more, the cap is kept and numbers stay."""
    peaks, watch = [], HostMemory.watch

    def watched(memory, *args):
        found = watch(memory, *args)
        peaks.append(memory.held)
        return found

    basis, refused = Basis.from_mol(molecule(HYDROGEN_FLUORIDE, "cc-pvdz")), []
    every = orbitals(basis.nao, basis.nao)
    parts = every[:, :3], every[:, 3:8], every[:, -5:]
    want = integrals(md4.Engine(basis, backend="cpu"), *parts)
    monkeypatch.setattr(HostMemory, "watch", watched)
    for cap in np.arange(0.1, 3, 0.05):
        peaks.clear()
        engine = md4.Engine(basis, backend="cpu", max_memory=cap)
        try:
            found = integrals(engine, *parts)
            break
        except MemoryLimitError as error:
            refused.append(str(error))
    assert any("integrals over 3 orbitals of 19 AOs take 26 kB and with the least" in text for text in refused), refused
    assert all("raise max_memory" in text for text in refused)
    assert max(peaks) <= cap * 1e6
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-13)


def of_one_side(engine, orbitals, pairs, first, second, beside=()):
    """(pq|ij) of pairs i, j, shape (p, q, pair)."""
    one = OneIndexOfEachSide(RowTeam([engine, *beside]), orbitals, 1, same_side=pairs)
    with engine.lock, one.algebra.working():
        made = [one.algebra.fetch(block) for _, block in one.over_same_side(*map(one.sorted, (first, second)))]
    return np.concatenate(made, axis=1).transpose(0, 2, 1)


@pytest.mark.parametrize("share", [16, 10**6])
def test_pairs_of_one_side(backend, share, monkeypatch):
    """(pq|ij) from the same pass, also in short pieces."""
    monkeypatch.setattr(pair_rows, "SHARE_OF_ROWS", share)
    engine = md4.Engine(Basis.from_mol(molecule(HYDROGEN_FLUORIDE, joined("cc-pvdz", "HF"))), backend=backend)
    every, pairs = orbitals(19, 19), np.array([[0, 0], [2, 1], [1, 2], [0, 2]])
    tensor = ao_tensor(engine, "s1")
    tensor = tensor.copy_to_host() if hasattr(tensor, "copy_to_host") else tensor
    for sets in ((every[:, :3], every[:, 4:]), (every[:, 4:], every[:, :3])):
        want = np.einsum("klmn,kp,lq,mi,nj->pqij", tensor, *sets, every[:, :3], every[:, :3], optimize=True)
        found = of_one_side(engine, every[:, :3], pairs, *sets)
        np.testing.assert_allclose(found, want[:, :, pairs[:, 0], pairs[:, 1]], rtol=0, atol=1e-12)


@pytest.mark.parametrize("count", [2, 3])
def test_several_devices(backend, count, monkeypatch):
    """The numbers of one, also where X goes to the first device in short parts."""
    monkeypatch.setattr("md4.contract.transform.SUM_BYTES", 50_000)
    first, *beside = engines(Basis.from_mol(molecule(HYDROGEN_FLUORIDE, joined("cc-pvdz", "HF"))), count, backend)
    every, pairs = orbitals(19, 19), np.array([[0, 0], [2, 1]])
    parts, of_pairs = (every[:, :3], every[:, 3:], every[:, 1:5]), (every[:, :3], pairs, every[:, :4], every[:, 4:])
    want = integrals(first, *parts), of_one_side(first, *of_pairs)
    with divided(count):
        found = integrals(first, *parts, beside=beside)
    np.testing.assert_allclose(found, want[0], rtol=0, atol=1e-13)
    with divided(count):
        found = of_one_side(first, *of_pairs, beside=beside)
    np.testing.assert_allclose(found, want[1], rtol=0, atol=1e-13)


def test_little_memory_of_one_device():
    """It is refused as if all had as little."""
    first, *beside = engines(Basis.from_mol(molecule(HYDROGEN_FLUORIDE, "cc-pvdz")), 3)
    beside[1].backend.memory.cap = 400_000
    with pytest.raises(MemoryLimitError, match=r"over 19 orbitals of 19 AOs take 1\.04 MB .* raise max_memory"):
        integrals(first, np.eye(19), np.eye(19), np.eye(19), beside=beside)


@pytest.mark.sample("dmma16-1", "fma-2")
@pytest.mark.parametrize("unit, count", [("dmma16", 1), ("dmma16", 2), ("dmma8", 1), ("fma", 1), ("fma", 2)])
def test_emulated_gpu(unit, count):
    """The whole way on the emulated device, or on two, with a stand-in for CuPy."""
    basis = Basis([Shell(l, [1.1, 0.3], [[0.6], [0.5]], CENTRES[n]) for l, n in ((0, 0), (1, 1))])
    every = orbitals(basis.nao, basis.nao)
    parts = every[:, :2], every[:, 2:], every[:, 1:3]
    cpu, of_pairs = md4.Engine(basis, backend="cpu"), (parts[0], np.array([[1, 0], [1, 1]]), parts[1], parts[2])
    want = integrals(cpu, *parts), of_one_side(cpu, *of_pairs)
    with running(unit, devices=count) as machine, cupy():
        gpu, *beside = engines(basis, count, "cuda")
        found = integrals(gpu, *parts, beside=beside), of_one_side(gpu, *of_pairs, beside=beside)
    for one, other in zip(found, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)
    assert (machine.kernels >= {"half_transform", "grouped_rows"}) == (unit != "fma")
