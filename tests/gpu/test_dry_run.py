"""Dry runs: they ask for the kernels that the same work launches on a device, here the emulated one."""

import emulator
import numpy as np
import pytest
from emulator.array_library import cupy
from molecules import molecule

import md4
from md4.contract.row_team import RowTeam
from md4.contract.transform import OneIndexOfEachSide
from md4.contract.warmup import asked_by_basis, asked_by_fitting
from md4.gpu.backend import GpuBackend
from md4.gpu.context import DeviceContext
from md4.gpu.dry_run import SAMPLE, rough_bounds, sampled
from md4.shells.shell_pairs import shell_pairs

HYDROGEN = "H 0 0 0; H 0.3 0.2 0.7"
CAPABILITIES = {"dmma16": (9, 0), "dmma8": (8, 0)}


@pytest.fixture(params=CAPABILITIES)
def launched(request, monkeypatch):
    """The variants that are launched on an emulated device, and its compute capability."""
    found, real = set(), DeviceContext.launch

    def launch(self, variant, *args):
        found.add(variant)
        real(self, variant, *args)

    monkeypatch.setattr(DeviceContext, "launch", launch)
    with emulator.running(request.param):
        yield found, CAPABILITIES[request.param]


@pytest.mark.sample("dmma16-sto-3g")
@pytest.mark.parametrize("basis", ["sto-3g", "6-31g**"])
def test_tensor_and_builds(launched, basis):
    found, capability = launched
    mol = molecule(HYDROGEN, basis)
    dm = np.random.default_rng(0).standard_normal((mol.nao, mol.nao))
    md4.int2e(mol, "s8", backend="cuda")
    for options in ({}, {"with_k": False}, {"hermi": 0}):
        md4.get_jk(mol, dm, backend="cuda", **options)
    assert found
    assert found <= set(asked_by_basis(md4.Basis.from_mol(mol), "coulomb", capability))


def test_few_centres(launched):
    from pyscf import df

    found, capability = launched
    mol = molecule(HYDROGEN, "6-31g")
    auxmol = df.make_auxmol(mol, "weigend")
    md4.int3c2e(mol, auxmol, "s2ij", backend="cuda")
    md4.int2c2e(auxmol, backend="cuda")
    assert found
    assert found <= set(asked_by_fitting(*map(md4.Basis.from_mol, (mol, auxmol)), "coulomb", capability))


def test_mo_integrals(launched, monkeypatch):
    """What the calls would compile ahead, and `md4 warmup --mp2`."""
    found, capability = launched
    mol, asked = molecule("H 0 0 0", {"H": [[0, [0.9, 1.0]], [1, [0.8, 1.0]]]}, spin=1), set()

    def compile_ahead(backend, use, basis, work, *_, **__):
        asked.update(backend.asked_by(work))

    with cupy(), monkeypatch.context() as patches:
        patches.setattr(GpuBackend, "compile_ahead", compile_ahead)
        team = RowTeam([md4.Engine(md4.Basis.from_mol(mol), backend="cuda")])
        OneIndexOfEachSide(team, np.eye(mol.nao)[:, :1], 1)
        md4.ao2mo.full(mol, np.eye(mol.nao)[:, :2], backend="cuda")
    assert found <= asked
    assert len(found) > 3
    assert found <= set(asked_by_basis(md4.Basis.from_mol(mol), "coulomb", capability, mp2=True))


@pytest.mark.sample("dmma16-6-31g")
@pytest.mark.parametrize("basis", ["6-31g", {"H": [[0, [0.9, 1.0]], [3, [0.8, 1.0]]]}], ids=["6-31g", "s and f"])
def test_gradients(launched, basis, monkeypatch):
    """What the call itself would compile ahead."""
    found, _ = launched
    mol, asked = molecule("H 0 0 0", basis, spin=1), set()

    def compile_ahead(backend, use, basis, work, *_):
        asked.update(backend.asked_by(work))

    jk = md4.JK(mol, backend="cuda")
    jk.lists  # noqa: B018 makes them, with kernels of their own
    found.clear()
    with monkeypatch.context() as patches:
        patches.setattr(GpuBackend, "compile_ahead", compile_ahead)
        for omega in (0.0, 0.4):
            jk.gradient(np.ones((mol.nao, mol.nao)), omega=omega)
    assert {variant.factory.__name__ for variant in found} >= {"select_kets", "pair_forces"}
    assert found <= asked


def test_derivatives_of_matrices(launched, monkeypatch):
    """As `test_gradients`."""
    found, _ = launched
    mol, asked = molecule(HYDROGEN, "sto-3g"), set()

    def compile_ahead(backend, use, basis, work, *_):
        asked.update(backend.asked_by(work))

    jk = md4.JK(mol, backend="cuda")
    jk._forces_of_lists(jk.direct_scf_tol)
    found.clear()
    with monkeypatch.context() as patches:
        patches.setattr(GpuBackend, "compile_ahead", compile_ahead)
        for options in ({}, {"with_k": False}, {"with_j": False, "omega": 0.4}):
            jk.derivative_jk(np.ones((mol.nao, mol.nao)), **options)
    assert {variant.factory.__name__ for variant in found} >= {"h_matrices", "half_exchange"}
    assert found <= asked


def test_tensors_of_derivatives(launched, monkeypatch):
    """As `test_gradients`."""
    found, _ = launched
    mol, asked = molecule(HYDROGEN, "sto-3g"), set()

    def compile_ahead(backend, use, basis, work, *_):
        asked.update(backend.asked_by(work))

    with monkeypatch.context() as patches:
        patches.setattr(GpuBackend, "compile_ahead", compile_ahead)
        for name in ("int2e_ip1", "int3c2e_ip1"):
            md4.intor(mol, name, backend="cuda")
    assert {variant.name for variant in found} >= {"h_matrices-False-True", "scatter_block-derivatives"}
    assert found <= asked


def test_lists_are_counted_by_some_of_their_pairs():
    """The pair with the most primitives is among these."""
    rng, n = np.random.default_rng(0), 60
    exponents = [[0.7, 0.2]] * n
    exponents[7] = [9.0, 3.0, 1.0, 0.5]
    coefficients = [np.ones(len(e)) for e in exponents]
    basis = md4.Basis.from_arrays([0] * n, exponents, coefficients, rng.uniform(-1, 1, (n, 3)))
    pairs = np.stack(np.tril_indices(n), axis=1)
    assert len(pairs) > SAMPLE
    counts, bounds = sampled(basis, pairs, 0.0)
    right = shell_pairs(basis, pairs, cutoff=0.0)
    assert len(counts) == len(bounds) == len(pairs)
    assert counts.max() == np.diff(right.start).max() == 16
    assert bounds.max() >= rough_bounds(right)[np.argmax(counts)]


def test_rough_bounds_fall_with_distance():
    basis = md4.Basis.from_arrays([0] * 4, [[1.0]] * 4, [[1.0]] * 4, [[0, 0, 0], [0, 0, 1], [0, 0, 3], [0, 0, 90]])
    found = rough_bounds(shell_pairs(basis, [[1, 0], [2, 0], [3, 0]]))
    assert found[0] > found[1] > found[2] == 0.0


def test_memory_checks_count_what_a_pool_lends(monkeypatch):
    """A result that would fit, were it not rounded up, is refused before anything is allocated."""
    with emulator.running():
        engine = md4.Engine(md4.Basis.from_mol(molecule(HYDROGEN, "sto-3g")), backend="cuda")
        both = engine.prepare([[0, 0]]), engine.prepare([[1, 1]])
        work, result = engine.backend.least_workspace(*(side.pairs for side in both)), (1 << 20) + 8
        monkeypatch.setattr(type(engine.backend), "memory_left", lambda self: work + result)
        engine.check_memory(*both, 1 << 20)
        with pytest.raises(md4.MemoryLimitError, match="of result"):
            engine.check_memory(*both, result)
