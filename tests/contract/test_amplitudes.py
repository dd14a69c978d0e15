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
from md4.support.memory import HostMemory


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
    monkeypatch.setattr(amplitudes, "COPIED_BYTES", 1)
    compare(md4.Engine(contracted, backend="cpu"), t)
    assert contracted_by(md4.Engine(contracted, backend="cpu"), t[:0]).shape == (0, *t.shape[1:])


def test_in_an_array_of_the_caller(contracted):
    """Amplitudes that are a part of an array, too; they stay as they are."""
    engine, t = md4.Engine(contracted, backend="cpu"), random_amplitudes(contracted.nao, 6)
    before, out = t.copy(), np.full((3, *t.shape[1:]), np.nan)
    assert DirectContraction(RowTeam([engine])).contracted(t[::2], out) is out
    np.testing.assert_array_equal(out, contracted_by(engine, t[::2].copy()))
    np.testing.assert_array_equal(t, before)


@pytest.mark.parametrize("most", [10**6, 20])
def test_runs(contracted, most):
    """They hold each row once; in a run one AO stays, and the other one is the next; none could be longer."""
    engine = md4.Engine(contracted, backend="cpu")
    rows = RowTeam([engine]).rows[0]
    for first, last in rows.pieces(most):
        runs = rows.in_runs(first, last)
        assert np.array_equal(np.sort(runs.rows), np.arange(last - first))
        pairs = {tuple(pair) for pair in np.sort(np.transpose([runs.one, runs.other]), axis=1).tolist()}
        here = np.transpose([rows.first[first:last], rows.second[first:last]])
        assert pairs == set(map(tuple, np.sort(here, axis=1).tolist()))
        assert np.array_equal(runs.twice, rows.twice[first:last][runs.rows])
        cuts = list(runs.between(0, last - first))
        for begin, end in cuts:
            assert len(set(runs.one[begin:end])) == len(set(runs.twice[begin:end])) == 1
            assert np.array_equal(runs.other[begin:end], runs.other[begin] + np.arange(end - begin))
        for _, end in cuts[:-1]:  # no two of them could be one
            same = [runs.one, runs.twice, runs.other - np.arange(last - first)]
            assert any(each[end - 1] != each[end] for each in same)
        assert list(runs.between(1, 2)) == [(1, 2)]


def test_least_memory(contracted, monkeypatch):
    """What does not fit is refused before the first integral; with little more, the cap is kept and numbers stay."""
    peaks, watch, refused = [], HostMemory.watch, []

    def watched(memory, *args):
        found = watch(memory, *args)
        peaks.append(memory.held)
        return found

    t = random_amplitudes(contracted.nao, 3)
    want = contracted_by(md4.Engine(contracted, backend="cpu"), t)
    monkeypatch.setattr(HostMemory, "watch", watched)
    for cap in np.arange(0.1, 3, 0.05):
        peaks.clear()
        try:
            found = contracted_by(md4.Engine(contracted, backend="cpu", max_memory=cap), t)
            break
        except MemoryLimitError as error:
            refused.append(str(error))
    assert any("amplitudes of one pair of 19 AOs take 17.3 kB" in text for text in refused), refused
    assert max(peaks) <= cap * 1e6
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-13 * abs(want).max())


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
def test_emulated_gpu(count, monkeypatch):
    monkeypatch.setattr(amplitudes, "COPIED_BYTES", 1)
    basis = Basis([Shell(l, [1.1, 0.3], [[0.6], [0.5]], CENTRES[n]) for l, n in ((0, 0), (1, 1))])
    t = random_amplitudes(basis.nao, 2)
    want = by_numpy(md4.Engine(basis, backend="cpu"), t)
    with running("dmma16", devices=count), cupy():
        first, *beside = engines(basis, count, "cuda")
        found = contracted_by(first, t, beside)
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-12)
