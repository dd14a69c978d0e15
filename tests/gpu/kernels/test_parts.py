"""Even and odd parts of blocks of planar molecules, on the emulated GPU: the integrals of all that are not zero."""

import numpy as np
import pytest
from emulator import host_array, running
from gpu.kernels.test_limits import limited, on_device

import md4
from md4.gpu.part_plans import timed_part_plans
from md4.gpu.predicted_times import rounded_mean
from md4.method.mirror import part_rows
from md4.plan import ListParts

# Angular momenta of a, b, c and d, primitives, contracted functions, whether they are spherical, axis; kernels.
CLASSES = {
    "(dp|pp)": ((2, 1, 1, 1), 1, 1, True, 0, {"fused_transforms", "whole_panel", "ket_transform"}),
    "(pp|ps), K = 4": ((1, 1, 1, 0), 2, 1, True, 1, {"fused_transforms", "whole_panel", "ket_transform"}),
    "(ps|ps) of two functions": ((1, 0, 1, 0), 2, 2, True, 2, {"fused_transforms", "whole_panel"}),
    "(dp|ps), Cartesian": ((2, 1, 1, 0), 1, 1, False, 2, {"fused_transforms", "whole_panel"}),
}


def planar_basis(ls, axis, nprim=1, nctr=1, pure=True):
    """A shell of each angular momentum, of so many primitives and contracted functions, all in a plane."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(len(ls), 3))
    centres[:, 2 - axis] = 0.37
    exponents, coefficients = np.geomspace(0.5, 2.0, nprim), rng.uniform(0.2, 1.0, (nprim, nctr))
    return md4.Basis.from_arrays(ls, [exponents] * len(ls), [coefficients] * len(ls), centres, pure)


def parts_of(bra, ket, axis, plans):
    """`ListParts` of two prepared lists."""
    return [ListParts(bra.part(axis, n), ket.part(axis, n), plan) for n, plan in enumerate(plans)]


def plans_of(unit, bra, ket, axis):
    """Plans for the parts of two prepared lists, all of them."""
    means = rounded_mean(bra), rounded_mean(ket)
    return [plans for _, plans in timed_part_plans(unit, bra.facts, ket.facts, *means, axis)]


def rows_of(side, parity, axis):
    return part_rows(*side.facts.shell_class, axis, parity)


def assert_parts(blocks, integrals, bra, ket, axis, live=...):
    """Both blocks hold what all integrals (ij, kl, a, b, c, d) hold of their rows, in the quartets that are `live`."""
    every = integrals.reshape(*integrals.shape[:2], bra.facts.nab, ket.facts.nab)
    for parity, block in enumerate(blocks):
        right = every[:, :, rows_of(bra, parity, axis)[:, None], rows_of(ket, parity, axis)]
        found = host_array(block.array, "float64").reshape(right.shape)
        np.testing.assert_allclose(found[live], right[live], rtol=0, atol=1e-14 * abs(integrals).max())


@pytest.mark.sample("(dp|*-dmma16")
@pytest.mark.parametrize("unit", ["dmma8", "dmma16"])
@pytest.mark.parametrize("name", CLASSES)
def test_all_plans_of_a_class(unit, name):
    ls, nprim, nctr, pure, axis, kernels = CLASSES[name]
    basis = planar_basis(ls, axis, nprim, nctr, pure)
    bra_pairs, ket_pairs = [[0, 1]] * 2, [[2, 3]] * 3
    right = md4.Engine(basis, backend="cpu").compute(bra_pairs, ket_pairs)
    with running(unit) as machine:
        engine = md4.Engine(basis, backend="cuda")
        bra, ket = engine.prepare(bra_pairs), engine.prepare(ket_pairs)
        every = plans_of(unit, bra, ket, axis)
        assert {plan.swap for plans in every for plan in plans} == {False, True}
        for plans in every:
            parts = parts_of(bra, ket, axis, plans)
            blocks = engine.backend.part_blocks(parts)
            engine.backend.run_parts(parts, blocks)
            assert_parts(blocks, right, bra, ket, axis)
            engine.backend.context.pool.trim()  # other memory, in which nobody has written
    assert machine.kernels >= kernels


@pytest.mark.thorough
@pytest.mark.parametrize("swap", [False, True])
def test_slices_chunks_and_limits(swap, monkeypatch):
    """r of a chunk is made once for both parts; what does not count is not asked for."""
    axis, rng = 1, np.random.default_rng(3)
    basis = planar_basis((1, 1, 1, 0), axis)
    right = md4.Engine(basis, backend="cpu").compute([[0, 1]] * 7, [[2, 3]] * 9)[1:6, 2:8]
    counts = limited(rng, 7, 9)
    live = np.arange(2, 8) < counts[1:6, None]
    with running() as machine:
        engine = md4.Engine(basis, backend="cuda")
        backend, made = engine.backend, []
        bra, ket = engine.prepare([[0, 1]] * 7), engine.prepare([[2, 3]] * 9)
        make_r = backend.r
        monkeypatch.setattr(backend, "chunk_pairs", lambda plan, ab, cd: (2, 4))
        monkeypatch.setattr(backend, "r", lambda ab, *others: made.append(ab.facts.mirror) or make_r(ab, *others))
        for plans in plans_of("dmma16", bra, ket, axis):
            if plans[0].swap != swap:
                continue
            made.clear()
            parts = parts_of(bra[1:6], ket[2:8], axis, plans)
            blocks = backend.part_blocks(parts)
            for block in blocks:
                block.limit(on_device(backend.context, counts))
            backend.run_parts(parts, blocks)
            assert made == [(axis, 0)] * 6
            assert_parts(blocks, right, bra, ket, axis, live)
            backend.context.pool.trim()
    assert machine.kernels >= {"fused_transforms", "whole_panel"}


def test_parts_of_lists():
    """They share the pairs, and have H matrices of their own, which are dropped with those of the list."""
    with running():
        engine = md4.Engine(planar_basis((1, 0), 0), backend="cuda")
        bra = engine.prepare([[0, 1]] * 5)
        odd, piece = bra.part(0, 1), bra[1:4].part(0, 1)
        assert odd is bra.part(0, 1)
        assert odd.whole is odd
        assert piece.whole is odd
        assert (piece.first, piece.npair, piece.first_prim, piece.nprim) == (1, 3, 1, 3)
        assert piece.data is bra.data
        assert (odd.facts.nab, odd.facts.nherm, odd.facts.mirror) == (1, 1, (0, 1))
        assert (bra.facts.nab, bra.facts.nherm, bra.facts.mirror) == (3, 4, None)
        plans = plans_of("dmma16", bra, bra, 0)[0]
        h = [side.h(plans[0].bra_form) for side in (bra, odd, bra.part(0, 0), piece)]
        assert h[1] is h[3]
        assert len({this.array.pointer for this in h}) == 3
        assert bra.h_bytes == sum(8 * this.array.size for this in h[:3])
        bra.drop()
        assert bra.h_bytes == 0
        assert odd.h(plans[0].bra_form) is not h[1]


@pytest.mark.thorough
@pytest.mark.parametrize(("axis", "hermi", "count"), [(0, 1, 3), (2, 0, 1)])
def test_builds(axis, hermi, count):
    """J and K, also where a build repeats what it has recorded, of density matrices that know nothing of the plane."""
    basis = planar_basis((2, 1, 1), axis)
    assert basis.mirror_axis == axis
    dm = np.random.default_rng(axis).normal(size=(basis.nao, basis.nao))
    dm = dm + dm.T if hermi else dm
    right = md4.JK(basis, backend="cpu").get_jk(dm, hermi=hermi)
    with running() as machine:
        jk = md4.JK(basis, backend="cuda")
        for _ in range(count):
            for ours, theirs in zip(jk.get_jk(dm, hermi=hermi), right):
                np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-13 * abs(theirs).max())
        records = jk.engine.backend.context.recorder.records.values()
        assert any(mirror == (axis, 1) for record in records for mirror, *_ in record.forms) == (count > 1)
    assert machine.kernels >= {"digest_mirrored", "digest_rows"}


def test_which_parts_a_backend_makes():
    """Both in the same order; none of what is made as a whole."""
    with running():
        engine = md4.Engine(planar_basis((2, 2, 2, 1, 0), 0), backend="cuda")
        bra, ket, small = engine.prepare([[0, 1]] * 3), engine.prepare([[2, 3]] * 3), engine.prepare([[3, 4]])
        for pair in ((bra, ket), (ket[1:3], bra[1:3])):
            even, odd = engine.backend.parts(*pair, 0)
            assert even.plan.swap == odd.plan.swap
            assert [side.facts.mirror for part in (even, odd) for side in part[:2]] == [(0, 0)] * 2 + [(0, 1)] * 2
            assert [side.first for part in (even, odd) for side in part[:2]] == [side.first for side in pair] * 2
        assert engine.backend.parts(bra, ket, None) == []
        assert engine.backend.parts(small, small, 0) == []
