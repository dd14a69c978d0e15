"""J and K on the CPU from prepared lists: against sums over the whole tensor, J in two ways, and Schwarz bounds."""

import threading

import numpy as np
import pytest
from pair_lists import PAIRS, TRIANGLE, few_shells, mixed_basis, two_classes

import md4
from md4.contract.screening import schwarz_bounds
from md4.contract.tensor import ao_tensor
from md4.cpu.sums import HostDigest
from md4.engine import Engine
from md4.shells.schwarz import row_norms

BASES = {
    "two classes": two_classes, "general contractions": mixed_basis, "d shells": lambda: mixed_basis(2),
    "few shells": few_shells,
}  # fmt: skip


@pytest.fixture(scope="module", params=BASES)
def basis(request):
    return BASES[request.param]()


@pytest.fixture(scope="module")
def tensor(basis):
    return ao_tensor(Engine(basis, backend="cpu"), "s1")


def densities(basis, hermi, count=3):
    """Random matrices of a symmetry."""
    dm = np.random.default_rng(hermi).normal(size=(count, basis.nao, basis.nao))
    return {0: dm, 1: dm + dm.transpose(0, 2, 1), 2: dm - dm.transpose(0, 2, 1)}[hermi]


def assert_close(ours, theirs):
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12 * abs(theirs).max())


@pytest.mark.parametrize("hermi", [0, 1, 2])
def test_sums_over_the_tensor(basis, tensor, hermi, two_threads):
    """J and K together, and each alone, of several densities."""
    dm = densities(basis, hermi)
    j, k = np.einsum("ijkl,nlk->nij", tensor, dm), np.einsum("ijkl,njk->nil", tensor, dm)
    jk = md4.JK(basis, backend="cpu", direct_scf_tol=0)
    ours = jk.get_jk(dm, hermi)
    assert_close(ours[1], k)
    assert_close(jk.get_jk(dm, hermi, with_j=False)[1], k)
    if hermi == 2:
        assert not ours[0].any()
        assert not jk.get_jk(dm, hermi, with_k=False)[0].any()
    else:
        assert_close(ours[0], j)
        assert_close(jk.get_jk(dm, hermi, with_k=False)[0], j)


@pytest.mark.parametrize("tolerance", [0.0, 1e-13, 1e-6])
def test_j_alone_is_j_beside_k(basis, tolerance):
    """It is summed in the Hermite basis, of the same quartets or of more."""
    dm, jk = densities(basis, 1), md4.JK(basis, backend="cpu", direct_scf_tol=tolerance)
    both = jk.get_jk(dm)[0]
    quartets = jk.stats.computed
    alone = jk.get_jk(dm, with_k=False)[0]
    assert jk.stats.computed <= quartets
    assert abs(alone - both).max() <= 1e-12 * abs(both).max() + 1e3 * tolerance


def test_one_density_after_another_is_all_at_once(basis):
    dm, jk = densities(basis, 0), md4.JK(basis, backend="cpu", direct_scf_tol=0)
    for with_k in (True, False):
        together = jk.get_jk(dm, 0, with_k=with_k)
        for n, one in enumerate(dm):
            for ours, alone in zip(together[: 1 + with_k], jk.get_jk(one, 0, with_k=with_k)):
                assert_close(ours[n], alone)


def test_j_alone_from_short_tasks(basis, monkeypatch):
    """Tasks are short, so that an interrupt need not wait long; they give what long ones give."""
    dm, jk = densities(basis, 1), md4.JK(basis, backend="cpu")
    expected = jk.get_jk(dm, with_k=False)[0]
    monkeypatch.setattr("md4.cpu.hermite_coulomb.TASK_WORK", 1)
    assert_close(jk.get_jk(dm, with_k=False)[0], expected)


def test_sums_of_threads_are_added(two_threads, monkeypatch):
    """Both threads digest blocks, each to sums of its own."""
    basis, start, threads = two_classes(), threading.Barrier(2), set()
    dm = densities(basis, 1)
    add = HostDigest.add

    def waiting_add(self, thread, *args):
        add(self, thread, *args)
        if thread not in threads:
            threads.add(thread)
            start.wait(60)

    expected = md4.get_jk(basis, dm, backend="cpu")
    monkeypatch.setattr(HostDigest, "add", waiting_add)
    monkeypatch.setattr("md4.cpu.run.ITEMS", 20)  # so that no thread takes all tasks at once
    for ours, theirs in zip(md4.get_jk(basis, dm, backend="cpu"), expected):
        assert_close(ours, theirs)
    assert threads == {0, 1}


# bounds ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pairs", [PAIRS, TRIANGLE[2:3]], ids=len)
@pytest.mark.parametrize("l", [0, 2])
@pytest.mark.parametrize("operator", ["coulomb", ("erf", 0.4)], ids=["coulomb", "erf"])
@pytest.mark.parametrize("share", [0.0, 1e-3])
def test_schwarz_bounds(pairs, l, operator, share, monkeypatch):
    """From the diagonal blocks of the whole list, or of pieces of it where there is little memory."""
    engine = Engine(mixed_basis(l), backend="cpu", operator=operator, max_memory=1000)
    ((found, _),) = schwarz_bounds(engine, [pairs])
    monkeypatch.setattr("md4.cpu.sums.H_SHARE", share)
    np.testing.assert_allclose(schwarz_bounds(engine, [pairs])[0][0], found, rtol=1e-14, atol=0)
    for pair, bound in zip(pairs, found):
        block = engine.compute([pair], [pair])[0, 0]
        diagonal = np.einsum("abab->ab", block)
        assert abs(bound - row_norms(diagonal[None])[0]) <= 1e-12 * bound
