"""Steps 1 and 2 of gradients of the smallest classes, a lane a primitive quartet, on the emulated GPU."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from emulator import host_array, running
from gpu.kernels.test_limits import sent
from gpu.kernels.test_plain_python import basis_of
from nuclear_forces import symmetric

import md4
from md4.gpu import reverse_ways
from md4.gpu.buffers import Buffer
from md4.gpu.kernels import reverse_lanes
from md4.gpu.kernels.density_blocks import launch_density_blocks
from md4.gpu.kernels.gamma_blocks import gamma_numbers, gamma_size, launch_gamma
from md4.gpu.kernels.reverse_lanes import columns_of, lane_plan
from md4.gpu.reverse_ways import hermite_facts
from md4.gpu.tuning import REVERSE
from md4.shells.shell_pairs import list_facts


@pytest.fixture
def tuned(monkeypatch):
    """Changes `REVERSE` for this kernel; a warp takes all kets."""
    monkeypatch.setattr(reverse_ways, "REVERSE", replace(REVERSE, most_parts=1))

    def change(**options):
        monkeypatch.setattr(reverse_lanes, "REVERSE", replace(REVERSE, **options))

    lane_plan.cache_clear()
    yield change
    lane_plan.cache_clear()


@pytest.mark.sample("*-1")
@pytest.mark.races
@pytest.mark.parametrize("nprim", [1, 2])
@pytest.mark.parametrize("doubles", [40, 14])
def test_warps_that_share_the_functions(doubles, nprim, tuned):
    """Each has all of them, or some, the last one fewer; the last 32 quartets of a bra pair are not all there."""
    tuned(lane_doubles=doubles, lane_l=5)
    basis = basis_of((0, 1), nprim)
    dm = symmetric(basis.nao)
    right = md4.JK(basis, backend="cpu").gradient(dm, tolerance=0)
    with running() as machine:
        found = md4.JK(basis, backend="cuda").gradient(dm, tolerance=0)
    np.testing.assert_allclose(found, right, rtol=0, atol=1e-13 * abs(right).max())
    assert machine.kernels >= {"reverse_lanes"}
    assert ("reverse_fused" in machine.kernels) == (doubles == 14)  # (pp| has too many


@pytest.mark.thorough
@pytest.mark.races
@pytest.mark.parametrize("doubles", [40, 24])
def test_contracted_functions(doubles, tuned):
    """Of kets whose shells have unlike numbers of them, in one warp or in several."""
    tuned(lane_doubles=doubles)
    rng, exponents = np.random.default_rng(doubles), np.array([0.5, 1.1])
    coefficients = [rng.uniform(0.2, 1.0, (2, nctr)) for nctr in (3, 2)]
    basis = md4.Basis.from_arrays([0, 1], [exponents] * 2, coefficients, rng.normal(size=(2, 3)), True)
    dm = symmetric(basis.nao)
    right = md4.JK(basis, backend="cpu").gradient(dm, tolerance=0)
    with running() as machine:
        found = md4.JK(basis, backend="cuda").gradient(dm, tolerance=0)
    np.testing.assert_allclose(found, right, rtol=0, atol=1e-13 * abs(right).max())
    assert "reverse_lanes" in machine.kernels


@pytest.mark.thorough
@pytest.mark.races
def test_many_kets(tuned):
    """More than a warp takes at a time."""
    tuned()
    basis = basis_of((0,) * 8)
    dm = symmetric(basis.nao)
    right = md4.JK(basis, backend="cpu").gradient(dm, tolerance=0)
    with running() as machine:
        jk = md4.JK(basis, backend="cuda")
        np.testing.assert_allclose(jk.gradient(dm, tolerance=0), right, rtol=0, atol=1e-13 * abs(right).max())
        assert jk.stats.computed == 36**2
    assert machine.kernels >= {"reverse_lanes"}


@pytest.mark.races
@pytest.mark.parametrize("count", [31, 32, 33])
def test_gamma_side_by_side(count):
    """Of two densities, beside NumPy, in tiles of 32 quartets, and zeros behind the last one."""
    rng, nao, bra, ket = np.random.default_rng(count), 8, facts(1, 0), facts(1, 1)
    first, functions = np.repeat([0, 3, 6, 7], [3, 3, 1, 1]), np.repeat([3, 3, 1, 1], [3, 3, 1, 1])
    aos = np.array([[0, 6], [3, 7], [3, 6]]), np.array([[0, 3], [3, 3]])
    numbers = [rng.integers(len(these), size=count).astype(np.int32) for these in aos]
    d, j, k = rng.normal(size=(2, nao, nao)), np.array([1.0, 0.5]), np.array([-2.0, 3.0])
    d += d.transpose(0, 2, 1)
    right = np.empty((count, bra.nab, ket.nab))
    for n, (ab, cd) in enumerate(zip(*numbers)):
        (a, b), (c, e) = aos[0][ab], aos[1][cd]
        of = [np.arange(first, first + size) for first, size in zip((a, b, c, e), (3, 1, 3, 3))]
        value = sum(
            j[s] * np.einsum("ab,cd->abcd", *(d[s][np.ix_(of[x], of[y])] for x, y in ((0, 1), (2, 3))))
            - k[s] / 2 * np.einsum("ac,bd->abcd", *(d[s][np.ix_(of[x], of[y])] for x, y in ((0, 2), (1, 3))))
            - k[s] / 2 * np.einsum("ad,bc->abcd", *(d[s][np.ix_(of[x], of[y])] for x, y in ((0, 3), (1, 2))))
            for s in range(2)
        )  # fmt: skip
        right[n] = (1 + (a != b)) * (1 + (c != e)) * value.reshape(bra.nab, ket.nab)
    size = gamma_size(bra, ket, True)
    with running():
        context = md4.Engine(basis_of((0,)), backend="cuda").backend.context
        places = context.pool.upload(aos, context.stream)[1]
        quartets = [context.pool.get(count) for _ in numbers]
        for room, these in zip(quartets, numbers):
            context.copy_in(room.pointer, these)
        quartets = tuple(Buffer(room.pointer, (count,), 4, room) for room in quartets)
        out = context.pool.get(gamma_numbers(count, [size], True)[-1])
        sides = (SimpleNamespace(facts=this, first=0) for this in (bra, ket))
        d, first, functions, j, k = (sent(context, x) for x in (d, first, functions, j, k))
        blocks, nothing = context.pool.get(d.size), Buffer(d.pointer, (0,), 4, d)
        launch_density_blocks(context, d, first, functions, blocks, nothing)
        launch_gamma(context, True, quartets, places, *sides, (blocks, j, k, nao), out)
        found = host_array(out, "float64")[: gamma_numbers(count, [size], True)[-1]].reshape(-1, size, 32)
        found = found.transpose(0, 2, 1).reshape(-1, ket.nab, bra.nab).swapaxes(1, 2).copy()
    np.testing.assert_allclose(found[:count], right, rtol=0, atol=1e-14 * abs(right).max())
    assert not found[count].any()


def facts(la, lb):
    return list_facts(la, lb, True, 1, 1, 2 * la + 1, 2 * lb + 1, 1, False)


@pytest.mark.parametrize("ket", [(0, 0), (1, 0), (1, 1), (2, 1), (2, 2), (6, 6)])
@pytest.mark.parametrize("bra", [(0, 0), (1, 0), (1, 1), (2, 1), (2, 2), (6, 6)])
def test_plans(bra, ket):
    """All functions have a warp, none has too much, and large classes have no plan."""
    ab, hermite = facts(*bra), hermite_facts(sum(bra) + 1)
    plan = lane_plan(ab, facts(*ket), hermite)
    assert (plan is None) <= (sum(bra) + sum(ket) > 2)
    assert (plan is not None) <= (sum(bra) + sum(ket) < 10)
    if plan is not None:
        assert (plan.warps - 1) * plan.chunk < len(columns_of(hermite.l, 0)) <= plan.warps * plan.chunk
        assert plan.chunk * ab.nab <= REVERSE.lane_doubles
        assert plan.warps <= REVERSE.lane_warps
