"""Density fitting on a GPU: on the emulated device with a stand-in for CuPy, and on a real one."""

import sys

import numpy as np
import pytest
from densities import random_densities
from emulator import host_array, running
from emulator.array_library import cupy
from molecules import WATER, molecule
from pyscf import df, gto

import md4
from md4.contract.density_fitting import DensityFitting
from md4.contract.fitting_stores import Columns
from md4.contract.fitting_team import density_fitting
from md4.contract.metric_rows import inverse
from md4.contract.three_centre import ThreeCentre
from md4.gpu.buffers import as_buffer

STORES = ["device", "host", "direct"]
# Few functions, since the emulated device is slow.
FEW = gto.M(atom="H 0 0 0; H 0 0.3 1.1; H 0.7 0 0.4", basis={"H": [[0, [1.1, 1]]]}, spin=1, verbose=0)
MORE = gto.M(atom="H 0 0 0; F 0 0.3 1.1", basis="6-31g", verbose=0)
AUXILIARY = {"H": [[0, [2.0, 1]], [1, [0.7, 1]]], "F": [[l, [a, 1]] for l in (0, 1, 2) for a in (0.4, 1.5)]}
DEPENDENT = {symbol: [*shells, *shells] for symbol, shells in AUXILIARY.items()}


def fitting(mol, auxbasis, backend, **options):
    bases = (md4.Basis.from_mol(m) for m in (mol, df.make_auxmol(mol, auxbasis)))
    return DensityFitting(*bases, backend=backend, cutoff=0, **options)


@pytest.fixture(scope="module")
def emulated():
    with running("dmma16"), cupy() as library:
        yield library


@pytest.fixture
def host_integrals(monkeypatch):
    """Integrals on the device are those of the CPU backend, which saves the time of emulated kernels."""
    integrals, metric = ThreeCentre.integrals, ThreeCentre.metric

    def twin(three):
        return ThreeCentre(*three.basis.parts, backend="cpu")

    def copied(self, first, last, out):
        if self.engine.backend.name == "cpu":
            return integrals(self, first, last, out)
        out[...] = integrals(twin(self), first, last)
        return out

    def copied_metric(self):
        if self.engine.backend.name == "cpu":
            return metric(self)
        out = self.engine.backend.result((self.naux, self.naux))
        host_array(as_buffer(out), "float64").reshape(out.shape)[...] = metric(twin(self))
        return out

    monkeypatch.setattr(ThreeCentre, "integrals", copied)
    monkeypatch.setattr(ThreeCentre, "metric", copied_metric)


def compare(ours, theirs, mol):
    """J and K of two general densities and of a symmetric one, and rows of the tensor."""
    assert ours.metric.how == theirs.metric.how
    dm = random_densities(mol, 0, 3)
    dm[1] += dm[1].T
    for found, wanted in zip(ours.get_jk(dm, 0), theirs.get_jk(dm, 0), strict=True):
        assert type(found) is np.ndarray
        assert abs(found - wanted).max() < 1e-10
    found, wanted = (made.rows(0, made.size) for made in (ours, theirs))
    assert abs(found.T @ found - wanted.T @ wanted).max() < 1e-10
    assert abs(ours.rows(1, 3) - found[1:3]).max() < 1e-14


def test_plain_python(emulated):
    """From the first kernel to the last product, also with an operator that shares all else."""
    ours, theirs = (fitting(FEW, AUXILIARY, name) for name in ("cuda", "cpu"))
    compare(ours, theirs, FEW)
    operator = md4.Operator.erf(0.4)
    other = ours.with_operator(operator)
    assert other.engine.backend.context is ours.engine.backend.context
    compare(other, fitting(FEW, AUXILIARY, "cpu", operator=operator), FEW)
    compare(ours, theirs, FEW)


@pytest.mark.parametrize("auxbasis", [AUXILIARY, DEPENDENT], ids=["Cholesky", "eigenvectors"])
@pytest.mark.parametrize("store", STORES)
def test_stores(emulated, host_integrals, store, auxbasis, monkeypatch):
    """Blocks of few rows, so that both buffers of a streamed tensor are filled again."""
    monkeypatch.setattr("md4.gpu.algebra.DeviceAlgebra.block_bytes", 1 << 13)
    monkeypatch.setattr("md4.gpu.algebra.DeviceAlgebra.chunk_bytes", 1 << 13)
    ours = fitting(MORE, auxbasis, "cuda", store=store)
    assert ours.store == store
    assert len(ours.columns.cuts()) > 2
    compare(ours, fitting(MORE, auxbasis, "cpu"), MORE)


def test_memory_goes_back(emulated, host_integrals):
    """What CuPy asks for is from md4's pool, and returns to it."""
    ours = fitting(MORE, AUXILIARY, "cuda")
    pool = ours.engine.backend.context.pool
    pool.left()
    before = len(pool.lent)
    for use in (lambda: ours.get_jk(random_densities(MORE, 0), 0), lambda: ours.rows(0, 2)):
        use()
        pool.left()  # takes back what was returned
        assert len(pool.lent) == before


@pytest.mark.parametrize("auxbasis", [AUXILIARY, DEPENDENT], ids=["Cholesky", "eigenvectors"])
@pytest.mark.parametrize("store", STORES)
def test_several_devices(emulated, host_integrals, store, auxbasis, monkeypatch):
    """Three workers on the device, each with a pool of its own; the stand-in is one for one thread at a time."""
    monkeypatch.setattr("md4.contract.team.chosen", lambda *_: [None] * 3)
    monkeypatch.setattr("md4.contract.fitting_team.run_each", lambda count, work, start: [*map(work, range(count))])
    monkeypatch.setattr("md4.gpu.algebra.DeviceAlgebra.block_bytes", 1 << 13)
    monkeypatch.setattr("md4.gpu.algebra.DeviceAlgebra.chunk_bytes", 1 << 13)
    bases = (md4.Basis.from_mol(m) for m in (MORE, df.make_auxmol(MORE, auxbasis)))
    ours = density_fitting(*bases, backend="cuda", store=store, cutoff=0)
    assert len({share.engine.backend.context.pool for share in ours.shares}) == ours.count == 3
    compare(ours, fitting(MORE, auxbasis, "cpu"), MORE)


@pytest.mark.parametrize("limit", [1e6, 1e-6], ids=["product", "substitution"])
def test_rows_of_the_inverse(emulated, host_integrals, limit, monkeypatch):
    """Either way to make rows of B of one worker, in steps of few columns."""
    monkeypatch.setattr("md4.contract.metric_rows.LARGEST", limit)
    monkeypatch.setattr("md4.gpu.algebra.DeviceAlgebra.block_bytes", 1 << 13)
    ours, theirs = (fitting(MORE, AUXILIARY, name) for name in ("cuda", "cpu"))
    with ours.engine.lock, ours.algebra.working():
        whole = inverse(ours._sorted_metric(), ours.algebra)
        assert whole.by_substitution == (limit < 1)
        columns = Columns(ours.three, whole.rows(slice(1, None, 3), ours.algebra), ours.algebra)
        fetch, contiguous = ours.algebra.fetch, ours.algebra.xp.ascontiguousarray
        found = np.concatenate([fetch(contiguous(part)) for *_, part in columns.solved()], axis=1)
    ((_, wanted),) = theirs.table.blocks(0, theirs.size, theirs.size)
    assert abs(found - wanted[1::3, :-1]).max() < 1e-11


def test_a_host_table_larger_than_the_device(emulated, host_integrals, monkeypatch):
    """The cap counts it, but the device need not have room for it."""
    for max_memory in (None, 50):
        small = fitting(MORE, AUXILIARY, "cuda", max_memory=max_memory).algebra
        free = small.host_left()
        with monkeypatch.context() as patches:
            patches.setattr("md4.gpu.pool.RESERVE_BYTES", 1 << 60)
            small.context.pool.trim()
            assert small.memory_left() < 1e6
            assert small.host_left() >= 0.9 * free


def test_no_pinned_memory(emulated, host_integrals, monkeypatch):
    monkeypatch.setattr("emulator.array_library.PINNED_BYTES", 100)
    with pytest.raises(md4.MemoryLimitError, match=r"pinned host memory \(cudaError.*store='direct'"):
        fitting(MORE, AUXILIARY, "cuda", store="host")


def test_without_cupy(emulated, monkeypatch):
    """The message has the remedy."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(md4.DeviceError, match=r"needs CuPy .*df-cu13.*backend='cpu'"):
        fitting(FEW, AUXILIARY, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("store", STORES)
def test_gpu(gpu, store):
    pytest.importorskip("cupy")
    mol = molecule(WATER, "cc-pvtz")
    dm = random_densities(mol, 0, 2)
    ours, theirs = (md4.DF(mol, "cc-pvtz-jkfit", backend=name, store=store) for name in ("cuda", "cpu"))
    for found, wanted in zip(ours.get_jk(dm, 0), theirs.get_jk(dm, 0), strict=True):
        assert abs(found - wanted).max() < 1e-10
    assert abs(ours._cderi[5:40] - theirs._cderi[5:40]).max() < 1e-10
