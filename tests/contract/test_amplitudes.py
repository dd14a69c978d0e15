"""Integrals times amplitudes beside md4's tensor and NumPy."""

import numpy as np
import pytest
from emulator import running
from emulator.array_library import cupy
from molecules import CENTRES, HYDROGEN_FLUORIDE, joined, molecule
from row_workers import divided, engines

import md4
from md4.contract import amplitudes
from md4.contract.amplitudes import DirectContraction
from md4.contract.row_team import RowTeam
from md4.contract.tensor import ao_tensor
from md4.errors import MemoryLimitError
from md4.shells.basis import Basis
from md4.shells.shell import Shell


def random_amplitudes(nao, count):
    return np.random.default_rng(0).normal(size=(count, nao, nao))


def contracted_by(engine, t, beside=()):
    return DirectContraction(RowTeam([engine, *beside])).contracted(t)


def by_numpy(engine, t):
    tensor = ao_tensor(engine, "s1")
    tensor = tensor.copy_to_host() if hasattr(tensor, "copy_to_host") else tensor
    return np.einsum("xcd,acbd->xab", t, tensor, optimize=True)


def compare(engine, t):
    want = by_numpy(engine, t)
    assert abs(contracted_by(engine, t) - want).max() < 1e-12 * abs(want).max()


@pytest.fixture(scope="module")
def contracted():
    return Basis.from_mol(molecule(HYDROGEN_FLUORIDE, joined("cc-pvdz", "HF")))


def test_general_contractions(backend, contracted):
    compare(md4.Engine(contracted, backend=backend), random_amplitudes(contracted.nao, 4))


def test_high_angular_momenta(backend):
    """g, h and i functions, two shells of one class."""
    shells = [(0, 0), (4, 1), (5, 2), (6, 3), (4, 0)]
    basis = Basis([Shell(l, [1.3 + 0.2 * l, 0.4], [[0.6], [0.5]], CENTRES[n]) for l, n in shells])
    compare(md4.Engine(basis, operator=("erf", 0.5), backend=backend), random_amplitudes(basis.nao, 2))


def test_several_passes(contracted, monkeypatch):
    """One x after the other, short pieces, a matrix at a time."""
    monkeypatch.setattr(amplitudes, "WORK_SHARE", 1e-9)
    t = random_amplitudes(contracted.nao, 3)
    compare(md4.Engine(contracted, backend="cpu"), t)
    assert contracted_by(md4.Engine(contracted, backend="cpu"), t[:0]).shape == (0, *t.shape[1:])


def test_memory(contracted):
    contraction = DirectContraction(RowTeam([md4.Engine(contracted, backend="cpu", max_memory=1)]))
    contraction.team.engine.backend.memory.cap = 200_000
    with pytest.raises(MemoryLimitError, match=r"amplitudes of one pair of 19 AOs take 17.3 kB .* raise max_memory"):
        contraction.contracted(random_amplitudes(contracted.nao, 1))


@pytest.mark.parametrize("count", [2, 3])
def test_several_devices(backend, contracted, count):
    (first, *beside), t = engines(contracted, count, backend), random_amplitudes(contracted.nao, 3)
    want = contracted_by(first, t)
    with divided(count):
        found = contracted_by(first, t, beside)
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-13 * abs(want).max())


@pytest.mark.sample("2")
@pytest.mark.parametrize("count", [1, 2])
def test_emulated_gpu(count):
    basis = Basis([Shell(l, [1.1, 0.3], [[0.6], [0.5]], CENTRES[n]) for l, n in ((0, 0), (1, 1))])
    t = random_amplitudes(basis.nao, 2)
    want = by_numpy(md4.Engine(basis, backend="cpu"), t)
    with running("dmma16", devices=count), cupy():
        first, *beside = engines(basis, count, "cuda")
        found = contracted_by(first, t, beside)
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-12)
