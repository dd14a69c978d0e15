"""Lists of shell pairs that are not alike, for tests of the CPU backend, and prepared pairs of them."""

from itertools import product

import numpy as np

from md4.engine import Engine
from md4.shells.basis import Basis
from md4.shells.shell import Shell


def mixed_basis(l=1):
    """Shells of one class (l, 2 contracted functions) with 1, 2, 3 primitives, one of them far from the others."""
    rng = np.random.default_rng(5)
    shells = [
        Shell(l, np.geomspace(0.4, 4, n) if n > 1 else np.array([0.7]), rng.uniform(0.2, 1, (n, 2)), centre)
        for n, centre in zip((1, 3, 3, 2, 2), rng.uniform(-1, 1, (5, 3)))
    ]
    shells.append(Shell(l, np.array([9.0]), np.ones((1, 2)), np.array([0.0, 0.0, 60.0])))
    return Basis(shells)


# All pairs of the shells of `mixed_basis`, and each unordered pair once.
PAIRS = np.array(list(product(range(6), repeat=2)))
TRIANGLE = PAIRS[PAIRS[:, 0] >= PAIRS[:, 1]]


def s_and_p(count_s, count_p, counts):
    """s shells and then p shells near each other, with numbers of primitives that repeat `counts`."""
    rng, ls = np.random.default_rng(2), [0] * count_s + [1] * count_p
    shells = [
        Shell(l, rng.uniform(0.3, 4, n), rng.uniform(0.2, 1, (n, 1)), centre)
        for l, n, centre in zip(ls, np.resize(counts, len(ls)), rng.uniform(-1, 1, (len(ls), 3)))
    ]
    return Basis(shells)


def two_classes():
    """12 s and 8 p shells with one to four primitives: most pairs take one lane each."""
    return s_and_p(12, 8, [1, 2, 3, 4])


def few_shells():
    """Two s and two p shells with four to six primitives: pairs take several lanes each."""
    return s_and_p(2, 2, [6, 4, 5])


def pairs_of(rows, columns):
    """All pairs of two ranges of shells; unordered ones if they are the same."""
    return np.array([(a, b) for a, b in product(rows, columns) if rows != columns or a >= b])


def random_pair(la, lb, pure, nctr_a, nctr_b, nprim=2):
    """An engine with two shells, contracted from `nprim` primitives each."""
    rng = np.random.default_rng([la, lb, nctr_a, nctr_b])
    shells = [
        Shell(l, rng.uniform(0.4, 3, nprim), rng.uniform(0.2, 1, (nprim, nctr)), rng.uniform(-1, 1, 3))
        for l, nctr in ((la, nctr_a), (lb, nctr_b))
    ]
    return Engine(Basis(shells, pure), backend="cpu")


def add_block(engine, target, pair):
    """Makes the block of a `ListPair`, and gives it to a `md4.cpu.targets.HostTensor`."""
    a, b = pair.bra.pairs, pair.ket.pairs
    block = engine.backend.scratch((len(a), len(b), a.na, a.nb, b.na, b.nb))
    engine.evaluate(pair.bra, pair.ket, block)
    target.add(block, pair.bra, pair.ket, engine.bra_basis, pair.same)
