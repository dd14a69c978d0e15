"""Steps 1 and 2 of gradients of the smallest classes, a lane a primitive quartet, on the emulated GPU."""

from dataclasses import replace

import numpy as np
import pytest
from emulator import running
from gpu.kernels.test_plain_python import basis_of
from nuclear_forces import symmetric

import md4
from md4.gpu import forces
from md4.gpu.forces import hermite_facts
from md4.gpu.kernels import reverse_lanes
from md4.gpu.kernels.reverse_lanes import columns_of, lane_plan
from md4.gpu.tuning import REVERSE
from md4.shells.shell_pairs import list_facts


@pytest.fixture
def tuned(monkeypatch):
    """Changes `REVERSE` for this kernel; a warp takes all kets."""
    monkeypatch.setattr(forces, "REVERSE", replace(REVERSE, most_parts=1))

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
    tuned(lane_doubles=doubles)
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
