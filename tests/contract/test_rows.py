"""Tensors that several workers make together: two engines on the CPU, or the devices that there are."""

import threading

import numpy as np
import pytest
from molecules import WATER, molecule

import md4
from md4.contract import rows
from md4.contract.ranks import Alone
from md4.contract.rows import TensorRows, TensorTeam, TensorWorker, shared_tensor
from md4.contract.slices import Cuts
from md4.contract.tensor import Request
from md4.engine import Engine
from md4.errors import ArgumentError, DeviceError, MemoryLimitError
from md4.gpu import device_count
from md4.shells.basis import Basis
from md4.support.progress import Progress


@pytest.fixture(scope="module")
def basis():
    return Basis.from_mol(molecule(WATER, "6-31g**"))


@pytest.fixture(scope="module")
def right(basis):
    return {aosym: md4.contract.tensor.ao_tensor(Engine(basis, backend="cpu"), aosym) for aosym in ("s1", "s4", "s8")}


@pytest.fixture(autouse=True)
def small_slices(monkeypatch):
    monkeypatch.setattr(rows, "SLICE_BYTES", 1)


def engines(basis, count, **options):
    return [Engine(basis, backend="cpu", **options) for _ in range(count)]


@pytest.fixture
def computed(monkeypatch):
    """The slices that are computed, with the threads that did it."""
    found, compute = [], TensorWorker.compute

    def noted(self, layout):
        found.append((layout.ends, threading.get_ident()))
        compute(self, layout)

    monkeypatch.setattr(TensorWorker, "compute", noted)
    return found


def shared(basis, aosym, workers=2, shls_slice=None, **options):
    """The tensor by several workers of this process."""
    return shared_tensor(engines(basis, workers), Request.checked(basis, aosym, shls_slice), Alone(), **options)


@pytest.mark.parametrize("aosym", ["s1", "s4", "s8"])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_tensors(basis, right, computed, aosym, workers):
    found = shared(basis, aosym, workers)
    assert isinstance(found, TensorRows)
    assert found[:2] == (0, len(right[aosym]))
    np.testing.assert_allclose(found.array, right[aosym], rtol=0, atol=1e-14)
    assert len(computed) == 1 if workers == 1 else len(computed) >= 2 * workers
    assert len(set(computed)) == len(computed)


def test_each_worker_has_its_thread(basis, computed, monkeypatch):
    """Both make slices at the same time."""
    meeting, here, compute = threading.Barrier(2, timeout=60), set(), TensorWorker.compute

    def met(self, layout):
        if threading.get_ident() not in here:
            here.add(threading.get_ident())
            meeting.wait()
        compute(self, layout)

    monkeypatch.setattr(TensorWorker, "compute", met)
    shared(basis, "s8")
    assert {thread for _, thread in computed} == here
    assert len(here) == 2


def test_out(basis, right):
    out = np.full(right["s4"].shape, np.nan)
    assert shared(basis, "s4", out=out) is out
    np.testing.assert_allclose(out, right["s4"], rtol=0, atol=1e-14)


def test_part_of_a_tensor(basis, right):
    found = shared(basis, "s1", shls_slice=(2, 9, 0, 12, 3, 4, 1, 12)).array
    ends = basis.ao_loc[[2, 9, 0, 12, 3, 4, 1, 12]].reshape(4, 2)
    np.testing.assert_allclose(found, right["s1"][tuple(slice(*e) for e in ends)], rtol=0, atol=1e-14)


def test_file(basis, right, tmp_path):
    """Workers write to a file one at a time, from memory that they use again."""
    out = np.lib.format.open_memmap(tmp_path / "eri.npy", "w+", "f8", right["s8"].shape)
    assert shared(basis, "s8", out=out) is out
    np.testing.assert_allclose(np.load(tmp_path / "eri.npy"), right["s8"], rtol=0, atol=1e-14)


def test_memory_for_rows_is_used_again(basis, tmp_path):
    request, out = Request.checked(basis, "s1", None), np.lib.format.open_memmap(tmp_path / "a", "w+", "f8", (24,) * 4)
    team = TensorTeam(engines(basis, 1), request, Alone())
    worker = TensorWorker(team.engines[0], team.request, team.store(out, False), team.cuts.work_of)
    worker.make(team.cuts.layout.slice(3, 6))
    kept = worker.buffer
    assert len(kept) == 3 * 24**3
    worker.make(team.cuts.layout.slice(0, 2))
    assert worker.buffer is kept
    worker.make(team.cuts.layout.slice(6, 10))
    assert len(worker.buffer) == 4 * 24**3


def test_a_worker_that_runs_out_of_memory_makes_smaller_slices(basis, right, computed, monkeypatch):
    compute = TensorWorker.compute

    def limited(self, layout):
        if layout.ends[1] - layout.ends[0] > 2:
            raise MemoryLimitError("too much")
        compute(self, layout)

    monkeypatch.setattr(TensorWorker, "compute", limited)
    found = shared(basis, "s8").array
    np.testing.assert_allclose(found, right["s8"], rtol=0, atol=1e-14)
    ends = sorted(ends for ends, _ in computed)
    assert [first for first, _ in ends[1:]] == [last for _, last in ends[:-1]]


def test_an_error_of_one_worker_ends_all(basis, computed, monkeypatch):
    compute = TensorWorker.compute

    def failing(self, layout):
        if len(computed) == 3:
            raise DeviceError("the device is gone")
        compute(self, layout)

    monkeypatch.setattr(TensorWorker, "compute", failing)
    with pytest.raises(DeviceError, match="the device is gone"):
        shared(basis, "s1")
    assert len(computed) < 12


def test_progress(basis, monkeypatch):
    """The bar counts predicted work, and reaches its end."""
    totals = []

    class Noted(Progress):
        def __init__(self, total, **options):
            totals.append([total, 0])
            super().__init__(total, **options)

        @property
        def report(self):
            return self.update

        def update(self, n=1):
            totals[-1][1] += n

    monkeypatch.setattr(rows, "Progress", Noted)
    shared(basis, "s4", progress=False)
    ((total, done),) = totals
    assert done == pytest.approx(total)
    assert total == pytest.approx(Cuts(basis, Request.checked(basis, "s4", None)).work[-1])


def test_the_cap_holds_the_whole(basis):
    """Without a file, the tensor counts."""
    request = Request.checked(basis, "s1", None)
    with pytest.raises(MemoryLimitError, match=r"shape \(24, 24, 24, 24\) takes 2\.65 MB"):
        shared_tensor(engines(basis, 2, max_memory=2), request, Alone())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": True}, "device=True keeps the tensor on one device, but devices names 2"),
        ({"gather": True, "out": np.empty((300, 300))}, "gather=True returns the tensor on rank 0; leave out `out`"),
    ],
)
def test_arguments_that_do_not_go_together(basis, options, message):
    with pytest.raises(ArgumentError, match=message):
        shared(basis, "s4", **options)


def test_devices_of_the_cpu():
    mol = molecule(WATER, "sto-3g")
    with pytest.raises(ArgumentError, match="the CPU backend has none"):
        md4.int2e(mol, devices=[0, 1], backend="cpu")
    with pytest.raises(ArgumentError, match="comm must be a communicator of mpi4py"):
        md4.int2e(mol, comm="world", backend="cpu")
    with pytest.raises(ArgumentError, match="gather must be True or False"):
        md4.int2e(mol, gather="yes", backend="cpu")


def test_gather_without_ranks(basis, right):
    """The whole tensor, as on rank 0."""
    found = md4.int2e(molecule(WATER, "6-31g**"), "s4", backend="cpu", gather=True)
    np.testing.assert_allclose(found, right["s4"], rtol=0, atol=1e-14)


@pytest.fixture
def two_gpus(gpu):
    if device_count() < 2:
        pytest.skip("needs two GPUs")


@pytest.mark.gpu
@pytest.mark.parametrize("aosym", ["s1", "s4", "s8"])
@pytest.mark.parametrize("devices", ["all", [1, 0], 1])
def test_several_gpus(two_gpus, right, computed, aosym, devices):
    found = md4.int2e(molecule(WATER, "6-31g**"), aosym, backend="cuda", devices=devices)
    assert isinstance(found, np.ndarray)
    np.testing.assert_allclose(found, right[aosym], rtol=0, atol=1e-12)


@pytest.mark.gpu
def test_several_gpus_and_a_file(two_gpus, right, computed, tmp_path):
    """Slices that have to fit into a cap below the tensor."""
    mol = molecule(WATER, "cc-pvtz")
    theirs = mol.intor("int2e", aosym="s1")
    out = np.lib.format.open_memmap(tmp_path / "eri.npy", "w+", "f8", theirs.shape)
    md4.int2e(mol, "s1", backend="cuda", devices=[0, 1], out=out, max_memory=0.8 * theirs.nbytes / 1e6)
    np.testing.assert_allclose(out, theirs, rtol=0, atol=1e-11)


@pytest.mark.gpu
def test_one_gpu_by_its_number(gpu, right):
    mol = molecule(WATER, "6-31g**")
    found = md4.int2e(mol, "s8", devices=0)
    np.testing.assert_allclose(found, right["s8"], rtol=0, atol=1e-12)
    last = device_count() - 1
    on_device = md4.int2e(mol, "s8", devices=[last], device=True)
    np.testing.assert_allclose(on_device.copy_to_host(), right["s8"], rtol=0, atol=1e-12)
    with pytest.raises(DeviceError, match=f"there is no GPU {last + 1}"):
        md4.int2e(mol, devices=[last + 1])
