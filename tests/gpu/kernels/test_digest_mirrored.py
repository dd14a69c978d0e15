"""Digestion of the even and odd parts of blocks of random numbers, on the emulator, beside NumPy."""

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from emulator import host_array, running
from random_blocks import NAO, first_aos, on_device, right

from md4.gpu.context import DeviceContext
from md4.gpu.kernels import digestion
from md4.gpu.kernels.digest_mirrored import fits, tile_parts
from md4.gpu.kernels.digestion import launch_mirrored
from md4.gpu.kernels.groups import NO_LIMITS
from md4.method.angular import ncart
from md4.method.mirror import part_rows
from md4.shells.shell_pairs import list_facts

# (l_a, l_b, nctr_a, nctr_b) of bra and ket, and whether functions are spherical: whole tiles, tiles with fewer
# functions at the end, bras without odd functions b, general contractions.
CLASSES = {
    "(dp|fd)": ((2, 1, 1, 1), (3, 2, 1, 1), True),
    "(ds|dp)": ((2, 0, 1, 1), (2, 1, 1, 1), True),
    "(pp|ss)": ((1, 1, 1, 1), (0, 0, 1, 1), True),
    "(ff|pp)": ((3, 3, 1, 1), (1, 1, 1, 1), True),
    "(gg|ps)": ((4, 4, 1, 1), (1, 0, 1, 1), True),
    "(hd|ps)": ((5, 2, 1, 1), (1, 0, 1, 1), True),
    "(pp|pp) of contractions": ((1, 1, 2, 3), (1, 1, 3, 1), True),
    "(fg|ss) of contractions": ((3, 4, 1, 4), (0, 0, 1, 1), True),
    "(dp|dp), Cartesian": ((2, 1, 1, 1), (2, 1, 1, 1), False),
}


def facts_of(la, lb, nctr_a, nctr_b, pure):
    """`ListFacts` of a list of such shells, without contraction."""
    na, nb = (nctr * (2 * l + 1 if pure else ncart(l)) for l, nctr in ((la, nctr_a), (lb, nctr_b)))
    return list_facts(la, lb, pure, nctr_a, nctr_b, na, nb, 1, False)


def random_block(rng, facts, axis, counts):
    """Integrals of random pairs, zeros where the parities of ab and cd differ, and their even and odd parts."""
    integrals = rng.normal(size=(*counts, *(f.nab for f in facts)))
    classes = [(f.la, f.lb, f.pure, f.nctr_a, f.nctr_b, axis) for f in facts]
    rows = [[part_rows(*this, parity) for this in classes] for parity in range(2)]
    for parity in range(2):
        integrals[:, :, rows[parity][0][:, None], rows[1 - parity][1]] = 0.0
    parts = [np.ascontiguousarray(integrals[:, :, ab[:, None], cd]) for ab, cd in rows]
    return integrals.reshape(*counts, *(n for f in facts for n in (f.na, f.nb))), parts


def digested(parts, facts, axis, aos, d, twice, triangle, limits=None):
    """X and Y by the kernel; `limits`, (counts, by_ket), are those of `md4.gpu.kernels.groups.Limits`."""
    with running("dmma16") as machine:
        context = DeviceContext()
        context.fixed = lambda make, *args: make(context, *args)
        context.table = lambda make, *args: on_device(context, make(*args))
        matrices = [on_device(context, m.reshape(-1)) for m in (d, np.zeros_like(d), twice, np.zeros_like(twice))]
        limits = NO_LIMITS if limits is None else (on_device(context, limits[0]), limits[1])
        blocks = [SimpleNamespace(array=on_device(context, part.reshape(-1)), limits=limits) for part in parts]
        pairs = [SimpleNamespace(npair=len(ao), first=0, facts=fact) for ao, fact in zip(aos, facts)]
        places = tuple(on_device(context, ao) for ao in aos)
        launch_mirrored(context, blocks, axis, *pairs, places, triangle, tuple(matrices), (len(d), len(twice)), NAO)
        assert machine.kernels == {"digest_mirrored"}
        return [host_array(matrices[n], "float64").reshape(-1, NAO, NAO).copy() for n in (1, 3)]


def random_matrices(rng, counts):
    """D and D + D^T, which need not have to do with each other; no symmetry."""
    return [rng.normal(size=(count, NAO, NAO)) for count in counts]


def assert_same(found, expected):
    for one, right_one in zip(found, expected):
        np.testing.assert_allclose(one, right_one, rtol=0, atol=1e-13 * abs(right_one).max(initial=0.0))


@pytest.mark.sample("(ds|dp)-?", "*-1")
@pytest.mark.parametrize("axis", range(3))
@pytest.mark.parametrize("name", CLASSES)
def test_classes(name, axis):
    rng, (bra, ket, pure) = np.random.default_rng(0), CLASSES[name]
    facts = facts_of(*bra, pure), facts_of(*ket, pure)
    integrals, parts = random_block(rng, facts, axis, (2, 3))
    aos = [first_aos(rng, (f.na, f.nb), count) for f, count in zip(facts, (2, 3))]
    d, twice = random_matrices(rng, (1, 1))
    found = digested(parts, facts, axis, aos, d, twice, False)
    assert_same(found, right(integrals, aos, d, twice, False))


@pytest.mark.races
@pytest.mark.parametrize("counts", [(2, 1), (0, 1), (1, 0)], ids=str)
def test_several_matrices(counts):
    """Those that need both X and Y, then those that need one of them."""
    rng, (bra, ket, pure) = np.random.default_rng(1), CLASSES["(dp|fd)"]
    facts = facts_of(*bra, pure), facts_of(*ket, pure)
    integrals, parts = random_block(rng, facts, 0, (2, 2))
    aos = [first_aos(rng, (f.na, f.nb), 2) for f in facts]
    d, twice = random_matrices(rng, counts)
    found = digested(parts, facts, 0, aos, d, twice, False)
    assert_same(found, right(integrals, aos, d, twice, False))


@pytest.mark.sample("(dp|dp), Cartesian")
@pytest.mark.parametrize("name", ["(ff|pp)", "(dp|dp), Cartesian"])
def test_one_list(name):
    """Ket pairs beyond the bra pair do not count, and are not looked at: a warp has some of them, or nothing else."""
    rng, (bra, _, pure), count = np.random.default_rng(2), CLASSES[name], 6
    facts = [facts_of(*bra, pure)] * 2
    integrals, parts = random_block(rng, facts, 2, (count, count))
    for part in parts:
        part[np.triu_indices(count, 1)] = np.nan
    aos = [first_aos(rng, (facts[0].na, facts[0].nb), count)] * 2
    d, twice = random_matrices(rng, (1, 1))
    found = digested(parts, facts, 2, aos, d, twice, True)
    assert_same(found, right(integrals, aos, d, twice, True))


@pytest.mark.sample("False")
@pytest.mark.parametrize("by_ket", [False, True])
def test_limits(by_ket):
    """Quartets beyond a pair's limit do not count, and are not looked at."""
    rng, (bra, ket, pure), nbra, nket = np.random.default_rng(3), CLASSES["(pp|pp) of contractions"], 5, 6
    facts = facts_of(*bra, pure), facts_of(*ket, pure)
    counts = np.array([nbra, 0, 2, 1, 4, 2] if by_ket else [nket, 0, 3, 1, 5], dtype=np.int32)
    live = np.arange(nbra)[:, None] < counts if by_ket else np.arange(nket) < counts[:, None]
    integrals, parts = random_block(rng, facts, 1, (nbra, nket))
    integrals[~live] = 0.0
    for part in parts:
        part[~live] = np.nan
    aos = [first_aos(rng, (f.na, f.nb), count) for f, count in zip(facts, (nbra, nket))]
    d, twice = random_matrices(rng, (1, 1))
    found = digested(parts, facts, 1, aos, d, twice, False, (counts, by_ket))
    assert_same(found, right(integrals, aos, d, twice, False))


@pytest.mark.sample("*-(dp|dp), Cartesian")
@pytest.mark.races
@pytest.mark.parametrize("name", ["(dp|fd)", "(pp|pp) of contractions", "(gg|ps)", "(dp|dp), Cartesian"])
@pytest.mark.parametrize("limited", [False, True])
def test_successive_bra_pairs(name, limited, monkeypatch):
    """Of a warp, some with the same shell a: in a row, and once more; with limits some do not count in between."""
    monkeypatch.setattr(digestion, "FEWEST_WARPS", 1)
    monkeypatch.setattr(digestion, "LANE_INTEGRALS", 1 << 20)
    rng, (bra, ket, pure), nbra, nket = np.random.default_rng(4), CLASSES[name], 9, 2
    facts = facts_of(*bra, pure), facts_of(*ket, pure)
    integrals, parts = random_block(rng, facts, 2, (nbra, nket))
    aos = [first_aos(rng, (f.na, f.nb), count) for f, count in zip(facts, (nbra, nket))]
    aos[0][:, 0] = aos[0][[0, 0, 0, 1, 1, 2, 0, 0, 3], 0]
    d, twice = random_matrices(rng, (1, 1))
    limits = np.array([2, 1, 2, 2, 0, 0, 2, 0, 0] if limited else [nket] * nbra, dtype=np.int32)
    live = np.arange(nket) < limits[:, None]
    integrals[~live] = 0.0
    for part in parts:
        part[~live] = np.nan
    found = digested(parts, facts, 2, aos, d, twice, False, (limits, False) if limited else None)
    assert_same(found, right(integrals, aos, d, twice, False))


def test_tiles():
    """The fewest additions to X for what a thread has room for: of (dp|, (gp|, (ff|, (gg| and Cartesian (hh|."""
    functions = [(3, 2, 1), (5, 2, 1), (4, 4, 3), (5, 5, 4), (12, 12, 9)]
    tiles = [tile_parts(*counts) for counts in functions]
    assert tiles == [(3, 2, 1), (5, 2, 1), (4, 4, 3), (5, 3, 2), (4, 4, 3)]
    assert all(fits(*tile) for tile in tiles)


def test_tiles_take_all_functions():
    """The walk over tiles ends with the even functions; that of the odd ones has ended then."""
    for na_even, nb_even in product((1, 4, 10), range(1, 31)):
        for nb_odd in range(nb_even + 1):
            _, even, odd = tile_parts(na_even, nb_even, nb_odd)
            assert odd * -(-nb_even // even) >= nb_odd
