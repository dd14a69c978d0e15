"""Steps 1 and 2 of gradients in one kernel, for ket pairs that are selected one by one, on the emulated GPU."""

from dataclasses import replace

import numpy as np
import pytest
from emulator import host_array, running
from gpu.kernels.test_limits import sent
from gpu.kernels.test_plain_python import basis_of
from nuclear_forces import symmetric

import md4
from md4.gpu import forces
from md4.gpu.buffers import Buffer
from md4.gpu.kernels import reverse_fused, select_kets
from md4.gpu.kernels.select_kets import THREADS, launch_select
from md4.gpu.tuning import REVERSE


@pytest.fixture
def tuned(monkeypatch):
    """Changes `REVERSE` for this kernel, which is taken for the smallest classes, too; a block takes all kets."""
    monkeypatch.setattr(forces, "lane_plan", lambda *_: None)
    monkeypatch.setattr(forces, "REVERSE", replace(REVERSE, most_parts=1))

    def change(**options):
        monkeypatch.setattr(reverse_fused, "REVERSE", replace(REVERSE, **options))

    reverse_fused.fused_reverse.cache_clear()
    yield change
    reverse_fused.fused_reverse.cache_clear()


@pytest.mark.sample("1-4-steps0")
@pytest.mark.races
@pytest.mark.parametrize("steps", REVERSE.steps)
@pytest.mark.parametrize("few", [0, 4])
@pytest.mark.parametrize("nprim", [1, 2])
def test_steps(nprim, few, steps, tuned):
    """Several primitive quartets in a step, of one or of several ket pairs, and two or four blocks of columns."""
    tuned(steps=(steps,), few_fused=few, most_words=few and 28, registers=(9999, 9999), least_warps=1)
    check(basis_of((0, 0, 1) if nprim == 1 else (0, 1), nprim))


@pytest.mark.thorough
@pytest.mark.races
@pytest.mark.parametrize("steps", [REVERSE.steps[0], REVERSE.steps[-1]])
def test_several_warps(steps, tuned):
    """They share the p of f functions, and H, r and Gamma in shared memory."""
    tuned(steps=(steps, REVERSE.steps[-1]), registers=(9999, 9999), least_warps=1)
    check(basis_of((0, 0, 3)))


def check(basis):
    """A gradient of which nothing is left out, beside the CPU's."""
    dm = symmetric(basis.nao)
    right = md4.JK(basis, backend="cpu").gradient(dm, tolerance=0)
    with running() as machine:
        found = md4.JK(basis, backend="cuda").gradient(dm, tolerance=0)
    np.testing.assert_allclose(found, right, rtol=0, atol=1e-13 * abs(right).max())
    assert machine.kernels >= {"reverse_fused", "select_kets"}
    assert "reverse_sums" not in machine.kernels


@pytest.mark.races
@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize("nket", [1, 31, THREADS, 2 * THREADS + 5])
def test_selected_kets(nket, near, monkeypatch):
    """Numbers, bounds and lists of quartets of a slice of a bra list, beside NumPy; pairs without primitives, too.

    Norms of densities are in shared memory, or where there are many, not.
    """
    monkeypatch.setattr(select_kets, "ROW_BYTES", 160 if near else 159)
    rng, nshell, first, nbra = np.random.default_rng(nket), 5, 2, 3
    shells = [rng.integers(nshell, size=(count, 2)) for count in (first + nbra, nket)]
    start = [np.append(0, np.cumsum(rng.integers(0, 4, len(these)))) for these in shells]
    start[0][first + 1 :] += 1  # the first bra pair that takes part has one at least
    bounds, norms = [rng.uniform(0, 1, len(these)) for these in shells], rng.uniform(0, 1, (2, nshell, nshell))
    j, k, tolerance = np.array([1.0, 0.0]), np.array([-0.5, 2.0]), 0.4
    (a, b), (c, d) = shells[0][first:].T[:, :, None], shells[1].T
    of_d = sum(abs(j[s]) * n[a, b] * n[c, d] + abs(k[s]) / 2 * (n[a, c] * n[b, d] + n[a, d] * n[b, c])
               for s, n in enumerate(norms))  # fmt: skip
    size, prims = bounds[0][first:, None] * bounds[1] * of_d, np.diff(start[1])
    counts = (size >= tolerance) & (prims > 0)
    with running():
        context = md4.Engine(basis_of((0,)), backend="cuda").backend.context
        of_pairs = [norms[:, these[:, 0], these[:, 1]] for these in shells]
        arrays = [context.pool.upload(side, context.stream)[1] for side in zip(shells, start, bounds, of_pairs)]
        arrays = [(*these, of.part(0, (of.size,))) for *these, of in arrays]
        given = *(sent(context, array) for array in (norms, j, k)), nshell, tolerance
        room, left = context.pool.get(2 * nbra), context.pool.get(2 * (first + nbra))
        context.clear(left)
        numbers = Buffer(room.pointer, (3 * nbra,), 4, room)
        pass_of = context, nbra, arrays[0], first, arrays[1], nket, given, (numbers, left)
        launch_select(*pass_of)
        found, sums = host_array(numbers, "int32").reshape(-1, 3).copy(), host_array(left, "float64")
        own = np.diff(start[0])[first:]
        places = np.cumsum(np.stack([found[:, 0], own * found[:, 1]], axis=1), axis=0, dtype=np.int64)
        places = np.concatenate([np.zeros((1, 2), dtype=np.int64), places])
        sizes = np.repeat(places[-1], [2, 3]).tolist()
        # as of a chunk behind others of its list
        places = np.append(places + np.array([7, 30]), np.append(found[:, 2], 0)[:, None], axis=1)
        table = [Buffer((this := context.pool.get(size + 1)).pointer, (size,), 4, this) for size in sizes]
        launch_select(*pass_of, (context.pool.upload([places], context.stream)[1][0], *table))
        shells_of, listed = (np.stack([host_array(b, "int32") for b in part], 1) for part in (table[:2], table[2:]))
        sums = sums[: 2 * (first + nbra)].reshape(-1, 2).copy()
    last = [max(np.flatnonzero(row), default=-1) + 1 for row in counts]
    np.testing.assert_array_equal(found, np.stack([counts.sum(axis=1), counts @ prims, last], axis=1))
    np.testing.assert_allclose(sums[first:], np.stack([(size * ~counts).sum(1), (size**2 * ~counts).sum(1)], 1), 1e-12)
    assert not sums[:first].any()
    of_shells = [(first + n, cd) for n, cd in np.argwhere(counts)]
    of_prims = [
        (i, q, of_shells.index((first + n, cd))) for n in range(nbra) for i in range(*start[0][first + n :][:2])
        for cd in np.flatnonzero(counts[n]) for q in range(*start[1][cd : cd + 2])
    ]  # fmt: skip
    np.testing.assert_array_equal(shells_of, np.reshape(of_shells, (-1, 2)))
    np.testing.assert_array_equal(listed, np.reshape(of_prims, (-1, 3)))
    assert nket < 100 or 0 < counts.sum() < counts.size
