"""r of molecules in a plane, without the elements that are zero, on the emulated GPU."""

import numpy as np
import pytest
from emulator import host_array, running
from gpu.kernels.test_limits import on_device
from gpu.kernels.test_plain_python import plain_r

import md4
from md4.gpu.kernels import recurrence
from md4.gpu.r_layout import r_places
from md4.method.angular import hermite_triples
from md4.shells.shell_pairs import shell_pairs

# Angular momenta of the four shells, and the mirror axis. L = 0 to 18, each axis by both kernels.
CLASSES = [
    ((0, 0, 0, 0), 0), ((1, 0, 0, 0), 1), ((1, 0, 1, 0), 2), ((1, 1, 1, 0), 0), ((1, 1, 1, 1), 1), ((2, 1, 1, 1), 2),
    ((2, 2, 1, 1), 0), ((2, 2, 2, 1), 1), ((3, 1, 2, 2), 2), ((3, 2, 3, 1), 0), ((3, 3, 2, 2), 1), ((4, 2, 3, 2), 2),
    ((4, 4, 2, 2), 0), ((4, 3, 4, 2), 1), ((4, 4, 4, 2), 2), ((4, 4, 4, 3), 0), ((5, 4, 4, 3), 1), ((5, 5, 4, 3), 2),
    ((5, 5, 4, 4), 0), ((5, 4, 5, 4), 1),
]  # fmt: skip


def plane_basis(ls, axis, nprim=2):
    """A shell of each angular momentum; all centres have the same coordinate on an axis, which is no round number."""
    centres = np.random.default_rng(3).normal(size=(len(ls), 3))
    centres[:, 2 - axis] = 1.1
    exponents, coefficients = np.geomspace(0.5, 2.0, nprim), np.ones((nprim, 1))
    return md4.Basis.from_arrays(ls, [exponents] * len(ls), [coefficients] * len(ls), centres, True)


def set_tuning(monkeypatch, **changes):
    """Other numbers of `recurrence`."""
    for name, value in changes.items():
        monkeypatch.setattr(recurrence, name, value)


def parts(engine, axis, parity, counts=(1, 1)):
    """Parts of lists of so many pairs."""
    return [engine.prepare([pair] * n).part(axis, parity) for pair, n in zip(([0, 1], [2, 3]), counts)]


def even_elements(r, l, axis):
    """(r[t] of all t that are there, their ordinals) of r from the device; ordinals rise."""
    kept = np.flatnonzero(hermite_triples(l)[:, axis] % 2 == 0)
    return r[..., r_places(l, axis)[kept]], kept


def assert_same_r(ours, right, l, kept):
    """But for rounding errors, relative to the largest r of the degree."""
    degree = hermite_triples(l)[kept].sum(axis=1)
    for d in range(l + 1):
        one, other = (r[..., degree == d] for r in (ours, right))
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12 * abs(other).max())


@pytest.mark.sample("(?, 0*", "(1, 1*", "(2*", "(4, 2*", "(5, 4, 5*")
@pytest.mark.parametrize(("ls", "axis"), CLASSES, ids=str)
def test_each_l(ls, axis):
    """Rows hold no more than what can be nonzero; of the rest the whole r says that it is zero."""
    basis, l = plane_basis(ls, axis), sum(ls)
    right = plain_r(shell_pairs(basis, [[0, 1]]).primitives, shell_pairs(basis, [[2, 3]]).primitives, l)
    with running("dmma16") as machine:
        engine = md4.Engine(basis, backend="cuda")
        ab, cd = parts(engine, axis, parity=l % 2 and min(sum(ls[:2]), sum(ls[2:])) > 0)
        r = host_array(engine.backend.r(ab, cd), "float64").reshape(ab.nprim, cd.nprim, -1)
    assert machine.kernels == {"pair_primitives", "r_in_registers" if l <= 4 else "r_by_axis"}
    ours, kept = even_elements(r, l, axis)
    assert r.shape[-1] == len(kept) + len(kept) % 2
    assert not np.isnan(r).any()  # also what ends a row of an odd number, which is read
    assert_same_r(ours, right[..., kept], l, kept)
    odd = np.setdiff1d(np.arange(right.shape[-1]), kept)
    assert abs(right[..., odd]).max(initial=0.0) < 1e-12 * abs(right).max()


@pytest.mark.sample("18-*")
@pytest.mark.parametrize("kind", ["coulomb", ("erf", 0.4), ("erfc", 0.4), ("gaussian", 0.3)], ids=str)
@pytest.mark.parametrize("registers_l", [-1, 18])
def test_operators(kind, registers_l, monkeypatch):
    """Even elements of whole r, of each operator by both kernels; few quartets a warp."""
    set_tuning(monkeypatch, REGISTERS_L=registers_l, MOST_STAGE_BYTES=1 << 10)
    axis, l, basis = 1, 5, plane_basis((2, 1, 1, 1), 1)
    with running("dmma16") as machine:
        engine = md4.Engine(basis, operator=kind, backend="cuda")
        ab, cd = parts(engine, axis, 0, (3, 2))
        every = [(ab, cd), (ab.part(axis, 1), cd.part(axis, 1)), [engine.prepare(p.pairs.pairs) for p in (ab, cd)]]
        even, odd, whole = (
            host_array(engine.backend.r(*sides), "float64").reshape(ab.nprim, cd.nprim, -1).copy()
            for sides in every
        )
    assert machine.kernels == {"pair_primitives", "r_in_registers" if registers_l > 0 else "r_by_axis"}
    assert np.array_equal(even, odd)
    ours, kept = even_elements(even, l, axis)
    assert_same_r(ours, whole[..., r_places(l)[kept]], l, kept)


@pytest.mark.sample("*-True")
@pytest.mark.races
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("registers_l", [-1, 18])
def test_limits(registers_l, swapped, monkeypatch):
    """Where a quartet counts r is as without limits; much of the rest is not written."""
    set_tuning(monkeypatch, REGISTERS_L=registers_l)
    basis, counts = plane_basis((1, 0, 1, 0), 2, nprim=1), np.repeat([6, 2, 4, 0], 20).astype(np.int32)
    live = np.arange(1, 7) < counts[1:80, None]
    with running("dmma16"):
        engine = md4.Engine(basis, backend="cuda")
        pool = engine.backend.context.pool
        ab, cd = parts(engine, 2, 1, (80, 8))
        ab, cd = ab[1:80], cd[1:7]
        blocks = engine.backend.scratch((79, 6, ab.facts.nab, 1, cd.facts.nab, 1))
        blocks.limit(on_device(engine.backend.context, counts))
        if swapped:
            ab, cd, blocks, live = cd, ab, blocks.swapped(), live.T
        right = host_array(engine.backend.r(ab, cd), "float64").copy()
        pool.trim()
        ours = host_array(engine.backend.r(ab, cd, blocks), "float64")
        shape = ab.npair, ab.nprim // ab.npair, cd.npair, cd.nprim // cd.npair, -1
        ours, right = (r.reshape(shape).swapaxes(1, 2) for r in (ours, right))
    assert np.array_equal(ours[live], right[live])
    assert np.isnan(ours[~live]).mean() > 0.3


def test_large_l():
    """Above the highest L of a lane, r of parts is whole, in the order of ordinals."""
    ls = (5, 5, 5, 4)
    basis = plane_basis(ls, 0, nprim=1)
    with running("dmma16") as machine:
        engine = md4.Engine(basis, backend="cuda")
        even = host_array(engine.backend.r(*parts(engine, 0, 1)), "float64").copy()
        whole = host_array(engine.backend.r(engine.prepare([[0, 1]]), engine.prepare([[2, 3]])), "float64")
    assert machine.kernels == {"pair_primitives", "r_by_group"}
    assert np.array_equal(even, whole)
    assert np.array_equal(r_places(19, 0), np.arange(1540))
