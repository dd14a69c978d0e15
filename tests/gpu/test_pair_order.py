"""The order of primitive pairs in J alone, and which of them meet."""

from itertools import pairwise, product

import numpy as np

from md4.gpu.pair_order import PairOrder, overlap, part_of_order, powers_of_2, rows_together


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
