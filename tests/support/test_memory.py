"""Host memory: what there is, what is counted, and the cap of the CPU backend."""

import gc
import resource
import tracemalloc

import numpy as np
import pytest
from molecules import WATER, molecule
from traced_memory import OBJECTS_MB, named, traced

import md4
from md4.errors import MemoryLimitError
from md4.support import memory
from md4.support.memory import HostMemory

GB = 1 << 30


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Files of a made-up machine with 8 GB available; returns what writes one."""

    def write(place, text):
        path = tmp_path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        memory.limited_groups.cache_clear()

    monkeypatch.setattr(memory, "PROC", tmp_path / "proc")
    monkeypatch.setattr(memory, "CGROUPS", tmp_path / "groups")
    write("proc/meminfo", f"MemTotal: 16777216 kB\nMemAvailable: {8 * GB // 1024} kB\n")
    write("proc/self/statm", "1000 100 10 1 0 100 0\n")
    return write


def test_of_the_machine(machine):
    assert memory.host_memory() == 8 * GB


def test_of_a_control_group(machine):
    machine("proc/self/cgroup", "0::/batch/job\n")
    machine("groups/batch/job/memory.max", "max\n")
    machine("groups/batch/job/memory.current", f"{GB}\n")
    assert memory.host_memory() == 8 * GB
    machine("groups/batch/memory.max", f"{3 * GB}\n")
    machine("groups/batch/memory.current", f"{2 * GB}\n")
    machine("groups/batch/memory.stat", f"file 7\ninactive_file {GB // 2}\n")
    assert memory.host_memory() == 3 * GB // 2
    machine("groups/batch/job/memory.max", f"{GB + 1000}\n")
    assert memory.host_memory() == 1000


def test_of_a_control_group_of_version_1(machine):
    machine("proc/self/cgroup", "5:cpu,cpuacct:/\n4:memory:/job\n0::/\n")
    machine("groups/memory/job/memory.limit_in_bytes", f"{2 * GB}\n")
    machine("groups/memory/job/memory.usage_in_bytes", f"{GB}\n")
    machine("groups/memory/job/memory.stat", "total_inactive_file 512\n")
    assert memory.host_memory() == GB + 512
    machine("groups/memory/memory.limit_in_bytes", f"{GB}\n")
    machine("groups/memory/memory.usage_in_bytes", f"{2 * GB}\n")
    assert memory.host_memory() == 0


def test_of_a_limit_of_the_process(machine, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (GB, GB))
    assert memory.host_memory() == GB - 1000 * resource.getpagesize()


def test_arrays_count_as_long_as_they_live():
    here = HostMemory(1)
    array = here.empty((1000, 50))
    part = array[3:]
    assert here.held == 400_000
    del array
    gc.collect()
    assert here.held == 400_000
    assert here.left() == 600_000
    del part
    gc.collect()
    assert here.held == 0


def test_workspaces_that_are_kept_give_way():
    here = HostMemory(1)
    here.kept.append([here.empty((100_000,))])
    here.empty((20_000,))
    assert here.kept_bytes == 800_000
    here.zeros((30_000,))
    assert here.kept == []


def test_engines_give_up_what_they_keep(mol):
    """Where a larger result needs it; what a refusal names is enough."""
    basis = md4.Basis.from_mol(mol)
    s, p = ([[i, i] for i, c in enumerate(basis.classes.tolist()) if c == [l, 1]] * 20 for l in (0, 1))
    with pytest.raises(MemoryLimitError) as refusal:
        md4.Engine(basis, backend="cpu", max_memory=0.4).compute(p, p)
    cap = named(refusal.value)
    engine = md4.Engine(basis, backend="cpu", max_memory=cap)
    engine.compute(s[:40], s[:40])
    _, peak = traced(lambda: engine.compute(p, p))
    assert peak <= cap + OBJECTS_MB


# the cap --------------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def mol():
    return molecule(WATER, "6-31g")


def density(mol):
    d = np.random.default_rng(0).normal(size=(mol.nao, mol.nao))
    return d + d.T


def measured(work):
    """What `work()` gives, and the most memory (MB) that Python and NumPy took meanwhile."""
    tracemalloc.start()
    try:
        return work(), tracemalloc.get_traced_memory()[1] * 1e-6
    finally:
        tracemalloc.stop()


WORK = {
    "s1": lambda mol, **options: md4.int2e(mol, backend="cpu", **options),
    "s8": lambda mol, **options: md4.int2e(mol, "s8", backend="cpu", **options),
    "jk": lambda mol, **options: np.array(md4.get_jk(mol, density(mol), backend="cpu", **options)),
    "j": lambda mol, **options: md4.get_jk(mol, density(mol), with_k=False, backend="cpu", **options)[0],
}


@pytest.fixture(scope="module")
def uncapped(mol):
    return {name: work(mol) for name, work in WORK.items()}


@pytest.mark.parametrize("name", WORK)
def test_the_cap_holds(mol, uncapped, name):
    """From tiny to large: refused, or right within the cap, once it is large enough always right."""
    refused = []
    for cap in (0.05, 0.3, 0.6, 1.5, 10):
        try:
            ours, peak = measured(lambda: WORK[name](mol, max_memory=cap))  # noqa: B023 called at once
        except MemoryLimitError:
            refused.append(cap)
        else:
            assert abs(ours - uncapped[name]).max() <= 1e-12 * abs(uncapped[name]).max()
            assert peak <= cap + OBJECTS_MB, cap
    assert refused
    assert max(refused) <= 0.6


def test_many_threads_stay_within_the_cap(monkeypatch):
    """Blocks of densities, J and K in lanes of each of them count; what a refusal names is enough."""
    monkeypatch.setattr("md4.cpu.sums.number_of_threads", lambda: 64)
    mol = molecule("H 0 0 0; H 0 0 0.8", {"H": [[4, *np.column_stack([np.geomspace(0.3, 3, 4), np.eye(4)]).tolist()]]})
    dm = np.eye(mol.nao)

    def work(cap=None):
        return md4.JK(mol, backend="cpu", max_memory=cap).get_jk(dm)[1]

    (found, _), caps = traced(lambda: work(1.0)), [1.0]
    while isinstance(found, MemoryLimitError):
        caps.append(named(found))
        assert caps[-1] > caps[-2]
        found, peak = traced(lambda: work(caps[-1]))
        assert peak < caps[-1] + OBJECTS_MB
    assert len(caps) > 1
    assert abs(found - work()).max() < 1e-12


def test_engines_stay_within_the_cap(mol):
    basis = md4.Basis.from_mol(mol)
    shells = [n for n, c in enumerate(basis.classes.tolist()) if c == [1, 1]]
    pairs = np.array([[i, k] for i in shells for k in shells])
    want = md4.Engine(basis, backend="cpu").compute(pairs, pairs)
    for cap in (0.05, 0.3, 1, 10):
        engine = md4.Engine(basis, backend="cpu", max_memory=cap)
        try:
            for _ in range(2):
                block, peak = measured(lambda: engine.compute(pairs, pairs))  # noqa: B023 called at once
                np.testing.assert_allclose(block, want, atol=1e-13)
                assert peak <= cap + OBJECTS_MB
                del block
        except MemoryLimitError:
            assert cap < 0.2  # the least workspace
    assert engine.backend.memory.held == engine.backend.memory.kept_bytes
