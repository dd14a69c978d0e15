"""The compiled steps 3 to 5 on the CPU: the recurrence in vectors, blocks, and diagonal blocks."""

from fractions import Fraction

import numpy as np
import pytest
from numba import njit
from pair_lists import PAIRS, TRIANGLE, mixed_basis, random_pair

from md4.cpu.emit.vectors import LANES, cube_side, load
from md4.cpu.integrals import STRAIGHT, recur
from md4.cpu.run import diagonal
from md4.engine import Engine
from md4.method.angular import hermite_triples, nherm
from md4.method.recurrence import r_step, recurrence_table
from md4.shells.basis import Basis, Shell
from md4.validation import oracle


@njit
def compiled_r(l, side, zeros, r_z, r_y, r_x, work, r):
    recur(l, side, zeros, load(r_z, 0), load(r_y, 0), load(r_x, 0), work, r)


def plain_r(l, zeros, centre):
    """r[t]^(0) by one step of the recurrence after the other, for any kind of numbers."""
    words = recurrence_table(l).tolist()
    old = [zeros[l]]
    for m in range(l - 1, -1, -1):
        old = [zeros[m]] + [r_step(*words[t], *centre, old, 0) for t in range(1, nherm(l - m))]
    return old


@pytest.mark.parametrize("l", [*range(STRAIGHT + 4), 12, 19, 32])
def test_recurrence_in_lanes(l):
    """Straight code for low orders, axis by axis for others; errors in units of the sum of the moduli of the terms."""
    rng = np.random.default_rng(l)
    zeros = rng.normal(size=(l + 1, LANES)) * (-1.4) ** np.arange(l + 1)[:, None]
    centre, side = rng.normal(size=(3, LANES)), cube_side(l)
    r = np.full((side**3, LANES), np.nan)
    compiled_r(l, side, zeros.ravel(), *centre, np.empty(2 * (l + 1) ** 2 * LANES), r.reshape(-1))
    z, y, x = hermite_triples(l).T
    found = r[(z * side + y) * side + x].T
    for lane in range(LANES) if l < 16 else (0, LANES - 1):
        numbers = zeros[:, lane].tolist(), centre[:, lane].tolist()
        exact = plain_r(l, *([Fraction(number) for number in these] for these in numbers))
        sizes = plain_r(l, *(abs(np.array(these)).tolist() for these in numbers))
        errors = [abs(float(Fraction(one) - two)) for one, two in zip(found[lane].tolist(), exact)]
        assert (np.array(errors) <= 2 * (l + 1) * np.finfo(float).eps * np.array(sizes)).all()


def test_highest_order():
    """L = 32 against the high-precision reference; the method itself loses digits of the smaller elements there."""
    rng = np.random.default_rng(1)
    one = np.ones((1, 1))
    basis = Basis([Shell(8, np.array([e]), one, rng.uniform(-1, 1, 3)) for e in rng.uniform(0.4, 3, 4)])
    block = Engine(basis, backend="cpu").compute([[0, 1]], [[2, 3]])[0, 0]
    elements = [tuple(map(int, np.unravel_index(abs(block).argmax(), block.shape))), (0, 16, 0, 16)]
    exact = oracle.eri(basis.shells, basis.pure, elements=elements).astype(float)
    errors = abs(np.array([block[e] for e in elements]) - exact) / abs(block).max()
    assert errors[0] < 1e-12
    assert errors[1] < 1e-11


@pytest.mark.parametrize("shells", [(0, 0, True, 1, 2), (2, 1, True, 2, 1), (3, 3, True, 1, 1), (2, 2, False, 1, 1)])
def test_diagonal_blocks_of_a_class(shells):
    """Each pair with itself: the bra is in lanes as the ket is, and its H has the sign of a ket."""
    engine = random_pair(*shells, nprim=3)
    assert_diagonal(engine, [[0, 1]] * (LANES + 1))


@pytest.mark.parametrize("l", [1, 2])
@pytest.mark.parametrize("pairs", [PAIRS, TRIANGLE[:3]], ids=len)
def test_diagonal_blocks_of_a_list(l, pairs):
    """Pairs of no, one or many primitive pairs side by side."""
    assert_diagonal(Engine(mixed_basis(l), backend="cpu"), pairs)


def assert_diagonal(engine, pairs):
    """The diagonal blocks of a list are those that are computed one by one."""
    prepared = engine.prepare(pairs)
    nab, order, found = prepared.pairs.nab, prepared.data.order, {}

    def keep(thread, items, tasks, lists, blocks):
        for _, n, group, place in items.tolist():
            assert n == group
            block = blocks[place : place + nab * nab * LANES].reshape(nab, nab, LANES).copy()
            found.update(zip(order[group * LANES :].tolist(), block.transpose(2, 0, 1)))

    diagonal(engine.backend, prepared, keep)
    assert sorted(found) == list(range(len(pairs)))
    for n, pair in enumerate(pairs):
        block = engine.compute([pair], [pair]).reshape(nab, nab)
        assert abs(found[n] - block).max() <= 1e-13 * abs(block).max()
