"""The fused kernel of quartets that several warps may share, on the emulated GPU, beside the CPU."""

import numpy as np
import pytest
from emulator import host_array, running
from gpu.kernels.fused_blocks import Way, check_limits, check_matrix, check_part, check_without_primitives, sides
from gpu.kernels.test_plain_python import assert_same, basis_of

import md4
from md4.gpu.kernels import fused, fused_wide

WAY = Way("fused_wide", "fused_wide")


@pytest.fixture
def shared_by(monkeypatch):
    """Function that has so many warps share a quartet, of a block of so many, with registers for some blocks of q."""

    def settle(shares, warps=4, doubles=84):
        numbers = {"SHARES": (shares,), "BLOCKS_OF_WARPS": ((warps, 1),), "TILE_DOUBLES": (doubles,) * 3}
        for name, value in {**numbers, "FEWEST_FUNCTIONS": 1, "MOST_FRAGMENTS": 8, "LEAST_Q": 1}.items():
            monkeypatch.setattr(fused_wide, name, value)

    return settle


# Functions of the shells, warps of a quartet and of a block, accumulators; fragments of a warp, blocks of q at a time.
CASES = {
    "one": ((3, 2, 1, 0), 1, 4, 84, (3, 1)),
    "two, a fragment of padding": ((3, 2, 1, 0), 2, 4, 84, (2, 1)),
    "two, one without rows": ((2, 1, 1, 0), 2, 4, 84, (1, 1)),
    "four, each a fragment": ((4, 2, 1, 0), 4, 8, 84, (1, 1)),
    "two, three passes": ((2, 2, 2, 1), 2, 8, 12, (1, 1)),
    "one, two passes": ((2, 2, 2, 1), 1, 4, 32, (2, 2)),
}


@pytest.mark.sample("two, one without rows-*", "one, two passes-False")
@pytest.mark.races
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_classes(name, swapped, shared_by):
    """Slices of lists, with teams that find no quartet."""
    ls, shares, warps, doubles, tile = CASES[name]
    shared_by(shares, warps, doubles)
    basis, bra, ket, right = sides(ls, 1, 3, 6)
    with running("dmma16") as machine:
        engine = md4.Engine(basis, backend="cuda")
        ab, cd = engine.prepare(bra)[1:3], engine.prepare(ket)[1:6]
        found = fused_wide.wide_tile("dmma16", ab.facts, cd.facts)
        assert ((found.mt, found.nq), found.shares, found.warps) == (tile, shares, warps)
        functions = right.shape[2:]
        block = engine.backend.scratch((5, 2, *functions[2:], *functions[:2]) if swapped else (2, 5, *functions))
        WAY.make(engine, ab, cd, block.swapped() if swapped else block)
        found = host_array(block.array, "float64").reshape(block.dims)
    right = right[1:3, 1:6]
    assert_same(found, right.transpose(1, 0, 4, 5, 2, 3) if swapped else right)
    assert "fused_wide" in machine.kernels


@pytest.mark.sample("4")
@pytest.mark.races
@pytest.mark.parametrize("shares", [1, 2, 4])
def test_successive_quartets(shares, shared_by, monkeypatch):
    """Of a team: r comes ahead, in turn to two places, and warps change their shares. A team has one more than others.

    Some ket pairs have no primitives, such as the first and the last of a team.
    """
    shared_by(shares)
    monkeypatch.setattr(fused, "FEWEST_BLOCKS", 1)
    near, rng, teams = basis_of((3, 2, 1, 0)), np.random.default_rng(3), 4 // shares
    others = (md4.Shell(0, [exponent], [[1.0]], np.full(3, at)) for exponent, at in ((0.5, 60.0), (0.8, 0.3)))
    basis = md4.Basis([*near.shells, *others])
    bra, ket = [[0, 1]] * 2, rng.permutation([[2, 3], [2, 5]] * (3 * teams) + [[2, 4]] * (teams + 1))
    ket[[0, -1]] = 2, 4
    right = md4.Engine(basis, backend="cpu").compute(bra, ket)
    with running() as machine:
        engine = md4.Engine(basis, backend="cuda")
        ab, cd = engine.prepare(bra), engine.prepare(ket)
        assert fused.parts_of(len(bra), len(ket), teams, teams * fused_wide.FEWEST_KETS) == 1
        block = engine.backend.scratch(right.shape)
        WAY.make(engine, ab, cd, block)
        found = host_array(block.array, "float64").reshape(right.shape)
    assert_same(found, right)
    assert "fused_wide" in machine.kernels


@pytest.mark.sample("?-True-1")
@pytest.mark.parametrize("parts", [1, 5])
@pytest.mark.parametrize("by_ket", [False, True])
@pytest.mark.parametrize("shares", [1, 2])
def test_limits(shares, by_ket, parts, shared_by, monkeypatch):
    """What counts is right, nothing else is written, and nothing depends on memory that nobody wrote."""
    shared_by(shares)
    monkeypatch.setattr(fused, "FEWEST_BLOCKS", 4 * parts)
    assert np.isnan(check_limits(WAY, (2, 2, 1, 0), by_ket)).all()


@pytest.mark.sample("1")
@pytest.mark.parametrize("shares", [1, 2])
def test_pairs_without_primitives(shares, shared_by):
    shared_by(shares)
    check_without_primitives(WAY, (2, 2, 1, 0), (0, 2))


@pytest.mark.sample("?-0")
@pytest.mark.races
@pytest.mark.parametrize("parity", [0, 1])
@pytest.mark.parametrize("shares", [1, 2])
def test_parts(shares, parity, shared_by):
    shared_by(shares)
    check_part(WAY, (3, 2, 1, 1), parity)


@pytest.mark.parametrize("swapped", [False, True])
def test_parts_of_a_matrix(swapped, shared_by):
    shared_by(2)
    check_matrix(WAY, (2, 2, 1, 0), swapped)
