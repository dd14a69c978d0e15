"""Step 1 on the CPU against `md4.method.hermite`, which runs as plain Python."""

import numpy as np
import pytest
from pair_lists import PAIRS, mixed_basis, random_pair
from plain_h import plain_h

from md4.cpu.groups import Groups, structure_of
from md4.cpu.h_matrices import BOTH, make_h
from md4.method.angular import hermite_triples
from md4.shells.shell_pairs import shell_pairs
from md4.support.memory import HostMemory

CLASSES = [
    (0, 0, True, 1, 1), (1, 0, True, 2, 1), (0, 2, True, 1, 3), (2, 1, True, 2, 2), (3, 2, True, 1, 1),
    (4, 3, True, 1, 1), (5, 4, True, 1, 1), (1, 1, False, 1, 2), (2, 2, False, 2, 1), (3, 3, False, 1, 1),
]  # fmt: skip


def former_h(pairs):
    """(nprim, elements): the elements one by one, with contraction coefficients, in the order of `h_structure`."""
    la, lb, pure, nctr_a, nctr_b = pairs.shell_class
    ncomp_b, data, found = pairs.nb // nctr_b, pairs.primitives, []
    sequence, rows, p = structure_of(pairs)
    row = np.repeat(sequence[np.arange(len(rows) - 1) % pairs.nab], np.diff(rows))
    a, b = np.divmod(row, pairs.nb)
    (ca, ma), (cb, mb) = np.divmod(a, pairs.na // nctr_a), np.divmod(b, ncomp_b)
    row = ma * ncomp_b + mb
    for k in range(pairs.nprim):
        angular = plain_h(la, lb, pure, data.exponent[k], data.pa[k], data.pb[k], zip(row.tolist(), p.tolist()))
        found.append(data.coef_a[k, ca] * data.coef_b[k, cb] * angular)
    return np.array(found)


def assert_lanes(pairs, groups, h):
    """The lanes hold the same numbers with (-1)^|p|, and zeros where there is no primitive pair."""
    signs = (-1.0) ** hermite_triples(pairs.l).sum(axis=1)[structure_of(pairs)[2]]
    lanes, used = h.lanes.transpose(0, 2, 1), groups.members >= 0
    np.testing.assert_array_equal(lanes[used], h.flat[groups.members[used]] * signs)
    assert not lanes[~used].any()


@pytest.mark.parametrize("shells", CLASSES)
def test_elements_are_those_of_plain_python(shells):
    prepared = random_pair(*shells).prepare([[0, 1]])
    h, expected = prepared.h(BOTH), former_h(prepared.pairs)
    assert h.flat.shape == expected.shape
    np.testing.assert_allclose(h.flat, expected, rtol=0, atol=1e-14 * abs(expected).max())
    np.testing.assert_array_equal(h.flat == 0.0, expected == 0.0)  # what cancels is exactly zero in both
    assert_lanes(prepared.pairs, prepared.data, h)


def test_lists_with_empty_lanes(two_threads):
    """Pairs with no, one and many primitive pairs; the threads make what one thread makes."""
    pairs = shell_pairs(mixed_basis(), PAIRS)
    groups = Groups.of(pairs)
    assert (groups.members < 0).any()
    h = make_h(pairs, groups, HostMemory())
    assert_lanes(pairs, groups, h)
    for n, (first, last) in enumerate(zip(pairs.start[:-1], pairs.start[1:])):
        one = pairs[n : n + 1]
        if first < last:
            np.testing.assert_array_equal(make_h(one, Groups.of(one), HostMemory()).flat, h.flat[first:last])
    assert h.nbytes == 8 * (h.flat.size + h.lanes.size)
