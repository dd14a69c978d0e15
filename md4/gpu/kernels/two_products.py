"""Steps 4 and 5 on FP64 tensor cores, a kernel for each, for large classes.

Both are one product with a panel of H on the left (rows ab or cd) and many columns on the right:

    step 4, a bra pair:  (ab|q]  = sum_p H[ab, p] [p|q]      columns: blocks of 8 q of every ket primitive
    step 5, a ket pair:  (ab|cd) = sum_q H[cd, q] (ab|q]     columns: ab of every bra pair

A panel is, for every 8 of the inner index, fragments of 16 rows, see `md4.gpu.emit.tile_products`; it is padded by
zeros, rows and inner indices in the order of `md4.gpu.staircases`: of each block of 8 inner indices, `reach` blocks of
8 rows count, the products with the others are left out, as far as there is code for it
(`md4.gpu.tiles.reach_levels`). Step 5 keeps the rows' own order where they are contiguous in the result, and leaves
nothing out. The panel comes to shared memory through `md4.gpu.kernels.ring` and serves all warps of a block; each warp
owns `nt` blocks of 8 columns.

In step 4 the right operand is gathered from r in shared memory, so that [p|q] never exists in memory; what comes
through the ring is where each lane finds its r[p+q] (`md4.gpu.gather_words`). In step 5 it is the operand itself. A
turned tile has the sides of its instructions exchanged, H on the right. Between the steps (ab|q] lies in memory as

    abq[q block of 8][bra pair][ab][8 q],

so that columns of step 5, the (bra pair, ab) of all pairs in a row, are contiguous: blocks of 8 straddle pairs. Rows ab
are in their own order again there, blocks of q are in that of the ket's staircase.
"""

from typing import NamedTuple

from md4.errors import UnsupportedError
from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, I64, cuda, f64, i32, i64, jit_device
from md4.gpu.emit.instructions import (
    address_of,
    commit_copies,
    make_copies,
    make_empty,
    make_wait_copies,
    shared_address,
)
from md4.gpu.emit.stores import make_store_columns, make_store_panels, make_store_rows
from md4.gpu.emit.tile_products import Lane, make_column_state, make_gather, make_load_blocks, make_product_step
from md4.gpu.gather_words import ket_primitives_of, words_in_turn, words_of
from md4.gpu.h_layout import BRA_STAIRCASE, BRA_TURNED, KET_FLAT, KET_TURNED, form_rows
from md4.gpu.kernels.groups import (
    Grid,
    HalfTransformed,
    HermiteIntegrals,
    Limits,
    PairRange,
    Panel,
    Result,
    Staircase,
    any_survives,
    block_place,
    pair_range,
    primitives_of,
    result,
)
from md4.gpu.kernels.ring import Course, make_copy_panel, make_copy_range, make_ring
from md4.gpu.r_layout import r_stride_of
from md4.gpu.staircases import depths, full_depths, full_reach, reach, row_table
from md4.gpu.tiles import MOST_COLUMNS, blocks_of_8, choose_tile, turned_is_better
from md4.gpu.tuning import SHARED_BYTES


class WordTable(NamedTuple):
    """`md4.gpu.gather_words.words_in_turn`, `row` numbers for each block of 8 p."""

    numbers: F64
    row: i64


class KetOwners(NamedTuple):
    """The ket pairs of a chunk's ket primitives.

    Attributes
    ----------
    owner : int64 array
        The pair of each primitive pair of the whole list.
    first : int64
        First primitive pair of the chunk.
    """

    owner: I64
    first: i64


class BraOperands(NamedTuple):
    """What the ring of step 4 works on.

    Attributes
    ----------
    h, words : float64 array
        H of the list, and where lanes find r[p+q].
    word, word_step : int64
        Place of the words of the first 8 p, and places to those of the next.
    r : float64 array
    r_first, r_step, r_count : int64
        Place of the first bra primitive's r that the block needs, places to the next primitive's, numbers of each.
    r_address : int32
        Shared memory for r.
    count : int64
        Bra primitives.
    state : tuple of int32
        See `md4.gpu.emit.tile_products.make_column_state`.
    own_h, own_words : int64
        Addresses of the lane's place in H and in the words, in the ring's first buffer.
    tid : int64
    """

    h: F64
    words: F64
    word: i64
    word_step: i64
    r: F64
    r_first: i64
    r_step: i64
    r_count: i64
    r_address: i32
    count: i64
    state: tuple
    own_h: i64
    own_words: i64
    tid: i64


class KetOperands(NamedTuple):
    """What the ring of step 5 works on.

    Attributes
    ----------
    h, abq : float64 array
        H of the list, and (ab|q].
    copies : int64
        Pieces of (ab|q] that this thread copies.
    own : int64
        Address of the lane's place in H, in the ring's first buffer.
    tid : int64
    """

    h: F64
    abq: F64
    copies: i64
    own: i64
    tid: i64


# Doubles behind (ab|q] that step 5 reads with its last columns.
BEHIND = 64
# Blocks of 8 columns of a block of threads in step 4: words that say where [p|q] is in r are copied for four of them.
FEWEST_COLUMNS = 4


def clear_end(numbers):
    """Zeros behind (ab|q], by the first block, where nothing is that is stored later (device function)."""
    n = i64(cuda.threadIdx.x)
    while n < (BEHIND if cuda.blockIdx.x == 0 else 0):
        numbers[numbers.size - BEHIND + n] = 0.0
        n += cuda.blockDim.x


def bra_ring(rows8, nt, warps, stages, unit, turned, r_buffers):
    """(device function: the ring of step 4, device function that starts to copy r, bytes of the ring).

    There are 1 or 2 buffers for r of a bra primitive. With two of them that of the next one comes while this one's is
    used.
    """
    threads, words_offset = 32 * warps, rows8 * 512
    stage_bytes = words_offset + nt * warps * 128
    copy_panel, copy_words = make_copy_panel(rows8, threads), make_copy_panel(nt * warps // 4, threads)
    copy_r, gather, wait_all = make_copy_range(threads), make_gather(nt), make_wait_copies(0)
    step = make_product_step(rows8, nt, unit == "dmma16", turned)

    @jit_device
    def r_address(n, side):
        return side.r_address if r_buffers == 1 else i32(side.r_address + (n & 1) * (8 * side.r_count))

    @jit_device
    def start_r(n, side):
        copy_r(r_address(n, side), side.r, side.r_first + n * side.r_step, side.r_count, side.tid)

    def begin(n, side):
        if r_buffers == 1 and n > 0:
            cuda.syncthreads()
            start_r(n, side)
            commit_copies()
            wait_all()

    def fetch(n, k, side):
        if r_buffers == 2 and k == 0 and n + 1 < side.count:
            start_r(n + 1, side)

    def fill(address, h, other, k, side):
        copy_panel(address, side.h, h, side.tid)
        copy_words(address + words_offset, side.words, side.word + k * side.word_step, side.tid)

    def multiply(tile, offset, n, count, side):
        b = gather(r_address(n, side), i32(side.own_words + offset), side.state)
        return step(tile, i32(side.own_h + offset), b, count)

    return make_ring(stages, stage_bytes, fill, multiply, begin, fetch), start_r, stages * stage_bytes


def bra_transform(rows8, nt, warps, stages, unit, turned, r_buffers):
    """Kernel factory for step 4; `r_buffers` 2 fetches the next bra primitive's r while this one's is used."""
    columns = nt * warps
    product, start_r, ring_bytes = bra_ring(rows8, nt, warps, stages, unit, turned, r_buffers)
    empty, column_state = make_empty(2 * rows8 * nt), make_column_state(nt, True)
    store = make_store_panels(rows8, nt, turned)
    place, primitives, clear, lane_place = map(
        jit_device, (block_place, primitives_of, clear_end, Lane(rows8, nt, turned).place())
    )
    any_of = jit_device(any_survives)

    def kernel(
        panel: Panel, bra: PairRange, staircase: Staircase, r: HermiteIntegrals, words: WordTable, abq: HalfTransformed,
        ket: KetOwners, limits: Limits, grid: Grid,
    ):  # fmt: skip
        clear(abq.numbers)
        ring = shared_address(cuda.shared.array(0, f64))
        tid = i64(cuda.threadIdx.x)
        lane, warp = tid & 31, tid >> 5
        row_block, column_block, pair = place(grid)
        # r of the ket primitives that the block's columns touch, for one bra primitive at a time
        first_column, ncol = column_block * columns, r.nket * abq.nq8
        first_ket = first_column // abq.nq8
        last_ket = (min(first_column + columns, ncol) - 1) // abq.nq8
        if limits.counts.size > 0:
            kets = ket.owner[ket.first + first_ket], ket.owner[ket.first + last_ket]
            if not any_of(limits.counts, not limits.by_ket, bra.first + pair, kets[0], kets[1]):
                return
        first, last = primitives(bra, pair)
        row, depth, step = row_block * rows8, i64(staircase.depths[row_block]), panel.rows8 * 64
        r_count = (last_ket - first_ket + 1) * r.stride
        column = first_column + warp * nt
        side = BraOperands(
            panel.h, words.numbers, first_column % abq.nq8 * 16, words.row,
            r.numbers, ((first - bra.first_prim) * r.nket + first_ket) * r.stride, r.nket * r.stride, r_count,
            i32(ring + ring_bytes), last - first, column_state(column, ncol, first_ket, abq.nq8, r.stride),
            ring + 16 * lane, ring + rows8 * 512 + warp * (nt * 128) + 4 * lane, tid,
        )  # fmt: skip
        course = Course(
            last - first, depth, staircase.reach, row,
            first * panel.steps * step + row * 64, step, (panel.steps - depth) * step,
            i64(0), i64(0), i64(0),  # the words are found by their number
        )  # fmt: skip
        if first < last:
            start_r(0, side)
        tile = product(empty(), ring, course, side)
        lane_row, lane_q = lane_place(lane)
        destination = (column * abq.npair + pair) * abq.nab * 8 + lane_q
        store(
            tile, abq.numbers, destination, abq.npair * abq.nab * 8, ncol - column, staircase.rows, 8 * row + lane_row
        )  # fmt: skip

    return Kernel(kernel, (32 * warps, max(1, 8 // warps)))


def ket_ring(rows8, nt, warps, stages, unit, turned):
    """Device function: the ring of step 5, both operands of which come from memory."""
    threads, columns_offset = 32 * warps, rows8 * 512
    copy_panel, copy_columns = make_copy_panel(rows8, threads), make_copies(nt, 16 * threads)
    load, step = make_load_blocks(nt, turned), make_product_step(rows8, nt, unit == "dmma16", turned)

    def fill(address, h, column, k, side):
        copy_panel(address, side.h, h, side.tid)
        copy_columns(i32(address + columns_offset + 16 * side.tid), address_of(side.abq, column), side.copies)

    def multiply(tile, offset, n, count, side):
        here = side.own + offset
        b = load(i32(here + columns_offset + (side.tid >> 5) * (nt * 512)))
        # rows in their own order all count
        return step(tile, i32(here), b, count if turned else i32(rows8))

    return make_ring(stages, (rows8 + nt * warps) * 512, fill, multiply)


def make_finish(rows8, nt, turned):
    """Device function that stores a tile of step 5, which begins at `row` and `column`."""
    lane_place = jit_device(Lane(rows8, nt, turned).place())
    store = make_store_rows(rows8, nt) if turned else make_store_columns(rows8, nt)

    def by_table(tile, out, first, row, rows, nrow, column, abq, lane):
        lane_row, lane_column = lane_place(lane)
        store(
            tile, out.numbers, first, column + lane_column, abq.npair * abq.nab, abq.nab, out.s_ij, out.s_ab, out.s_cd,
            rows, row + lane_row,
        )  # fmt: skip

    def in_order(tile, out, first, row, rows, nrow, column, abq, lane):
        lane_row, lane_column = lane_place(lane)
        row += lane_row
        store(
            tile, out.numbers, first + row * out.s_cd, column + lane_column, abq.npair * abq.nab, abq.nab, out.s_ij,
            out.s_ab, out.s_cd, nrow - row,
        )  # fmt: skip

    return jit_device(by_table if turned else in_order)


def ket_transform(rows8, nt, warps, stages, unit, turned):
    """Kernel factory for step 5."""
    threads, columns = 32 * warps, nt * warps
    empty, product, finish = (
        make_empty(2 * rows8 * nt), ket_ring(rows8, nt, warps, stages, unit, turned), make_finish(rows8, nt, turned)
    )  # fmt: skip
    place, primitives, any_of = jit_device(block_place), jit_device(primitives_of), jit_device(any_survives)

    def kernel(
        panel: Panel, ket: PairRange, staircase: Staircase, abq: HalfTransformed, first_bra: i64, ncd: i64,
        limits: Limits, out: Result, grid: Grid,
    ):  # fmt: skip
        ring = shared_address(cuda.shared.array(0, f64))
        tid = i64(cuda.threadIdx.x)
        row_block, column_block, pair = place(grid)
        # the last block of columns may read what lies behind (ab|q]: those columns are not stored
        first_column, ncol = column_block * columns, abq.npair * abq.nab
        if limits.counts.size > 0:
            bra_pairs = 8 * first_column // abq.nab, (min(8 * (first_column + columns), ncol) - 1) // abq.nab
            begin, end = first_bra + bra_pairs[0], first_bra + bra_pairs[1]
            if not any_of(limits.counts, limits.by_ket, ket.first + pair, begin, end):
                return
        first, last = primitives(ket, pair)
        row, depth, step = row_block * rows8, i64(staircase.depths[row_block]), panel.rows8 * 64
        copies = (min(i64(columns), (ncol + 7) // 8 - first_column) * 32 - tid + threads - 1) // threads
        course = Course(
            last - first, depth, staircase.reach, row,
            first * panel.steps * step + row * 64, step, (panel.steps - depth) * step,
            (first - ket.first_prim) * panel.steps * ncol * 8 + first_column * 64 + 2 * tid, ncol * 8,
            (panel.steps - depth) * ncol * 8,
        )  # fmt: skip
        tile = product(empty(), ring, course, KetOperands(panel.h, abq.numbers, copies, ring + 16 * (tid & 31), tid))
        column = 8 * (first_column + (tid >> 5) * nt)
        finish(tile, out, out.first + pair * out.s_kl, 8 * row, staircase.rows, ncd, column, abq, tid & 31)

    return Kernel(kernel, (threads, max(1, 8 // warps)))


# launchers


def abq_size(bra, ket):
    """Doubles of (ab|q] of two slices; the last are read, but not used."""
    return ket.nprim * blocks_of_8(ket.facts.nherm) * bra.npair * bra.facts.nab * 8 + BEHIND


def bra_tile(unit, bra):
    """The tile of step 4."""
    return choose_tile(bra.nab, blocks_of_8(bra.nherm), unit, unit != "fma" and turned_is_better(bra.nab))


def fitting_tile(unit, bra, ket, room):
    """The tile of step 4, with fewer columns where r of their ket primitives would not fit `room` bytes.

    UnsupportedError if it does not fit even so.
    """
    tile = bra_tile(unit, bra)
    while bra_shared(tile, bra, ket)[1] > room:
        if tile.nt > 2:
            tile = tile._replace(nt=-(-tile.nt // 4) * 2)
        elif tile.columns > FEWEST_COLUMNS:
            tile = tile._replace(warps=tile.warps // 2)
        elif tile.stages > 2:
            tile = tile._replace(stages=2)
        else:
            raise UnsupportedError(
                f"integrals of shells of l = {bra.la} and {bra.lb} with l = {ket.la} and {ket.lb} need "
                f"{bra_shared(tile, bra, ket)[1]} bytes of shared memory, but a block of threads of this GPU may have "
                f"{room}; use backend='cpu'."
            )
    return tile


def bra_form(unit, bra):
    """The form of H that step 4 reads."""
    return BRA_TURNED if bra_tile(unit, bra).turned else BRA_STAIRCASE


def bra_shared(tile, bra, ket):
    """(buffers for r, bytes of shared memory) of a block of step 4."""
    buffer = 8 * r_stride_of(bra, ket) * ket_primitives_of(tile.columns, blocks_of_8(ket.nherm))
    ring = tile.stages * (tile.rows8 * 512 + tile.columns * 128)
    r_buffers = 2 if bra.max_prim > 1 and ring + 2 * buffer <= SHARED_BYTES else 1
    return r_buffers, ring + r_buffers * buffer


def ket_form(turned):
    """The form of H that step 5 reads: for a turned tile where functions ab run fastest in the result."""
    return KET_TURNED if turned else KET_FLAT


def ket_tile(unit, ket, form):
    """The tile of step 5."""
    return choose_tile(ket.nab, blocks_of_8(ket.nherm), unit, form == KET_TURNED)


def row_blocks_of(tile, nrow):
    """Blocks of threads that `nrow` rows of a product take."""
    return -(-blocks_of_8(nrow) // tile.rows8)


def staircase_of(context, pairs, rows8, row_blocks, flat=False):
    """`Staircase` of a list; `flat`: for rows in their own order, which all count everywhere."""
    shells = pairs.h_class
    return (
        context.table(full_reach if flat else reach, shells),
        context.table(full_depths if flat else depths, shells, rows8, row_blocks),
        context.table(row_table, shells, rows8 * row_blocks),
    )


def bra_launcher(context, bra, ket):
    """The function by which step 4 is launched for two `ListFacts`."""
    unit, tile, nab = context.unit, fitting_tile(context.unit, bra, ket, context.block_shared), bra.nab
    nq8, stride, row_blocks = blocks_of_8(ket.nherm), r_stride_of(bra, ket), row_blocks_of(tile, nab)
    r_buffers, shared = bra_shared(tile, bra, ket)
    variant, columns, threads = Variant(bra_transform, (*tile, r_buffers)), tile.columns, tile.threads
    rows8, steps = form_rows(nab, bra_form(unit, bra)), blocks_of_8(bra.nherm)
    staircase = staircase_of(context, bra, tile.rows8, row_blocks)
    words = context.table(words_in_turn, *words_of(bra, ket)), 16 * (nq8 + MOST_COLUMNS)

    def launch(context, h, ab, cd, r, abq, limits):
        npair, nket = ab.npair, cd.nprim
        column_blocks = -(-nket * nq8 // columns)
        context.launch(
            variant, row_blocks * column_blocks * npair, threads, shared,
            (h, rows8, steps), pair_range(ab), staircase, (r, stride, nket), words, (abq, nq8, npair, nab),
            (cd.data.owner, cd.first_prim), limits, (row_blocks, column_blocks),
        )  # fmt: skip

    return launch


def ket_launcher(context, bra, ket, form):
    """The function by which step 5 is launched for two `ListFacts` and the form of the ket's H."""
    tile, nab, ncd, nq8 = ket_tile(context.unit, ket, form), bra.nab, ket.nab, blocks_of_8(ket.nherm)
    row_blocks, rows8 = row_blocks_of(tile, ncd), form_rows(ncd, form)
    variant, columns, threads = Variant(ket_transform, (*tile,)), tile.columns, tile.threads
    shared = tile.stages * 512 * (tile.rows8 + columns)
    staircase = staircase_of(context, ket, tile.rows8, row_blocks, form == KET_FLAT)

    def launch(context, abq, h, ab, cd, block):
        npair = ab.npair
        column_blocks = -(-blocks_of_8(npair * nab) // columns)
        context.launch(
            variant, row_blocks * column_blocks * cd.npair, threads, shared,
            (h, rows8, nq8), pair_range(cd), staircase, (abq, nq8, npair, nab), ab.first, ncd, block.limits,
            result(block), (row_blocks, column_blocks),
        )  # fmt: skip

    return launch
