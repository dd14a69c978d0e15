"""Step 4 on FP64 tensor cores with the panel of H resident in shared memory, for classes of middle size.

The product is that of `md4.gpu.kernels.two_products`, with the same operands and result. A panel of one primitive pair
that fits shared memory as a whole is fetched once; the warps of a block then run over groups of columns on their own,
with no barrier between them, and each fetches r of its next group while it works on this one.
"""

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, I32, I64, cuda, jit_device, types
from md4.gpu.emit.digest_columns import quotient
from md4.gpu.emit.instructions import commit_copies, make_wait_copies, shared_address
from md4.gpu.emit.tile_products import make_column_state, make_stair_products
from md4.gpu.kernels.two_products import all_words, bra_operations, bra_tile, clear_end, make_copy_range, r_slots
from md4.gpu.staircases import class_of, level_ends, row_table
from md4.gpu.tuning import RESIDENT_BYTES, RESIDENT_GROUPS, SHARED_BYTES, blocks_of_8, r_stride

i64 = types.int64


def resident_bra_transform(rows8, nt, warps, unit, turned):
    """Kernel factory for step 4, one primitive pair a bra pair at most."""
    threads = 32 * warps
    zeros, _, store, lane_place = bra_operations(rows8, nt, unit, turned)
    products = make_stair_products(rows8, nt, unit == "dmma16", turned, ahead=True)
    copy_panel, copy_r, wait_all = make_copy_range(threads), make_copy_range(32), make_wait_copies(0)
    column_state, clear = make_column_state(nt, False), jit_device(clear_end)

    def kernel(
        h, first_prim, start, first_pair, ends, rows, r, r_stride, slots, nket, words, np8, nq8, abq, nab, npair, parts,
    ):  # fmt: skip
        clear(abq)
        panel = shared_address(cuda.shared.array(0, types.float64))
        tid = i64(cuda.threadIdx.x)
        lane, warp = tid & 31, tid >> 5
        pair, part = i64(cuda.blockIdx.x) // parts, i64(cuda.blockIdx.x) % parts
        prim, live = start[first_pair + pair], start[first_pair + pair + 1] > start[first_pair + pair]
        doubles = np8 * (rows8 * 64)
        table = panel + 8 * doubles
        lane_row, lane_q = lane_place(lane)
        if live:
            copy_panel(panel, h, prim * doubles, doubles, tid)
        copy_panel(table, words, 0, words.size, tid)
        r_bytes = slots * r_stride * 8
        r_base = table + 8 * words.size + warp * 2 * r_bytes
        r_row, ncol, stride = (prim - first_prim) * nket, nket * nq8, parts * warps * nt
        column, buffer = (part * warps + warp) * nt, 0
        if live and column < ncol:
            k = quotient(column, nq8)
            copy_r(r_base, r, (r_row + k) * r_stride, min(slots, nket - k) * r_stride, lane)
        commit_copies()
        wait_all()
        cuda.syncthreads()
        a_address, words_here, words_step = panel + 16 * lane, table + 4 * lane, nq8 * 128
        while column < ncol:
            wait_all()
            cuda.syncwarp()
            r_address = types.int32(r_base + buffer * r_bytes)
            buffer = 1 - buffer
            following = column + stride
            if live and following < ncol:
                k = quotient(following, nq8)
                copy_r(r_base + buffer * r_bytes, r, (r_row + k) * r_stride, min(slots, nket - k) * r_stride, lane)
            commit_copies()
            state = column_state(column, ncol, quotient(column, nq8), nq8, r_stride)
            acc = zeros()
            if live:
                acc = products(acc, a_address, rows8 * 512, words_here, words_step, r_address, state, ends, np8)
            destination = (column * npair + pair) * nab * 8 + lane_q
            store(acc, abq, destination, npair * nab * 8, ncol - column, rows, lane_row)
            column = following

    signature = (F64, i64, I64, i64, I32, I32, F64, i64, i64, i64, F64, i64, i64, F64, i64, i64, i64)
    return Kernel(kernel, (threads, 2), signature)


# launcher


def shared_parts(bra, ket, tile):
    """(ket primitives that a warp's columns touch, bytes of the panel, bytes of all shared memory)."""
    np8, nq8 = blocks_of_8(bra.nherm), blocks_of_8(ket.nherm)
    slots, panel = r_slots(tile.nt, nq8), np8 * tile.rows8 * 512
    return slots, panel, panel + np8 * nq8 * 128 + 16 * tile.warps * slots * r_stride(bra.l + ket.l)


def parts_of(ncol, tile):
    """Blocks that share the columns of one pair: each warp takes about RESIDENT_GROUPS groups."""
    return max(1, ncol // (tile.columns * RESIDENT_GROUPS))


def serves(unit, bra, ket):
    """Whether step 4 of a class runs here: one primitive pair a bra pair, and a panel that fits."""
    tile = bra_tile(unit, bra)
    _, panel, shared = shared_parts(bra, ket, tile)
    small = blocks_of_8(bra.nab) <= tile.rows8 and panel <= RESIDENT_BYTES and shared <= SHARED_BYTES
    return small and unit != "fma" and bra.max_prim <= 1


def resident_variant(unit, bra):
    """Variant of step 4 for a class."""
    tile = bra_tile(unit, bra)
    return Variant(resident_bra_transform, (tile.rows8, tile.nt, tile.warps, unit, tile.turned))


def launch_resident_bra(context, h, ab, cd, r, abq):
    """(ab|q] of a chunk; see `launch_bra_transform`."""
    bra, ket = ab.pairs, cd.pairs
    np8, nq8 = blocks_of_8(bra.nherm), blocks_of_8(ket.nherm)
    tile = bra_tile(context.unit, bra)
    slots, _, shared = shared_parts(bra, ket, tile)
    parts = parts_of(ket.nprim * nq8, tile)
    shells, tables = class_of(bra), (tile.rows8, 1) if tile.turned else (tile.rows8 // 2, 2)
    ends, rows = context.table(level_ends, shells, *tables), context.table(row_table, shells, tile.rows8)
    context.launch(
        resident_variant(context.unit, bra), parts * len(bra), tile.threads, shared,
        h, ab.first_prim, ab.data.start, ab.first, ends, rows, r, r_stride(bra.l + ket.l), slots, ket.nprim,
        context.table(all_words, bra.l, ket.l), np8, nq8, abq, bra.nab, len(bra), parts,
    )  # fmt: skip
