"""Energies and amplitudes of MP2 with fitted integrals against sums by NumPy: spins, ranges of orbitals, memory."""

from itertools import combinations_with_replacement

import numpy as np
import pytest
from fitted_orbitals import AUXILIARY, assert_close, bases, fitting, watched
from traced_memory import until_enough

import md4
from md4.contract.fitted_mp2 import mp2
from md4.contract.fitting_orbitals import Pieces
from md4.contract.fitting_team import density_fitting
from md4.contract.mp2 import Spin


def spin(nao, o, v, seed=0):
    rng = np.random.default_rng(seed)
    occupied, virtual = rng.normal(size=(nao, o)), rng.normal(size=(nao, v))
    return Spin(occupied, virtual, np.concatenate([-1.0 - rng.uniform(size=o), rng.uniform(size=v)]))


def by_numpy(fit, spins):
    """As from `mp2`."""
    rows = [fit.mo_rows(one.occupied, one.virtual) for one in spins]
    same, opposite, amplitudes = 0.0, 0.0, {}
    for s, t in combinations_with_replacement(range(len(spins)), 2):
        found = np.einsum("qia,qjb->ijab", rows[s], rows[t])
        (i, a), (j, b) = (np.split(spins[n].energies, [spins[n].shape[0]]) for n in (s, t))
        amplitudes[s, t] = found / (i[:, None, None, None] + j[:, None, None] - a[:, None] - b)
        if s == t:
            same += (amplitudes[s, t] * (found - found.transpose(0, 1, 3, 2))).sum() / len(spins)
        if s != t or len(spins) == 1:
            opposite = (amplitudes[s, t] * found).sum()
    return same, opposite, amplitudes


def compare(fit, spins):
    *sums, nothing = mp2(fit, spins)
    *wanted, amplitudes = by_numpy(fit, spins)
    assert nothing == {}
    *again, t2 = mp2(fit, spins, with_t2=True)
    for found in (sums, again):
        assert_close(np.array(found), np.array(wanted))
    assert t2.keys() == amplitudes.keys()
    for key, t in t2.items():
        assert_close(t, amplitudes[key])


@pytest.mark.parametrize("store", ["device", "host", "direct"])
def test_energies(backend, water, store):
    fit = fitting(water, backend=backend, store=store)
    for sizes in ([(4, 9)], [(1, 1)], [(4, 7), (3, 8)], [(4, 7), (0, 9)], [(0, 9)]):
        compare(fit, [spin(water.nao, o, v, seed) for seed, (o, v) in enumerate(sizes)])


@pytest.mark.parametrize("share", [0.25, 0.0], ids=["several j", "one j"])
@pytest.mark.parametrize("cap", [0.65, 0.85])
def test_little_memory(water, cap, share, monkeypatch):
    """Ranges of orbitals, of which two are there at a time, never more than the cap allows."""
    monkeypatch.setattr("md4.contract.fitting_orbitals.PRODUCT_SHARE", share)
    fit = fitting(water, store="direct", max_memory=cap)
    spins = [spin(water.nao, 24, 20), spin(water.nao, 20, 22, 1)]
    assert not Pieces(fit, [(one.occupied, one.virtual) for one in spins]).whole
    most = watched(fit)
    compare(fit, spins)  # whose own rows do not count
    assert 0 < most[0] <= cap * 1e6


def test_what_a_refusal_names_is_enough(water):
    """With the factors of the metric and lists of shell pairs, which are there already."""

    def work(cap):
        return mp2(fitting(water, store="direct", max_memory=cap), [spin(water.nao, 4, 9)])[:2]

    *_, refusals = until_enough(work, 0.05)
    assert "fitted integrals of two orbitals" in refusals[-1]


def test_several_workers(water, monkeypatch):
    monkeypatch.setattr("md4.contract.team.chosen", lambda *_: [None] * 2)
    for store in ("device", "direct"):
        team = density_fitting(*bases(water, AUXILIARY), backend="cpu", store=store)
        compare(team, [spin(water.nao, 4, 7), spin(water.nao, 3, 8, 1)])


def test_refusals(water, monkeypatch):
    fit, spins = fitting(water, store="direct", max_memory=1), [spin(water.nao, 4, 9)]
    with pytest.raises(md4.MemoryLimitError, match=r"and 1000 virtual orbitals needs 24\.\d MB, but 1 MB may"):
        mp2(fit, [spin(water.nao, 2, 1000)])
    monkeypatch.setattr("md4.support.memory.host_memory", lambda: 1000)
    with pytest.raises(md4.MemoryLimitError, match=r"of MP2, which with_t2=False leaves out, take 10\.\d kB"):
        mp2(fit, spins, with_t2=True)
