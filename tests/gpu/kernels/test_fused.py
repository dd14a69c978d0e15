"""The fused kernel, with groups of ket pairs and in rounds, on the emulated GPU, beside the CPU."""

import numpy as np
import pytest
from emulator import host_array, running
from gpu.kernels.fused_blocks import Way, check_limits, check_matrix, check_part, check_without_primitives, sides
from gpu.kernels.test_plain_python import assert_same

import md4
from md4.gpu.kernels import fused


@pytest.fixture
def groups_of(monkeypatch):
    """Function that has groups of so many ket pairs taken, H[cd, q] fetched ahead or not; 0: in rounds of 8 q each.

    Rounds are for bras of up to 16 functions, and kets of 9 to 16.
    """

    def settle(kets, ahead=True):
        numbers = dict.fromkeys(("AT_ONCE", "CONTRACTED_AT_ONCE"), ((kets,),) * fused.MOST_FRAGMENTS)
        numbers |= {"GROUP_DOUBLES": 1000, "AHEAD_DOUBLES": 1000 * ahead}
        for name, value in (numbers if kets else numbers | {"TILE_DOUBLES": 12}).items():
            monkeypatch.setattr(fused, name, value)

    return settle


WAY = Way("fused", "fused_transforms")

# Functions of the shells, primitives of those of the bra, ket pairs of a group, whether H[cd, q] is fetched ahead.
CASES = {
    "one": ((2, 1, 1, 0), 1, 1, True),
    "two": ((2, 1, 1, 0), 1, 2, True),
    "three, not ahead": ((1, 1, 1, 1), 1, 3, False),
    "four": ((1, 0, 1, 0), 1, 4, True),
    "two of several blocks": ((1, 0, 2, 1), 1, 2, False),
    "two, K = 4": ((1, 1, 1, 0), 2, 2, True),
    "two of 32 rows": ((3, 1, 1, 0), 1, 2, True),
    "rounds": ((1, 1, 1, 1), 1, 0, True),
    "rounds, K = 4": ((1, 1, 1, 1), 2, 0, True),
}


@pytest.mark.sample("two-*", "four-*", "two, K = 4-False", "rounds, K = 4-True")
@pytest.mark.races
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_classes(name, swapped, groups_of):
    """Slices of lists, with groups that are not full; quartets that follow each other, and such that do not."""
    ls, nprim, kets, ahead = CASES[name]
    groups_of(kets, ahead)
    basis, bra, ket, right = sides(ls, nprim, 3, 7)
    with running("dmma8" if name == "three, not ahead" else "dmma16") as machine:
        engine = md4.Engine(basis, backend="cuda")
        ab, cd = engine.prepare(bra)[1:3], engine.prepare(ket)[1:7]
        assert fused.choose_fused("dmma16", ab.facts, cd.facts).kets == kets
        functions = right.shape[2:]
        block = engine.backend.scratch((6, 2, *functions[2:], *functions[:2]) if swapped else (2, 6, *functions))
        WAY.make(engine, ab, cd, block.swapped() if swapped else block)
        found = host_array(block.array, "float64").reshape(block.dims)
    right = right[1:3, 1:7]
    assert_same(found, right.transpose(1, 0, 4, 5, 2, 3) if swapped else right)
    assert "fused_transforms" in machine.kernels


@pytest.mark.races
@pytest.mark.parametrize("kets", [0, 1])
def test_contracted_kets(kets, groups_of):
    """In rounds over their primitives, all q of each at once or not."""
    groups_of(kets)
    basis, bra, ket, right = sides((1, 1, 1, 1), 2, 5, 2)
    with running() as machine:
        engine = md4.Engine(basis, backend="cuda")
        ab, cd = engine.prepare(ket), engine.prepare(bra)
        tile = fused.choose_fused("dmma16", ab.facts, cd.facts)
        assert (tile.kets, tile.nq) == (0, 1 + kets)
        block = engine.backend.scratch((2, 5, *right.shape[2:]))
        WAY.make(engine, ab, cd, block)
        found = host_array(block.array, "float64").reshape(block.dims)
    assert_same(found, right.transpose(1, 0, 4, 5, 2, 3))
    assert "fused_transforms" in machine.kernels


@pytest.mark.sample("?-True")
@pytest.mark.parametrize("by_ket", [False, True])
@pytest.mark.parametrize("kets", [0, 1, 2, 3])
def test_limits(kets, by_ket, groups_of):
    """What counts is right, and nothing of it depends on memory that nobody wrote, such as the r of its neighbours."""
    groups_of(kets)
    rest = check_limits(WAY, (1, 0, 1, 0) if kets else (1, 0, 1, 1), by_ket)
    if kets <= 1 or not by_ket:
        assert np.isnan(rest).all()


@pytest.mark.sample("3-*")
@pytest.mark.parametrize("kets, ls, far", [(0, (1, 0, 1, 1), (1, 0)), (1, (1, 0, 1, 0), (0,)), (3, (1, 0, 1, 0), (0,))])
def test_pairs_without_primitives(kets, ls, far, groups_of):
    groups_of(kets)
    check_without_primitives(WAY, ls, far)


@pytest.mark.sample("2-?")
@pytest.mark.races
@pytest.mark.parametrize("parity", [0, 1])
@pytest.mark.parametrize("kets", [1, 2, 4])
def test_parts(kets, parity, groups_of):
    groups_of(kets)
    check_part(WAY, (2, 1, 1, 1), parity)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("kets, ls", [(0, (1, 0, 1, 1)), (2, (1, 1, 1, 0))])
def test_parts_of_a_matrix(kets, ls, swapped, groups_of):
    groups_of(kets)
    check_matrix(WAY, ls, swapped)


def test_bra_primitives_in_groups(groups_of, monkeypatch):
    """Where shared memory holds H of two of the four primitives of a bra pair, integrals of later ones are added."""
    groups_of(2)
    basis, bra, ket, right = sides((1, 1, 1, 0), 2, 2, 5)
    with running():
        engine = md4.Engine(basis, backend="cuda")
        ab, cd = engine.prepare(bra), engine.prepare(ket)
        panel, rest = fused.fused_shared(ab.facts, cd.facts, 2)
        monkeypatch.setattr(fused, "SHARED_BYTES", (2 * panel + rest) * fused.BLOCKS_TOGETHER // 2)
        monkeypatch.setattr(fused, "fused_blocks", lambda *_: fused.BLOCKS_TOGETHER)
        assert ab.facts.max_prim == 4
        block = engine.backend.scratch(right.shape)
        WAY.make(engine, ab, cd, block)
        found = host_array(block.array, "float64").reshape(right.shape)
    assert_same(found, right)
