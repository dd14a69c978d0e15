"""What takes blocks on the CPU: arrays of blocks of any strides, and AO tensors, of whole lists and block by block."""

import numpy as np
import pytest
from pair_lists import add_block, few_shells, pairs_of, two_classes

from md4.contract.slices import slice_pairs
from md4.contract.tensor import Request, ao_tensor, block_work, cut_pieces
from md4.cpu.run import run_lists
from md4.cpu.targets import BlockWriter, HostBlock, HostTensor
from md4.engine import Engine
from md4.plan import ListPair

# Symmetry and slice of a tensor, in quarters of the shells; both have shells of both classes in all indices.
PARTS = [("s1", None), ("s4", None), ("s8", None), ("s1", (0, 3, 0, 4, 2, 4, 1, 3)), ("s4", (1, 3) * 4)]


@pytest.fixture(scope="module", params=[two_classes, few_shells])
def engine(request):
    return Engine(request.param(), backend="cpu")


def shells_of(basis, l):
    return np.flatnonzero(basis.classes[:, 0] == l).tolist()


def slice_of(basis, quarters):
    return None if quarters is None else tuple(basis.nshell * n // 4 for n in quarters)


@pytest.fixture(scope="module")
def tensor(engine):
    """The integrals of all AOs from blocks."""
    basis = engine.bra_basis
    full, places = np.empty((basis.nao,) * 4), [slice(*basis.ao_loc[n : n + 2]) for n in range(basis.nshell)]
    s, p = (shells_of(basis, l) for l in (0, 1))
    ranges = (s, s), (p, s), (p, p)
    for bra in ranges:
        for ket in ranges:
            one, two = pairs_of(*bra), pairs_of(*ket)
            block = engine.compute(one, two)
            for (n, m), values in zip(np.ndindex(block.shape[:2]), block.reshape(-1, *block.shape[2:])):
                i, j, k, l = (places[shell] for shell in (*one[n], *two[m]))
                full[i, j, k, l] = values
                full[j, i, k, l] = values.transpose(1, 0, 2, 3)
                full[i, j, l, k] = values.transpose(0, 1, 3, 2)
                full[j, i, l, k] = values.transpose(1, 0, 3, 2)
    return full


def part_of(basis, full, aosym, shls_slice):
    """The part of the full tensor in a symmetry."""
    ends = shls_slice or (0, basis.nshell) * 4
    part = full[tuple(slice(*basis.ao_loc[list(ends[n : n + 2])]) for n in (0, 2, 4, 6))]
    if aosym == "s1":
        return part
    (i, j), (k, l) = (np.tril_indices(part.shape[n]) for n in (0, 2))
    pairs = part[i[:, None], j[:, None], k, l]
    return pairs if aosym == "s4" else pairs[np.tril_indices(len(i))]


def by_blocks(engine, aosym, shls_slice):
    """The tensor by `HostTensor`, which a GPU's blocks fill."""
    request = Request.checked(engine.bra_basis, aosym, shls_slice)
    layout = request.layout(engine.bra_basis)
    target = HostTensor(layout, np.full(layout.shape, np.nan))
    bra, ket, triangle = slice_pairs(engine.bra_basis, request)
    bra, ket = (cut_pieces(engine, lists, 40_000, 1 << 30) for lists in (bra, ket))
    work = list(block_work(bra, bra, True) if triangle else block_work(bra, ket, False))
    assert any(pair.same for pair in work) == request.swap
    for pair in work:
        add_block(engine, target, pair)
    return target.result()


@pytest.mark.parametrize(("aosym", "quarters"), PARTS)
def test_tensors(engine, tensor, aosym, quarters, two_threads):
    """By whole lists and by blocks, each place is written, and with the right integral."""
    shls_slice = slice_of(engine.bra_basis, quarters)
    expected = part_of(engine.bra_basis, tensor, aosym, shls_slice)
    for found in (ao_tensor(engine, aosym, shls_slice), by_blocks(engine, aosym, shls_slice)):
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13 * abs(expected).max())


def test_threads_write_the_same_tensor(engine, two_threads, monkeypatch):
    """To the last bit, by whole lists and by blocks."""
    found = ao_tensor(engine, "s1"), by_blocks(engine, "s1", None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    np.testing.assert_array_equal(found[0], ao_tensor(engine, "s1"))
    np.testing.assert_array_equal(found[1], by_blocks(engine, "s1", None))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 3, 2), (3, 1, 0, 2), (2, 3, 1, 0)])
@pytest.mark.parametrize("ls", [(0, 0, 1, 1), (1, 1, 0, 0), (1, 0, 1, 0)])
def test_blocks_of_any_strides(engine, ls, order):
    """Into arrays whose axes lie in memory in any order, part of larger ones, whichever side is the bra."""
    ranges = [shells_of(engine.bra_basis, l) for l in ls]
    bra, ket = (engine.prepare(pairs_of(*these)) for these in (ranges[:2], ranges[2:]))
    expected = engine.compute(bra.pairs.pairs, ket.pairs.pairs)
    expected = expected.reshape(len(bra), len(ket), bra.pairs.nab, ket.pairs.nab)
    large = np.full([n + 2 for n in np.array(expected.shape)[list(order)]], np.nan)
    out = large[1:-1, 1:-1, 1:-1, 1:-1].transpose(np.argsort(order))
    ij, kl, ab, cd = (stride // 8 for stride in out.strides)
    places = {bra: (0, ij, ab), ket: (0, kl, cd)}
    run_lists(engine.backend, [ListPair(bra, ket, False)], BlockWriter(out), places=places)
    np.testing.assert_array_equal(out, expected)
    assert np.isfinite(large).sum() == expected.size


def test_blocks_swapped_and_cut():
    array = np.arange(120.0).reshape(2, 3, 4, 5)
    block = HostBlock(array)
    np.testing.assert_array_equal(block.swapped().array, array.transpose(1, 0, 3, 2))
    np.testing.assert_array_equal(block[1:2, 0:2].array, array[1:2, :2])
    assert np.shares_memory(block.swapped()[0:1, 0:1].array, array)
