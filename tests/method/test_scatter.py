"""Blocks into AO tensors, element by element in plain Python."""

from itertools import pairwise, product

import numpy as np
import pytest

from md4.method.scatter import TensorLayout, ao_ranges, is_repeated, make_scatter_element, triangle
from md4.shells.basis import Basis
from md4.shells.shell_pairs import unique_pairs_by_class


class Once(dict):
    """A tensor that refuses to have a place written twice with different values, and counts the writes."""

    writes = 0

    def __setitem__(self, place, value):
        assert self.get(place, value) == value
        Once.writes += 1
        super().__setitem__(place, value)


def plain(function):
    """The `jit` of plain Python."""
    return function


@pytest.fixture(scope="module")
def basis():
    return Basis.from_arrays([0, 1, 0, 1], [[1.0]] * 4, [[1.0]] * 4, np.arange(12.0).reshape(4, 3))


@pytest.fixture(scope="module")
def full(basis):
    """A tensor with the eightfold symmetry and otherwise different elements."""
    n = basis.nao
    numbers = [triangle(triangle(i, j), triangle(k, l)) for i, j, k, l in product(range(n), repeat=4)]
    return np.array(numbers, dtype=float).reshape((n,) * 4)


def scattered(basis, full, aosym, ranges, ends=None):
    """What the blocks of all pieces of `full` leave in a tensor, or in a slice of it."""
    aos = [np.arange(a, b) for a, b in pairwise(basis.ao_loc)]
    swap = set(ranges[:2]) == set(ranges[2:])
    layout = TensorLayout(aosym, ao_ranges(basis, ranges), swap, ends)
    element, box, out = make_scatter_element(aosym, plain), layout.box, Once()
    bras, kets = (unique_pairs_by_class(basis, np.arange(*a), np.arange(*b)) for a, b in (ranges[:2], ranges[2:]))
    for (n, bra), (m, ket) in product(enumerate(bras), enumerate(kets)):
        if swap and m > n:
            continue
        block = np.array([[full[np.ix_(*(aos[s] for s in (*ij, *kl)))] for kl in ket] for ij in bra])
        firsts = basis.ao_loc[bra], basis.ao_loc[ket]
        for index in range(block.size):
            element(index, block.ravel(), bra, ket, *firsts, block.shape, swap and n == m, swap, box, out)
    assert sorted(out) == list(range(np.prod(layout.shape)))
    assert layout.nbytes == 8 * len(out)
    return np.array([out[i] for i in range(len(out))]).reshape(layout.shape)


@pytest.mark.parametrize(
    "ranges", [((0, 4),) * 4, ((0, 2), (1, 4), (0, 4), (2, 3)), ((0, 2), (2, 4), (0, 2), (2, 4))]
)
def test_s1(basis, full, ranges):
    aos = [slice(basis.ao_loc[a], basis.ao_loc[b]) for a, b in ranges]
    np.testing.assert_array_equal(scattered(basis, full, "s1", ranges), full[tuple(aos)])


@pytest.mark.parametrize("ket", [(0, 4), (1, 3)])
def test_s4(basis, full, ket):
    tensor = scattered(basis, full, "s4", ((0, 4), (0, 4), ket, ket))
    aos = slice(basis.ao_loc[ket[0]], basis.ao_loc[ket[1]])
    rows, cols = np.tril_indices(basis.nao), np.tril_indices(basis.ao_loc[ket[1]] - basis.ao_loc[ket[0]])
    np.testing.assert_array_equal(tensor, full[:, :, aos, aos][rows][:, cols[0], cols[1]])


def test_s8_writes_every_place_once(basis, full):
    Once.writes = 0
    tensor = scattered(basis, full, "s8", ((0, 4),) * 4)
    np.testing.assert_array_equal(tensor, np.arange(tensor.size))
    assert Once.writes == tensor.size


@pytest.mark.parametrize("edges", [(0, 1, 4, 8), (0, 3, 5, 6, 8)], ids=["of shells", "within shells"])
@pytest.mark.parametrize(
    ("aosym", "ranges"),
    [("s1", ((0, 4),) * 4), ("s1", ((0, 4), (2, 4), (1, 3), (0, 4))), ("s4", ((0, 4),) * 4), ("s8", ((0, 4),) * 4)],
)
def test_slices_put_together_are_the_tensor(basis, full, aosym, ranges, edges):
    whole = TensorLayout(aosym, ao_ranges(basis, ranges), True)
    parts = [scattered(basis, full, aosym, ranges, ends) for ends in pairwise(edges)]
    np.testing.assert_array_equal(np.concatenate(parts), scattered(basis, full, aosym, ranges))
    rows = [whole.slice(*ends).rows for ends in pairwise(edges)]
    assert [last - first for first, last in rows] == [len(part) for part in parts]
    assert rows[0][0] == 0
    assert all(one[1] == next_one[0] for one, next_one in pairwise(rows))


def test_repeated_elements_within_a_diagonal_pair():
    repeated = [ab for ab in product(range(3), repeat=2) if is_repeated(True, False, False, 0, 0, *ab, 0, 0, 3, 3)]
    assert repeated == [(0, 1), (0, 2), (1, 2)]
