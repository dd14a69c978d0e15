"""J alone, in the Hermite basis: against the digestion's J and PySCF's on both backends, and its parts."""

import operator
from itertools import pairwise, product

import numpy as np
import pytest
from densities import BENZENE, CHAIN, HERMITICITY, random_densities
from molecules import METHANE, WATER, molecule
from pyscf import scf

import md4
from md4.errors import MemoryLimitError
from md4.gpu.emit.correlation import Walk, even_ranges
from md4.gpu.hermite_rows import row_ordinals, row_parts, row_places, row_width, row_words
from md4.gpu.kernels.coulomb_threads import bras_of_a_block, by_threads, ket_parts, stage_bytes, threads_of_a_block
from md4.gpu.kernels.hermite_coulomb import functions_of_a_lane, kets_of_a_warp
from md4.gpu.pair_order import PairOrder, overlap, part_of_order, powers_of_2, rows_together
from md4.gpu.tuning import HERMITE_COULOMB
from md4.method.angular import hermite_ordinal, hermite_triples, packed_hermite, sum_ordinal

TOLERANCE = 1e-10  # largest error of an element, relative to the largest element or to 1


def check(ours, reference):
    assert ours.shape == reference.shape
    assert abs(ours - reference).max() < TOLERANCE * max(1.0, abs(reference).max())


def check_both(mol, backend, hermi=1, count=1, omega=0.0):
    """Against the digestion and, but for erfc, PySCF, whose own is good to 1e-10 only."""
    dm = random_densities(mol, hermi, count)
    jk = md4.JK(mol, backend=backend)
    ours, none = jk.get_jk(dm, hermi, with_k=False, omega=omega)
    assert none is None
    check(ours, jk.get_jk(dm, hermi, omega=omega)[0])
    if omega >= 0 and hermi != 2:
        with mol.with_range_coulomb(omega):
            check(ours, scf.hf.dot_eri_dm(mol.intor("int2e", aosym="s8"), dm, hermi, with_k=False)[0])
    return jk


@pytest.mark.parametrize("hermi", HERMITICITY)
@pytest.mark.parametrize("cart", [False, True], ids=["spherical", "cartesian"])
def test_water(backend, hermi, cart):
    check_both(molecule(WATER, "cc-pvdz", cart=cart), backend, hermi, count=2)


@pytest.mark.parametrize("omega", [0.3, -0.3])
def test_range_separation(backend, omega):
    check_both(molecule(WATER, "6-31g*"), backend, 0, omega=omega)


def test_general_contraction(backend):
    check_both(molecule(METHANE, "roosdz"), backend, 0)


def test_higher_functions(backend):
    """L beyond what one thread takes."""
    mol = molecule("Sc 0 0 0; H 0 0 1.8", {"Sc": [[2, [1.3, 1.0]], [4, [0.9, 1.0]], [3, [1.1, 1.0]]], "H": "sto-3g"})
    check_both(mol, backend, 0, count=2)


def test_complex_density(backend):
    mol = molecule(WATER, "6-31g")
    real, imaginary = random_densities(mol, 1)[0], random_densities(mol, 2, seed=1)[0]
    jk = md4.JK(mol, backend=backend)
    check(jk.get_jk(real + 1j * imaginary, with_k=False)[0].real, jk.get_jk(real)[0])


def test_statistics(backend):
    """The survivors of J alone are the fewer; none is left out and counted."""
    mol = molecule(WATER, "6-31g")
    jk, dm = md4.JK(mol, backend=backend), random_densities(mol)
    jk.get_jk(dm)
    both = jk.stats
    jk.get_jk(dm, with_k=False)
    assert jk.stats.wanted <= both.wanted
    assert jk.stats.wanted + jk.stats.skipped == both.wanted + both.skipped
    assert jk.stats.computed >= jk.stats.wanted > 0


def test_screening_is_safe(backend):
    """The error of an element stays below the tolerance times the quartets that it takes a part of."""
    dm, tolerance = random_densities(CHAIN), 1e-7
    loose, exact = md4.JK(CHAIN, backend=backend, direct_scf_tol=tolerance), md4.JK(CHAIN, backend=backend)
    ours, reference = (jk.get_jk(dm, with_k=False)[0] for jk in (loose, exact))
    assert 0 < abs(ours - reference).max() <= tolerance * CHAIN.nbas**2
    assert loose.stats.wanted < exact.stats.wanted


def test_little_memory(backend):
    """H matrices that do not fit are made anew, r comes in small chunks; the result is the same."""
    mol = molecule(WATER, "cc-pvdz")
    dm = random_densities(mol)
    jk = md4.JK(mol, backend=backend, max_memory=6)
    check(jk.get_jk(dm, with_k=False)[0], md4.get_jk(mol, dm, with_k=False, backend=backend)[0])
    if backend == "cuda":
        assert jk.engine.backend.context.pool.peak <= 6e6


def test_too_little_memory_is_refused(backend):
    mol = molecule(WATER, "cc-pvdz")
    with pytest.raises(MemoryLimitError, match="raise max_memory"):
        md4.get_jk(mol, random_densities(mol, count=20), with_k=False, backend=backend, max_memory=0.5)


# parts ----------------------------------------------------------------------------------------------------------------


class Numbers:
    """Stands in for an IR builder: makes numbers, not code."""

    def __getattr__(self, name):
        operation = {"add": "add", "mul": "mul", "and_": "and_", "shl": "lshift", "lshr": "rshift"}[name]
        return lambda *args: getattr(operator, operation)(*(getattr(x, "constant", x) for x in args))


@pytest.mark.parametrize("l_ket", range(7))
def test_walk(l_ket):
    """The addresses of r[p+q], from one group of a degree and an s of q to the next."""
    for word in packed_hermite(6).tolist():
        walk, found = Walk(Numbers(), 0, word), []
        for degree in range(l_ket + 1):
            for s in range(degree + 1):
                found += [walk.row + 8 * hermite_ordinal(degree - s, s - z, z) for z in range(s + 1)]
                walk.next_s()
            walk.next_degree()
        assert found == [8 * sum_ordinal(word, q) for q in packed_hermite(l_ket).tolist()]


@pytest.mark.parametrize("count", [1, 4, 10, 20, 35, 56, 84, 120, 165, 455])
def test_functions_of_a_warp(count):
    """Ranges and lanes cover all functions."""
    assert [n for r in even_ranges(count, 32) for n in r] == list(range(count))
    assert all(len(r) <= 32 and r[0] % 2 == 0 for r in even_ranges(count, 32))
    for parts in ([count], [count, count - 1], [count, count // 2]):
        functions, warps = functions_of_a_lane(parts)
        assert functions <= HERMITE_COULOMB.lane_functions
        for part, some in zip(parts, warps, strict=True):
            assert 32 * functions * some >= part > 32 * functions * (some - 1)


@pytest.mark.parametrize("count", [1, 31, 1000, 10**6])
def test_work_of_a_block(count):
    assert 1 <= kets_of_a_warp(count, 7) <= count
    for filled in (0.0, 1e-3, 1.0):
        assert 1 <= bras_of_a_block(count, 7, filled) <= count


def test_blocks_can_be_counted():
    """A launch over lists of tens of millions of primitive pairs has fewer than 2^31 blocks."""
    nbra, blocks = 50_000_000, 400_000
    assert -(-nbra // bras_of_a_block(nbra, blocks, 1.0)) * blocks < 1 << 31


@pytest.mark.parametrize("mirrored", [False, True])
def test_degrees_of_a_thread(mirrored):
    """All functions of a ket have a part, and r of a warp fits shared memory."""
    for l_bra in range(17):
        for l_ket in (l for l in range(l_bra + 1) if by_threads(l_bra, l, mirrored)):
            parts = ket_parts(l_ket, mirrored)
            assert [q for part in parts for q in part] == np.flatnonzero(row_ordinals(l_ket, mirrored) >= 0).tolist()
            assert all(len(part) <= HERMITE_COULOMB.ket_functions for part in parts)
            for single in (False, True):
                warps = threads_of_a_block(l_bra + l_ket, single, mirrored) // 32
                assert warps * (stage_bytes(l_bra + l_ket, single, mirrored) + 1152) <= 163 << 10


@pytest.mark.parametrize("axis", [None, 0, 1, 2])
def test_rows(axis):
    """Each function has a place of its own; in a plane, those of one parity are together, whatever the axis."""
    for l in range(7):
        places, words = row_places(l, axis), row_words(l, axis is not None)
        assert len(places) % 8 == len(words) % 8 == 0
        assert len(words) == row_width(l, axis is not None)
        triples = hermite_triples(l).copy()
        assert (places[len(triples) :] == -1).all()
        if axis is not None:
            triples[:, [0, axis]] = triples[:, [axis, 0]]
        right = packed_hermite(l)[[hermite_ordinal(*triple) for triple in triples.tolist()]]
        assert words[places[: len(triples)]].tolist() == right.tolist()
        parts = row_parts(l, axis is not None)
        assert sorted(places[: len(triples)].tolist()) == [place for part in parts for place in part]
        for parity, part in enumerate(parts if axis is not None else ()):
            mine = [triple for triple, place in zip(triples, places) if place in part]
            assert all(triple[0] % 2 == parity for triple in mine)


def orders():
    """Pairs of orders of some lengths."""
    rng, found = np.random.default_rng(0), []
    for l, (npair, most) in enumerate(((1, 1), (1, 0), (40, 1), (3000, 20), (200000, 1))):
        bounds, own = 10.0 ** rng.uniform(-14, 2, npair), 10.0 ** rng.uniform(-6, 1, npair)
        counts = rng.integers(0, most, npair, endpoint=True)
        found.append((PairOrder(l, counts, bounds, bounds * own), counts, bounds, bounds * own))
    return found


def test_order_of_pairs():
    """All primitive pairs have places of their own; groups of falling R, each of falling R f |D| to a factor of 2."""
    for order, counts, bounds, products in orders():
        by_place = np.argsort(order.first, kind="stable")
        by_place = by_place[counts[by_place] > 0]
        assert order.first[by_place].tolist() == [0, *np.cumsum(counts[by_place])[:-1].tolist()][: len(by_place)]
        assert order.nprim == counts.sum() == order.edges[-1]
        last = np.inf
        for group, (first, end) in enumerate(pairwise(order.edges.tolist())):
            mine = by_place[(order.first[by_place] >= first) & (order.first[by_place] < end)]
            if len(mine) == 0:
                continue
            assert order.bounds[group] >= bounds[mine].max()
            assert order.products[group] >= products[mine].max()
            assert bounds[mine].max() <= 2 * last
            last = bounds[mine].min()
            falling = products[mine]
            assert (falling[1:] <= 2 * falling[:-1]).all()


def test_what_counts_together():
    """No quartet that survives is left out, by the ranges of places, by parts of them, or by pieces of parts."""
    every = orders()
    for (bra, n_p, r_p, d_p), (ket, n_q, r_q, d_q) in product(every[:4], repeat=2):
        for least in (0.0, 1e-20, 1e-10, 1e-3, 1e10):
            found = overlap(bra, ket, least)
            survive = (r_p[:, None] * d_q >= least) | (d_p[:, None] * r_q >= least)
            survive &= (n_p[:, None] > 0) & (n_q > 0)
            assert survive.any() or least > 0 or bra.nprim * ket.nprim == 0
            assert ((bra.first + n_p)[survive.any(axis=1)] <= found.used).all()
            assert ((ket.first + n_q)[survive.any(axis=0)] <= found.width).all()
            assert survive.any() <= (found.filled > 0)
            assert found.filled <= 1
            for parts in (1, 3):
                ends = [part_of_order(bra, found, n, parts) for n in range(parts)]
                assert (ends[0][0], ends[-1][1]) == (0, found.used)
                assert all(one[1] == other[0] for one, other in pairwise(ends))
                pieces = [piece for each in ends for piece in rows_together(bra, found, *each, 10000)]
                width_of = np.zeros(bra.nprim + 1)
                for first, end, width in pieces:
                    assert (width_of[first:end] == 0).all()
                    width_of[first:end] = width
                farthest = np.where(survive, ket.first + n_q, 0).max(axis=1)
                for n in np.flatnonzero(survive.any(axis=1)).tolist():
                    assert (width_of[bra.first[n] : bra.first[n] + n_p[n]] >= farthest[n]).all()


def test_powers_of_any_numbers():
    """Zero, subnormal and infinite numbers have the least and the largest."""
    found = powers_of_2(np.array([0.0, 5e-324, 1e-300, 1.0, 2.0, 1e300, np.inf]))
    assert found.tolist() == [0, 0, 0, 512, 513, 1023, 1023]


def test_signs():
    from md4.method.hermite_coulomb import signs

    assert signs(3).tolist() == [(-1.0) ** t.sum() for t in hermite_triples(3)]


# GPU ------------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("basis", ["cc-pvqz", "cc-pv5z"])
def test_large_bases(gpu, basis):
    mol = molecule(WATER, basis, cart=basis == "cc-pvqz")
    dm = random_densities(mol, 0)
    check(*(md4.get_jk(mol, dm, 0, with_k=False, backend=b)[0] for b in ("cuda", "cpu")))


@pytest.mark.gpu
def test_benzene(gpu):
    check_both(molecule(BENZENE, "cc-pvtz"), "cuda")
