"""Step 4 with panels of H in shared memory, on the emulated GPU, beside the CPU."""

import numpy as np
import pytest
from emulator import host_array, running
from gpu.kernels.fused_blocks import sides
from gpu.kernels.test_limits import on_device
from gpu.kernels.test_plain_python import basis_of

import md4
from md4.gpu.kernels import whole_panel
from md4.gpu.paths import plans

LS = (1, 1, 1, 0)


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    """Tiles of few columns, so that a block of threads has several blocks of them."""
    tile_of = whole_panel.panel_tile
    monkeypatch.setattr(whole_panel, "panel_tile", lambda *args: tile_of(*args)._replace(nt=2, warps=2))


def check(basis, bra, ket, counts=None, by_ket=False):
    """Compares what counts by the plan of two products that transforms the bra first; returns what does not count."""
    right = md4.Engine(basis, backend="cpu").compute(bra, ket)
    live = np.ones(right.shape[:2], dtype=bool)
    with running() as machine:
        engine = md4.Engine(basis, backend="cuda")
        ab, cd = engine.prepare(bra), engine.prepare(ket)
        (plan,) = (p for p in plans("dmma16", ab, cd) if p.path.name == "two_products" and not p.swap)
        engine.backend.plan = lambda *_: plan
        block = engine.backend.scratch(right.shape)
        if counts is not None:
            block.limits = on_device(engine.backend.context, counts.astype(np.int32)), by_ket
            live = np.arange(len(bra))[:, None] < counts if by_ket else np.arange(len(ket)) < counts[:, None]
        engine.run_steps(ab, cd, block)
        found = host_array(block.array, "float64").reshape(right.shape)
    assert "whole_panel" in machine.kernels
    np.testing.assert_allclose(found[live], right[live], rtol=0, atol=1e-14 * max(1e-3, abs(right).max()))
    return found[~live]


@pytest.mark.sample("?-3")
@pytest.mark.races
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("nprim", [1, 2])
def test_steps(nprim, groups, monkeypatch):
    """Blocks of columns that do not all have as many steps, the last one not full; primitive pairs of a bra."""
    prims = nprim * nprim
    monkeypatch.setattr(whole_panel, "STEPS", groups * prims)
    basis, bra, ket, _ = sides(LS, nprim, 2, 21)
    assert whole_panel.parts_of(21, 4, prims) == {(1, 1): 5, (1, 3): 1, (4, 1): 6, (4, 3): 2}[prims, groups]
    check(basis, bra, ket)


@pytest.mark.sample("1-*")
@pytest.mark.parametrize("by_ket", [False, True])
@pytest.mark.parametrize("nprim", [1, 2])
def test_limits(nprim, by_ket):
    """What counts is right; bra pairs that count with no ket pair are left out."""
    basis, bra, ket, right = sides(LS, nprim, 5, 33)
    counts = np.array([33, 0, 9, 2, 0])
    if by_ket:
        counts = np.random.default_rng(3).integers(0, 4, 33)
    rest = check(basis, bra, ket, counts, by_ket)
    assert np.isnan(rest).any()
    assert not np.isnan(right).any()


@pytest.mark.thorough
def test_more_blocks_than_bits(monkeypatch):
    """A block of threads with more than 31 steps; the later ones are said to count."""
    monkeypatch.setattr(whole_panel, "STEPS", 100)
    basis, bra, ket, _ = sides((1, 0, 1, 0), 1, 2, 131)
    check(basis, bra, ket, np.array([131, 126]))


@pytest.mark.parametrize("nprim", [1, 2])
def test_pairs_without_primitives(nprim):
    """Integrals of shells that are far apart are zeros, which are written."""
    near = basis_of(LS, nprim)
    basis = md4.Basis([*near.shells, *(md4.Shell(l, [0.5], [[1.0]], np.full(3, 60.0)) for l in (1, 0))])
    ket = [[2, 3], [2, 5], [2, 3], [2, 5], [2, 5]] * 3
    check(basis, [[0, 1], [0, 4], [0, 1]], ket)
