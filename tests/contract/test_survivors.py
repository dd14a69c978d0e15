"""Norms of densities, survivors and the rectangles that cover them, against plain loops."""

from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from densities import CHAIN, random_densities
from hypothesis import given
from hypothesis import strategies as st
from molecules import WATER, molecule

import md4
from md4 import Basis, Engine
from md4.contract.screening import pair_bounds, sorted_lists
from md4.contract.survivors import ListPairs, tiles
from md4.contract.work import Task
from md4.cpu.sums import HostSums
from md4.plan import part_of
from md4.shells.shell_pairs import pairs_by_kind

lengths = st.lists(st.integers(0, 3000), min_size=1, max_size=400)


def area_of(rectangles):
    """Number of quartets of all rectangles."""
    return sum((b.stop - b.start) * (k.stop - k.start) for b, k in rectangles)


@given(n=lengths, most=st.integers(1, 10**6), price=st.sampled_from([0, 20000, 10**7]))
def test_tiles_cover_survivors_once(n, most, price):
    n = np.array(n, dtype=np.int32)
    covered = np.zeros((len(n), max(1, n.max())), dtype=int)
    for bra, ket in tiles(n, most, price):
        covered[bra, ket] += 1
        assert (bra.stop - bra.start) * (ket.stop - ket.start) <= most
    assert covered.max() <= 1
    assert all(row[:k].all() for row, k in zip(covered, n))


def test_tiles_waste_little_unless_they_are_dear():
    n = np.arange(1, 2001, dtype=np.int32)  # a triangle
    assert area_of(tiles(n, 10**9, 20000)) < 1.12 * n.sum()
    assert area_of(tiles(n, 10**9, 0)) < 1.03 * n.sum()
    assert tiles(n, 10**9, 10**7) == [(slice(0, 2000), slice(0, 2000))]
    assert tiles(0 * n, 10**9, 20000) == []


@given(n=st.lists(st.integers(0, 9), min_size=1, max_size=8), price=st.integers(0, 30))
def test_tiles_are_the_cheapest(n, price):
    """Of all ways to cut the rows."""

    @cache
    def cheapest(first):
        ends = range(first + 1, len(n) + 1)
        costs = ((end - first) * max(n[first:end]) + price * any(n[first:end]) + cheapest(end) for end in ends)
        return min(costs, default=0)

    found = tiles(np.array(n, dtype=np.int32), 10**9, price)
    assert area_of(found) + price * len(found) == cheapest(0)


@cache
def list_pairs_of(mol):
    """`ListPairs` of a molecule, on the CPU."""
    basis = Basis.from_mol(mol)
    engine, every = Engine(basis, backend="cpu"), pairs_by_kind(basis, 0)
    lists = sorted_lists(engine, every, pair_bounds(engine, every, 1e-13), 1e-13, 1 << 30)
    return ListPairs(lists, basis, lambda bra, ket: ket.nab < bra.nab)


def block_norms(basis, densities):
    """The largest |D_ab| or |D_ba| of some densities."""
    ranges = [slice(*r) for r in pairwise(basis.ao_loc)]
    norms = np.array([[max(np.linalg.norm(d[a, b]) for d in densities) for b in ranges] for a in ranges])
    return np.maximum(norms, norms.T)


def test_density_norms():
    pairs = list_pairs_of(molecule(WATER, "cc-pvdz"))
    dm = np.random.default_rng(0).normal(size=(2, pairs.basis.nao, pairs.basis.nao))
    norms, norm = pairs.norms(dm, True, True), block_norms(pairs.basis, dm)
    for k in range(pairs.kind.max() + 1):
        assert np.allclose(norms.exchange[k], norm[:, pairs.kind == k].max(axis=1))
    width, first = np.diff(pairs.basis.ao_loc), 0
    for this in pairs.lists:
        own = np.array([2 * min(width[a], width[b]) ** 0.5 * norm[a, b] for a, b in this.pairs.pairs])
        assert np.allclose(norms.own[first : first + len(this)], own)
        beyond = [(this.bound * own)[i:].max() for i in range(len(this))]
        assert np.allclose(norms.beyond[first : first + len(this)], beyond)
        first += len(this)
    assert not pairs.norms(dm, True, False).exchange.any()
    without_j = pairs.norms(dm, False, True)
    assert not without_j.own.any()
    assert not without_j.beyond.any()


@pytest.mark.parametrize("size", [1e-160, 1e-200, 1e-300])
def test_norms_of_densities_whose_squares_vanish(size):
    """They are not less than the norms; those of other shells stay what they are."""
    pairs = list_pairs_of(molecule(WATER, "cc-pvdz"))
    dm = np.random.default_rng(0).normal(size=(1, pairs.basis.nao, pairs.basis.nao))
    norm = block_norms(pairs.basis, dm)
    dm[:, pairs.basis.ao_loc[3] :, : pairs.basis.ao_loc[3]] *= size
    dm[:, : pairs.basis.ao_loc[3], pairs.basis.ao_loc[3] :] *= size
    norms, first = pairs.norms(dm, True, True), 0
    for this in pairs.lists:
        own = norms.own[first : first + len(this)]
        for (a, b), found in zip(this.pairs.pairs, own):
            if (a < 3) != (b < 3):
                assert found >= 2 * norm[a, b] * size
                assert found <= 2 * pairs.basis.nao * norm[a, b] * size
        first += len(this)
    assert norms.exchange.max() == pytest.approx(max(norm[:3, :3].max(), norm[3:, 3:].max()))


@pytest.mark.parametrize("tolerance", [1e-13, 1e-9, 1e-4, 1.0, 1e3, 0.0])
@pytest.mark.parametrize("flags", [(True, True), (True, False), (False, True)])
def test_survivors(tolerance, flags):
    """Each bra pair has the ket pairs with which bounds and norms multiply to the tolerance, and those before them."""
    pairs = list_pairs_of(CHAIN)
    norms, lists = pairs.norms(random_densities(CHAIN), *flags), pairs.lists
    found = pairs.survivors(norms, tolerance, True)
    firsts = np.cumsum([0, *map(len, lists)])
    for n, (bra, ket) in enumerate(pairs.numbers):
        pair = found.bounded(found.list_pair(lists, Task(n, 0, 1, 0.0)))
        (c, d), counts, products = lists[ket].kinds, found.counts(n), pair.bra_bound
        assert pair.ket_bound is lists[ket].bound
        own, theirs = (norms.own[firsts[side] : firsts[side + 1]] for side in (bra, ket))
        for i, ((a, b), bound) in enumerate(zip(lists[bra].pairs.pairs, lists[bra].bound)):
            largest = max(*norms.exchange[[c, c, d, d], [a, b, a, b]], own[i])
            quartets = bound * lists[ket].bound * np.maximum(largest, theirs)
            certain, possible = (
                np.flatnonzero(quartets >= factor * tolerance).max(initial=-1) + 1 for factor in (1 + 1e-12, 1 - 1e-12)
            )
            most = i + 1 if bra == ket else len(lists[ket])
            assert min(certain, most) <= counts[i] <= min(possible, most)
            if tolerance:
                by_products = np.sum(products[i] * pair.ket_bound >= tolerance)
                last = lists[ket].bound[possible - 1] if possible else np.inf  # others may have the same bound
                assert certain <= by_products <= np.sum(lists[ket].bound >= (1 - 1e-12) * last)
        assert found.quartets[n] == counts.sum()
        assert pair.same == (bra == ket)
        whole = found.tiles(n, 0, len(counts), 10**9, 1e12)
        assert whole == ([(slice(0, np.flatnonzero(counts)[-1] + 1), slice(0, counts.max()))] if counts.any() else [])
    assert found.total == sum(found.quartets)


@pytest.mark.parametrize("with_k", [True, False])
def test_bounds_that_rise_within_a_list(with_k, monkeypatch):
    """As on GPUs, where many pairs share an upper bound and are in the order of their shells."""
    monkeypatch.setattr(HostSums, "bound_step", lambda self, functions: 2)
    tolerance, exponents = 1e-3, [[1000.0], [1.0], [183.0]]
    basis = Basis.from_arrays([0, 0, 0], exponents, [[1.0]] * 3, np.zeros((3, 3)))
    engine, one = Engine(basis, backend="cpu"), np.zeros((3, 3))
    own, theirs = (engine.compute([[n, n]], [[n, n]]).item() ** 0.5 for n in (0, 2))
    one[0, 0] = 3.5 * tolerance / (2 * own * theirs)
    whole, _ = md4.get_jk(basis, one, backend="cpu", direct_scf_tol=0, with_k=with_k)
    found, _ = md4.get_jk(basis, one, backend="cpu", direct_scf_tol=tolerance, with_k=with_k)
    assert abs(whole - found).max() < tolerance


def test_parts_cover_what_the_whole_does():
    pairs = list_pairs_of(CHAIN)
    found = pairs.survivors(pairs.norms(random_densities(CHAIN), True, True), 1e-6, False)
    for n in range(len(found)):
        counts = found.counts(n)
        covered = np.zeros((len(counts), counts.max(initial=1)), dtype=int)
        for part in range(3):
            first, end = part_of(counts, part, 3)
            for bra, ket in found.tiles(n, first, end, 10**9, 3.0):
                covered[first:end][bra, ket] += 1
        assert covered.max() <= 1
        assert all(row[:k].all() for row, k in zip(covered, counts))
