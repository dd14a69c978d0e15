"""J of two degrees on the emulated GPU, which reports addresses that are not its own.

By a thread a primitive quartet, and by a warp. Contracted pairs, more kets than lanes, r in registers and in shared
memory, kets in one and several parts.
"""

from types import SimpleNamespace

import numpy as np
import pytest
from emulator import running

import md4
from md4.gpu import hermite_coulomb
from md4.gpu.kernels import coulomb_threads
from md4.method.operators import OPERATORS, Operator
from md4.plan import ListPair, QuartetRule


def side(rng, l, count, axis):
    """Shells of `count` pairs whose l add up to `l`, of two primitive pairs each; all in one plane if there is `axis`.
    """
    centres = rng.normal(size=(2 * count, 3)) / 2
    if axis is not None:
        centres[:, 2 - axis] = 0.3
    shells = []
    for one, other in zip(centres[::2], centres[1::2]):
        shells.append(md4.Shell((l + 1) // 2, [0.9, 2.1], [[0.6], [0.5]], one))
        shells.append(md4.Shell(l // 2, [1.3], [[1.0]], other))
    return shells


def by_integrals(basis, bra, ket, twice, operator="coulomb"):
    """What J alone sums up for all quartets of two lists."""
    integrals = md4.Engine(basis, backend="cpu", operator=operator).compute(bra, ket)
    loc, y = basis.ao_loc, np.zeros_like(twice)
    for (i, ab), (k, cd) in ((one, other) for one in enumerate(bra) for other in enumerate(ket)):
        rows, columns = (np.ix_(*(range(loc[s], loc[s + 1]) for s in pair)) for pair in (ab, cd))
        y[rows] += np.einsum("abcd,cd->ab", integrals[i, k], twice[columns])
        y[columns] += np.einsum("abcd,ab->cd", integrals[i, k], twice[rows])
    return y


def by_device(basis, bra, ket, twice, operator="coulomb"):
    """The same by `md4.gpu.hermite_coulomb.CoulombTarget`."""
    engine, ones = md4.Engine(basis, backend="cuda", operator=operator), np.ones(len(bra) + len(ket))
    lists = [engine.prepare(pairs) for pairs in (bra, ket)]
    survivors = SimpleNamespace(rule=QuartetRule(1e-30, None, ones, ones, ones, ones, None), task_quartets=[ones.size])
    target = engine.backend.sums.coulomb(engine, lists, survivors, twice[None])
    target.begin(lists, True)
    target.take([ListPair(*lists, same=False)])
    assert target.end(lists) == (ones.size, ones.size)
    return target.result()[0]


@pytest.mark.sample("(4, 1)-*-0", "(4, 1)-*-None", "(5, 4)-single-1")
@pytest.mark.parametrize("axis", [None, 0, 1, 2])
@pytest.mark.parametrize("way", ["double", "single", "warps"])
@pytest.mark.parametrize("classes", [(1, 0), (4, 1), (5, 4), (7, 5)], ids=str)
def test_class(classes, way, axis, monkeypatch):
    """Also of molecules in a plane, which lies along any of the axes, but not through the origin."""
    changes = {"SINGLE_RATIO": 1e80 if way == "single" else 0.0, "FEWEST_SINGLES": 0}
    if way == "warps":
        monkeypatch.setattr(coulomb_threads, "THREAD_L", -1)
    for name, value in changes.items():
        monkeypatch.setattr(hermite_coulomb, name, value)
    rng = np.random.default_rng(sum(classes))
    counts = (1, 17) if max(classes) == 1 else (2, 3) if max(classes) < 5 else (1, 1)
    basis = md4.Basis([shell for l, count in zip(classes, counts) for shell in side(rng, l, count, axis)])
    every = [[n, n + 1] for n in range(0, len(basis), 2)]
    bra, ket = every[: counts[0]], every[counts[0] :]
    twice = rng.normal(size=(basis.nao, basis.nao))
    twice += twice.T
    right = by_integrals(basis, bra, ket, twice)
    with running() as machine:
        ours = by_device(basis, bra, ket, twice)
    assert ("correlation_by_warps" if way == "warps" else "correlation_by_threads") in machine.kernels
    error = abs(ours - right).max() / abs(right).max()
    assert error < (2e-6 if way == "single" else 1e-14)
    assert (error > 1e-12) == (way == "single")


@pytest.mark.parametrize("kind, parameter", [
    (kind, parameter) for kind in OPERATORS for parameter in ([0.0] if kind == "coulomb" else [1e-3, 1.0, 1e3, 1e10])
])  # fmt: skip
def test_operators(kind, parameter):
    """Sums in fixed point have scales that suit each operator: nothing overflows, and no digits are lost."""
    operator = Operator(kind, parameter)
    shells = [md4.Shell(l, [zeta], [[1.0]], place) for l, zeta, place in (
        (1, 0.2, [0, 0, 0]), (0, 300.0, [0.1, 0, 0]), (0, 0.4, [0, 0.3, 0.2]), (0, 5.0, [0, 0, 0.5]),
    )]  # fmt: skip
    basis, bra, ket = md4.Basis(shells), [[0, 1]], [[2, 3]]
    twice = np.random.default_rng(0).normal(size=(basis.nao, basis.nao))
    twice += twice.T
    right = by_integrals(basis, bra, ket, twice, operator)
    with running():
        ours = by_device(basis, bra, ket, twice, operator)
    assert abs(ours - right).max() < 1e-13 * abs(right).max()


@pytest.mark.sample("(1, 0)-double-None", "(2, 1)-single-0")
@pytest.mark.parametrize("axis", [None, 0, 2])
@pytest.mark.parametrize("way", ["double", "single"])
@pytest.mark.parametrize("classes", [(1, 0), (2, 1), (3, 2)], ids=str)
def test_derivatives(classes, way, axis, monkeypatch):
    """Forces of J alone, whose kernels have no densities of the highest degree."""
    monkeypatch.setattr(hermite_coulomb, "SINGLE_RATIO", 1e80 if way == "single" else 0.0)
    monkeypatch.setattr(hermite_coulomb, "FEWEST_SINGLES", 0)
    rng = np.random.default_rng(sum(classes))
    basis = md4.Basis([shell for l in classes for shell in side(rng, l, 1, axis)])
    dm = rng.normal(size=(basis.nao, basis.nao))
    dm += dm.T
    right = md4.JK(basis, backend="cpu").gradient(dm, exchange=0.0, tolerance=0)
    with running() as machine:
        ours = md4.JK(basis, backend="cuda").gradient(dm, exchange=0.0, tolerance=1e-30)
    assert "correlation_by_threads" in machine.kernels
    error = abs(ours - right).max() / abs(right).max()
    assert error < (2e-6 if way == "single" else 1e-13)
    assert (error > 1e-12) == (way == "single")
