"""Blocks on the CPU: the highest order, and diagonal blocks."""

import numpy as np
import pytest
from pair_lists import PAIRS, TRIANGLE, mixed_basis, random_pair

from md4.cpu.emit.vectors import LANES
from md4.cpu.groups import Groups, plain_layout
from md4.cpu.h_matrices import make_h
from md4.cpu.run import OwnList, diagonal
from md4.engine import Engine
from md4.shells.basis import Basis
from md4.shells.shell import Shell
from md4.validation import oracle


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
    pairs_made = engine.prepare(pairs).pairs
    groups = Groups.of(pairs_made, plain_layout(pairs_made))
    prepared = OwnList(pairs_made, groups, make_h(pairs_made, groups, engine.backend.memory))
    nab, order, found = pairs_made.nab, groups.order, {}

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
