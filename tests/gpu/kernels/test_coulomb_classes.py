"""J of one class by a thread a primitive quartet, on the emulated GPU, which reports addresses that are not its own.

Contracted pairs, more kets than lanes, r in registers and in shared memory, kets in one and several parts.
"""

from dataclasses import replace

import numpy as np
import pytest
from emulator import running

import md4
from md4.gpu import hermite_coulomb, tuning
from md4.gpu.kernels import coulomb_threads
from md4.plan import QuartetRows, QuartetRule


def side(rng, l, count):
    """Shells of `count` pairs whose l add up to `l`, of two primitive pairs each."""
    shells = []
    for _ in range(count):
        shells.append(md4.Shell((l + 1) // 2, [0.9, 2.1], [[0.6], [0.5]], rng.normal(size=3) / 2))
        shells.append(md4.Shell(l // 2, [1.3], [[1.0]], rng.normal(size=3) / 2))
    return shells


def by_integrals(basis, bra, ket, twice):
    """What J alone sums up for all quartets of two lists."""
    integrals, loc, y = md4.Engine(basis, backend="cpu").compute(bra, ket), basis.ao_loc, np.zeros_like(twice)
    for (i, ab), (k, cd) in ((one, other) for one in enumerate(bra) for other in enumerate(ket)):
        rows, columns = (np.ix_(*(range(loc[s], loc[s + 1]) for s in pair)) for pair in (ab, cd))
        y[rows] += np.einsum("abcd,cd->ab", integrals[i, k], twice[columns])
        y[columns] += np.einsum("abcd,ab->cd", integrals[i, k], twice[rows])
    return y


def by_threads(basis, bra, ket, twice):
    """The same by `DeviceCoulomb`."""
    engine, ones = md4.Engine(basis, backend="cuda"), np.ones(len(bra) + len(ket))
    ab, cd = lists = [engine.prepare(pairs) for pairs in (bra, ket)]
    target = engine.backend.sums.coulomb(basis, twice[None])
    target.screen_by(QuartetRule(1e-30, None, ones, ones, None, None))
    for prepared in lists:
        target.load(prepared)
    counts = np.full(len(bra), len(ket), dtype=np.int32)
    assert target.take_rows(QuartetRows(ab, cd, False, 0, counts, (0, len(bra)), None), 0, 1)
    for prepared in lists:
        target.collect(prepared)
    return target.result()[0]


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("classes", [(0, 0), (1, 4), (5, 4), (7, 5)], ids=str)
def test_class(classes, single, monkeypatch):
    for module in (coulomb_threads, hermite_coulomb):
        changed = replace(tuning.HERMITE_COULOMB, single_ratio=1e80 if single else 0.0)
        monkeypatch.setattr(module, "HERMITE_COULOMB", changed)
    rng = np.random.default_rng(sum(classes))
    counts = (1, 17) if max(classes) == 0 else (2, 3) if max(classes) < 5 else (1, 1)
    basis = md4.Basis([shell for l, count in zip(classes, counts) for shell in side(rng, l, count)])
    every = [[n, n + 1] for n in range(0, len(basis), 2)]
    bra, ket = every[: counts[0]], every[counts[0] :]
    twice = rng.normal(size=(basis.nao, basis.nao))
    twice += twice.T
    right = by_integrals(basis, bra, ket, twice)
    with running() as machine:
        ours = by_threads(basis, bra, ket, twice)
    assert "correlation_by_threads" in machine.kernels
    error = abs(ours - right).max() / abs(right).max()
    assert error < (2e-6 if single else 1e-14)
    assert (error > 1e-12) == single
