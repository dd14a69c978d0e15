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
from md4.gpu.kernels.density_blocks import launch_density_blocks
from md4.gpu.kernels.gamma_blocks import gamma_numbers, gamma_size, launch_gamma
from md4.gpu.kernels.reverse_lanes import LanePlan, lane_plan, set_bytes, stride_of
from md4.gpu.reverse_ways import hermite_facts
from md4.gpu.tuning import REVERSE
from md4.method.angular import nherm
from md4.shells.shell_pairs import list_facts

# Bytes of shared memory that a block may have on any device.
LEAST_SHARED = 64 << 10


@pytest.fixture(autouse=True)
def one_part(monkeypatch):
    """A block takes all kets."""
    monkeypatch.setattr(reverse_ways, "REVERSE", replace(REVERSE, most_parts=1))


def compare(basis):
    """The emulated GPU beside the CPU; (what ran, statistics)."""
    dm = symmetric(basis.nao)
    right = md4.JK(basis, backend="cpu").gradient(dm, tolerance=0)
    with running() as machine:
        jk = md4.JK(basis, backend="cuda")
        found = jk.gradient(dm, tolerance=0)
    np.testing.assert_allclose(found, right, rtol=0, atol=1e-13 * abs(right).max())
    assert "reverse_lanes" in machine.kernels
    return machine, jk.stats


@pytest.mark.sample("3-2-2-2-1")
@pytest.mark.races
@pytest.mark.parametrize("nprim", [1, 2])
@pytest.mark.parametrize("bits, warps, sets, blocks", [(5, 1, 1, 9), (4, 2, 1, 3), (3, 2, 2, 2), (2, 5, 2, 1)])
def test_rows_and_quartets(bits, warps, sets, blocks, nprim, monkeypatch):
    """Lanes are several functions of several quartets, some of which are none; some warps make r, or all."""
    monkeypatch.setattr(reverse_ways, "lane_plan", lambda *_: LanePlan(bits, warps, sets, blocks))
    machine, _ = compare(basis_of((0, 1), nprim))
    assert "reverse_fused" not in machine.kernels


@pytest.mark.thorough
@pytest.mark.races
@pytest.mark.parametrize("pure", [True, False])
def test_contracted_functions(pure):
    """Of kets whose shells have unlike numbers of them."""
    rng, exponents = np.random.default_rng(5), np.array([0.5, 1.1])
    coefficients = [rng.uniform(0.2, 1.0, (2, nctr)) for nctr in (3, 2)]
    compare(md4.Basis.from_arrays([0, 2 - pure], [exponents] * 2, coefficients, rng.normal(size=(2, 3)), pure))


@pytest.mark.thorough
@pytest.mark.races
def test_many_kets():
    """More than a block takes at a time."""
    _, stats = compare(basis_of((0,) * 8))
    assert stats.computed == 36**2


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
    """All functions have a lane, blocks fit any device, and large classes have no plan."""
    ab, hermite = facts(*bra), hermite_facts(sum(bra) + 1)
    plan = lane_plan(ab, facts(*ket), hermite, LEAST_SHARED)
    assert (plan is None) == (sum(bra) > 3 or sum(ket) > 4)
    if plan is not None:
        rows = plan.warps << (5 - plan.quartet_bits)
        assert (plan.blocks - 1) * rows < ab.nab <= plan.blocks * rows
        assert plan.sets <= plan.warps
        assert plan.sets * set_bytes(hermite.l + sum(ket)) <= LEAST_SHARED
        assert 0 < plan.cycles < np.inf


def test_largest_class():
    """Even r of the largest one fits the least shared memory that a block may have: that of compute capability 7.5."""
    most = max(
        stride_of(l + l_ket)
        for l in range(1, 12) for l_ket in range(12)
        if nherm(l) <= REVERSE.lane_functions and nherm(l) + nherm(l_ket) <= REVERSE.lane_numbers
    )  # fmt: skip
    assert 256 * (most + 2) <= LEAST_SHARED
