"""Groups of LANES shell pairs, and the elements of H that are kept."""

import numpy as np
import pytest
from pair_lists import PAIRS, TRIANGLE, mixed_basis

from md4.cpu.emit.vectors import LANES
from md4.cpu.groups import Groups, aligned_empty, group_vectors, h_elements, h_structure
from md4.method.hermite import structure
from md4.shells.shell_pairs import shell_pairs

CLASSES = [
    (0, 0, True, 1, 1), (1, 0, True, 1, 1), (0, 2, True, 3, 2), (2, 1, True, 1, 2), (3, 3, True, 1, 1),
    (4, 3, True, 2, 1), (5, 5, True, 1, 1), (2, 2, False, 1, 1), (3, 4, False, 1, 2),
]  # fmt: skip


@pytest.mark.parametrize("shells", CLASSES)
def test_structure_as_arrays(shells):
    rows, columns = h_structure(*shells)
    owners = np.repeat(np.arange(len(rows) - 1), np.diff(rows))
    assert tuple(zip(owners.tolist(), columns.tolist())) == structure(*shells)


@pytest.fixture(scope="module", params=[PAIRS, TRIANGLE, PAIRS[:1], PAIRS[:LANES], PAIRS[: LANES + 1]], ids=len)
def pairs(request):
    """Pairs of very different numbers of primitive pairs, some of none."""
    return shell_pairs(mixed_basis(), request.param)


def test_each_primitive_pair_has_a_lane(pairs):
    """That of its pair, in as many vectors as the first pair of the group has primitive pairs."""
    groups, counts = Groups(pairs), np.diff(pairs.start)
    assert sorted(groups.order.tolist()) == list(range(len(pairs)))
    assert (np.diff(counts[groups.order]) <= 0).all()
    assert groups.ngroup == len(groups.vectors) - 1 == -(-len(pairs) // LANES)
    for g in range(groups.ngroup):
        here = groups.order[g * LANES : (g + 1) * LANES]
        vectors = groups.members[groups.vectors[g] : groups.vectors[g + 1]]
        assert len(vectors) == counts[here].max()
        for lane in range(LANES):
            pair = here[lane] if lane < len(here) else None
            own = list(range(pairs.start[pair], pairs.start[pair + 1])) if pair is not None else []
            assert vectors[:, lane].tolist() == own + [-1] * (len(vectors) - len(own))
    assert group_vectors(pairs) == len(groups.members)


def test_primitives_in_lanes(pairs):
    """Lanes without a primitive pair repeat that of the first lane, so that none holds what is no number."""
    groups, data = Groups(pairs), pairs.primitives
    np.testing.assert_array_equal(groups.primitives, np.column_stack([data.exponent, data.centre]))
    used = np.where(groups.members >= 0, groups.members, groups.members[:, :1])
    np.testing.assert_array_equal(groups.lane_primitives, groups.primitives[used].transpose(0, 2, 1))
    assert groups.lane_primitives.flags.c_contiguous
    assert groups.lane_primitives.ctypes.data % 64 == 0


def test_primitives_of_some_pairs(pairs):
    groups = Groups(pairs)
    for first, last in ((0, len(pairs)), (0, 1), (len(pairs) // 3, 1 + len(pairs) // 2), (0, 0)):
        found = groups.primitives_of(pairs.start, first, last)
        ends = [(pairs.start[n], pairs.start[n + 1]) for n in groups.order[first:last]]
        assert found.tolist() == [k for begin, end in ends for k in range(begin, end)]


def test_bytes(pairs):
    groups = Groups(pairs)
    arrays = (groups.order, groups.vectors, groups.members, groups.primitives, groups.lane_primitives)
    assert groups.nbytes == sum(array.nbytes for array in arrays)
    assert h_elements(pairs) == len(structure(*pairs.shell_class))


@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 7, 4)])
def test_memory_begins_on_a_line_of_the_cache(shape):
    array = aligned_empty(shape)
    assert array.shape == shape
    assert array.ctypes.data % 64 == 0
    assert array.flags.c_contiguous
    assert array.flags.writeable
