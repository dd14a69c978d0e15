"""The fused kernel of groups of ket pairs, on the emulated GPU, beside the CPU."""

from dataclasses import replace

import numpy as np
import pytest
from emulator import host_array, running
from gpu.kernels.test_limits import on_device
from gpu.kernels.test_plain_python import assert_same, basis_of

import md4
from md4.gpu import paths
from md4.gpu.buffers import as_buffer
from md4.gpu.kernels import fused
from md4.method.mirror import part_rows

(FUSED,) = (path for path in paths.PATHS if path.name == "fused")


@pytest.fixture
def groups_of(monkeypatch):
    """Function that has groups of so many ket pairs taken, H[cd, q] fetched ahead or not."""

    def settle(kets, ahead=True):
        at_once = dict.fromkeys(("at_once", "contracted_at_once"), ((kets,),) * fused.FUSED.rows)
        tuning = replace(fused.FUSED, **at_once, group_doubles=1000, ahead_doubles=1000 * ahead)
        monkeypatch.setattr(fused, "FUSED", tuning)

    return settle


def maker(path):
    """Function that puts the integrals of two prepared lists into a block by a path, the second list as ket."""

    def make(engine, ab, cd, block):
        forms = (side.h(form) for side, form in zip((ab, cd), path.forms(None)))
        path.run(engine.backend, *forms, ab, cd, block)

    return make


make = maker(FUSED)


def sides(ls, nprim, nbra, nket):
    """A basis with bra pairs of two kinds and ket pairs of two kinds, and the integrals by the CPU."""
    rng, basis = np.random.default_rng(5), basis_of((*ls, *ls))
    if nprim > 1:
        contracted = basis_of((*ls, *ls), nprim).shells
        basis = md4.Basis([s if n % 4 > 1 else contracted[n] for n, s in enumerate(basis.shells)])
    bra = rng.choice([[0, 1], [4, 5], [0, 5], [4, 1]], nbra)
    ket = rng.choice([[2, 3], [6, 7], [2, 7], [6, 3]], nket)
    return basis, bra, ket, md4.Engine(basis, backend="cpu").compute(bra, ket)


# Functions of the shells, primitives of those of the bra, ket pairs of a group, whether H[cd, q] is fetched ahead.
CASES = {
    "one": ((2, 1, 1, 0), 1, 1, True),
    "two": ((2, 1, 1, 0), 1, 2, True),
    "three, not ahead": ((1, 1, 1, 1), 1, 3, False),
    "four": ((1, 0, 1, 0), 1, 4, True),
    "two of several blocks": ((1, 0, 2, 1), 1, 2, False),
    "two, K = 4": ((1, 1, 1, 0), 2, 2, True),
    "two of 32 rows": ((3, 1, 1, 0), 1, 2, True),
}


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
        make(engine, ab, cd, block.swapped() if swapped else block)
        found = host_array(block.array, "float64").reshape(block.dims)
    right = right[1:3, 1:7]
    assert_same(found, right.transpose(1, 0, 4, 5, 2, 3) if swapped else right)
    assert "fused_groups" in machine.kernels


@pytest.mark.parametrize("by_ket", [False, True])
@pytest.mark.parametrize("kets", [1, 2, 3])
def test_limits(kets, by_ket, groups_of):
    """What counts is right, and nothing of it depends on memory that nobody wrote, such as the r of its neighbours."""
    groups_of(kets)
    basis, bra, ket, right = sides((1, 0, 1, 0), 1, 4, 9)
    rng = np.random.default_rng(1)
    counts = rng.integers(0, 5, 9) if by_ket else np.array([9, 0, 5, 4])
    counts[2:6] = (0, 4, 0, 1) if by_ket else counts[2:6]
    live = np.arange(4)[:, None] < counts if by_ket else np.arange(9) < counts[:, None]
    with running() as machine:
        engine = md4.Engine(basis, backend="cuda")
        ab, cd = engine.prepare(bra), engine.prepare(ket)
        block = engine.backend.scratch(right.shape)
        block.limits = on_device(engine.backend.context, counts.astype(np.int32)), by_ket
        make(engine, ab, cd, block)
        found = host_array(block.array, "float64").reshape(right.shape)
    np.testing.assert_allclose(found[live], right[live], rtol=0, atol=1e-14 * abs(right).max())
    assert "fused_groups" in machine.kernels
    if kets == 1 or not by_ket:
        assert np.isnan(found[~live]).all()


@pytest.mark.parametrize("kets", [1, 3])
def test_pairs_without_primitives(kets, groups_of):
    """Shells so far apart that no primitive pair of theirs is left: zeros, and their neighbours are right."""
    groups_of(kets)
    near, rng = basis_of((1, 0, 1, 0)), np.random.default_rng(2)
    basis = md4.Basis([*near.shells, md4.Shell(0, [0.5], [[1.0]], np.full(3, 60.0))])
    for order in range(3):
        bra = [[0, 1], [0, 4], [0, 1]]
        ket = rng.permutation([[2, 3]] * 5 + [[2, 4]] * 4) if order else [[2, 4]] * 4
        right = md4.Engine(basis, backend="cpu").compute(bra, ket)
        with running():
            engine = md4.Engine(basis, backend="cuda")
            ab, cd = engine.prepare(bra), engine.prepare(ket)
            assert cd.nprim < cd.npair
            block = engine.backend.scratch(right.shape)
            make(engine, ab, cd, block)
            found = host_array(block.array, "float64").reshape(right.shape)
        np.testing.assert_allclose(found, right, rtol=0, atol=1e-14 * max(1e-3, abs(right).max()))


def check_part(make, ls, parity):
    """Compares the even or the odd part of pairs of a molecule in a plane."""
    shells = basis_of(ls).shells
    flat = md4.Basis([md4.Shell(s.l, s.exponents, s.coefficients, np.array([*s.centre[:2], 0.3])) for s in shells])
    na, nb, nc, nd = (2 * l + 1 for l in ls)
    ab_rows, cd_rows = (part_rows(*pair, True, 1, 1, 0, parity) for pair in (ls[:2], ls[2:]))
    right = md4.Engine(flat, backend="cpu").compute([[0, 1]] * 2, [[2, 3]] * 5).reshape(2, 5, na * nb, nc * nd)
    with running():
        engine = md4.Engine(flat, backend="cuda")
        ab, cd = engine.prepare([[0, 1]] * 2).part(0, parity), engine.prepare([[2, 3]] * 5).part(0, parity)
        block = engine.backend.scratch((2, 5, len(ab_rows), 1, len(cd_rows), 1))
        make(engine, ab, cd, block)
        found = host_array(block.array, "float64").reshape(2, 5, len(ab_rows), len(cd_rows))
    assert_same(found, right[:, :, ab_rows[:, None], cd_rows])


@pytest.mark.races
@pytest.mark.parametrize("parity", [0, 1])
@pytest.mark.parametrize("kets", [1, 2, 4])
def test_parts(kets, parity, groups_of):
    groups_of(kets)
    check_part(make, (2, 1, 1, 1), parity)


def check_matrix(make, ls, swapped):
    """Compares integrals that are a part of a matrix: those of a quartet are contiguous within rows only."""
    basis, bra, ket, right = sides(ls, 1, 2, 5)
    nbra, nket, na, nb, nc, nd = right.shape
    with running():
        engine = md4.Engine(basis, backend="cuda")
        context, (ab, cd) = engine.backend.context, (engine.prepare(bra), engine.prepare(ket))
        shape = (nket, nbra, nc, nd, na, nb) if swapped else right.shape
        columns, rows = shape[0] * shape[2] * shape[3], shape[1] * shape[4] * shape[5]
        matrix = context.pool.array((rows + 2, columns + 3))
        block = engine.backend.matrix_block(matrix, 1, 2, shape)
        make(engine, ab, cd, block.swapped() if swapped else block)
        found = host_array(as_buffer(matrix), "float64").reshape(rows + 2, columns + 3)[1 : rows + 1, 2 : columns + 2]
    expected = right.transpose(1, 0, 4, 5, 2, 3) if swapped else right
    assert_same(found, expected.transpose(1, 4, 5, 0, 2, 3).reshape(rows, columns))


@pytest.mark.parametrize("swapped", [False, True])
def test_parts_of_a_matrix(swapped, groups_of):
    groups_of(2)
    check_matrix(make, (1, 1, 1, 0), swapped)


def test_bra_primitives_in_groups(groups_of, monkeypatch):
    """Where shared memory holds H of two of the four primitives of a bra pair, integrals of later ones are added."""
    groups_of(2)
    basis, bra, ket, right = sides((1, 1, 1, 0), 2, 2, 5)
    with running():
        engine = md4.Engine(basis, backend="cuda")
        ab, cd = engine.prepare(bra), engine.prepare(ket)
        panel, rest = fused.fused_shared(ab.facts, cd.facts, 2)
        monkeypatch.setattr(fused, "SHARED_BYTES", (2 * panel + rest) * fused.FUSED.blocks // 2)
        monkeypatch.setattr(fused, "fused_blocks", lambda *_: fused.FUSED.blocks)
        assert ab.facts.max_prim == 4
        block = engine.backend.scratch(right.shape)
        make(engine, ab, cd, block)
        found = host_array(block.array, "float64").reshape(right.shape)
    assert_same(found, right)
