"""Products of register tiles on FP64 tensor cores.

A word is one operation on a whole register tile, unrolled while code is generated, so that a tile lives in
registers as one UniTuple.

A tile consists of fragments of 16 x 8, four doubles a lane: c0, c1 in row lane/4 and columns 2(lane%4)+{0,1}, c2, c3
eight rows below. For one step of 8 in the inner index k, the lane's left operand is a0..a3 = (row, k), (row+8, k),
(row, k+1), (row+8, k+1) with row = lane/4 and k = 2(lane%4), its right operand b0, b1 = (k, column), (k+1, column) with
column = lane/4. (The instruction calls these k indices lane%4 and lane%4 + 4; a sum does not care, if both operands
agree.) So 16 bytes of a right operand lie in a row of an 8 x 8 block [column][k], and a tile of columns is, as it
comes out, a right operand of the next product.

A tile of `rows8` blocks of 8 rows and `nt` blocks of 8 columns has H on the left, in `rows8 / 2` x `nt` fragments. A
turned tile has H on the right: its rows are on the side of a fragment that is 8 wide, in `nt / 2` x `rows8` fragments.
Either way the operand that is not H has two doubles of a lane for each block of columns, in 8 x 8 blocks [column][k].

Turned tiles may be `single`: then they are in FP32 and both operands in TF32, four bytes a number, in the same layout.
"""

from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise

from md4.gpu.emit.instructions import (
    global_int,
    load,
    mma_16x8x8,
    mma_by_halves,
    mma_tf32,
    shared_int,
    shared_real,
    shared_vector,
)
from md4.gpu.emit.values import (
    FP64,
    INT,
    OPEN,
    first_case,
    i32,
    i64,
    precision_of,
    repeat,
    select,
    tuple_of,
    word,
)
from md4.gpu.tiles import reach_levels


def tile_kind(rows8, nt, single=False):
    """Numba type of a tile."""
    return tuple_of(precision_of(single), 2 * rows8 * nt)


@dataclass(frozen=True)
class Lane:
    """What a lane holds of a tile: rows and columns from its first ones on, and where they are in the tuple.

    Attributes
    ----------
    rows8, nt : int
        Blocks of 8 rows and of 8 columns.
    turned : bool
    """

    rows8: int
    nt: int
    turned: bool = False

    @property
    def rows(self):
        """Rows after the lane's first."""
        return neighbours(self.rows8) if self.turned else range(0, 8 * self.rows8, 8)

    @property
    def columns(self):
        """Columns after the lane's first."""
        return range(0, 8 * self.nt, 8) if self.turned else neighbours(self.nt)

    def index(self, row, column):
        """Place in the tuple."""
        if self.turned:
            return 4 * (column // 16 * self.rows8 + row // 8) + 2 * (column // 8 % 2) + row % 8
        return 4 * (row // 16 * self.nt + column // 8) + 2 * (row // 8 % 2) + column % 8

    def place(self):
        """Function lane -> (its first row, its first column), to be compiled as a device function."""

        def straight(lane):
            return lane >> 2, 2 * (lane & 3)

        def turned(lane):
            return 2 * (lane & 3), lane >> 2

        return turned if self.turned else straight


def neighbours(blocks):
    """The first two numbers of every 8."""
    return [8 * n + e for n in range(blocks) for e in range(2)]


def by_levels(c, reach, step, count, multiply):
    """Products of as many blocks as `reach` counts, in units of `step`; multiply(c, n) takes the first n of `count`.

    Straight code for every level of `reach_levels`: with branches in between, operands are not fetched ahead.
    """

    def more_than(n):
        return lambda: reach > n * step

    def products(n):
        return lambda: multiply(list(c), n)

    levels = reach_levels(count)
    cases = [(more_than(lower), products(n)) for n, lower in pairwise(levels)]
    return first_case(reach.builder, [*cases, (None, products(levels[-1]))])


def by_number(number, cases, make):
    """The real numbers make(case) of the case of a `number` from 0 on, in code of their own.

    Successive cases that are equal share it.
    """
    last = [n for n, (case, following) in enumerate(zip(cases, [*cases[1:], None])) if case != following]
    conditions = [*(partial(number.__lt__, n + 1) for n in last[:-1]), None]
    return first_case(number.builder, [(here, partial(make, cases[n])) for here, n in zip(conditions, last)])


def block_of_8(address, j):
    """The lane's right operand from the j-th block of 8 rows [row][k] in shared memory."""
    return shared_vector(address, 512 * j)


def single_block_of_8(address, j):
    """As `block_of_8`, of floats, as integers."""
    return load("shared", address, 256 * j, INT, 2)


def tile_products(rows8, nt, wide, turned, right=block_of_8, single=False):
    """(multiply, blocks): multiply(c, address, operand, n) adds the products of the first n of `blocks` pieces of H.

    `address` is the lane's place in H in shared memory. Pieces are fragments of 16 rows, 1024 bytes [k half][lane][row
    half], or, for a turned tile, blocks of 8 rows, which right(address, j) loads. `wide`: m16n8k8 instructions, else
    m8n8k4.
    """
    mma = mma_tf32 if single else mma_16x8x8 if wide else mma_by_halves

    def by_fragments(c, address, b, count):
        for i in range(count):
            a = [x for half in range(2) for x in shared_vector(address, 1024 * i + 512 * half)]
            for j in range(nt):
                n = 4 * (i * nt + j)
                c[n : n + 4] = mma(c[n : n + 4], a, b[2 * j : 2 * j + 2])
        return c

    def by_blocks(c, address, a, count):
        for j in range(count):
            b = right(address, j)
            for i in range(nt // 2):
                n, (a0, a2, a1, a3) = 4 * (i * rows8 + j), a[4 * i : 4 * i + 4]
                c[n : n + 4] = mma(c[n : n + 4], [a0, a1, a2, a3], b)
        return c

    return (by_blocks, rows8) if turned else (by_fragments, rows8 // 2)


@cache
def make_product_step(rows8, nt, wide, turned):
    """Intrinsic (tile, address, operand, reach) -> the tile after one step of 8 in the inner index.

    `address`: the lane's place in H, see `tile_products`; `operand`: two doubles a block of columns; `reach`: blocks of
    8 rows of H that count, the others are zero.
    """
    tile, (multiply, blocks) = tile_kind(rows8, nt), tile_products(rows8, nt, wide, turned)

    @word(tile, tile, i32, tuple_of(FP64, 2 * nt), i32)
    def product_step(c, address, operand, reach):
        return by_levels(c, reach, rows8 // blocks, blocks, lambda c, count: multiply(c, address, operand, count))

    return product_step


@cache
def make_staircase_products(rows8, nt, wide, turned, ahead, same=1):
    """Intrinsic that adds all steps of a product to a tile, [p|q] gathered, blocks of rows as far as they count.

    (tile, panel, panel_step, words, words_step, r, state, ends, steps) -> tile: addresses of the lane's place in shared
    memory and what they move by in bytes; `state` as of `make_column_state`; with the n-th of `reach_levels` blocks of
    rows the steps up to ends[n] are done, of `steps` in all. `ahead` gathers one step ahead of the products. `same`: so
    many equal parts of the columns have the same words, those of the first part, and r of their own.
    """
    tile, (multiply, blocks) = tile_kind(rows8, nt), tile_products(rows8, nt, wide, turned)

    @word(tile, tile, i32, i32, i32, i32, i32, tuple_of(INT, 2 * nt), OPEN, i32)
    def staircase_products(c, panel, panel_step, words, words_step, r, state, ends, steps):
        table, size = ends.at(0, 4), len(c)

        def gather(words):
            return gathered(r, words, state, same)

        def step(values, level):
            k, panel, words, *numbers = values
            following, next_words, b = k + 1, words + words_step, numbers[size:]
            if ahead:
                next_b = gather(select(following < steps, next_words, words))
            else:
                b, next_b = gather(words), []
            sums = multiply(numbers[:size], panel, b, level)
            return [following, panel + panel_step, next_words, *sums, *next_b]

        values = [0, panel, words, *c, *(gather(words) if ahead else [])]
        for n, level in enumerate(reach_levels(blocks)):
            values = repeat(values, global_int(table, 4 * n), partial(step, level=level))
        return values[3 : 3 + size]

    return staircase_products


@cache
def make_load_words(nt, steps, single=False):
    """Intrinsic (words, column, ncol, count, lane) -> the lane's words of `nt` column fragments from `column` on.

    Columns beyond `ncol`, which is below 2^31, take those of the last one, and so do steps beyond `count`. If `single`,
    with the offsets of floats in place of those of doubles.
    """

    @word(tuple_of(INT, nt * steps), OPEN, *[i64] * 4)
    def load_words(words, column, ncol, count, lane):
        values, base = [], words.at(lane, 4)
        for j in range(nt):
            c = (column + j).i32
            here = base + select(c < ncol.i32, c, ncol.i32 - 1).u64 * 128
            for k in range(steps):
                # both offsets in it are multiples of 8
                values.append(global_int(here) >> int(single))
                here = here + select(count > k + 1, ncol * 128, 0)
        return values

    return load_words


@cache
def make_known_products(rows8, nt, wide, cases, single=False):
    """As `make_staircase_products` of a turned tile, in code without loops, for each of several known `ends`.

    (tile, words, panel, r, case) -> tile, with the words of `make_load_words`.
    """
    tile, most, right = tile_kind(rows8, nt, single), cases[-1][-1], single_block_of_8 if single else block_of_8
    (multiply, blocks), step = tile_products(rows8, nt, wide, True, right, single), (256 if single else 512) * rows8
    number = shared_int if single else shared_real

    @word(tile, tile, tuple_of(INT, nt * most), i32, i32, i32)
    def known_products(c, words, panel, r, case):
        def products(ends):
            sums = list(c)
            for k in range(ends[-1]):
                level = next(level for level, end in zip(reach_levels(blocks), ends) if k < end)
                both = words[k::most]
                b = [number(r + offset) for this in both for offset in (this & 65535, this >> 16)]
                sums = multiply(sums, panel + step * k, b, level)
            return sums

        return by_number(case, cases, products)

    return known_products


def gathered(r, words, state, same=1):
    """[p0|q] and [p1|q] of each fragment from r in shared memory; a word has the byte offsets of both.

    `same` as in `make_staircase_products`.
    """
    values, offsets = [], []
    for words_offset in state[: len(state) // same : 2]:
        both = shared_int(words + words_offset)
        offsets.append((both & 65535, both >> 16))
    for both, r_offset in zip(offsets * same, state[1::2]):
        address = r + r_offset
        values += [shared_real(address + offset) for offset in both]
    return values


@cache
def make_load_blocks(nt, singly=False):
    """Intrinsic address -> the lane's doubles of `nt` successive 8 x 8 blocks in shared memory.

    `singly`: not the two of a block by one instruction. Where they are left operands, they are no neighbours among an
    instruction's registers, and were copied, often once for every instruction. (Volatile loads are not joined.)
    """

    @word(tuple_of(FP64, 2 * nt), i32)
    def load_blocks(address):
        if singly:
            return [load("volatile.shared", address, 512 * j + 8 * n)[0] for j in range(nt) for n in range(2)]
        return [x for j in range(nt) for x in shared_vector(address, 512 * j)]

    return load_blocks


@cache
def make_column_state(nt, in_turn):
    """Intrinsic that finds, for the `nt` column fragments from `column` on, the words and the r of their gather.

    (column, ncol, k_first, nq8, r_stride) -> (offset of words, offset of r) of each fragment in bytes, where column c
    stands for block c % nq8 of ket primitive c // nq8. Words are those of all blocks, or `in_turn` of the fragments
    one after the other. Columns beyond `ncol`, which is below 2^31, take the r of the last one.
    """

    @word(tuple_of(INT, 2 * nt), *[i64] * 5)
    def column_state(*args):
        column, ncol, k_first, nq8, r_stride = (arg.i32 for arg in args)
        values = []
        for j in range(nt):
            c = column + j
            c = select(c < ncol, c, ncol - 1)
            k = c // nq8
            words, offset = (c - k * nq8) * 128, (k - k_first) * (r_stride * 8)
            values += [128 * j if in_turn else words, offset]
        return values

    return column_state


@cache
def make_gather(nt):
    """Intrinsic (address of r, address of words, state) -> [p0|q] and [p1|q] of each column fragment."""
    return word(tuple_of(FP64, 2 * nt), i32, i32, tuple_of(INT, 2 * nt))(gathered)
