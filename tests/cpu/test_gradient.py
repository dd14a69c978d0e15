"""The loops of gradients: from lists that are not alike, against sums over tensors of derivatives; the tiles of Z."""

import numpy as np
import pytest
from nuclear_forces import forces_by_tensor, symmetric
from pair_lists import few_shells, mixed_basis, two_classes

import md4
from md4.contract.derivatives import DerivativeRequest
from md4.contract.tensor import locked_tensor
from md4.cpu.emit.vectors import LANES
from md4.cpu.gradient import z_tiles
from md4.cpu.groups import every_reach, hermite_functions
from md4.engine import Engine
from md4.method.derivatives import OF_A, OF_B

# Pairs with one lane each and with many; general contractions, and a shell so far away that pairs have no primitives.
BASES = {
    "two classes": two_classes, "general contractions": mixed_basis, "d shells": lambda: mixed_basis(2),
    "few shells": few_shells,
}  # fmt: skip


@pytest.fixture(scope="module", params=BASES)
def basis(request):
    return BASES[request.param]()


@pytest.fixture(scope="module")
def tensor(basis):
    """int2e_ip1 of the basis."""
    return locked_tensor(Engine(basis, backend="cpu"), DerivativeRequest.of_name(basis, "int2e_ip1", "s1", None))


def rows_of_shells(basis, of_aos):
    return np.add.reduceat(of_aos, basis.ao_loc[:-1], axis=1).T


@pytest.mark.parametrize("coulomb, exchange", [(1.0, 1.0), (1.0, 0.0), (0.0, 1.0)])
def test_sums_over_the_tensor(basis, tensor, coulomb, exchange, two_threads):
    """J and K together and alone, of three products of matrices without symmetry."""
    left, right = np.random.default_rng(3).normal(size=(2, 3, basis.nao, basis.nao))
    want = sum(forces_by_tensor(tensor, *both, coulomb, exchange) for both in zip(left, right))
    jk = md4.JK(basis, backend="cpu", direct_scf_tol=0)
    found = jk.product_gradient(left, right, coulomb, exchange)
    assert abs(found - rows_of_shells(basis, want)).max() < 1e-12 * abs(want).max()


@pytest.mark.parametrize("exchange", [1.0, 0.0])
def test_small_blocks_of_u(basis, exchange, monkeypatch):
    """U is made in parts where it does not fit; both products in tiles of all widths."""
    dm = symmetric(basis.nao)
    want = md4.JK(basis, backend="cpu").gradient(dm, exchange=exchange)
    monkeypatch.setattr("md4.cpu.forces.Z_BYTES", 1)  # a task has one bra pair
    found = md4.JK(basis, backend="cpu").gradient(dm, exchange=exchange)
    np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("shells", [
    (0, 0, True, 1, 1), (1, 0, True, 1, 2), (2, 1, True, 2, 1), (2, 2, False, 1, 1), (4, 3, True, 1, 1),
])  # fmt: skip
def test_tiles_of_z(shells):
    """Each element of Z that some derivative needs is in one tile, and tiles have two rows of a similar staircase."""
    la, lb, pure, nctr_a, nctr_b = shells
    derivatives = OF_A + OF_B
    tiles = z_tiles(*shells, False, derivatives)
    functions = hermite_functions(la, lb, pure, False, derivatives)[0]
    needed = every_reach(la, lb, pure, False, derivatives).any(axis=0)[..., functions]
    na, nb, count = needed.shape
    needed = np.broadcast_to(needed[None, :, None], (nctr_a, na, nctr_b, nb, count)).reshape(-1, count)
    made = np.zeros(needed.shape, dtype=int)
    for (row, other), first, last in zip(tiles.rows, tiles.begins[:-1], tiles.begins[1:]):
        here = tiles.functions[first:last]
        assert (np.diff(here) > 0).all()
        for this in {int(row), int(other)}:
            made[this, here] += 1
    assert made.max() == 1
    assert (made[needed] == 1).all()
    np.testing.assert_array_equal(tiles.places, tiles.functions * LANES)
