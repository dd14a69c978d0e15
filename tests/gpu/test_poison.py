"""Memory that nobody wrote holds NaN: no result may depend on it, though it counts times zero."""

from functools import partial
from itertools import product

import numpy as np
import pytest
from molecules import WATER, Quartet, class_name, host, ladder, mixed_classes, molecule, relative_error, tensor_error
from nuclear_forces import WATER as ASKEW
from nuclear_forces import few, forces_by_pyscf, mixed, symmetric

import md4
from md4.shells.basis import Basis

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]
SHARED_BYTES, THREADS, BLOCKS = 220 << 10, 256, 1024


def fill_shared():
    """Kernel factory: NaN in all shared memory of a block."""
    from md4.gpu.compile import Kernel
    from md4.gpu.device_code import I64, cuda, types

    def kernel(count: I64):
        shared = cuda.shared.array(0, types.float64)
        for n in range(cuda.threadIdx.x, count[0], THREADS):
            shared[n] = np.nan
        cuda.syncthreads()
        if shared[count[0] - 1] == 0.0:  # else the compiler drops the loop
            count[0] = 0

    return Kernel(kernel)


@pytest.fixture
def poisoned(monkeypatch):
    """Every buffer that the pool hands out is NaN, and so is shared memory then."""
    from cuda.bindings import driver

    from md4.gpu.buffers import as_buffer
    from md4.gpu.compile import Variant
    from md4.gpu.context import DeviceContext
    from md4.gpu.device_code import cuda
    from md4.gpu.pool import Pool

    count = cuda.to_device(np.array([SHARED_BYTES // 8]))
    context = DeviceContext(cuda.default_stream())

    def poisoning(take):
        def poisoned_buffer(pool, *request):
            buffer = take(pool, *request)
            cuda.synchronize()
            driver.cuMemsetD32(buffer.pointer, 0xFFFFFFFF, buffer.owner.nbytes // 4)
            context.launch(Variant(fill_shared, ()), BLOCKS, THREADS, SHARED_BYTES, as_buffer(count))
            cuda.synchronize()
            return buffer

        return poisoned_buffer

    for take in (Pool.get, Pool.fresh, Pool.room):
        monkeypatch.setattr(Pool, take.__name__, poisoning(take))


@pytest.mark.parametrize("pure", [True, False], ids=["pure", "cartesian"])
@pytest.mark.parametrize("K", [1, 3])
def test_classes(poisoned, pure, K):
    for ls in ladder(5) + mixed_classes(30, 5):
        basis = Basis.from_mol(Quartet(ls, (K, 1, K, 1), not pure).mol())
        ours, right = (
            host(md4.Engine(basis, backend=name).compute([[0, 1]] * 3, [[2, 3]] * 5)) for name in ("cuda", "cpu")
        )
        assert relative_error(ours, right) < 1e-11, class_name(ls)  # to find NaN; accuracy is tested elsewhere


@pytest.mark.parametrize("basis", ["cc-pvtz", "6-31g"])
def test_tensor(poisoned, basis):
    mol = molecule(WATER, basis)
    assert tensor_error(md4.int2e(mol, "s8", backend="cuda"), mol.intor("int2e", aosym="s8")) <= 1


@pytest.mark.parametrize("with_k", [True, False], ids=["J and K", "J"])
@pytest.mark.parametrize("basis, hermi", list(product(["cc-pvtz", "cc-pvqz", "6-31g"], [0, 1])))
def test_matrices(poisoned, basis, hermi, with_k):
    from pyscf import scf

    mol = molecule(WATER + "; H 0.3 2.1 0.4; He 4.1 0.2 0.3", basis)
    dm = np.random.default_rng(0).normal(size=(2, mol.nao, mol.nao))
    dm = dm + dm.transpose(0, 2, 1) if hermi else dm
    ours = md4.get_jk(mol, dm, hermi, with_k=with_k, backend="cuda")
    theirs = scf.hf.dot_eri_dm(mol.intor("int2e", aosym="s8"), dm, hermi, True, with_k)
    for a, b in zip(ours, theirs):
        assert (a is None and b is None) or abs(a - b).max() < 1e-9


@pytest.mark.parametrize("make, omega", [
    (mixed, 0.0), (few, 0.4), (partial(few, cart=True), 0.0), (partial(molecule, ASKEW, "cc-pvtz"), 0.0),
    (partial(molecule, ASKEW, "cc-pvqz"), 0.0),
], ids=["mixed", "few erf", "few Cartesian", "cc-pvtz", "cc-pvqz"])  # fmt: skip
def test_forces(poisoned, make, omega):
    """Of molecules of tests/contract/test_gradient.py, so that no further kernels are compiled."""
    mol = make()
    dm = symmetric(mol.nao)
    want = forces_by_pyscf(mol, dm, omega=omega)
    jk = md4.JK(mol, backend="cuda")
    for tolerance in (0.0, 1e-6):
        found = jk.gradient(dm, omega=omega, tolerance=tolerance)
        assert abs(found - want).max() < 1e-9 + 1e-12 * abs(want).max() + jk.stats.error_bound
