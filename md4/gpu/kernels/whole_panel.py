"""Step 4 on FP64 tensor cores where one tile of a warp holds all functions ab, for classes of small and middle size.

The product is that of `md4.gpu.kernels.two_products`, with the same operands and result. One primitive pair is little
work there, which must not wait for copies and barriers. So a panel of H is in shared memory as a whole, and so are the
words that say where [p|q] is in r, for all primitive pairs of a bra pair. A block of threads takes several blocks of
columns, as many as its warps' tiles have each, and goes on in *steps*, with a barrier and copies that were begun a step
or more before. A step is one of these blocks of columns, with r of its own, and the panel stays. With a contracted bra
pair it is one of the pair's primitive pairs with such a block, with H and r of its own; where there are many of these,
a block of threads has one block of columns.
"""


from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, cuda, f64, i32, i64, jit_device
from md4.gpu.emit.instructions import commit_copies, make_empty, make_wait_copies, shared_address
from md4.gpu.emit.scalars import quotient
from md4.gpu.emit.stores import make_store_panels
from md4.gpu.emit.tile_products import Lane, make_column_state, make_staircase_products
from md4.gpu.gather_words import all_words, ket_primitives_of, words_of
from md4.gpu.kernels.groups import (
    HalfTransformed,
    HermiteIntegrals,
    Levels,
    Limits,
    PairRange,
    Panel,
    levels_of,
    pair_range,
    primitives_of,
    survives,
)
from md4.gpu.kernels.ring import make_copy_range
from md4.gpu.kernels.two_products import KetOwners, bra_tile, clear_end
from md4.gpu.r_layout import r_stride_of
from md4.gpu.tiles import blocks_of_8
from md4.gpu.tuning import SHARED_BYTES

PANEL_BYTES = 64 << 10  # most bytes of a panel of an uncontracted bra
STEPS = 8  # of a block of threads, about; a contracted pair may have more
CONTRACTED_ROWS = 5  # most blocks of 8 functions ab of contracted bras
# Of these for 1, 2, ... blocks of 8 rows: blocks of 8 columns of a warp; blocks of threads that share a multiprocessor;
# whether [p|q] is gathered a step ahead; primitive pairs whose H and r shared memory has room for.
CONTRACTED_COLUMNS = (8, 8, 8, 6, 6)
CONTRACTED_BLOCKS = (4, 4, 3, 3, 2)
CONTRACTED_AHEAD = (False, False, True, True, True)
CONTRACTED_STAGES = (3, 2, 2, 2, 2)
# The highest bit of an int32, which becomes those of all further ones when it is shifted to the right.
FURTHER = -(1 << 31)


def make_counted_blocks(columns):
    """Device function: which of the blocks of so many columns count with bra pair `ij`, a bit each.

    They begin with column, column + step, ... below `ncol`; columns are blocks of 8 q of the chunk's ket primitives,
    `nq8` of each. All blocks beyond the first 31 are said to count.
    """
    counts = jit_device(survives)

    @jit_device
    def counted_blocks(ket, limits, ij, column, step, ncol, nq8, lane):
        if limits.counts.size == 0:
            return i32(-1)
        own, found = column + lane * step, False
        if own < ncol and lane < 31:
            kl = ket.owner[ket.first + quotient(own, nq8)]
            last = ket.owner[ket.first + quotient(min(own + columns, ncol) - 1, nq8)]
            while kl <= last and not found:
                found = counts(limits, ij, kl)
                kl += 1
        return i32(i32(cuda.ballot_sync(-1, found)) | FURTHER)

    return counted_blocks


def next_that_counts(begin, counted, stride, ncol):
    """The first columns from `begin` on that count, or what is behind the last, and their bits (device function)."""
    while begin < ncol and counted & 1 == 0:
        begin, counted = begin + stride, i32(counted >> 1)
    return begin, counted


def make_following(contracted):
    """Device function: the step after that of the primitive pair `prim`, of `prims`, and the columns from `begin` on.

    `counted` are the bits of `make_counted_blocks` from these columns on.
    """
    that_counts = jit_device(next_that_counts)

    @jit_device
    def following(begin, counted, prim, prims, stride, ncol):
        if contracted and prim + 1 < prims:
            return begin, counted, prim + 1
        begin, counted = that_counts(begin + stride, i32(counted >> 1), stride, ncol)
        return begin, counted, i64(0)

    return following


def make_fetch(rows8, columns, threads, contracted):
    """Device function: a block of threads starts to copy r of a step, behind H if it is that of a `contracted` bra.

    `n` and `row` are the bra primitive's numbers in the whole list and in r; the columns are those from `begin` on.
    """
    copy = make_copy_range(threads)

    def fetch(address, panel, n, r, row, begin, nq8, tid):
        if contracted:
            count = panel.steps * (rows8 * 64)
            copy(address, panel.h, n * count, count, tid)
            address += 8 * count
        k, last = quotient(begin, nq8), quotient(min(begin + columns, r.nket * nq8) - 1, nq8)
        copy(address, r.numbers, (row * r.nket + k) * r.stride, (last - k + 1) * r.stride, tid)

    return jit_device(fetch)


def whole_panel(rows8, nt, warps, stages, blocks, ahead, unit, turned, contracted):
    """Kernel factory for step 4 of bra pairs of one primitive pair at most, or of several if `contracted`.

    There is room for what is copied for `stages` steps. `ahead`: [p|q] is gathered 8 p ahead of the products.
    """
    threads, columns = 32 * warps, nt * warps
    products = make_staircase_products(rows8, nt, unit == "dmma16", turned, ahead)
    empty, store = make_empty(2 * rows8 * nt), make_store_panels(rows8, nt, turned)
    column_state, counted_blocks = make_column_state(nt, False), make_counted_blocks(columns)
    copy, fetch = make_copy_range(threads), make_fetch(rows8, columns, threads, contracted)
    wait, lane_place = make_wait_copies(stages - 2), jit_device(Lane(rows8, nt, turned).place())
    clear, primitives = jit_device(clear_end), jit_device(primitives_of)
    that_counts, following = jit_device(next_that_counts), make_following(contracted)

    def kernel(
        panel: Panel, bra: PairRange, levels: Levels, r: HermiteIntegrals, kets: i64, words: F64, abq: HalfTransformed,
        ket: KetOwners, limits: Limits, parts: i64,
    ):  # fmt: skip
        # r of a step has room for `kets` ket primitives; `parts` blocks share the columns of a bra pair
        clear(abq.numbers)
        shared = shared_address(cuda.shared.array(0, f64))
        tid = i64(cuda.threadIdx.x)
        lane, warp = tid & 31, tid >> 5
        pair, part = i64(cuda.blockIdx.x) // parts, i64(cuda.blockIdx.x) % parts
        n, last = primitives(bra, pair)
        live, row, ncol, stride = last > n, n - bra.first_prim, r.nket * abq.nq8, parts * columns
        counted = counted_blocks(ket, limits, bra.first + pair, part * columns, stride, ncol, abq.nq8, lane)
        # of a step the first column, the bits from there on, and the number of its primitive pair
        begin, counted = that_counts(part * columns, counted, stride, ncol)
        if begin >= ncol:
            return
        prim, prims = i64(0), i64(1)
        if contracted:
            prims = max(last - n, i64(1))
        copy(shared, words, 0, words.size, tid)
        h_address, h_bytes = shared + 8 * words.size, panel.steps * (rows8 * 512)
        ring, stage_bytes = h_address, h_bytes + 8 * kets * r.stride
        if not contracted:
            ring, stage_bytes = ring + h_bytes, stage_bytes - h_bytes
            if live:
                copy(h_address, panel.h, n * (h_bytes // 8), h_bytes // 8, tid)
        # the step that is copied next
        coming, of_coming, further = begin, counted, i64(0)
        for step in range(stages - 1):
            if live and coming < ncol:
                fetch(ring + step * stage_bytes, panel, n + further, r, row + further, coming, abq.nq8, tid)
            commit_copies()
            coming, of_coming, further = following(coming, of_coming, further, prims, stride, ncol)
        tile, slot, words_address, words_step = empty(), 0, i32(shared + 4 * lane), abq.nq8 * 128
        lane_row, lane_q = lane_place(lane)
        while begin < ncol:
            wait()
            cuda.syncthreads()
            if live and coming < ncol:
                free = ring + (slot + stages - 1 if slot == 0 else slot - 1) * stage_bytes
                fetch(free, panel, n + further, r, row + further, coming, abq.nq8, tid)
            commit_copies()
            coming, of_coming, further = following(coming, of_coming, further, prims, stride, ncol)
            here, column = ring + slot * stage_bytes, begin + warp * nt
            if contracted:
                h_address, here = here, here + h_bytes
            if live:
                state = column_state(column, ncol, quotient(begin, abq.nq8), abq.nq8, r.stride)
                tile = products(
                    tile, i32(h_address + 16 * lane), rows8 * 512, words_address, words_step, i32(here), state,
                    levels.ends, panel.steps,
                )  # fmt: skip
            slot = slot + 1 if slot + 1 < stages else 0
            if not contracted or prim + 1 == prims:
                destination = (column * abq.npair + pair) * abq.nab * 8 + lane_q
                store(tile, abq.numbers, destination, abq.npair * abq.nab * 8, ncol - column, levels.rows, lane_row)
                tile = empty()
            begin, counted, prim = following(begin, counted, prim, prims, stride, ncol)

    return Kernel(kernel, (threads, blocks))


# launcher


def panel_tile(unit, bra):
    """The tile of a class: that of `two_products.bra_tile`, whose form of H it reads, but for columns and stages."""
    tile = bra_tile(unit, bra)
    if bra.max_prim <= 1:
        return tile._replace(stages=2)
    n = min(tile.rows8, CONTRACTED_ROWS) - 1
    return tile._replace(nt=CONTRACTED_COLUMNS[n], stages=CONTRACTED_STAGES[n])


def shared_parts(bra, ket, tile):
    """(ket primitives that a block's columns touch, bytes of the panel, bytes of all shared memory)."""
    np8, nq8 = blocks_of_8(bra.nherm), blocks_of_8(ket.nherm)
    kets, panel = ket_primitives_of(tile.columns, nq8), np8 * tile.rows8 * 512
    panels = tile.stages if bra.max_prim > 1 else 1
    return kets, panel, np8 * nq8 * 128 + panels * panel + tile.stages * kets * 8 * r_stride_of(bra, ket)


def serves(unit, bra, ket):
    """Whether step 4 of a class runs here: one tile holds its rows, and shared memory what a block needs."""
    if unit == "fma":
        return False
    tile, rows = panel_tile(unit, bra), blocks_of_8(bra.nab)
    _, panel, shared = shared_parts(bra, ket, tile)
    small = rows <= CONTRACTED_ROWS if bra.max_prim > 1 else panel <= PANEL_BYTES
    return small and rows <= tile.rows8 and shared <= SHARED_BYTES


def parts_of(ncol, columns, prims):
    """Blocks of threads that share the columns of a pair; `prims` primitive pairs of a contracted one, as a mean."""
    return max(1, ncol // (columns * STEPS)) if prims <= 1 else -(-ncol // (columns * max(1, int(STEPS / prims))))


def bra_launcher(context, bra, ket):
    """The function by which step 4 is launched for two `ListFacts`."""
    unit, nab, nq8, contracted = context.unit, bra.nab, blocks_of_8(ket.nherm), bra.max_prim > 1
    tile, stride, blocks, ahead = panel_tile(unit, bra), r_stride_of(bra, ket), 2, True
    if contracted:
        blocks, ahead = CONTRACTED_BLOCKS[tile.rows8 - 1], CONTRACTED_AHEAD[tile.rows8 - 1]
    variant = Variant(whole_panel, (*tile[:4], blocks, ahead, unit, tile.turned, contracted))
    kets, _, shared = shared_parts(bra, ket, tile)
    rows8, steps, levels = tile.rows8, blocks_of_8(bra.nherm), levels_of(context, bra, tile.rows8, tile.turned)
    words, columns, threads = context.table(all_words, *words_of(bra, ket)), tile.columns, tile.threads

    def launch(context, h, ab, cd, r, abq, limits):
        npair, nket = ab.npair, cd.nprim
        parts = parts_of(nket * nq8, columns, ab.nprim / max(1, npair) if contracted else 1)
        context.launch(
            variant, parts * npair, threads, shared,
            (h, rows8, steps), pair_range(ab), levels, (r, stride, nket), kets, words, (abq, nq8, npair, nab),
            (cd.data.owner, cd.first_prim), limits, parts,
        )  # fmt: skip

    return launch
