"""Energies and amplitudes of second order beside sums by NumPy."""

from itertools import combinations_with_replacement

import numpy as np
import pytest
from emulator import running
from emulator.array_library import cupy
from molecules import CENTRES, HYDROGEN_FLUORIDE, molecule
from row_workers import divided, engines
from traced_memory import until_enough

import md4
from md4.contract import mp2
from md4.contract.mp2 import OccupiedVirtual, Spin
from md4.contract.row_team import RowTeam
from md4.contract.tensor import ao_tensor
from md4.errors import MemoryLimitError
from md4.shells.basis import Basis
from md4.shells.shell import Shell
from md4.support.memory import HostMemory


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


@pytest.mark.parametrize("count", [2, 3])
def test_several_devices(backend, basis, count):
    spins = [spin(basis.nao, 4, 7, 0), spin(basis.nao, 3, 5, 1)]
    *want, amplitudes = of_spins(spins, *engines(basis, 1)).energies(with_t2=True)
    several, close = engines(basis, count, backend), 1e-13 if backend == "cpu" else 1e-12
    with divided(count):
        *found, made = of_spins(spins, *several).energies(with_t2=True)
    np.testing.assert_allclose(found, want, rtol=close, atol=0)
    for key, one in amplitudes.items():
        np.testing.assert_allclose(made[key], one, rtol=0, atol=close)


@pytest.mark.parametrize("shapes, most, passes", [
    ([(5, 6)], 4, 3), ([(5, 6)], 2, 10), ([(4, 7), (3, 5)], 5, 6), ([(4, 7), (0, 5)], 3, 6), ([(5, 6)], 5, 1),
], ids=str)  # fmt: skip
def test_groups_of_occupied_orbitals(basis, shapes, most, passes, monkeypatch):
    """Where X of all does not fit, each two groups have a pass; each pair of orbitals is there once."""
    spins, one = [spin(basis.nao, *shape, seed) for seed, shape in enumerate(shapes)], mp2.OneIndexOfEachSide
    made = []
    monkeypatch.setattr(mp2, "most_orbitals", lambda team, count, virtual: min(count, most))
    monkeypatch.setattr(mp2, "OneIndexOfEachSide", lambda *args: made.append(args[1].shape[1]) or one(*args))
    *found, t2 = of_spins(spins, *engines(basis, 1)).energies(with_t2=True)
    assert len(made) == passes
    assert max(made) <= most
    (*sums, amplitudes), blocks = by_numpy(basis, spins), []
    np.testing.assert_allclose(found, sums, rtol=0, atol=1e-13)
    for key, wanted in amplitudes.items():
        np.testing.assert_allclose(t2[key], wanted, rtol=0, atol=1e-13)
    of_spins(spins, *engines(basis, 1)).integrals(lambda *block: blocks.append(block[:4]))
    assert len(blocks) == len(set(blocks)) == sum(a.shape[0] * a.shape[1] for a in amplitudes.values())


def test_groups_in_little_memory(monkeypatch):
    """They are as large as the cap allows, which is kept; where not even two orbitals fit, it is refused."""
    basis, peaks, passes = Basis.from_mol(molecule(HYDROGEN_FLUORIDE, "cc-pvdz")), [], []
    spins = [spin(basis.nao, 12, 7, 0)]
    *want, _ = of_spins(spins, *engines(basis, 1)).energies()
    one, watch = mp2.OneIndexOfEachSide, HostMemory.watch

    def watched(memory, *args):
        found = watch(memory, *args)
        peaks.append(memory.held)
        return found

    monkeypatch.setattr(HostMemory, "watch", watched)
    monkeypatch.setattr(mp2, "OneIndexOfEachSide", lambda *args: passes.append(args[1].shape[1]) or one(*args))
    refused, counts = [], []
    for cap in np.arange(0.2, 1.05, 0.05):  # with four lanes 0.4 is enough
        peaks.clear()
        passes.clear()
        try:
            *found, _ = of_spins(spins, *engines(basis, 1, max_memory=cap)).energies()
        except MemoryLimitError as error:
            refused.append(str(error))
            assert not counts, "what fits into less memory is refused"
            continue
        counts.append(len(passes))
        assert max(peaks) <= cap * 1e6
        np.testing.assert_allclose(found, want, rtol=0, atol=1e-13)
    assert any("integrals over 12 orbitals of 19 AOs take" in text for text in refused), refused
    assert {1, 3} <= set(counts), counts


def test_what_a_refusal_names_is_enough(basis):
    """With the lists of shell pairs, which are there already."""
    spins = [spin(basis.nao, 5, 6, 0)]

    def work(cap):
        return of_spins(spins, *engines(basis, 1, max_memory=cap)).energies()[:2]

    found, _, refusals = until_enough(work, 0.05)
    np.testing.assert_allclose(found, work(None), rtol=0, atol=1e-13)
    assert "integrals over 5 orbitals of 11 AOs take" in refusals[-1]


@pytest.mark.sample("2")
@pytest.mark.parametrize("count", [1, 2])
def test_emulated_gpu(count):
    """Sums on the emulated device, with a stand-in for CuPy; of what one or two make."""
    basis = Basis([Shell(l, [1.1, 0.3], [[0.6], [0.5]], CENTRES[n]) for l, n in ((0, 0), (1, 1))])
    spins = [spin(basis.nao, 2, 2, 0), spin(basis.nao, 1, 3, 1)]
    *want, amplitudes = by_numpy(basis, spins)
    with running("dmma16", devices=count), cupy():
        *found, made = of_spins(spins, *engines(basis, count, "cuda")).energies(with_t2=True)
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-12)
    for key, one in amplitudes.items():
        np.testing.assert_allclose(made[key], one, rtol=0, atol=1e-12)


def test_amplitudes_that_do_not_fit(basis, monkeypatch):
    """Which is found before the first integral is made."""
    made = of_spins([spin(basis.nao, 4, 7, 0)], md4.Engine(basis, backend="cpu"))
    monkeypatch.setattr("md4.support.memory.host_memory", lambda: 1000)
    monkeypatch.setattr("md4.contract.mp2.OneIndexOfEachSide", None)
    with pytest.raises(MemoryLimitError, match=r"which with_t2=False leaves out, take 6.28 kB, but the host has 1 kB"):
        made.energies(with_t2=True)
