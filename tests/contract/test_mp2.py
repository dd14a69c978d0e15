"""Energies and amplitudes of second order beside sums by NumPy."""

from itertools import combinations_with_replacement

import numpy as np
import pytest
from emulator import running
from emulator.array_library import cupy
from molecules import CENTRES, HYDROGEN_FLUORIDE, molecule

import md4
from md4.contract.mp2 import OccupiedVirtual, Spin
from md4.contract.row_team import RowTeam
from md4.contract.tensor import ao_tensor
from md4.errors import MemoryLimitError
from md4.shells.basis import Basis
from md4.shells.shell import Shell


@pytest.fixture(scope="module")
def basis():
    return Basis.from_mol(molecule(HYDROGEN_FLUORIDE, "6-31g"))


def spin(nao, occupied, virtual, seed):
    """Any orthonormal orbitals, and energies with a gap."""
    rng = np.random.default_rng(seed)
    every = np.linalg.qr(rng.normal(size=(nao, nao)))[0]
    energies = np.sort(rng.uniform(0.1, 2, occupied + virtual)) + np.repeat([-3, 0], [occupied, virtual])
    return Spin(every[:, :occupied], every[:, occupied : occupied + virtual], energies)


def of_spins(spins, *engines):
    return OccupiedVirtual(RowTeam(engines), spins)


def by_numpy(basis, spins):
    """(same, opposite, {(s, t): t_ij^ab})"""
    tensor, made, energy = ao_tensor(md4.Engine(basis, backend="cpu"), "s1"), {}, {}
    for s, t in combinations_with_replacement(range(len(spins)), 2):
        one, other = spins[s], spins[t]
        parts = one.occupied, one.virtual, other.occupied, other.virtual
        g = np.einsum("pqrs,pi,qa,rj,sb->ijab", tensor, *parts, optimize=True)
        (i, a), (j, b) = (np.split(x.energies, [x.shape[0]]) for x in (one, other))
        made[s, t] = g / (i[:, None, None, None] + j[:, None, None] - a[:, None] - b)
        exchange = g.transpose(0, 1, 3, 2) if s == t else 0
        energy[s, t] = (made[s, t] * g).sum(), (made[s, t] * (g - exchange)).sum()
    if len(spins) == 1:
        return energy[0, 0][1], energy[0, 0][0], made
    return (energy[0, 0][1] + energy[1, 1][1]) / 2, energy[0, 1][0], made


@pytest.mark.parametrize("shapes", [[(5, 6)], [(4, 7), (3, 5)], [(1, 1), (0, 4)], [(2, 0), (3, 1)]], ids=str)
def test_energies_and_amplitudes(backend, basis, shapes):
    spins = [spin(basis.nao, *shape, seed) for seed, shape in enumerate(shapes)]
    same, opposite, amplitudes = of_spins(spins, md4.Engine(basis, backend=backend)).energies(with_t2=True)
    want_same, want_opposite, want = by_numpy(basis, spins)
    assert abs(same - want_same) < 1e-12
    assert abs(opposite - want_opposite) < 1e-12
    assert amplitudes.keys() == want.keys()
    for key, found in amplitudes.items():
        np.testing.assert_allclose(found, want[key], rtol=0, atol=1e-12)


def test_pairs_in_several_blocks(basis, monkeypatch):
    spins = [spin(basis.nao, 4, 7, 0), spin(basis.nao, 3, 5, 1)]
    want = of_spins(spins, md4.Engine(basis, backend="cpu")).energies()
    monkeypatch.setattr("md4.contract.transform.MATRICES", 40_000)  # few at once
    found = of_spins(spins, md4.Engine(basis, backend="cpu", max_memory=2000)).energies()
    assert found[2] == {}
    np.testing.assert_allclose(found[:2], want[:2], rtol=0, atol=1e-14)


def test_emulated_gpu():
    """Sums on the emulated device, with a stand-in for CuPy."""
    basis = Basis([Shell(l, [1.1, 0.3], [[0.6], [0.5]], CENTRES[n]) for l, n in ((0, 0), (1, 1))])
    spins = [spin(basis.nao, 2, 2, 0), spin(basis.nao, 1, 3, 1)]
    *want, amplitudes = by_numpy(basis, spins)
    with running("dmma16"), cupy():
        *found, made = of_spins(spins, md4.Engine(basis, backend="cuda")).energies(with_t2=True)
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-12)
    for key, one in amplitudes.items():
        np.testing.assert_allclose(made[key], one, rtol=0, atol=1e-12)


def test_amplitudes_that_do_not_fit(basis, monkeypatch):
    """Which is found before the first integral is made."""
    made = of_spins([spin(basis.nao, 4, 7, 0)], md4.Engine(basis, backend="cpu"))
    monkeypatch.setattr("md4.support.memory.host_memory", lambda: 1000)
    monkeypatch.setattr("md4.contract.mp2.OneIndexOfEachSide", None)
    with pytest.raises(MemoryLimitError, match=r"which with_t2=False leaves out, take 6.27 kB, but the host has 1 kB"):
        made.energies(with_t2=True)
