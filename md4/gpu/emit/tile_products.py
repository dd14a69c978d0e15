"""Products of register tiles on FP64 tensor cores.

An intrinsic is one operation on a whole register tile, unrolled while code is generated, so that a tile lives in
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
"""

from dataclasses import dataclass
from functools import cache

from numba.cuda import types
from numba.cuda.extending import intrinsic

from md4.gpu.emit.instructions import (
    DOUBLE,
    I32,
    I64,
    aggregate,
    call_asm,
    element_address,
    fields,
    global_int,
    load_block,
    mma_16x8x8,
    mma_by_halves,
    shared_double,
    shared_int,
)
from md4.gpu.tiles import reach_levels


def tile_kind(rows8, nt):
    """Numba type of a tile."""
    return types.UniTuple(types.float64, 2 * rows8 * nt)


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


def merge(builder, values):
    """Phi nodes in the current block of lists of doubles [(list, block), ...] that come into it."""
    merged = []
    for n in range(len(values[0][0])):
        phi = builder.phi(DOUBLE)
        for numbers, block in values:
            phi.add_incoming(numbers[n], block)
        merged.append(phi)
    return merged


def by_levels(builder, c, reach, step, count, multiply):
    """Products of as many blocks as `reach` counts, in units of `step`; multiply(c, n) takes the first n of `count`.

    Straight code for every level of `reach_levels`: with branches in between, operands are not fetched ahead.
    """
    results, levels, after = [], reach_levels(count), builder.append_basic_block()
    for n, lower in zip(levels, [*levels[1:], None]):
        if lower is not None:
            here, further = builder.append_basic_block(), builder.append_basic_block()
            builder.cbranch(builder.icmp_signed(">", reach, I32(lower * step)), here, further)
            builder.position_at_end(here)
        sums = list(c)
        multiply(sums, n)
        results.append((sums, builder.block))
        builder.branch(after)
        if lower is not None:
            builder.position_at_end(further)
    builder.position_at_end(after)
    return merge(builder, results)


def tile_products(builder, rows8, nt, wide, turned):
    """(multiply, blocks): multiply(c, address, operand, n) adds the products of the first n of `blocks` pieces of H.

    `address` is the lane's place in H in shared memory. Pieces are fragments of 16 rows, 1024 bytes [k half][lane][row
    half], or, for a turned tile, blocks of 8 rows [row][k]. `wide`: m16n8k8 instructions, else m8n8k4.
    """
    mma = mma_16x8x8 if wide else mma_by_halves

    def by_fragments(c, address, b, count):
        for i in range(count):
            a = [x for half in range(2) for x in load_block(builder, address, 1024 * i + 512 * half)]
            for j in range(nt):
                n = 4 * (i * nt + j)
                c[n : n + 4] = mma(builder, c[n : n + 4], a, b[2 * j : 2 * j + 2])

    def by_blocks(c, address, a, count):
        for j in range(count):
            b = load_block(builder, address, 512 * j)
            for i in range(nt // 2):
                n, (a0, a2, a1, a3) = 4 * (i * rows8 + j), a[4 * i : 4 * i + 4]
                c[n : n + 4] = mma(builder, c[n : n + 4], [a0, a1, a2, a3], b)

    return (by_blocks, rows8) if turned else (by_fragments, rows8 // 2)


@cache
def make_product_step(rows8, nt, wide, turned):
    """Intrinsic (tile, address, operand, reach) -> the tile after one step of 8 in the inner index.

    `address`: the lane's place in H, see `tile_products`; `operand`: two doubles a block of columns; `reach`: blocks of
    8 rows of H that count, the others are zero.
    """
    tile, other = tile_kind(rows8, nt), types.UniTuple(types.float64, 2 * nt)

    @intrinsic
    def product_step(typingctx, acc, address, operand, reach):
        def codegen(context, builder, signature, args):
            c, operand = fields(builder, args[0], tile.count), fields(builder, args[2], 2 * nt)
            multiply, blocks = tile_products(builder, rows8, nt, wide, turned)
            c = by_levels(
                builder, c, args[3], rows8 // blocks, blocks, lambda c, count: multiply(c, args[1], operand, count)
            )
            return aggregate(builder, context.get_value_type(tile), c)

        return tile(tile, types.int32, other, types.int32), codegen

    return product_step


@cache
def make_staircase_products(rows8, nt, wide, turned, ahead, same=1):
    """Intrinsic that adds all steps of a product to a tile, [p|q] gathered, blocks of rows as far as they count.

    (tile, panel, panel_step, words, words_step, r, state, ends, steps) -> tile: addresses of the lane's place in shared
    memory and what they move by in bytes; `state` as of `make_column_state`; with the n-th of `reach_levels` blocks of
    rows the steps up to ends[n] are done, of `steps` in all. `ahead` gathers one step ahead of the products. `same`: so
    many equal parts of the columns have the same words, those of the first part, and r of their own.
    """
    tile, places = tile_kind(rows8, nt), types.UniTuple(types.int32, 2 * nt)

    @intrinsic
    def staircase_products(typingctx, acc, panel, panel_step, words, words_step, r, state, ends, steps):
        def codegen(context, builder, signature, args):
            c, state = fields(builder, args[0], tile.count), fields(builder, args[6], 2 * nt)
            panel, panel_step, words, words_step, r, steps = (args[n] for n in (1, 2, 3, 4, 5, 8))
            multiply, blocks = tile_products(builder, rows8, nt, wide, turned)
            table = element_address(context, builder, signature.args[7], args[7], I64(0), 4)

            def gather(words):
                return gathered(builder, r, words, state, same)

            numbers = [*c, *(gather(words) if ahead else [])]
            k, counters = I32(0), [panel, words]
            for n, level in enumerate(reach_levels(blocks)):
                end = global_int(builder, table, 4 * n)
                before = builder.block
                head, body, after = (builder.append_basic_block() for _ in range(3))
                builder.branch(head)
                builder.position_at_end(head)
                integers = [builder.phi(I32) for _ in range(3)]
                doubles = [builder.phi(DOUBLE) for _ in numbers]
                for phi, value in zip([*integers, *doubles], [k, *counters, *numbers]):
                    phi.add_incoming(value, before)
                builder.cbranch(builder.icmp_signed("<", integers[0], end), body, after)
                builder.position_at_end(body)
                (k, panel, words), sums = integers, doubles[: len(c)]
                following = builder.add(k, I32(1))
                next_words = builder.add(words, words_step)
                if ahead:
                    last = builder.icmp_signed("<", following, steps)
                    b, next_b = doubles[len(c) :], gather(builder.select(last, next_words, words))
                else:
                    b, next_b = gather(words), []
                multiply(sums, panel, b, level)
                values = [following, builder.add(panel, panel_step), next_words, *sums, *next_b]
                for phi, value in zip([*integers, *doubles], values):
                    phi.add_incoming(value, builder.block)
                builder.branch(head)
                builder.position_at_end(after)
                k, *counters = integers
                numbers = doubles
            return aggregate(builder, context.get_value_type(tile), numbers[: len(c)])

        i32 = types.int32
        return tile(tile, i32, i32, i32, i32, i32, places, ends, i32), codegen

    return staircase_products


def gathered(builder, r, words, state, same=1):
    """[p0|q] and [p1|q] of each fragment from r in shared memory; a word has the byte offsets of both.

    `same` as in `make_staircase_products`.
    """
    values, offsets = [], []
    for words_offset in state[: len(state) // same : 2]:
        word = shared_int(builder, builder.add(words, words_offset))
        offsets.append((builder.and_(word, I32(65535)), builder.lshr(word, I32(16))))
    for both, r_offset in zip(offsets * same, state[1::2]):
        address = builder.add(r, r_offset)
        values += [shared_double(builder, builder.add(address, offset)) for offset in both]
    return values


@cache
def make_load_blocks(nt, singly=False):
    """Intrinsic address -> the lane's doubles of `nt` successive 8 x 8 blocks in shared memory.

    `singly`: not the two of a block by one instruction. Where they are left operands, they are no neighbours among an
    instruction's registers, and were copied, often once for every instruction. (Volatile loads are not joined.)
    """
    operand = types.UniTuple(types.float64, 2 * nt)

    @intrinsic
    def load_blocks(typingctx, address):
        def codegen(context, builder, signature, args):
            values = []
            for j in range(nt):
                if singly:
                    for n in range(2):
                        text = f"ld.volatile.shared.f64 $0, [$1+{512 * j + 8 * n}];"
                        values.append(call_asm(builder, DOUBLE, [args[0]], text, "=d,r", effects=True))
                else:
                    values += load_block(builder, args[0], 512 * j)
            return aggregate(builder, context.get_value_type(operand), values)

        return operand(types.int32), codegen

    return load_blocks


@cache
def make_column_state(nt, in_turn):
    """Intrinsic that finds, for the `nt` column fragments from `column` on, the words and the r of their gather.

    (column, ncol, k_first, nq8, r_stride) -> (offset of words, offset of r) of each fragment in bytes, where column c
    stands for block c % nq8 of ket primitive c // nq8. Words are those of all blocks, or `in_turn` of the fragments
    one after the other. Columns beyond `ncol`, which is below 2^31, take the r of the last one.
    """
    state = types.UniTuple(types.int32, 2 * nt)

    @intrinsic
    def column_state(typingctx, column, ncol, k_first, nq8, r_stride):
        def codegen(context, builder, signature, args):
            column, ncol, k_first, nq8, r_stride = (builder.trunc(arg, I32) for arg in args)
            values = []
            for j in range(nt):
                c = builder.add(column, I32(j))
                c = builder.select(builder.icmp_signed("<", c, ncol), c, builder.sub(ncol, I32(1)))
                k = builder.udiv(c, nq8)
                words = builder.mul(builder.sub(c, builder.mul(k, nq8)), I32(128))
                offset = builder.mul(builder.sub(k, k_first), builder.mul(r_stride, I32(8)))
                values += [I32(128 * j) if in_turn else words, offset]
            return aggregate(builder, context.get_value_type(state), values)

        return state(*[types.int64] * 5), codegen

    return column_state


@cache
def make_gather(nt):
    """Intrinsic (address of r, address of words, state) -> [p0|q] and [p1|q] of each column fragment."""
    operand, kind = types.UniTuple(types.float64, 2 * nt), types.UniTuple(types.int32, 2 * nt)

    @intrinsic
    def gather(typingctx, r, words, state):
        def codegen(context, builder, signature, args):
            values = gathered(builder, args[0], args[1], fields(builder, args[2], 2 * nt))
            return aggregate(builder, context.get_value_type(operand), values)

        return operand(types.int32, types.int32, kind), codegen

    return gather
