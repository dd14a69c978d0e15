"""Density fitting by several workers of one process: on the CPU, which they share, or on two GPUs."""

import gc
import logging
import weakref
from functools import partial

import numpy as np
import pytest
from densities import random_densities
from hypothesis import given
from hypothesis import strategies as st
from molecules import molecule
from pyscf import df, scf

import md4
from md4.contract.density_fitting import DensityFitting
from md4.contract.fitting_share import Share, own_rows
from md4.contract.fitting_team import FittingTeam, density_fitting
from md4.contract.metric_rows import Substitution
from md4.gpu import device_count

AUXILIARY = "cc-pvdz-jkfit"
STORES = ["device", "host", "direct"]


def bases(mol, auxbasis=AUXILIARY):
    return [md4.Basis.from_mol(m) for m in (mol, df.make_auxmol(mol, auxbasis))]


@pytest.fixture
def workers(backend, monkeypatch):
    """A function that makes a fitting by so many workers; two on GPUs."""
    if backend == "cuda":
        pytest.importorskip("cupy")
        if device_count() < 2:
            pytest.skip("needs two GPUs")
    return partial(made_by, monkeypatch, backend)


@pytest.fixture
def on_cpu(monkeypatch):
    """The same on the CPU."""
    return partial(made_by, monkeypatch, "cpu")


def made_by(monkeypatch, where, mol, auxbasis=AUXILIARY, count=2, **options):
    if where == "cpu":
        monkeypatch.setattr("md4.contract.team.chosen", lambda *_: [None] * count)
    else:
        options |= {"devices": [0, 1]}
        count = 2
    made = density_fitting(*bases(mol, auxbasis), **{"backend": where, **options})
    assert isinstance(made, FittingTeam)
    assert made.count == len(made.shares) == count
    return made


def alone(mol, auxbasis=AUXILIARY, **options):
    return DensityFitting(*bases(mol, auxbasis), **{"backend": "cpu", **options})


def assert_same(found, wanted, tolerance=1e-10):
    for a, b in zip(found, wanted, strict=True):
        assert (a is None) == (b is None)
        assert b is None or (a.shape, a.dtype) == (b.shape, b.dtype)
        assert b is None or abs(a - b).max() < tolerance


# results --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store, count", [*((store, 2) for store in STORES), ("device", 3), ("direct", 3)])
def test_as_one_worker(workers, water, store, count):
    """J and K of densities of any symmetry, together and alone, of orbitals, complex ones; and another operator."""
    ours, theirs = workers(water, store=store, count=count), alone(water)
    assert (ours.store, ours.size) == (store, theirs.size)
    for each, reference in ((ours, theirs), [it.with_operator(md4.Operator.erf(0.4)) for it in (ours, theirs)]):
        for hermi in (0, 1, 2):
            dm = random_densities(water, hermi, 2)
            assert_same(each.get_jk(dm, hermi), reference.get_jk(dm, hermi))
        assert_same(each.get_jk(dm[0], 2, with_k=False), reference.get_jk(dm[0], 2, with_k=False))
        assert_same(each.get_jk(dm, 2, with_j=False), reference.get_jk(dm, 2, with_j=False))
        assert_same(each.get_jk(dm[0] + 1j * dm[1], 0), reference.get_jk(dm[0] + 1j * dm[1], 0))
    c = np.random.default_rng(0).normal(size=(water.nao, 3))
    orbitals = [(c, np.array([2.0, 0.0, 1.5]))]
    dm = (c * orbitals[0][1]) @ c.T
    assert_same(ours.get_jk(dm, orbitals=orbitals), theirs.get_jk(dm, orbitals=orbitals))
    assert_same(ours.get_jk(0 * dm), theirs.get_jk(0 * dm))


@pytest.mark.parametrize("store", STORES)
def test_rows(workers, water, store):
    """All in order, wherever they are."""
    ours, theirs = workers(water, store=store, count=3), alone(water)
    wanted = theirs.rows(0, theirs.size)
    for first, last in ((0, ours.size), (0, 1), (4, 5), (5, 18), (115, 116), (7, 7)):
        found = ours.rows(first, last)
        assert found.shape == (last - first, wanted.shape[1])
        assert abs(found - wanted[first:last]).max(initial=0) < 1e-12
    assert ours.rows_are_made == (store == "direct")


@pytest.mark.parametrize("store", ["device", "direct"])
def test_more_workers_than_rows(workers, store):
    """Some have no rows, no columns and no orbitals."""
    mol, auxbasis = molecule("He 0 0 0", "sto-3g"), {"He": [[0, [a, 1]] for a in (0.5, 2.0, 7.0)]}
    ours, theirs = workers(mol, auxbasis, 5, store=store), alone(mol, auxbasis)
    assert_same(ours.get_jk(np.eye(1)), theirs.get_jk(np.eye(1)))
    assert abs(ours.rows(0, 3) - theirs.rows(0, 3)).max() < 1e-13


def test_cutoff(workers):
    """All workers leave out the same pairs."""
    mol = molecule("He 0 0 0; He 0 0 3; He 0 0 9; He 0 0 14", "6-31g**")
    for store in ("device", "direct"):
        ours, theirs = (make(mol, "cc-pvdz-ri", store=store, cutoff=1e-12) for make in (workers, alone))
        assert ours.three.ncol == theirs.three.ncol < alone(mol, "cc-pvdz-ri", cutoff=0).three.ncol
        assert all(share.three.pairs is ours.three.pairs for share in ours.shares)
        dm = random_densities(mol)
        assert_same(ours.get_jk(dm), theirs.get_jk(dm))


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("beta, how", [(1.6, "Cholesky"), (1.2, "eigenvectors")])
def test_nearly_dependent_functions(workers, backend, water, store, beta, how):
    """The energy is that of one worker, and that of PySCF, also where workers substitute or take eigenvectors."""
    auxbasis = df.aug_etb(water, beta=beta)
    dm = scf.RHF(water).run(verbose=0).make_rdm1()

    def energy(vj, vk):
        return np.vdot(dm, vj) / 2 - np.vdot(dm, vk) / 4

    ours, one = workers(water, auxbasis, store=store), alone(water, auxbasis, backend=backend)
    theirs = df.DF(water, auxbasis).build()
    assert ours.metric.how == one.metric.how == how
    assert ours.size == one.size == theirs.get_naoaux()
    assert isinstance(ours.metric, Substitution) == (how == "Cholesky")
    mine = energy(*ours.get_jk(dm))
    assert abs(mine - energy(*one.get_jk(dm))) < 1e-10
    assert abs(mine - energy(*theirs.get_jk(dm))) < 1e-9
    rows, wanted = (made.rows(0, made.size) for made in (ours, one))
    assert abs(rows.T @ rows - wanted.T @ wanted).max() < 1e-10


def test_small_blocks(workers, water, monkeypatch):
    """Many chunks of columns, and blocks of rows."""
    theirs, algebra = alone(water), type(workers(water).shares[0].algebra)
    monkeypatch.setattr(algebra, "chunk_bytes", 1 << 15)
    monkeypatch.setattr(algebra, "block_bytes", 1 << 15)
    dm = random_densities(water, 0, 2)
    for store in STORES:
        ours = workers(water, store=store, count=3)
        assert len(ours.shares[1].columns.cuts()) > 3
        assert_same(ours.get_jk(dm, 0), theirs.get_jk(dm, 0))


# the division ---------------------------------------------------------------------------------------------------------


@given(total=st.integers(0, 200), count=st.integers(1, 30), data=st.data())
def test_rows_are_divided(total, count, data):
    """Any range of rows is that of all workers together, each row of one."""
    first = data.draw(st.integers(0, total))
    last = data.draw(st.integers(first, total))
    taken = []
    for number in range(count):
        start, stop = own_rows(first, last, number, count)
        taken += [number + count * row for row in range(start, stop)]
    assert sorted(taken) == list(range(first, last))


@given(sizes=st.lists(st.integers(1, 50), max_size=40), count=st.integers(1, 30))
def test_columns_are_divided(sizes, count):
    """The ranges of the workers follow each other from the first column to the last, between edges."""
    edges = np.cumsum([0, *sizes])
    end = 0
    for number in range(count):
        share = object.__new__(Share)
        share.number, share.count = number, count
        share.three = type("Three", (), {"edges": edges, "ncol": int(edges[-1])})
        first, last = share.own_columns()
        assert first == end
        assert last in edges
        end = last
    assert end == edges[-1]


# memory ---------------------------------------------------------------------------------------------------------------


def test_the_store_is_the_same_for_all(on_cpu, water, monkeypatch):
    """What the worker with the least memory can have; what is asked for and does not fit is refused."""
    rich = on_cpu(water)
    assert rich.store == "device"
    take_rows, little = Share._take_rows, rich.shares[1].columns.least_bytes + 30_000

    def poorer(share, *options):
        take_rows(share, *options)
        if share.number == 1:
            monkeypatch.setattr(share.algebra, "memory_left", lambda: little)

    monkeypatch.setattr(Share, "_take_rows", poorer)
    poor = on_cpu(water)
    assert {share.store for share in poor.shares} == {"direct"}
    assert_same(poor.get_jk(random_densities(water)), rich.get_jk(random_densities(water)))
    with pytest.raises(md4.MemoryLimitError, match="three-centre tensor of 58 "):
        on_cpu(water, store="device")


def test_tables_share_the_host(workers, water, monkeypatch):
    """Together they must fit into its memory."""
    monkeypatch.setattr("md4.contract.fitting_share.host_memory", lambda: 90_000)
    with pytest.raises(md4.MemoryLimitError, match="parts of the three-centre tensor of 2 workers take"):
        workers(water, store="host")
    assert workers(water, store="device").store == "device"


@pytest.mark.parametrize("store, cap", [("device", 0.6), ("direct", 0.51)])
def test_the_cap_is_that_of_each_worker(on_cpu, water, store, cap):
    """What each counts, from the first array on, stays below it."""
    made = on_cpu(water, store=store, max_memory=cap)
    most = dict.fromkeys(range(2), 0)
    for number, share in enumerate(made.shares):
        memory = share.engine.backend.memory
        assert memory.cap == cap * 1e6

        def watched(*args, number=number, memory=memory, watch=memory.watch):
            found = watch(*args)
            most[number] = max(most[number], memory.held)
            return found

        memory.watch = watched
    for each in (made, made.with_operator(md4.Operator.erf(0.3))):
        each.get_jk(random_densities(water, 0, 2), 0)
    assert all(0 < most[number] <= cap * 1e6 for number in most)
    with pytest.raises(md4.MemoryLimitError, match="the metric of 116 auxiliary functions"):
        on_cpu(water, store=store, max_memory=0.3)


def test_memory_is_freed(workers, water):
    """Neither the team nor its threads are kept by what they did."""
    ours = workers(water)
    ours.get_jk(random_densities(water))
    kept = [weakref.ref(it) for it in (ours, *ours.shares, ours.threads)]
    del ours
    gc.collect()
    assert [it() for it in kept] == [None] * 4


# errors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("store", ["device", "direct"])
@pytest.mark.parametrize("number", [0, 1])
def test_an_error_of_one_worker(workers, water, number, store, fault, monkeypatch):
    """It is raised when all have stopped, and the next build is right."""
    ours, dm = workers(water, store=store), random_densities(water)
    wanted = ours.get_jk(dm)

    def fails(share, *options):
        if share.number == number:
            raise fault("in a worker")
        return request(share, *options)

    request = Share._request
    monkeypatch.setattr(Share, "_request", fails)
    with pytest.raises(fault, match="in a worker"):
        ours.get_jk(dm)
    monkeypatch.setattr(Share, "_request", request)
    assert_same(ours.get_jk(dm), wanted)


@pytest.mark.parametrize("step", ["begin", "make_inverse", "stores", "keep"])
def test_an_error_while_it_is_made(workers, water, step, monkeypatch):
    made = getattr(Share, step)

    def fails(share, *options):
        if share.number == (0 if step == "make_inverse" else 1):
            raise md4.MemoryLimitError("the device is full")
        return made(share, *options)

    monkeypatch.setattr(Share, step, fails)
    with pytest.raises(md4.MemoryLimitError, match="the device is full"):
        workers(water)


@pytest.mark.parametrize("options, match", [
    ({"store": "disk"}, "store 'disk' is unknown"), ({"cutoff": -1}, "cutoff must be"),
    ({"backend": "gpu"}, "backend 'gpu'"), ({"stream": 0}, "a stream belongs to one device"),
])  # fmt: skip
def test_bad_options(workers, water, options, match):
    with pytest.raises(md4.ArgumentError, match=match):
        workers(water, **options)


def test_bad_densities(workers, water):
    ours = workers(water)
    for bad, match in ((np.zeros((2, 2)), "shape"), (np.full((13, 13), np.nan), "finite")):
        with pytest.raises(md4.ArgumentError, match=match):
            ours.get_jk(bad)


def test_the_log_tells_the_workers(workers, water, caplog):
    with caplog.at_level(logging.DEBUG, logger="md4"):
        workers(water)
    assert "density fitting by 2 workers: 116 auxiliary functions" in caplog.text


def test_one_device_needs_no_team(water):
    assert type(density_fitting(*bases(water), backend="cpu")) is DensityFitting
