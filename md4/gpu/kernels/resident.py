"""Step 4 on FP64 tensor cores with the panel of H resident in shared memory, for classes of middle size.

The product is that of `md4.gpu.kernels.two_products`, with the same operands and result. A panel of one primitive pair
that fits shared memory as a whole is fetched once; the warps of a block then run over groups of columns on their own,
with no barrier between them, and each fetches r of its next group while it works on this one.
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
from md4.gpu.tuning import RESIDENT, SHARED_BYTES

# The highest bit of an int32, which becomes those of all further ones when it is shifted to the right.
FURTHER = -(1 << 31)


def make_counted_groups(nt):
    """Device function: which of a warp's groups of `nt` columns count with bra pair `ij`, a bit each.

    The groups begin with column, column + step, ... below `ncol`; columns are blocks of 8 q of the chunk's ket
    primitives, `nq8` of each. All groups beyond the first 31 are said to count.
    """
    counts = jit_device(survives)

    @jit_device
    def counted_groups(ket, limits, ij, column, step, ncol, nq8, lane):
        if limits.counts.size == 0:
            return i32(-1)
        own, found = column + lane * step, False
        if own < ncol:
            kl = ket.owner[ket.first + quotient(own, nq8)]
            last = ket.owner[ket.first + quotient(min(own + nt, ncol) - 1, nq8)]
            while kl <= last and not found:
                found = counts(limits, ij, kl)
                kl += 1
        return i32(i32(cuda.ballot_sync(-1, found)) | FURTHER)

    return counted_groups


def resident_bra_transform(rows8, nt, warps, unit, turned):
    """Kernel factory for step 4, one primitive pair a bra pair at most."""
    threads = 32 * warps
    products = make_staircase_products(rows8, nt, unit == "dmma16", turned, ahead=True)
    empty, store = make_empty(2 * rows8 * nt), make_store_panels(rows8, nt, turned)
    column_state = make_column_state(nt, False)
    copy_panel, copy_r, wait_all = make_copy_range(threads), make_copy_range(32), make_wait_copies(0)
    clear, primitives, lane_place = map(jit_device, (clear_end, primitives_of, Lane(rows8, nt, turned).place()))
    counted_groups = make_counted_groups(nt)

    def kernel(
        panel: Panel, bra: PairRange, levels: Levels, r: HermiteIntegrals, kets: i64, words: F64, abq: HalfTransformed,
        ket: KetOwners, limits: Limits, parts: i64,
    ):  # fmt: skip
        # a warp has room for r of `kets` ket primitives; `parts` blocks share the columns of a bra pair
        clear(abq.numbers)
        shared = shared_address(cuda.shared.array(0, f64))
        tid = i64(cuda.threadIdx.x)
        lane, warp = tid & 31, tid >> 5
        pair, part = i64(cuda.blockIdx.x) // parts, i64(cuda.blockIdx.x) % parts
        prim, last = primitives(bra, pair)
        live, doubles = last > prim, panel.steps * (rows8 * 64)
        table = shared + 8 * doubles
        lane_row, lane_q = lane_place(lane)
        if live:
            copy_panel(shared, panel.h, prim * doubles, doubles, tid)
        copy_panel(table, words, 0, words.size, tid)
        r_bytes = kets * r.stride * 8
        r_base = table + 8 * words.size + warp * 2 * r_bytes
        r_row, ncol, stride = (prim - bra.first_prim) * r.nket, r.nket * abq.nq8, parts * warps * nt
        column, buffer = (part * warps + warp) * nt, 0
        counted = counted_groups(ket, limits, bra.first + pair, column, stride, ncol, abq.nq8, lane)
        if live and column < ncol:
            k = quotient(column, abq.nq8)
            copy_r(r_base, r.numbers, (r_row + k) * r.stride, min(kets, r.nket - k) * r.stride, lane)
        commit_copies()
        wait_all()
        cuda.syncthreads()
        h_address, words_address, words_step = shared + 16 * lane, table + 4 * lane, abq.nq8 * 128
        while column < ncol:
            wait_all()
            cuda.syncwarp()
            r_address = i32(r_base + buffer * r_bytes)
            buffer = 1 - buffer
            following = column + stride
            if live and following < ncol:
                k = quotient(following, abq.nq8)
                next_r = r_base + buffer * r_bytes
                copy_r(next_r, r.numbers, (r_row + k) * r.stride, min(kets, r.nket - k) * r.stride, lane)
            commit_copies()
            many, tile = i64(0), empty()
            if counted & 1:
                many = ncol - column
                if live:
                    state = column_state(column, ncol, quotient(column, abq.nq8), abq.nq8, r.stride)
                    tile = products(
                        tile, h_address, rows8 * 512, words_address, words_step, r_address, state, levels.ends,
                        panel.steps,
                    )  # fmt: skip
            destination = (column * abq.npair + pair) * abq.nab * 8 + lane_q
            store(tile, abq.numbers, destination, abq.npair * abq.nab * 8, many, levels.rows, lane_row)
            column, counted = following, i32(counted >> 1)

    return Kernel(kernel, (threads, 2))


# launcher


def shared_parts(bra, ket, tile):
    """(ket primitives that a warp's columns touch, bytes of the panel, bytes of all shared memory)."""
    np8, nq8 = blocks_of_8(bra.nherm), blocks_of_8(ket.nherm)
    kets, panel = ket_primitives_of(tile.nt, nq8), np8 * tile.rows8 * 512
    return kets, panel, panel + np8 * nq8 * 128 + 16 * tile.warps * kets * r_stride_of(bra, ket)


def parts_of(ncol, tile):
    """Blocks that share the columns of one pair: each warp takes about `RESIDENT.groups` groups."""
    return max(1, ncol // (tile.columns * RESIDENT.groups))


def serves(unit, bra, ket):
    """Whether step 4 of a class runs here: one primitive pair a bra pair, and a panel that fits."""
    tile = bra_tile(unit, bra)
    _, panel, shared = shared_parts(bra, ket, tile)
    small = blocks_of_8(bra.nab) <= tile.rows8 and panel <= RESIDENT.panel_bytes and shared <= SHARED_BYTES
    return small and unit != "fma" and bra.max_prim <= 1


def resident_variant(unit, bra):
    """Variant of step 4 for a class."""
    tile = bra_tile(unit, bra)
    return Variant(resident_bra_transform, (tile.rows8, tile.nt, tile.warps, unit, tile.turned))


def resident_launcher(context, bra, ket):
    """The function by which `launch_resident_bra` launches for two `ListFacts`."""
    unit, tile, nab, nq8 = context.unit, bra_tile(context.unit, bra), bra.nab, blocks_of_8(ket.nherm)
    kets, _, shared = shared_parts(bra, ket, tile)
    variant, threads, stride = resident_variant(unit, bra), tile.threads, r_stride_of(bra, ket)
    rows8, steps, levels = tile.rows8, blocks_of_8(bra.nherm), levels_of(context, bra, tile.rows8, tile.turned)
    words = context.table(all_words, *words_of(bra, ket))

    def launch(context, h, ab, cd, r, abq, limits):
        npair, nket = ab.npair, cd.nprim
        parts = parts_of(nket * nq8, tile)
        context.launch(
            variant, parts * npair, threads, shared,
            (h, rows8, steps), pair_range(ab), levels, (r, stride, nket), kets, words, (abq, nq8, npair, nab),
            (cd.data.owner, cd.first_prim), limits, parts,
        )  # fmt: skip

    return launch
