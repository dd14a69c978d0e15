"""Several workers in one process: two on the CPU, which share its threads, or two GPUs."""


import pytest
from densities import CHAIN, random_densities
from molecules import METHANE, WATER, molecule

import md4
from md4.contract.worker import PartialSums
from md4.errors import ArgumentError, DeviceError, MemoryLimitError


@pytest.fixture
def two(backend, monkeypatch):
    """Options of `md4.JK` for two workers."""
    monkeypatch.setattr("md4.contract.work.SHORTEST", 1e-5)
    if backend == "cpu":
        monkeypatch.setattr("md4.contract.team.chosen", lambda *_: [None, None])
        return {"backend": "cpu"}
    from md4.gpu import device_count

    if device_count() < 2:
        pytest.skip("needs two GPUs")
    return {"backend": "cuda", "devices": [0, 1]}


@pytest.mark.sample("cpu-chain-0", "cpu-chain-1", "cpu-chain-2")
@pytest.mark.parametrize("hermi", [0, 1, 2])
@pytest.mark.parametrize("mol", [CHAIN, molecule(METHANE, "cc-pvtz")], ids=["chain", "methane"])
def test_as_one_worker(backend, two, mol, hermi):
    """J and K, J alone, K alone, and complex densities; all quartets are computed, each once."""
    one, both = md4.JK(mol, backend=backend), md4.JK(mol, **two)
    assert both.team.size == 2
    dm = random_densities(mol, hermi, 2)
    for options in ({}, {"with_k": False}, {"with_j": False}, {"omega": 0.3}):
        for mine, expected in zip(both.get_jk(dm, hermi, **options), one.get_jk(dm, hermi, **options)):
            assert (mine is None) == (expected is None)
            assert mine is None or abs(mine - expected).max() < 1e-12 * abs(expected).max(initial=1.0)
        # On a GPU, shorter lists may have their bounds from other kernels, whose rounding decides about quartets at the
        # tolerance: the chain had 55359 where one worker had 55369, on an H200.
        most = 0 if backend == "cpu" else 1e-3 * one.stats.wanted
        assert abs(both.stats.wanted - one.stats.wanted) <= most
        assert both.stats.wanted + both.stats.skipped == one.stats.wanted + one.stats.skipped
    mine, expected = (jk.get_jk(dm[0] + 1j * dm[1], 0) for jk in (both, one))
    assert abs(mine[1] - expected[1]).max() < 1e-12 * abs(expected[1]).max()


def test_both_workers_work(two, monkeypatch):
    """Each has a share of its own, and together they take all bundles."""
    taken, mol = {}, molecule(METHANE, "cc-pvtz")
    jk, dm = md4.JK(mol, **two), random_densities(mol)[0]
    jk.get_jk(dm)  # a first build has dry runs, which take the bundles, too

    def watched(part, tasks):
        taken.setdefault(part.worker.number, []).extend(tasks)
        return add(part, tasks)

    add = PartialSums.add
    monkeypatch.setattr(PartialSums, "add", watched)
    jk.get_jk(dm)
    assert set(taken) == {0, 1}
    tasks = [task[:3] for of_worker in taken.values() for task in of_worker]
    assert len(set(tasks)) == len(tasks) > 20


def test_update(backend, two):
    first, second = random_densities(CHAIN, count=2)
    jk = md4.JK(CHAIN, **two)
    jk.update(first)
    mine, expected = jk.update(second), md4.JK(CHAIN, backend=backend).get_jk(second)
    for a, b in zip(mine, expected):
        assert abs(a - b).max() < 1e-11


@pytest.mark.parametrize("fault", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("number", [0, 1])
def test_an_error_of_one_worker_ends_the_build(two, number, fault, monkeypatch):
    """Both workers have stopped when it arrives, and the next build is right."""
    mol, dm = CHAIN, random_densities(CHAIN)[0]
    jk = md4.JK(mol, **two)
    expected = jk.get_jk(dm)

    def fails(part, tasks):
        if part.worker.number == number:
            raise fault("in a worker")
        return add(part, tasks)

    add = PartialSums.add
    monkeypatch.setattr(PartialSums, "add", fails)
    with pytest.raises(fault, match="in a worker"):
        jk.get_jk(dm)
    monkeypatch.undo()
    for mine, right in zip(jk.get_jk(dm), expected):
        assert abs(mine - right).max() < 1e-12


@pytest.mark.parametrize("with_k", [True, False])
def test_the_attached_object(backend, two, with_k):
    """A whole SCF: the same energy in the same cycles."""
    mol = molecule(WATER, "6-31g")

    def energy(**options):
        cycles = []
        mf = md4.attach(mol.RHF() if with_k else mol.RKS(xc="lda"), **options)
        mf.callback = lambda local: cycles.append(local["cycle"])
        return mf.kernel(), len(cycles)

    (mine, cycles), (expected, theirs) = energy(**two), energy(backend=backend)
    assert abs(mine - expected) < 1e-9
    assert cycles == theirs


def test_lists_are_made_for_all_workers_or_for_none(two, monkeypatch):
    """After an error of the second worker, the next build begins anew."""
    from md4.contract import team

    jk, dm = md4.JK(CHAIN, **two), random_densities(CHAIN)[0]
    expected = md4.JK(CHAIN, backend=two["backend"]).get_jk(dm)

    def fails(engine, *options):
        if engine is jk.team.workers[1].engine:
            raise MemoryLimitError("the second device is full")
        return sorted_lists(engine, *options)

    sorted_lists = team.sorted_lists
    monkeypatch.setattr(team, "sorted_lists", fails)
    with pytest.raises(MemoryLimitError, match="the second device is full"):
        jk.get_jk(dm)
    monkeypatch.setattr(team, "sorted_lists", sorted_lists)
    for mine, right in zip(jk.get_jk(dm), expected):
        assert abs(mine - right).max() < 1e-12


def test_a_reset_that_fails_changes_nothing(two, monkeypatch):
    jk, dm = md4.JK(CHAIN, **two), random_densities(CHAIN)[0]
    expected = jk.get_jk(dm)
    monkeypatch.setattr(type(jk.ranks), "same", lambda ranks, facts: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        jk.reset(molecule(METHANE, "6-31g"))
    monkeypatch.undo()
    for mine, right in zip(jk.get_jk(dm), expected):
        assert abs(mine - right).max() < 1e-12


def test_devices_that_cannot_be():
    for devices, error in (("both", ArgumentError), ([0, 0], ArgumentError), ([99], DeviceError), (1.5, ArgumentError)):
        with pytest.raises(error, match="GPU"):
            md4.JK(CHAIN, devices=devices)
    with pytest.raises(ArgumentError, match="the CPU backend has none"):
        md4.JK(CHAIN, backend="cpu", devices="all")


def test_a_stream_belongs_to_one_device(two):
    with pytest.raises(ArgumentError, match="a stream belongs to one device"):
        md4.JK(CHAIN, stream=0, **two)


# GPUs -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpus(gpu):
    from md4.gpu import device_count

    if device_count() < 2:
        pytest.skip("needs two GPUs")


@pytest.mark.gpu
@pytest.mark.parametrize("bytes_of_nccl", [0, 1 << 60], ids=["nccl", "host"])
def test_sums_by_nccl_and_on_the_host(gpus, bytes_of_nccl, monkeypatch):
    """Results are on the first device where the density is on a device."""
    cupy = pytest.importorskip("cupy")
    monkeypatch.setattr("md4.contract.team.NCCL_BYTES", bytes_of_nccl)
    monkeypatch.setattr("md4.contract.work.SHORTEST", 1e-5)
    mol = molecule(METHANE, "cc-pvtz")
    dm = random_densities(mol, 0, 2)
    one, both = md4.JK(mol, backend="cuda"), md4.JK(mol, backend="cuda", devices="all")
    for _ in range(2):
        for options in ({}, {"with_k": False}):
            mine, expected = both.get_jk(dm, 0, **options), one.get_jk(dm, 0, **options)
            for a, b in zip(mine, expected):
                assert a is None or abs(a - b).max() < 1e-12 * abs(b).max()
    with cupy.cuda.Device(0):
        vj, _ = both.get_jk(cupy.asarray(dm), 0)
        assert vj.__cuda_array_interface__
        assert abs(cupy.asnumpy(cupy.asarray(vj)) - one.get_jk(dm, 0)[0]).max() < 1e-12 * 1e3
    assert (both.team.workers[1].group is not None) == (bytes_of_nccl == 0)


@pytest.mark.gpu
def test_another_device_than_the_current_one(gpus):
    mol, dm = CHAIN, random_densities(CHAIN)[0]
    second = md4.JK(mol, backend="cuda", devices=1)
    assert second.engine.backend.context.device == 1
    for mine, expected in zip(second.get_jk(dm), md4.JK(mol, backend="cuda").get_jk(dm)):
        assert abs(mine - expected).max() < 1e-12
    block = md4.Engine(md4.Basis.from_mol(mol), backend="cuda", device=1).compute([[0, 0]], [[0, 0]])
    assert block.shape == (1, 1, 1, 1, 1, 1)


@pytest.mark.gpu
def test_a_block_without_room_is_made_in_halves(gpu, monkeypatch):
    """Another program took the memory after the sizes were chosen: smaller blocks, the same J and K."""
    mol = molecule(METHANE, "cc-pvtz")
    jk, dm, refused = md4.JK(mol, backend="cuda"), random_densities(mol, 0)[0], []
    expected = jk.get_jk(dm, 0)
    scratch = type(jk.engine.backend).scratch

    def little(backend, shape):
        if shape[0] * shape[1] > 40:
            refused.append(shape)
            raise MemoryLimitError("no room")
        return scratch(backend, shape)

    monkeypatch.setattr(type(jk.engine.backend), "scratch", little)
    for mine, right in zip(jk.get_jk(dm, 0), expected):
        assert abs(mine - right).max() < 1e-12 * abs(right).max()
    assert refused

    def none(backend, shape):
        raise MemoryLimitError("no room at all")

    monkeypatch.setattr(type(jk.engine.backend), "scratch", none)
    with pytest.raises(MemoryLimitError, match="no room at all"):
        jk.get_jk(dm, 0)
