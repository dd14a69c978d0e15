"""The CPU backend against libcint and the high-precision reference."""

from itertools import product

import numpy as np
import pytest
from pair_lists import PAIRS, mixed_basis

import md4
from md4.engine import Engine
from md4.method.operators import Operator
from md4.plan import ListPair
from md4.shells.basis import Basis
from md4.validation import oracle as reference

gto = pytest.importorskip("pyscf.gto")


def molecule(ls, nprim=1, seed=0, cart=False):
    """Shells of angular momenta `ls` within 2 Bohr, each contracted from `nprim` primitives."""
    rng = np.random.default_rng(seed)
    atoms = [[f"H{n}", rng.uniform(-1.1, 1.1, 3)] for n in range(len(ls))]
    basis = {
        f"H{n}": [[l, *([e, 1.0] for e in np.exp(rng.uniform(np.log(0.2), np.log(5), nprim)))]]
        for n, l in enumerate(ls)
    }
    return gto.M(atom=atoms, basis=basis, unit="Bohr", cart=cart, spin=None, verbose=0)


def engine(mol, **options):
    return Engine(Basis.from_mol(mol), operator=Operator(), backend="cpu", **options)


def libcint(mol, shells):
    """The block of four shells."""
    sizes = np.diff(mol.ao_loc)
    slices = sum(((s, s + 1) for s in shells), ())
    return mol.intor("int2e", shls_slice=slices).reshape(sizes[list(shells)])


def assert_close(ours, theirs, tolerance=1e-12):
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance * abs(theirs).max())


@pytest.mark.parametrize("ls", [(0, 0, 0, 0), (1, 0, 2, 1), (2, 2, 2, 2), (3, 1, 0, 0), (3, 3, 3, 3), (4, 2, 3, 1)])
@pytest.mark.parametrize("nprim", [1, 3])
@pytest.mark.parametrize("cart", [False, True])
def test_one_quartet_of_a_class(ls, nprim, cart):
    mol = molecule(ls, nprim, cart=cart)
    tolerance = 1e-12 if max(ls) < 3 else 1e-10  # libcint itself has lost digits from (ff|ff) on
    assert_close(engine(mol).compute([[0, 1]], [[2, 3]])[0, 0], libcint(mol, (0, 1, 2, 3)), tolerance)


@pytest.mark.parametrize("l", [4, 5, 6])
@pytest.mark.parametrize("cart", [False, True])
def test_high_classes(l, cart):
    """Against the reference, since libcint loses digits here."""
    mol = molecule([l] * 4, seed=l, cart=cart)
    block = engine(mol).compute([[0, 1]], [[2, 3]])[0, 0]
    largest = tuple(int(i) for i in np.unravel_index(abs(block).argmax(), block.shape))
    elements = [largest, (0, 1, 2, 3)]
    exact = np.array(reference.eri(Basis.from_mol(mol).shells, not cart, elements=elements), dtype=float).ravel()
    assert_close(np.array([block[e] for e in elements]), exact)


@pytest.fixture(scope="module")
def mixed():
    """The mixed basis and its integrals, one quartet at a time."""
    basis = mixed_basis()
    one = Engine(basis, operator=Operator(), backend="cpu")
    blocks = [[one.compute(PAIRS[i : i + 1], PAIRS[k : k + 1])[0, 0] for k in range(36)] for i in range(36)]
    return basis, np.array(blocks)


def test_lists_with_any_number_of_primitives(mixed):
    """K differs from pair to pair, and all primitives of some are screened out."""
    basis, blocks = mixed
    work = Engine(basis, operator=Operator(), backend="cpu")
    counts = np.diff(work.prepare(PAIRS).pairs.start)
    assert counts.min() == 0
    assert len(set(counts)) > 3
    out = work.compute(PAIRS, PAIRS)
    assert_close(out, blocks, 1e-14)
    assert not out[counts == 0].any()
    assert not out[:, counts == 0].any()


def test_lists_may_lie_in_memory_in_any_order(mixed):
    basis, blocks = mixed
    bra, ket = np.asfortranarray(PAIRS), np.repeat(PAIRS, 2, axis=0)[::2].astype(np.int32)
    assert_close(Engine(basis, backend="cpu").compute(bra, ket), blocks, 1e-14)


@pytest.mark.parametrize(("limit", "sizes"), [(1, [1, 1, 1]), (100, [2, 1]), (1 << 13, [3])])
def test_how_many_lists_are_made_together_does_not_matter(mixed, limit, sizes, monkeypatch):
    basis, _ = mixed
    work, lists = Engine(basis, backend="cpu"), [PAIRS[:20], PAIRS[20:21], PAIRS[21:]]
    expected = [work.prepare(pairs) for pairs in lists]
    monkeypatch.setattr("md4.cpu.backend.TOGETHER", limit)
    assert [len(some) for some in work.backend.together(basis, lists)] == sizes
    for made, alone in zip(work.prepare_lists(lists, basis), expected):
        np.testing.assert_array_equal(made.pairs.pairs, alone.pairs.pairs)
        np.testing.assert_array_equal(made.data.lane_primitives, alone.data.lane_primitives)


@pytest.mark.parametrize("chunk", [(1, 1), (5, 7), (36, 2)])
def test_chunks_do_not_matter(mixed, chunk, monkeypatch):
    basis, blocks = mixed
    work = Engine(basis, operator=Operator(), backend="cpu")
    monkeypatch.setattr(work.backend, "chunk_pairs", lambda plan, bra, ket: chunk)
    assert_close(work.compute(PAIRS, PAIRS[:20]), blocks[:, :20], 1e-14)


def test_integrals_by_two_threads(mixed, two_threads):
    basis, blocks = mixed
    assert_close(Engine(basis, backend="cpu").compute(PAIRS, PAIRS), blocks, 1e-14)


@pytest.mark.parametrize("with_k", [True, False])
def test_sums_of_two_threads(with_k, two_threads, monkeypatch):
    """Each thread sums its own J and K, with K and in the Hermite basis."""
    basis = mixed_basis()
    dm = np.random.default_rng(0).normal(size=(3, basis.nao, basis.nao))
    both = md4.get_jk(basis, dm, 0, with_k=with_k, backend="cpu")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for ours, one in zip(both, md4.get_jk(basis, dm, 0, with_k=with_k, backend="cpu")):
        if with_k or one is not None:
            assert_close(ours, one)


def test_bra_and_ket_exchanged():
    """The cheaper side goes first, by a block with bra and ket exchanged."""
    mol = molecule((0, 0, 3, 3))
    work = engine(mol)
    few, many = work.compute([[0, 1]], [[2, 3], [3, 2]]), work.compute([[2, 3], [3, 2]], [[0, 1]])
    assert_close(few, many.transpose(1, 0, 4, 5, 2, 3), 1e-13)
    assert_close(few[0, 0], libcint(mol, (0, 1, 2, 3)))


def test_matrix_of_a_list_with_itself():
    """One list may have columns and rows; what is not of its blocks stays as it is."""
    basis = mixed_basis()
    engine = Engine(basis, backend="cpu")
    (pairs,) = engine.prepare_lists([PAIRS[:3]], basis)
    size = 3 * pairs.facts.nab
    out = np.full((size + 2, size + 3), 7.0)
    engine.backend.fill_matrix(engine, out, [ListPair(pairs, pairs, same=False)], {pairs: 1}, {pairs: 2})
    block = engine.compute(PAIRS[:3], PAIRS[:3])
    right = np.full_like(out, 7.0)
    right[2:, 1:-2] = block.transpose(1, 4, 5, 0, 2, 3).reshape(size, size)
    np.testing.assert_allclose(out, right, rtol=0, atol=1e-14 * abs(block).max())


def test_workspaces_shrink_with_max_memory():
    mol = molecule([2] * 6)
    pairs = np.array(list(product(range(6), repeat=2)))
    free = engine(mol)
    bra = free.prepare(pairs)
    need = free.backend.least_workspace(bra.pairs, bra.pairs)
    result, lists = 8 * 36**2 * 5**4, 2 * (bra.pairs.nbytes + bra.data.nbytes)
    tight = engine(mol, max_memory=1e-6 * (need + result + lists + 0.5))
    np.testing.assert_array_equal(tight.compute(pairs, pairs), free.compute(pairs, pairs))
    assert tight.backend.memory.kept_bytes <= need < free.backend.memory.kept_bytes
