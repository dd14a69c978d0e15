"""Steps 4 and 5 on FP64 tensor cores.

Both transforms are one product with a panel of H on the left (rows ab or cd) and many columns on the right:

    step 4, a bra pair:  (ab|q]  = sum_p H[ab, p] [p|q]      columns: blocks of 8 q of every ket primitive
    step 5, a ket pair:  (ab|cd) = sum_q H[cd, q] (ab|q]     columns: blocks of 8 ab of every bra pair

A panel is, for every 8 of the inner index, fragments of 16 rows [k half][lane][row half], see `md4.ptx`; it is
zero-padded. The panel comes to shared memory through a ring of asynchronous copies and serves all warps of a block;
each warp owns `nt` column fragments. In step 4 the right operand is gathered from r in shared memory, so [p|q] never
exists in memory; in step 5 it comes through the same ring. Between the steps (ab|q] lies in memory as

    abq[q block of 8][bra pair][ab block of 8][8 ab][8 q],

so that a block's columns of step 5 are contiguous.
"""

import numpy as np

from md4.angular import packed_hermite
from md4.device import F64, I32, I64, cuda, jit_device, table_on_device, types
from md4.dispatch import Kernel, Variant, launch
from md4.kernels import plain
from md4.ptx import (
    commit_copies,
    make_column_state,
    make_copy_async,
    make_gather,
    make_load_blocks,
    make_mma_tile,
    make_store_columns,
    make_store_panels,
    make_wait_copies,
    make_zeros,
    shared_address,
)
from md4.tiles import SHARED_BYTES, blocks_of_8, choose_tile, panel_rows, r_stride, row_split

i64 = types.int64


def make_copy_panel(mt, threads):
    """Device function: the block starts to copy a panel's `mt` fragments of 16 rows, 64 pieces of 16 bytes each."""
    pieces = -(-64 * mt // threads)
    copies = make_copy_async(pieces, threads)

    def copy_panel(address, array, index, tid):
        copies(types.int32(address + 16 * tid), array, i64(index + 2 * tid), (64 * mt - tid + threads - 1) // threads)

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


def bra_transform(mt, nt, warps, stages, unit, r_buffers):
    """Kernel factory for step 4; `r_buffers` 2 fetches the next bra primitive's r while this one's is used."""
    threads, columns, stage_bytes = 32 * warps, nt * warps, mt * 1024
    zeros, mma, store = make_zeros(4 * mt * nt), make_mma_tile(mt, nt, unit == "dmma16"), make_store_panels(mt, nt)
    copy_panel, copy_range = make_copy_panel(mt, threads), make_copy_range(threads)
    column_state, gather = make_column_state(nt), make_gather(nt)
    wait, wait_all = make_wait_copies(stages - 2), make_wait_copies(0)

    def kernel(
        h, first_prim, start, first_pair, h_rows, r, r_stride, nket, pwords, qwords, np8, nq8, abq, abq_rows, npair,
        row_blocks, column_blocks,
    ):  # fmt: skip
        ring = shared_address(cuda.shared.array(0, types.float64))
        tid = i64(cuda.threadIdx.x)
        lane, warp = tid & 31, tid >> 5
        row_block, rest = i64(cuda.blockIdx.x) % row_blocks, i64(cuda.blockIdx.x) // row_blocks
        first_column, pair = rest % column_blocks * columns, rest // column_blocks
        first, last = start[first_pair + pair], start[first_pair + pair + 1]
        panel = h_rows * 64
        source, steps = first * np8 * panel + row_block * (mt * 128), (last - first) * np8

        # r of the ket primitives that the block's columns touch, for one bra primitive at a time
        ncol = nket * nq8
        k_first = first_column // nq8
        r_count = ((min(first_column + columns, ncol) - 1) // nq8 - k_first + 1) * r_stride
        r_base = types.int32(ring + stages * stage_bytes)
        r_source = ((first - first_prim) * nket + k_first) * r_stride
        state = column_state(first_column + warp * nt, ncol, k_first, nq8, r_stride, qwords, lane)

        acc = zeros()
        if steps > 0:
            copy_range(r_base, r, r_source, r_count, tid)
        for n in range(stages - 1):
            if n < steps:
                copy_panel(ring + n * stage_bytes, h, source + n * panel, tid)
            commit_copies()
        source += (stages - 1) * panel
        step, slot, r_address = 0, 0, r_base
        for prim in range(last - first):
            if prim > 0:
                if r_buffers == 1:
                    cuda.syncthreads()
                    copy_range(r_base, r, r_source + prim * nket * r_stride, r_count, tid)
                    commit_copies()
                    wait_all()
                else:
                    r_address = types.int32(r_base + (prim & 1) * (8 * r_count))
            mine = 2 * (lane & 3)
            p0, p1 = pwords[mine], pwords[mine + 1]
            for k in range(np8):
                wait()
                cuda.syncthreads()
                if step + stages - 1 < steps:
                    filled = slot + stages - 1 if slot == 0 else slot - 1
                    copy_panel(ring + filled * stage_bytes, h, source, tid)
                if r_buffers == 2 and k == 0 and prim + 1 < last - first:
                    other = types.int32(r_base + ((prim + 1) & 1) * (8 * r_count))
                    copy_range(other, r, r_source + (prim + 1) * nket * r_stride, r_count, tid)
                commit_copies()
                source += panel
                b = gather(r_address, p0, p1, state)
                mine = min(k + 1, np8 - 1) * 8 + 2 * (lane & 3)
                p0, p1 = pwords[mine], pwords[mine + 1]
                acc = mma(acc, types.int32(ring + slot * stage_bytes + 16 * lane), b)
                step += 1
                slot = slot + 1 if slot + 1 < stages else 0
        column = first_column + warp * nt
        destination = (column * npair + pair) * abq_rows * 64 + row_block * (mt * 128) + 2 * lane
        store(acc, abq, destination, npair * abq_rows * 64, ncol - column, abq_rows - row_block * (2 * mt))

    signature = (F64, i64, I64, i64, i64, F64, i64, i64, I32, I32, i64, i64, F64, i64, i64, i64, i64)
    return Kernel(kernel, signature, (threads, max(1, 8 // warps)))


def ket_transform(mt, nt, warps, stages, unit):
    """Kernel factory for step 5; both operands come through the ring."""
    threads, columns = 32 * warps, nt * warps
    b_offset, stage_bytes = mt * 1024, mt * 1024 + nt * warps * 512
    zeros, mma, store = make_zeros(4 * mt * nt), make_mma_tile(mt, nt, unit == "dmma16"), make_store_columns(mt, nt)
    copy_panel, copy_columns = make_copy_panel(mt, threads), make_copy_async(nt, threads)
    load, wait = make_load_blocks(nt), make_wait_copies(stages - 2)

    def kernel(
        h, first_prim, start, first_pair, h_rows, abq, abq_rows, npair, nq8, nab, ncd, out, out_first, s_ij, s_kl, s_ab,
        s_cd, row_blocks, column_blocks,
    ):  # fmt: skip
        ring = shared_address(cuda.shared.array(0, types.float64))
        tid = i64(cuda.threadIdx.x)
        lane, warp = tid & 31, tid >> 5
        row_block, rest = i64(cuda.blockIdx.x) % row_blocks, i64(cuda.blockIdx.x) // row_blocks
        first_column, pair = rest % column_blocks * columns, rest // column_blocks
        first, last = start[first_pair + pair], start[first_pair + pair + 1]
        panel, ncol = h_rows * 64, npair * abq_rows
        source, steps = first * nq8 * panel + row_block * (mt * 128), (last - first) * nq8
        b_source = (first - first_prim) * nq8 * ncol * 64 + first_column * 64 + 2 * tid
        b_pieces = (min(i64(columns), ncol - first_column) * 32 - tid + threads - 1) // threads
        b_ring = ring + b_offset + 16 * tid

        acc = zeros()
        for n in range(stages - 1):
            if n < steps:
                copy_panel(ring + n * stage_bytes, h, source, tid)
                copy_columns(types.int32(b_ring + n * stage_bytes), abq, b_source, b_pieces)
            commit_copies()
            source += panel
            b_source += ncol * 64
        slot = 0
        for step in range(steps):
            wait()
            cuda.syncthreads()
            if step + stages - 1 < steps:
                filled = slot + stages - 1 if slot == 0 else slot - 1
                copy_panel(ring + filled * stage_bytes, h, source, tid)
                copy_columns(types.int32(b_ring + filled * stage_bytes), abq, b_source, b_pieces)
            commit_copies()
            source += panel
            b_source += ncol * 64
            here = ring + slot * stage_bytes + 16 * lane
            b = load(types.int32(here + b_offset + warp * (nt * 512)))
            acc = mma(acc, types.int32(here), b)
            slot = slot + 1 if slot + 1 < stages else 0

        cd, column = row_block * (mt * 16) + (lane >> 2), first_column + warp * nt
        base = out_first + pair * s_kl + cd * s_cd
        store(acc, out, base, column, ncol, abq_rows, s_ij, s_ab, s_cd, ncd - cd, nab, 2 * (lane & 3))

    signature = (F64, i64, I64, i64, i64, F64, *[i64] * 5, F64, *[i64] * 7)
    return Kernel(kernel, signature, (threads, max(1, 8 // warps)))


# launchers


def bra_variant(tile, r_buffers):
    """Variant of step 4 for a tile."""
    if tile.unit == "fma":
        return Variant(plain.plain_bra_transform, ())
    return Variant(bra_transform, (tile.mt, tile.nt, tile.warps, tile.stages, tile.unit, r_buffers))


def ket_variant(tile):
    """Variant of step 5 for a tile."""
    if tile.unit == "fma":
        return Variant(plain.plain_ket_transform, ())
    return Variant(ket_transform, (tile.mt, tile.nt, tile.warps, tile.stages, tile.unit))


def grid(tile, nrow, ncol):
    """(row blocks, column blocks) of a product of `nrow` rows and `ncol` column fragments."""
    if tile.unit == "fma":
        return -(-blocks_of_8(nrow) // plain.TILE_BLOCKS), -(-ncol // plain.TILE_BLOCKS)
    return row_split(nrow)[0], -(-ncol // tile.columns)


def r_slots(columns, nq8):
    """Ket primitives that `columns` successive column fragments can touch."""
    return (columns - 1 + nq8 - 1) // nq8 + 1


def padded_words(l):
    """`packed_hermite` padded by zeros to a multiple of 8."""
    words = packed_hermite(l)
    return np.concatenate([words, np.zeros(-len(words) % 8, dtype=np.int32)])


def launch_bra_transform(unit, h, ab, cd, r, abq, stream):
    """(ab|q] of a chunk; `h` panels of the whole bra list, `r` of the chunk."""
    bra, ket = ab.pairs, cd.pairs
    np8, nq8, stride = blocks_of_8(bra.nherm), blocks_of_8(ket.nherm), r_stride(bra.l + ket.l)
    tile = choose_tile(bra.nab, np8, unit)
    row_blocks, column_blocks = grid(tile, bra.nab, ket.nprim * nq8)
    ring, slots = tile.stages * tile.mt * 1024, 8 * stride * r_slots(tile.columns, nq8)
    r_buffers = 2 if bra.max_prim > 1 and ring + 2 * slots <= SHARED_BYTES else 1
    launch(
        bra_variant(tile, r_buffers), row_blocks * column_blocks * len(bra), tile.threads, stream,
        0 if unit == "fma" else ring + r_buffers * slots,
        h, ab.first_prim, ab.data.start, ab.first, panel_rows(bra.nab), r, stride, ket.nprim,
        table_on_device(padded_words, bra.l), table_on_device(padded_words, ket.l), np8, nq8,
        abq, blocks_of_8(bra.nab), len(bra), row_blocks, column_blocks,
    )  # fmt: skip


def launch_ket_transform(unit, abq, h, ab, cd, block, stream):
    """(ab|cd) of a chunk into `block`; `h` panels of the whole ket list."""
    bra, ket = ab.pairs, cd.pairs
    nq8, ab8 = blocks_of_8(ket.nherm), blocks_of_8(bra.nab)
    tile = choose_tile(ket.nab, nq8, unit)
    row_blocks, column_blocks = grid(tile, ket.nab, len(bra) * ab8)
    launch(
        ket_variant(tile), row_blocks * column_blocks * len(ket), tile.threads, stream,
        0 if unit == "fma" else tile.stages * (tile.mt * 1024 + tile.columns * 512),
        h, cd.first_prim, cd.data.start, cd.first, panel_rows(ket.nab), abq, ab8, len(bra), nq8, bra.nab, ket.nab,
        block.array, block.first, *block.strides, row_blocks, column_blocks,
    )  # fmt: skip
