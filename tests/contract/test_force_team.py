"""Forces by several workers in one process: two or three on the CPU, two emulated GPUs, or two GPUs."""

from functools import partialmethod
from threading import Event

import numpy as np
import pytest
from emulator import running
from gpu.kernels.test_plain_python import basis_of
from molecules import molecule
from nuclear_forces import few, symmetric

import md4
from md4.contract.team import Stopped
from md4.errors import MemoryLimitError
from md4.gpu.backend import GpuBackend
from md4.gpu.pool import Pool

CALLS = {
    "closed shell": lambda jk, dm: jk.gradient(dm[0]), "two spins": lambda jk, dm: jk.gradient(dm, omega=0.4),
    "J": lambda jk, dm: jk.gradient(dm[0], exchange=0.0), "K": lambda jk, dm: jk.gradient(dm[0], coulomb=0.0),
    "long range": lambda jk, dm: jk.gradient(dm[0], exchange=0.2, long_range=(0.4, 0.6)),
    "tolerance": lambda jk, dm: jk.gradient(dm[0], tolerance=0.1),
    "products": lambda jk, dm: jk.product_gradient(*(dm + np.eye(dm.shape[-1], k=1)), 0.3, 2.0),
}  # fmt: skip


@pytest.fixture
def workers(backend, monkeypatch):
    """A function of a molecule and of a number that returns a `md4.JK` of so many workers; two on GPUs."""

    def on_gpus(mol, count=2, **options):
        return md4.JK(mol, backend="cuda", devices=[0, 1][:count], **options)

    def on_cpu(mol, count=2, **options):
        monkeypatch.setattr("md4.contract.team.chosen", lambda *_: [None] * count)
        return md4.JK(mol, backend="cpu", **options)

    if backend == "cuda" and md4.gpu.device_count() < 2:
        pytest.skip("needs two GPUs")
    return on_gpus if backend == "cuda" else on_cpu


@pytest.fixture(scope="module")
def mol():
    return few()


def assert_close(found, right):
    assert abs(found - right).max() <= 1e-12 * abs(right).max()


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", CALLS)
def test_as_one_worker(backend, workers, mol, name, count):
    """All quartets, each once, their bounds once; the same bits in each run, and by a second object."""
    one, several, dm = md4.JK(mol, backend=backend), workers(mol, count), symmetric(mol.nao, 2)
    right, found = (CALLS[name](jk, dm) for jk in (one, several))
    assert_close(found, right)
    assert len(several.stats.busy) == several.team.size == (2 if backend == "cuda" else count)
    assert all(several.stats.busy)
    for statistic in ("computed", "skipped", "wanted"):
        assert getattr(several.stats, statistic) == getattr(one.stats, statistic)
    for statistic in ("error_bound", "error_estimate"):
        assert getattr(several.stats, statistic) == pytest.approx(getattr(one.stats, statistic), rel=1e-10)
    if backend == "cpu" or name != "J":  # which a GPU adds up in any order
        for again in (several, workers(mol, count)):
            np.testing.assert_array_equal(CALLS[name](again, dm), found)


def test_j_apart(workers, mol, backend, monkeypatch):
    """All workers of GPUs make J apart from exchange, each a part of both; on CPUs it never is."""
    monkeypatch.setattr("md4.gpu.coulomb_forces.SHELLS", 0)
    monkeypatch.setattr("md4.gpu.coulomb_forces.OVERLAPPING", 2.0)
    dm, several, one = symmetric(mol.nao, 2), workers(mol), md4.JK(mol, backend="cpu")
    assert_close(several.gradient(dm), one.gradient(dm))
    assert several.stats.computed + several.stats.skipped == (1 + (backend == "cuda")) * sum(map(len, one.lists)) ** 2


def test_more_workers_than_pairs(workers):
    """Some have nothing to do."""
    mol = molecule("H 0 0 0; H 0.3 0.9 0.1", "sto-3g")
    dm = symmetric(mol.nao, 2)
    several, one = workers(mol, 5), workers(mol, 1)
    for call in CALLS.values():
        assert_close(call(several, dm), call(one, dm))


def test_shells_of_many_functions(workers):
    """Their primitives are divided on CPUs; a GPU takes the shells as they are."""
    shells = [[0, *([e, *np.eye(4)[n] + 0.1] for n, e in enumerate((9.0, 2.0, 0.8, 0.3)))], [1, [0.7, 1.0]]]
    mol = molecule("He 0 0 0; He 0.3 0.9 0.1", {"He": shells})
    dm = symmetric(mol.nao)
    several = workers(mol)
    found = several.gradient(dm)
    assert len(several.stats.busy) == 2
    assert_close(found, workers(mol, 1).gradient(dm))


@pytest.mark.parametrize("fault", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("number", [0, 1])
def test_an_error_of_one_worker(workers, mol, number, fault, monkeypatch):
    """The other one, which has not made its part, stops; nothing stays locked, and the next forces are right."""
    several, dm = workers(mol), symmetric(mol.nao)
    right, of_one = several.gradient(dm), several.team.workers[number].forces
    run, each, begun, failed, ends = type(of_one).run, several.team.each, Event(), Event(), []

    def fails(forces, *given):
        if forces is of_one:
            begun.wait(60)
            raise fault("in a worker")
        begun.set()
        failed.wait(60)
        try:
            return run(forces, *given)
        except Stopped:
            ends.append(forces)
            raise

    monkeypatch.setattr(several.team, "each", lambda work, stop: each(work, lambda: (stop(), failed.set())))
    monkeypatch.setattr(type(of_one), "run", fails)
    with pytest.raises(fault, match="in a worker"):
        several.gradient(dm)
    monkeypatch.undo()
    assert ends == [several.team.workers[1 - number].forces]
    np.testing.assert_array_equal(several.gradient(dm), right)


def test_each_worker_looks_at_its_own_memory(workers, mol, monkeypatch):
    several, dm = workers(mol), symmetric(mol.nao)
    right, backend = several.gradient(dm), several.team.workers[1].backend
    left = type(backend).memory_left
    own = backend.memory if backend.name == "cpu" else backend.context.pool

    def little(asked):
        mine = asked.memory if asked.name == "cpu" else asked.context.pool
        return 1000 if mine is own else left(asked)

    monkeypatch.setattr(type(backend), "memory_left", little)
    with pytest.raises(MemoryLimitError, match=r"^gradients of Basis.* but 1 kB may be used; raise max_memory"):
        several.gradient(dm)
    monkeypatch.undo()
    np.testing.assert_array_equal(several.gradient(dm), right)


def test_forces_are_made_for_all_workers_or_for_none(workers, mol, monkeypatch):
    """After an error of the second worker, the next call makes them anew; new lists have new ones."""
    several, dm = workers(mol), symmetric(mol.nao)
    first, second = several.team.workers
    sums = type(second.backend.sums)
    make, tried = sums.forces, []

    def fails(these, basis, lists, *given):
        if lists is first.lists or lists is second.lists:  # not those of a dry run
            tried.append(lists)
        if lists is second.lists:
            raise MemoryLimitError("the second device is full")
        return make(these, basis, lists, *given)

    monkeypatch.setattr(sums, "forces", fails)
    with pytest.raises(MemoryLimitError, match="the second device is full"):
        several.gradient(dm)
    monkeypatch.undo()
    assert len(tried) == 2
    assert first.forces is second.forces is None
    right = several.gradient(dm)
    kept = [worker.forces for worker in (first, second)]
    several.gradient(dm)
    assert [worker.forces for worker in (first, second)] == kept
    several.team.forget()
    assert first.forces is second.forces is None
    np.testing.assert_array_equal(several.gradient(dm), right)


def test_progress(workers, mol, monkeypatch):
    """A bar for all work of this process."""
    bars = []

    class Bar:
        def __init__(self, total, enabled, label):
            self.total, self.label, self.told = total, label, []
            bars.append(self)

        update = report = property(lambda self: self.told.append)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

    monkeypatch.setattr("md4.contract.team.Progress", Bar)
    for exchange in (1.0, 0.0):
        for count in (1, 2):
            workers(mol, count).gradient(symmetric(mol.nao), exchange=exchange)
    for bar in bars:
        assert bar.label == "Forces"
        assert sum(bar.told) == pytest.approx(bar.total)


def test_matrices(workers, mol):
    dm = symmetric(mol.nao, 2)
    for mine, right in zip(workers(mol).derivative_jk(dm), md4.JK(mol, backend="cpu").derivative_jk(dm)):
        assert_close(mine, right)


# two emulated GPUs, each with streams and memory of its own -----------------------------------------------------------


@pytest.mark.sample("1.0")
@pytest.mark.parametrize("exchange", [1.0, 0.0])
def test_emulated_gpus(exchange):
    """Each makes a part with its own memory and its own bounds."""
    basis = basis_of((0, 1))
    dm, on_cpu = symmetric(basis.nao), md4.JK(basis, backend="cpu")
    right = on_cpu.gradient(dm, exchange=exchange)
    with running(devices=2):
        both = md4.JK(basis, backend="cuda", devices="all")
        found = both.gradient(dm, exchange=exchange)
        assert [worker.backend.context.device for worker in both.team.workers] == [0, 1]
        assert all(worker.backend.context.pool.held for worker in both.team.workers)
        again = both.gradient(dm, exchange=exchange)
    assert_close(found, right)
    assert_close(again, right)
    assert not exchange or not np.any(again - found)  # J alone is added up in any order
    assert both.stats == on_cpu.stats
    assert all(both.stats.busy)
    for one, other in zip(*(worker.forces.bounds for worker in both.team.workers)):
        np.testing.assert_array_equal([one.own, one.derivative], [other.own, other.derivative])


@pytest.mark.thorough
def test_one_emulated_gpu_without_memory(monkeypatch):
    """It refuses before it allocates anything."""
    basis, asked = basis_of((0, 1)), []
    dm, left = symmetric(basis.nao), GpuBackend.memory_left

    def watched(pool, *given, method):
        if pool.device == 1:
            asked.append(given)
        return method(pool, *given)

    with running(devices=2):
        both = md4.JK(basis, backend="cuda", devices=[0, 1])
        right = both.gradient(dm)
        with monkeypatch.context() as patch:
            patch.setattr(GpuBackend, "memory_left", lambda own: 1000 if own.context.device else left(own))
            for name in ("get", "fresh", "room"):
                patch.setattr(Pool, name, partialmethod(watched, method=getattr(Pool, name)))
            with pytest.raises(MemoryLimitError, match=r"^gradients of Basis.* but 1 kB may be used; raise max_memory"):
                both.gradient(dm)
        np.testing.assert_array_equal(both.gradient(dm), right)
    assert not asked
