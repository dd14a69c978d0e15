"""Slices of AO tensors: put together they are the tensor, and they share the work."""

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from molecules import WATER, joined, molecule
from pair_lists import add_block

from md4.contract.slices import Cuts, halves, shells_of, slice_pairs
from md4.contract.tensor import Request, add_slice, ao_tensor, block_work, cut_pieces, segmented, slice_target
from md4.contract.workspace import HermiteStore
from md4.cpu.h_matrices import BOTH
from md4.cpu.targets import HostTensor
from md4.engine import Engine
from md4.method.scatter import SYMMETRIES
from md4.plan import ListPair
from md4.shells.basis import Basis

NSHELL = 8


@pytest.fixture(scope="module")
def basis():
    """Shells of s, p and d functions in no order, some of them contracted."""
    l, nprim = [0, 1, 0, 2, 1, 0, 0, 1], [2, 1, 1, 1, 2, 1, 1, 1]
    rng = np.random.default_rng(3)
    exponents = [np.sort(rng.uniform(0.3, 3, n))[::-1] for n in nprim]
    return Basis.from_arrays(l, exponents, [rng.uniform(0.2, 1, n) for n in nprim], rng.uniform(-1, 1, (NSHELL, 3)))


@pytest.fixture(scope="module")
def engine(basis):
    return Engine(basis, backend="cpu")


def made(engine, request, layout):
    """A slice by whole lists."""
    target = slice_target(engine, request, layout, np.full(layout.shape, np.nan))
    told = []
    add_slice(engine, request, layout, target, told.append)
    assert sum(told) == pytest.approx(1.0)
    return target.result()


def made_by_blocks(engine, request, layout):
    """A slice by blocks, as a GPU makes it, in a tensor on the host."""
    target = HostTensor(layout, np.full(layout.shape, np.nan))
    bra, ket, triangle = slice_pairs(engine.bra_basis, request, layout.ends)
    bra, ket = (cut_pieces(engine, lists, 5000, 1 << 30) for lists in (bra, ket))
    for pair in (*(block_work(bra, bra, True) if triangle else ()), *block_work(bra, ket, False)):
        add_block(engine, target, pair)
    return target.result()


def check_cuts(engine, request, edges, make=made):
    """The slices between AOs are the rows of the whole tensor."""
    layout = request.layout(engine.bra_basis)
    whole = made(engine, request, layout)
    for ends in pairwise(edges):
        part = layout.slice(*ends)
        found = make(engine, request, part)
        assert found.shape == part.shape
        np.testing.assert_allclose(found, whole[slice(*part.rows)], rtol=0, atol=1e-14)
    assert layout.slice(edges[0], edges[-1]).rows == layout.rows


ranges = st.tuples(st.integers(0, NSHELL - 1), st.integers(1, NSHELL)).map(lambda r: (min(r), max(*r, min(r) + 1)))


@st.composite
def requests(draw):
    aosym = draw(st.sampled_from(SYMMETRIES))
    whole, r = ((0, NSHELL),) * 4, [draw(ranges) for _ in range(4)]
    parts = {
        "s1": [whole, (r[0], r[1], r[0], r[1]), (r[0], r[1], r[1], r[0]), tuple(r)],
        "s4": [whole, (r[0],) * 4, (r[0], r[0], r[1], r[1])],
        "s8": [whole],
    }
    return Request(aosym, draw(st.sampled_from(parts[aosym])))


@given(request=requests(), cuts=st.sets(st.integers(1, 40), max_size=3))
def test_slices_put_together_are_the_tensor(basis, engine, request, cuts):
    nao = int(request.layout(basis).aos[4])
    check_cuts(engine, request, [0, *sorted(cut for cut in cuts if cut < nao), nao])


@pytest.mark.parametrize("aosym", SYMMETRIES)
def test_slices_by_blocks(basis, engine, aosym):
    request = Request.checked(basis, aosym, None)
    check_cuts(engine, request, [0, *basis.ao_loc[[2, 5]].tolist(), basis.nao - 1, basis.nao], made_by_blocks)


def test_slices_where_contractions_are_split():
    """The cuts are those of the shells that are computed with."""
    basis = Basis.from_mol(molecule(WATER, joined("cc-pvdz", "OH")))
    engine, request = segmented(Engine(basis, backend="cpu"), Request.checked(basis, "s8", None))
    assert engine.bra_basis.nshell > basis.nshell
    cuts = Cuts(engine.bra_basis, request)
    parts = [made(engine, request, part) for part in cuts.slices((0, basis.nao), 4, 1 << 40)]
    assert len(parts) == 4
    np.testing.assert_allclose(np.concatenate(parts), ao_tensor(Engine(basis, backend="cpu"), "s8"), rtol=0, atol=1e-14)


def quartets(basis, request, ends):
    """The unordered shell quartets of a slice, as a list of their pairs of pairs."""
    bra, ket, triangle = slice_pairs(basis, request, ends)
    bra, ket = ([tuple(sorted(pair)) for pairs in lists for pair in pairs.tolist()] for lists in (bra, ket))
    both = [(ij, kl) for n, ij in enumerate(bra) for kl in bra[: n + 1]] if triangle else []
    return [frozenset(quartet) for quartet in (*both, *product(bra, ket))]


@given(cuts=st.sets(st.integers(1, NSHELL - 1), max_size=4))
def test_slices_of_s8_share_no_work(basis, cuts):
    request = Request.checked(basis, "s8", None)
    ends = [int(basis.ao_loc[cut]) for cut in [0, *sorted(cuts), NSHELL]]
    found = [quartet for part in pairwise(ends) for quartet in quartets(basis, request, part)]
    assert len(found) == len(set(found))
    assert set(found) == set(quartets(basis, request, None))


@pytest.mark.parametrize("aosym", ["s1", "s4"])
def test_no_slice_computes_a_quartet_twice(basis, aosym):
    request = Request.checked(basis, aosym, None)
    for ends in pairwise(basis.ao_loc[[0, 3, 6, 8]].tolist()):
        found = quartets(basis, request, ends)
        assert len(found) == len(set(found))
        assert 0 < len(found) < len(quartets(basis, request, None))


# where to cut ---------------------------------------------------------------------------------------------------------


@given(request=requests(), count=st.integers(1, 12))
def test_shares_are_complete(basis, request, count):
    cuts = Cuts(basis, request)
    edges = cuts.shares(count).tolist()
    assert len(edges) == count + 1
    assert edges == sorted(edges)
    assert edges[0] == 0
    assert edges[-1] == cuts.layout.aos[4]
    assert set(edges) <= set(cuts.aos.tolist())


ends_of_aos = st.tuples(st.integers(0, 20), st.integers(0, 20))


@given(request=requests(), count=st.integers(1, 12), most=st.integers(1, 200_000), ends=ends_of_aos)
def test_slices_are_complete_and_small(basis, request, count, most, ends):
    cuts = Cuts(basis, request)
    first, last = (min(end, int(cuts.layout.aos[4])) for end in sorted(ends))
    found = cuts.slices((first, last), count, most)
    edges = [first, *(part.ends[1] for part in found)]
    assert [part.ends for part in found] == list(pairwise(edges))
    assert edges[-1] == last
    assert all(part.nbytes <= most or part.ends[1] - part.ends[0] == 1 for part in found)
    assert all(part.ends[0] < part.ends[1] for part in found)


def test_shares_are_equal():
    """Of equal shells: the quartets of each share are those of the others within a shell."""
    basis = Basis.from_arrays([1] * 60, [[1.0]] * 60, [[1.0]] * 60, np.zeros((60, 3)))
    for aosym in SYMMETRIES:
        request = Request.checked(basis, aosym, None)
        cuts = Cuts(basis, request)
        work = [cuts.work[basis.ao_loc.tolist().index(edge)] for edge in cuts.shares(4)]
        np.testing.assert_allclose(np.diff(work) / work[-1], 0.25, atol=0.04)
        rows = [cuts.layout.slice(*ends).nbytes for ends in pairwise(cuts.shares(4).tolist())]
        np.testing.assert_allclose(np.array(rows) / sum(rows), 0.25, atol=0.04)


def test_a_slice_ends_between_shells_where_it_can(basis):
    cuts = Cuts(basis, Request.checked(basis, "s1", None))
    row = 8 * basis.nao**3
    assert [part.ends for part in cuts.slices((0, 5), 1, 4 * row)] == [(0, 4), (4, 5)]
    assert [part.ends for part in cuts.slices((5, 10), 1, 2 * row)] == [(5, 7), (7, 9), (9, 10)]


def test_shells_of_a_slice(basis):
    assert basis.ao_loc.tolist() == [0, 1, 4, 5, 10, 13, 14, 15, 18]
    assert shells_of(basis, (0, 8), (0, 1)) == (0, 1)
    assert shells_of(basis, (0, 8), (0, 2)) == (0, 2)
    assert shells_of(basis, (0, 8), (4, 10)) == (2, 4)
    assert shells_of(basis, (2, 5), (0, 2)) == (2, 4)
    assert shells_of(basis, (2, 5), None) == (2, 5)


def test_matrices_beyond_the_limit_are_dropped(engine, basis):
    """Of a batch all may be made at once; none is forgotten, which would never be dropped."""
    first, second, third = (engine.prepare([[n, n]]) for n in range(3))
    store = HermiteStore(1, engine.backend)
    for one, two in ((first, second), (second, third), (third, third)):
        (batch,) = store.batches([ListPair(one, two, False)])
        for side in batch[0][:2]:
            side.h(BOTH)
        assert [piece for piece in (first, second, third) if piece.h_bytes] == [*dict.fromkeys((one, two))]


def test_halves(basis):
    layout = Request.checked(basis, "s4", None).layout(basis)
    assert [half.ends for half in halves(layout.slice(3, 8))] == [(3, 5), (5, 8)]
    assert halves(layout.slice(3, 4)) == ()
