"""Steps 4 and 5 in one kernel, for classes whose (ab|q] would cost more to store than to make.

A warp makes one quartet: `mt` fragments of 16 rows ab, all its cd at once, the blocks of 8 q `nq` at a time:

    left[ab, q] = sum_p H[ab, p] [p|q]          as in `md4.gpu.kernels.two_products`, p over all bra primitives
    acc[ab, cd] += sum_q left[ab, q] H[cd, q]   `left` as it comes out is the left operand

so that neither [p|q] nor (ab|q] leaves the registers. A block of threads keeps H[ab, p] of its bra pair in shared
memory and runs over ket pairs; each warp fetches r of its next primitive quartet while it works on this one. H[cd, q]
comes straight from memory, 16 bytes a lane. Where shared memory does not hold H of all bra primitives, they are taken
in groups, and the integrals of later ones added.
"""

from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, cuda, f64, i32, i64, jit_device
from md4.gpu.emit.fused_products import make_chain
from md4.gpu.emit.instructions import commit_copies, make_empty, make_wait_copies, shared_address
from md4.gpu.emit.tile_products import make_staircase_products
from md4.gpu.gather_words import PADDING, padded_words, words_of
from md4.gpu.kernels.fused_groups import fused_groups
from md4.gpu.kernels.fused_operands import KetSide, Work, make_pairs_of_block, next_pair
from md4.gpu.kernels.fused_results import make_write
from md4.gpu.kernels.groups import (
    HermiteIntegrals,
    Levels,
    Limits,
    PairRange,
    Panel,
    Result,
    levels_of,
    pair_range,
    primitives_of,
    result,
)
from md4.gpu.kernels.ring import make_copy_range
from md4.gpu.r_layout import r_stride_of
from md4.gpu.staircases import mirror_of, reach, row_table
from md4.gpu.tiles import blocks_of_8, panel_rows
from md4.gpu.tuning import FEWEST_BLOCKS, FUSED, SHARED_BYTES, TILES


def following_primitive(k, last, ket, pair, npair):
    """The primitive after `k` in a ket pair up to `last`, or the first of `pair`; -1 at the end (device function)."""
    if k + 1 < last:
        return k + 1
    return ket.start[ket.first + pair] if pair < npair else -1


def fused_transforms(mt, nq, nc, ket_reach, warps, blocks, contracted, unit, matrix=False, limited=False):
    """Kernel factory; `nc` is the number of blocks of 8 cd, `contracted` allows for several bra primitives.

    `ket_reach`: of each of the `nq` blocks of q, how many blocks of 8 cd count. `matrix`: the result is a part of a
    matrix. `limited`: only some quartets count; to ask for them takes registers.
    """
    threads, wide = 32 * warps, unit == "dmma16"
    empty, empty_left, chain = make_empty(4 * mt * nc), make_empty(4 * mt * nq), make_chain(mt, nq, nc, wide, ket_reach)
    products = make_staircase_products(2 * mt, nq, wide, False, ahead=False)
    write = make_write(mt, nc, 0, matrix, number=i64)
    following, primitives = jit_device(following_primitive), jit_device(primitives_of)
    pairs_of, next_of = make_pairs_of_block(limited), jit_device(next_pair)
    state = tuple(np.int32(offset) for j in range(nq) for offset in (128 * j, 0))  # blocks of q in a row, one r
    copy_panel, copy_r, wait_all = make_copy_range(threads), make_copy_range(32), make_wait_copies(0)

    def kernel(
        panel: Panel, bra: PairRange, levels: Levels, r: HermiteIntegrals, words: F64, ket: PairRange, right: KetSide,
        work: Work, limits: Limits, out: Result,
    ):  # fmt: skip
        shared = shared_address(cuda.shared.array(0, f64))
        tid = i64(cuda.threadIdx.x)
        lane, warp = tid & 31, tid >> 5
        pair, part, nket = pairs_of(work, bra, ket, right, limits)
        if limited and part * warps >= nket:
            return
        begin, end = primitives(bra, pair)
        h_doubles, h_bytes = panel.steps * panel.rows8 * 64, panel.steps * panel.rows8 * 512
        table = shared + work.group * h_bytes
        copy_panel(table, words, 0, words.size, tid)
        r_bytes = 8 * r.stride
        r_base = table + 8 * words.size + warp * 2 * r_bytes
        out_stage = shared + 8 * (
            work.group * h_doubles + words.size + warps * 2 * r.stride + warp * work.nab * right.ncd
        )  # fmt: skip
        stride = work.parts * warps
        added, more = False, True
        while more:
            # as many primitives of the bra pair as shared memory holds
            count = min(work.group, end - begin)
            cuda.syncthreads()
            copy_panel(shared, panel.h, begin * h_doubles, count * h_doubles, tid)
            commit_copies()
            wait_all()
            cuda.syncthreads()
            r_row = (begin - bra.first_prim) * r.nket - ket.first_prim  # of ket primitive 0
            fetched, buffer = i64(-1), 0
            pair_cd = part * warps + warp
            if limited:
                pair_cd = next_of(limits, bra.first + pair, ket.first, pair_cd, stride, nket)
            while pair_cd < nket:
                next_cd = pair_cd + stride
                if limited:
                    next_cd = next_of(limits, bra.first + pair, ket.first, next_cd, stride, nket)
                tile = empty()
                first, last = primitives(ket, pair_cd)
                for k in range(first, last if count > 0 else first):
                    first_q = i64(0)
                    while first_q < right.nq8:
                        left, words_address = empty_left(), table + first_q * 128 + 4 * lane
                        h_address = shared + 16 * lane
                        for i in range(count if contracted else 1):
                            row = r_row + i * r.nket + k
                            if fetched != row:
                                copy_r(r_base + buffer * r_bytes, r.numbers, row * r.stride, r.stride, lane)
                                commit_copies()
                            wait_all()
                            cuda.syncwarp()
                            r_address = i32(r_base + buffer * r_bytes)
                            # fetch what comes next: another bra primitive, or the first one with the next ket primitive
                            fetched = row + r.nket
                            if not contracted or i + 1 == count:
                                coming = k
                                if first_q + nq >= right.nq8:
                                    coming = following(k, last, ket, next_cd, nket)
                                fetched = r_row + coming if 0 <= coming < ket.first_prim + r.nket else i64(-1)
                            if fetched != row:
                                buffer = 1 - buffer
                                if fetched >= 0:
                                    copy_r(r_base + buffer * r_bytes, r.numbers, fetched * r.stride, r.stride, lane)
                            commit_copies()
                            left = products(
                                left, h_address, panel.rows8 * 512, words_address, right.nq8 * 128, r_address, state,
                                levels.ends, panel.steps,
                            )  # fmt: skip
                            h_address += h_bytes
                        place = (k * right.nq8 + first_q) * (nc * 64) + 2 * lane
                        tile = chain(tile, left, right.h, place, right.nq8 - first_q)
                        first_q += nq
                first_out = out.first + pair * out.s_ij + pair_cd * out.s_kl
                write(
                    tile, out_stage, 1, levels.rows, lane >> 2, right, work.nab, out, first_out, 0, lane,
                    contracted and added,
                )  # fmt: skip
                cuda.syncwarp()
                pair_cd = next_cd
            begin += work.group
            added, more = True, contracted and begin < end

    return Kernel(kernel, (threads, blocks))


# launcher


@cache
def reach_in_passes(shells, nq):
    """Blocks of 8 rows of a ket that count of each of `nq` blocks of q: the most in any pass over them."""
    found = reach(shells)
    return tuple(int(found[n::nq].max()) for n in range(nq))


@dataclass(frozen=True)
class FusedTile:
    """What a warp does: fragments of 16 rows, q blocks at a time, cd blocks; ket pairs of a group.

    `kets` is 0 if ket pairs are taken one by one, which may be contracted, or whose q may take several passes.
    """

    mt: int
    nq: int
    nc: int
    kets: int

    @property
    def doubles(self):
        """Accumulators of a lane."""
        return 4 * self.mt * (self.nq + self.nc) * max(1, self.kets)


def fused_tile(bra, ket):
    """The tile for a bra and a ket list, or None where it does not fit the registers."""
    contracted, nq8 = bra.max_prim > 1, blocks_of_8(ket.nherm)
    mt, nc = (bra.nab + 15) // 16, blocks_of_8(ket.nab)
    if mt > FUSED.rows or nc > (FUSED.contracted_columns if contracted and mt > 1 else FUSED.columns):
        return None
    most = FUSED.doubles // (4 * mt) - nc
    if most < 1:
        return None
    passes = -(-nq8 // min(most, PADDING))
    tile = FusedTile(mt, -(-nq8 // passes), nc, 0)
    if ket.max_prim > 1 or passes > 1:
        return tile
    for kets in (FUSED.contracted_at_once if contracted else FUSED.at_once)[mt - 1]:
        wider = replace(tile, kets=kets)
        fits = kets == 1 or wider.doubles <= FUSED.group_doubles
        if fits and sum(fused_shared(bra, ket, kets)) <= SHARED_BYTES:
            return wider
    return tile


def fused_blocks(tile, bra, ket):
    """Blocks that share a multiprocessor: more of small tiles, as far as shared memory goes."""
    contracted, (panel, rest) = bra.max_prim > 1, fused_shared(bra, ket, tile.kets)
    if contracted:
        by_registers = 4 if tile.doubles <= 20 else 3 if tile.doubles <= 32 else FUSED.blocks
    elif tile.kets <= 1:
        many = mirror_of(ket.h_class) and sum(reach_in_passes(ket.h_class, tile.nq)) > FUSED.part_products
        by_registers = FUSED.blocks if tile.mt > 1 else 3 if many else 4
    else:
        by_registers = 4 if tile.doubles <= 32 else 3 if tile.doubles <= 48 else FUSED.blocks
    by_memory = 2 * SHARED_BYTES // (rest + (FUSED.panels if contracted else 1) * panel)
    return max(FUSED.blocks, min(by_registers, by_memory))


def choose_fused(unit, bra, ket):
    """The tile of the fused kernel for a bra and a ket list, or None where the two-kernel way serves better."""
    if unit == "fma" or bra.max_prim * ket.max_prim > FUSED.primitives or sum(fused_shared(bra, ket)) > SHARED_BYTES:
        return None
    return fused_tile(bra, ket)


def fused_shared(bra, ket, kets=1):
    """Bytes of shared memory: of the panel of one bra primitive, and of all else that a block has."""
    np8, nq8 = blocks_of_8(bra.nherm), blocks_of_8(ket.nherm)
    panel, table = np8 * panel_rows(bra.nab) * 512, (np8 * nq8 + PADDING) * 128
    return panel, table + TILES.warps * max(1, kets) * (16 * r_stride_of(bra, ket) + 8 * bra.nab * ket.nab)


def fused_variant(unit, bra, ket, matrix, limited):
    """Variant for a class that `choose_fused` has a tile for."""
    tile = choose_fused(unit, bra, ket)
    return tile_variant(unit, bra, ket, tile, fused_blocks(tile, bra, ket), matrix, limited)


def tile_variant(unit, bra, ket, tile, blocks, matrix, limited):
    """Variant for a class, its tile and the blocks that share a multiprocessor."""
    facts = tile.mt, tile.nq, tile.nc, reach_in_passes(ket.h_class, tile.nq), TILES.warps, blocks
    facts, target = (*facts, bra.max_prim > 1, unit), (matrix, limited) if matrix or limited else ()
    if tile.kets:
        ahead = 2 * tile.kets * sum(facts[3]) <= FUSED.ahead_doubles
        return Variant(fused_groups, (*facts, tile.kets, ahead, *target))
    return Variant(fused_transforms, (*facts, *target))


def fused_parts(nbra, nket, kets, contracted):
    """Blocks that share the ket pairs of a bra pair: a warp takes several, unless that leaves too few blocks.

    `kets` are those of a group, as of `FusedTile`.
    """
    most = -(-nket // (TILES.warps * max(1, kets)))
    groups = FUSED.contracted_groups if contracted else FUSED.groups
    return min(most, max(1, nket // (TILES.warps * max(FUSED.kets, groups * kets)), FEWEST_BLOCKS // nbra))


def fused_launcher(context, bra, ket, matrix, limited):
    """The function by which `launch_fused` launches for two `ListFacts`."""
    tile = choose_fused(context.unit, bra, ket)
    panel, rest = fused_shared(bra, ket, tile.kets)
    blocks = fused_blocks(tile, bra, ket)
    group = max(1, min(bra.max_prim, (2 * SHARED_BYTES // blocks - rest) // panel))
    variant, threads = tile_variant(context.unit, bra, ket, tile, blocks, matrix, limited), 32 * TILES.warps
    shared, nab, ncd, stride = group * panel + rest, bra.nab, ket.nab, r_stride_of(bra, ket)
    rows8, steps, nq8 = panel_rows(nab), blocks_of_8(bra.nherm), blocks_of_8(ket.nherm)
    levels, words = levels_of(context, bra, rows8, False), context.table(padded_words, *words_of(bra, ket))
    ket_rows = context.table(row_table, ket.h_class, blocks_of_8(ncd))

    def launch(context, h, r, g, ab, cd, block):
        nbra, nket = ab.npair, cd.npair
        parts = fused_parts(nbra, nket, tile.kets, bra.max_prim > 1)
        context.launch(
            variant, nbra * parts, threads, shared,
            (h, rows8, steps), pair_range(ab), levels, (r, stride, cd.nprim), words, pair_range(cd),
            (g, ket_rows, nq8, ncd, nket), (nab, group, parts), block.limits, result(block),
        )  # fmt: skip

    return launch


def launch_fused(context, h, r, g, ab, cd, block):
    """(ab|cd) of a chunk into `block`; `h` bra panels, `g` right operands of the ket list, `r` of the chunk."""
    limited = block.limits[0].size > 0
    context.fixed(fused_launcher, ab.facts, cd.facts, block.matrix, limited)(context, h, r, g, ab, cd, block)
