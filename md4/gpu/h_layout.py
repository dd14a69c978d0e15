"""How H matrices lie in memory on the GPU: a form for each kind of kernel that reads them.

A form says which element (row ab, Hermite function p) of H stands at each position. Forms for tensor cores are padded
by zeros to whole blocks of 8, and most of them have rows and Hermite functions in the order of `md4.gpu.staircases`, in
which the zeros of H stand together.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

from md4.errors import UnsupportedError
from md4.gpu.staircases import gather_order, hermite_order, row_table
from md4.gpu.tiles import blocks_of_8, panel_rows
from md4.method.angular import nherm
from md4.method.mirror import class_elements, part_rows

# More rows than this would exceed `md4.gpu.staircases.full_reach`.
MOST_ROW_BITS = 20


@dataclass(frozen=True, eq=False)
class HForm:
    """A form of the H matrices of a list of shell pairs. Each is one object, which is a quick key.

    Attributes
    ----------
    layout : {'fragments', 'blocks', 'matrix', 'by row', 'by column'}
        'fragments': a left operand, [p block of 8][fragment of 16 rows][p half][lane][row half].
        'blocks': a right operand, [p block of 8][row block of 8][8 rows][8 p].
        'matrix': [row][p] as it is, without padding.
        'by row', 'by column': only the elements that symmetry lets be other than zero, ordered by row or by p. With
        'by column', primitive pairs are in slots (`md4.gpu.pair_layout`), and slots run fastest.
    sign : bool
        Elements carry (-1)^|q|, as those of a ket do.
    rows : {'natural', 'staircase', 'turned'}
        Order of the rows; 'turned' is that of staircases, too, but padded for tiles with H as right operand.
    inner : {'natural', 'staircase', 'gather'}
        Order of the Hermite functions; 'gather' is `gather_order` of staircases. The natural order of 'fragments' and
        'blocks' begins with an even ordinal.
    single : bool
        Elements are floats.
    rounded : bool
        These are rounded to TF32.
    """

    layout: str
    sign: bool
    rows: str = "natural"
    inner: str = "natural"
    single: bool = False
    rounded: bool = False

    def __str__(self):
        marks = ["sign" if self.sign else "", "single" if self.single else "", "rounded" if self.rounded else ""]
        parts = [self.layout, *marks, f"rows {self.rows}", f"inner {self.inner}"]
        return ", ".join(part for part in parts if part and not part.endswith("natural"))


# Plain products, and weights of ket primitives where H has one column.
BRA_MATRIX, KET_MATRIX = HForm("matrix", False), HForm("matrix", True)
# One product: left operand in natural order.
BRA_FLAT = HForm("fragments", False)
# Step 4, as left operand or, turned, as right operand.
BRA_STAIRCASE = HForm("fragments", False, "staircase", "gather")
BRA_TURNED = HForm("blocks", False, "turned", "gather")
# The same in TF32.
BRA_SINGLES = HForm("blocks", False, "turned", "gather", single=True, rounded=True)
# Step 5: left operand whose rows are contiguous in the result, and right operand.
KET_FLAT = HForm("fragments", True, "natural", "staircase")
KET_TURNED = HForm("blocks", True, "turned", "staircase")
# J in the Hermite basis.
KET_BLOCKS = HForm("blocks", True)
# K of derivatives.
KET_STEPS = HForm("blocks", True, "natural", "staircase")
# A thread a quartet.
BRA_ELEMENTS, KET_ELEMENTS = HForm("by row", False), HForm("by column", True)
KET_SINGLES = HForm("by column", True, single=True)


def panel_row(n):
    """Row within its fragment of 16 of element n of a left operand (device function)."""
    return ((n >> 3) & 7) + 8 * (n & 1)


def panel_inner(n):
    """Inner index within its block of 8 of element n of a left operand (device function)."""
    return 2 * ((n >> 1) & 3) + ((n >> 6) & 1)


def form_rows(nab, form):
    """Blocks of 8 rows that a form of `nab` rows is padded to."""
    turned = form.rows == "turned"
    return blocks_of_8(nab) if form.layout == "blocks" and not turned else panel_rows(nab, turned)


def blocks_of_h(count, single):
    """Blocks of 8 x 8 that so many of a primitive pair are padded to: an even number of floats, for whole copies."""
    return (count + 1) & -2 if single else count


def form_size(pairs, form):
    """Numbers of the H of one primitive pair of a list in a form."""
    if form.layout.startswith("by"):
        return len(listed_elements(form, pairs.h_class))
    if form.layout == "matrix":
        return pairs.nab * pairs.nherm
    return blocks_of_h(blocks_of_8(pairs.nherm) * form_rows(pairs.nab, form), form.single) * 64


def even(n):
    """The even number that is not above n: rows of r are copied by 16 bytes."""
    return n & ~1


def row_bits(l):
    """Bits for the row in `form_positions`: those of 31 that Hermite functions up to degree `l` leave, 20 at most."""
    return min(MOST_ROW_BITS, 31 - int(nherm(l) - 1).bit_length())


def check_rows(basis, pairs):
    """UnsupportedError for a checked list whose shell pairs have more function pairs than H may have rows."""
    (la, nctr_a), (lb, nctr_b) = basis.classes[pairs[0]].tolist()
    nab, most = nctr_a * basis.ncomp(la) * nctr_b * basis.ncomp(lb), 1 << row_bits(la + lb)
    if nab > most:
        a, b = pairs[0].tolist()
        raise UnsupportedError(
            f"shells {a} (l = {la}, {nctr_a} contracted functions) and {b} (l = {lb}, {nctr_b}) have {nab} function "
            f"pairs, but on a GPU a shell pair may have {most}; divide their contracted functions among several "
            "shells, or use backend='cpu'."
        )


def check_h(facts, e_bytes, room):
    """UnsupportedError for `ListFacts`, in particular of derivatives, that have more rows than H may have.

    So, too, if the `e_bytes` of their E coefficients do not fit the `room` of shared memory.
    """
    if facts.nab > 1 << row_bits(facts.l) or e_bytes > room:
        raise UnsupportedError(
            f"{'derivatives of ' if facts.derivatives else ''}pairs of shells of l = {facts.la} and {facts.lb} with "
            f"{facts.na} and {facts.nb} functions are beyond what this GPU makes; use backend='cpu'."
        )


@cache
def listed_elements(form, facts):
    """The elements (row, p) of a form that lists them, in its order, padded by -1 to an even number; shape (n, 2)."""
    row, p = class_elements(facts).T
    order = np.lexsort((row, p) if form.layout == "by column" else (p, row))
    return np.pad(np.stack([row, p], axis=1)[order], ((0, len(row) % 2), (0, 0)), constant_values=-1)


@cache
def form_positions(form, facts):
    """Shape (form_size,), int32: row + 2^`row_bits` p of every position, -1 where the form is padded.

    `facts` are those of a list's `h_class`. Parts have forms for step 4 and step 5 only, in the orders of staircases;
    the rows here are those of all of the class.
    """
    nab, nh, l, first, mirror = facts.nab, facts.nherm, facts.l, facts.first, facts.mirror
    if form.layout.startswith("by"):
        rows, p = listed_elements(form, facts).T
    elif form.layout == "matrix":
        rows, p = np.divmod(np.arange(nab * nh), nh)
        p = p + first
    else:
        rows8 = form_rows(nab, form)
        blocks = blocks_of_8(nh) * rows8
        n = np.arange(64 * blocks_of_h(blocks, form.single))
        if form.layout == "blocks":
            rows, p = (n >> 6) % rows8 * 8 + ((n >> 3) & 7), (n >> 6) // rows8 * 8 + (n & 7)
        else:
            rows, p = (n >> 7) % (rows8 // 2) * 16 + panel_row(n), (n >> 7) // (rows8 // 2) * 8 + panel_inner(n)
        if form.inner == "natural":
            p = p + even(first)
        else:
            order = (gather_order if form.inner == "gather" else hermite_order)(l, first, mirror)
            p = np.append(order, np.repeat(-1, 8))[p]
        if form.rows != "natural":
            rows = row_table(facts, rows8)[rows]
    padding = (rows < 0) | (rows >= nab) | (p < first) | (p >= nherm(l))
    if mirror is not None:
        rows = part_rows(*facts.shell_class, *mirror)[np.where(padding, 0, rows)]
    return np.where(padding, -1, rows + (p << row_bits(l))).astype(np.int32)
