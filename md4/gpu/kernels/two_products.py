"""Steps 4 and 5 on FP64 tensor cores.

Both transforms are one product with a panel of H on the left (rows ab or cd) and many columns on the right:

    step 4, a bra pair:  (ab|q]  = sum_p H[ab, p] [p|q]      columns: blocks of 8 q of every ket primitive
    step 5, a ket pair:  (ab|cd) = sum_q H[cd, q] (ab|q]     columns: ab of every bra pair

A panel is, for every 8 of the inner index, fragments of 16 rows [k half][lane][row half], see
`md4.gpu.emit.instructions`; it is zero-padded, rows and inner indices in the order of `md4.gpu.staircases`: of each
block of 8 inner indices, `reach` blocks of 8 rows count, the products with the others are left out, as far as there is
code for it (`md4.gpu.tuning.reach_levels`). (Step 5 keeps the rows' own order where they are contiguous in the result,
and leaves nothing out.) The panel comes to shared memory through a ring of asynchronous copies and serves all warps of
a block; each warp owns `nt` column fragments. In step 4 the right operand is gathered from r in shared memory, so [p|q]
never exists in memory; what comes through the same ring is where each lane finds its r[p+q] (`gather_words`). In step 5
it is the operand itself. A turned tile has the sides of its instructions exchanged, H on the right. Between the steps
(ab|q] lies in memory as

    abq[q block of 8][bra pair][ab][8 q],

so that columns of step 5, the (bra pair, ab) of all pairs in a row, are contiguous: fragments of 8 straddle pairs. Rows
ab are in their own order again there, blocks of q are in that of the ket's staircase.
"""

import numpy as np

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, I32, I64, cuda, jit_device, types
from md4.gpu.emit.instructions import (
    commit_copies,
    make_column_state,
    make_copy_async,
    make_gather_columns,
    make_load_blocks,
    make_mma_tile,
    make_mma_turned,
    make_wait_copies,
    make_zeros,
    shared_address,
)
from md4.gpu.emit.stores import make_store_columns, make_store_panels, make_store_rows_turned, make_store_turned
from md4.gpu.h_layout import BRA_PLAIN, BRA_STAIRS, BRA_TURNED, KET_FLAT, KET_PLAIN, KET_TURNED, form_rows
from md4.gpu.kernels import plain
from md4.gpu.staircases import class_of, depths, full_depths, full_reach, gather_order, hermite_order, reach, row_table
from md4.gpu.tuning import MAX_COLUMNS, SHARED_BYTES, blocks_of_8, choose_tile, r_stride, turned_ket_tile, turned_tile
from md4.method.angular import packed_hermite, sum_ordinal

i64 = types.int64


def make_copy_panel(rows8, threads):
    """Device function: the block starts to copy a panel's `rows8` blocks of 8 rows, 32 pieces of 16 bytes each."""
    pieces = -(-32 * rows8 // threads)
    copies = make_copy_async(pieces, threads)

    def copy_panel(address, array, index, tid):
        limit = (32 * rows8 - tid + threads - 1) // threads
        copies(types.int32(address + 16 * tid), array, i64(index + 2 * tid), limit)

    return jit_device(copy_panel)


def make_copy_range(threads):
    """Device function: the block starts to copy `count` doubles from array[index:]."""
    copies = make_copy_async(1, threads)

    def copy_range(address, array, index, count, tid):
        n = tid
        while n < count // 2:  # no `range`: it divides by its step
            copies(types.int32(address + 16 * n), array, i64(index + 2 * n), 1)
            n += threads

    return jit_device(copy_range)


def bra_operations(rows8, nt, unit, turned):
    """(intrinsics: zero tile, one step of the product, storing; lane -> its row and its q) of a tile of step 4."""
    wide = unit == "dmma16"
    if turned:
        mma, store = make_mma_turned(nt // 2, rows8, wide), make_store_turned(nt // 2, rows8)
    else:
        mma, store = make_mma_tile(rows8 // 2, nt, wide), make_store_panels(rows8 // 2, nt)

    def place(lane):
        if turned:
            return 2 * (lane & 3), lane >> 2
        return lane >> 2, 2 * (lane & 3)

    return make_zeros(2 * rows8 * nt), mma, store, jit_device(place)


# Doubles behind (ab|q] that step 5 reads with its last columns.
BEHIND = 64


def clear_end(abq):
    """Zeros behind (ab|q], by the first block, where nothing is that is stored later (device function)."""
    n = i64(cuda.threadIdx.x)
    while n < (BEHIND if cuda.blockIdx.x == 0 else 0):
        abq[abq.size - BEHIND + n] = 0.0
        n += cuda.blockDim.x


def bra_transform(rows8, nt, warps, stages, unit, turned, r_buffers):
    """Kernel factory for step 4; `r_buffers` 2 fetches the next bra primitive's r while this one's is used."""
    threads, columns, words_offset = 32 * warps, nt * warps, rows8 * 512
    stage_bytes = words_offset + columns * 128
    zeros, mma, store, lane_place = bra_operations(rows8, nt, unit, turned)
    copy_panel, copy_words = make_copy_panel(rows8, threads), make_copy_panel(columns // 4, threads)
    copy_range = make_copy_range(threads)
    column_state, gather = make_column_state(nt, True), make_gather_columns(nt)
    wait, wait_all = make_wait_copies(stages - 2), make_wait_copies(0)
    clear = jit_device(clear_end)

    @jit_device
    def fill(address, h, source, words, first_word, tid):
        """Starts to copy the panel and the words of one step."""
        copy_panel(address, h, source, tid)
        copy_words(address + words_offset, words, first_word, tid)

    def kernel(
        h, first_prim, start, first_pair, h_rows, reach, depths, rows, r, r_stride, nket, words, words_row, np8, nq8,
        abq, nab, npair, row_blocks, column_blocks,
    ):  # fmt: skip
        clear(abq)
        ring = shared_address(cuda.shared.array(0, types.float64))
        tid = i64(cuda.threadIdx.x)
        lane, warp = tid & 31, tid >> 5
        row_block, rest = i64(cuda.blockIdx.x) % row_blocks, i64(cuda.blockIdx.x) // row_blocks
        first_column, pair = rest % column_blocks * columns, rest // column_blocks
        first, last = start[first_pair + pair], start[first_pair + pair + 1]
        panel, depth, first_row = h_rows * 64, i64(depths[row_block]), row_block * rows8
        source, steps, skipped = first * np8 * panel + first_row * 64, (last - first) * depth, (np8 - depth) * panel

        # r of the ket primitives that the block's columns touch, for one bra primitive at a time
        ncol = nket * nq8
        k_first = first_column // nq8
        r_count = ((min(first_column + columns, ncol) - 1) // nq8 - k_first + 1) * r_stride
        r_base = types.int32(ring + stages * stage_bytes)
        r_source = ((first - first_prim) * nket + k_first) * r_stride
        state = column_state(first_column + warp * nt, ncol, k_first, nq8, r_stride)
        first_word, filled_k = first_column % nq8 * 16, i64(0)
        mine = ring + words_offset + warp * (nt * 128) + 4 * lane

        acc = zeros()
        if steps > 0:
            copy_range(r_base, r, r_source, r_count, tid)
        for n in range(stages - 1):
            if n < steps:
                fill(ring + n * stage_bytes, h, source, words, first_word + filled_k * words_row, tid)
            commit_copies()
            source += panel
            filled_k += 1
            if filled_k == depth:
                filled_k = i64(0)
                source += skipped
        step, slot, r_address, coming = 0, 0, r_base, reach[0]
        for prim in range(last - first):
            if prim > 0:
                if r_buffers == 1:
                    cuda.syncthreads()
                    copy_range(r_base, r, r_source + prim * nket * r_stride, r_count, tid)
                    commit_copies()
                    wait_all()
                else:
                    r_address = types.int32(r_base + (prim & 1) * (8 * r_count))
            for k in range(depth):
                count, coming = types.int32(coming - first_row), reach[k + 1 if k + 1 < depth else 0]
                wait()
                cuda.syncthreads()
                if step + stages - 1 < steps:
                    filled = slot + stages - 1 if slot == 0 else slot - 1
                    fill(ring + filled * stage_bytes, h, source, words, first_word + filled_k * words_row, tid)
                if r_buffers == 2 and k == 0 and prim + 1 < last - first:
                    other = types.int32(r_base + ((prim + 1) & 1) * (8 * r_count))
                    copy_range(other, r, r_source + (prim + 1) * nket * r_stride, r_count, tid)
                commit_copies()
                source += panel
                filled_k += 1
                if filled_k == depth:
                    filled_k = i64(0)
                    source += skipped
                b = gather(r_address, types.int32(mine + slot * stage_bytes), state)
                acc = mma(acc, types.int32(ring + slot * stage_bytes + 16 * lane), b, count)
                step += 1
                slot = slot + 1 if slot + 1 < stages else 0
        lane_row, lane_q = lane_place(lane)
        column = first_column + warp * nt
        destination = (column * npair + pair) * nab * 8 + lane_q
        store(acc, abq, destination, npair * nab * 8, ncol - column, rows, 8 * first_row + lane_row)

    signature = (F64, i64, I64, i64, i64, *[I32] * 3, F64, i64, i64, F64, i64, i64, i64, F64, i64, i64, i64, i64)
    return Kernel(kernel, (threads, max(1, 8 // warps)), signature)


def ket_operations(rows8, nt, unit, turned):
    """(intrinsics: zero tile, one step of the product; device function: storing) of a tile of step 5."""
    wide = unit == "dmma16"
    if turned:
        mma, store = make_mma_turned(nt // 2, rows8, wide), make_store_rows_turned(nt // 2, rows8)
    else:
        mma, store = make_mma_tile(rows8 // 2, nt, wide), make_store_columns(rows8 // 2, nt)

    def step(acc, address, b, count):
        return mma(acc, address, b, count if turned else types.int32(rows8))  # all rows, or else what counts

    def finish(acc, lane, out, first, row, rows, nrow, column, ncol, group, s_group, s_column, s_row):
        if turned:
            column += lane >> 2
            store(acc, out, first, column, ncol, group, s_group, s_column, s_row, rows, row + 2 * (lane & 3))
        else:
            row += lane >> 2
            column += 2 * (lane & 3)
            store(acc, out, first + row * s_row, column, ncol, group, s_group, s_column, s_row, nrow - row)

    return make_zeros(2 * rows8 * nt), jit_device(step), jit_device(finish)


def ket_transform(rows8, nt, warps, stages, unit, turned):
    """Kernel factory for step 5; both operands come through the ring."""
    threads, columns = 32 * warps, nt * warps
    b_offset, stage_bytes = rows8 * 512, rows8 * 512 + nt * warps * 512
    zeros, mma, finish = ket_operations(rows8, nt, unit, turned)
    copy_panel, copy_columns = make_copy_panel(rows8, threads), make_copy_async(nt, threads)
    load, wait = make_load_blocks(nt, turned), make_wait_copies(stages - 2)

    def kernel(
        h, first_prim, start, first_pair, h_rows, reach, depths, rows, abq, npair, nq8, nab, ncd, out, out_first, s_ij,
        s_kl, s_ab, s_cd, row_blocks, column_blocks,
    ):  # fmt: skip
        ring = shared_address(cuda.shared.array(0, types.float64))
        tid = i64(cuda.threadIdx.x)
        lane, warp = tid & 31, tid >> 5
        row_block, rest = i64(cuda.blockIdx.x) % row_blocks, i64(cuda.blockIdx.x) // row_blocks
        first_column, pair = rest % column_blocks * columns, rest // column_blocks
        first, last = start[first_pair + pair], start[first_pair + pair + 1]
        panel, ncol, depth, first_row = h_rows * 64, npair * nab, i64(depths[row_block]), row_block * rows8
        source, steps, skipped = first * nq8 * panel + first_row * 64, (last - first) * depth, nq8 - depth
        # the last fragment may read what lies behind its block: those columns are not stored
        b_source = (first - first_prim) * nq8 * ncol * 8 + first_column * 64 + 2 * tid
        b_pieces = (min(i64(columns), (ncol + 7) // 8 - first_column) * 32 - tid + threads - 1) // threads
        b_ring, filled_k = ring + b_offset + 16 * tid, i64(0)

        acc = zeros()
        for n in range(stages - 1):
            if n < steps:
                copy_panel(ring + n * stage_bytes, h, source, tid)
                copy_columns(types.int32(b_ring + n * stage_bytes), abq, b_source, b_pieces)
            commit_copies()
            source += panel
            b_source += ncol * 8
            filled_k += 1
            if filled_k == depth:
                filled_k = i64(0)
                source += skipped * panel
                b_source += skipped * ncol * 8
        slot, k, coming = 0, i64(0), reach[0]
        for step in range(steps):
            k = k + 1 if k + 1 < depth else i64(0)
            count, coming = types.int32(coming - first_row), reach[k]
            wait()
            cuda.syncthreads()
            here = ring + slot * stage_bytes + 16 * lane
            if step + stages - 1 < steps:
                filled = slot + stages - 1 if slot == 0 else slot - 1
                copy_panel(ring + filled * stage_bytes, h, source, tid)
                copy_columns(types.int32(b_ring + filled * stage_bytes), abq, b_source, b_pieces)
            commit_copies()
            source += panel
            b_source += ncol * 8
            filled_k += 1
            if filled_k == depth:
                filled_k = i64(0)
                source += skipped * panel
                b_source += skipped * ncol * 8
            b = load(types.int32(here + b_offset + warp * (nt * 512)))
            acc = mma(acc, types.int32(here), b, count)
            slot = slot + 1 if slot + 1 < stages else 0

        column, base = 8 * (first_column + warp * nt), out_first + pair * s_kl
        finish(acc, lane, out, base, 8 * first_row, rows, ncd, column, ncol, nab, s_ij, s_ab, s_cd)

    signature = (F64, i64, I64, i64, i64, *[I32] * 3, F64, *[i64] * 4, F64, *[i64] * 7)
    return Kernel(kernel, (threads, max(1, 8 // warps)), signature)


# launchers


def abq_size(bra, ket):
    """Doubles of (ab|q] of a chunk; the last are read, but not used."""
    return ket.nprim * blocks_of_8(ket.nherm) * len(bra) * bra.nab * 8 + BEHIND


def bra_tile(unit, bra):
    """The tile of step 4."""
    steps = blocks_of_8(bra.nherm)
    turned = turned_tile(bra.nab, steps, unit) if unit != "fma" else None
    return turned or choose_tile(bra.nab, steps, unit)


def bra_form(unit, bra):
    """The form of H that step 4 reads."""
    return BRA_PLAIN if unit == "fma" else BRA_TURNED if bra_tile(unit, bra).turned else BRA_STAIRS


def bra_shared(tile, bra, ket):
    """(buffers for r, bytes of shared memory) of a block of step 4."""
    slots = 8 * r_stride(bra.l + ket.l) * r_slots(tile.columns, blocks_of_8(ket.nherm))
    ring = tile.stages * (tile.rows8 * 512 + tile.columns * 128)
    r_buffers = 2 if bra.max_prim > 1 and ring + 2 * slots <= SHARED_BYTES else 1
    return r_buffers, 0 if tile.unit == "fma" else ring + r_buffers * slots


def bra_variant(unit, bra, ket):
    """Variant of step 4 for a class."""
    if unit == "fma":
        return Variant(plain.plain_bra_transform, ())
    tile = bra_tile(unit, bra)
    r_buffers, _ = bra_shared(tile, bra, ket)
    return Variant(bra_transform, (tile.rows8, tile.nt, tile.warps, tile.stages, unit, tile.turned, r_buffers))


def ket_form(unit, ket, swap):
    """The form of H that step 5 reads: for a turned tile where bra and ket changed names, as ab is contiguous then."""
    return KET_PLAIN if unit == "fma" else KET_TURNED if swap else KET_FLAT


def ket_tile(unit, ket, form):
    """The tile of step 5."""
    steps = blocks_of_8(ket.nherm)
    return turned_ket_tile(ket.nab, steps, unit) if form == KET_TURNED else choose_tile(ket.nab, steps, unit)


def ket_variant(unit, ket, form):
    """Variant of step 5 for a class."""
    if unit == "fma":
        return Variant(plain.plain_ket_transform, ())
    tile = ket_tile(unit, ket, form)
    return Variant(ket_transform, (tile.rows8, tile.nt, tile.warps, tile.stages, unit, tile.turned))


def grid(tile, nrow, ncol):
    """(row blocks, column blocks) of a product of `nrow` rows and `ncol` column fragments."""
    if tile.unit == "fma":
        return -(-blocks_of_8(nrow) // plain.TILE_BLOCKS), -(-ncol // plain.TILE_BLOCKS)
    return -(-blocks_of_8(nrow) // tile.rows8), -(-ncol // tile.columns)


def r_slots(columns, nq8):
    """Ket primitives that `columns` successive column fragments can touch."""
    return (columns - 1 + nq8 - 1) // nq8 + 1


def padded_hermite(l):
    """`packed_hermite` padded by zeros to a multiple of 8."""
    packed = packed_hermite(l)
    return np.concatenate([packed, np.zeros(-len(packed) % 8, dtype=np.int32)])


def gather_words(l_bra, l_ket):
    """Byte offsets of r[p+q] for each lane's two p of every block of 8 p and of 8 q, a pair in 32 bits; as float64.

    Shape (p blocks, q blocks, 16), words in order of lanes, p and q in that of `md4.gpu.staircases`; padding stands for
    0.
    """
    p, q = packed_hermite(l_bra)[gather_order(l_bra)], packed_hermite(l_ket)[hermite_order(l_ket)]
    p, q = np.where(gather_order(l_bra) < 0, 0, p), np.where(hermite_order(l_ket) < 0, 0, q)
    p, q = p.reshape(-1, 1, 1, 4, 2), q.reshape(1, -1, 8, 1)
    low, high = (8 * sum_ordinal(p[..., n], q) for n in range(2))
    words = (low + (high << 16)).astype(np.uint32)
    return words.reshape(*words.shape[:2], 32).view(np.float64)


def all_words(l_bra, l_ket):
    """`gather_words` in a row."""
    return gather_words(l_bra, l_ket).reshape(-1)


def words_in_turn(l_bra, l_ket):
    """`gather_words` with blocks of q that begin anew, for the columns of a block of threads from any q on."""
    words = gather_words(l_bra, l_ket)
    return np.take(words, range(words.shape[1] + MAX_COLUMNS), axis=1, mode="wrap").reshape(-1)


def stair_tables(context, pairs, rows8, row_blocks, flat=False):
    """Tables of a class on the device: reach and depths (see `md4.gpu.staircases`), and the places of its rows.

    `flat`: for rows as they are, which all count everywhere.
    """
    shells = class_of(pairs)
    return (
        context.table(full_reach if flat else reach, shells),
        context.table(full_depths if flat else depths, shells, rows8, row_blocks),
        context.table(row_table, shells, rows8 * row_blocks),
    )


def launch_bra_transform(context, h, ab, cd, r, abq):
    """(ab|q] of a chunk; `h` panels of the whole bra list, `r` of the chunk."""
    bra, ket = ab.pairs, cd.pairs
    np8, nq8, tile = blocks_of_8(bra.nherm), blocks_of_8(ket.nherm), bra_tile(context.unit, bra)
    row_blocks, column_blocks = grid(tile, bra.nab, ket.nprim * nq8)
    stairs = ()
    if context.unit == "fma":
        words = context.table(padded_hermite, bra.l), context.table(padded_hermite, ket.l)
    else:
        stairs = stair_tables(context, bra, tile.rows8, row_blocks)
        words = context.table(words_in_turn, bra.l, ket.l), 16 * (nq8 + MAX_COLUMNS)
    context.launch(
        bra_variant(context.unit, bra, ket), row_blocks * column_blocks * len(bra), tile.threads,
        bra_shared(tile, bra, ket)[1],
        h, ab.first_prim, ab.data.start, ab.first, form_rows(bra.nab, bra_form(context.unit, bra)), *stairs, r,
        r_stride(bra.l + ket.l), ket.nprim, *words, np8, nq8, abq, bra.nab, len(bra), row_blocks, column_blocks,
    )  # fmt: skip


def launch_ket_transform(context, abq, h, form, ab, cd, block):
    """(ab|cd) of a chunk into `block`; `h` of the whole ket list in its form."""
    bra, ket = ab.pairs, cd.pairs
    nq8, tile = blocks_of_8(ket.nherm), ket_tile(context.unit, ket, form)
    row_blocks, column_blocks = grid(tile, ket.nab, blocks_of_8(len(bra) * bra.nab))
    stairs = () if context.unit == "fma" else stair_tables(context, ket, tile.rows8, row_blocks, form == KET_FLAT)
    context.launch(
        ket_variant(context.unit, ket, form), row_blocks * column_blocks * len(ket), tile.threads,
        0 if context.unit == "fma" else tile.stages * 512 * (tile.rows8 + tile.columns),
        h, cd.first_prim, cd.data.start, cd.first, form_rows(ket.nab, form), *stairs, abq, len(bra), nq8, bra.nab,
        ket.nab, block.array, block.first, *block.strides, row_blocks, column_blocks,
    )  # fmt: skip
