"""Groups of LANES shell pairs, and the elements of H that are kept."""

import threading

import numpy as np
import pytest
from pair_lists import PAIRS, TRIANGLE, few_shells, mixed_basis

from md4.cpu.emit.vectors import LANES
from md4.cpu.groups import (
    BLOCK,
    GROUP_COST,
    ROWS_OF_TILE,
    WIDTHS,
    Groups,
    LaneLayout,
    aligned_empty,
    h_elements,
    h_structure,
    hermite_functions,
    lane_layout,
    make_groups,
    plain_layout,
    structure_of,
)
from md4.method.hermite import structure
from md4.shells.basis import Basis
from md4.shells.shell_pairs import shell_pairs

CLASSES = [
    (0, 0, True, 1, 1), (1, 0, True, 1, 1), (0, 2, True, 3, 2), (2, 1, True, 1, 2), (3, 3, True, 1, 1),
    (4, 3, True, 2, 1), (5, 5, True, 1, 1), (2, 2, False, 1, 1), (3, 4, False, 1, 2),
]  # fmt: skip


@pytest.mark.parametrize("shells", CLASSES)
def test_structure_as_arrays(shells):
    """Block by block of BLOCK functions, and in a block row by row; the rows of a tile have the same elements."""
    sequence, rows, columns = h_structure(*shells, False)
    nab = 1 + max(row for row, _ in structure(*shells))
    assert sorted(sequence.tolist()) == list(range(nab))
    block, place = np.divmod(np.repeat(np.arange(len(rows) - 1), np.diff(rows)), nab)
    assert (len(rows) - 1) % nab == 0
    tile_of = np.arange(nab) // ROWS_OF_TILE
    tile_of[nab // ROWS_OF_TILE * ROWS_OF_TILE :] = np.arange(nab, nab + nab % ROWS_OF_TILE)  # what is left, one by one
    needed = {(tile_of[sequence.tolist().index(row)], p) for row, p in structure(*shells)}
    expected = sorted((p // BLOCK, n, p) for n in range(nab) for tile, p in needed if tile == tile_of[n])
    assert list(zip(block.tolist(), place.tolist(), columns.tolist())) == expected


def test_tiles_hold_few_zeros():
    """Rows with similar zeros are neighbours."""
    for l, most in ((3, 1.1), (4, 1.03), (5, 1.03), (6, 1.02)):
        assert len(h_structure(l, l, True, 1, 1, False)[2]) < most * len(structure(l, l, True, 1, 1))
    one, many = (h_structure(2, 1, True, nctr, 2, False)[2] for nctr in (1, 3))
    assert len(many) == 3 * len(one)  # contracted functions have the same zeros


@pytest.fixture(scope="module", params=[PAIRS, TRIANGLE, PAIRS[:1], PAIRS[:LANES], PAIRS[: LANES + 1]], ids=len)
def pairs(request):
    """Pairs of very different numbers of primitive pairs, some of none."""
    return shell_pairs(mixed_basis(), request.param)


def layout_of(pairs, width):
    """The `LaneLayout` with `width` lanes for each pair."""
    counts = sorted(np.diff(pairs.start).tolist(), reverse=True)
    of_groups = [-(-most // width) for most in counts[:: LANES // width]]
    return LaneLayout(width, len(of_groups), sum(of_groups))


@pytest.mark.parametrize("width", WIDTHS)
def test_each_primitive_pair_has_a_lane(pairs, width):
    """One of its pair, in as many vectors as the first pair of the group needs."""
    groups, counts = Groups.of(pairs, layout_of(pairs, width)), np.diff(pairs.start)
    assert sorted(groups.order.tolist()) == list(range(len(pairs)))
    assert (np.diff(counts[groups.order]) <= 0).all()
    assert groups.per_group * groups.width == LANES
    assert groups.ngroup == len(groups.vectors) - 1 == -(-len(pairs) // groups.per_group)
    for g in range(groups.ngroup):
        here = groups.order[g * groups.per_group : (g + 1) * groups.per_group]
        vectors = groups.members[groups.vectors[g] : groups.vectors[g + 1]]
        assert len(vectors) == -(-counts[here].max() // width)
        expected = np.full((len(vectors), groups.per_group, width), -1)
        for place, pair in enumerate(here):
            for n, member in enumerate(range(pairs.start[pair], pairs.start[pair + 1])):
                expected[n // width, place, n % width] = member
        np.testing.assert_array_equal(vectors, expected.reshape(-1, LANES))
    assert len(groups.members) == layout_of(pairs, width).vectors


def test_the_layout_is_that_of_least_work(pairs):
    found, options = lane_layout(pairs), [layout_of(pairs, width) for width in WIDTHS]
    assert found in options
    assert found.vectors + GROUP_COST * found.ngroup == min(o.vectors + GROUP_COST * o.ngroup for o in options)
    assert plain_layout(pairs) == options[0]
    assert (Groups.of(pairs).width, Groups.of(pairs).ngroup) == found[:2]


def test_lists_together_are_as_each_alone():
    """Also lists of different classes, and with layouts that are given."""
    basis = mixed_basis()
    lists = [shell_pairs(basis, pairs) for pairs in (PAIRS, PAIRS[7:8], TRIANGLE, PAIRS[: LANES + 1])]
    lists.append(shell_pairs(few_shells(), [[2, 0], [3, 1]]))
    for layouts in (None, [plain_layout(pairs) for pairs in lists]):
        for n, made in enumerate(make_groups(lists, layouts)):
            alone = Groups.of(lists[n], None if layouts is None else layouts[n])
            for name, value in vars(alone).items():
                np.testing.assert_array_equal(getattr(made, name), value)
            assert made.lane_primitives.ctypes.data % 64 == 0


def test_few_pairs_take_several_lanes():
    """And many pairs, or those of one primitive pair each, one."""
    few = few_shells()
    assert lane_layout(shell_pairs(few, [[0, 1]])).width == LANES
    assert lane_layout(shell_pairs(few, [[2, 0], [3, 1]])).width > 1
    assert lane_layout(shell_pairs(few, [[0, 1]] * 3 * LANES)).width == 1
    one = Basis.from_arrays([0, 0], [[1.0]] * 2, [[1.0]] * 2, np.zeros((2, 3)))
    assert lane_layout(shell_pairs(one, [[1, 0]])).width == 1


def test_a_slice_has_a_layout_of_its_own(pairs):
    whole, part = lane_layout(pairs), pairs[: 1 + len(pairs) // 2]
    assert lane_layout(part) == lane_layout(shell_pairs(mixed_basis(), part.pairs))
    assert lane_layout(pairs) == whole


@pytest.mark.parametrize("width", WIDTHS)
def test_primitives_in_lanes(pairs, width):
    """Lanes without a primitive pair repeat that of the first lane, so that none holds what is no number."""
    groups, data = Groups.of(pairs, layout_of(pairs, width)), pairs.primitives
    np.testing.assert_array_equal(groups.primitives, np.column_stack([data.exponent, data.centre]))
    used = np.where(groups.members >= 0, groups.members, groups.members[:, :1])
    np.testing.assert_array_equal(groups.lane_primitives, groups.primitives[used].transpose(0, 2, 1))
    assert groups.lane_primitives.flags.c_contiguous
    assert groups.lane_primitives.ctypes.data % 64 == 0


def test_primitives_of_some_pairs(pairs):
    groups = Groups.of(pairs)
    for first, last in ((0, len(pairs)), (0, 1), (len(pairs) // 3, 1 + len(pairs) // 2), (0, 0)):
        found = groups.primitives_of(pairs.start, first, last)
        ends = [(pairs.start[n], pairs.start[n + 1]) for n in groups.order[first:last]]
        assert found.tolist() == [k for begin, end in ends for k in range(begin, end)]


def test_bytes(pairs):
    groups = Groups.of(pairs)
    arrays = (groups.order, groups.vectors, groups.members, groups.primitives, groups.lane_primitives)
    assert groups.nbytes == sum(array.nbytes for array in arrays)
    assert h_elements(pairs) == len(structure_of(pairs)[2])


@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 7, 4)])
def test_memory_begins_on_a_line_of_the_cache(shape):
    array = aligned_empty(shape)
    assert array.shape == shape
    assert array.ctypes.data % 64 == 0
    assert array.flags.c_contiguous
    assert array.flags.writeable


def test_threads_share_the_arrays_whose_addresses_loops_get():
    """If each of several threads made its own, all but one would be freed while loops read them."""
    asked = (h_structure, (6, 1, False, 1, 3, False)), (hermite_functions, (9, 0, True, True))  # by no other test
    for table, facts in asked:
        assert facts not in table.made
        found, together = [], threading.Barrier(4)

        def ask(table=table, facts=facts, found=found, together=together):
            together.wait(60)
            found.append(table(*facts))

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({id(one) for one in found}) == 1
