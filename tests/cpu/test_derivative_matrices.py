"""J and K of derivatives from lists that are not alike: against sums over the tensor, in pieces and by threads."""

import numpy as np
import pytest
from nuclear_forces import assert_small_ones_left_out, row_of_shells, scattered
from pair_lists import few_shells, mixed_basis, two_classes

import md4
from md4.contract.derivatives import DerivativeRequest
from md4.contract.tensor import locked_tensor
from md4.engine import Engine

BASES = {
    "two classes": two_classes, "general contractions": mixed_basis, "d shells": lambda: mixed_basis(2),
    "few shells": few_shells,
}  # fmt: skip


@pytest.fixture(scope="module", params=BASES)
def basis(request):
    return BASES[request.param]()


@pytest.fixture(scope="module")
def case(basis):
    """Matrices without symmetry, and their J and K of derivatives."""
    request = DerivativeRequest.of_name(basis, "int2e_ip1", "s1", None)
    tensor = locked_tensor(Engine(basis, backend="cpu"), request)
    dm = np.random.default_rng(1).normal(size=(3, basis.nao, basis.nao))
    return dm, [-np.einsum(i, tensor, dm) for i in ("xijkl,nlk->nxij", "xijkl,njk->nxil")]


def assert_case(jk, case, **options):
    dm, want = case
    for mine, theirs in zip(jk.derivative_jk(dm, **options), want):
        assert mine is None or abs(mine - theirs).max() < 1e-12 * abs(theirs).max()


@pytest.mark.parametrize("options", [{}, {"with_j": False}, {"with_k": False}], ids=str)
def test_sums_over_the_tensor(basis, case, options, two_threads):
    assert_case(md4.JK(basis, backend="cpu", direct_scf_tol=0), case, **options)


def test_h_of_derivatives_in_pieces(basis, case, monkeypatch):
    """A bra pair at a time."""
    jk, sizes = md4.JK(basis, backend="cpu", direct_scf_tol=0), []

    def one_by_one(pairs, layout, room):
        sizes.append(len(pairs))
        return [slice(n, n + 1) for n in range(len(pairs))]

    monkeypatch.setattr("md4.cpu.derivative_matrices.pieces", one_by_one)
    assert_case(jk, case)
    assert max(sizes) > 1


def test_one_of_many_matrices(basis):
    """Each is what it is alone, and a zero one is zero."""
    jk, dm = (
        md4.JK(basis, backend="cpu", direct_scf_tol=0),
        np.random.default_rng(2).normal(size=(3, basis.nao, basis.nao)),
    )
    dm[1] = 0
    together = jk.derivative_jk(dm)
    for n, alone in enumerate(map(jk.derivative_jk, dm)):
        for both, one in zip(together, alone):
            np.testing.assert_allclose(both[n], one, rtol=0, atol=1e-12 * abs(both).max())
            assert n != 1 or not one.any()


@pytest.mark.parametrize("options", [{}, {"with_j": False}, {"with_k": False}], ids=str)
def test_what_is_left_out(options):
    """By the blocks of D that belong to it."""
    basis = row_of_shells(0, 1, 0, 0, 1, 0, 0)
    for seed, tolerance in enumerate((1e-4, 1e-2, 0.3)):
        dm, jk = scattered(basis, seed), md4.JK(basis, backend="cpu", direct_scf_tol=0)
        found = jk.derivative_jk(dm, tolerance=tolerance, **options)
        assert_small_ones_left_out(basis, dm, tolerance, found)
