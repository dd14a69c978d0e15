"""Density fitting on a GPU: on the emulated device with a stand-in for CuPy, and on a real one."""

import sys

import numpy as np
import pytest
from densities import random_densities
from emulator import running
from emulator.array_library import cupy
from molecules import WATER, molecule
from pyscf import df, gto

import md4
from md4.contract.density_fitting import DensityFitting

STORES = ["device", "host", "direct"]
# Few functions, since the emulated device is slow.
HYDROGEN = gto.M(atom="H 0 0 0; H 0 0.3 1.1; H 0.7 0 0.4", basis={"H": [[0, [1.1, 1]]]}, spin=1, verbose=0)
AUXILIARY = {"H": [[0, [2.0, 1]], [0, [0.7, 1]]]}
DEPENDENT = {"H": [[0, [2.0, 1]], [0, [2.0, 1]]]}


def fitting(auxbasis, backend, **options):
    bases = (md4.Basis.from_mol(m) for m in (HYDROGEN, df.make_auxmol(HYDROGEN, auxbasis)))
    return DensityFitting(*bases, backend=backend, **options)


@pytest.fixture(scope="module")
def emulated():
    with running("dmma16"), cupy() as library:
        yield library


@pytest.mark.parametrize("auxbasis", [AUXILIARY, DEPENDENT], ids=["Cholesky", "eigenvectors"])
@pytest.mark.parametrize("store", STORES)
def test_plain_python(emulated, store, auxbasis, monkeypatch):
    """Blocks of few rows, so that both buffers of a streamed tensor are filled again."""
    monkeypatch.setattr("md4.gpu.algebra.DeviceAlgebra.block_bytes", 1 << 10)
    monkeypatch.setattr("md4.gpu.algebra.DeviceAlgebra.chunk_bytes", 500)
    ours, theirs = fitting(auxbasis, "cuda", store=store), fitting(auxbasis, "cpu")
    assert ours.store == store
    assert ours.metric.how == theirs.metric.how
    dm = random_densities(HYDROGEN, 0, 2)
    dm[1] += dm[1].T
    for found, wanted in zip(ours.get_jk(dm, 0), theirs.get_jk(dm, 0), strict=True):
        assert type(found) is np.ndarray
        assert abs(found - wanted).max() < 1e-11
    found, wanted = (made.rows(1, made.size) for made in (ours, theirs))
    assert abs(found.T @ found - wanted.T @ wanted).max() < 1e-11


def test_memory_goes_back(emulated):
    """What CuPy asks for is from md4's pool, and returns to it."""
    ours = fitting(AUXILIARY, "cuda")
    pool = ours.engine.backend.context.pool
    pool.left()
    before = len(pool.lent)
    for _ in range(2):
        ours.get_jk(random_densities(HYDROGEN, 0), 0)
        pool.left()
        assert len(pool.lent) == before
    ours.rows(0, 2)
    pool.left()
    assert len(pool.lent) == before


def test_without_cupy(emulated, monkeypatch):
    """The message has the remedy."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(md4.DeviceError, match=r"needs CuPy .*df-cu13.*backend='cpu'"):
        fitting(AUXILIARY, "cuda")


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
