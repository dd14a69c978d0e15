"""Forces of density fitting by several workers of one process: on the CPU, on emulated GPUs, or on two GPUs."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from contract.test_fitting_gradient import HYDROXYL, LITTLE, LITTLE_AUX, fitting, of_atoms
from emulator import running
from emulator.array_library import cupy
from hypothesis import given
from hypothesis import strategies as st
from molecules import molecule
from nuclear_forces import WATER, symmetric
from pyscf import df

import md4
from md4.contract.fitting_force_team import OneOfTeam, TeamGradient
from md4.contract.fitting_gradient import FittingGradient
from md4.contract.fitting_team import density_fitting
from md4.cpu.algebra import HostAlgebra
from md4.gpu import device_count
from md4.gpu.algebra import DeviceAlgebra
from md4.support.memory import check_fits

CLOSE = {"cpu": 1e-12, "cuda": 1e-10}  # relative to the largest component
STORES = ["device", "host", "direct"]


def bases(mol, auxmol):
    return [md4.Basis.from_mol(m) for m in (mol, auxmol)]


def on_cpu(monkeypatch, mol, auxmol, count=2, operator=None, **options):
    """The gradient of so many workers."""
    monkeypatch.setattr("md4.contract.team.chosen", lambda *_: [None] * count)
    made = TeamGradient(density_fitting(*bases(mol, auxmol), operator, "cpu", **options))
    assert len(made.workers) == count
    return made


def on_gpus(mol, auxmol, count=2, operator=None, **options):
    return TeamGradient(density_fitting(*bases(mol, auxmol), operator, "cuda", devices=[0, 1], **options))


@pytest.fixture
def workers(backend, monkeypatch):
    """A function that makes the gradient of so many workers; two on GPUs."""
    if backend == "cpu":
        return partial(on_cpu, monkeypatch)
    pytest.importorskip("cupy")
    if device_count() < 2:
        pytest.skip("needs two GPUs")
    return on_gpus


@pytest.fixture(scope="module")
def mols():
    mol = molecule(WATER, "6-31g")
    return mol, df.make_auxmol(mol, "cc-pvdz-jkfit")


def assert_same(mols, found, want, close=None):
    """Forces of atoms. Those of auxiliary shells alone can be large where these are nearly dependent."""
    close = CLOSE[found[0].engine.backend.name] if close is None else close
    (ours, theirs) = (of_atoms(*mols, made, forces) for made, forces in (found, want))
    assert abs(ours - theirs).max() <= close * max(1.0, abs(theirs).max())


def assert_again(mols, made, found, before):
    """The same forces by the same workers; the same bits on a CPU, where no sum depends on the memory that is left."""
    if made.fitting.engine.backend.name == "cuda":
        assert_same(mols, (made.fitting, found), (made.fitting, before), 1e-12)
        return
    for one, other in zip(found, before, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.sample("cpu-*-1.0-0.7-True")
@pytest.mark.parametrize("coulomb, exchange, response", [(1.0, 0.7, True), (1.0, 0.0, True), (0.0, -2.0, False)])
@pytest.mark.parametrize("count, store", [(2, "device"), (3, "host"), (3, "direct")])
def test_as_one_worker(workers, mols, count, store, coulomb, exchange, response):
    """Of two spins, whose densities have as many orbitals as there are AOs; the same bits in each run."""
    made, one, dm = workers(*mols, count, store=store), fitting(*mols), symmetric(mols[0].nao, 2)
    assert made.fitting.store == store
    given = dm, coulomb, exchange, None, response
    found, want = made.run(*given), FittingGradient(one).run(*given)
    assert_same(mols, (made.fitting, found), (one, want))
    assert_again(mols, made, made.run(*given), found)


@pytest.mark.parametrize("store", ["device", "direct"])
def test_eigenvectors_that_are_left_out(workers, mols, store, monkeypatch):
    """They turn those that stay."""
    for algebra in (HostAlgebra, DeviceAlgebra):
        monkeypatch.setattr(algebra, "cholesky", lambda *args: None)
    operator, dm = md4.Operator.erf(0.33), mols[0].RHF().run(verbose=0).make_rdm1()
    made, one = workers(*mols, operator=operator, store=store), fitting(*mols, 0.33)
    assert made.fitting.size == one.size < mols[1].nao
    assert_same(mols, (made.fitting, made.run(dm, 1.0, 0.7)), (one, FittingGradient(one).run(dm, 1.0, 0.7)), 1e-10)


@pytest.mark.parametrize("store", ["device", "direct"])
def test_orbitals(workers, mols, store):
    """Few of them, with which there are fewer orbitals than workers in one case; a cutoff, and a tolerance."""
    mol, (c, n) = mols[0], (np.linalg.qr(np.random.default_rng(0).normal(size=(13, 13)))[0], np.zeros(13))
    for occupied in (1, 5):
        n[:occupied] = 2.0
        dm, options = (c * n) @ c.T, {"orbitals": [(c, n)], "tolerance": 1e-12}
        made, one = workers(*mols, 3, store=store, cutoff=1e-6), fitting(*mols, cutoff=1e-6)
        found, want = (this.run(dm, 1.0, 1.0, **options) for this in (made, FittingGradient(one)))
        assert_same(mols, (made.fitting, found), (one, want), 1e-10)
    assert mol.nao == 13


def test_nothing(workers, mols):
    """Where a cutoff leaves out all pairs, or there is no density."""
    for options, dm in (({"cutoff": 1e9}, symmetric(13)), ({}, np.zeros((13, 13)))):
        found = workers(*mols, **options).run(dm, 1.0, 1.0)
        assert [this.shape for this in found] == [(mols[0].nbas, 3), (mols[1].nbas, 3)]
        assert not any(this.any() for this in found)


@given(counts=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 9)), min_size=1, max_size=6),
       parts=st.integers(1, 7), most=st.integers(1, 60))  # fmt: skip
def test_auxiliary_shells_are_divided(counts, parts, most):
    """All parts have the same order of shells, whatever memory each has; each shell is of one part."""

    made, orders, owned = object.__new__(FittingGradient), [], []
    ends = np.cumsum([0, *(size for _, size in counts)])
    basis = SimpleNamespace(ao_loc=ends, parts=[()], unit=len(counts))
    single = [np.full((count, 2), n) for n, (count, _) in enumerate(counts)]
    made.three, made.fitting = SimpleNamespace(single=single, ncol=1, basis=basis), SimpleNamespace(nao=0)
    for part in range(parts):
        left = 1e9 / (1 + part)
        made.algebra = SimpleNamespace(memory_left=lambda left=left: left, check_fits=lambda *_: None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("md4.contract.fitting_gradient.BLOCK_SHARE", 16 * most / (1e9 / (1 + part)))
            blocks, own = made.pieces(part, parts)
        every = [[(n, shell) for n, some in block for shell in range(counts[n][0])[some]] for block in blocks]
        assert all(every)
        orders.append([shell for block in every for shell in block])
        owned += [shell for number in own for shell in every[number]]
        for number in own:
            sizes = [counts[n][1] for n, _ in every[number]]
            assert sum(sizes) <= most or len(sizes) == 1
    assert all(order == orders[0] for order in orders)
    assert owned == orders[0]
    assert sorted(owned) == [(n, shell) for n, (count, _) in enumerate(counts) for shell in range(count)]


@pytest.mark.parametrize("fault", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("step", ["own_sums", "own_pairs", "own_forces"])
@pytest.mark.parametrize("number", [0, 1])
def test_an_error_of_one_worker(workers, mols, number, step, fault, monkeypatch):
    """It is raised when all have stopped; nothing stays locked, and the next forces are right."""
    made, dm = workers(*mols), symmetric(13)
    right, method = made.run(dm, 1.0, 1.0), getattr(OneOfTeam, step)

    def fails(one, *given):
        if one.fitting.number == number:
            raise fault("in a worker")
        return method(one, *given)

    monkeypatch.setattr(OneOfTeam, step, fails)
    with pytest.raises(fault, match="in a worker"):
        made.run(dm, 1.0, 1.0)
    monkeypatch.undo()
    assert_again(mols, made, made.run(dm, 1.0, 1.0), right)


def test_each_worker_looks_at_its_own_memory(mols, monkeypatch):
    made, dm = on_cpu(monkeypatch, *mols), symmetric(13)
    little = made.fitting.shares[1].algebra
    monkeypatch.setattr(little, "check_fits", lambda need, what: check_fits(need, 10_000, what))
    with pytest.raises(md4.MemoryLimitError, match=r"pairs of occupied orbitals needs .*, but 10 kB may be used"):
        made.run(dm, 1.0, 1.0)


@pytest.mark.thorough
@pytest.mark.parametrize("store", STORES)
def test_emulated_gpus(store, monkeypatch):
    """Two, with a stand-in for CuPy; where eigenvectors are left out, they turn."""
    mols = [molecule(HYDROXYL, basis) for basis in (LITTLE, LITTLE_AUX)]
    if store == "host":
        for algebra in (HostAlgebra, DeviceAlgebra):
            monkeypatch.setattr(algebra, "cholesky", lambda *args: None)
        monkeypatch.setattr("md4.contract.metric.LINEAR_DEPENDENCE", 1.6)
    dm, one = symmetric(mols[0].nao), fitting(*mols)
    want = FittingGradient(one).run(dm, 1.0, 0.7)
    with running("dmma16", devices=2) as machine, cupy() as library:
        made = on_gpus(*mols, store=store)
        found = made.run(dm, 1.0, 0.7)
        assert sorted(set(library.handles)) == [0, 1]
    assert made.fitting.size == one.size
    assert_same(mols, (made.fitting, found), (one, want))
    assert {"table_norms", "pair_forces", "derivative_norms"} <= machine.kernels
