"""Step 4 on FP64 tensor cores for contracted bras, whose functions ab one tile of a warp holds.

The product is that of `md4.gpu.kernels.two_products`, with the same operands and result. For few functions ab, one
primitive pair is little work, which must not wait for copies and barriers. So the words that say where [p|q] is in r
come to shared memory once, for all primitive pairs of a bra pair. H and r of a primitive pair come as a whole, a
primitive pair or more ahead, and a block of threads has one barrier for each of them.
"""

from dataclasses import replace

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, cuda, f64, i32, i64, jit_device
from md4.gpu.emit.instructions import commit_copies, make_empty, make_wait_copies, shared_address
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
)
from md4.gpu.kernels.ring import make_copy_range
from md4.gpu.kernels.two_products import KetOwners, bra_tile, clear_end, make_any_primitive
from md4.gpu.r_layout import r_stride_of
from md4.gpu.tiles import blocks_of_8
from md4.gpu.tuning import CONTRACTED, SHARED_BYTES


def contracted_bra_transform(rows8, nt, warps, stages, blocks, ahead, unit, turned):
    """Kernel factory for step 4, several primitive pairs a bra pair.

    There is room for H and r of `stages` primitive pairs; `ahead`: [p|q] is gathered a step of 8 p ahead.
    """
    threads, columns = 32 * warps, nt * warps
    products = make_staircase_products(rows8, nt, unit == "dmma16", turned, ahead)
    empty, store = make_empty(2 * rows8 * nt), make_store_panels(rows8, nt, turned)
    column_state, needed = make_column_state(nt, False), make_any_primitive()
    copy, wait = make_copy_range(threads), make_wait_copies(stages - 2)
    clear, primitives, lane_place = map(jit_device, (clear_end, primitives_of, Lane(rows8, nt, turned).place()))

    def kernel(
        panel: Panel, bra: PairRange, levels: Levels, r: HermiteIntegrals, words: F64, abq: HalfTransformed,
        ket: KetOwners, limits: Limits, column_blocks: i64,
    ):  # fmt: skip
        clear(abq.numbers)
        shared = shared_address(cuda.shared.array(0, f64))
        tid = i64(cuda.threadIdx.x)
        lane, warp = tid & 31, tid >> 5
        pair, column_block = i64(cuda.blockIdx.x) // column_blocks, i64(cuda.blockIdx.x) % column_blocks
        # r of the ket primitives that the block's columns touch
        first_column, ncol = column_block * columns, r.nket * abq.nq8
        first_ket = first_column // abq.nq8
        last_ket = (min(first_column + columns, ncol) - 1) // abq.nq8
        if not needed(ket, limits, bra.first + pair, first_ket, last_ket):
            return
        first, last = primitives(bra, pair)
        r_count = (last_ket - first_ket + 1) * r.stride
        h_count, r_step = panel.steps * (rows8 * 64), r.nket * r.stride
        place, stage_bytes = shared + 8 * words.size, 8 * (h_count + r_count)
        h, source = first * h_count, ((first - bra.first_prim) * r.nket + first_ket) * r.stride
        copy(shared, words, 0, words.size, tid)
        for n in range(stages - 1):
            if first + n < last:
                copy(place + n * stage_bytes, panel.h, h, h_count, tid)
                copy(place + n * stage_bytes + 8 * h_count, r.numbers, source, r_count, tid)
            commit_copies()
            h += h_count
            source += r_step
        column = first_column + warp * nt
        state = column_state(column, ncol, first_ket, abq.nq8, r.stride)
        tile, slot, words_address, words_step = empty(), 0, shared + 4 * lane, abq.nq8 * 128
        for n in range(first, last):
            wait()
            cuda.syncthreads()
            if n + stages - 1 < last:
                free = place + (slot + stages - 1 if slot == 0 else slot - 1) * stage_bytes
                copy(free, panel.h, h, h_count, tid)
                copy(free + 8 * h_count, r.numbers, source, r_count, tid)
                h += h_count
                source += r_step
            commit_copies()
            here = place + slot * stage_bytes
            tile = products(
                tile, i32(here + 16 * lane), rows8 * 512, i32(words_address), words_step, i32(here + 8 * h_count),
                state, levels.ends, panel.steps,
            )  # fmt: skip
            slot = slot + 1 if slot + 1 < stages else 0
        lane_row, lane_q = lane_place(lane)
        destination = (column * abq.npair + pair) * abq.nab * 8 + lane_q
        store(tile, abq.numbers, destination, abq.npair * abq.nab * 8, ncol - column, levels.rows, lane_row)

    return Kernel(kernel, (threads, blocks))


# launcher


def contracted_tile(unit, bra):
    """The tile of a class: that of `two_products.bra_tile`, whose form of H it reads, with columns of its own."""
    tile = bra_tile(unit, bra)
    n = min(tile.rows8, len(CONTRACTED.columns)) - 1
    return replace(tile, nt=CONTRACTED.columns[n], stages=CONTRACTED.stages[n])


def shared_bytes(bra, ket, tile):
    """Bytes of shared memory of a block."""
    np8, nq8 = blocks_of_8(bra.nherm), blocks_of_8(ket.nherm)
    r = 8 * r_stride_of(bra, ket) * ket_primitives_of(tile.columns, nq8)
    return np8 * nq8 * 128 + tile.stages * (np8 * tile.rows8 * 512 + r)


def serves(unit, bra, ket):
    """Whether step 4 of a class runs here: contracted bra pairs of few functions, and operands that fit."""
    if unit == "fma" or bra.max_prim <= 1 or blocks_of_8(bra.nab) > min(bra_tile(unit, bra).rows8, CONTRACTED.rows):
        return False
    return shared_bytes(bra, ket, contracted_tile(unit, bra)) <= SHARED_BYTES


def contracted_variant(unit, bra):
    """Variant of step 4 for a class."""
    tile = contracted_tile(unit, bra)
    blocks = CONTRACTED.blocks[tile.rows8 - 1]
    ahead = CONTRACTED.ahead[tile.rows8 - 1]
    facts = tile.rows8, tile.nt, tile.warps, tile.stages, blocks, ahead, unit, tile.turned
    return Variant(contracted_bra_transform, facts)


def contracted_launcher(context, bra, ket):
    """The function by which step 4 is launched for two `ListFacts`."""
    unit, nab, nq8 = context.unit, bra.nab, blocks_of_8(ket.nherm)
    tile, variant, stride = contracted_tile(unit, bra), contracted_variant(unit, bra), r_stride_of(bra, ket)
    shared, threads, columns = shared_bytes(bra, ket, tile), tile.threads, tile.columns
    rows8, steps, levels = tile.rows8, blocks_of_8(bra.nherm), levels_of(context, bra, tile.rows8, tile.turned)
    words = context.table(all_words, *words_of(bra, ket))

    def launch(context, h, ab, cd, r, abq, limits):
        npair, nket = ab.npair, cd.nprim
        column_blocks = -(-nket * nq8 // columns)
        context.launch(
            variant, column_blocks * npair, threads, shared,
            (h, rows8, steps), pair_range(ab), levels, (r, stride, nket), words, (abq, nq8, npair, nab),
            (cd.data.owner, cd.first_prim), limits, column_blocks,
        )  # fmt: skip

    return launch
