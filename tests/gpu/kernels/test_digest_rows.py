"""Digestion of blocks of random numbers by rows, on the emulator, beside NumPy."""

from types import SimpleNamespace

import numpy as np
import pytest
from emulator import host_array, running
from random_blocks import NAO, first_aos, on_device, right

from md4.gpu.context import DeviceContext
from md4.gpu.kernels import digestion
from md4.gpu.kernels.digest_rows import tile_shape
from md4.gpu.kernels.digestion import launch_digest
from md4.gpu.kernels.groups import NO_LIMITS

# Functions of the four shells: whole tiles, several tiles with fewer functions at the end, more sums than lanes.
SHAPES = [(5, 3, 7, 5), (3, 3, 5, 3), (9, 9, 3, 1), (9, 10, 1, 1), (3, 1, 35, 1), (2, 2, 3, 16)]


def digested(integrals, aos, d, twice, triangle, counts=None, by_ket=False):
    """X and Y; `counts` and `by_ket` are those of `md4.gpu.kernels.groups.Limits`."""
    facts = [SimpleNamespace(na=n, nb=m, nab=n * m) for n, m in (integrals.shape[2:4], integrals.shape[4:])]
    with running("dmma16") as machine:
        context = DeviceContext()
        context.fixed = lambda make, *args: make(context, *args)
        matrices = [on_device(context, m.reshape(-1)) for m in (d, np.zeros_like(d), twice, np.zeros_like(twice))]
        block = SimpleNamespace(array=on_device(context, integrals.reshape(-1)), limits=NO_LIMITS)
        if counts is not None:
            block.limits = on_device(context, counts), by_ket
        pairs = [SimpleNamespace(npair=len(ao), first=0, facts=fact) for ao, fact in zip(aos, facts)]
        places = tuple(on_device(context, ao) for ao in aos)
        launch_digest(context, block, *pairs, places, triangle, tuple(matrices), (len(d), len(twice)), NAO)
        assert machine.kernels == {"digest_rows"}
        return [host_array(matrices[n], "float64").reshape(-1, NAO, NAO).copy() for n in (1, 3)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("counts", [(1, 1), (2, 1), (0, 1)], ids=str)
def test_blocks(shape, counts):
    rng = np.random.default_rng(0)
    integrals = rng.normal(size=(2, 3, *shape))
    aos = [first_aos(rng, functions, count) for functions, count in ((shape[:2], 2), (shape[2:], 3))]
    d, twice = (rng.normal(size=(count, NAO, NAO)) for count in counts)
    for found, expected in zip(digested(integrals, aos, d, twice, False), right(integrals, aos, d, twice, False)):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13 * abs(expected).max(initial=0.0))


@pytest.mark.parametrize("shape", [(5, 3), (7, 2)], ids=str)
def test_one_list(shape):
    """Ket pairs beyond the bra pair do not count, and are not looked at: a warp has some of them, or nothing else."""
    rng, count = np.random.default_rng(1), 6
    integrals = rng.normal(size=(count, count, *shape, *shape))
    integrals[np.triu_indices(count, 1)] = np.nan
    aos = [first_aos(rng, shape, count)] * 2
    d, twice = rng.normal(size=(2, 1, NAO, NAO))
    for found, expected in zip(digested(integrals, aos, d, twice, True), right(integrals, aos, d, twice, True)):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13 * abs(expected).max())


@pytest.mark.parametrize("by_ket", [False, True])
def test_limits(by_ket):
    """Quartets beyond a pair's limit do not count, and are not looked at."""
    rng, nbra, nket, shape = np.random.default_rng(2), 5, 6, (3, 3, 5, 3)
    counts = np.array([nbra, 0, 2, 1, 4, 2] if by_ket else [nket, 0, 3, 1, 5], dtype=np.int32)
    live = np.arange(nbra)[:, None] < counts if by_ket else np.arange(nket) < counts[:, None]
    integrals = rng.normal(size=(nbra, nket, *shape))
    integrals[~live] = 0.0
    aos = [first_aos(rng, functions, count) for functions, count in ((shape[:2], nbra), (shape[2:], nket))]
    d, twice = rng.normal(size=(2, 1, NAO, NAO))
    expected = right(integrals, aos, d, twice, False)
    integrals[~live] = np.nan
    for found, known in zip(digested(integrals, aos, d, twice, False, counts, by_ket), expected):
        np.testing.assert_allclose(found, known, rtol=0, atol=1e-13 * abs(known).max())


@pytest.mark.sample("*-(?, 1)-(5, 3, 7, 3)")
@pytest.mark.races
@pytest.mark.parametrize("shape", [(5, 3, 7, 3), (3, 16, 3, 3), (9, 3, 5, 5)], ids=str)
@pytest.mark.parametrize("counts", [(1, 1), (2, 0), (0, 1)], ids=str)
@pytest.mark.parametrize("limited", [False, True])
def test_successive_bra_pairs(shape, counts, limited, monkeypatch):
    """Of a warp, some with the same shell a: in a row, and once more; with limits some do not count in between."""
    monkeypatch.setattr(digestion, "FEWEST_WARPS", 1)
    monkeypatch.setattr(digestion, "LANE_INTEGRALS", 1 << 20)
    rng, nbra, nket = np.random.default_rng(3), 9, 2
    integrals = rng.normal(size=(nbra, nket, *shape))
    aos = [first_aos(rng, functions, count) for functions, count in ((shape[:2], nbra), (shape[2:], nket))]
    aos[0][:, 0] = aos[0][[0, 0, 0, 1, 1, 2, 0, 0, 3], 0]
    d, twice = (rng.normal(size=(count, NAO, NAO)) for count in counts)
    limits = np.array([2, 1, 2, 2, 0, 0, 2, 0, 0] if limited else [nket] * nbra, dtype=np.int32)
    live = np.arange(nket) < limits[:, None]
    integrals[~live] = 0.0
    expected = right(integrals, aos, d, twice, False)
    integrals[~live] = np.nan
    for found, known in zip(digested(integrals, aos, d, twice, False, limits if limited else None), expected):
        np.testing.assert_allclose(found, known, rtol=0, atol=1e-13 * abs(known).max(initial=0.0))


@pytest.mark.parametrize("shape", [(3, 1, 5, 3), (1, 1, 3, 3), (3, 3, 3, 1), (5, 1, 1, 1), (1, 2, 33, 1)], ids=str)
@pytest.mark.parametrize("counts", [(2, 1), (1, 0)], ids=str)
def test_small_quartets(shape, counts):
    """Down to one function a and b, with runs of ket pairs with the same shell c."""
    rng, lengths = np.random.default_rng(4), [11, 1, 3, 1, 1, 8, 9, 7]
    aos = [first_aos(rng, functions, count) for functions, count in ((shape[:2], 2), (shape[2:], sum(lengths)))]
    aos[1][:, 0] = np.repeat(aos[1][[0, 1, 0, 2, 0, 3, 4, 5], 0], lengths)
    integrals = rng.normal(size=(2, sum(lengths), *shape))
    d, half = (rng.normal(size=(count, NAO, NAO)) for count in counts)
    twice = half + half.swapaxes(1, 2)
    x, y = digested(integrals, aos, d, twice, False)
    known_x, known_y = right(integrals, aos, d, twice, False)
    np.testing.assert_allclose(x, known_x, rtol=0, atol=1e-13 * abs(known_x).max())
    # Y of a pair may stand in either triangle
    y, known_y = (m + m.swapaxes(1, 2) for m in (y, known_y))
    np.testing.assert_allclose(y, known_y, rtol=0, atol=1e-13 * abs(known_y).max(initial=0.0))


def test_tiles():
    """As few and as equal tiles as there can be."""
    assert [tile_shape(n, n) for n in (1, 3, 5, 7, 9, 11, 13)] == [
        (1, 1), (3, 3), (5, 5), (7, 4), (5, 5), (6, 4), (7, 5)
    ]  # fmt: skip
