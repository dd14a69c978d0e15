"""Staircases of H: the orders, what is left out, and the operands that the tensor-core kernels read."""

from itertools import product

import numpy as np
import pytest
from plain_h import plain_h

from md4.gpu.gather_words import gather_words, words_in_turn
from md4.gpu.h_layout import (
    BRA_FLAT,
    BRA_STAIRCASE,
    BRA_TURNED,
    KET_BLOCKS,
    KET_FLAT,
    KET_TURNED,
    even,
    form_positions,
    form_rows,
    panel_inner,
    panel_row,
    row_bits,
)
from md4.gpu.r_layout import r_places
from md4.gpu.staircases import (
    depths,
    full_depths,
    full_reach,
    gather_order,
    hermite_order,
    level_ends,
    reach,
    row_order,
    row_table,
)
from md4.gpu.tiles import MOST_COLUMNS, STAGES, blocks_of_8, reach_levels, turned_split
from md4.method.angular import hermite_triples, ncart, nherm, packed_hermite, sum_ordinal
from md4.method.hermite import structure
from md4.method.mirror import class_elements, part_functions, part_rows, r_count
from md4.shells.shell_pairs import list_facts, part_facts


def facts_of(la, lb, pure, nctr_a, nctr_b, single=False, mirror=None):
    """`ListFacts` of a class, or of its even or odd part."""
    na, nb = (nctr * (2 * l + 1 if pure else ncart(l)) for l, nctr in ((la, nctr_a), (lb, nctr_b)))
    whole = list_facts(la, lb, pure, nctr_a, nctr_b, na, nb, 1, single)
    return part_facts(whole, *mirror) if mirror else whole


CLASSES = [facts_of(*shells) for shells in (
    (0, 0, True, 1, 1), (2, 1, True, 1, 1), (2, 2, True, 1, 1), (3, 3, True, 2, 1), (5, 4, True, 1, 1),
    (6, 6, True, 1, 1), (2, 2, False, 1, 1), (4, 4, False, 1, 2), (2, 0, True, 1, 1, True), (5, 0, True, 2, 1, True),
    (9, 0, True, 1, 1, True), (3, 0, False, 1, 1, True),
)]  # fmt: skip
PARTS = [
    facts_of(*shells, mirror=(axis, parity))
    for shells in [(1, 0, True, 1, 1), (2, 1, True, 1, 2), (5, 4, True, 1, 1), (2, 2, False, 1, 1)]
    for axis, parity in product(range(3), range(2))
]
STAIRS = CLASSES + PARTS


def rows_of(shells):
    return len(row_order(shells))


def functions_of(shells):
    """Ordinals of the Hermite functions of a class, or of a part."""
    return part_functions(shells.l, *shells.mirror) if shells.mirror else np.arange(shells.first, nherm(shells.l))


@pytest.mark.parametrize("l", [0, 1, 4, 9])
def test_orders_hold_every_function_once(l):
    for order in (hermite_order(l), gather_order(l)):
        assert len(order) == 8 * blocks_of_8(nherm(l))
        assert sorted(order[order >= 0].tolist()) == list(range(nherm(l)))
    z = hermite_triples(l)[hermite_order(l)[: nherm(l)], 0]
    assert (np.diff(z) >= 0).all()
    for one, other in zip(hermite_order(l).reshape(-1, 8), gather_order(l).reshape(-1, 8)):
        assert set(one) == set(other)
        assert other.tolist() == one[[0, 4, 1, 5, 2, 6, 3, 7]].tolist()


@pytest.mark.parametrize("shells", PARTS)
def test_orders_of_parts_hold_their_functions_once(shells):
    l, mirror = shells.l, shells.mirror
    for order in (hermite_order(l, 0, mirror), gather_order(l, 0, mirror)):
        assert len(order) == 8 * blocks_of_8(len(functions_of(shells)))
        assert sorted(order[order >= 0].tolist()) == functions_of(shells).tolist()
    order = hermite_order(l, 0, mirror)
    assert (np.diff(hermite_triples(l)[order[order >= 0], 0]) >= 0).all()


@pytest.mark.parametrize("shells", STAIRS)
def test_nothing_is_left_out_that_counts(shells):
    """Beyond the reach of a block there are no elements; and there is none to spare."""
    elements = {(row, p) for row, p in class_elements(shells)}
    rows = row_table(shells, blocks_of_8(rows_of(shells)))
    order = hermite_order(shells.l, shells.first, shells.mirror)
    assert sorted(rows[rows >= 0].tolist()) == list(range(rows_of(shells)))
    found = []
    for n_block, count in enumerate(reach(shells)):
        functions = order[8 * n_block : 8 * n_block + 8]
        blocks = [rows[n : n + 8] for n in range(0, len(rows), 8)]
        counts = [any((r, p) in elements for r in block for p in functions) for block in blocks]
        assert not any(counts[count:])
        found.append(max((n + 1 for n, c in enumerate(counts) if c), default=0))
    assert (np.diff(reach(shells)) <= 0).all()
    assert reach(shells).tolist() == [max(found[n:]) for n in range(len(found))]


@pytest.mark.parametrize(("la", "lb", "pure"), [(2, 2, True), (4, 3, True), (6, 6, True), (3, 2, False)])
def test_h_is_zero_beyond_the_stairs(la, lb, pure):
    shells = facts_of(la, lb, pure, 1, 1)
    rows, order = row_order(shells), hermite_order(la + lb)
    left_out = [
        (row, p)
        for block, count in enumerate(reach(shells))
        for row, p in product(rows[8 * count :].tolist(), order[8 * block : 8 * block + 8].tolist())
        if p >= 0
    ]
    assert left_out
    assert not plain_h(la, lb, pure, 1.3, *np.random.default_rng(la + 7 * lb).normal(size=(2, 3)), left_out).any()


def test_what_stairs_save():
    for l, most in ((2, 0.75), (3, 0.78), (4, 0.81), (5, 0.80), (6, 0.80)):
        shells = facts_of(l, l, True, 1, 1)
        found = reach(shells)
        assert found.sum() <= most * len(found) * blocks_of_8(rows_of(shells))


@pytest.mark.parametrize("shells", STAIRS)
def test_tables_of_blocks_of_rows(shells):
    """Depths and the ends of levels say the same as the reach."""
    found = reach(shells)
    row_blocks, rows8 = turned_split(rows_of(shells))
    for block, depth in enumerate(depths(shells, rows8, row_blocks)):
        assert depth == max(sum(count > block * rows8 for count in found), min(STAGES - 1, len(found)))
    for size in (1, 2):
        blocks = -(-blocks_of_8(rows_of(shells)) // size)
        ends = level_ends(shells, blocks, size)
        assert ends[-1] == len(found)
        for k, count in enumerate(found):
            level = reach_levels(blocks)[int(np.argmax(ends > k))]
            assert level * size >= count
            lower = [n for n in reach_levels(blocks) if n < level]
            assert not lower or lower[0] * size < count
    assert (full_reach(shells) >= blocks_of_8(rows_of(shells))).all()
    assert full_depths(shells, rows8, row_blocks).tolist() == [len(found)] * row_blocks


@pytest.mark.parametrize("count", [1, 2, 6, 7, 11])
def test_levels_begin_at_all_and_end_at_one_or_two(count):
    levels = reach_levels(count)
    assert levels[0] == count
    assert levels == sorted(set(levels), reverse=True)
    assert levels[-1] <= 2


@pytest.mark.parametrize("form", [BRA_STAIRCASE, BRA_TURNED, KET_FLAT, KET_TURNED], ids=str)
@pytest.mark.parametrize("shells", STAIRS)
def test_forms_hold_every_element_where_kernels_look_for_it(form, shells):
    """Fragment by fragment, as lanes read them; those of a part are named by their rows in the whole class."""
    l, first, nab, mirror = shells.l, shells.first, rows_of(shells), shells.mirror
    positions, rows8 = form_positions(form, shells), form_rows(nab, form)
    inner = (hermite_order if form.sign else gather_order)(l, first, mirror)
    whole_rows = np.arange(nab) if mirror is None else part_rows(*shells.shell_class, *mirror)
    rows = np.pad(np.arange(nab), (0, 8 * rows8 - nab), constant_values=-1)
    if form.rows != "natural":
        rows = row_table(shells, rows8)
    for n, position in enumerate(positions):
        if form.rows == "turned":
            block, row, k = n // 64 // rows8, n // 64 % rows8 * 8 + n // 8 % 8, n % 8
        else:
            block, row, k = n // 128 // (rows8 // 2), n // 128 % (rows8 // 2) * 16 + panel_row(n), panel_inner(n)
        wanted = rows[row], inner[8 * block + k]
        assert position == (-1 if min(wanted) < 0 else whole_rows[wanted[0]] + (int(wanted[1]) << row_bits(l)))
    assert len({p for p in positions.tolist() if p >= 0}) == nab * len(functions_of(shells))


@pytest.mark.parametrize("form", [BRA_FLAT, KET_BLOCKS])
@pytest.mark.parametrize("shells", CLASSES)
def test_the_natural_order_begins_with_an_even_ordinal(form, shells):
    """Every element is there once, where the product with r as it lies in memory looks for it."""
    nab, first, l = rows_of(shells), shells.first, shells.l
    inner = even(first) + np.arange(8 * blocks_of_8(nherm(l) - first))
    rows8, found = form_rows(nab, form), form_positions(form, shells)
    for n, position in enumerate(found):
        if form.layout == "blocks":
            row, p = n // 64 % rows8 * 8 + n // 8 % 8, inner[n // 64 // rows8 * 8 + n % 8]
        else:
            row, p = n // 128 % (rows8 // 2) * 16 + panel_row(n), inner[n // 128 // (rows8 // 2) * 8 + panel_inner(n)]
        assert position == (row + (int(p) << row_bits(l)) if row < nab and first <= p < nherm(l) else -1)
    assert np.count_nonzero(found >= 0) == nab * (nherm(l) - first)


def test_functions_of_single_shells():
    """Spherical ones have those of degree l, a component its own monomials; Cartesian ones every second power."""
    assert [facts_of(l, 0, True, 1, 1, True).first for l in range(4)] == [0, 1, 4, 10]
    assert [facts_of(l, 0, False, 1, 1, True).first for l in range(4)] == [0, 1, 0, 1]
    assert {p for _, p in structure(3, 0, True, 1, 1, True)} == set(range(10, 20))
    of_s, of_d = (len(structure(l, 0, True, 1, 1, True)) for l in (0, 2))
    assert (of_s, of_d) == (1, 8)


@pytest.mark.parametrize(("l", "pure"), [(1, True), (4, True), (7, True), (2, False), (5, False)])
def test_h_of_single_shells_is_zero_elsewhere(l, pure):
    """In plain Python, by the coefficients of a pair with an s shell whose exponent is 0."""
    inside = set(structure(l, 0, pure, 1, 1, True))
    every = list(np.ndindex(max(row for row, _ in inside) + 1, nherm(l)))
    found = dict(zip(every, plain_h(l, 0, pure, 1.3, np.zeros(3), np.ones(3), every)))
    assert {element for element, value in found.items() if value != 0.0} == inside


@pytest.mark.parametrize(
    ("l_bra", "l_ket", "firsts", "mirror"),
    [
        (0, 0, (0, 0), None),
        (1, 2, (0, 0), None),
        (4, 3, (0, 10), None),
        (2, 5, (4, 35), None),
        (1, 1, (0, 0), (2, 1)),
        (2, 4, (0, 0), (0, 0)),
        (4, 3, (0, 0), (1, 1)),
        (10, 9, (0, 0), (0, 1)),
    ],
)
def test_words_lead_to_r(l_bra, l_ket, firsts, mirror):
    """Of all functions, and of the parts of a class in each order of even r; of parts with L > 18 to whole r."""
    words, axis, places = gather_words(l_bra, l_ket, *firsts, mirror), mirror and mirror[0], []
    p_blocks, q_blocks = (
        blocks_of_8(nherm(l) - first if mirror is None else len(part_functions(l, *mirror)))
        for l, first in zip((l_bra, l_ket), firsts)
    )
    found = words.view(np.uint32).reshape(p_blocks, q_blocks, 8, 4)
    p_words, q_words = packed_hermite(l_bra), packed_hermite(l_ket)
    for (i, j, q, lane), word in np.ndenumerate(found):
        this_q = hermite_order(l_ket, firsts[1], mirror)[8 * j + q]
        for half in range(2):
            this_p = gather_order(l_bra, firsts[0], mirror)[8 * i + 2 * lane + half]
            offset = (int(word) >> (16 * half)) & 65535
            pair = [int(w[n]) if n >= 0 else 0 for w, n in ((p_words, this_p), (q_words, this_q))]
            assert offset == 8 * r_places(l_bra + l_ket, axis)[sum_ordinal(*pair)]
            places += [offset // 8] if min(this_p, this_q) >= 0 else []
    assert max(places) < r_count(l_bra + l_ket, mirror is not None and l_bra + l_ket <= 18)
    turned = words_in_turn(l_bra, l_ket, *firsts, mirror).reshape(p_blocks, q_blocks + MOST_COLUMNS, 16)
    np.testing.assert_array_equal(turned, words[:, np.arange(q_blocks + MOST_COLUMNS) % q_blocks])
